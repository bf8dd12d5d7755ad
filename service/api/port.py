"""What the HTTP API needs of a run: a port, so that no route knows what stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.algorithm import AlgorithmSettings
from service.config.tree import ServiceSettings
from service.intake.submission import SubmissionView, SubmitReply, Wanted
from service.run.health import Readiness


class RunUnavailable(Exception):
    """The run does not answer, or can write nothing now; the text says why."""


class RunPort(Protocol):
    """Every call may raise RunUnavailable."""

    async def submit(self, wanted: Sequence[Wanted]) -> SubmitReply:
        """Accept all or none; durable when this returns."""
        ...

    async def submission(self, submission_id: str) -> SubmissionView | None: ...

    async def cancel(self, submission_id: str) -> SubmissionView | None: ...

    async def readiness(self) -> Readiness: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """What the routes check by themselves."""

    service: ServiceSettings
    algorithm: AlgorithmSettings
    environments: tuple[str, ...]
    """Whose tasks are taken."""
    key_digest: str | None = None
    """SHA-256 of the bearer key, hexadecimal; None: none is asked for."""
