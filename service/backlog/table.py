"""The table in memory of accepted submissions that are not over; it does no I/O.

A submission is over if its rollouts will never be played again; the table then drops it (`over`,
`forget`). `rebuild` makes the table from the store when the run starts, recovers or returns to a
checkpoint. After that, the events of the trajectory queue update the table.

Invariants: a submission is in the backlog, or bound to one group, or cancelled. Each new submission
has a greater position than all earlier submissions. If all rollouts of a group were evicted, the
group's submission is not played again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from actors.outcomes import Disposition, OutcomePolicy
from actors.trajectory_queue.ledger import LedgerEvent, LedgerEventKind
from actors.types import SESSION
from service.intake.submission import (
    RolloutResult,
    RolloutView,
    Status,
    StoredSubmissions,
    Submission,
    SubmissionView,
)

_ADMITTED = LedgerEventKind.ADMITTED


@dataclass(slots=True)
class _Entry:
    submission: Submission
    group_id: str | None = None
    is_cancelled: bool = False
    # Number of the ledger event that admitted the first of the submission's rollouts.
    admitted_seq: int | None = None
    results: dict[int, RolloutResult] = field(default_factory=dict)
    # For each rollout that was trained or evicted: the event that says so.
    exits: dict[int, LedgerEvent] = field(default_factory=dict)


class SubmissionTable:
    """The table of a run's submissions; called only by the submission queue, from one thread."""

    def __init__(self, policy: OutcomePolicy) -> None:
        """Create a table. policy: decides which attempts are repeated or dropped."""
        self._policy = policy
        self._entries: dict[str, _Entry] = {}
        self._by_group: dict[str, _Entry] = {}
        # Ascending by position.
        self._backlog: list[Submission] = []
        self._waiting_bytes = 0

    def __contains__(self, submission_id: str) -> bool:
        return submission_id in self._entries

    @property
    def num_waiting(self) -> int:
        return len(self._backlog)

    @property
    def waiting_bytes(self) -> int:
        return self._waiting_bytes

    def digest_of(self, submission_id: str) -> str:
        return self._entries[submission_id].submission.digest

    def num_waiting_of(self, key_name: str) -> int:
        """Return the number of submissions in the backlog that were sent with this key."""
        return sum(submission.key_name == key_name for submission in self._backlog)

    def num_open_sessions_of(self, key_name: str) -> int:
        """Return the number of sessions created with this key that wait or are open."""
        own = [
            entry
            for entry in self._entries.values()
            if entry.submission.key_name == key_name
            and entry.submission.environment == SESSION
            and not entry.is_cancelled
        ]
        rollouts = (each for entry in own for each in self._rollout_views(entry))
        return sum(each.status in (Status.QUEUED, Status.RUNNING) for each in rollouts)

    def accept(self, submission: Submission) -> None:
        """Add a submission to the table and, unless it is cancelled, to the end of the backlog.

        The submission must be in the store, and newer than all submissions of the table.
        """
        entry = _Entry(submission, is_cancelled=submission.is_cancelled)
        self._entries[submission.id] = entry
        if not submission.is_cancelled:
            self._backlog.append(submission)
            self._waiting_bytes += submission.num_bytes

    def next_waiting(self, count: int) -> list[Submission]:
        """Return the first `count` submissions of the backlog, without removing them."""
        return self._backlog[:count]

    def bind(self, submission_id: str, group_id: str) -> None:
        """Record which group plays a submission, and remove the submission from the backlog."""
        entry = self._entries[submission_id]
        assert entry.group_id is None, submission_id
        entry.group_id = group_id
        self._by_group[group_id] = entry
        self._leave_backlog(entry)

    def group_of(self, submission_id: str) -> str | None:
        """Return the group that plays a submission; None if the submission was never bound."""
        return self._entries[submission_id].group_id

    def accepted_at(self, group_id: str) -> float | None:
        """Return when the group's submission was accepted; None if no client submitted it."""
        entry = self._by_group.get(group_id)
        return None if entry is None else entry.submission.accepted_at

    def cancel(self, submission_id: str) -> None:
        entry = self._entries[submission_id]
        entry.is_cancelled = True
        self._leave_backlog(entry)

    def cancelled_groups(self) -> list[str]:
        """Return the groups of cancelled submissions that still have a rollout in flight."""
        return [
            group_id
            for group_id, entry in self._by_group.items()
            if entry.is_cancelled and len(entry.exits) < entry.submission.num_samples
        ]

    def note_results(self, results: Iterable[RolloutResult]) -> None:
        """Record the results of ended attempts; a rollout's newer result replaces its older one."""
        for result in results:
            entry, index = self._find(result.rollout_id)
            if entry is not None:
                entry.results[index] = result

    def note_events(self, events: Iterable[LedgerEvent]) -> None:
        """Record the ledger's events; rollouts that no client submitted are skipped."""
        for event in events:
            entry, index = self._find(event.rollout_id)
            if entry is None:
                continue
            if event.kind is not _ADMITTED:
                entry.exits[index] = event
            elif entry.admitted_seq is None:
                entry.admitted_seq = event.seq

    def told_by(self, event: LedgerEvent) -> tuple[str, RolloutResult | None] | None:
        """Return the submission id and the result with which the feed reports an event to clients.

        The result is None if no attempt of the rollout has ended. Return None instead of the pair
        if the feed does not report the event. The feed does not report rollouts that no client
        submitted. Of a submission's admission events, the feed reports only the first. Record the
        event first (`note_events`).
        """
        entry, index = self._find(event.rollout_id)
        if entry is None or (event.kind is _ADMITTED and event.seq != entry.admitted_seq):
            return None
        return entry.submission.id, entry.results.get(index)

    def is_admitted(self, submission_id: str) -> bool:
        """Return whether a recorded event says that the submission's group was admitted."""
        return self._entries[submission_id].admitted_seq is not None

    def over(self, kept: Sequence[int]) -> list[SubmissionView]:
        """Return the final states of submissions whose rollouts will not be played again.

        If the run returns to a checkpoint, rollouts that ended after the checkpoint are played
        again. So a submission is over only if all its rollouts ended before the oldest checkpoint
        that is kept. `_is_over` describes an exception.

        kept: the number of the last ledger event that each kept checkpoint contains, newest first.
        """
        return [
            self.view(submission_id)
            for submission_id, entry in self._entries.items()
            if _is_over(entry, kept)
        ]

    def forget(self, submission_id: str) -> None:
        entry = self._entries.pop(submission_id)
        if entry.group_id is not None:
            del self._by_group[entry.group_id]

    def view(self, submission_id: str) -> SubmissionView:
        entry = self._entries[submission_id]
        submission = entry.submission
        rollouts = self._rollout_views(entry)
        status = _overall(rollouts, is_cancelled=entry.is_cancelled)
        return SubmissionView(
            id=submission_id,
            position=submission.position,
            status=status,
            num_ahead=self._num_ahead(submission) if status is Status.QUEUED else 0,
            rollouts=rollouts,
            environment=submission.environment,
            batch=submission.batch,
            accepted_at=submission.accepted_at,
        )

    def _rollout_views(self, entry: _Entry) -> tuple[RolloutView, ...]:
        num_samples = entry.submission.num_samples
        if entry.group_id is None:
            return _unbound(num_samples, is_cancelled=entry.is_cancelled)
        return tuple(self._rollout_view(entry, index) for index in range(num_samples))

    def _rollout_view(self, entry: _Entry, index: int) -> RolloutView:
        event, result = entry.exits.get(index), entry.results.get(index)
        if event is not None:
            is_trained = event.kind is LedgerEventKind.TRAINED
            return RolloutView(
                index=index,
                status=Status.TRAINED if is_trained else Status.EVICTED,
                result=result,
                step=event.step,
                reason=event.reason,
            )
        if result is None or not self._counts(result):
            return RolloutView(index=index, status=Status.RUNNING)
        return RolloutView(index=index, status=Status.FINISHED, result=result)

    def _counts(self, result: RolloutResult) -> bool:
        """Whether a rollout with this result has finished; a dropped attempt does not count."""
        return self._policy.disposition(result.outcome) is not Disposition.DROP

    def _find(self, rollout_id: str) -> tuple[_Entry | None, int]:
        group_id, _, member = rollout_id.rpartition("-")
        return self._by_group.get(group_id), int(member)

    def _num_ahead(self, submission: Submission) -> int:
        return bisect_left(self._backlog, submission.position, key=lambda each: each.position)

    def _leave_backlog(self, entry: _Entry) -> None:
        index = self._num_ahead(entry.submission)
        if self._backlog[index : index + 1] == [entry.submission]:
            del self._backlog[index]
            self._waiting_bytes -= entry.submission.num_bytes


@lru_cache(maxsize=256)
def _unbound(num_samples: int, *, is_cancelled: bool) -> tuple[RolloutView, ...]:
    """Return the states of the rollouts of a submission that has no group."""
    # Cached, so that submissions share the states in memory.
    status = Status.CANCELLED if is_cancelled else Status.QUEUED
    return tuple(RolloutView(index=index, status=status) for index in range(num_samples))


def _is_over(entry: _Entry, kept: Sequence[int]) -> bool:
    """Whether no return to a kept checkpoint can play a submission's rollouts again.

    kept: as for `SubmissionTable.over`.
    """
    if entry.group_id is None:
        return entry.is_cancelled
    exits = entry.exits.values()
    if len(exits) < entry.submission.num_samples:
        return False
    end = max(event.seq for event in exits)
    # All rollouts ended before the oldest kept checkpoint.
    if end <= kept[-1]:
        return True
    # Over too: all rollouts were evicted, and no kept checkpoint has the group in the queue.
    # Otherwise evicted submissions would pile up in memory while no step is trained.
    admitted = entry.admitted_seq
    if admitted is None or end > kept[0] or any(event.step is not None for event in exits):
        return False
    return not any(admitted <= seq < end for seq in kept)


def rebuild(
    policy: OutcomePolicy, stored: StoredSubmissions, *, held_groups: Iterable[str] = ()
) -> SubmissionTable:
    """Rebuild the table from the store when the run starts, recovers or returns to a checkpoint.

    If a submission's group was never admitted to the trajectory queue, the submission returns to
    its old position in the backlog. Results of rollouts in flight are ignored, because these
    rollouts are played again. held_groups: the groups in the restored trajectory queue.
    """
    table = SubmissionTable(policy)
    for submission in stored.submissions:
        table.accept(submission)
    admitted = {event.rollout_id for event in stored.events if event.kind is _ADMITTED}
    left = {event.rollout_id for event in stored.events if event.kind is not _ADMITTED}
    groups = {rollout_id.rpartition("-")[0] for rollout_id in admitted | left} | {*held_groups}
    for group_id, submission_id in stored.bindings.items():
        if group_id in groups:
            table.bind(submission_id, group_id)
    table.note_results(result for result in stored.results if result.rollout_id in left)
    table.note_events(stored.events)
    return table


def _overall(rollouts: Sequence[RolloutView], *, is_cancelled: bool) -> Status:
    found = {item.status for item in rollouts}
    # A cancelled submission may have been trained nevertheless, if a step had taken it before the
    # queue was lost.
    if is_cancelled and Status.TRAINED not in found:
        return Status.CANCELLED
    for status in (Status.QUEUED, Status.RUNNING, Status.FINISHED, Status.TRAINED):
        if status in found:
            return status
    return Status.EVICTED
