"""The feed of a run, stored (`service.intake.feed`).

A writer puts its entries into the transaction of what they tell. All writers of a run exclude each
other, so that numbers grow in the order of the commits and a reader who has seen one number will
see no smaller one later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from sqlalchemy import Connection, delete, func, insert, select

from service.intake.feed import FeedEntry, FeedPage
from service.store import tables
from service.store.lineage import Readable

_FIELDS = tuple(field.name for field in fields(FeedEntry))


def add_entries(connection: Connection, entries: Iterable[FeedEntry]) -> None:
    """Append them, in order, to the feed; each gets the next number."""
    names = [name for name in _FIELDS if name != "number"]
    rows = [{name: getattr(entry, name) for name in names} for entry in entries]
    if rows:
        connection.execute(insert(tables.feed), rows)


def newest_number(connection: Connection) -> int:
    """0 where nothing was told."""
    return int(connection.scalar(select(func.max(tables.feed.c.number))) or 0)


def prune_feed(connection: Connection, *, keep: int) -> None:
    """Remove all but the newest `keep` entries."""
    number = tables.feed.c.number
    last_left_out = connection.scalar(select(number).order_by(number.desc()).offset(keep).limit(1))
    if last_left_out is not None:
        connection.execute(delete(tables.feed).where(number <= last_left_out))


def read_feed(store: Readable, *, after: int, limit: int) -> FeedPage:
    """The first `limit` entries behind a number. Raises: StoreError."""
    columns = tables.feed.c
    query = (
        select(*(columns[name] for name in _FIELDS))
        .where(columns.number > after)
        .order_by(columns.number)
        .limit(limit)
    )

    def read(connection: Connection) -> FeedPage:
        return FeedPage(
            entries=tuple(FeedEntry(**row) for row in connection.execute(query).mappings()),
            oldest=int(connection.scalar(select(func.min(columns.number))) or 0),
        )

    return store.read(read)
