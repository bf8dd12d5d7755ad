"""The steps by which a stored run moves forward, from the format that wrote it to this one's.

Invariants: a step takes format N to N + 1 and is never edited once it was released; it uses the
connection and nothing else, so that it may be run again after a rollback; no step changes the
tables `format`, `leases` and `checkpoints`, which are read before the run is moved.
`RunStore` runs the steps in the transaction that takes the lease, so that two processes never run
them at once, and a run is in one format or in the other.

A step describes the tables as they were at its time, with a `MetaData` of its own, because those of
`tables.py` move on. Every step gets its own test in `tests/store/test_migrations.py`, which also
compares a moved database with a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlalchemy import Boolean, Column, Connection, MetaData, String, Table, Text, true
from sqlalchemy.schema import CreateColumn

FIRST_FORMAT = 9
"""The oldest format that can be moved forward."""

Step = Callable[[Connection], None]


def add_column(connection: Connection, table: str, column: Column[object]) -> None:
    """Add a column that is nullable or has a `server_default`, which old rows get."""
    assert column.nullable or column.server_default is not None, "old rows need a value"
    places = connection.get_execution_options().get("schema_translate_map") or {}
    dialect = connection.dialect
    named = Table(table, MetaData(), column, schema=places.get(None))
    what = CreateColumn(column).compile(dialect=dialect)
    name = dialect.identifier_preparer.format_table(named)
    connection.exec_driver_sql(f"ALTER TABLE {name} ADD COLUMN {what}")


def _keep_what_was_asked_of_turns(connection: Connection) -> None:
    """Add to a turn its stop string, the parameters that were ignored, and the template's
    options."""
    for name, kind, of_old_rows in (
        ("stop_string", String, ""),
        ("ignored", Text, "[]"),
        ("template_options", Text, "{}"),
    ):
        column: Column[object] = Column(name, kind, nullable=False, server_default=of_old_rows)
        add_column(connection, "session_turns", column)


def _keep_which_message_was_instructions(connection: Connection) -> None:
    """Add the column that says whether a conversation's first message came as instructions.

    Later instructions replace such a message. Old turns do not record how it came: they get true,
    because their first system message was replaced in any case.
    """
    column: Column[object] = Column("is_instructed", Boolean, nullable=False, server_default=true())
    add_column(connection, "session_turns", column)


# By the format that a step starts from, in order and without a gap.
STEPS: Mapping[int, Step] = {
    9: _keep_what_was_asked_of_turns,
    10: _keep_which_message_was_instructions,
}


def newest_format(steps: Mapping[int, Step] = STEPS) -> int:
    """Return the format of a run after all steps."""
    return FIRST_FORMAT + len(steps)


def move_forward(connection: Connection, number: int, steps: Mapping[int, Step] = STEPS) -> None:
    """Run every step from format `number` on, in the caller's transaction."""
    for start in range(number, newest_format(steps)):
        steps[start](connection)
