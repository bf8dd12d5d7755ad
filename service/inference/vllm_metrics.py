"""The metrics of vLLM that a run shows, with vLLM's names, so that vLLM's dashboards work."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Metric

SHOWN = frozenset(
    {
        "vllm:generation_tokens",
        "vllm:inter_token_latency_seconds",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prefix_cache_hits",
        "vllm:prefix_cache_queries",
        "vllm:prompt_tokens",
        "vllm:request_queue_time_seconds",
        "vllm:request_success",
        "vllm:time_to_first_token_seconds",
    }
)


def engine_metrics(*, replica: str, registry: CollectorRegistry = REGISTRY) -> list[Metric]:
    """Return the current metrics of this process that are in SHOWN, with the replica as a label.

    Args: registry: defaults to the library's own registry, the only one that vLLM uses.
    """
    found = []
    for family in registry.collect():
        if family.name in SHOWN:
            shown = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    shown.add_sample(
                        sample.name, {**sample.labels, "replica": replica}, sample.value
                    )
            found.append(shown)
    return found
