"""What the engines are told: their leaf of the configuration, and what each replica is given.

Plain data: no Ray, no vLLM, no torch. The deployment carries it to every replica. Values that the
engine derives from the model (its vocabulary, say) are not repeated here.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.limits import GIB, STRICT, NotNegative, Positive, Rate, Seconds, Share
from actors.network import LOOPBACK, gloo_interface
from actors.trainer.settings import WeightBackend
from actors.types import Dtype

# Of the settings that name one of vLLM's parsers.
AUTO, NONE = "auto", "none"
CPU_BLOCK_TOKENS = 32
"""The smallest block that vLLM's attention takes on CPU; it takes its multiples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSettings:
    """Engines and their resources."""

    __pydantic_config__ = STRICT

    num_replicas: Positive = 1
    """Number of engines, each a replica of one deployment."""
    weight_backend: WeightBackend = WeightBackend.OBJECT_STORE
    """How weights reach the engines."""
    max_num_seqs: Positive = 128
    """Sequences that an engine runs at once."""
    kv_cache_gib: Rate = 1.0
    """Key-value cache of an engine on CPU, GiB."""
    block_tokens: Positive | None = None
    """Tokens of a cache block, the unit in which prefixes are shared; null: 32 on CPU, and on a GPU
    the engine's own."""
    gpu_memory_fraction: Share = 0.9
    """Share of a GPU's memory that one engine takes."""
    tensor_parallel_size: Positive = 1
    """GPUs of one engine."""
    enforce_eager: bool = False
    """No compilation: starts sooner, runs slower."""
    gpus_per_replica: NotNegative = 0.0
    """GPUs that Ray reserves for one engine; a fraction shares a GPU; 0: engines run on CPU."""
    cpus_per_replica: NotNegative = 1.0
    """CPUs that Ray reserves for one engine."""
    threads: Positive = 1
    """CPU threads of one engine."""
    tool_parser: str = AUTO
    """Reads calls out of replies: one of vLLM's names, auto (by the chat template), or none."""
    reasoning_parser: str = AUTO
    """Reads thinking out of replies: one of vLLM's names, auto (by the chat template), or none."""
    publish_deadline_s: Seconds = 120
    """Seconds without progress after which an engine that loads a version is replaced; and for so
    long /readyz allows an engine to lack the current one."""
    start_deadline_s: Seconds = 600
    """Seconds in which no engine gets further with its start or its load, that end a term."""

    @property
    def is_on_cpu(self) -> bool:
        return self.gpus_per_replica == 0

    @property
    def block_size(self) -> int | None:
        """As the engine is told; None: its own. That is 128 on CPU, so long that the turns of a
        short conversation share nothing."""
        return self.block_tokens or (CPU_BLOCK_TOKENS if self.is_on_cpu else None)

    @property
    def names_parser(self) -> bool:
        """Whether a parser must be there; one that is looked for may not."""
        return not {self.tool_parser, self.reasoning_parser} <= {AUTO, NONE}

    @property
    def kv_cache_bytes(self) -> int | None:
        """None on a GPU, where the engine takes gpu_memory_fraction."""
        return int(self.kv_cache_gib * GIB) if self.is_on_cpu else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One engine a replica."""

    inference: InferenceSettings
    model: str
    """Directory or hub name, Hugging Face format."""
    dtype: Dtype
    max_context_tokens: int
    """Prompt and sampled tokens."""
    chat_template: str | None
    """Chat template of the run, which decides how replies are parsed. None: the tokenizer's own."""
    stop_token_ids: tuple[int, ...]
    """Sampling ends after any of them; the token is kept."""
    reads_text: bool
    """Whether the engine loads a tokenizer, which stop strings and structured outputs need."""
    resets_prefix_cache: bool
    """On each publication, in synchronous training: no cached block outlives its version."""
    seed: int
    """Of the engine's sampler."""
    max_ongoing_requests: int = 4096
    """Streams that Serve lets into one replica; each carries many requests."""
    max_silence_s: float = 300.0
    """A replica that hears nothing of the weight board for longer is unhealthy."""
    graceful_shutdown_s: float = 10.0
    health_check_period_s: float = 0.5
    """Serve learns of a replica that has ended at its next check, and starts another one then."""
    health_check_timeout_s: float = 30.0

    @property
    def environment(self) -> dict[str, str]:
        """Variables that must stand in the replica before it imports vLLM."""
        inference = self.inference
        variables = {
            "OMP_NUM_THREADS": str(inference.threads),
            # Binding would pin the engines of all replicas to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            # It would close the handlers that Serve has made. Serve's controller asks for them when
            # it comes back after its death, and replaces a replica that cannot answer.
            "VLLM_CONFIGURE_LOGGING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            # An engine's workers share a node.
            **gloo_interface(LOOPBACK),
        }
        if inference.tensor_parallel_size == 1:
            # The worker lives in the engine's own process. On CPU vLLM would start one more, and
            # the two would spin while they wait for each other: twice the CPU time a token.
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if inference.enforce_eager and inference.is_on_cpu:
            # vLLM still compiles one small function of its sampler: ten seconds of a C++ compiler,
            # in every engine, because each has a temporary directory of its own.
            variables["TORCHDYNAMO_DISABLE"] = "1"
        return variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """What a board keeps for the next supervisor: the engines that learn from it."""

    name: str
    """Of their application."""
    settings: EngineSettings
