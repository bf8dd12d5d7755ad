"""The trainer's settings: its part of the configuration, and the settings that every rank gets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le, MinLen

from actors.algorithm import AlgorithmSettings, ScheduleSettings
from actors.limits import (
    STRICT,
    Decay,
    Fraction,
    ModelName,
    Natural,
    NotNegative,
    Positive,
    Rate,
    Seconds,
)
from actors.types import Dtype

LOGPROB_CHUNK = 256
# transformers adds the adapter of this file to a model, whether the weights contain it or not.
ADAPTER = "adapter_config.json"
ADAPTER_REFUSED = (
    "got the settings of an adapter beside a whole model, to whose weights transformers would add "
    "the adapter; expected only the model's own files; remove the file and the adapter's weights "
    "if the model contains the adapter already, otherwise merge it first (merge_and_unload of peft)"
)
Device = Literal["cpu", "cuda"]
"""The device of the ranks: with gloo on CPU, with NCCL on CUDA."""
WeightBackend = Literal["object_store", "collective"]
"""The transport of published weights to the engines.

object_store: Ray's object store transfers them and keeps the current ones. collective: the
trainer's rank 0 broadcasts them, by gloo on CPU and by NCCL between GPUs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters (LoRA): the model's weights stay frozen, and only adapters are trained.

    A linear layer computes W x + alpha / rank * B A x. The learning rate is usually about ten times
    the rate for training all weights.
    """

    __pydantic_config__ = STRICT

    rank: Positive = 16
    """Rank of every adapter: the number of rows of A and of columns of B."""
    alpha: Rate = 32.0
    """The adapters' outputs are multiplied by alpha / rank."""
    targets: Annotated[tuple[ModelName, ...], MinLen(1)] | None = None
    """Names of the linear layers with adapters, such as [q_proj, v_proj]; null: all linear layers
    of attention and of the MLP, but no router."""
    dropout: Annotated[float, Ge(0), Le(0)] = 0.0
    """Dropout of the adapters; only 0, because with dropout the trainer would compute other
    log-probabilities than the engines."""
    publish_merged: bool = False
    """Whether the engines receive whole weights W + alpha / rank * B A instead of the adapters: for
    models whose adapters vLLM cannot serve. With model.dtype bfloat16, rounding the sum loses small
    changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The settings of ranks, optimiser and packing."""

    __pydantic_config__ = STRICT

    num_ranks: Positive = 2
    """Number of FSDP ranks, one process each."""
    device: Device = "cpu"
    """Device that the ranks run on."""
    dtype: Dtype = Dtype.FLOAT32
    """Type of forward and backward computations; weights and optimiser state stay float32."""
    learning_rate: Fraction = 1e-3
    """AdamW's learning rate after the warm-up; 0 keeps the weights unchanged, as a control."""
    warmup_updates: Natural = 5
    """Number of optimiser updates over which the learning rate grows linearly."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    lora: LoraSettings | None = None
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    adam_epsilon: Rate = 1e-8
    """AdamW's epsilon; raise it if gradients become very small."""
    weight_decay: NotNegative = 0.0
    """AdamW's weight decay."""
    moments_on_host: bool = False
    """Keep AdamW's moments, 8 bytes for each trained parameter, in the memory of the machine and
    not of the GPU; each update copies them to the GPU and back. Without effect on CPU."""
    compile: bool = False
    """Compile each decoder layer with torch.compile: the first steps take minutes longer, and the
    losses differ by rounding. On CPU it needs a C++ compiler."""
    max_grad_norm: Rate = 1.0
    """Global norm to which gradients are clipped."""
    tokens_per_micro_batch: Positive = 4096
    """Largest number of tokens of one packed row, after sharing prefixes; a longer trajectory gets
    a row of its own.
    """
    share_prefixes: bool = True
    """Compute only once a prefix that several samples of a row share; false: compute each sample
    separately, for comparisons.
    """
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more compute."""
    reshard_between_micro_batches: bool = False
    """Free gathered weights and reduce gradients after each micro-batch instead of once per update:
    less memory on each rank, also with one rank, and more communication."""
    threads: Positive = 1
    """Number of CPU threads of each rank."""
    gpus_per_rank: NotNegative = 0.0
    """GPUs that Ray reserves for each rank; a fraction if engines share the GPU; 0 on CPU."""
    max_skipped_steps: Positive = 10
    """Number of consecutive steps without a finite update, or without a trajectory that could be
    merged, after which the run ends."""
    step_deadline_s: Seconds = 600
    """Longest time of a training step, in seconds, after which the ranks count as lost."""
    logprob_check_tokens: Natural | None = None
    """Number of tokens of the text that trainer and engines score before the first step, at most
    the context; null: 4,096 on CPU, the whole context on a GPU; 0: a text of 17 fixed tokens, whose
    scores never prevent a start.
    """
    logprob_check_every: Natural = 20
    """Interval, in publications, at which the whole text of `logprob_check_tokens` is scored again
    instead of only its last 1,024 tokens; 0: never."""
    logprob_check_failures: Natural = 3
    """The run ends after this number of consecutive publications at which trainer and engines
    differ by more than rounding; 0: never.
    """
    max_replay_mib: Natural = 4096
    """Largest size, in MiB, of the batches that Ray's object store keeps of the steps after the
    newest checkpoint. Replaced ranks repeat these steps. If their batches are larger, the loss of a
    rank sends the run back to the checkpoint.
    """

    @property
    def lora_shape(self) -> LoraSettings | None:
        """Return the LoRA settings that a resumed run must not change; None without LoRA.

        A resumed run may change `publish_merged`. The result always has False there, so that two
        results can be compared.
        """
        return self.lora and replace(self.lora, publish_merged=False)

    @property
    def published_lora(self) -> LoraSettings | None:
        """Return the settings of published adapters; None if whole weights are published."""
        return None if self.lora is None or self.lora.publish_merged else self.lora


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The settings that every rank receives."""

    trainer: TrainerSettings
    algorithm: AlgorithmSettings
    model: str
    """Directory or hub name of a Hugging Face causal model."""
    checkpoint_dir: Path
    """The directory of checkpoints and of the inputs of skipped updates; visible to every rank."""
    weight_backend: WeightBackend
    """The transport of published weights."""
    seed: int
    chat_template: str | None = None
    """The run's chat template, which checkpoints record for their export: Jinja text, or the word
    "none" for raw prompts. None means the tokenizer's own template."""
    max_context_tokens: int | None = None
    """The engines' longest context, in tokens, which selects the table of some kinds of RoPE.
    None means the number of the model's positions."""
    logprob_chunk: int = LOGPROB_CHUNK
    """Number of trained tokens whose logits are in memory at a time."""
    collective_timeout_s: float = 120.0
    """Longest time that a collective operation of the ranks may take, in seconds."""
