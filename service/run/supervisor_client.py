"""A run's port over its supervisor actor, found by name, so that a new one is found as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from service.api.problems import RunUnavailable
from service.intake.submission import RolloutRequest, SubmissionView, SubmitReply
from service.launch.cluster import NAMESPACE
from service.run.parts import answer
from service.run.ports import PartLost
from service.run.readiness import Readiness
from service.store.run_store import LeaseLost, StoreError

DEADLINE_S = 20.0
# Of a first contact: a supervisor that is being started answers nothing, and a probe must.
CONTACT_DEADLINE_S = 5.0


class SupervisorClient:
    """`service.api.app.RunPort` in any process of the cluster."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._actor: Any = None

    async def submit(self, requests: Sequence[RolloutRequest]) -> SubmitReply:
        return await self._ask("submit", requests)

    async def submission(self, submission_id: str) -> SubmissionView | None:
        return await self._ask("submission", submission_id)

    async def cancel(self, submission_id: str) -> SubmissionView | None:
        return await self._ask("cancel", submission_id)

    async def readiness(self) -> Readiness:
        return await self._ask("readiness")

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            call = getattr(await self._found(), method).remote(*arguments)
            return await answer(call, part="supervisor", deadline_s=DEADLINE_S)
        except (LeaseLost, StoreError) as error:
            raise RunUnavailable(str(error)) from error
        except PartLost as error:
            # Looked up anew at the next call: it may have been replaced.
            self._actor = None
            raise RunUnavailable(f"the run does not answer: {error}") from error

    async def _found(self) -> Any:
        """The supervisor, once it has answered. Raises: RunUnavailable for one that starts."""
        if self._actor is not None:
            return self._actor
        try:
            actor = ray.get_actor(self._run_id, namespace=NAMESPACE)
        except (ValueError, RayError) as error:
            raise RunUnavailable(f"the run {self._run_id} is not there: {error}") from error
        contact = actor.readiness.remote()
        try:
            await answer(contact, part="supervisor", deadline_s=CONTACT_DEADLINE_S)
        except PartLost as error:
            raise RunUnavailable(f"the run is starting, or has died: {error}") from error
        self._actor = actor
        return actor
