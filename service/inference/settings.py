"""What one inference deployment is made of. Plain data: no Ray, no vLLM, no torch.

The configuration tree builds it; the deployment carries it to every replica. Values that the
engine derives from the model (vocabulary, stop tokens unless given) are not repeated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightBackend = Literal["object_store", "nccl", "ipc"]

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One engine a replica.

    model: directory or hub name, Hugging Face format. dtype: torch name.
    max_model_len: tokens, prompt and sampled. max_num_seqs: requests that run at the same time.
    block_size: tokens of a KV block, the unit in which prefixes are shared; None: the engine's own.
    kv_cache_gib: memory of the KV cache; None lets the engine take gpu_memory_utilization.
    gpu_memory_utilization: ratio of the device's memory; without effect where kv_cache_gib is set.
    tensor_parallel_size: devices that one engine spans.
    enforce_eager: no compilation (15 s faster to start, slower to sample).
    stop_token_ids: sampling ends after any of them; the token is kept.
    weight_backend: object_store works everywhere; nccl and ipc are vLLM's own for CUDA.
    max_ongoing_requests: streams that Serve lets into one replica; each carries many requests.
    engine_threads: CPU threads of one engine process.
    reset_prefix_cache_on_publish: for lag 0, where no cached block outlives its version.
    max_staleness_s: a replica that lacks the current version for longer is unhealthy.
    seed: of the engine's sampler.
    """

    model: str
    dtype: str = "float32"
    max_model_len: int = 2048
    max_num_seqs: int = 128
    kv_cache_gib: float | None = 1.0
    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = True
    stop_token_ids: tuple[int, ...] = ()
    weight_backend: WeightBackend = "object_store"
    num_replicas: int = 1
    cpus_per_replica: float = 1.0
    gpus_per_replica: float = 0.0
    max_ongoing_requests: int = 4096
    engine_threads: int = 1
    reset_prefix_cache_on_publish: bool = False
    max_staleness_s: float = 300.0
    graceful_shutdown_s: float = 10.0
    health_check_period_s: float = 2.0
    health_check_timeout_s: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("max_model_len", self.max_model_len, 2)
        for name in ("max_num_seqs", "tensor_parallel_size", "num_replicas", "engine_threads"):
            _at_least(name, getattr(self, name), 1)
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0:
            raise ValueError(f"inference: kv_cache_gib is {self.kv_cache_gib}, expected above 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"inference: gpu_memory_utilization is {self.gpu_memory_utilization}, "
                "expected a ratio above 0 and at most 1"
            )
        if self.weight_backend != "object_store" and self.gpus_per_replica == 0:
            raise ValueError(
                f"inference: weight_backend {self.weight_backend!r} needs GPUs, got "
                "gpus_per_replica 0; use object_store on CPU"
            )

    @property
    def kv_cache_bytes(self) -> int | None:
        return None if self.kv_cache_gib is None else int(self.kv_cache_gib * GIB)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that must stand in the replica before its engine starts."""
        variables = {
            "OMP_NUM_THREADS": str(self.engine_threads),
            # Binding would pin the engines of all replicas to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        if self.tensor_parallel_size == 1:
            # The worker lives in the engine's own process. On CPU vLLM would start one more, and
            # the two would spin while they wait for each other: twice the CPU time a token.
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if self.enforce_eager and self.gpus_per_replica == 0:
            # vLLM still compiles one small function of its sampler: ten seconds of a C++ compiler,
            # in every engine, because each has a temporary directory of its own.
            variables["TORCHDYNAMO_DISABLE"] = "1"
        if self.weight_backend == "ipc":
            # CUDA IPC handles are no plain data; they travel between the replica and its own child.
            variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        return variables


def _at_least(name: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise ValueError(f"inference: {name} is {value}, expected at least {lowest}")
