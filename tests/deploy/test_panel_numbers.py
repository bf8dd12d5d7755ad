"""Tests of the numbers that panels show, with promtool, for steps of seconds and of an hour."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from worlds.builders.synthetic_run import (
    CHECKPOINT_EVERY,
    EVICTED,
    SAMPLED_TOKENS,
    STAGES,
    TRAINED,
    TRAINED_TOKENS,
    SyntheticRun,
    labelled,
    series,
)
from worlds.servers.prometheus_server import fill
from worlds.servers.promtool import run_test

from deploy.dashboards.grafana import load_dashboards
from deploy.rules.__main__ import PLACE_LABELS

HOUR = 3600
# The share of a step's time until the queue is full. Then the environment actors are blocked.
FREE = 0.7
NUM_ACTORS = 2
PLANNED_STEPS = 100_000
# Seconds of a trajectory by phase.
PHASES = {"reset": 2.0, "generate": 30.0, "step": 8.0}
# Seconds of a publish by phase.
PUBLISH = {"send": 3.0, "check": 1.0, "load": 6.0}
OUTCOMES = {"completed": 12, "environment_error": 3, "max_turns": 1}

PLACE = {"cluster": "eu", "namespace": "rl", "release": "small"}

PANELS = {
    (spec.uid.removeprefix("rayloom-"), panel.title): panel.series
    for spec in load_dashboards()
    for panel in spec.panels
}


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a panel shows under one legend, or one number for each value of a label."""

    dashboard: str
    panel: str
    legend: str
    expected: float | dict[str, float]


def a_run(
    *,
    step_s: float,
    scrape_s: int,
    seconds: int,
    place: Mapping[str, str] = PLACE,
    pod: str = "head",
) -> SyntheticRun:
    """Return a run that plays rollouts at the start of each step and then waits for the trainer."""
    run = SyntheticRun(
        step_s=step_s, scrape_s=scrape_s, seconds=seconds,
        labels={**place, "pod": pod},
    )  # fmt: skip
    done = run.done

    def blocked(t: float) -> float:
        within = t - done(t) * step_s
        return NUM_ACTORS * (done(t) * (1 - FREE) * step_s + max(within - FREE * step_s, 0.0))

    run.values[series("rayloom_queue_blocked_seconds_total", side="producer")] = blocked
    run.values["rayloom_run_planned_steps"] = lambda t: PLANNED_STEPS
    per_step = {
        series("rayloom_merge_samples_total", side="before"): 24.0,
        series("rayloom_merge_samples_total", side="after"): 8.0,
        series("rayloom_merge_branches_total", reason="template"): 2.0,
        series("rayloom_played_tokens_total", fate="trained"): 30.0,
        series("rayloom_played_tokens_total", fate="truncated_tokens"): 10.0,
        "rayloom_zero_variance_groups_total": 1.0,
        "rayloom_negative_return_groups_total": 0.0,
        "rayloom_malformed_turns_total": 5.0,
        "rayloom_inserted_tokens_total": 7.0,
    }
    for outcome, count in OUTCOMES.items():
        name = "rayloom_rollouts_total"
        per_step[series(name, environment="game", outcome=outcome)] = count
    for kind, seconds_by_phase, times in (
        ("environment", PHASES, TRAINED + EVICTED),
        ("publish", PUBLISH, 1),
    ):
        name = "rayloom_environment_phase_seconds" if times > 1 else "rayloom_publish_seconds"
        labels = {"environment": "game"} if kind == "environment" else {}
        for phase, spent_s in seconds_by_phase.items():
            per_step[series(f"{name}_sum", phase=phase, **labels)] = spent_s * times
            per_step[series(f"{name}_count", phase=phase, **labels)] = times
    for name, amount in per_step.items():
        run.values[name] = lambda t, amount=amount: amount * done(t)
    return run


def of_the_newest_step(step_s: float, done: int) -> list[Number]:
    bottleneck = "pipeline", "Who is the bottleneck"
    return [
        Number(*bottleneck, "waiting for rollouts", STAGES["collect"]),
        Number(*bottleneck, "training", STAGES["train"]),
        Number(*bottleneck, "publishing", STAGES["publish"]),
        Number(*bottleneck, "merging", STAGES["merge"]),
        Number(*bottleneck, "checkpoint and evaluation", STAGES["checkpoint"]),
        Number("overview", "Waiting for rollouts", "share", STAGES["collect"]),
        Number("overview", "Steps per hour", "steps", HOUR / step_s),
        Number("trainer", "Steps per hour", "steps", HOUR / step_s),
        Number("overview", "Time left", "left", (PLANNED_STEPS - done) * step_s),
        Number(
            "overview", "Tokens per second", "{{kind}}",
            {"sampled": SAMPLED_TOKENS / step_s, "trained": TRAINED_TOKENS / step_s},
        ),
        Number(
            "trainer", "Tokens trained per second", "of the training",
            TRAINED_TOKENS / (STAGES["train"] * step_s),
        ),
        Number("trainer", "Tokens trained per second", "of the step", TRAINED_TOKENS / step_s),
        Number("trainer", "Steps since the newest checkpoint", "steps", done % CHECKPOINT_EVERY),
        Number("pipeline", "Ledger out of balance", "difference", 0),
        Number("inference", "Versions behind", "behind", 0),
    ]  # fmt: skip


def over_several_steps() -> list[Number]:
    """Return numbers that are averages over several steps; they are exact after one step."""
    odd, signal = "Malformed turns and inserted tokens", "Groups without a signal"
    return [
        Number(
            "pipeline", "Share of the rollouts that is trained", "trained",
            TRAINED / (TRAINED + EVICTED),
        ),
        Number(
            "pipeline", "Rollouts that leave, per step", "{{kind}}",
            {"trained": TRAINED, "evicted": EVICTED},
        ),
        Number("pipeline", "Turns per sample", "turns", 3),
        Number(
            "pipeline", "Turns that opened a new sample, by reason", "{{reason}}", {"template": 2}
        ),
        Number("rollouts", "Share that ended in an error", "{{environment}}", {"game": 3 / 16}),
        Number("rollouts", "Truncated trajectories", "{{outcome}}", {"max_turns": 1 / 16}),
        Number("rollouts", "Time of a trajectory, by phase", "{{phase}}", PHASES),
        Number(
            "rollouts", "What became of the sampled tokens", "{{fate}}",
            {"trained": 0.75, "truncated_tokens": 0.25},
        ),
        Number("rollouts", odd, "malformed turns", 5),
        Number("rollouts", odd, "inserted tokens", 7),
        Number("rollouts", signal, "zero variance", 1),
        Number("rollouts", signal, "negative return", 0),
        Number("learning", signal, "zero variance", 1),
        Number("inference", "Time of a publish, by phase", "{{phase}}", dict(PUBLISH)),
    ]  # fmt: skip


def levelled_out(step_s: float) -> list[Number]:
    """Return averages over several steps that are exact only after the first step."""
    return [
        Number(
            "trainer", "Time of a stage, mean", "{{stage}}",
            {stage: share * step_s for stage, share in STAGES.items()},
        ),
        Number("pipeline", "Who is the bottleneck", "environment actors blocked", 1 - FREE),
    ]  # fmt: skip


def count_a_second(run: SyntheticRun, name: str, a_second: float, **labels: str) -> None:
    run.values[series(name, **labels)] = lambda t: a_second * t


def spread(
    run: SyntheticRun, name: str, a_second: float, low: float, high: float, **labels: str
) -> None:
    """Add a histogram with half of its values even up to `low`, the rest from there to `high`."""
    for bound, share in ((f"{low:g}", 0.5), (f"{high:g}", 1.0), ("+Inf", 1.0)):
        count_a_second(run, f"{name}_bucket", share * a_second, **labels, le=bound)


def quantile(share: float, low: float, high: float) -> float:
    """Return the quantile of a histogram of `spread`, for a share of at least a half."""
    return low + (share - 0.5) / 0.5 * (high - low)


def show_the_rest(run: SyntheticRun, factor: float) -> None:
    """Add series that do not depend on steps: of engines, rollouts, the API and Ray.

    Args:
        run: the run that gets the series.
        factor: multiplies each amount.
    """
    for name, amount in GAUGES.items():
        run.values[name] = lambda t, amount=amount: factor * amount
    for name, amount in COUNTERS.items():
        run.values[name] = lambda t, amount=amount: factor * amount * t
    for (name, *labels), (low, high) in HISTOGRAMS.items():
        spread(run, name, factor, factor * low, factor * high, **dict(labels))


GAUGES = {
    "rayloom_engines_ready": 3.0,
    "rayloom_engines_expected": 4.0,
    "rayloom_environment_actors": 1.0,
    "rayloom_trainer_ranks": 1.0,
    "rayloom_trainer_ranks_expected": 2.0,
    "rayloom_queue_items": 6.0,
    "rayloom_queue_handed_out_rollouts": 10.0,
    "rayloom_queue_items_limit": 32.0,
    "rayloom_queue_bytes": 3e6,
    "rayloom_queue_bytes_limit": 4e6,
    "rayloom_checkpoint_timestamp_seconds": 1500.0,
    "rayloom_checkpoint_upload_waiting_timestamp_seconds": 1600.0,
    "rayloom_checkpoint_upload_seconds_sum": 180.0,
    "rayloom_checkpoint_upload_seconds_count": 2.0,
    series("ALERTS", alertname="RayloomStalled", alertstate="firing"): 1.0,
    series("ALERTS", alertname="RayloomQueueFull", alertstate="pending"): 1.0,
    "ray_cluster_active_nodes": 2.0,
    series("ray_node_cpu_utilization", ip="1"): 50.0,
    series("ray_node_mem_used", ip="1"): 3e9,
    series("ray_node_mem_total", ip="1"): 4e9,
    series("ray_node_disk_utilization_percentage", ip="1"): 20.0,
    series("ray_node_gpus_utilization", ip="1", GpuIndex="0"): 80.0,
    series("ray_node_gram_used", ip="1", GpuIndex="0"): 6.0,
    series("ray_node_gram_available", ip="1", GpuIndex="0"): 2.0,
    series("ray_node_network_receive_speed", ip="1"): 100.0,
    series("ray_node_network_send_speed", ip="1"): 200.0,
    series("ray_resources", Name="CPU", State="USED"): 1.0,
    series("ray_resources", Name="CPU", State="AVAILABLE"): 3.0,
    series("ray_object_store_used_memory", NodeAddress="1"): 1.0,
    series("ray_object_store_available_memory", NodeAddress="1"): 3.0,
    series("ray_object_store_memory", Location="SPILLED"): 7.0,
    series("ray_object_store_memory", Location="IN_MEMORY"): 9.0,
    series("ray_actors", State="ALIVE", Source="gcs"): 5.0,
    series("ray_actors", State="ALIVE", Source="executor"): 4.0,
    series("ray_gcs_placement_group_count", State="CREATED"): 2.0,
    "ray_memory_manager_worker_eviction_total": 1.0,
    "ray_node_manager_unexpected_worker_failure_total": 2.0,
    "ray_dashboard_event_loop_lag_seconds": 0.5,
    series("ray_serve_application_status", application="api"): 6.0,
    series("ray_serve_deployment_replica_healthy", deployment="engine"): 2.0,
    series("ray_serve_autoscaling_target_replicas", deployment="engine"): 3.0,
    series("ray_serve_deployment_queued_queries", deployment="engine"): 4.0,
}
# Counters and what they gain a second.
COUNTERS = {
    series("vllm:num_preemptions_total", replica="a"): 0.5,
    series("vllm:num_preemptions_total", replica="b"): 0.25,
    series("vllm:generation_tokens_total", replica="a"): 200.0,
    series("vllm:generation_tokens_total", replica="b"): 100.0,
    series("vllm:prompt_tokens_total", replica="a"): 50.0,
    series("vllm:prefix_cache_hits_total", replica="a"): 30.0,
    series("vllm:prefix_cache_queries_total", replica="a"): 40.0,
    series("vllm:request_success_total", replica="a", finished_reason="stop"): 2.0,
    series("vllm:request_success_total", replica="b", finished_reason="stop"): 1.0,
    series("vllm:request_success_total", replica="b", finished_reason="length"): 0.5,
    series("rayloom_http_requests_total", route="/api", status="200"): 2.0,
    series("rayloom_http_requests_total", route="/api/x", status="200"): 1.0,
    series("rayloom_http_requests_total", route="/api", status="429"): 0.5,
    series("rayloom_http_requests_total", route="/readyz", status="503"): 0.25,
    series("rayloom_sessions_ended_total", outcome="completed"): 0.5,
    series("rayloom_sessions_ended_total", outcome="wall_timeout"): 0.25,
    series("rayloom_session_turns_total", use="trained"): 2.0,
    series("rayloom_session_turns_total", use="unseen"): 0.5,
    series("rayloom_session_refusals_total", code="not_available"): 0.25,
    series("ray_serve_num_http_requests_total", status_code="200"): 3.0,
}
# Histograms with the ends of their lower and upper half. Each counts one value a second.
GAME, OF_GAME = ("environment", "game"), "game, generate"
HISTOGRAMS: dict[tuple[Any, ...], tuple[float, float]] = {
    ("vllm:request_queue_time_seconds", ("replica", "a")): (0.1, 1.0),
    ("vllm:time_to_first_token_seconds", ("replica", "a")): (0.2, 2.0),
    ("vllm:inter_token_latency_seconds", ("replica", "a")): (0.5, 1.0),
    ("rayloom_trajectory_return", GAME): (0.5, 1.0),
    ("rayloom_trajectory_seconds", GAME): (20.0, 50.0),
    ("rayloom_environment_phase_seconds", GAME, ("phase", "generate")): (10.0, 20.0),
    ("rayloom_http_request_seconds", ("route", "/api")): (0.1, 0.5),
    ("rayloom_session_turn_seconds",): (1.0, 5.0),
    ("rayloom_session_commit_seconds",): (0.01, 0.05),
    ("ray_gcs_storage_operation_latency_ms",): (2.0, 10.0),
    ("ray_serve_http_request_latency_ms", ("route", "/api")): (100.0, 500.0),
}


def of_the_rest(step_s: float, second: float) -> list[Number]:
    """Return the numbers of the series of `show_the_rest` with factor 1."""
    infrastructure = "infrastructure"
    parts = infrastructure, "Parts, of those expected"
    ended = {outcome: count / step_s for outcome, count in OUTCOMES.items()}
    latencies = [
        Number("inference", title, legend, quantile(share, low, high))
        for title, low, high in (
            ("Time in the engine's queue", 0.1, 1.0),
            ("Time to first token", 0.2, 2.0),
            ("Time between tokens", 0.5, 1.0),
        )
        for legend, share in (("p95", 0.95), ("median", 0.5))
    ]
    trajectories = [
        Number("rollouts", "Time of a trajectory", legend, quantile(share, 20.0, 50.0))
        for legend, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    ]
    return [
        *latencies,
        *trajectories,
        Number("inference", "Preemptions per second", "{{replica}}", {"a": 0.5, "b": 0.25}),
        Number("inference", "Tokens sampled per second", "{{replica}}", {"a": 200, "b": 100}),
        Number("inference", "Prompt tokens per second", "{{replica}}", {"a": 50}),
        Number("inference", "Prompt tokens found in the cache", "{{replica}}", {"a": 0.75}),
        Number(
            "inference", "Requests that end, by reason", "{{finished_reason}}",
            {"stop": 3, "length": 0.5},
        ),
        Number("overview", "Phase", "{{phase}}", {"training": 1}),
        Number("overview", "Alerts that fire", "{{alertname}}", {"RayloomStalled": 1}),
        Number("overview", "Since the newest step and checkpoint", "step", second % step_s),
        Number("overview", "Since the newest step and checkpoint", "checkpoint", second - 1500),
        Number("trainer", "Since the newest checkpoint", "age", second - 1500),
        Number("trainer", "Copies of checkpoints", "waiting", second - 1600),
        Number("trainer", "Copies of checkpoints", "time of a copy", 90.0),
        Number("overview", "Trajectories that end, by outcome", "{{outcome}}", ended),
        Number("rollouts", "Trajectories that end, by outcome", "{{outcome}}", ended),
        Number(
            "rollouts", "Trajectories that end, by environment", "{{environment}}",
            {"game": sum(ended.values())},
        ),
        Number("overview", "Engines ready, of those expected", "engines", 0.75),
        Number("overview", "Environment actors, of those expected", "actors", 0.5),
        Number("overview", "Trainer ranks, of those expected", "ranks", 0.5),
        Number("pipeline", "Waiting on the queue, now", "training loop", STAGES["collect"]),
        Number("pipeline", "Waiting on the queue, now", "environment actors", 1 - FREE),
        Number("pipeline", "How full the queue is", "rollouts", 0.5),
        Number("pipeline", "How full the queue is", "bytes", 0.75),
        Number("pipeline", "Rollouts in the ledger", "evicted", EVICTED * second // step_s),
        Number("rollouts", "Returns", "{{le}}", {"0.5": 0.5, "1": 1, "+Inf": 1}),
        Number(
            "rollouts", "Time of a phase, 95th percentile", "{{environment}}, {{phase}}",
            {OF_GAME: quantile(0.95, 10.0, 20.0)},
        ),
        Number(
            "rollouts", "Requests per second, by status", "{{status}}",
            {"200": 3, "429": 0.5, "503": 0.25},
        ),
        Number(
            "rollouts", "Time of a request, by route", "{{route}}",
            {"/api": quantile(0.95, 0.1, 0.5)},
        ),
        Number(
            "rollouts", "Ended sessions per minute, by outcome", "{{outcome}}",
            {"completed": 30, "wall_timeout": 15},
        ),
        Number(
            "rollouts", "Turns of ended sessions per minute, by use", "{{use}}",
            {"trained": 120, "unseen": 30},
        ),
        Number(
            "rollouts", "Refused requests per second, by code", "{{code}}",
            {"not_available": 0.25},
        ),
        Number("rollouts", "Time of a turn", "turn", quantile(0.95, 1.0, 5.0)),
        Number("rollouts", "Time of a turn", "commit", quantile(0.95, 0.01, 0.05)),
        Number(*parts, "engines", 0.75),
        Number(*parts, "environment actors", 0.5),
        Number(*parts, "trainer ranks", 0.5),
        Number(infrastructure, "Phase", "{{phase}}", {"training": 1}),
        Number(infrastructure, "Nodes of Ray", "nodes", 2),
        Number(infrastructure, "CPU, by node", "{{ip}}", {"1": 0.5}),
        Number(infrastructure, "Memory, by node", "{{ip}}", {"1": 0.75}),
        Number(infrastructure, "Disk, by node", "{{ip}}", {"1": 0.2}),
        Number(infrastructure, "GPU, by node and index", "{{ip}}, {{GpuIndex}}", {"1, 0": 0.8}),
        Number(
            infrastructure, "GPU memory, by node and index", "{{ip}}, {{GpuIndex}}",
            {"1, 0": 0.75},
        ),
        Number(infrastructure, "Network, by node", "received, {{ip}}", {"1": 100}),
        Number(infrastructure, "Network, by node", "sent, {{ip}}", {"1": 200}),
        Number(infrastructure, "Resources taken", "{{Name}}", {"CPU": 0.25}),
        Number(infrastructure, "Object store, by node", "{{NodeAddress}}", {"1": 0.25}),
        Number(infrastructure, "Spilled objects", "spilled", 7),
        Number(infrastructure, "Actors, by state", "{{State}}", {"ALIVE": 5}),
        Number(infrastructure, "Placement groups, by state", "{{State}}", {"CREATED": 2}),
        Number(infrastructure, "Killed and failed workers", "out of memory", 1),
        Number(infrastructure, "Killed and failed workers", "failed", 2),
        Number(
            infrastructure, "Latency of the control store", "p95", quantile(0.95, 2.0, 10.0)
        ),
        Number(infrastructure, "Lag of the dashboard's event loop", "lag", 0.5),
        Number(infrastructure, "Status of the applications", "{{application}}", {"api": 6}),
        Number(
            infrastructure, "Replicas, by deployment", "healthy, {{deployment}}", {"engine": 2}
        ),
        Number(
            infrastructure, "Replicas, by deployment", "wanted, {{deployment}}", {"engine": 3}
        ),
        Number(
            infrastructure, "Requests that wait, by deployment", "{{deployment}}", {"engine": 4}
        ),
        Number(
            infrastructure, "HTTP requests per second, by status", "{{status_code}}", {"200": 3}
        ),
        Number(
            infrastructure, "Time of an HTTP request, by route", "{{route}}",
            {"/api": quantile(0.95, 100.0, 500.0)},
        ),
    ]  # fmt: skip


def check(
    run: SyntheticRun,
    second: float,
    numbers: list[Number],
    file: Path,
    *,
    others: Sequence[SyntheticRun] = (),
) -> None:
    """Check the numbers with promtool; Prometheus also has the series of the other runs."""
    tests = [as_promtool(number, second, run.run) for number in numbers]
    test = {
        "interval": f"{run.scrape_s}s",
        "input_series": [each for it in (run, *others) for each in it.input_series()],
        "promql_expr_test": tests,
    }
    run_test(test, file)


def as_promtool(number: Number, second: float, run: str) -> dict[str, Any]:
    """Return a test of a number for promtool, rounded because windows end between scrapes."""
    query = fill(PANELS[number.dashboard, number.panel][number.legend], run=run, place=PLACE)
    if isinstance(number.expected, dict):
        labels = re.findall(r"\{\{(\w+)\}\}", number.legend)
        query = f"sum by ({', '.join(labels)}) ({query})"
        samples = [
            (labelled("", **dict(zip(labels, key.split(", "), strict=True))), value)
            for key, value in number.expected.items()
        ]
    else:
        query, samples = f"sum({query})", [("{}", number.expected)]
    return {
        "expr": f"round({query}, 0.01)",
        "eval_time": f"{second:g}s",
        "exp_samples": [
            {"labels": labels, "value": math.floor(value * 100 + 0.5) / 100}
            for labels, value in samples
        ],
    }


@pytest.mark.parametrize("scrape_s", [15, 60])
@pytest.mark.parametrize(
    ("step_s", "hours"), [(2.0, 0.5), (600.0, 2.2), (3600.0, 7.5)], ids=["2s", "600s", "3600s"]
)
def test_panels_show_the_numbers_of_a_run_of_any_pace(
    tmp_path: Path, step_s: float, hours: float, scrape_s: int
) -> None:
    second = hours * HOUR
    run = a_run(step_s=step_s, scrape_s=scrape_s, seconds=int(second))
    numbers = [
        *of_the_newest_step(step_s, run.done(second)),
        *over_several_steps(),
        *levelled_out(step_s),
    ]
    check(run, second, numbers, tmp_path / "test.yaml")


@pytest.mark.parametrize("scrape_s", [15, 60])
@pytest.mark.parametrize("step_s", [600.0, 3600.0])
def test_panels_show_the_numbers_of_one_slow_step(
    tmp_path: Path, step_s: float, scrape_s: int
) -> None:
    second = 1.5 * step_s
    run = a_run(step_s=step_s, scrape_s=scrape_s, seconds=int(second))
    numbers = [*of_the_newest_step(step_s, 1), *over_several_steps()]
    check(run, second, numbers, tmp_path / "test.yaml")


def all_numbers(step_s: float, second: float) -> list[Number]:
    return [
        *of_the_newest_step(step_s, int(second // step_s)),
        *over_several_steps(),
        *levelled_out(step_s),
        *of_the_rest(step_s, second),
    ]


def test_every_computing_query_has_a_number() -> None:
    """Count a query as computing if it is more than a series with its labels."""
    computing = {
        (*panel, legend)
        for panel, queries in PANELS.items()
        for legend, query in queries.items()
        if not re.fullmatch(r"[\w:]+\{[^}]*\}", query)
    }
    numbers = [(each.dashboard, each.panel, each.legend) for each in all_numbers(2.0, 1800.0)]
    assert len(computing) > 90
    assert computing - set(numbers) == set()
    assert len(set(numbers)) == len(numbers)


def test_panels_show_only_the_run_of_their_place_and_its_current_pod(tmp_path: Path) -> None:
    """Add runs of the same name at other places, and an earlier pod of this run."""
    step_s, second, replaced = 2.0, 1800, 900
    run, before, *others = (
        a_run(step_s=pace, scrape_s=15, seconds=second, place={**PLACE, **place}, pod=pod)
        for pace, place, pod in (
            (step_s, {}, "head-2"),
            (step_s, {}, "head-1"),
            *((3.0, {label: "other"}, "head-1") for label in PLACE_LABELS),
        )
    )
    for each, factor in ((run, 1.0), (before, 1.0), *((other, 3.0) for other in others)):
        show_the_rest(each, factor)
    run.vanish(since=0, until=replaced)
    before.vanish(since=replaced, until=math.inf)
    numbers = all_numbers(step_s, second)
    check(run, second, numbers, tmp_path / "test.yaml", others=(before, *others))


def test_the_time_since_the_newest_step_is_empty_after_the_end(tmp_path: Path) -> None:
    run = a_run(step_s=600.0, scrape_s=15, seconds=2 * HOUR)
    run.enter("finished", since=1.5 * HOUR)
    query = PANELS["overview", "Since the newest step and checkpoint"]["step"]
    looks = [
        {
            "expr": f"sum({fill(query, run=run.run, place=PLACE)})",
            "eval_time": when,
            "exp_samples": samples,
        }
        for when, samples in (
            ("4500s", [{"labels": "{}", "value": 300}]),
            ("6000s", []),
        )
    ]
    test = {"interval": "15s", "input_series": run.input_series(), "promql_expr_test": looks}
    run_test(test, tmp_path / "test.yaml")
