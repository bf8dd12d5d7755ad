"""The submissions of a run in an actor that is called like its supervisor, and may be killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ray

from service.config.sections import ServiceSettings
from worlds.parts.submission_service import Service

ROOM = 10_000


@ray.remote(num_cpus=0)
class SubmissionActor:
    """An actor with the supervisor's methods that `run_client` calls to submit tasks."""

    def __init__(self, directory: str) -> None:
        self._service = Service(Path(directory), settings=ServiceSettings(max_waiting_tasks=ROOM))
        self._has_begun = False

    async def readiness(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._service.begin()

    async def submit(self, offers: Sequence[bytes]) -> list[bytes | Exception]:
        return await self._service.submissions.submit_packed(offers)
