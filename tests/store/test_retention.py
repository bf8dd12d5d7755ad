"""Tests of which rows of a long run are kept; totals and a return to a checkpoint stay possible."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from sqlalchemy import func, select
from worlds.builders.record_builders import evaluation_record, step_record
from worlds.builders.store_builders import commit, queue_snapshot

from actors.trajectory_queue.ledger import LedgerEvent, LedgerEventKind
from benchmarks.history_inputs import Scale, make_history
from service.inspect.audit import audit
from service.inspect.reader import find_entry, open_journal
from service.launch.run_dir import RunDir
from service.store import tables
from service.store.lineage import (
    RecordKind,
    count_events,
    mean_returns,
    read_events,
    read_history,
    records_after,
    stored_totals,
    surviving_spans,
    totals_at,
)
from service.store.retention import (
    MILESTONE_STEPS,
    OLDER_STEPS,
    WHOLE_STEPS,
    forget,
    milestones,
)
from service.store.run_store import RunStore

STEPS, ROLLOUTS, JOURNAL = 600, 2, 20


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = RunDir(path=tmp_path_factory.mktemp("history") / "run")
    scale = Scale(
        steps=STEPS,
        rollouts_per_step=ROLLOUTS,
        checkpoint_every=50,
        journal_steps=JOURNAL,
        steps_between_faults=500,
    )
    asyncio.run(make_history(run_dir, scale))
    return run_dir


@pytest.fixture
def store(long_run: RunDir) -> RunStore:
    return RunStore(long_run.database_url)


def num_rows(store: RunStore, name: str) -> int:
    query = select(func.count()).select_from(tables.metadata.tables[name])
    return store.read(lambda connection: connection.scalar(query)) or 0


def test_the_records_after_a_place_are_the_later_ones_of_the_history(
    store: RunStore,
) -> None:
    """Check a run of several terms; a superseded place is before the records that replaced it."""
    history, found = read_history(store), records_after(store, {})
    ends = {span.term: span.last_step for span in store.read(surviving_spans)}
    assert len(ends) > 1
    for kind, expected in (
        (RecordKind.STEP, history.steps),
        (RecordKind.EVALUATION, history.evaluations),
    ):
        of_kind = [each for each in found if each.kind is kind]
        assert tuple(each.record for each in of_kind) == expected
        for number in (0, len(of_kind) // 2, len(of_kind) - 1):
            rest = records_after(store, {kind: of_kind[number].place})
            assert [each for each in rest if each.kind is kind] == of_kind[number + 1 :]
    joint, last = next((term, last) for term, last in ends.items() if last is not None)
    undone = records_after(store, {RecordKind.STEP: (joint, last + 100, 0)})
    first = next(each for each in undone if each.kind is RecordKind.STEP)
    assert first.place[0] > joint and first.first_step == last + 1


def test_the_number_of_rows_of_a_long_run_is_bounded(store: RunStore) -> None:
    assert WHOLE_STEPS + OLDER_STEPS / 2 < num_rows(store, "steps") <= WHOLE_STEPS + OLDER_STEPS + 6
    assert num_rows(store, "evaluations") <= num_rows(store, "steps")
    # Events are kept from before the older checkpoint, by the bound on the policy age.
    assert num_rows(store, "events") <= 2 * ROLLOUTS * (50 + 3)
    assert len(store.checkpoints()) == 2
    # Kept are those two and the ones from which a term resumed.
    assert num_rows(store, "checkpoints") <= 2 + num_rows(store, "leases")


def test_the_first_some_middle_and_the_newest_steps_are_kept(store: RunStore) -> None:
    kept = [record.step for record in read_history(store).steps]
    assert kept[:5] == [1, 2, 3, 4, 5] and kept[-WHOLE_STEPS:] == list(range(345, STEPS + 1))
    between = kept[5:-WHOLE_STEPS]
    assert {after - before for before, after in itertools.pairwise(between)} <= {1, 2}


def test_totals_include_removed_rows(store: RunStore) -> None:
    survives, stored = read_history(store).totals, stored_totals(store)
    assert survives.num_steps == STEPS
    assert survives.summed["num_trajectories"] == STEPS * ROLLOUTS
    assert survives.num_version_breaks == 0 and survives.last_version == STEPS
    # The two faults happened 25 steps after a checkpoint.
    assert stored.num_steps == STEPS + 2 * 25
    counts = {str(kind): count for (kind, _), count in count_events(store).items()}
    assert counts == dict.fromkeys(("admitted", "evicted"), stored.num_steps * ROLLOUTS)


def test_the_kept_rows_are_enough_for_inspect_and_its_audit(long_run: RunDir) -> None:
    journal = open_journal(long_run.path)
    step, _ = find_entry(journal, f"g{STEPS - JOURNAL + 1:06d}.0-1")
    assert step.step == STEPS - JOURNAL + 1
    found = audit(journal)
    assert found.is_clean and (found.num_steps, found.missing_steps) == (JOURNAL, ())


def event(seq: int, rollout_id: str, step: int | None) -> LedgerEvent:
    kind = LedgerEventKind.ADMITTED if step is None else LedgerEventKind.TRAINED
    return LedgerEvent(seq=seq, rollout_id=rollout_id, kind=kind, step=step)


def play(store: RunStore, *, term: int, steps: range) -> None:
    """Store a rollout and an evaluation for each step, and a checkpoint after it."""
    for step in steps:
        events = [event(2 * step, f"r{step}", None), event(2 * step + 1, f"r{step}", step)]
        store.add_step(step_record(step), term=term, new_events=events)
        store.add_evaluation(evaluation_record(step), term=term)
        commit(store, term=term, step=step, last_event_seq=2 * step + 1)


def test_the_step_of_a_best_checkpoint_is_kept_when_others_are_thinned(
    tmp_path: Path,
) -> None:
    store = RunStore(f"sqlite:///{tmp_path / 'run.db'}")
    term = store.acquire_lease(owner="a").term
    newest = 4 * OLDER_STEPS
    for step in (1, 6, 7, 8, 9, newest):
        store.add_step(step_record(step), term=term, new_events=[])
    for step in (7, newest):
        commit(store, term=term, step=step)
    kept = store.checkpoints()
    forget(store, term=term, kept=kept, journal_steps=0, max_policy_age=1, keep_checkpoints=1)
    # Kept are the first stored row of each four steps, and that of the best checkpoint.
    assert [record.step for record in read_history(store).steps] == [1, 6, 7, 8, newest]
    assert mean_returns(store, [7]).keys() == {7}


def test_a_run_returns_to_an_older_kept_checkpoint_with_its_totals(tmp_path: Path) -> None:
    store = RunStore(f"sqlite:///{tmp_path / 'run.db'}")
    term = store.acquire_lease(owner="a").term
    play(store, term=term, steps=range(1, 21))
    kept = store.checkpoints()[:3]
    forget(
        store,
        term=term,
        kept=kept,
        journal_steps=4,
        max_policy_age=1,
        keep_checkpoints=3,
    )
    assert [item.seq for item in read_events(store)] == list(range(30, 42))
    assert [item.step for item in store.checkpoints()] == [20, 19, 18]
    lease = store.acquire_lease(owner="b", passed_over={"1-20", "1-19"})
    assert lease.parent is not None and lease.queue_snapshot == queue_snapshot(18)
    assert totals_at(store, lease.parent).num_steps == read_history(store).totals.num_steps == 18
    play(store, term=lease.term, steps=range(19, 23))
    history = read_history(store)
    assert [record.step for record in history.steps] == list(range(1, 23))
    assert (history.totals.num_steps, stored_totals(store).num_steps) == (22, 24)
    # Now the two undone steps are removed, and only checkpoints of the later term are kept.
    kept = store.checkpoints()[:3]
    forget(
        store,
        term=lease.term,
        kept=kept,
        journal_steps=4,
        max_policy_age=1,
        keep_checkpoints=3,
    )
    assert num_rows(store, "steps") == num_rows(store, "evaluations") == 22
    assert read_history(store).totals == history.totals
    assert [item.step for item in store.checkpoints()] == [22, 21, 20]
    assert read_history(store).num_terms == 2


def test_a_run_without_a_journal_keeps_the_events_before_a_kept_checkpoint(
    tmp_path: Path,
) -> None:
    store = RunStore(f"sqlite:///{tmp_path / 'run.db'}")
    term = store.acquire_lease(owner="a").term
    play(store, term=term, steps=range(1, 21))
    kept = store.checkpoints()[:2]
    forget(
        store,
        term=term,
        kept=kept,
        journal_steps=0,
        max_policy_age=2,
        keep_checkpoints=3,
    )
    # The older checkpoint is of step 19, whose rollouts were admitted after step 16.
    assert [item.seq for item in read_events(store)] == list(range(34, 42))


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 3, 5, 20, 50])
def test_few_checkpoints_are_kept_and_one_is_at_least_twenty_steps_old(
    every: int, keep: int
) -> None:
    there: list[int] = []
    for step in range(every, 1000, every):
        there = [step, *there]
        old = milestones(there, collapsed_since=None)
        there = [each for number, each in enumerate(there) if number < keep or each in old]
        ages = [step - each for each in there if step - each >= MILESTONE_STEPS]
        assert step <= 2 * MILESTONE_STEPS + every or min(ages) <= 2 * MILESTONE_STEPS + every
        assert len(there) <= keep + 2
