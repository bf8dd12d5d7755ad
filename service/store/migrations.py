"""The migrations of a run's database: steps from an older format to the current one.

A step converts format N to N + 1, and is never edited after its release. A step has its own
`MetaData` with the tables of its format, because `tables.py` changes. A step uses only the
connection, so that it can run again after a rollback. No step changes the tables `format`, `leases`
and `checkpoints`, which are read before the conversion. All steps run in the transaction that makes
a starting run the only writer (`RunStore`), so two processes never migrate at once. Every step gets
its own test in `tests/store/test_migrations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    inspect,
    true,
)
from sqlalchemy.schema import CreateColumn

FIRST_FORMAT = 9
"""The oldest format that can be migrated."""

Step = Callable[[Connection], None]


def add_column(connection: Connection, table: str, column: Column[object]) -> None:
    """Add a column that is nullable or has a `server_default`; old rows get null or the default.

    Do nothing if the table already has the column. This happens if a database's tables are newer
    than the format number that is stored in the database.
    """
    assert column.nullable or column.server_default is not None, "old rows need a value"
    places = connection.get_execution_options().get("schema_translate_map") or {}
    dialect = connection.dialect
    there = inspect(connection).get_columns(table, schema=places.get(None))
    if column.name in [each["name"] for each in there]:
        return
    named = Table(table, MetaData(), column, schema=places.get(None))
    what = CreateColumn(column).compile(dialect=dialect)
    name = dialect.identifier_preparer.format_table(named)
    connection.exec_driver_sql(f"ALTER TABLE {name} ADD COLUMN {what}")


def _keep_what_was_asked_of_turns(connection: Connection) -> None:
    for name, kind, of_old_rows in (
        ("stop_string", String, ""),
        ("ignored", Text, "[]"),
        ("template_options", Text, "{}"),
    ):
        column: Column[object] = Column(name, kind, nullable=False, server_default=of_old_rows)
        add_column(connection, "session_turns", column)


def _keep_which_message_was_instructions(connection: Connection) -> None:
    """Add a column that says whether a conversation's first message came from `instructions`."""
    # True: earlier versions let new `instructions` replace every first system message.
    column: Column[object] = Column("is_instructed", Boolean, nullable=False, server_default=true())
    add_column(connection, "session_turns", column)


def _keep_which_version_wrote(connection: Connection) -> None:
    versions = Table(
        "versions",
        MetaData(),
        Column("term", Integer, primary_key=True, autoincrement=False),
        Column("version", String, nullable=False),
    )
    versions.create(connection, checkfirst=True)


def _drop_the_intents_to_sample(connection: Connection) -> None:
    """Drop the table `session_intents` (requests without a reply yet), which no code reads."""
    Table("session_intents", MetaData()).drop(connection, checkfirst=True)


# Each step by the format that it starts from, in order and without gaps.
STEPS: Mapping[int, Step] = {
    9: _keep_what_was_asked_of_turns,
    10: _keep_which_message_was_instructions,
    11: _keep_which_version_wrote,
    12: _drop_the_intents_to_sample,
}


def newest_format(steps: Mapping[int, Step] = STEPS) -> int:
    """Return the number of the newest format, which a database has after all steps."""
    return FIRST_FORMAT + len(steps)


def move_forward(connection: Connection, number: int, steps: Mapping[int, Step] = STEPS) -> None:
    """Run each migration from format `number` to the newest format, in the caller's transaction."""
    for start in range(number, newest_format(steps)):
        steps[start](connection)
