"""What the routes need of a run. They know neither Ray nor where the run lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from service.access.keys import NO_LIMITS, KeyLimits, NamedKey
from service.intake.feed import FeedPage
from service.intake.listing import SessionFilter, SessionPage, SessionPlace, TaskFilter, TaskPage
from service.intake.submission import RolloutRequest, SubmissionView, SubmitReply
from service.report.document import Phase

PREFIX = "/api/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """What /readyz answers."""

    reasons: tuple[str, ...]
    """What is missing, a sentence each; none when ready."""

    phase: Phase
    policy_version: int

    engines_ready: int
    """Engines that hold the current version."""

    engines_expected: int

    @property
    def is_ready(self) -> bool:
        return not self.reasons


class RunPort(Protocol):
    """The calls that the routes need of a run. Every call may raise RunUnavailable."""

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        *,
        key: str = "",
        limits: KeyLimits = NO_LIMITS,
    ) -> SubmitReply:
        """Accept all or none; durable when this returns. key: as `SubmissionQueue.submit`. limits:
        of the caller's key."""
        ...

    async def submission(
        self, submission_id: str, *, sees: str | None = None
    ) -> SubmissionView | None:
        """Return a submission; None also for one of another tenant. sees: as `Caller.sees`."""
        ...

    async def tasks(self, wanted: TaskFilter, *, after: int, limit: int) -> TaskPage:
        """Return the tasks after a position."""
        ...

    async def sessions(
        self, wanted: SessionFilter, *, after: SessionPlace | None, limit: int
    ) -> SessionPage: ...

    async def feed(self, *, after: int, limit: int, sees: str | None = None) -> FeedPage:
        """Return the entries after a number. sees: as `Caller.sees`; the numbers are its own."""
        ...

    async def cancel(self, submission_id: str, *, sees: str | None = None) -> SubmissionView | None:
        """Cancel a submission; otherwise as `submission`."""
        ...

    async def keys(self) -> Sequence[NamedKey]:
        """Return the run's named keys, revoked ones too."""
        ...

    async def add_key(self, key: NamedKey) -> bool:
        """False where its name is taken."""
        ...

    async def revoke_key(self, name: str) -> NamedKey | None:
        """Revoke a key; None: there is none."""
        ...

    async def stop(self, grace_s: float | None) -> None:
        """End the run after the current step; None: however long that takes."""
        ...

    async def readiness(self) -> Readiness: ...
