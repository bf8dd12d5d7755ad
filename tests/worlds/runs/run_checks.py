"""Checks on the files of a run; they hold for every run, whatever happened to its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from actors.trajectory_queue.ledger import LedgerEvent
from service.inspect.audit import audit
from service.inspect.reader import open_journal
from worlds.runs.run_driver import Run


def check_lineage(events: Sequence[LedgerEvent]) -> None:
    """Check that each rollout of the surviving lineage is admitted once and leaves at most once.

    The first events of a run that is longer than its journal are not kept.
    """
    first = events[0].seq
    admitted = Counter(item.rollout_id for item in events if item.kind == "admitted")
    left = Counter(item.rollout_id for item in events if item.kind != "admitted")
    assert set(admitted.values()) == {1}
    assert set(left.values()) <= {1}
    assert first > 0 or set(left) <= set(admitted)
    assert [item.seq for item in events] == list(range(first, first + len(events)))


def check_finished(run: Run, *, steps: int) -> None:
    """Check a run that reached its end: every version is published, every rollout finalised."""
    summary, history = run.summary(), run.history()
    ledger = summary["ledger"]
    assert summary["steps"] == summary["policy_version"] == steps
    assert [record.policy_version for record in history.steps] == list(range(1, steps + 1))
    assert ledger["in_flight"] == 0
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["evicted"].values())
    events = run.events()
    kinds = Counter(item.kind for item in events)
    assert kinds["admitted"] == ledger["admitted"] and kinds["trained"] == ledger["trained"]
    check_lineage(events)


def check_stopped(run: Run) -> None:
    """Check a run that was stopped before its end: each rollout is counted once."""
    ledger = run.summary()["ledger"]
    left = ledger["trained"] + sum(ledger["evicted"].values()) + ledger["in_flight"]
    assert ledger["admitted"] == left, ledger
    check_lineage(run.events())
    check_audit(run)


def check_audit(run: Run) -> None:
    """Check that the journal of the run breaks no invariant."""
    found = audit(open_journal(run.place.path))
    assert found.is_clean and found.num_trained > 0, found.offences
