"""Run queries in confined processes, which all episodes of this process share.

Nothing here blocks the event loop: each process belongs to a thread, which waits for it. A process
that does not answer in time is killed, and the next query starts another. Called by `environment`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from actors.environment.plugins.code_search.server import RETIRES_AFTER_CPU_S
from actors.environment.plugins.code_search.servers import NoAnswer, ServerThreads
from actors.environment.tool_turns import ToolFailed

MAX_RESULT_BYTES = 2**20
# Extra time before a process is killed: a query stops itself at its limit, but not during a single
# step of SQLite.
_GRACE_S = 1.0


class BadDatabase(ValueError):
    """A task's database cannot be used; the text says why."""


class QueryFailed(ToolFailed):
    """A query failed, so it has no result; the text is for the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """A database, either in memory or in a file."""

    script: str | None = None
    """SQL script that creates the database in memory."""
    path: str | None = None
    """Absolute path of the database's file."""

    def request(self) -> dict[str, Any]:
        return {"script": self.script} if self.path is None else {"path": self.path}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The rows that a query found."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    is_cut: bool
    """Whether rows beyond the limits were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table or view of a database."""

    name: str
    sql: str
    """The statement that creates the table or view."""
    rows: Sequence[Sequence[Any]]
    """The first rows, up to the requested number."""


class Execution:
    """The processes that all episodes share; get it by `Execution.shared()`, then `close` it."""

    _current: ClassVar[Execution | None] = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._num_users = 0
        self._servers = ServerThreads("sql.server", retires_after_cpu_s=RETIRES_AFTER_CPU_S)
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="sql")

    @classmethod
    def shared(cls) -> Execution:
        with cls._lock:
            # A forked child has its parent's memory, but none of its threads.
            if cls._current is None or cls._current._pid != os.getpid():
                cls._current = cls()
            cls._current._num_users += 1
            return cls._current

    def close(self) -> None:
        """Release the processes; if no other user is left, end them and wait for their end."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            if type(self)._current is self:
                type(self)._current = None
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._servers.close()

    async def query(
        self, database: Database, query: str, *, max_rows: int, limit_s: float
    ) -> Result:
        """Run a query.

        Raises: QueryFailed, BadDatabase; ServerFailed if a confined process cannot be started.
        """
        request = {"query": query, "max_rows": max_rows}
        answer = await self._ask(database, request, limit_s=limit_s)
        return Result(columns=answer["columns"], rows=answer["rows"], is_cut=answer["is_cut"])

    async def tables(
        self, database: Database, *, sample_rows: int, limit_s: float
    ) -> Sequence[Table]:
        """Return the tables of a database. Raises: as `query`."""
        request = {"query": None, "sample_rows": sample_rows, "max_rows": max(1, sample_rows)}
        answer = await self._ask(database, request, limit_s=limit_s)
        return [Table(**table) for table in answer["tables"]]

    async def _ask(
        self, database: Database, asked: Mapping[str, Any], *, limit_s: float
    ) -> dict[str, Any]:
        request = {
            **database.request(), **asked, "max_bytes": MAX_RESULT_BYTES, "limit_s": limit_s,
        }  # fmt: skip
        ask = partial(self._servers.ask, request, limit_s=limit_s + _GRACE_S)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except NoAnswer:
            raise QueryFailed("the query took too long or too much memory") from None
        if "error" not in answer:
            return answer
        if answer["is_database"]:
            raise BadDatabase(answer["error"])
        raise QueryFailed(answer["error"])
