"""The metrics that actors/metrics.py declares, for tests of dashboards and documents.

The metrics of Ray that dashboards show are listed here, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from actors.metrics import ApiMetrics, GatewayMetrics, Metrics

# Suffixes that the text format adds to the name of a metric family, by its kind.
SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_count", "_sum"),
    "gauge": ("",),
}
NAME = re.compile(r"\brayloom_[a-z0-9_]+")

# Ray's metrics that a dashboard shows, as queries name them, with their labels. Only nodes with a
# GPU have the metrics of GPUs. The two counters of faults appear with the first fault.
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


# Sections of dashboards that are empty in the run of test_metrics_scenarios.py; test_prometheus.py
# tests them.
NOT_OF_THE_DEMO = ("Service", "Critic", "Sessions of agents outside", "Functions of one's own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A declared metric with the name of its family; its kind gives the names of the series."""

    name: str
    kind: str
    labels: tuple[str, ...]
    documentation: str

    @property
    def series(self) -> tuple[str, ...]:
        return tuple(self.name + suffix for suffix in SUFFIXES[self.kind])


def declared() -> list[Declared]:
    """Return every metric once, in the order of declaration, also if several processes serve it."""
    metrics, gateway, found = Metrics(), GatewayMetrics(), []
    registries = (
        metrics.gained,
        metrics.values,
        ApiMetrics().gained,
        gateway.gained,
        gateway.values,
    )
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
    return list(dict.fromkeys(found))


def is_of_run(query: str) -> bool:
    """Whether a query uses metrics of a run, not only Ray's own metrics or alerts."""
    return bool(NAME.search(query)) or "vllm:" in query
