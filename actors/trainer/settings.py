"""The trainer's settings: one frozen value that travels to every rank.

`service` fills it from the one configuration tree; the mathematics never sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from actors.trainer.critic_settings import CriticTraining
from actors.trainer.loss.settings import LossSettings


class Device(StrEnum):
    """Where the ranks run: gloo on CPU, NCCL on CUDA."""

    CPU = "cpu"
    CUDA = "cuda"


class ParamDtype(StrEnum):
    """What forward and backward compute in; master weights and reductions are float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class WeightTransport(StrEnum):
    """How published weights reach the engines.

    object_store: packed groups over the weight board; everywhere. nccl, ipc: vLLM's own engines,
    for engines on other GPUs and on the trainer's own.
    """

    OBJECT_STORE = "object_store"
    NCCL = "nccl"
    IPC = "ipc"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """What a trainer group needs to know.

    model: directory or hub name of a Hugging Face causal model.
    checkpoint_dir: where checkpoints and the inputs of skipped updates go; seen by every rank.
    weight_transport: how published weights travel; nccl and ipc need CUDA.
    learning_rate: after warm-up, which is linear over `warmup_steps` optimiser updates.
    max_grad_norm: global L2 norm that gradients are clipped to.
    loss: which loss is trained.
    reference_model: directory or hub name; None: the model that training starts from. Loaded only
        where the loss or the rewards have a KL term.
    scores_reference: the rewards have one, so that rows are scored before they are trained.
    critic: how a value model is trained; None: there is none. critic_model: what it begins as,
        directory or hub name; None: the model that training starts from.
    temperature: the run's one sampling temperature, > 0.
    epochs: passes over a step's minibatches.
    max_policy_age: versions; older tokens are refused. None: not asserted.
    keep_checkpoints: how many of the newest stay; at least 2, because the caller commits to one
        only after it was written.
    logprob_chunk: loss positions whose logits are alive at once.
    shard_between_micro_batches: free the gathered weights and share out the gradients after every
        micro-batch: less memory, more communication. False: once an update.
    threads_per_rank: torch threads of each rank on CPU.
    collective_timeout_s: seconds after which a collective gives its peers up.
    """

    model: str
    checkpoint_dir: Path
    num_ranks: int = 2
    device: Device = Device.CPU
    param_dtype: ParamDtype = ParamDtype.FLOAT32
    weight_transport: WeightTransport = WeightTransport.OBJECT_STORE
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    loss: LossSettings = field(default_factory=LossSettings)
    reference_model: str | None = None
    scores_reference: bool = False
    critic: CriticTraining | None = None
    critic_model: str | None = None
    temperature: float = 1.0
    epochs: int = 1
    max_policy_age: int | None = None
    seed: int = 0
    threads_per_rank: int = 1
    keep_checkpoints: int = 2
    gradient_checkpointing: bool = False
    logprob_chunk: int = 256
    shard_between_micro_batches: bool = False
    collective_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        at_least_one = {
            "num_ranks": self.num_ranks,
            "epochs": self.epochs,
            "threads_per_rank": self.threads_per_rank,
            "logprob_chunk": self.logprob_chunk,
        }
        for name, count in at_least_one.items():
            if count < 1:
                raise ValueError(f"trainer.{name}: got {count}, expected at least 1")
        if self.keep_checkpoints < 2:
            raise ValueError(
                f"trainer.keep_checkpoints: got {self.keep_checkpoints}, expected at least 2; the "
                "one before must outlive a crash between writing and committing"
            )
        above_zero = {
            "learning_rate": self.learning_rate,
            "max_grad_norm": self.max_grad_norm,
            "temperature": self.temperature,
            "eps": self.eps,
            "collective_timeout_s": self.collective_timeout_s,
        }
        for name, number in above_zero.items():
            if not number > 0:
                raise ValueError(f"trainer.{name}: got {number}, expected more than 0")
        needs_cuda = self.weight_transport is not WeightTransport.OBJECT_STORE
        if needs_cuda and self.device is not Device.CUDA:
            raise ValueError(
                f"trainer.weight_transport: got {self.weight_transport.value} on "
                f"{self.device.value}, expected object_store there"
            )

    @property
    def needs_reference(self) -> bool:
        return self.scores_reference or self.loss.needs_reference
