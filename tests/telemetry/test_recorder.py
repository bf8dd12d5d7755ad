"""Tests of the recorder: stored rows, metrics and the shown state agree."""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select
from worlds.builders.queue_builders import cut, fill, make_settings, queue_stats
from worlds.builders.record_builders import evaluation_record, step_record, unmeasured_step
from worlds.builders.trajectory_builders import make_summary
from worlds.checks.metric_expectations import differences, of_events, of_newest, of_steps
from worlds.checks.metric_names import declared
from worlds.servers.prometheus_server import Series, series

from actors.deadline import ActorLost
from actors.metrics import Metrics
from actors.statistics import STATISTICS
from actors.trajectory_queue.ledger import EvictionReason, Ledger, LedgerCounts, LedgerEvent
from actors.trajectory_queue.state import QueueState
from actors.types import BranchReason, Outcome, Timings
from service.run.health import WeightsMoved
from service.run.recorder import RunRecorder
from service.store import tables
from service.store.lineage import read_events, read_history
from service.store.run_store import RunStore
from service.worker_thread import WorkerThread


async def make_recorder(directory: Path) -> tuple[RunRecorder, RunStore, Metrics]:
    store = RunStore(f"sqlite:///{directory / 'run.db'}")
    metrics = Metrics()
    recorder = RunRecorder(store, metrics, thread=WorkerThread("store"), num_steps=10)
    await recorder.begin_term(store.acquire_lease(owner="test"))
    return recorder, store, metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get(series(name, **labels))


def samples(metrics: Metrics) -> dict[Series, float]:
    return {
        series(sample.name, **sample.labels): sample.value
        for families in metrics.read()
        for family in families
        for sample in family.samples
    }


def statistics_shown(metrics: Metrics) -> dict[str, float]:
    """Return the shown statistics of the newest step by name."""
    shown = samples(metrics)
    return {
        each.name: shown[series(each.metric)] for each in STATISTICS if series(each.metric) in shown
    }


def rows_of_events(store: RunStore) -> list[LedgerEvent]:
    """Return the stored events of all terms, also of superseded ones."""
    query = select(tables.events)
    rows = store.read(lambda connection: connection.execute(query).mappings().all())
    fields = ("seq", "rollout_id", "kind", "reason", "step")
    return [LedgerEvent(**{field: row[field] for field in fields}) for row in rows]


async def test_a_step_is_stored_with_the_events_before_it(tmp_path: Path) -> None:
    recorder, store, _ = await make_recorder(tmp_path)
    ledger = Ledger()
    ledger.admit("r0")
    ledger.train("r0", step=1)
    recorder.events(ledger.drain())
    await recorder.step(step_record(1))
    history = read_history(store)
    assert [(item.kind, item.step) for item in read_events(store)] == [
        ("admitted", None),
        ("trained", 1),
    ]
    assert [record.step for record in history.steps] == [1]
    assert recorder.last_step == 1


async def test_metrics_are_the_sums_of_the_records(tmp_path: Path) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    records = [step_record(1), step_record(2)]
    for record in records:
        await recorder.step(record)
    assert value(metrics, "rayloom_train_steps_total") == 2
    assert value(metrics, "rayloom_sampled_tokens_total") == sum(
        r.num_sampled_tokens for r in records
    )
    assert value(metrics, "rayloom_stage_seconds_sum", stage="train") == sum(
        record.stages.train for record in records
    )


async def test_an_unknown_value_has_no_series(tmp_path: Path) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    await recorder.step(step_record(1, mismatch_k3_mean=None, scaled_reward_mean=None))
    known = value(metrics, "rayloom_reward_mean")
    assert known == step_record(1).statistics["reward_mean"]
    assert value(metrics, "rayloom_mismatch_k3_nats") is None
    assert value(metrics, "rayloom_scaled_reward_mean_ratio") is None


async def test_a_gauge_vanishes_if_the_newest_step_does_not_have_its_value(
    tmp_path: Path,
) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    await recorder.step(step_record(1))
    assert value(metrics, "rayloom_loss") == step_record(1).statistics["loss"]
    await recorder.step(step_record(2, loss=None, grad_norm=math.nan))
    assert value(metrics, "rayloom_loss") is None
    assert value(metrics, "rayloom_gradient_norm") is None
    assert value(metrics, "rayloom_entropy_nats") == step_record(2).statistics["entropy_mean"]


async def test_a_statistic_vanishes_if_the_newest_step_does_not_have_it(
    tmp_path: Path,
) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    await recorder.step(step_record(1, statistics={"kl_mean": 0.25, "ratio_max": 1.5}))
    assert statistics_shown(metrics) == {"kl_mean": 0.25, "ratio_max": 1.5}
    await recorder.step(step_record(2, statistics={"ratio_max": 0.0}))
    assert statistics_shown(metrics) == {"ratio_max": 0.0}


async def test_the_statistics_return_to_the_checkpoint_with_the_run(tmp_path: Path) -> None:
    recorder, store, metrics = await make_recorder(tmp_path)
    assert statistics_shown(metrics) == {}
    await recorder.step(step_record(1))
    assert statistics_shown(metrics) == step_record(1).statistics
    await recorder.begin_term(store.acquire_lease(owner="next"))
    assert statistics_shown(metrics) == {}


async def test_a_step_that_trained_nothing_has_no_policy_age(tmp_path: Path) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    await recorder.step(step_record(1, policy_age_max=2))
    await recorder.step(unmeasured_step(2))
    assert value(metrics, "rayloom_policy_age_versions_count") == 1
    assert value(metrics, "rayloom_policy_age_versions_sum") == 2


async def test_unscored_trajectories_are_not_among_the_returns(tmp_path: Path) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    cut_off = make_summary("g000000.0-1", outcome=Outcome.TRUNCATED_TOKENS)
    recorder.rollouts(
        [
            make_summary("g000000.0-0", reward=0.5),
            replace(cut_off, is_graded=False),
            make_summary("g000000.0-2", outcome=Outcome.INFRASTRUCTURE_ERROR),
            make_summary("g000000.0-3", outcome=Outcome.CANCELLED),
        ]
    )
    of = {"environment": "game"}
    assert value(metrics, "rayloom_trajectory_seconds_count", **of) == 4
    assert value(metrics, "rayloom_trajectory_return_count", **of) == 1
    assert value(metrics, "rayloom_trajectory_return_bucket", **of, le="0.4") == 0


async def test_the_phases_that_a_trajectory_reached_are_counted(tmp_path: Path) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    played = replace(
        make_summary("g000000.0-0"),
        timings=Timings(reset_s=0.5, generate_s=2.0, step_s=0.25, wall_s=3.0),
    )
    failed = replace(make_summary("g000000.0-1"), timings=Timings(reset_s=1.5, wall_s=1.5))
    recorder.rollouts([played, failed])
    name, of = "rayloom_environment_phase_seconds", {"environment": "game"}
    for phase, count, total in (("reset", 2, 2.0), ("generate", 1, 2.0), ("step", 1, 0.25)):
        assert value(metrics, f"{name}_count", phase=phase, **of) == count
        assert value(metrics, f"{name}_sum", phase=phase, **of) == total
    assert value(metrics, f"{name}_bucket", phase="generate", le="1.0", **of) == 0
    assert value(metrics, f"{name}_bucket", phase="generate", le="2.0", **of) == 1


async def test_waits_are_summed_over_restarted_queues(tmp_path: Path) -> None:
    recorder, store, metrics = await make_recorder(tmp_path)
    stats = queue_stats(LedgerCounts())

    def see(producer: float, consumer: float) -> None:
        blocked_s = {"producer": producer, "consumer": consumer}
        recorder.queue(replace(stats, blocked_s=blocked_s))

    see(1.0, 2.0)
    see(1.5, 2.0)
    see(0.25, 2.5)  # the producers' side of a queue that was started again
    await recorder.begin_term(store.acquire_lease(owner="next"))
    see(4.0, 8.0)
    name = "rayloom_queue_blocked_seconds_total"
    assert value(metrics, name, side="producer") == 1.5 + 0.25 + 4.0
    assert value(metrics, name, side="consumer") == 2.5 + 8.0


async def test_a_phase_shows_when_it_began(tmp_path: Path) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    name = "rayloom_run_phase_timestamp_seconds"
    begun = value(metrics, name)
    recorder.phase("starting", "engines and trainer")
    assert value(metrics, name) == begun
    recorder.phase("training", "")
    since = value(metrics, name)
    assert begun is not None and since is not None and begun < since <= time.time()
    recorder.phase("training", "again")
    assert value(metrics, name) == since


async def test_a_publish_counts_its_seconds_or_its_failure(tmp_path: Path) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    with recorder.publishing("send"):
        time.sleep(0.05)
    with suppress(ActorLost), recorder.publishing("load"):
        raise ActorLost("no engine gets on")
    with suppress(WeightsMoved), recorder.publishing("check"):
        raise WeightsMoved(3)
    seconds = "rayloom_publish_seconds"
    assert 0.05 <= (value(metrics, f"{seconds}_sum", phase="send") or 0.0) < 60.0
    for phase, count in (("send", 1), ("load", 0), ("check", 0)):
        assert value(metrics, f"{seconds}_count", phase=phase) == count
    assert value(metrics, "rayloom_publish_failures_total") == 1


async def test_a_checkpoint_shows_its_size_and_time_or_its_failure(tmp_path: Path) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    assert value(metrics, "rayloom_checkpoint_bytes") is None
    files = tmp_path / "step-1"
    (files / "optimiser").mkdir(parents=True)
    (files / "weights").write_bytes(bytes(300))
    (files / "optimiser" / "0").write_bytes(bytes(200))
    await recorder.checkpoint_written(files, seconds=1.5)
    recorder.checkpoint_failed()
    assert value(metrics, "rayloom_checkpoint_bytes") == 500
    free = value(metrics, "rayloom_checkpoint_free_bytes")
    assert free is not None and 0 < free <= shutil.disk_usage(tmp_path).total
    assert value(metrics, "rayloom_checkpoint_seconds") == 1.5
    assert value(metrics, "rayloom_checkpoint_failures_total") == 1


async def test_lost_parts_leave_no_series(tmp_path: Path) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    recorder.engines(1, num_expected=2, versions={"a": 3, "b": 2})
    recorder.ranks([400, 300])
    recorder.engines(2, num_expected=2, versions={"b": 3, "c": 3})
    recorder.ranks([500])
    shown = samples(metrics)
    names = "rayloom_engine_policy_version", "rayloom_rank_peak_memory_bytes"
    assert {key: value for key, value in shown.items() if key[0] in names} == {
        series(names[0], replica="b"): 3,
        series(names[0], replica="c"): 3,
        series(names[1], rank="0"): 500,
    }
    assert value(metrics, "rayloom_trainer_ranks") == 1
    assert value(metrics, "rayloom_engines_ready") == 2


async def test_a_resumed_run_counts_every_row_that_was_ever_stored(tmp_path: Path) -> None:
    """Check this after two steps and a return to the first in another process."""
    recorder, store, metrics = await make_recorder(tmp_path)
    queue = QueueState(make_settings(step=1, lag=2))
    records = [
        step_record(1, branches={BranchReason.TEMPLATE: 2}),
        step_record(2, is_skipped=True),
    ]
    fill(queue)
    await recorder.step(records[0])
    snapshot, drained = cut(queue)
    recorder.events(drained.events)
    await recorder.checkpoint(step=1, version=1, directory="step-1", snapshot=snapshot)
    fill(queue)
    queue.cancel_all()
    recorder.events(queue.drain().events)
    await recorder.step(records[1])
    resumed = Metrics()
    recorder = RunRecorder(store, resumed, thread=WorkerThread("store"), num_steps=10)
    await recorder.begin_term(store.acquire_lease(owner="next"))
    events = rows_of_events(store)
    assert Counter(event.kind for event in events) == {"admitted": 6, "evicted": 6}
    for each in (metrics, resumed):
        assert not differences(samples(each), {**of_steps(records), **of_events(events)})
    assert not differences(samples(metrics), of_newest(records[1]))
    assert not differences(samples(resumed), of_newest(records[0]))


async def test_the_policy_version_returns_to_the_checkpoint_with_the_run(
    tmp_path: Path,
) -> None:
    recorder, store, _ = await make_recorder(tmp_path)
    snapshot = QueueState(make_settings()).snapshot()
    # The weights of the step were published again under another number.
    await recorder.step(step_record(1, policy_version=2))
    await recorder.checkpoint(step=1, version=2, directory="step-1", snapshot=snapshot)
    await recorder.step(step_record(2, policy_version=3))
    assert (recorder.last_step, recorder.policy_version) == (2, 3)
    await recorder.begin_term(store.acquire_lease(owner="next"))
    assert (recorder.last_step, recorder.policy_version) == (1, 2)


async def test_a_checkpoint_that_is_committed_again_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, _, _ = await make_recorder(tmp_path)
    snapshot = QueueState(make_settings()).snapshot()
    with caplog.at_level(logging.INFO, "rayloom"):
        for step in (1, 2, 2):
            await recorder.checkpoint(
                step=step, version=step, directory=f"step-{step}", snapshot=snapshot
            )
    logged = [record.getMessage() for record in caplog.records]
    assert [text for text in logged if text.startswith("checkpoint")] == [
        "checkpoint of step 1 in step-1",
        "checkpoint of step 2 in step-2",
    ]


async def test_evicted_rollouts_count_until_they_are_stored(tmp_path: Path) -> None:
    recorder, _, _ = await make_recorder(tmp_path)
    queue = QueueState(make_settings())
    fill(queue)
    recorder.events(queue.drain().events)
    assert recorder.num_evicted == 0
    queue.cancel_group("g000000.0")
    recorder.events(queue.drain().events)
    assert recorder.num_evicted == 2
    await recorder.checkpoint(step=0, version=0, directory="step-0", snapshot=queue.snapshot())
    assert recorder.num_evicted == 0


async def test_the_gauges_return_to_the_checkpoint_with_the_run(tmp_path: Path) -> None:
    recorder, store, metrics = await make_recorder(tmp_path)
    await recorder.evaluation(evaluation_record(0, reward=0.2))
    await recorder.step(step_record(1))
    evicted = {EvictionReason.WALL_TIMEOUT: 3}
    recorder.queue(queue_stats(LedgerCounts(admitted=3, evicted=evicted)))
    reason = {"reason": "wall_timeout"}
    assert value(metrics, "rayloom_train_newest_step") == 1
    assert value(metrics, "rayloom_ledger_evicted_rollouts", **reason) == 3
    await recorder.begin_term(store.acquire_lease(owner="next"))
    recorder.queue(queue_stats(LedgerCounts(evicted={})))
    assert value(metrics, "rayloom_train_newest_step") is None
    assert value(metrics, "rayloom_evaluation_scaled_reward_mean_ratio") is None
    assert value(metrics, "rayloom_ledger_evicted_rollouts", **reason) == 0
    assert value(metrics, "rayloom_train_steps_total") == 1


def test_counters_with_known_labels_are_zero_from_the_start() -> None:
    at_first = samples(Metrics())
    assert at_first[series("rayloom_replacements_total", part="environment_actor")] == 0
    assert at_first[series("rayloom_ledger_events_total", kind="evicted", reason="stale")] == 0
    assert at_first[series("rayloom_merge_branches_total", reason="template")] == 0
    assert "rayloom_ledger_in_flight_rollouts" not in {name for name, _ in at_first}


def test_a_scrape_shows_a_change_completely_or_not_at_all() -> None:
    metrics, seen = Metrics(), list[dict[Series, float]]()
    scrape = threading.Thread(target=lambda: seen.append(samples(metrics)))
    with metrics.together():
        metrics.steps.counted["num_sampled_tokens"].inc(7)
        scrape.start()
        scrape.join(timeout=0.3)
        assert not seen
        metrics.steps.counted["num_trained_tokens"].inc(5)
    scrape.join(timeout=30)
    shown = {name: value for (name, _), value in seen[0].items()}
    assert shown["rayloom_sampled_tokens_total"] == 7
    assert shown["rayloom_trained_tokens_total"] == 5


async def test_no_series_contains_the_start_time_of_the_process(tmp_path: Path) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    recorder.rollouts([make_summary("g000000.0-0")])
    await recorder.step(step_record(1))
    names = {name for name, _ in samples(metrics)}
    assert names and not [name for name in names if name.endswith("_created")]
    assert names <= {name for metric in declared() for name in metric.series}


async def test_ended_trajectories_are_counted_by_outcome(tmp_path: Path) -> None:
    recorder, _, metrics = await make_recorder(tmp_path)
    summaries = [
        make_summary("g000000.0-0"),
        replace(make_summary("g000000.0-1"), outcome=Outcome.WALL_TIMEOUT),
    ]
    recorder.rollouts(summaries)
    environment = summaries[0].environment
    assert (
        value(metrics, "rayloom_rollouts_total", environment=environment, outcome="wall_timeout")
        == 1
    )
    assert recorder.num_rollouts == 2


async def test_unstored_events_of_a_dead_term_are_void_in_the_next(tmp_path: Path) -> None:
    recorder, store, _ = await make_recorder(tmp_path)
    ledger = Ledger()
    ledger.admit("r0")
    recorder.events(ledger.drain())
    await recorder.begin_term(store.acquire_lease(owner="next"))
    await recorder.step(step_record(1))
    assert read_events(store) == ()
    assert "term 2 continues from step 0" in recorder.notices.since(0)[0]


async def test_phases_are_shown_with_their_detail(tmp_path: Path) -> None:
    recorder, _, _ = await make_recorder(tmp_path)
    recorder.phase("starting", "engines and trainer")
    assert (recorder.current_phase, recorder.phase_detail) == (
        "starting", "engines and trainer",
    )  # fmt: skip


async def test_a_start_after_a_fault_is_shown_as_recovering(tmp_path: Path) -> None:
    recorder, _, _ = await make_recorder(tmp_path)
    recorder.starting("engines and trainer")
    assert recorder.current_phase == "starting"
    recorder.phase("recovering", "rank 0 died")
    recorder.starting("engines and trainer")
    assert (recorder.current_phase, recorder.phase_detail) == (
        "recovering", "engines and trainer",
    )  # fmt: skip


async def test_the_first_fault_of_each_kind_is_reported_with_its_text(tmp_path: Path) -> None:
    recorder, _, _ = await make_recorder(tmp_path)
    broken = replace(
        make_summary("g000000.0-0", outcome=Outcome.ENVIRONMENT_ERROR), detail="reset: no server"
    )
    slow = replace(broken, outcome=Outcome.WALL_TIMEOUT, detail="environment step: no answer")
    fine = make_summary("g000000.0-1", outcome=Outcome.COMPLETED)
    recorder.rollouts([broken, broken, fine, slow, broken])
    assert [notice.partition(",")[0] for notice in recorder.notices.since(0)] == [
        "first environment_error", "first wall_timeout",
    ]  # fmt: skip
    assert "reset: no server" in recorder.notices.since(0)[0]


async def test_a_collapse_of_the_reward_is_shown_until_it_has_recovered(tmp_path: Path) -> None:
    recorder, store, metrics = await make_recorder(tmp_path)
    gauge = "rayloom_reward_collapsed_since_step"
    for step in range(1, 61):
        mean = 0.8 + 0.01 * (step % 2) if step <= 50 else 0.1
        await recorder.step(step_record(step, reward_mean=mean, reward_std=0.1))
        assert (value(metrics, gauge) is None) == (recorder.collapsed_since is None)
        assert step > 50 or recorder.collapsed_since is None
    assert value(metrics, gauge) == recorder.collapsed_since == 51
    [notice] = [each for each in recorder.notices.since(0) if "mean return" in each]
    assert "fallen from 0.805 to" in notice and "since step 51" in notice
    # A later term begins without a checkpoint, so the steps of the collapse are undone.
    await recorder.begin_term(store.acquire_lease(owner="next"))
    assert recorder.collapsed_since is None and value(metrics, gauge) is None


async def test_a_term_that_continues_after_a_collapse_reads_it_from_the_stored_steps(
    tmp_path: Path,
) -> None:
    recorder, store, metrics = await make_recorder(tmp_path)
    snapshot = QueueState(make_settings()).snapshot()
    for step in range(1, 61):
        mean = 0.8 + 0.01 * (step % 2) if step <= 50 else 0.1
        await recorder.step(step_record(step, reward_mean=mean, reward_std=0.1))
    await recorder.checkpoint(step=60, version=60, directory="step-60", snapshot=snapshot)
    await recorder.begin_term(store.acquire_lease(owner="next"))
    assert recorder.collapsed_since == 51
    assert value(metrics, "rayloom_reward_collapsed_since_step") == 51
    for step in range(61, 71):
        await recorder.step(step_record(step, reward_mean=0.8, reward_std=0.1))
    assert recorder.collapsed_since is None
    assert value(metrics, "rayloom_reward_collapsed_since_step") is None
    assert "step 66: the mean return has recovered" in recorder.notices.since(0)
