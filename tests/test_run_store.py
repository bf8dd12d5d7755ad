"""The durable store: leases fence, a checkpoint commits with its ledger, lineage survives."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from record_builders import evaluation_record, step_record

from service.store.lineage import read_history
from service.store.run_store import LeaseLost, RunStore, StoredEvent


def open_store(directory: Path) -> RunStore:
    return RunStore(f"sqlite:///{directory / 'run.db'}")


def event(
    seq: int, rollout_id: str, kind: str = "admitted", step: int | None = None
) -> StoredEvent:
    return StoredEvent(seq=seq, rollout_id=rollout_id, kind=kind, step=step)


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
    assert new.newest_checkpoint() is None


def test_records_come_back_as_they_were_and_nan_as_unknown(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    epoch = store.acquire_lease(holder="a").epoch
    evaluation = replace(evaluation_record(1), scaled_reward_mean=None)
    store.add_step(step_record(1, mismatch_k3=math.nan), epoch=epoch, new_events=[])
    store.add_evaluation(evaluation, epoch=epoch)
    history = read_history(store)
    assert history.steps == (step_record(1, mismatch_k3=None),)
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
    assert [(step.step, step.reward_mean) for step in history.steps] == [
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


def test_the_newest_directories_come_newest_first_and_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    epoch = store.acquire_lease(holder="a").epoch
    for step in (1, 2, 3, 3):
        commit(store, epoch=epoch, step=step, last_event_seq=-1)
    assert store.newest_directories(2) == ["/checkpoints/1-3", "/checkpoints/1-2"]
