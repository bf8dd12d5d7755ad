"""Call the tools of MCP servers, over stdio or HTTP, with the client of the package `mcp`.

All episodes of one event loop share an open server; with the option `per: episode`, each episode
has its own. If a server is gone or no longer answers, a call raises `ServerLost`, and the next
episode opens the server again. A server over stdio ends with the process that opened it, even if
that process is killed (`server_keeper`). `mcp` is imported only if a server is configured.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO
from weakref import WeakKeyDictionary

from actors.environment import server_keeper
from actors.environment.protocol import ToolSchema
from actors.environment.tool_arguments import tidy
from actors.environment.tool_turns import ToolFailed
from actors.limits import STRICT
from actors.options import expanded
from actors.user_code import CallTimedOut, describe

OPEN_LIMIT_S = 30.0
CHECK_LIMIT_S = 5.0
CLOSE_LIMIT_S = 10.0
_PYTHONS = ("python", "python3")


class BadServer(ValueError):
    """Raised if a server has no tools, or lacks a tool that the server's options name."""


class ServerLost(Exception):
    """Raised if a server does not answer; the server may or may not have executed the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of an MCP server, which has either a command or an address."""

    __pydantic_config__ = STRICT

    command: tuple[str, ...] = ()
    """The command that starts the server, over stdio, such as [python, server.py]."""
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Environment variables of the command; $NAME is a variable of the run's processes."""
    cwd: str | None = None
    """Working directory of the command; null: the run's working directory."""
    url: str = ""
    """Address of the server, over streamable HTTP, such as http://host:8000/mcp."""
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)
    """HTTP headers; $NAME is a variable of the run's processes."""
    tools: tuple[str, ...] = ()
    """The tools that the policy is shown; empty for all tools."""
    per: Literal["actor", "episode"] = "actor"
    """actor: all episodes of an actor share one server. episode: each episode opens its own."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError(
                f"got {'both' if self.url else 'neither'} of command and url, expected one: "
                "command: [python, server.py] over stdio, or url: http://host:8000/mcp"
            )
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: got {self.url!r}, expected http:// or https://; correct it")
        if self.command and shutil.which(_found(self.command)[0]) is None:
            raise ValueError(
                f"command: {self.command[0]} not found, expected an installed program; install it, "
                "or correct it"
            )
        _expanded(self.env, what="env")
        _expanded(self.headers, what="headers")

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that the server's command names."""
        named = [Path(self.cwd or ".", part) for part in self.command]
        return tuple(path for path in named if path.is_file())


def _expanded(values: Mapping[str, str], *, what: str) -> dict[str, str]:
    return {name: expanded(value, what=what) for name, value in values.items()}


# An open server: the client, and the tools of the server.
_Opened = asyncio.Future[tuple[Any, tuple["McpTool", ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool:
    """One tool of an open server."""

    schema: ToolSchema
    server: McpServer

    async def call(self, arguments: Mapping[str, Any], *, limit_s: float) -> str:
        """Call the tool and return its text. Raises: ToolFailed; ServerLost; CallTimedOut."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.server.call(self.schema.name, arguments)
        except TimeoutError as error:
            await self.server.check()
            raise CallTimedOut(f"no answer within {limit_s:g} s") from error


class McpServer:
    """A connection to one server, opened at the first use and again after the server was lost."""

    def __init__(self, name: str, options: ServerOptions) -> None:
        self._options = options
        self._where = f"mcp server {name} ({options.url or ' '.join(options.command)})"
        self._keeper: asyncio.Task[None] | None = None
        self._opened: _Opened | None = None
        self._stderr = ServerStderr()

    async def tools(self) -> tuple[McpTool, ...]:
        """Return the tools, after opening the server if needed.

        Raises: ServerLost; BadServer if the server lacks a configured tool.
        """
        _, tools = await self._open()
        return tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its text. Raises: ToolFailed; ServerLost."""
        result = await self._ask(lambda client: client.call_tool(name, dict(arguments)))
        text = _text_of(result)
        if result.is_error:
            raise ToolFailed(text)
        return text

    async def check(self) -> None:
        """Check, after a call timed out, whether the server still answers, by listing its tools.

        Raises: ServerLost if it does not answer.
        """
        opened = self._opened_now()
        try:
            async with asyncio.timeout(CHECK_LIMIT_S):
                with suppress(ToolFailed):
                    await self._ask(lambda client: client.list_tools())
        except TimeoutError:
            raise await self._lost(
                opened,
                f"did not answer the call, nor list its tools within {CHECK_LIMIT_S:g} s",
            ) from None

    async def close(self) -> None:
        """Close the server if it is open; the next use opens it again."""
        keeper, self._keeper, self._opened = self._keeper, None, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper], timeout=CLOSE_LIMIT_S)

    async def _ask(self, question: Callable[[Any], Awaitable[Any]]) -> Any:
        """Send a request to the server, and return the answer. Raises: ToolFailed; ServerLost.

        question: calls the client's method that sends the request.
        """
        import anyio
        import httpx2
        from mcp import MCPError

        opened, (client, _) = self._opened_now(), await self._open()
        try:
            return await question(client)
        except MCPError as error:
            if not self._is_loss(error.error.code):
                raise ToolFailed(error.error.message) from error
            raise await self._lost(opened, f"ended: {error.error.message}") from error
        except (
            OSError,
            anyio.ClosedResourceError,
            anyio.BrokenResourceError,
            httpx2.HTTPError,
        ) as error:
            raise await self._lost(opened, f"ended: {describe(error)}") from error
        except Exception as error:
            # The answer does not match the tool's own schema.
            raise ToolFailed(describe(error)) from error

    def _is_loss(self, code: int) -> bool:
        """Return whether an error's code means that the server, or its session, is gone."""
        from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST

        # Over HTTP, the client reports a restarted or overloaded server by these codes.
        over_http = {INTERNAL_ERROR, INVALID_REQUEST} if self._options.url else set()
        return code in {CONNECTION_CLOSED, *over_http}

    def _opened_now(self) -> _Opened:
        """Return the future of the open client; if no client is open, begin to open one."""
        if self._keeper is None or self._keeper.done() or self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._opened))
        return self._opened

    async def _open(self) -> tuple[Any, tuple[McpTool, ...]]:
        opened = self._opened_now()
        try:
            async with asyncio.timeout(OPEN_LIMIT_S):
                return await asyncio.shield(opened)
        except TimeoutError:
            # Drop the cause: a refusal before the start reports the first error of a chain, which
            # is a CancelledError here.
            raise await self._lost(opened, f"did not answer within {OPEN_LIMIT_S:g} s") from None

    async def _lost(self, opened: _Opened, what: str) -> ServerLost:
        """Close a lost server, unless another caller has closed it, and return the error to raise.

        Args: opened: the future of the lost client. what: what happened, for the error's text.
        """
        if self._opened is opened:
            # Wait: the event loop may end soon, and would leave the server half closed.
            await self.close()
        return ServerLost(f"{self._where} {what}{self._stderr.last_lines()}")

    async def _keep(self, opened: _Opened) -> None:
        """Open the client, and close it when this task is cancelled.

        opened: the future that gets the open client and the tools, or the error.
        """
        from mcp import Client

        try:
            # The client must be opened and closed by the same task.
            async with _target(self._options, self._stderr) as target, Client(target) as client:
                tools = await self._list(client)
                opened.set_result((client, tools))
                await asyncio.Event().wait()
        except BaseException as error:
            if not opened.done():
                opened.set_exception(self._opening_error(error))
                # Mark it as retrieved: perhaps no caller waits for it any longer.
                opened.exception()
            if not isinstance(error, Exception):
                raise

    def _opening_error(self, error: BaseException) -> Exception:
        first = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, BadServer):
            return first
        what = f"cannot be opened: {describe(first)}"
        return ServerLost(f"{self._where} {what}{self._stderr.last_lines()}")

    async def _list(self, client: Any) -> tuple[McpTool, ...]:
        found, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            if (cursor := page.next_cursor) is None:
                break
        wanted, where = self._options.tools, self._where
        if missing := sorted(set(wanted) - {tool.name for tool in found}):
            raise BadServer(
                f"{where} has no tool {', '.join(missing)}, expected some of "
                f"{', '.join(tool.name for tool in found) or 'none'}; correct mcp.NAME.tools"
            )
        if not found:
            raise BadServer(f"{where} has no tools, expected one or more; name another server")
        kept = [tool for tool in found if not wanted or tool.name in wanted]
        names = [tool.name for tool in kept]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise BadServer(
                f"{where} lists two tools with the name {', '.join(twice)}, expected unique names; "
                "correct the server, or choose its other tools by mcp.NAME.tools"
            )
        return tuple(
            McpTool(
                schema=ToolSchema(
                    name=tool.name,
                    description=tool.description or tool.name,
                    parameters=tidy(tool.input_schema),
                ),
                server=self,
            )
            for tool in kept
        )


_Servers = dict[tuple[str, ServerOptions], McpServer]
_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Servers] = WeakKeyDictionary()


def server_of(name: str, options: ServerOptions) -> McpServer:
    """Return this event loop's server with this name and these options; all callers share it."""
    own = _servers.setdefault(asyncio.get_running_loop(), {})
    return own.setdefault((name, options), McpServer(name, options))


@asynccontextmanager
async def _target(options: ServerOptions, stderr: ServerStderr) -> AsyncIterator[Any]:
    """Yield what the MCP client connects to: the server's process or its address."""
    from mcp.client.stdio import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if not options.url:
        command, *arguments = _kept(_found(options.command))
        parameters = StdioServerParameters(
            command=command, args=arguments, env=_expanded(options.env, what="env"), cwd=options.cwd
        )
        with stderr.opened() as file:
            yield stdio_client(parameters, file)
        return
    import httpx2

    # A server may keep an answer open while it works on it.
    timeout = httpx2.Timeout(OPEN_LIMIT_S, read=None)
    headers = _expanded(options.headers, what="headers")
    async with httpx2.AsyncClient(headers=headers, timeout=timeout) as client:
        yield streamable_http_client(options.url, http_client=client)


def _found(command: Sequence[str]) -> list[str]:
    """Replace `python` and `python3` by this interpreter, which has this environment's packages."""
    own = sys.executable if command[0] in _PYTHONS else command[0]
    return [own, *command[1:]]


def _kept(command: Sequence[str]) -> list[str]:
    """Return a command that runs the server and ends it when this process ends."""
    # The keeper needs pidfd. Without a keeper, the protocol requires a server to end by itself
    # when its standard input closes.
    if not hasattr(os, "pidfd_open"):
        return list(command)
    return [sys.executable, "-I", "-S", server_keeper.__file__, str(os.getpid()), *command]


def _text_of(result: Any) -> str:
    """Join the texts of a result's parts; without parts, return its structured content as JSON."""
    parts = [_text_in(each) for each in result.content]
    if not parts and result.structured_content is not None:
        with suppress(TypeError, ValueError):
            return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _text_in(part: Any) -> str:
    """Return the text of a part or of its resource; without a text, the part's type in brackets."""
    text = getattr(getattr(part, "resource", part), "text", None)
    return f"[{part.type}]" if text is None else text


# The standard error of a server over stdio: its beginning is logged, and its end is kept.
#
# The error of a lost server shows the end, because the protocol says only that a connection was
# closed. Logging has a limit for each process, because a server may write a line for every call of
# every episode into the log of the worker.
SHOWN_BYTES = 1 << 20
"""Maximum number of bytes to log, from all servers of this process together."""
_KEPT_BYTES = 2048
_CHUNK_BYTES = 1 << 16
# Chunks read in one pass of the event loop, so that a server that writes fast does not block it.
_CHUNKS_AT_ONCE = 16
_ERROR_CHARS = 120
_num_shown = 0


class ServerStderr:
    """Reads the standard error of one server; `opened` is called each time the server is opened."""

    def __init__(self) -> None:
        self._end = b""

    @contextmanager
    def opened(self) -> Iterator[TextIO]:
        """Yield a file for a server to write to; the event loop reads it until the context ends."""
        self._end = b""
        loop, (reading, writing) = asyncio.get_running_loop(), os.pipe()
        os.set_blocking(reading, False)
        loop.add_reader(reading, self._read, reading)
        try:
            with open(writing, "w") as file:
                yield file
        finally:
            loop.remove_reader(reading)
            self._read(reading)
            os.close(reading)

    def last_lines(self) -> str:
        """Return the last lines of stderr as the end of an error's text; empty if there are none.

        Indented lines are left out: the calls of a traceback would leave no room for its message.
        """
        lines = self._end.decode(errors="replace").splitlines()
        words = " | ".join(line for line in lines if line.strip() and not line[0].isspace())
        return f"; the end of its standard error: {words[-_ERROR_CHARS:]}" if words else ""

    def _read(self, reading: int) -> None:
        for _ in range(_CHUNKS_AT_ONCE):
            try:
                chunk = os.read(reading, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                return
            self._end = (self._end + chunk)[-_KEPT_BYTES:]
            _show(chunk)


def _show(chunk: bytes) -> None:
    global _num_shown
    if _num_shown >= SHOWN_BYTES:
        return
    _num_shown += len(chunk)
    sys.stderr.write(chunk.decode(errors="replace"))
    if _num_shown >= SHOWN_BYTES:
        print(
            f"\nthe standard error of MCP servers is not logged any further after {SHOWN_BYTES} "
            "bytes; the error of a lost server still shows the end of it",
            file=sys.stderr,
        )
    sys.stderr.flush()
