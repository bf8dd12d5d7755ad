"""The interface between the API's routes and a run. The module does not depend on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from service.access.keys import NO_LIMITS, KeyLimits, NamedKey
from service.api.control import ControlPort
from service.api.schemas import ReadyAnswer
from service.inspect.listing import Filters, JournalAnswer, Place
from service.intake.listing import (
    FeedPage,
    SessionFilter,
    SessionPage,
    SessionPlace,
    TaskFilter,
    TaskPage,
)
from service.intake.submission import RolloutRequest, SubmissionView, SubmitReply
from service.report.document import RunPicture

PREFIX = "/api/v1"


class RunPort(Protocol):
    """The calls that the API's routes make to a run. Every call may raise RunUnavailable."""

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        *,
        key: str = "",
        limits: KeyLimits = NO_LIMITS,
    ) -> SubmitReply:
        """Submit tasks, and return whether the run accepted them; it accepts all or none.

        Accepted tasks are stored when this returns.

        Args: key: digest of the Idempotency-Key and of the caller's tenant; empty if the request
        has no Idempotency-Key. limits: the limits of the caller's API key.
        """
        ...

    async def submission(
        self, submission_id: str, *, sees: str | None = None
    ) -> SubmissionView | None:
        """Return a submission's state; None if it is unknown, or if the caller may not see it.

        sees: the tenant whose submissions the caller may see; None if the caller may see all.
        """
        ...

    async def tasks(self, wanted: TaskFilter, *, after: int, limit: int) -> TaskPage:
        """Return the first `limit` tasks after the position `after` that match `wanted`."""
        ...

    async def sessions(
        self, wanted: SessionFilter, *, after: SessionPlace | None, limit: int
    ) -> SessionPage: ...

    async def feed(self, *, after: int, limit: int, sees: str | None = None) -> FeedPage:
        """Return the first `limit` entries of the feed after the number `after`.

        sees: the tenant whose entries to return. Each tenant's entries are numbered separately, and
        `after` is a number of this tenant. If `sees` is None, the entries of all tenants are
        returned, and `after` is a number in the whole feed.
        """
        ...

    async def cancel(self, submission_id: str, *, sees: str | None = None) -> SubmissionView | None:
        """Cancel a submission, and return its new state; None if it is unknown, or not visible.

        sees: the tenant whose submissions the caller may see; None if the caller may see all.
        """
        ...

    async def keys(self) -> Sequence[NamedKey]:
        """Return the run's named keys, including revoked keys."""
        ...

    async def add_key(self, key: NamedKey) -> bool:
        """Add an API key, and return whether it was added.

        It is not added if its name is taken, or if the run has too many keys.
        """
        ...

    async def revoke_key(self, name: str) -> NamedKey | None:
        """Revoke an API key and return it; None if no key has this name."""
        ...

    async def stop(self, grace_s: float | None) -> None:
        """End the run after the current step.

        grace_s: seconds after which the step is abandoned; None waits until the step has ended.
        """
        ...

    async def readiness(self) -> ReadyAnswer: ...

    async def gateway(self) -> Any:
        """Return the handle of the actor that plays the run's sessions.

        Raises: RunUnavailable if the actor does not run now.
        """
        ...

    @property
    def control(self) -> ControlPort: ...

    async def picture(self, *, term: int, after: int) -> RunPicture:
        """Return the current state of the run for the page at `/`, with the steps after `after`.

        term: the `term` of the state that the caller read before. Each restart of the run and each
        return to a checkpoint begins a new term, and may undo steps that the caller has read.
        Therefore, if the run now has another term, the result has all steps, whatever `after` is.
        """
        ...

    async def journal(self, wanted: Filters, *, after: Place | None) -> JournalAnswer: ...

    async def trajectory(self, name: str) -> bytes | None:
        """Return a trajectory as JSON; None if the journal does not have it.

        name: the id of a trajectory or of a rollout, or TASK-MEMBER (a task's id and a rollout's
        number).
        """
        ...
