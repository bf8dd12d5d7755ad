"""The API of a run without engines on a port of loopback; a script plays its rollouts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from actors.algorithm import AlgorithmSettings
from actors.environment.settings import RolloutSettings
from service.access.keys import digest_of
from service.api.app import create_app
from service.api.control_routes import add_control
from service.api.run_page import add_page
from service.api.settings import HttpSettings
from service.config.sections import ServiceSettings, SessionSettings
from service.gateway.routes import add_sessions
from service.gateway.upload_routes import add_uploads
from service.launch.run_dir import RunDir
from service.run.control import Control
from service.worker_thread import WorkerThread
from worlds.builders.store_builders import committed
from worlds.parts.control_world import AskedControl, ScriptedEngines, ScriptedTerm
from worlds.parts.local_page import LocalPage
from worlds.parts.local_run import LocalRun, LocalSessions
from worlds.parts.local_uploads import local_uploads
from worlds.parts.submission_service import Service

START_LIMIT_S = 30.0


@dataclass
class ServedRun:
    """A run whose API answers at `url`."""

    url: str = ""
    num_requests: int = 0
    """The number of requests that submitted tasks."""
    may_play: threading.Event = field(default_factory=threading.Event)
    """Rollouts are played, trained and committed while it is set."""


class _Counting(LocalRun):
    world: ServedRun
    controlled: Control

    async def submit(self, *arguments, **named):  # type: ignore[no-untyped-def]
        self.world.num_requests += 1
        return await super().submit(*arguments, **named)

    @property
    def control(self) -> AskedControl:
        return AskedControl(self.controlled)


async def begin_control(service: Service) -> Control:
    """Return a control over a scripted term, which evaluates and commits checkpoints at once."""
    term = ScriptedTerm()
    term.go_on.set()
    term.commit.set_result(committed(service.step, "step-0"))
    control = Control(
        service.store,
        thread=WorkerThread("store"),
        recorder=service.recorder,
        engines=cast(Any, ScriptedEngines(term)),
        checkpoints=RunDir(path=service.directory).checkpoints,
        read_queue=lambda: service.queue.stats(now=0.0),
    )
    term.control = control
    control.term = cast(Any, term)
    service.recorder.training("")
    return control


@contextmanager
def served(
    directory: Path,
    *,
    limits: ServiceSettings | None = None,
    key: str = "",
    hold_s: float = 5.0,
    stream_s: float = 1.0,
) -> Iterator[ServedRun]:
    """Serve the API until the end of the block.

    key: the API's key; empty: the API needs none. hold_s: how long an agent's request is held.
    stream_s: seconds after which a stream of the feed's events ends.
    """
    limits = limits or ServiceSettings(max_tasks_per_request=8, max_waiting_tasks=8)
    held = SessionSettings(hold_s=hold_s)
    settings = HttpSettings(
        rollouts=RolloutSettings(),
        service=limits,
        sessions=held,
        algorithm=AlgorithmSettings(group_size=2),
        environments=("guessing",),
        key_digest=digest_of(key) if key else None,
    )
    service, world = Service(directory, settings=limits), ServedRun()
    run = _Counting(service)
    run.world = world

    async def play(sessions: LocalSessions) -> None:
        while True:
            await asyncio.sleep(0.01)
            if world.may_play.is_set():
                await sessions.admit()
                service.play()
                await service.train()
                await service.commit()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.begin()
        sessions = LocalSessions(service, settings=held)
        add_sessions(app, run, sessions, settings)
        uploads = local_uploads(
            service, sessions.gateway_settings, make_policy=lambda: sessions.policy
        )
        add_uploads(app, run, uploads, settings)
        run.controlled = await begin_control(service)
        add_control(app, run)
        add_page(app, LocalPage(service))
        playing = asyncio.create_task(play(sessions))
        yield
        playing.cancel()
        sessions.close()
        service.store.close()

    app = create_app(run, settings, lifespan=lifespan, stream_s=stream_s)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + START_LIMIT_S
        while not server.started:
            assert time.monotonic() < until and thread.is_alive()
            time.sleep(0.01)
        world.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield world
    finally:
        server.should_exit = True
        thread.join(START_LIMIT_S)
