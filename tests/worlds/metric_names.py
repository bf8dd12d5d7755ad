"""What actors/metrics.py declares, seen from outside, for the tests of dashboards and documents.

Beside it what dashboards show of others: what is to be declared soon, and Ray's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from actors.metrics import ApiMetrics, Metrics

# What the text format adds to a family's name.
SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_count", "_sum"),
    "gauge": ("",),
}
NAME = re.compile(r"\brayloom_[a-z0-9_]+")

# Metrics that dashboards and rules may use before they are declared, as a query names them, with
# their labels. A histogram is named by its buckets.
COMING: Mapping[str, tuple[str, ...]] = {
    "rayloom_queue_items_limit": (),
    "rayloom_queue_bytes_limit": (),
    "rayloom_queue_handed_out_rollouts": (),
    "rayloom_queue_oldest_seconds": (),
    "rayloom_queue_blocked_seconds_total": ("side",),
    "rayloom_policy_age_versions_limit": (),
    "rayloom_environment_phase_seconds_bucket": ("environment", "phase"),
    "rayloom_publish_seconds_bucket": ("phase",),
    "rayloom_publish_failures_total": (),
    "rayloom_engine_policy_version": ("replica",),
    "rayloom_engines_expected": (),
    "rayloom_environment_actors": (),
    "rayloom_environment_actors_expected": (),
    "rayloom_trainer_ranks": (),
    "rayloom_trainer_ranks_expected": (),
    "rayloom_rank_peak_memory_bytes": ("rank",),
    "rayloom_checkpoint_bytes": (),
    "rayloom_checkpoint_seconds": (),
    "rayloom_checkpoint_failures_total": (),
    "rayloom_database_away_seconds": (),
    "rayloom_train_mfu_ratio": (),
}

# Ray's metrics that a dashboard shows, as a query names them, with their labels. A node has those
# of GPUs where it has one; the two counters appear with what they count.
RAYS_OF_GPUS: Mapping[str, tuple[str, ...]] = {
    "ray_node_gpus_utilization": ("ip", "GpuIndex"),
    "ray_node_gram_available": ("ip", "GpuIndex"),
    "ray_node_gram_used": ("ip", "GpuIndex"),
}
RAYS_OF_FAULTS: Mapping[str, tuple[str, ...]] = {
    "ray_memory_manager_worker_eviction_total": (),
    "ray_node_manager_unexpected_worker_failure_total": (),
}
RAYS: Mapping[str, tuple[str, ...]] = {
    "ray_actors": ("State", "Source"),
    "ray_cluster_active_nodes": (),
    "ray_dashboard_event_loop_lag_seconds": (),
    "ray_gcs_placement_group_count": ("State",),
    "ray_gcs_storage_operation_latency_ms_bucket": (),
    "ray_node_cpu_utilization": ("ip",),
    "ray_node_disk_utilization_percentage": ("ip",),
    "ray_node_mem_total": ("ip",),
    "ray_node_mem_used": ("ip",),
    "ray_node_network_receive_speed": ("ip",),
    "ray_node_network_send_speed": ("ip",),
    "ray_object_store_available_memory": ("NodeAddress",),
    "ray_object_store_memory": ("Location",),
    "ray_object_store_used_memory": ("NodeAddress",),
    "ray_resources": ("Name", "State"),
    "ray_serve_application_status": ("application",),
    "ray_serve_autoscaling_target_replicas": ("deployment",),
    "ray_serve_deployment_queued_queries": ("deployment",),
    "ray_serve_deployment_replica_healthy": ("deployment",),
    "ray_serve_http_request_latency_ms_bucket": ("route",),
    "ray_serve_num_http_requests_total": ("status_code",),
    **RAYS_OF_GPUS,
    **RAYS_OF_FAULTS,
}
RAYS_NAME = re.compile(r"\bray_[a-z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A metric under its family's name; the series' names follow from the kind."""

    name: str
    kind: str
    labels: tuple[str, ...]
    documentation: str

    @property
    def series(self) -> tuple[str, ...]:
        return tuple(self.name + suffix for suffix in SUFFIXES[self.kind])


def declared() -> list[Declared]:
    """Every metric, in the order of declaration."""
    metrics, found = Metrics(), []
    registries = metrics.gained, metrics.values, ApiMetrics().gained
    for collector in chain.from_iterable(each._collector_to_names for each in registries):
        (family,) = collector.describe()  # type: ignore[attr-defined]
        found.append(
            Declared(
                name=family.name,
                kind=family.type,
                labels=tuple(getattr(collector, "_labelnames", ())),
                documentation=family.documentation,
            )
        )
    return found


def known() -> list[Declared]:
    """What is declared, and what is coming and not yet declared."""
    found = declared()
    names = {item.name for item in found}
    coming = [_coming(name, labels) for name, labels in COMING.items()]
    return [*found, *(item for item in coming if item.name not in names)]


def is_drawn(query: str) -> bool:
    """Whether all that it asks for is served by now, by a run."""
    names = set(NAME.findall(query))
    coming = {name.removesuffix("_bucket") for name in COMING}
    is_coming = any(name.startswith(tuple(coming)) for name in names)
    return bool(names or "vllm:" in query) and not is_coming


def _coming(name: str, labels: tuple[str, ...]) -> Declared:
    for suffix, kind in (("_total", "counter"), ("_bucket", "histogram")):
        if name.endswith(suffix):
            family = name.removesuffix(suffix)
            return Declared(name=family, kind=kind, labels=labels, documentation="")
    return Declared(name=name, kind="gauge", labels=labels, documentation="")
