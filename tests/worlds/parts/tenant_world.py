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
from actors.types import SESSION
from service.access.keys import NamedKey, digest_of
from service.api.app import create_app
from service.api.control_routes import add_control
from service.api.problems import RunUnavailable
from service.api.run_page import add_page
from service.api.settings import HttpSettings
from service.config.sections import ServiceSettings, SessionSettings
from service.gateway.routes import add_sessions
from service.gateway.upload_routes import add_uploads
from service.store.controls import CallAnswer
from worlds.parts.local_run import LocalRun, LocalSessions
from worlds.parts.local_uploads import local_uploads
from worlds.parts.submission_service import Service

FIRST_KEY = "0123456789abcdef"
SETTINGS = HttpSettings(
    service=ServiceSettings(max_waiting_tasks=16, max_body_kib=64),
    algorithm=AlgorithmSettings(group_size=2, groups_per_step=2),
    rollouts=RolloutSettings(max_turns=8, max_tokens_per_turn=16),
    sessions=SessionSettings(hold_s=2.0),
    environments=("guessing", SESSION),
    key_digest=digest_of(FIRST_KEY),
)


@dataclass
class TenantRun(LocalRun):
    """A run whose API requires keys, and the sessions of its groups."""

    noted: list[CallAnswer] = field(default_factory=list)
    num_key_reads: int = 0
    silent_s: float = 0.0
    """Seconds after which a call to a run that is gone fails."""

    def __post_init__(self) -> None:
        self.port = LocalSessions(self.service, SETTINGS.sessions)
        self.uploads = local_uploads(
            self.service,
            self.port.gateway_settings,
            make_policy=lambda: self.port.policy,
            count_turn=self.port.sessions.count_turn,
        )

    @classmethod
    async def begin(cls, directory: Path) -> TenantRun:
        return cls(await Service(directory, settings=SETTINGS.service).begin())

    @property
    def control(self) -> TenantRun:
        return self

    async def note_call(self, call: CallAnswer) -> None:
        """Keep the call instead of storing it."""
        self.noted.append(call)

    async def keys(self) -> Sequence[NamedKey]:
        self.num_key_reads += 1
        if self.is_gone:
            await asyncio.sleep(self.silent_s)
            raise RunUnavailable("the run does not answer")
        return await super().keys()

    def app(self, *, first_digest: str | None = SETTINGS.key_digest) -> FastAPI:
        """Make one replica of the API. first_digest: the value of `HttpSettings.key_digest`."""
        settings = replace(SETTINGS, key_digest=first_digest)
        app = create_app(self, settings, stream_s=0.2)
        add_control(app, self)
        add_sessions(app, self, self.port, settings)
        add_uploads(app, self, self.uploads, settings)
        # The page is only for admins, and no test here reaches it.
        add_page(app, cast(Any, None))
        return app


def client_of(app: FastAPI, key: str = "") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


async def new_key(app: FastAPI, name: str, **fields: object) -> str:
    """Create a key as the first admin, for the tenant `name` unless `fields` name another."""
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
        run.port.close()
        run.service.store.close()
