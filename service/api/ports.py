"""The calls of a run that the routes use. The module does not depend on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from service.access.keys import NO_LIMITS, KeyLimits, NamedKey
from service.api.control import ControlPort
from service.api.schemas import ReadyAnswer
from service.inspect.listing import Filters, JournalAnswer, Place
from service.intake.feed import FeedPage
from service.intake.listing import SessionFilter, SessionPage, SessionPlace, TaskFilter, TaskPage
from service.intake.submission import RolloutRequest, SubmissionView, SubmitReply
from service.report.document import RunPicture

PREFIX = "/api/v1"


class RunPort(Protocol):
    """The calls of a run that the routes use. Every call may raise RunUnavailable."""

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        *,
        key: str = "",
        limits: KeyLimits = NO_LIMITS,
    ) -> SubmitReply:
        """Submit requests, and return whether the run accepted them; it accepts all or none.

        Accepted requests are stored when this returns.

        Args: key: as in `SubmissionQueue.submit`. limits: the limits of the caller's key.
        """
        ...

    async def submission(
        self, submission_id: str, *, sees: str | None = None
    ) -> SubmissionView | None:
        """Return a submission, or None if there is none that the caller may see.

        sees: as `Caller.sees`.
        """
        ...

    async def tasks(self, wanted: TaskFilter, *, after: int, limit: int) -> TaskPage:
        """Return the first `limit` tasks after the position `after`."""
        ...

    async def sessions(
        self, wanted: SessionFilter, *, after: SessionPlace | None, limit: int
    ) -> SessionPage: ...

    async def feed(self, *, after: int, limit: int, sees: str | None = None) -> FeedPage:
        """Return the first `limit` entries after the number `after`.

        sees: as `Caller.sees`; a tenant's entries have the tenant's own numbers.
        """
        ...

    async def cancel(self, submission_id: str, *, sees: str | None = None) -> SubmissionView | None:
        """Cancel a submission, and return it; the arguments are those of `submission`."""
        ...

    async def keys(self) -> Sequence[NamedKey]:
        """Return the run's named keys, including revoked keys."""
        ...

    async def add_key(self, key: NamedKey) -> bool:
        """Add a key, and return whether it was added.

        It is not added if its name is taken, or if the run has too many keys.
        """
        ...

    async def revoke_key(self, name: str) -> NamedKey | None:
        """Revoke a key and return it; None if there is no such key."""
        ...

    async def stop(self, grace_s: float | None) -> None:
        """End the run after the current step.

        grace_s: seconds after which the step is abandoned; None waits for the step's end.
        """
        ...

    async def readiness(self) -> ReadyAnswer: ...

    async def gateway(self) -> Any:
        """Return the handle of the run's gateway. Raises: RunUnavailable if it does not run."""
        ...

    @property
    def control(self) -> ControlPort: ...

    async def picture(self, *, term: int, after: int) -> RunPicture:
        """Return the current state of the run, with the records of the steps after `after`.

        term: the term of the steps that the caller has; if the run has another term, the result
        has all steps.
        """
        ...

    async def journal(self, wanted: Filters, *, after: Place | None) -> JournalAnswer: ...

    async def trajectory(self, name: str) -> bytes | None:
        """Return a trajectory as JSON; None if the journal does not have it.

        name: the id of a trajectory or of a rollout, or TASK-MEMBER.
        """
        ...
