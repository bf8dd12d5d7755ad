"""The stored feed of a run: the events that clients read (see `service.intake.listing`).

A writer adds entries in the transaction that stores the reported events. All writers of a run
exclude each other. So after a reader has seen a number, no smaller number is added. A tenant's
entries also have the tenant's own numbers, which reveal nothing about other tenants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from sqlalchemy import (
    Connection,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from service.access.keys import tenant_of
from service.intake.listing import FeedEntry, FeedKind, FeedPage
from service.store import tables
from service.store.read_only import ReadOnlyStore

_FIELDS = tuple(field.name for field in fields(FeedEntry))
_STORED = tuple(name for name in _FIELDS if name != "number")
_ACCEPTED, _NUMBERS = tables.submissions.c, tables.feed_numbers.c
_IN_ORDER = func.row_number().over(partition_by=_ACCEPTED.tenant, order_by=_ACCEPTED.position)
_TELL_ACCEPTED = insert(tables.feed).from_select(
    ("at", "kind", "task", "tenant", "own_number"),
    select(
        _ACCEPTED.accepted_at,
        literal(FeedKind.ACCEPTED, tables.feed.c.kind.type),
        _ACCEPTED.id,
        _ACCEPTED.tenant,
        case((_ACCEPTED.tenant != "", func.coalesce(_NUMBERS.newest, 0) + _IN_ORDER)),
    )
    .outerjoin_from(tables.submissions, tables.feed_numbers, _NUMBERS.tenant == _ACCEPTED.tenant)
    .where(_ACCEPTED.position > bindparam("behind"))
    .order_by(_ACCEPTED.position),
)


def add_entries(connection: Connection, entries: Iterable[FeedEntry]) -> None:
    """Append entries about tasks to the feed, in order; each entry gets the next number."""
    _add(connection, [(tenant_of(entry.task or ""), entry) for entry in entries])


def tell_accepted(connection: Connection, *, behind: int, num_of: Mapping[str, int]) -> None:
    """Append an entry of kind `accepted` for each submission after the position `behind`.

    num_of: the number of these submissions for each tenant.
    """
    # One statement for all entries, because there may be thousands.
    connection.execute(_TELL_ACCEPTED, {"behind": behind})
    _count_up(connection, {tenant: num for tenant, num in num_of.items() if tenant})


def tell_all(connection: Connection, entry: FeedEntry) -> None:
    """Append an entry about the whole run: a copy for admins, and a copy for each tenant.

    `entry.void_after` is a number of the whole feed. In a tenant's copy, it is converted to the
    tenant's own numbers.
    """
    columns, after = tables.feed.c, entry.void_after
    known = select(tables.feed_numbers.c.tenant, tables.feed_numbers.c.newest)
    entries = [("", entry)]
    for tenant, newest in connection.execute(known).all():
        first_void = connection.scalar(
            select(func.min(columns.own_number)).where(
                columns.tenant == tenant, columns.number > (after or 0)
            )
        )
        own = None if after is None else newest if first_void is None else first_void - 1
        entries.append((tenant, replace(entry, void_after=own)))
    _add(connection, entries)


def _add(connection: Connection, entries: list[tuple[str, FeedEntry]]) -> None:
    """Append entries, each with the tenant that may see it; "" if only admins may see it."""
    num_of = Counter(tenant for tenant, _ in entries if tenant)
    newest, rows = _count_up(connection, num_of), []
    for tenant, entry in entries:
        if tenant:
            newest[tenant] = newest.get(tenant, 0) + 1
        values = {name: getattr(entry, name) for name in _STORED}
        rows.append({**values, "tenant": tenant, "own_number": newest.get(tenant)})
    if rows:
        connection.execute(insert(tables.feed), rows)


def _count_up(connection: Connection, num_of: Mapping[str, int]) -> dict[str, int]:
    """Reserve the next `num_of[tenant]` feed numbers of each tenant.

    Return each tenant's newest number before this call; a tenant without entries is left out.
    """
    if not num_of:
        return {}
    numbers = tables.feed_numbers
    query = select(numbers.c.tenant, numbers.c.newest).where(numbers.c.tenant.in_(num_of))
    before = {tenant: newest for tenant, newest in connection.execute(query)}
    for tenant, num in num_of.items():
        values = {"newest": before.get(tenant, 0) + num}
        connection.execute(
            update(numbers).where(numbers.c.tenant == tenant).values(values)
            if tenant in before
            else insert(numbers).values(tenant=tenant, **values)
        )
    return before


def newest_number(connection: Connection) -> int:
    """Return the number of the feed's newest entry; 0 if the feed has no entries."""
    return int(connection.scalar(select(func.max(tables.feed.c.number))) or 0)


def prune_feed(connection: Connection, *, keep: int) -> None:
    """Remove all but the newest `keep` entries of the feed."""
    number = tables.feed.c.number
    last_left_out = connection.scalar(select(number).order_by(number.desc()).offset(keep).limit(1))
    if last_left_out is not None:
        connection.execute(delete(tables.feed).where(number <= last_left_out))


def read_feed(store: ReadOnlyStore, *, after: int, limit: int, sees: str | None = None) -> FeedPage:
    """Return the first `limit` entries of the feed after the number `after`.

    Args:
        sees: The tenant whose entries are returned; None for the entries of all tenants. For a
            tenant, `after` and the returned numbers are the tenant's own, not the whole feed's.
    Raises: StoreError.
    """
    columns = tables.feed.c
    number, is_shown = columns.own_number, columns.tenant == sees
    if sees is None:
        # Entries about the run have no task and a copy for each tenant, which is left out here.
        number, is_shown = columns.number, or_(columns.task.is_not(None), columns.tenant == "")
    query = (
        select(number.label("number"), *(columns[name] for name in _STORED))
        .where(is_shown, number > after)
        .order_by(number)
        .limit(limit)
    )
    own_newest = select(tables.feed_numbers.c.newest).where(tables.feed_numbers.c.tenant == sees)

    def read(connection: Connection) -> FeedPage:
        oldest = connection.scalar(select(func.min(number)).where(is_shown))
        entries = tuple(FeedEntry(**row) for row in connection.execute(query).mappings())
        # Last, so that it is not below the number of an entry.
        newest = newest_number(connection) if sees is None else connection.scalar(own_newest) or 0
        if oldest is None and sees is not None and newest:
            # All entries of this tenant were pruned.
            oldest = newest + 1
        return FeedPage(entries=entries, oldest=oldest or 0, newest=newest)

    return store.read(read)
