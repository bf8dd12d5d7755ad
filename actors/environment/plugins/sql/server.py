"""The program that queries run in: it reads a database and a query, and writes rows or an error.

The program is confined before its first request, like `code_search.server`: no network, no writing
of files, bounded memory and time. A query may only select: SQLite asks `_authorize` before each
action, and the connection is read-only. No value is longer than MAX_VALUE_BYTES. Each request opens
its own database, so that requests do not affect each other. Standard library only.
"""

from __future__ import annotations

import json
import sqlite3
import time
from typing import Any
from urllib.parse import quote

from actors.environment.plugins.code_search.server import serve

MAX_VALUE_BYTES = 2**20
MAX_QUERY_BYTES = 20_000
_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_QUERY_BYTES,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
}
# Instructions of SQLite's virtual machine between two checks of the time limit.
_BETWEEN_CHECKS = 10_000


def main() -> None:
    serve(answer)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request for the rows that a query finds, or for the schema of the database.

    Args: request: has these entries. `script` or `path` gives the database. `query` is the query;
    if it is None, the request asks for the schema, with the first `sample_rows` rows of each table.
    `max_rows` and `max_bytes` limit the answer; `limit_s` limits the seconds for the request.
    Returns: the answer to a query has the entries `columns`, `rows` and `is_cut`. A request for
    the schema is answered with the entry `tables`. If the request fails, the answer has `error` and
    `is_database`, which is true if the database itself cannot be used.
    """
    end = time.monotonic() + request["limit_s"]
    try:
        connection = _opened(request, end=end)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        return {"error": _error_text(error), "is_database": True}
    try:
        if request.get("query") is None:
            return {"tables": _tables(connection, request)}
        return _rows(connection, request["query"], request)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        return {"error": _error_text(error), "is_database": False}
    finally:
        connection.close()


def _opened(request: dict[str, Any], *, end: float) -> sqlite3.Connection:
    if "path" in request:
        # Immutable: without locks and a journal, which this process could not write.
        place = f"file:{quote(request['path'])}?mode=ro&immutable=1"
        connection = sqlite3.connect(place, uri=True, isolation_level=None)
    else:
        connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.text_factory = lambda data: data.decode(errors="replace")
    connection.set_progress_handler(lambda: time.monotonic() > end, _BETWEEN_CHECKS)
    try:
        connection.execute("PRAGMA temp_store = MEMORY")
        # Forbid ATTACH, because the script, which is part of a task, must not read files either.
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        if "script" in request:
            connection.executescript(request["script"])
        connection.execute("PRAGMA query_only = 1")
        # Read the file's header, so that a bad file is not reported as a bad query.
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except BaseException:
        connection.close()
        raise
    for limit, most in _LIMITS.items():
        connection.setlimit(limit, most)
    connection.set_authorizer(_authorize)
    return connection


def _authorize(action: int, _first: Any, second: Any, *_: Any) -> int:
    is_loading = action == sqlite3.SQLITE_FUNCTION and str(second).lower() == "load_extension"
    is_allowed = action in _ALLOWED and not is_loading
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def _rows(connection: sqlite3.Connection, query: str, request: dict[str, Any]) -> dict[str, Any]:
    cursor = connection.execute(query)
    if cursor.description is None:
        raise ValueError("no query")
    rows: list[list[Any]] = []
    num_bytes, is_cut = 0, False
    for row in cursor:
        cells = [{"blob": cell.hex()} if isinstance(cell, bytes) else cell for cell in row]
        num_bytes += len(json.dumps(cells))
        is_cut = len(rows) >= request["max_rows"] or num_bytes > request["max_bytes"]
        if is_cut:
            break
        rows.append(cells)
    columns = [str(column[0])[:200] for column in cursor.description[:100]]
    return {"columns": columns, "rows": rows, "is_cut": is_cut}


def _tables(connection: sqlite3.Connection, request: dict[str, Any]) -> list[dict[str, Any]]:
    listed = connection.execute(
        "SELECT name, sql FROM sqlite_schema WHERE type IN ('table', 'view') AND sql IS NOT NULL "
        "AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
    ).fetchall()
    tables = []
    for name, sql in listed:
        quoted = '"' + name.replace('"', '""') + '"'
        query = f"SELECT * FROM {quoted} LIMIT {int(request['sample_rows'])}"
        found = _rows(connection, query, request) if request["sample_rows"] else {"rows": []}
        tables.append({"sql": sql, "rows": found["rows"]})
    return tables


def _error_text(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, sqlite3.DatabaseError) and "not authorized" in str(error):
        return "only SELECT is allowed"
    if isinstance(error, sqlite3.OperationalError) and str(error) == "interrupted":
        return "the query took too long"
    return str(error)[:300]


if __name__ == "__main__":
    main()
