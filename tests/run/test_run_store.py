"""The durable store: leases fence, a checkpoint commits with its ledger, lineage survives."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.record_builders import evaluation_record, step_record

from actors.trajectory_queue.ledger import LedgerEvent, LedgerEventKind
from service.store import tables
from service.store.lineage import read_history
from service.store.run_store import LeaseLost, RunStore, StoreError


def open_store(directory: Path) -> RunStore:
    return RunStore(f"sqlite:///{directory / 'run.db'}")


def event(
    seq: int, rollout_id: str, kind: str = "admitted", step: int | None = None
) -> LedgerEvent:
    return LedgerEvent(seq=seq, rollout_id=rollout_id, kind=LedgerEventKind(kind), step=step)


def commit(store: RunStore, *, epoch: int, step: int, last_event_seq: int) -> None:
    store.commit_checkpoint(
        epoch=epoch,
        step=step,
        policy_version=step,
        directory=f"/checkpoints/{epoch}-{step}",
        queue_snapshot={"step": step},
        new_events=(),
        last_event_seq=last_event_seq,
    )


def test_the_first_lease_has_no_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    lease = open_store(tmp_path).acquire_lease(holder="a")
    assert (lease.epoch, lease.parent) == (1, None)


def test_an_older_epoch_can_write_nothing(tmp_path: Path) -> None:
    old, new = open_store(tmp_path), open_store(tmp_path)
    first = old.acquire_lease(holder="old")
    old.add_step(step_record(1), epoch=first.epoch, new_events=[event(0, "a")])
    new.acquire_lease(holder="new")
    with pytest.raises(LeaseLost, match=r"epoch 1 .* epoch 2"):
        old.add_step(step_record(2), epoch=first.epoch, new_events=[event(1, "b")])
    with pytest.raises(LeaseLost):
        commit(old, epoch=first.epoch, step=2, last_event_seq=1)
    with pytest.raises(LeaseLost):
        old.add_evaluation(evaluation_record(1), epoch=first.epoch)
    with pytest.raises(LeaseLost):
        old.check_lease(first.epoch)
    assert new.commits() == []


def test_records_come_back_as_they_were_and_nan_as_unknown(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    epoch = store.acquire_lease(holder="a").epoch
    evaluation = replace(evaluation_record(1), scaled_reward_mean=None)
    store.add_step(step_record(1, mismatch_k3_mean=math.nan), epoch=epoch, new_events=[])
    store.add_evaluation(evaluation, epoch=epoch)
    history = read_history(store)
    assert history.steps == (step_record(1, mismatch_k3_mean=None),)
    assert history.evaluations == (evaluation,)


def test_what_came_after_the_checkpoint_of_a_dead_epoch_is_superseded(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = store.acquire_lease(holder="a").epoch
    store.add_step(step_record(1), epoch=first, new_events=[event(0, "r0"), event(1, "r1")])
    store.add_step(step_record(2), epoch=first, new_events=[event(2, "r0", "trained", 2)])
    commit(store, epoch=first, step=2, last_event_seq=2)
    store.add_step(
        step_record(3, reward_mean=0.1), epoch=first, new_events=[event(3, "r1", "trained", 3)]
    )

    second = store.acquire_lease(holder="b")
    assert second.parent is not None and second.parent.step == 2
    store.add_step(
        step_record(3, reward_mean=0.9),
        epoch=second.epoch,
        new_events=[event(3, "r1", "trained", 3)],
    )
    history = read_history(store)
    assert [(step.step, step.value("reward_mean")) for step in history.steps] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.9),
    ]
    assert [item.seq for item in history.events] == [0, 1, 2, 3]
    trained = [item.rollout_id for item in history.events if item.kind == "trained"]
    assert trained == ["r0", "r1"]


def test_lineage_runs_through_several_epochs(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for epoch in (1, 2, 3):
        lease = store.acquire_lease(holder="x")
        start = lease.parent.step if lease.parent else 0
        for step in (start + 1, start + 2):
            store.add_step(step_record(step), epoch=epoch, new_events=[])
        commit(store, epoch=epoch, step=start + 1, last_event_seq=-1)
    assert [step.step for step in read_history(store).steps] == [1, 2, 3, 4]
    assert read_history(store).num_epochs == 3


def test_an_epoch_that_died_before_its_first_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = store.acquire_lease(holder="a").epoch
    store.add_step(step_record(1), epoch=first, new_events=[event(0, "r0")])
    assert store.acquire_lease(holder="b").parent is None
    assert read_history(store).steps == ()


def test_commits_come_newest_first_and_once_by_name_whatever_path_was_stored(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    epoch = store.acquire_lease(holder="a").epoch
    for step in (1, 2, 3, 3):
        commit(store, epoch=epoch, step=step, last_event_seq=-1)
    with store._engine.begin() as connection:
        # As an older layout of the database had it.
        connection.execute(
            tables.checkpoints.update()
            .where(tables.checkpoints.c.id == 2)
            .values(directory="/of/another/machine/checkpoints/1-2")
        )
    assert [commit.directory for commit in store.commits()] == ["1-3", "1-2", "1-1"]
    lease = store.acquire_lease(holder="b", passed_over={"1-3"})
    assert lease.parent is not None and lease.parent.directory == "1-2"


def test_what_was_committed_after_the_checkpoint_returned_to_leaves_the_lineage(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    first = store.acquire_lease(holder="a").epoch
    for step in (1, 2, 3):
        trained = event(step, f"r{step}", "trained", step)
        store.add_step(step_record(step, reward_mean=0.1), epoch=first, new_events=[trained])
        commit(store, epoch=first, step=step, last_event_seq=step)
    second = store.acquire_lease(holder="b", passed_over={"1-3", "1-2"})
    assert second.parent is not None and second.parent.queue_snapshot == {"step": 1}
    history = read_history(store)
    assert [step.step for step in history.steps] == [1]
    assert [item.rollout_id for item in history.events] == ["r1"]
    assert [item.directory for item in store.commits()] == ["1-3", "1-2", "1-1"]
    again = step_record(2, reward_mean=0.9)
    store.add_step(again, epoch=second.epoch, new_events=[event(2, "r2", "trained", 2)])
    commit(store, epoch=second.epoch, step=2, last_event_seq=2)
    assert [item.directory for item in store.commits()] == ["2-2", "1-1"]
    assert [step.value("reward_mean") for step in read_history(store).steps] == [0.1, 0.9]
    assert [item.rollout_id for item in read_history(store).events] == ["r1", "r2"]


def test_a_run_whose_every_checkpoint_is_unusable_does_not_start_afresh(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    commit(store, epoch=store.acquire_lease(holder="a").epoch, step=1, last_event_seq=-1)
    with pytest.raises(StoreError, match="none of the run's 1 checkpoints can be used"):
        store.acquire_lease(holder="b", passed_over={"1-1"})
    assert store.newest_epoch() == 1


def test_what_is_no_database_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes(b"SQLite format 3\0" + b"\1" * 5000)
    with pytest.raises(StoreError, match=r"run\.db cannot be opened \("):
        open_store(tmp_path)
