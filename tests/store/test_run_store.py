"""Tests of the store of a run: leases, records, checkpoints and lineage."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update
from worlds.builders.record_builders import evaluation_record, step_record
from worlds.builders.store_builders import OpenStore, commit, queue_snapshot, write_under_way

from actors.policy_age import undone_after
from actors.trajectory_queue.ledger import LedgerEvent, LedgerEventKind
from service import VERSION
from service.store import tables
from service.store.controls import CallAnswer, ControlStore, PauseAnswer
from service.store.errors import LeaseLost, StoreError
from service.store.lineage import (
    RecordKind,
    count_events,
    first_versions,
    newest_records,
    read_events,
    read_history,
    records_after,
)
from service.store.read_only import ReadOnlyStore
from service.store.run_store import RunStore
from service.store.tables import Pausable


def open_store(directory: Path) -> RunStore:
    return RunStore(f"sqlite:///{directory / 'run.db'}")


def event(
    seq: int, rollout_id: str, kind: str = "admitted", step: int | None = None
) -> LedgerEvent:
    return LedgerEvent(seq=seq, rollout_id=rollout_id, kind=LedgerEventKind(kind), step=step)


def test_the_first_lease_has_no_checkpoint(tmp_path: Path, opened: OpenStore) -> None:
    lease = opened(tmp_path).acquire_lease(owner="a")
    assert (lease.term, lease.parent) == (1, None)


def test_an_older_term_cannot_write(tmp_path: Path, opened: OpenStore) -> None:
    old, new = opened(tmp_path), opened(tmp_path)
    first = old.acquire_lease(owner="old")
    old.add_step(step_record(1), term=first.term, new_events=[event(0, "a")])
    new.acquire_lease(owner="new")
    with pytest.raises(LeaseLost, match=r"taken over by new \(term 2, since .* had term 1"):
        old.add_step(step_record(2), term=first.term, new_events=[event(1, "b")])
    with pytest.raises(LeaseLost):
        commit(old, term=first.term, step=2, last_event_seq=1)
    with pytest.raises(LeaseLost):
        old.add_evaluation(evaluation_record(1), term=first.term)
    with pytest.raises(LeaseLost):
        old.check_lease(first.term)
    assert new.checkpoints() == []


def test_records_are_read_as_written_and_nan_as_none(tmp_path: Path, opened: OpenStore) -> None:
    store = opened(tmp_path)
    term = store.acquire_lease(owner="a").term
    evaluation = replace(evaluation_record(1), scaled_reward_mean=None)
    store.add_step(step_record(1, mismatch_k3_mean=math.nan), term=term, new_events=[])
    store.add_evaluation(evaluation, term=term)
    history = read_history(store)
    assert history.steps == (step_record(1, mismatch_k3_mean=None),)
    assert history.evaluations == (evaluation,)


def test_records_after_the_last_checkpoint_of_a_dead_term_are_superseded(
    tmp_path: Path, opened: OpenStore
) -> None:
    store = opened(tmp_path)
    first = store.acquire_lease(owner="a").term
    store.add_step(step_record(1), term=first, new_events=[event(0, "r0"), event(1, "r1")])
    store.add_step(step_record(2), term=first, new_events=[event(2, "r0", "trained", 2)])
    commit(store, term=first, step=2, last_event_seq=2)
    store.add_step(
        step_record(3, reward_mean=0.1), term=first, new_events=[event(3, "r1", "trained", 3)]
    )

    second = store.acquire_lease(owner="b")
    assert second.parent is not None and second.parent.step == 2
    store.add_step(
        step_record(3, reward_mean=0.9),
        term=second.term,
        new_events=[event(3, "r1", "trained", 3)],
    )
    history = read_history(store)
    assert [(step.step, step.value("reward_mean")) for step in history.steps] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.9),
    ]
    assert [item.seq for item in read_events(store)] == [0, 1, 2, 3]
    trained = [item.rollout_id for item in read_events(store) if item.kind == "trained"]
    assert trained == ["r0", "r1"]


def test_lineage_runs_through_several_terms(tmp_path: Path, opened: OpenStore) -> None:
    store = opened(tmp_path)
    for term in (1, 2, 3):
        lease = store.acquire_lease(owner="x")
        start = lease.parent.step if lease.parent else 0
        for step in (start + 1, start + 2):
            store.add_step(step_record(step), term=term, new_events=[])
        commit(store, term=term, step=start + 1, last_event_seq=-1)
    assert [step.step for step in read_history(store).steps] == [1, 2, 3, 4]
    assert read_history(store).num_terms == 3


def test_a_term_without_a_checkpoint_leaves_nothing(tmp_path: Path, opened: OpenStore) -> None:
    store = opened(tmp_path)
    first = store.acquire_lease(owner="a").term
    store.add_step(step_record(1), term=first, new_events=[event(0, "r0")])
    assert store.acquire_lease(owner="b").parent is None
    assert read_history(store).steps == ()


def test_checkpoints_are_listed_newest_first_and_once(tmp_path: Path, opened: OpenStore) -> None:
    store = opened(tmp_path)
    term = store.acquire_lease(owner="a").term
    for step in (1, 2, 3, 3):
        commit(store, term=term, step=step)
    assert [item.directory for item in store.checkpoints()] == ["1-3", "1-2", "1-1"]
    lease = store.acquire_lease(owner="b", passed_over={"1-3"})
    assert lease.parent is not None and lease.parent.directory == "1-2"


def test_a_curriculum_resumes_from_the_checkpoint(tmp_path: Path, opened: OpenStore) -> None:
    store = opened(tmp_path)
    assert store.acquire_lease(owner="a").curriculum is None
    term = store.acquire_lease(owner="a").term
    results = {"t1": (1.0, 0.5), "a:t2": (0.0,)}
    store.commit_checkpoint(
        term=term,
        step=1,
        policy_version=1,
        directory="1-1",
        queue_snapshot=queue_snapshot(1),
        curriculum=results,
        new_events=[],
        last_event_seq=-1,
    )
    assert store.acquire_lease(owner="b").curriculum == results


def test_records_after_the_checkpoint_of_a_return_leave_the_lineage(
    tmp_path: Path,
    opened: OpenStore,
) -> None:
    store = opened(tmp_path)
    first = store.acquire_lease(owner="a").term
    for step in (1, 2, 3):
        trained = event(step, f"r{step}", "trained", step)
        store.add_step(step_record(step, reward_mean=0.1), term=first, new_events=[trained])
        commit(store, term=first, step=step, last_event_seq=step)
    second = store.acquire_lease(owner="b", passed_over={"1-3", "1-2"})
    assert second.parent is not None and second.queue_snapshot == queue_snapshot(1)
    history = read_history(store)
    assert [step.step for step in history.steps] == [1]
    assert [item.rollout_id for item in read_events(store)] == ["r1"]
    assert [item.directory for item in store.checkpoints()] == ["1-3", "1-2", "1-1"]
    again = step_record(2, reward_mean=0.9)
    store.add_step(again, term=second.term, new_events=[event(2, "r2", "trained", 2)])
    commit(store, term=second.term, step=2, last_event_seq=2)
    assert [item.directory for item in store.checkpoints()] == ["2-2", "1-1"]
    assert [step.value("reward_mean") for step in read_history(store).steps] == [0.1, 0.9]
    assert [item.rollout_id for item in read_events(store)] == ["r1", "r2"]


def test_the_first_version_of_a_term_shows_which_earlier_versions_are_undone(
    tmp_path: Path, opened: OpenStore
) -> None:
    store = opened(tmp_path)
    for term, passed_over, steps in ((1, (), (2, 4)), (2, {"1-4"}, (3,)), (3, (), ())):
        assert store.acquire_lease(owner="test", passed_over=passed_over).term == term
        for step in steps:
            commit(store, term=term, step=step)
    found = store.read(first_versions)
    assert found == {1: 0, 2: 2, 3: 3}
    assert [undone_after(term, found) for term in found] == [2, 3, None]


def test_a_requested_return_counts_from_its_lease_and_undoes_later_steps(
    tmp_path: Path, opened: OpenStore
) -> None:
    store = opened(tmp_path)
    first = store.acquire_lease(owner="a").term
    for step in (1, 2, 3):
        commit(store, term=first, step=step)
    # A checkpoint that cannot be read is skipped, but stays in the list.
    passed = store.acquire_lease(owner="b", passed_over={"1-3"})
    assert passed.parent is not None and passed.parent.step == 2
    assert [each.directory for each in store.checkpoints()] == ["1-3", "1-2", "1-1"]
    # A return stays valid even if its term dies.
    returned = store.acquire_lease(owner="c", returns_to="1-2")
    assert returned.parent is not None and returned.parent.step == 2
    after = store.acquire_lease(owner="d")
    assert after.parent is not None and after.parent.directory == "1-2"
    assert [each.directory for each in store.checkpoints()] == ["1-2", "1-1"]
    assert {each.directory for each in store.all_checkpoints()} == {"1-1", "1-2", "1-3"}
    # The undone versions are known, which is needed for the turns of sessions.
    assert undone_after(first, store.read(first_versions)) == 2
    commit(store, term=after.term, step=3)
    assert [each.directory for each in store.checkpoints()] == ["4-3", "1-2", "1-1"]
    # After a further return, a return to a removed checkpoint has no effect.
    again = store.acquire_lease(owner="e", returns_to="1-1")
    assert again.parent is not None and again.parent.step == 1
    gone = store.acquire_lease(owner="f", returns_to="4-3")
    assert gone.parent is not None and gone.parent.directory == "1-1"


def test_pauses_and_the_newest_calls_of_operators_are_kept(
    tmp_path: Path, opened: OpenStore
) -> None:
    store = opened(tmp_path)
    term, controls = store.acquire_lease(owner="a").term, ControlStore(store)
    pause = PauseAnswer(part=Pausable.TRAINING, since=1.5, reason="a look")
    for _ in range(2):
        controls.set_paused(Pausable.TRAINING, pause, term=term)
        assert controls.pauses() == [pause]
    controls.set_paused(Pausable.TRAINING, None, term=term)
    assert controls.pauses() == []
    calls = [
        CallAnswer(at=float(at), caller="ops", call="POST /x", body="{}", status=200, answer="")
        for at in range(3)
    ]
    for call in calls:
        controls.add_call(call, term=term)
    assert controls.calls(limit=2) == calls[:0:-1]
    store.acquire_lease(owner="b")
    with pytest.raises(LeaseLost):
        controls.set_paused(Pausable.TRAINING, pause, term=term)


def test_several_evaluations_of_one_step_are_kept(tmp_path: Path, opened: OpenStore) -> None:
    store = opened(tmp_path)
    term = store.acquire_lease(owner="a").term
    asked = replace(evaluation_record(1), is_scheduled=False, temperature=0.7, pass_at={1: 0.5})
    named = replace(evaluation_record(1), name="hard")
    records = [evaluation_record(1), asked, replace(asked, num_samples=2), named]
    for record in (asked, evaluation_record(1), *records[2:]):
        store.add_evaluation(record, term=term)
    assert list(read_history(store).evaluations) == records
    assert newest_records(store)[1] == records[0]


def test_a_run_without_a_usable_checkpoint_does_not_start_again(
    tmp_path: Path, opened: OpenStore
) -> None:
    store = opened(tmp_path)
    commit(store, term=store.acquire_lease(owner="a").term, step=1, last_event_seq=-1)
    with pytest.raises(StoreError, match="none of the run's 1 checkpoints can be used"):
        store.acquire_lease(owner="b", passed_over={"1-1"})
    assert store.newest_term() == 1


def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes(b"SQLite format 3\0" + b"\1" * 5000)
    with pytest.raises(StoreError, match=r"run\.db cannot be opened \("):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("DROP TABLE leases", r"cannot be read \(no such table: leases\)"),
        ("DROP TABLE checkpoints", r"cannot be read \(no such table: checkpoints\)"),
        ("DELETE FROM format", "is damaged .no format number.; restore a copy"),
    ],
)
def test_an_incomplete_database_is_refused(tmp_path: Path, damage: str, words: str) -> None:
    open_store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "run.db")) as connection:
        connection.execute(damage)
        connection.commit()
    with pytest.raises(StoreError, match=words):
        store = open_store(tmp_path)
        store.newest_term()
        store.checkpoints()


@pytest.mark.parametrize(
    ("damage", "look", "words"),
    [
        ("UPDATE steps SET record = '{'", read_history, "a stored StepRecord cannot be read"),
        ("UPDATE steps SET record = '{}'", newest_records, "a stored StepRecord cannot be read"),
        (
            "UPDATE leases SET kind = 'x'",
            RunStore.kind,
            "a stored RunKind is not one of train, serve",
        ),
        ("UPDATE events SET reason = 'x'", read_events, "a stored EvictionReason is not one of .*"),
        ("UPDATE event_totals SET kind = 'x'", count_events, "a stored LedgerEventKind is not .*"),
        (
            "UPDATE checkpoints SET queue_snapshot = 'x' WHERE step = 2",
            lambda store: store.acquire_lease(owner="c"),
            "a stored QueueSnapshot cannot be read",
        ),
        ("DELETE FROM checkpoints", read_history, "checkpoint 1, which term 2 continued from.*"),
        ("DELETE FROM leases WHERE term = 1", read_events, "term 1 is missing"),
        ("DELETE FROM leases", lambda store: store.checkpoints(), "term 2 is missing"),
    ],
)
def test_damaged_values_are_refused_when_they_are_read(
    tmp_path: Path, damage: str, look: Callable[[RunStore], object], words: str
) -> None:
    store = open_store(tmp_path)
    for owner in "ab":
        term = store.acquire_lease(owner=owner).term
        store.add_step(step_record(term), term=term, new_events=[event(term, "r")])
        commit(store, term=term, step=term, last_event_seq=term)
    with closing(sqlite3.connect(tmp_path / "run.db")) as connection:
        connection.execute(damage)
        connection.commit()
    with pytest.raises(StoreError, match=rf"run\.db is damaged \({words}\); restore a copy"):
        look(store)
    store.close()


def test_a_run_of_an_unsupported_format_is_refused(tmp_path: Path) -> None:
    old, newer = tmp_path / "old", tmp_path / "newer"
    for directory in (old, newer):
        directory.mkdir()
    # Versions before the format number wrote such a database.
    with closing(sqlite3.connect(old / "run.db")) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE leases (epoch INTEGER PRIMARY KEY, holder VARCHAR)")
    store = open_store(newer)
    store.acquire_lease(owner="a")
    with write_under_way(store) as writing:
        writing.execute(update(tables.formats).values(number=tables.FORMAT + 1))
    store.close()
    remedies = {
        1: "finish it with the version that began it, or start a new run",
        tables.FORMAT + 1: "use the newer Rayloom that wrote it, or the copy of the database that "
        "it made before it changed the format",
    }
    for directory, number, by in (
        (old, 1, ""),
        (newer, tables.FORMAT + 1, f" by Rayloom {VERSION}"),
    ):
        words = (
            f"the run in {directory} was written in format {number}{by}, this Rayloom ({VERSION}) "
            f"reads format {tables.FORMAT}; {remedies[number]}; `rayloom export` still writes its "
            "policy"
        )
        before = (directory / "run.db").read_bytes()
        for opening in (lambda path: RunStore(f"sqlite:///{path}"), ReadOnlyStore):
            with pytest.raises(StoreError) as refused:
                opening(directory / "run.db")
            assert str(refused.value) == words
        assert (directory / "run.db").read_bytes() == before


def test_records_after_places_are_in_the_order_of_the_run(
    opened: OpenStore, tmp_path: Path
) -> None:
    """Let term 2 resume from step 1 and a requested evaluation end after that of a later step."""
    store = opened(tmp_path)
    for term, steps in ((1, (1, 2, 3)), (2, (2, 3))):
        assert store.acquire_lease(owner=f"owner-{term}").term == term
        for step in steps:
            store.add_evaluation(evaluation_record(step), term=term)
            store.add_step(step_record(step), term=term, new_events=())
            if (term, step) == (1, 1):
                commit(store, term=term, step=step)
    asked = replace(evaluation_record(2), is_scheduled=False)
    places = {each.kind: each.place for each in records_after(store, {})}
    for _ in range(2):
        store.add_evaluation(asked, term=2)
    found = [(each.kind, each.place, each.first_step) for each in records_after(store, {})]
    assert found == [
        (RecordKind.EVALUATION, (1, 1, 0), 0),
        (RecordKind.STEP, (1, 1, 0), 0),
        (RecordKind.EVALUATION, (2, 2, 0), 2),
        (RecordKind.ASKED_EVALUATION, (2, 2, 1), 2),
        (RecordKind.ASKED_EVALUATION, (2, 2, 2), 2),
        (RecordKind.STEP, (2, 2, 0), 2),
        (RecordKind.EVALUATION, (2, 3, 0), 2),
        (RecordKind.STEP, (2, 3, 0), 2),
    ]
    rest = [each.place for each in records_after(store, places)]
    assert rest == [(2, 2, 1), (2, 2, 2)]
    places[RecordKind.ASKED_EVALUATION] = rest[0]
    assert [each.place for each in records_after(store, places)] == rest[1:]
