"""The lists that clients request: tasks, sessions, and the feed of their events.

The feed has the events of tasks, rollouts and sessions, in the order in which they were stored.
Entries never change. An acceptance, a cancellation or a change of a session is stored in the
event's own transaction. An admission or the end of a rollout is stored with the next checkpoint. So
a crash undoes no reported event. The exception is a run that continues from an older checkpoint,
because the newest checkpoint cannot be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from actors.trajectory_queue.ledger import EvictionReason, LedgerEvent, LedgerEventKind
from actors.types import Outcome
from service.intake.session import SessionStatus, StoredSession
from service.intake.submission import RolloutResult, Status, SubmissionView


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """A filter of tasks; a field that is None matches any task."""

    status: Status | None = None
    environment: str | None = None
    batch: str | None = None
    tenant: str | None = None
    """Tenant that owns the tasks, as in `Caller.sees`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """A filter of sessions; a field that is None matches any session."""

    group: str | None = None
    """The submission's id."""
    status: SessionStatus | None = None
    tenant: str | None = None
    """Tenant that owns the sessions, as in `Caller.sees`."""


SessionPlace = tuple[int, int]
"""Position in the list of sessions: the submission's position, and the session's member."""


Item = TypeVar("Item", SubmissionView, StoredSession)
After = TypeVar("After", int, SessionPlace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[Item, After]):
    """A page of a list of tasks or sessions, in the order of acceptance.

    Sessions of one task follow in the order of `StoredSession.member`, their number in the task.
    """

    items: tuple[Item, ...]
    """The items; fewer than the limit, or none, may be returned although more follow."""
    next: After | None
    """The position after which the next page begins; None: there are no more items."""


TaskPage = Page[SubmissionView, int]
SessionPage = Page[StoredSession, SessionPlace]


class FeedKind(StrEnum):
    """The kind of event that an entry of the feed reports."""

    ACCEPTED = "accepted"
    """A task was accepted."""
    CANCELLED = "cancelled"
    """A task was cancelled at the client's request."""
    ADMITTED = "admitted"
    """A task's group was admitted to the window."""
    TRAINED = "trained"
    """A rollout left the window with a training step; the entry names the step."""
    EVICTED = "evicted"
    """A rollout was evicted; the entry has the reason."""
    SESSION_OPENED = "session_opened"
    SESSION_ENDED = "session_ended"
    SESSION_REWARDED = "session_rewarded"
    """An ended session got its pending reward, or the deadline of this reward passed."""
    WENT_BACK = "went_back"
    """The run continues from an older checkpoint than the newest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedEntry:
    """One entry of the feed, which reports one event to clients.

    Each kind of entry uses some of the fields; its other fields are None.
    """

    number: int = 0
    """Number of the entry; numbers ascend from 1 and may have gaps.

    It is 0 before the entry is stored.
    """
    at: float
    """Time when the entry was stored, in seconds since 1970."""
    kind: FeedKind
    task: str | None = None
    """The submission's id."""
    member: int | None = None
    """Number of the rollout or session in the task."""
    outcome: Outcome | None = None
    reward: float | None = None
    step: int | None = None
    """The training step with which a rollout left the window; for `went_back`, the step from
    which the run continues.
    """
    reason: EvictionReason | None = None
    session_status: SessionStatus | None = None
    void_after: int | None = None
    """In an entry `went_back`, the number after which some entries are void.

    These are the entries that report an admission or the end of a rollout. If such an event happens
    again, it gets a new entry.
    """

    @classmethod
    def of_event(
        cls, event: LedgerEvent, *, task: str, result: RolloutResult | None, at: float
    ) -> FeedEntry:
        """Return the feed's entry for an event of the trajectory queue's ledger.

        task: id of the submission. result: result of the rollout's newest ended attempt; None if no
        attempt has ended.
        """
        if event.kind is LedgerEventKind.ADMITTED:
            return cls(at=at, kind=FeedKind.ADMITTED, task=task)
        is_trained = event.kind is LedgerEventKind.TRAINED
        return cls(
            at=at,
            kind=FeedKind.TRAINED if is_trained else FeedKind.EVICTED,
            task=task,
            member=int(event.rollout_id.rpartition("-")[2]),
            outcome=None if result is None else result.outcome,
            reward=None if result is None else result.reward,
            step=event.step,
            reason=event.reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPage:
    """A page of the feed: entries after a number, in order."""

    entries: tuple[FeedEntry, ...]
    oldest: int
    """The smallest number of a kept entry; 0 if the feed is empty."""
    newest: int
    """The largest number that an entry has got; 0 if there never was an entry."""
