"""Tests of the client of the gateway in the API, if the gateway dies during a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from worlds.parts.gateway_world import NAME, user

from actors.deadline import within
from service.api.problems import RunUnavailable
from service.gateway.chat import ChatCall, ChatRequest, RefusalCode, Refused
from service.gateway.client import GatewayClient


@dataclass
class Method:
    call: Callable[..., Awaitable[Any]]

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return self.call(*arguments)


@dataclass
class Run:
    """A run whose gateway dies during a request and is replaced once `is_replaced` is set."""

    is_replaced: asyncio.Event = field(default_factory=asyncio.Event)
    has_died: asyncio.Event = field(default_factory=asyncio.Event)
    abandoned: asyncio.Queue[tuple[Any, ...]] = field(default_factory=asyncio.Queue)

    async def gateway(self) -> Any:
        if self.has_died.is_set() and not self.is_replaced.is_set():
            raise RunUnavailable("the run has no gateway")
        return self

    @property
    def ask(self) -> Method:
        return Method(self._ask)

    async def _ask(self, part: str, method: str, *arguments: Any) -> Any:
        assert part == "sessions"
        if method == "chat":
            self.has_died.set()
            raise ActorDiedError
        assert method == "abandon"
        self.abandoned.put_nowait(arguments)


def call(deadline_s: float) -> ChatCall:
    request = ChatRequest(messages=(user("hi"),))
    return ChatCall(
        session_id=NAME, key_digest="", request_id="first", request=request, deadline_s=deadline_s
    )


@pytest.mark.parametrize("goes", [True, False])
async def test_the_next_gateway_learns_that_a_request_was_abandoned(goes: bool) -> None:
    """Check a lost client and a deadline; the dead gateway may have stored the turn as shown."""
    run = Run()
    client = GatewayClient(run.gateway)
    asking = asyncio.create_task(client.sessions.chat(call(60.0 if goes else 0.6)))
    await within(5.0, run.has_died.wait())
    if goes:
        asking.cancel()
    with pytest.raises(asyncio.CancelledError if goes else Refused) as ended:
        await within(5.0, asking)
    if isinstance(ended.value, Refused):
        assert ended.value.code is RefusalCode.NOT_AVAILABLE
    assert run.abandoned.empty()
    run.is_replaced.set()
    assert await within(5.0, run.abandoned.get()) == (NAME, "first")
