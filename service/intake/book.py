"""Accepted submissions, their line, and where each rollout stands: one pure state machine.

Invariants: a submission is in the line, or bound to one group, or cancelled; places only grow; a
group number whose group was evicted whole is filled with the next in line, never with the same
submission again. Rebuilt from the store at each epoch, then told what the queue tells.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.outcomes import Disposition, OutcomePolicy
from actors.trajectory_queue.ledger import LedgerEvent
from actors.types import Outcome
from service.intake.submission import (
    RolloutResult,
    RolloutView,
    Status,
    Submission,
    SubmissionView,
)


@dataclass(slots=True)
class _Fate:
    """How a rollout left."""

    is_trained: bool
    reason: str | None
    step: int | None


@dataclass(slots=True)
class _Entry:
    submission: Submission
    group_id: str | None = None
    is_cancelled: bool = False
    results: dict[int, RolloutResult] = field(default_factory=dict)
    fates: dict[int, _Fate] = field(default_factory=dict)


class Book:
    """Called by the intake alone, from one thread."""

    def __init__(self, policy: OutcomePolicy) -> None:
        """policy: tells an attempt that is repeated or dropped from one that counts."""
        self._policy = policy
        self._entries: dict[str, _Entry] = {}
        self._by_group: dict[str, _Entry] = {}
        # Places of those that wait, ascending, and whose they are.
        self._line: list[int] = []
        self._at_place: dict[int, Submission] = {}

    def __contains__(self, submission_id: str) -> bool:
        return submission_id in self._entries

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    def digest(self, submission_id: str) -> str:
        return self._entries[submission_id].submission.wanted.digest

    def accept(self, submission: Submission) -> None:
        """Let a stored submission stand in the line; a cancelled one is only remembered."""
        entry = _Entry(submission, is_cancelled=submission.is_cancelled)
        self._entries[submission.id] = entry
        if not submission.is_cancelled:
            insort(self._line, submission.place)
            self._at_place[submission.place] = submission

    def next_in_line(self, count: int) -> list[Submission]:
        """Up to `count` that wait, the first first; they stay in the line until they are bound."""
        return [self._at_place[place] for place in self._line[:count]]

    def bind(self, submission_id: str, group_id: str) -> None:
        """Its rollouts are those of this group from here on."""
        entry = self._entries[submission_id]
        assert entry.group_id is None, submission_id
        entry.group_id = group_id
        self._by_group[group_id] = entry
        self._leave_line(entry)

    def group_of(self, submission_id: str) -> str | None:
        """The group of a submission, None while it waits."""
        return self._entries[submission_id].group_id

    def cancel(self, submission_id: str) -> None:
        entry = self._entries[submission_id]
        entry.is_cancelled = True
        self._leave_line(entry)

    def cancelled_groups(self) -> list[str]:
        """Groups of cancelled submissions of which a rollout has not left."""
        return [
            group_id
            for group_id, entry in self._by_group.items()
            if entry.is_cancelled and len(entry.fates) < entry.submission.wanted.num_samples
        ]

    def note_results(self, results: Iterable[RolloutResult]) -> None:
        """Attempts that ended; the newest of a rollout counts."""
        for result in results:
            entry, index = self._find(result.rollout_id)
            if entry is not None:
                entry.results[index] = result

    def note_events(self, events: Iterable[LedgerEvent]) -> None:
        """What the ledger says of rollouts; those of other sources are passed over."""
        for event in events:
            entry, index = self._find(event.rollout_id)
            if entry is not None and event.kind != "admitted":
                is_trained = event.kind == "trained"
                entry.fates[index] = _Fate(is_trained, event.reason, event.step)

    def view(self, submission_id: str) -> SubmissionView:
        entry = self._entries[submission_id]
        wanted = entry.submission.wanted
        rollouts = tuple(self._rollout_view(entry, index) for index in range(wanted.num_samples))
        status = _overall(rollouts, is_cancelled=entry.is_cancelled)
        place = entry.submission.place
        return SubmissionView(
            id=submission_id,
            place=place,
            status=status,
            num_ahead=bisect_left(self._line, place) if status is Status.QUEUED else 0,
            rollouts=rollouts,
        )

    def _rollout_view(self, entry: _Entry, index: int) -> RolloutView:
        fate, result = entry.fates.get(index), entry.results.get(index)
        if fate is not None:
            status = Status.TRAINED if fate.is_trained else Status.EVICTED
            return RolloutView(
                index=index, status=status, result=result, step=fate.step, reason=fate.reason
            )
        if entry.group_id is None:
            status = Status.CANCELLED if entry.is_cancelled else Status.QUEUED
            return RolloutView(index=index, status=status)
        is_over = result is not None and self._counts(result)
        status = Status.FINISHED if is_over else Status.RUNNING
        return RolloutView(index=index, status=status, result=result if is_over else None)

    def _counts(self, result: RolloutResult) -> bool:
        """Whether the attempt was the last: what is dropped is repeated, or leaves at once."""
        return self._policy.disposition(Outcome(result.outcome)) is not Disposition.DROP

    def _find(self, rollout_id: str) -> tuple[_Entry | None, int]:
        group_id, _, member = rollout_id.rpartition("-")
        return self._by_group.get(group_id), int(member)

    def _leave_line(self, entry: _Entry) -> None:
        place = entry.submission.place
        if self._at_place.pop(place, None) is not None:
            del self._line[bisect_left(self._line, place)]


def rebuild(
    policy: OutcomePolicy,
    *,
    submissions: Sequence[Submission],
    bindings: Mapping[str, str],
    results: Sequence[RolloutResult],
    events: Sequence[LedgerEvent],
) -> Book:
    """The book of a run that starts again, from what survives of it.

    bindings: group id to submission id, later epochs' last. A binding without an admitted rollout
    is void: its submission stands in the line again, at its old place. What had not left the
    ledger is played again, so that its results so far are void as well.
    """
    book = Book(policy)
    for submission in submissions:
        book.accept(submission)
    admitted = {event.rollout_id.rpartition("-")[0] for event in events if event.kind == "admitted"}
    for group_id, submission_id in bindings.items():
        if group_id in admitted:
            book.bind(submission_id, group_id)
    left = {event.rollout_id for event in events if event.kind != "admitted"}
    book.note_results(result for result in results if result.rollout_id in left)
    book.note_events(events)
    return book


def _overall(rollouts: Sequence[RolloutView], *, is_cancelled: bool) -> Status:
    found = {item.status for item in rollouts}
    # A step that had it when the queue was lost may have trained it: what happened is told.
    if is_cancelled and Status.TRAINED not in found:
        return Status.CANCELLED
    for status in (Status.QUEUED, Status.RUNNING, Status.FINISHED, Status.TRAINED):
        if status in found:
            return status
    return Status.EVICTED
