"""The trainer's settings: its leaf of the configuration, and what travels to every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from actors.algorithm import AlgorithmSettings, ScheduleSettings
from actors.limits import STRICT, Decay, Natural, NotNegative, Positive, Rate, Seconds
from actors.types import Dtype

LOGPROB_CHUNK = 256


class Device(StrEnum):
    """The device of the ranks: with gloo on CPU, with NCCL on CUDA."""

    CPU = "cpu"
    CUDA = "cuda"


class WeightBackend(StrEnum):
    """The transport of published weights to the engines.

    object_store: Ray's object store carries them and keeps the current ones. collective: the
    trainer's rank 0 broadcasts them, by gloo on CPU and by NCCL between GPUs.
    """

    OBJECT_STORE = "object_store"
    COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Ranks, optimiser and packing."""

    __pydantic_config__ = STRICT

    num_ranks: Positive = 2
    """FSDP ranks, one process each."""
    device: Device = Device.CPU
    """Where the ranks run."""
    dtype: Dtype = Dtype.FLOAT32
    """What forward and backward compute in; weights and optimiser stay float32."""
    learning_rate: NotNegative = 1e-3
    """AdamW's learning rate after the warm-up; 0: nothing is learnt, for a control."""
    warmup_updates: Natural = 5
    """Optimiser updates of linear warm-up."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    adam_epsilon: Rate = 1e-8
    """AdamW's epsilon; raise it where gradients fade away."""
    weight_decay: NotNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Rate = 1.0
    """Gradients are clipped to this norm."""
    tokens_per_micro_batch: Positive = 4096
    """Budget of one packed row, counted after sharing; what is longer gets a row of its own."""
    share_prefixes: bool = True
    """Compute what the samples of a row begin with in common once; false: each by itself, for a
    comparison."""
    gradient_checkpointing: bool = False
    """Less memory, a third more compute."""
    threads: Positive = 1
    """CPU threads of one rank."""
    gpus_per_rank: NotNegative = 0.0
    """GPUs that Ray reserves for one rank; a fraction where engines share the GPU; 0 on CPU."""
    max_skipped_steps: Positive = 10
    """Steps in a row without a finite update, or without any trajectory that could be merged, that
    end the run."""
    step_deadline_s: Seconds = 600
    """Seconds of one training step, after which the ranks count as lost."""
    logprob_check_tokens: Natural | None = None
    """Tokens of the text that trainer and engines score before the first step, at most the context;
    null: 4,096 on CPU, the whole context on a GPU; 0: 17 fixed tokens, which refuse no start."""
    logprob_check_every: Natural = 20
    """After every so many publications all of that text is scored, and not only its last 1,024
    tokens; 0: never."""
    logprob_check_failures: Natural = 3
    """End the run after this many publications in a row at which trainer and engines differ by more
    than rounding; 0: never."""
    max_replay_mib: Natural = 4096
    """MiB of batches, of steps that no checkpoint holds yet, kept for ranks that are replaced; with
    more, the loss of a rank sends the run back to the checkpoint. Ray's object store has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The settings that every rank receives."""

    trainer: TrainerSettings
    algorithm: AlgorithmSettings
    model: str
    """Directory or hub name of a Hugging Face causal model."""
    checkpoint_dir: Path
    """Where checkpoints and the inputs of skipped updates go; seen by every rank."""
    weight_backend: WeightBackend
    """How published weights travel."""
    seed: int
    chat_template: str | None = None
    """The run's chat template, which checkpoints record for their export: Jinja text, or the word
    "none" for raw prompts. None means the tokenizer's own template."""
    max_context_tokens: int | None = None
    """The engines' longest context, in tokens. It selects the table of a RoPE that depends on it.
    None means as many positions as the model has."""
    logprob_chunk: int = LOGPROB_CHUNK
    """Loss positions whose logits are alive at once."""
    shard_between_micro_batches: bool = False
    """Free the gathered weights and share out the gradients after every micro-batch: less memory,
    more communication. False: once an update."""
    collective_timeout_s: float = 120.0
    """Seconds after which a collective gives its peers up."""
