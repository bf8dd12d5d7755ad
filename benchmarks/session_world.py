"""The gateway's actor and the API's routes on a local Ray, with scripted answers instead of an
engine.

The routes run in the calling process, as in a replica of the API; store, queue, tokenizer and Ray's
calls are real. Nothing is trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from fastapi import FastAPI
from starlette.types import Message
from transformers import AutoTokenizer

from actors.algorithm import AlgorithmSettings
from actors.environment.policy import GenerateReply, GenerateRequest, ParsedReply, PolicyClient
from actors.environment.settings import RolloutSettings
from actors.trainer.tiny.model import build_tiny_model
from actors.types import SESSION, FinishReason, RolloutAssignment, Task, VersionSpan
from service.access.keys import AGENT, session_key
from service.api.app import create_app
from service.api.settings import HttpSettings
from service.config.sections import ServiceSettings, SessionSettings
from service.gateway.client import GatewayClient
from service.gateway.routes import add_sessions
from service.gateway.sampling import GatewaySettings
from service.gateway.sessions import Gateway
from service.intake.session import SessionKeys, SessionRequest, SessionSpec, session_id
from service.intake.submission import RolloutRequest
from service.launch.cluster import start_ray
from service.store.run_store import RunStore
from service.store.submissions import SubmissionStore, packed

NAME = "task"
MAX_CONTEXT_TOKENS = 70_000
# Each is one token of the tiny model.
WORD = " is"
SETTINGS = SessionSettings(max_open=4096)


class ScriptedPolicy:
    """A policy that answers with a fixed number of tokens of plain text.

    It answers at once, or after the time that an engine would take.
    """

    def __init__(self, model: Path, num_tokens: int, delay_s: float) -> None:
        (token_id,) = AutoTokenizer.from_pretrained(model).encode(WORD)
        self._ids = np.full(num_tokens, token_id, dtype=np.int32)
        self._parsed = ParsedReply(content=WORD * num_tokens)
        self._delay_s = delay_s

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        await asyncio.sleep(self._delay_s)
        count = self._ids.shape[0]
        return GenerateReply(
            token_ids=self._ids,
            logprobs=np.full(count, -0.5, dtype=np.float32),
            finish_reason=FinishReason.LENGTH,
            version_spans=(VersionSpan(version=1, start=0, end=count),),
            cache_salt="v1",
            parsed=self._parsed,
        )


class ScriptedQueue:
    """A queue that hands out all sessions' rollouts at once, and ignores their results."""

    def __init__(self, assignments: Sequence[RolloutAssignment]) -> None:
        self._left = list(assignments)

    async def take_rollouts(
        self, _actor_id: str, max_count: int, wait_s: float, _environments: Sequence[str]
    ) -> list[RolloutAssignment]:
        if not self._left:
            await asyncio.sleep(wait_s)
        taken, self._left = self._left[:max_count], self._left[max_count:]
        return taken


@dataclass
class World:
    """A gateway with open sessions, and the application that reaches it."""

    app: FastAPI
    gateway: psutil.Process

    def gateway_cpu_s(self) -> float:
        times = self.gateway.cpu_times()
        return float(times.user + times.system)


@dataclass
class Found:
    """A port through which the routes find the gateway's actor."""

    actor: Any

    async def gateway(self) -> Any:
        return self.actor


@contextmanager
def scripted_world(
    directory: Path, *, num_sessions: int, num_tokens: int, delay_s: float
) -> Iterator[World]:
    """Yield a world with scripted answers of num_tokens, each after delay_s."""
    make_policy = partial(ScriptedPolicy, directory / "model", num_tokens, delay_s)
    with world(directory, num_sessions=num_sessions, make_policy=make_policy) as here:
        yield here


@contextmanager
def world(
    directory: Path, *, num_sessions: int, make_policy: Callable[[], PolicyClient]
) -> Iterator[World]:
    """Yield a world whose gateway samples with make_policy().

    The model is stored in `directory / "model"` before the gateway calls make_policy.
    """
    model = directory / "model"
    build_tiny_model(model, seed=0, warmup_steps=0)
    store = RunStore(f"sqlite:///{directory / 'run.db'}")
    term = store.acquire_lease(owner="benchmark").term
    SubmissionStore(store).add([packed(_request(num_sessions))], term=term)
    start_ray(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        queue = ray.remote(ScriptedQueue).options(num_cpus=0).remote(_assignments(num_sessions))
        actor: Any = (
            ray.remote(Gateway)
            .options(num_cpus=0, max_concurrency=20_000)
            .remote(
                GatewaySettings(
                    sessions=SETTINGS,
                    rollouts=RolloutSettings(),
                    algorithm=AlgorithmSettings(),
                    chat_template=None,
                    max_context_tokens=MAX_CONTEXT_TOKENS,
                ),
                actor_id="gateway-1-0",
                tokenizer_path=str(model),
                make_policy=make_policy,
                queue=queue,
                database_url=f"sqlite:///{directory / 'run.db'}",
                run_id="benchmark",
                term=term,
            )
        )
        ray.get(actor.ping.remote(), timeout=120)
        running = actor.run.remote()
        settings = HttpSettings(
            rollouts=RolloutSettings(),
            service=ServiceSettings(),
            algorithm=AlgorithmSettings(),
            environments=("guessing",),
        )
        found: Any = Found(actor)
        app = create_app(found, settings)
        add_sessions(app, found, GatewayClient(found.gateway).sessions, settings)
        yield World(app=app, gateway=_process("ray::Gateway"))
        del running
    finally:
        ray.shutdown()


def _request(num_sessions: int) -> RolloutRequest:
    spec = SessionSpec(
        max_turns=10_000,
        max_tokens_per_turn=512,
        ttl_s=36_000,
        idle_s=36_000,
        reward_deadline_s=3600,
    )
    keys = tuple(SessionKeys.of("", session_id(NAME, member)) for member in range(num_sessions))
    return RolloutRequest.of(
        Task(task_id=NAME, environment=SESSION, seed=1),
        asked_samples=num_sessions,
        default_samples=num_sessions,
        sessions=SessionRequest(spec=spec, keys=keys),
    )


def _assignments(num_sessions: int) -> list[RolloutAssignment]:
    return [
        RolloutAssignment(
            rollout_id=f"g000000.0-{member}",
            group_id="g000000.0",
            group_number=0,
            attempt=0,
            task=Task(task_id=NAME, environment=SESSION, seed=1),
        )
        for member in range(num_sessions)
    ]


def _process(title: str) -> psutil.Process:
    (found,) = (
        child
        for child in psutil.Process().children(recursive=True)
        if child.name().startswith(title[:15]) or " ".join(child.cmdline()).startswith(title)
    )
    return found


def history(num_tokens: int, *, tokens_a_message: int = 250) -> list[dict[str, str]]:
    """Return a conversation of a number of tokens, none of which the session has sampled."""
    text = WORD * tokens_a_message
    roles = ("user", "assistant")
    count = max(1, num_tokens // tokens_a_message)
    return [{"role": roles[place % 2], "content": text} for place in range(count - 1 + count % 2)]


async def post(app: FastAPI, member: int, body: bytes) -> tuple[int, bytes]:
    """Send one request to the application without an HTTP server, and return status and body."""
    name = session_id(NAME, member)
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"authorization", f"Bearer {session_key('', name, AGENT)}".encode()),
    ]
    path = f"/sessions/{name}/v1/chat/completions"
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1",
        "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(),
        "root_path": "", "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("localhost", 80),
    }  # fmt: skip
    sent, status, parts = False, 0, []

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)
