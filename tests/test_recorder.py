"""What is written down of a step: durable rows, metrics and the shown state agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from record_builders import step_record
from trajectory_builders import make_summary

from actors.metrics import Metrics
from actors.trajectory import Outcome
from actors.trajectory_queue.ledger import Ledger
from service.recorder import RunRecorder
from service.status import Phase
from service.store.lineage import read_history
from service.store.run_store import RunStore


def make_recorder(directory: Path) -> tuple[RunRecorder, RunStore, Metrics]:
    store = RunStore(f"sqlite:///{directory / 'run.db'}")
    metrics = Metrics()
    recorder = RunRecorder(store, metrics, num_steps=10)
    recorder.begin_epoch(store.acquire_lease(holder="test"))
    return recorder, store, metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_step_is_stored_with_the_events_before_it_counted_from_one(tmp_path: Path) -> None:
    recorder, store, _ = make_recorder(tmp_path)
    ledger = Ledger()
    ledger.admit("r0")
    ledger.train("r0", step=0)
    recorder.events(ledger.drain())
    recorder.step(step_record(1))
    history = read_history(store)
    assert [(item.kind, item.step) for item in history.events] == [
        ("admitted", None),
        ("trained", 1),
    ]
    assert [record.step for record in history.steps] == [1]
    assert recorder.last_step == 1


def test_metrics_add_up_to_the_records(tmp_path: Path) -> None:
    recorder, _, metrics = make_recorder(tmp_path)
    records = [step_record(1), step_record(2)]
    for record in records:
        recorder.step(record)
    assert value(metrics, "rayloom_train_steps_total") == 2
    assert value(metrics, "rayloom_sampled_tokens_total") == sum(r.sampled_tokens for r in records)
    assert value(metrics, "rayloom_stage_seconds_sum", stage="train") == sum(
        record.stages.train for record in records
    )


def test_what_is_not_known_is_absent_and_never_zero(tmp_path: Path) -> None:
    recorder, _, metrics = make_recorder(tmp_path)
    recorder.step(replace(step_record(1), mismatch_k3=None, scaled_reward_mean=None))
    families = {
        family.name: family.samples for family in metrics.registry.collect() if family.samples
    }
    assert families["rayloom_reward_mean"][0].value == step_record(1).reward_mean
    assert "rayloom_mismatch_k3_nats" not in families
    assert "rayloom_scaled_reward_mean_ratio" not in families


def test_ended_trajectories_are_counted_by_outcome(tmp_path: Path) -> None:
    recorder, _, metrics = make_recorder(tmp_path)
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


def test_what_a_dead_epoch_had_not_stored_is_void_in_the_next(tmp_path: Path) -> None:
    recorder, store, _ = make_recorder(tmp_path)
    ledger = Ledger()
    ledger.admit("r0")
    recorder.events(ledger.drain())
    recorder.begin_epoch(store.acquire_lease(holder="next"))
    recorder.step(step_record(1))
    assert read_history(store).events == ()
    assert "epoch 2 goes on from step 0" in recorder.notices[0]


def test_phases_are_shown_with_their_detail(tmp_path: Path) -> None:
    recorder, _, _ = make_recorder(tmp_path)
    recorder.phase(Phase.STARTING, "engines and trainer")
    assert (recorder.current_phase, recorder.phase_detail) == (
        Phase.STARTING, "engines and trainer",
    )  # fmt: skip


def test_the_first_fault_of_each_kind_is_told_with_its_text(tmp_path: Path) -> None:
    recorder, _, _ = make_recorder(tmp_path)
    broken = replace(
        make_summary("g000000.0-0", outcome=Outcome.ENVIRONMENT_ERROR), detail="reset: no server"
    )
    slow = replace(broken, outcome=Outcome.WALL_TIMEOUT, detail="environment step: no answer")
    fine = make_summary("g000000.0-1", outcome=Outcome.COMPLETED)
    recorder.rollouts([broken, broken, fine, slow, broken])
    assert [notice.partition(",")[0] for notice in recorder.notices] == [
        "first environment_error", "first wall_timeout",
    ]  # fmt: skip
    assert "reset: no server" in recorder.notices[0]
