"""Store the paused parts and the named API keys of a run, and the newest calls of operators.

The database contains only the digests of keys, not the keys. Invariants: a revocation is final; a
key's name or digest is never used a second time. Only the supervisor with the newest lease stores
pauses and calls, but any process with write access to the database may create and revoke keys.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pydantic import ConfigDict
from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from service.access.keys import MAX_KEYS, NamedKey
from service.store import tables
from service.store.read_only import ReadOnlyStore
from service.store.run_store import RunStore
from service.store.tables import Pausable

KEPT_CALLS = 10_000
_ANSWER = ConfigDict(extra="forbid", use_attribute_docstrings=True)
"""The API answers these records unchanged, and describes their fields by the docstrings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseAnswer:
    """An operator's pause of one part of the run: which part, since when, and why."""

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


def read_keys(store: ReadOnlyStore) -> tuple[NamedKey, ...]:
    """Return all keys, revoked ones too, in the order of their creation. Raises: StoreError."""
    query = select(tables.keys).order_by(tables.keys.c.created_at, tables.keys.c.name)
    return store.read(
        lambda connection: tuple(NamedKey(**row) for row in connection.execute(query).mappings())
    )


def add_key(store: RunStore, key: NamedKey) -> bool:
    """Add a key; return False if its name or digest is taken, or there are too many keys.

    Raises: StoreError.
    """
    row = {name: getattr(key, name) for name in tables.keys.c.keys()}

    def add(connection: Connection) -> bool:
        if (connection.scalar(select(func.count()).select_from(tables.keys)) or 0) >= MAX_KEYS:
            return False
        try:
            with connection.begin_nested():
                connection.execute(insert(tables.keys), row)
        except IntegrityError:
            return False
        return True

    return store.write_of_no_term(add)


def revoke_key(store: RunStore, name: str) -> NamedKey | None:
    """Revoke a key permanently, and return the key; None if no key has this name.

    A key that was revoked before stays unchanged. Raises: StoreError.
    """
    columns = tables.keys.c
    at = time.time()

    def revoke(connection: Connection) -> NamedKey | None:
        connection.execute(
            update(tables.keys)
            .where(columns.name == name, columns.revoked_at.is_(None))
            .values(revoked_at=at)
        )
        row = connection.execute(select(tables.keys).where(columns.name == name)).mappings().first()
        return None if row is None else NamedKey(**row)

    return store.write_of_no_term(revoke)
