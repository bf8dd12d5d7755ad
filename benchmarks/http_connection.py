"""Send HTTP/1.1 requests on one connection with little code, as the server has the same cores."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress


class HttpConnection:
    """A connection to a port of this machine, which belongs to one event loop."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> HttpConnection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Send a GET request, and return the status and the body."""
        return await self._ask("GET", path, b"", {})

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Send a POST request with a JSON body, and return the status and the body."""
        return await self._ask("POST", path, body, {**headers, "Content-Type": "application/json"})

    async def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self._writer.drain()
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        status = int(head.split(" ", 2)[1])
        if (length := fields.get("content-length")) is not None:
            return status, await self._reader.readexactly(int(length))
        parts = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readuntil(b"\r\n")
        return status, b"".join(parts)
