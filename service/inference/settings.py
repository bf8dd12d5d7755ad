"""The settings of the vLLM engines: the configuration's section, and the settings of a replica.

This is plain data, which the deployment passes to every replica; the module does not import Ray,
vLLM or torch. Values that the engine derives from the model, such as the vocabulary, are not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.limits import GIB, STRICT, NotNegative, Positive, Rate, Seconds, Share
from actors.network import LOOPBACK, gloo_interface
from actors.trainer.settings import LoraSettings, WeightBackend
from actors.types import Dtype
from service.inference.engine_args import QUANTISING

# Special values of the settings that name one of vLLM's parsers.
AUTO, NONE = "auto", "none"
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM can reserve an adapter; a smaller adapter is padded to one of them."""
CPU_BLOCK_TOKENS = 32
"""The smallest block that vLLM's attention accepts on CPU; it also accepts the multiples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSettings:
    """The engines and their resources."""

    __pydantic_config__ = STRICT

    num_replicas: Positive = 1
    """Number of engines, each a replica of one deployment."""
    weight_backend: WeightBackend = "object_store"
    """Transport of published weights to the engines."""
    max_num_seqs: Positive = 128
    """Largest number of sequences that an engine runs at a time."""
    kv_cache_gib: Rate = 1.0
    """Size of an engine's key-value cache on CPU, in GiB."""
    block_tokens: Positive | None = None
    """Number of tokens of a cache block, the unit in which prefixes are shared; null: 32 on CPU,
    and vLLM's default on a GPU."""
    gpu_memory_fraction: Share = 0.9
    """Share of a GPU's memory that one engine uses."""
    tensor_parallel_size: Positive = 1
    """Number of GPUs of one engine."""
    enforce_eager: bool = False
    """Whether the engine skips compilation: it starts sooner and runs slower."""
    gpus_per_replica: NotNegative = 0.0
    """GPUs that Ray reserves for one engine; a fraction shares a GPU; if 0, the engine runs on CPU.
    """
    cpus_per_replica: NotNegative = 1.0
    """CPUs that Ray reserves for one engine."""
    threads: Positive = 1
    """Number of CPU threads of one engine."""
    tool_parser: str = AUTO
    """Parser of tool calls in replies: one of vLLM's names, auto (by the chat template), or none.
    """
    reasoning_parser: str = AUTO
    """Parser of thinking in replies: one of vLLM's names, auto (by the chat template), or none."""
    publish_deadline_s: Seconds = 120
    """Time in seconds without progress after which an engine that loads a version is replaced; also
    the time for which /readyz allows an engine to lack the current version."""
    start_deadline_s: Seconds = 600
    """Time in seconds without progress of any engine's start or load after which a term ends."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, by their names there (docs/engine-args.md)."""

    @property
    def is_on_cpu(self) -> bool:
        return self.gpus_per_replica == 0

    @property
    def block_size(self) -> int | None:
        """Return the number of tokens in a block of the key-value cache; None for vLLM's default.

        On CPU this is never None. vLLM's default on CPU is 128 tokens, which is too many: turns of
        a short conversation would share no block.
        """
        return self.block_tokens or (CPU_BLOCK_TOKENS if self.is_on_cpu else None)

    @property
    def is_quantised(self) -> bool:
        """Whether the engine holds weights or cache with fewer bits than model.dtype."""
        return any(self.engine_args.get(name) not in (None, "auto") for name in QUANTISING)

    @property
    def names_parser(self) -> bool:
        """Whether tool_parser or reasoning_parser is the name of a parser that vLLM must have.

        The values auto and none are not names of parsers.
        """
        return not {self.tool_parser, self.reasoning_parser} <= {AUTO, NONE}

    @property
    def kv_cache_bytes(self) -> int | None:
        """Return the size of the key-value cache in bytes; None on a GPU.

        On a GPU, gpu_memory_fraction determines the size.
        """
        return int(self.kv_cache_gib * GIB) if self.is_on_cpu else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings with which each replica starts its engine; equal for all replicas of a run."""

    inference: InferenceSettings
    model: str
    """Directory or hub name of a model in Hugging Face format."""
    dtype: Dtype
    max_context_tokens: int
    """Largest number of prompt and sampled tokens together."""
    chat_template: str | None
    """Chat template of the run, which determines how replies are parsed; None for the tokenizer's.
    """
    stop_token_ids: tuple[int, ...]
    """Ids of tokens after which sampling ends; the reply includes them."""
    reads_text: bool
    """Whether the engine loads a tokenizer; stop strings and structured outputs need one."""
    resets_prefix_cache: bool
    """Whether each publication resets the prefix cache, so that no cached block outlives its
    version (synchronous training)."""
    seed: int
    """Seed of the engine's sampler."""
    lora: LoraSettings | None = None
    """The settings of the adapter that publications have; None if they have whole weights."""
    max_ongoing_requests: int = 4096
    """Largest number of calls of `generate_batch` that Serve sends to a replica at a time; each has
    many requests."""
    max_silence_s: float = 300.0
    """Time in seconds without an answer from the weight board after which a replica is
    unhealthy."""
    graceful_shutdown_s: float = 10.0
    health_check_period_s: float = 0.5
    """Seconds between two health checks, by which Serve notices that a replica has ended."""
    health_check_timeout_s: float = 30.0

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the replica must set before it imports vLLM."""
        inference = self.inference
        variables = {
            "OMP_NUM_THREADS": str(inference.threads),
            # vLLM would bind the threads of all replicas' engines to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            # vLLM would close Serve's log handlers. Serve's controller asks for them after its
            # restart, and replaces a replica that cannot answer.
            "VLLM_CONFIGURE_LOGGING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            # An engine's workers share a node.
            **gloo_interface(LOOPBACK),
        }
        if inference.tensor_parallel_size == 1:
            # Run the worker in the engine's own process. On CPU vLLM would start another one, and
            # both would busy-wait for each other: twice the CPU time for each token.
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if inference.enforce_eager and inference.is_on_cpu:
            # vLLM would still compile one small function of its sampler: ten seconds of C++
            # compilation in every engine, because each has its own temporary directory.
            variables["TORCHDYNAMO_DISABLE"] = "1"
        return variables
