"""One session of an OpenEnv server, by its protocol over a WebSocket.

A server makes a new environment for each HTTP request, so that `/reset` and `/step` play no
episode: an episode is one connection to `URL/ws`. Used by `openenv_env`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from actors.user_code import describe

OPEN_LIMIT_S = 10.0
CLOSE_LIMIT_S = 2.0
MAX_MESSAGE_BYTES = 16 * 2**20
INVALID = "VALIDATION_ERROR"
"""The server's code for what its schema does not take."""


class Refused(Exception):
    """A message does not fit the server's schema; the message says which fields, and why."""

    def __init__(self, told: str, faults: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(told)
        self.faults = faults
        """As pydantic tells them."""


class _Full(Exception):
    """All sessions of the server are taken."""


class OpenEnvSession:
    """Opened by `begin`, once an episode."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """url: ws:// or wss://."""
        self._url = url
        self._headers = headers
        self._connection: ClientConnection | None = None

    async def begin(self, reset: Mapping[str, Any], *, wait_s: float) -> Mapping[str, Any]:
        """Open a session and reset its environment, waiting for a free one.

        Returns: the first observation, with the fields observation, reward and done.
        Raises: ConnectionError; ValueError for an error of the server's.
        """
        give_up = time.monotonic() + wait_s
        while True:
            await self.close()
            self._connection = await self._open()
            try:
                return await self._ask("reset", reset)
            except _Full as full:
                if time.monotonic() > give_up:
                    raise ValueError(
                        f"openenv: no session was free within {wait_s:g} s ({full}); expected"
                        " one for each rollout that is played at once: raise the server's "
                        "max_concurrent_envs, or lower rollouts.slots_per_actor"
                    ) from full
            except Refused as refused:
                raise failed("reset", INVALID, refused) from refused
            await asyncio.sleep(random.uniform(0.1, 0.5))

    async def step(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns: as `begin`. Raises: Refused; ValueError for another error; ConnectionError."""
        return await self._ask("step", action)

    async def close(self) -> None:
        """The server frees its environment when the connection ends, however it does."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _open(self) -> ClientConnection:
        """Raises: ConnectionError."""
        try:
            return await connect(
                self._url,
                additional_headers=self._headers,
                open_timeout=OPEN_LIMIT_S,
                close_timeout=CLOSE_LIMIT_S,
                max_size=MAX_MESSAGE_BYTES,
            )
        except (OSError, WebSocketException) as error:
            raise ConnectionError(
                f"openenv: {self._url}: {describe(error)}; start the server, and let every node "
                "reach it"
            ) from error

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises: Refused, _Full; ValueError for another error of the server; ConnectionError."""
        assert self._connection is not None
        # A server that is full says so before it is asked, and closes.
        with suppress(ConnectionClosed):
            await self._connection.send(json.dumps({"type": kind, "data": data}))
        try:
            answer = json.loads(await self._connection.recv())
        except ConnectionClosed as error:
            raise ConnectionError(f"openenv: {self._url}: the session was lost: {error}") from error
        if answer.get("type") == "observation":
            seen: Mapping[str, Any] = answer["data"]
            return seen
        refusal = answer.get("data") or {}
        code, told = refusal.get("code"), str(refusal.get("message", ""))[:200]
        if code == "CAPACITY_REACHED":
            raise _Full(told)
        faults = refusal.get("errors") or ()
        if code == INVALID and faults:
            told = "; ".join(f"{place_of(fault)}: {fault.get('msg', '')}" for fault in faults)
            raise Refused(told[:200], faults)
        raise failed(kind, code, told)


def place_of(fault: Mapping[str, Any]) -> str:
    """The field that an error of pydantic is about."""
    return str(next(iter(fault.get("loc") or ()), ""))


def failed(kind: str, code: object, told: object) -> ValueError:
    """What the server's answer to a message of a kind is told as, where that is nobody else's."""
    return ValueError(f"openenv: the server answers {kind} with {code}: {told}")
