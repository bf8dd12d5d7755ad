"""Lists of tasks and of sessions: the filter of a request, and a page of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from actors.types import Outcome
from service.intake.session import SessionStatus, SessionTotals, StoredSession, status_of
from service.intake.submission import Status, SubmissionView


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session as a client sees it."""

    id: str
    submission_id: str
    member: int
    status: SessionStatus
    created_at: float
    """Seconds since 1970; the next two fields are in this unit too."""
    opened_at: float | None
    ended_at: float | None
    reward: float | None
    is_reward_pending: bool
    outcome: Outcome | None
    """The session's outcome, or None if it has not ended."""
    detail: str
    totals: SessionTotals | None
    """Totals of the session's turns; None in a list."""

    @classmethod
    def of(cls, stored: StoredSession, *, totals: SessionTotals | None = None) -> SessionView:
        end = stored.end
        return cls(
            id=stored.id,
            submission_id=stored.submission_id,
            member=stored.member,
            status=status_of(stored.opened_at, end),
            created_at=stored.created_at,
            opened_at=stored.opened_at,
            ended_at=end.ended_at if end else None,
            reward=end.reward if end else None,
            is_reward_pending=end is not None and end.reward_until is not None,
            outcome=end.outcome if end else None,
            detail=end.detail if end else "",
            totals=totals,
        )


Item = TypeVar("Item", SubmissionView, SessionView)
After = TypeVar("After", int, SessionPlace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[Item, After]):
    """A page of a list of tasks or sessions, in the order of acceptance.

    Sessions of the same task are in the order of their members.
    """

    items: tuple[Item, ...]
    """The items; fewer than the limit, or none, may be returned although more follow."""
    next: After | None
    """The position after which the next page begins; None: there are no more items."""


TaskPage = Page[SubmissionView, int]
SessionPage = Page[SessionView, SessionPlace]
