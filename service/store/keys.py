"""The named API keys of a run. The database contains only their digests, not the keys.

Invariants: a name or a digest is never used a second time, even after a revocation, which is final.
Keys belong to no term: any process with write access to the run's database may create and revoke
them, even if a supervisor has the lease.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from service.access.keys import MAX_KEYS, NamedKey
from service.store import tables
from service.store.lineage import Readable
from service.store.run_store import RunStore


def read_keys(store: Readable) -> tuple[NamedKey, ...]:
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
