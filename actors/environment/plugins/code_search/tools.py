"""The tools of code search: their schemas for the policy, and the code that runs a call.

An environment or an external agent needs only `CodeTools`, which locates a repository and runs
calls in confined processes. All users of the same settings in this process share these processes.
docs/code-search.md has the cost of a call, measured on one core.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from annotated_types import MinLen

from actors.environment.plugins.code_search.repositories import Repositories
from actors.environment.plugins.code_search.servers import NoAnswer, ServerThreads
from actors.environment.protocol import ToolSchema
from actors.environment.tool_turns import BadArguments, ToolFailed
from actors.limits import MIB, STRICT, Positive, Rate
from actors.options import DataPath

MAX_ANSWER_FILES = 64
_TEXT = {"type": "string"}
_DIRECTORY = {"type": "string", "description": "The whole repository where it is left out."}
_GLOB = {"type": "string", "description": "Such as *.py or src/*.ts."}

LIST_FILES = ToolSchema(
    name="list_files",
    description="List a directory; with a glob, all files below it that match.",
    parameters={"type": "object", "properties": {"directory": _DIRECTORY, "glob": _GLOB}},
)
GREP = ToolSchema(
    name="grep",
    description="Search the files' lines for a regular expression.",
    parameters={
        "type": "object",
        "properties": {"pattern": _TEXT, "directory": _DIRECTORY, "glob": _GLOB},
        "required": ["pattern"],
    },
)
READ_FILE = ToolSchema(
    name="read_file",
    description="Read a file from a line on.",
    parameters={
        "type": "object",
        "properties": {"path": _TEXT, "first_line": {"type": "integer"}},
        "required": ["path"],
    },
)
ANSWER = ToolSchema(
    name="answer",
    description="Give the paths of all files that the question is about; this ends the task.",
    parameters={
        "type": "object",
        "properties": {"files": {"type": "array", "items": _TEXT}},
        "required": ["files"],
    },
)
SEARCH_TOOLS = (LIST_FILES, GREP, READ_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings:
    """The directory of the repositories, and the bounds of every call."""

    __pydantic_config__ = STRICT

    root: Annotated[DataPath, MinLen(1)]
    """Directory of the tasks' repositories, relative to the working directory."""
    max_lines: Positive = 60
    """Maximum number of lines in one answer."""
    max_chars: Positive = 4_000
    """Maximum number of characters in one answer."""
    call_limit_s: Rate = 5.0
    """Seconds that one call may take; then its process is killed."""
    unpack_limit_s: Rate = 45.0
    """Seconds that unpacking one archive may take."""
    max_repository_mib: Positive = 512
    """Maximum size of an unpacked archive in MiB."""
    max_entries: Positive = 50_000
    """Maximum number of files and directories in an archive."""


def read_answer(arguments: Mapping[str, Any]) -> list[str] | None:
    """Return the files that a call of `answer` names.

    Return None if the argument is not a list of paths, or if the list or a path is too long.
    """
    files = arguments.get("files")
    if not isinstance(files, list) or len(files) > MAX_ANSWER_FILES:
        return None
    is_readable = all(isinstance(path, str) and 0 < len(path) <= 1_024 for path in files)
    return list(files) if is_readable else None


class CodeTools:
    """The search tools of one directory of repositories.

    Use it as an asynchronous context manager, or call `close` or `aclose` at the end.
    """

    def __init__(self, settings: ToolSettings) -> None:
        self._settings = settings
        self._pool = _Pool.shared(settings)
        self._opened: list[str] = []
        self._is_closed = False

    async def __aenter__(self) -> CodeTools:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def open(self, repository: str) -> str:
        """Locate a repository by its path below the root, and return the directory to search.

        Pass this directory to `call`.

        Raises: BadRepository, ServerFailed.
        """
        directory = await self._pool.locate(repository)
        self._opened.append(directory)
        return directory

    async def call(self, directory: str, name: str, arguments: Mapping[str, Any]) -> str:
        """Call the tool of SEARCH_TOOLS with this name, and return its answer for the policy.

        directory: the result of `open`. arguments: must satisfy the tool's schema.
        Raises: BadArguments if an argument is wrong for every repository, such as a pattern that is
            no regular expression; ToolFailed if the call fails; ServerFailed if a confined process
            cannot be started.
        """
        settings = self._settings
        request = {
            "tool": name,
            "repository": directory,
            "arguments": dict(arguments),
            "bounds": {
                "max_lines": settings.max_lines,
                "max_chars": settings.max_chars,
                # Stop the search before the time limit: a partial answer is better than none.
                "soft_limit_s": 0.6 * settings.call_limit_s,
            },
        }
        try:
            answer = await self._pool.ask(request, limit_s=settings.call_limit_s)
        except NoAnswer:
            raise ToolFailed("The call failed or took too long; narrow it.") from None
        text: str = answer["text"]
        if answer["is_error"]:
            raise BadArguments(text) if answer["is_malformed"] else ToolFailed(text)
        return text

    async def missing_files(self, directory: str, paths: Iterable[str]) -> list[str]:
        """Return those of the paths that are not files in `directory`.

        Raises: ServerFailed, NoAnswer.
        """
        request = {"tool": "missing_files", "repository": directory, "paths": list(paths)}
        answer = await self._pool.ask(request, limit_s=self._settings.call_limit_s)
        missing: list[str] = answer["missing"]
        return missing

    async def aclose(self) -> None:
        """Call `close` in a thread, because it waits for processes to end."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Release the shared processes; end them if no other `CodeTools` shares them."""
        if self._is_closed:
            return
        self._is_closed = True
        for directory in self._opened:
            self._pool.unpin(directory)
        _Pool.release(self._settings)


class _Pool:
    """The processes and repositories that all `CodeTools` with the same settings share."""

    _shared: ClassVar[dict[ToolSettings, _Pool]] = {}
    # Unpacked archives are also kept while they have no users, until this process ends.
    _repositories: ClassVar[dict[ToolSettings, Repositories]] = {}
    _lock = threading.Lock()

    def __init__(self, repositories: Repositories) -> None:
        self.num_users = 0
        self.pid = os.getpid()
        self._servers = ServerThreads("code_search.server")
        self._threads = ThreadPoolExecutor(
            min(4, os.cpu_count() or 1), thread_name_prefix="code-search"
        )
        # Unpacking has its own threads: it takes seconds and must not delay calls.
        self._unpacking = ThreadPoolExecutor(2, thread_name_prefix="code-search-unpack")
        self._located = repositories

    @classmethod
    def shared(cls, settings: ToolSettings) -> _Pool:
        with cls._lock:
            pool = cls._shared.get(settings)
            if pool is None or pool.pid != os.getpid():
                if settings not in cls._repositories:
                    cls._repositories[settings] = Repositories(
                        settings.root,
                        max_bytes=settings.max_repository_mib * MIB,
                        max_entries=settings.max_entries,
                        unpack_limit_s=settings.unpack_limit_s,
                    )
                pool = cls._shared[settings] = cls(cls._repositories[settings])
            pool.num_users += 1
            return pool

    @classmethod
    def release(cls, settings: ToolSettings) -> None:
        with cls._lock:
            pool = cls._shared[settings]
            pool.num_users -= 1
            if pool.num_users:
                return
            del cls._shared[settings]
        pool._close()

    @classmethod
    def pids(cls) -> list[int]:
        with cls._lock:
            return [pid for pool in cls._shared.values() for pid in pool._servers.pids()]

    async def ask(self, request: Mapping[str, Any], *, limit_s: float) -> dict[str, Any]:
        ask = partial(self._servers.ask, request, limit_s=limit_s)
        return await asyncio.get_running_loop().run_in_executor(self._threads, ask)

    async def locate(self, name: str) -> str:
        found = self._unpacking.submit(self._located.locate, name)
        try:
            return await asyncio.wrap_future(found)
        except asyncio.CancelledError:
            found.add_done_callback(self._unpin_late)
            raise

    def unpin(self, directory: str) -> None:
        self._located.release(directory)

    def _unpin_late(self, found: Future[str]) -> None:
        if not found.cancelled() and found.exception() is None:
            self._located.release(found.result())

    def _close(self) -> None:
        # Idle threads end, and their servers end with them. After that, only servers of abandoned
        # calls must be killed.
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._unpacking.shutdown(wait=False, cancel_futures=True)
        self._located.stop()
        self._servers.close()
