"""Replies of judges that are kept, in memory or in an SQLite file that a node's processes share."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import OrderedDict
from contextlib import closing
from pathlib import Path

KEPT_REPLIES = 20_000
LOCK_LIMIT_S = 2.0
"""To wait for another process that has the file."""
PAUSE_S = 60.0
"""Without the file after it could not be used: a judgement is not to wait for it each time."""
_log = logging.getLogger(__name__)


class ReplyCache:
    """Replies by the digest of their question."""

    def __init__(self, file: str | None) -> None:
        self._file = None if file is None else Path(file).expanduser()
        self._newest: OrderedDict[str, str] = OrderedDict()
        self._is_told = False
        self._unused_until = 0.0

    async def find(self, key: str) -> str | None:
        if (reply := self._newest.get(key)) is not None or not self._is_used():
            return reply
        try:
            return await asyncio.to_thread(self._stored, key)
        except sqlite3.Error as error:
            self._tell(error)
            return None

    async def keep(self, key: str, reply: str) -> None:
        self._newest[key] = reply
        if len(self._newest) > KEPT_REPLIES:
            self._newest.popitem(last=False)
        if self._is_used():
            try:
                await asyncio.to_thread(self._store, key, reply)
            except sqlite3.Error as error:
                self._tell(error)

    def _is_used(self) -> bool:
        return self._file is not None and time.monotonic() >= self._unused_until

    def _tell(self, error: sqlite3.Error) -> None:
        """Once: without the file a judgement costs what it costs, and is had all the same."""
        self._unused_until = time.monotonic() + PAUSE_S
        if not self._is_told:
            self._is_told = True
            _log.warning("judge: the cache %s cannot be used: %s", self._file, error)

    def _stored(self, key: str) -> str | None:
        with closing(self._opened()) as connection:
            row = connection.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def _store(self, key: str, reply: str) -> None:
        with closing(self._opened()) as connection, connection:
            connection.execute(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)", (key, reply, time.time())
            )

    def _opened(self) -> sqlite3.Connection:
        assert self._file is not None
        connection = sqlite3.connect(self._file, timeout=LOCK_LIMIT_S)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT, at REAL)"
        )
        return connection
