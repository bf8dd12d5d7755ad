"""Tests of the trace of a rollout that a collector receives: its spans and their times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds.builders.record_builders import step_record
from worlds.builders.trajectory_builders import make_summary
from worlds.servers.otlp_collector import Collector, Trace, attributes, collecting

from actors.trajectory_queue.ledger import EvictionReason, Ledger
from actors.types import Outcome, Timings, TrajectorySummary
from service.config.sections import TracingSettings
from service.run.traces import RolloutTraces, traces_to
from service.telemetry.records import StageSeconds

ROLLOUT, OTHER = "g000003.0-1", "g000003.0-2"
T = 1_800_000_000.0
STAGES = StageSeconds(collect=4.0, merge=1.0, train=5.0, publish=2.0)


def started(collector: Collector, *, sample_ratio: float = 1.0) -> RolloutTraces:
    """Return the traces of a run to which a client submitted the group at time T."""
    settings = TracingSettings(endpoint=collector.url, sample_ratio=sample_ratio)
    traces = traces_to(settings, run="small", accepted_at={"g000003.0": T}.get)
    assert traces is not None
    return traces


def played(
    rollout: str, *, wall_s: float, outcome: Outcome = Outcome.COMPLETED
) -> TrajectorySummary:
    timings = Timings(reset_s=0.25, generate_s=1.5, step_s=0.25, wall_s=wall_s)
    return replace(make_summary(rollout, outcome=outcome, reward=0.5, version=2), timings=timings)


def test_a_trained_rollout_is_one_trace_from_its_submission_to_the_step() -> None:
    with collecting() as collector:
        traces, ledger = started(collector), Ledger()
        ledger.admit(ROLLOUT)
        traces.events(ledger.drain(), now=T + 2)
        failed = played(ROLLOUT, wall_s=1.0, outcome=Outcome.INFRASTRUCTURE_ERROR)
        traces.attempts([failed], now=T + 4)
        traces.attempts([replace(played(ROLLOUT, wall_s=3.0), attempt=1)], now=T + 8)
        ledger.train(ROLLOUT, step=7)
        traces.events(ledger.drain(), now=T + 20)
        assert collector.traces() == {}
        traces.step(step_record(7, stages=STAGES, policy_version=9))
        traces.close()
        [(rollout, trace)] = collector.traces().items()
    assert rollout == ROLLOUT
    assert trace.seconds("rollout") == [(T, T + 20)]
    assert trace.seconds("wait for admission") == [(T, T + 2)]
    assert trace.seconds("attempt") == [(T + 3, T + 4), (T + 5, T + 8)]
    assert trace.seconds("wait for the step") == [(T + 8, T + 12)]
    assert trace.seconds("optimiser step") == [(T + 12, T + 20)]
    assert trace.seconds("merge") == [(T + 12, T + 13)]
    assert trace.seconds("train") == [(T + 13, T + 18)]
    assert trace.seconds("publish") == [(T + 18, T + 20)]
    own = {"wait for admission", "attempt", "wait for the step", "optimiser step"}
    assert trace.parents() == {(name, "rollout") for name in own} | {
        (name, "optimiser step") for name in ("merge", "train", "publish")
    }
    check_attributes(trace)


def check_attributes(trace: Trace) -> None:
    found = attributes(trace.root)
    assert found["rayloom.end"] == "trained" and found["rayloom.environment"] == "game"
    [step] = trace.spans["optimiser step"]
    assert attributes(step) == {"rayloom.step": 7, "rayloom.policy_version": 9}
    first, second = trace.spans["attempt"]
    assert first.status.code == first.status.STATUS_CODE_ERROR
    assert second.status.code == second.status.STATUS_CODE_UNSET
    assert attributes(second) | {"rayloom.task_id": ""} == {
        "rayloom.attempt": 1, "rayloom.outcome": "completed", "rayloom.return": 0.5,
        "rayloom.turns": 1, "rayloom.sampled_tokens": 2, "rayloom.policy_version": 2,
        "rayloom.reset_seconds": 0.25, "rayloom.generate_seconds": 1.5,
        "rayloom.step_seconds": 0.25, "rayloom.task_id": "",
    }  # fmt: skip


def test_an_evicted_rollout_has_its_last_attempt_even_if_reported_later() -> None:
    with collecting() as collector:
        traces, ledger = started(collector), Ledger()
        ledger.admit("g000009.0-0")
        ledger.evict("g000009.0-0", EvictionReason.WALL_TIMEOUT)
        traces.events(ledger.drain(), now=T + 5)
        late = played("g000009.0-0", wall_s=4.0, outcome=Outcome.WALL_TIMEOUT)
        traces.attempts([late], now=T + 5)
        traces.close()
        [trace] = collector.traces().values()
    # A task of the run has no submission, so there is no wait for admission.
    assert trace.spans.keys() == {"rollout", "attempt"}
    assert trace.seconds("attempt") == [(T + 1, T + 5)]
    assert attributes(trace.root)["rayloom.end"] == "evicted: wall_timeout"


def test_rollouts_of_a_lost_term_are_not_in_the_traces_of_the_next() -> None:
    with collecting() as collector:
        traces, ledger = started(collector), Ledger()
        ledger.admit(ROLLOUT)
        ledger.train(ROLLOUT, step=7)
        ledger.admit(OTHER)
        traces.events(ledger.drain(), now=T + 1)
        traces.begin_term()
        traces.step(step_record(7, stages=STAGES))
        ledger.train(OTHER, step=7)
        traces.events(ledger.drain(), now=T + 30)
        traces.step(step_record(7, stages=STAGES))
        traces.close()
        found = collector.traces()
    assert found.keys() == {OTHER}


@pytest.mark.parametrize("sample_ratio", [0.05, 1.0])
def test_a_share_of_the_rollouts_is_traced_completely(sample_ratio: float) -> None:
    with collecting() as collector:
        traces, ledger = started(collector, sample_ratio=sample_ratio), Ledger()
        rollouts = [f"g000003.0-{number}" for number in range(200)]
        for rollout in rollouts:
            ledger.admit(rollout)
            ledger.train(rollout, step=7)
        traces.events(ledger.drain(), now=T + 1)
        traces.step(step_record(7, stages=STAGES))
        traces.close()
        found = collector.traces()
    # With a ratio of one in twenty, more than 40 of 200 are practically impossible.
    assert len(found) == 200 if sample_ratio == 1.0 else len(found) <= 40
    assert all("optimiser step" in trace.spans for trace in found.values())


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert traces_to(TracingSettings(), run="small", accepted_at=lambda group: None) is None
