"""The settings of the engines: their leaf of the configuration, and the settings of each replica.

Plain data: no Ray, no vLLM, no torch. The deployment passes it to every replica. Values that the
engine derives from the model, such as its vocabulary, are not repeated here.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.limits import GIB, STRICT, NotNegative, Positive, Rate, Seconds, Share
from actors.network import LOOPBACK, gloo_interface
from actors.trainer.settings import WeightBackend
from actors.types import Dtype

# Special values of the settings that name one of vLLM's parsers.
AUTO, NONE = "auto", "none"
CPU_BLOCK_TOKENS = 32
"""The smallest block that vLLM's attention accepts on CPU; multiples are accepted too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSettings:
    """Engines and their resources."""

    __pydantic_config__ = STRICT

    num_replicas: Positive = 1
    """Number of engines, each a replica of one deployment."""
    weight_backend: WeightBackend = WeightBackend.OBJECT_STORE
    """Transfer of weights to the engines."""
    max_num_seqs: Positive = 128
    """Sequences that an engine runs at once."""
    kv_cache_gib: Rate = 1.0
    """Key-value cache of an engine on CPU, GiB."""
    block_tokens: Positive | None = None
    """Tokens of a cache block, the unit in which prefixes are shared; null: 32 on CPU, and on a GPU
    vLLM's default."""
    gpu_memory_fraction: Share = 0.9
    """Share of a GPU's memory that one engine uses."""
    tensor_parallel_size: Positive = 1
    """GPUs of one engine."""
    enforce_eager: bool = False
    """Whether the engine does without compilation: it starts sooner and runs slower."""
    gpus_per_replica: NotNegative = 0.0
    """GPUs that Ray reserves for one engine; a fraction shares a GPU; 0: engines run on CPU."""
    cpus_per_replica: NotNegative = 1.0
    """CPUs that Ray reserves for one engine."""
    threads: Positive = 1
    """CPU threads of one engine."""
    tool_parser: str = AUTO
    """Parser of calls in replies: one of vLLM's names, auto (by the chat template), or none."""
    reasoning_parser: str = AUTO
    """Parser of thinking in replies: one of vLLM's names, auto (by the chat template), or none."""
    publish_deadline_s: Seconds = 120
    """Seconds without progress after which an engine that loads a version is replaced; /readyz also
    allows an engine to lack the current version for this time."""
    start_deadline_s: Seconds = 600
    """Seconds without progress of any engine's start or load after which a term ends."""

    @property
    def is_on_cpu(self) -> bool:
        return self.gpus_per_replica == 0

    @property
    def block_size(self) -> int | None:
        """Return the tokens of a block; None: vLLM's default.

        On CPU that default is 128, so long that turns of a short conversation would share nothing.
        """
        return self.block_tokens or (CPU_BLOCK_TOKENS if self.is_on_cpu else None)

    @property
    def names_parser(self) -> bool:
        """Whether a parser is named and must exist; one that is only looked for may not."""
        return not {self.tool_parser, self.reasoning_parser} <= {AUTO, NONE}

    @property
    def kv_cache_bytes(self) -> int | None:
        """Return the bytes of the cache; None on a GPU, where gpu_memory_fraction decides."""
        return int(self.kv_cache_gib * GIB) if self.is_on_cpu else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of each replica's engine."""

    inference: InferenceSettings
    model: str
    """Directory or hub name, Hugging Face format."""
    dtype: Dtype
    max_context_tokens: int
    """Prompt and sampled tokens."""
    chat_template: str | None
    """Chat template of the run, which decides how replies are parsed. None: the tokenizer's own."""
    stop_token_ids: tuple[int, ...]
    """Sampling ends after any of these tokens, which the reply keeps."""
    reads_text: bool
    """Whether the engine loads a tokenizer, which stop strings and structured outputs need."""
    resets_prefix_cache: bool
    """Whether each publication resets it (synchronous training): no cached block outlives its
    version."""
    seed: int
    """Seed of the engine's sampler."""
    max_ongoing_requests: int = 4096
    """Streams that Serve sends to one replica at once; each has many requests."""
    max_silence_s: float = 300.0
    """A replica is unhealthy after so long without an answer from the weight board."""
    graceful_shutdown_s: float = 10.0
    health_check_period_s: float = 0.5
    """Serve notices the end of a replica at its next check, and then starts another one."""
    health_check_timeout_s: float = 30.0

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that must be set in the replica before it imports vLLM."""
        inference = self.inference
        variables = {
            "OMP_NUM_THREADS": str(inference.threads),
            # Binding would pin the engines of all replicas to the same cores.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """The engines of a board, which keeps this for the next supervisor."""

    name: str
    """Name of their application."""
    settings: EngineSettings
