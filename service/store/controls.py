"""What operators requested of a run: the paused parts, and the newest calls of the API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from pydantic import ConfigDict
from sqlalchemy import Connection, delete, func, insert, select

from service.store import tables
from service.store.run_store import RunStore
from service.store.tables import Pausable

KEPT_CALLS = 10_000
_ANSWER = ConfigDict(extra="forbid", use_attribute_docstrings=True)
"""The API answers these records unchanged, and describes their fields by the docstrings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseAnswer:
    """A part of the run that an operator paused, with the time and the reason of the pause."""

    __pydantic_config__ = _ANSWER

    part: Pausable
    since: float
    """Seconds since 1970."""
    reason: str
    """The operator's reason; empty if none was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAnswer:
    """An operator's call of the API and its response, as stored in the table `admin_calls`."""

    __pydantic_config__ = _ANSWER

    at: float
    """Seconds since 1970."""
    caller: str
    """The name of the caller's key; empty if the key has no name."""
    call: str
    """The method and the path of the request."""
    body: str
    """The body of the request, cut to a length."""
    status: int
    """The status of the answer."""
    answer: str
    """The answer, or the reason of a refusal, cut to a length."""


class ControlStore:
    """Reads and writes the tables `pauses` and `admin_calls` of a run's database."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def pauses(self) -> list[PauseAnswer]:
        """Return a pause for each part of the run that is paused now. Raises: StoreError."""
        columns = tables.pauses.c
        query = select(columns.part, columns.since, columns.reason)

        def read(connection: Connection) -> list[PauseAnswer]:
            return [PauseAnswer(**row) for row in connection.execute(query).mappings()]

        return self._store.read(read)

    def set_paused(self, part: Pausable, pause: PauseAnswer | None, *, term: int) -> None:
        """Store the pause of a part of the run, or delete it if `pause` is None.

        Raises: LeaseLost, StoreError.
        """
        table = tables.pauses

        def write(connection: Connection) -> None:
            connection.execute(delete(table).where(table.c.part == part))
            if pause is not None:
                row = {"part": part, "since": pause.since, "reason": pause.reason}
                connection.execute(insert(table).values(row))

        self._store.write(term, write)

    def add_call(self, call: CallAnswer, *, term: int) -> None:
        """Store an operator's call, and delete all but the newest KEPT_CALLS calls.

        Raises: LeaseLost, StoreError.
        """
        table = tables.admin_calls
        row = {each.name: getattr(call, each.name) for each in fields(CallAnswer)}

        def write(connection: Connection) -> None:
            connection.execute(insert(table).values(row))
            newest = connection.scalar(select(func.max(table.c.id))) or 0
            connection.execute(delete(table).where(table.c.id <= newest - KEPT_CALLS))

        self._store.write(term, write)

    def calls(self, *, limit: int) -> Sequence[CallAnswer]:
        """Return the newest `limit` calls of operators, newest first. Raises: StoreError."""
        columns = tables.admin_calls.c
        names = [each.name for each in fields(CallAnswer)]
        query = select(*(columns[name] for name in names)).order_by(columns.id.desc()).limit(limit)

        def read(connection: Connection) -> list[CallAnswer]:
            return [CallAnswer(**row) for row in connection.execute(query).mappings()]

        return self._store.read(read)
