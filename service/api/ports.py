"""What the routes need of a run. They know neither Ray nor where the run lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from service.intake.feed import FeedPage
from service.intake.listing import SessionFilter, SessionPage, SessionPlace, TaskFilter, TaskPage
from service.intake.submission import RolloutRequest, SubmissionView, SubmitReply
from service.run.health import Readiness

PREFIX = "/api/v1"


class RunPort(Protocol):
    """Every call may raise RunUnavailable."""

    async def submit(self, requests: Sequence[RolloutRequest], *, key: str = "") -> SubmitReply:
        """Accept all or none; durable when this returns. key: as `SubmissionQueue.submit`."""
        ...

    async def submission(self, submission_id: str) -> SubmissionView | None: ...

    async def tasks(self, wanted: TaskFilter, *, after: int, limit: int) -> TaskPage:
        """Those behind a position."""
        ...

    async def sessions(
        self, wanted: SessionFilter, *, after: SessionPlace | None, limit: int
    ) -> SessionPage: ...

    async def feed(self, *, after: int, limit: int) -> FeedPage:
        """What was told behind a number."""
        ...

    async def cancel(self, submission_id: str) -> SubmissionView | None: ...

    async def stop(self, grace_s: float | None) -> None:
        """Have the run end after the step in hand; None: however long that takes."""
        ...

    async def readiness(self) -> Readiness: ...
