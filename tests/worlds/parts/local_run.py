"""The API's ports in this process, over the real submission queue, store and sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.algorithm import AlgorithmSettings
from actors.deadline import within
from actors.environment.settings import RolloutSettings
from actors.expert_records import ModelShape
from actors.types import SESSION, Trajectory
from service.access.keys import NO_LIMITS, KeyLimits, NamedKey
from service.api.problems import RunUnavailable
from service.api.schemas import ReadyAnswer
from service.config.sections import SessionSettings
from service.gateway.commits import GroupCommit
from service.gateway.sampling import GatewaySettings
from service.gateway.sessions import Sessions
from service.intake.listing import (
    FeedPage,
    SessionFilter,
    SessionPage,
    SessionPlace,
    TaskFilter,
    TaskPage,
)
from service.intake.session import session_id
from service.intake.submission import RolloutRequest, SubmissionView, SubmitReply
from service.run.health import readiness
from service.store.controls import add_key, read_keys, revoke_key
from service.store.sessions import SessionStore
from worlds.builders.episode_builders import renderer
from worlds.builders.queue_builders import take_all
from worlds.parts.gateway_world import Policy
from worlds.parts.local_port import LocalPort
from worlds.parts.submission_service import Service

OPEN_LIMIT_S = 10.0


@dataclass
class LocalRun:
    """`service.api.ports.RunPort`, in this process."""

    service: Service
    behind_s: float = 0.0
    is_gone: bool = False
    stops: list[float | None] = field(default_factory=list)

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        *,
        key: str = "",
        limits: KeyLimits = NO_LIMITS,
    ) -> SubmitReply:
        return await self.service.submissions.submit(requests, key=key, limits=limits)

    async def submission(
        self, submission_id: str, *, sees: str | None = None
    ) -> SubmissionView | None:
        return await self.service.submissions.view(submission_id, sees=sees)

    async def tasks(self, wanted: TaskFilter, *, after: int, limit: int) -> TaskPage:
        return await self.service.submissions.page(wanted, after=after, limit=limit)

    async def sessions(
        self, wanted: SessionFilter, *, after: SessionPlace | None, limit: int
    ) -> SessionPage:
        return await self.service.submissions.sessions(wanted, after=after, limit=limit)

    async def feed(self, *, after: int, limit: int, sees: str | None = None) -> FeedPage:
        return await self.service.submissions.feed(after=after, limit=limit, sees=sees)

    async def cancel(self, submission_id: str, *, sees: str | None = None) -> SubmissionView | None:
        if await self.submission(submission_id, sees=sees) is None:
            return None
        await self.service.cancel(submission_id)
        return await self.submission(submission_id, sees=sees)

    async def keys(self) -> Sequence[NamedKey]:
        return read_keys(self.service.store)

    async def add_key(self, key: NamedKey) -> bool:
        return add_key(self.service.store, key)

    async def revoke_key(self, name: str) -> NamedKey | None:
        return revoke_key(self.service.store, name)

    async def stop(self, grace_s: float | None) -> None:
        self.stops.append(grace_s)

    @property
    def control(self) -> Any:
        raise RunUnavailable("there is no supervisor in this process")

    async def readiness(self) -> ReadyAnswer:
        if self.is_gone:
            raise RunUnavailable("the run does not answer: the supervisor died")
        return readiness(
            phase="training", detail="", policy_version=3, engines_ready=1,
            engines_expected=2, behind_s=self.behind_s, publish_limit_s=30.0, store_away_s=0.0,
        )  # fmt: skip


class LocalSessions(LocalPort):
    """The sessions of a run, answered by a policy of a few lines."""

    def __init__(self, service: Service, settings: SessionSettings | None = None) -> None:
        settings = settings or SessionSettings(hold_s=5.0)
        self._store = SessionStore(service.store)
        self._service = service
        self.playing: list[asyncio.Task[Trajectory]] = []
        self.policy = Policy()
        self.gateway_settings = GatewaySettings(
            sessions=settings,
            rollouts=RolloutSettings(max_turns=8, max_tokens_per_turn=16),
            algorithm=AlgorithmSettings(group_size=2, groups_per_step=2),
            chat_template=None,
            max_context_tokens=400,
            shape=ModelShape(vocab_size=516, mixture=None),
        )
        super().__init__(
            Sessions(
                self.gateway_settings,
                renderer=renderer(),
                make_policy=lambda: self.policy,
                store=self._store,
                commits=GroupCommit(
                    self._store, term=service.recorder.term_number, hold_s=settings.hold_s
                ),
                read_keys=lambda: read_keys(service.store),
            )
        )

    async def admit(self) -> None:
        """Give group numbers to the waiting tasks, and open their sessions."""
        await self._service.admit()
        for assignment in take_all(self._service.queue, environments=(SESSION,)):
            self.playing.append(asyncio.create_task(self.sessions.play(assignment)))
            member = int(assignment.rollout_id.rpartition("-")[2])
            await within(OPEN_LIMIT_S, self._opened(session_id(assignment.task.task_id, member)))

    async def _opened(self, name: str) -> None:
        """Wait until the store shows a session as opened or ended."""
        while (found := self._store.find([name])[name]).opened_at is None and found.end is None:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        for task in self.playing:
            task.cancel()
        self.sessions.close()
