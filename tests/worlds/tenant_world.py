"""The whole application for several tenants: the real queue, sessions and keys over one store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
from fastapi import FastAPI

from actors.algorithm import AlgorithmSettings
from actors.environment.settings import RolloutSettings
from actors.expert_records import ModelShape
from actors.types import SESSION
from service.access.keys import NO_LIMITS, KeyLimits, NamedKey, digest_of
from service.api.app import create_app
from service.api.control import add_control
from service.api.problems import RunUnavailable
from service.api.run_page import PagePort, add_page
from service.api.settings import HttpSettings
from service.config.tree import ServiceSettings
from service.gateway.commits import GroupCommit
from service.gateway.routes import add_sessions
from service.gateway.sessions import GatewaySettings, Sessions
from service.gateway.settings import SessionSettings
from service.gateway.upload_routes import add_uploads
from service.intake.feed import FeedPage
from service.intake.listing import SessionFilter, SessionPage, SessionPlace, TaskFilter, TaskPage
from service.intake.submission import RolloutRequest, SubmissionView, SubmitReply
from service.run.health import Phase, Readiness, readiness
from service.store.controls import AdminCall
from service.store.keys import add_key, read_keys, revoke_key
from service.store.sessions import SessionStore
from worlds.episode_builders import renderer
from worlds.gateway_world import Policy
from worlds.local_uploads import LocalUploads
from worlds.queue_builders import take_all
from worlds.submission_service import Service

FIRST_KEY = "0123456789abcdef"
SETTINGS = HttpSettings(
    service=ServiceSettings(max_waiting_tasks=16, max_body_kib=64),
    algorithm=AlgorithmSettings(group_size=2, groups_per_step=2),
    rollouts=RolloutSettings(max_turns=8, max_tokens_per_turn=16),
    sessions=SessionSettings(hold_s=2.0),
    environments=("guessing", SESSION),
    key_digest=digest_of(FIRST_KEY),
)


class Port(Sessions):
    """`SessionPort` in this process."""

    def abandon(self, session_id: str, request_id: str) -> None:  # type: ignore[override]
        self._keep_going(super().abandon(session_id, request_id))


@dataclass
class TenantRun:
    """`RunPort` over a service, and the sessions of its groups."""

    service: Service
    port: Port
    uploads: LocalUploads
    stops: list[float | None] = field(default_factory=list)
    noted: list[AdminCall] = field(default_factory=list)
    num_key_reads: int = 0
    is_gone: bool = False
    silent_s: float = 0.0
    """How long a run that is gone takes to be missed."""
    playing: list[asyncio.Task[object]] = field(default_factory=list)

    @classmethod
    async def begin(cls, directory: Path) -> TenantRun:
        service = await Service(directory, settings=SETTINGS.service).begin()
        store = SessionStore(service.store)
        settings = GatewaySettings(
            sessions=SETTINGS.sessions,
            rollouts=SETTINGS.rollouts,
            algorithm=SETTINGS.algorithm,
            max_context_tokens=400,
            shape=ModelShape(vocab_size=516, mixture=None),
        )
        port = Port(
            settings,
            renderer=renderer(),
            make_policy=Policy,
            store=store,
            commits=GroupCommit(store, term=service.recorder.term, hold_s=2.0),
            read_keys=lambda: read_keys(service.store),
        )
        uploads = LocalUploads(service, settings, make_policy=Policy, take_turn=port.take_turn)
        return cls(service, port, uploads)

    async def open_sessions(self) -> None:
        """Admit what waits, and hand its sessions out."""
        await self.service.admit()
        for assignment in take_all(self.service.queue, environments=(SESSION,)):
            self.playing.append(asyncio.create_task(self.port.play(assignment)))
        await asyncio.sleep(0.05)

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

    async def control(self, call: str, *arguments: Any) -> Any:
        """Nothing is done; what is to be written down is kept."""
        assert call == "note_call", call
        self.noted += arguments

    async def cancel(self, submission_id: str, *, sees: str | None = None) -> SubmissionView | None:
        async def evict(group_id: str) -> bool:
            return self.service.queue.cancel_group(group_id)

        return await self.service.submissions.cancel(submission_id, evict=evict, sees=sees)

    async def stop(self, grace_s: float | None) -> None:
        self.stops.append(grace_s)

    async def readiness(self) -> Readiness:
        return readiness(
            phase=Phase.TRAINING, detail="", policy_version=3, engines_ready=1,
            engines_expected=1, behind_s=0.0, publish_limit_s=30.0, store_away_s=0.0,
        )  # fmt: skip

    async def keys(self) -> Sequence[NamedKey]:
        self.num_key_reads += 1
        if self.is_gone:
            await asyncio.sleep(self.silent_s)
            raise RunUnavailable("the run does not answer")
        return read_keys(self.service.store)

    async def add_key(self, key: NamedKey) -> bool:
        return add_key(self.service.store, key)

    async def revoke_key(self, name: str) -> NamedKey | None:
        return revoke_key(self.service.store, name)

    def app(self, *, first_digest: str | None = SETTINGS.key_digest) -> FastAPI:
        """One replica of the API. first_digest: as `HttpSettings.key_digest`."""
        settings = replace(SETTINGS, key_digest=first_digest)
        app = create_app(self, settings, stream_s=0.2)
        add_control(app, self)
        add_sessions(app, self, self.port, settings)
        add_uploads(app, self, self.uploads, settings)
        # For admins alone: no test here comes so far as to call it.
        add_page(app, cast(PagePort, None))
        return app


def client_of(app: FastAPI, key: str = "") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


async def new_key(app: FastAPI, name: str, **fields: object) -> str:
    """A key that the first admin creates; of the tenant `name`, unless another is named."""
    async with client_of(app, FIRST_KEY) as admin:
        answer = await admin.post("/api/v1/keys", json={"name": name, "tenant": name, **fields})
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    key: str = answer.json()["key"]
    return key


@asynccontextmanager
async def tenants(directory: Path) -> AsyncIterator[TenantRun]:
    run = await TenantRun.begin(directory)
    try:
        yield run
    finally:
        for task in run.playing:
            task.cancel()
        run.port.close()
        run.service.store.close()
