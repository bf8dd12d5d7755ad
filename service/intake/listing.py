"""Lists of tasks and of sessions: the filter of a request, and a page of the answer."""

from __future__ import annotations

from dataclasses import dataclass

from actors.types import Outcome
from service.intake.session import SessionStatus
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
class TaskPage:
    """Tasks in the order of acceptance."""

    tasks: tuple[SubmissionView, ...]
    """The tasks; fewer than the limit, or none, may be returned although more follow."""
    next: int | None
    """The position after which the next page begins; None: there are no more tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """A filter of sessions; a field that is None matches any session."""

    group: str | None = None
    """The submission's id."""
    status: SessionStatus | None = None
    tenant: str | None = None
    """Tenant that owns the sessions, as in `Caller.sees`."""


SessionPlace = tuple[int, int]
"""The submission's position, and the member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLine:
    """A session in a list, as the store has it: without the totals of its turns."""

    id: str
    submission_id: str
    member: int
    status: SessionStatus
    created_at: float
    """Seconds since 1970, as are the next two fields."""
    opened_at: float | None
    ended_at: float | None
    reward: float | None
    is_reward_pending: bool
    outcome: Outcome | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPage:
    """Sessions in the order of acceptance, then by member."""

    sessions: tuple[SessionLine, ...]
    """The sessions; fewer than the limit, or none, may be returned although more follow."""
    next: SessionPlace | None
    """The position after which the next page begins; None: there are no more sessions."""
