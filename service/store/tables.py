"""The tables of a run's database: leases, checkpoints, ledger events, records, submissions.

A row of `checkpoints` is the commit point: what its ledger names as trained is trained. Rows of
`events`, `steps` and `evaluations` carry the term that wrote them; `lineage.py` says which of
them survive, and `retention.py` for how long. What was ever stored is counted in `event_totals` and
`step_totals`. A row of `submissions` is a promise to a client and belongs to no term.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)

from actors.trajectory_queue.ledger import EvictionReason, LedgerEventKind
from actors.trajectory_queue.messages import QueueSnapshot
from service.intake.submission import RolloutRequest, RolloutResult, SubmissionView
from service.store.errors import Damaged
from service.telemetry.records import EvaluationRecord, StepRecord
from service.telemetry.totals import RunTotals


class RunKind(StrEnum):
    """Where a run's tasks come from, for all of its life; the values are the commands."""

    TRAIN = "train"
    SERVE = "serve"


# Raise it with every change of a table or of a stored record that an older Rayloom cannot read.
FORMAT = 5

metadata = MetaData()

Word = TypeVar("Word", bound=StrEnum)


class AsJson(TypeDecorator[Any]):
    """A column of dataclasses, stored as JSON; a float that is not finite is stored as null.

    Raises: Damaged when it is read.
    """

    impl = Text
    cache_ok = True

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind
        self._adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else self._adapter.dump_json(value).decode()

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        try:
            return None if value is None else self._adapter.validate_json(value)
        except ValidationError as error:
            raise Damaged(f"a stored {self.kind.__name__} cannot be read") from error


class AsWord(TypeDecorator[Any]):
    """A column of an enum, stored as its value. Raises: Damaged when it is read."""

    impl = String
    cache_ok = True

    def __init__(self, kind: type[StrEnum]) -> None:
        super().__init__(length=64)
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else self.kind(value).value

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else word_of(self.kind, value)


def word_of(kind: type[Word], value: str) -> Word:
    """Raises: Damaged for what is no value of the enum."""
    try:
        return kind(value)
    except ValueError as error:
        raise Damaged(f"a stored {kind.__name__} is none of {', '.join(kind)}") from error


# One row: the format of all other tables and of the records in them. Format 1 had no such table.
formats = Table(
    "format",
    metadata,
    Column("number", Integer, primary_key=True),
    # Names the newest write, for a writer whose connection broke while it was being committed.
    # Every writer locks this row first.
    Column("last_write", String, nullable=True),
)

leases = Table(
    "leases",
    metadata,
    Column("term", Integer, primary_key=True, autoincrement=False),
    # HOST:PID of the supervisor.
    Column("owner", String, nullable=False),
    # What tells this process from a later one of its number; empty where that is not known.
    Column("process", String, nullable=False),
    # Of the run, as the owner saw it; empty where it did not say.
    Column("directory", String, nullable=False),
    # The same in every term of a run.
    Column("kind", AsWord(RunKind), nullable=False),
    # By the owner's own clock.
    Column("acquired_at", Float, nullable=False),
    # By the store's clock, when the owner last showed that it is alive; null after its end.
    Column("renewed_at", Float, nullable=True),
    # The checkpoint that this term started from; null for a fresh start.
    Column("parent_checkpoint", Integer, ForeignKey("checkpoints.id"), nullable=True),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("term", Integer, ForeignKey("leases.term"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("directory", String, nullable=False),
    # Null once the run cannot go back to it any more; then the row only says where terms joined.
    Column("queue_snapshot", AsJson(QueueSnapshot), nullable=True),
    Column("last_event_seq", Integer, nullable=False),
    # Of the lineage's steps up to this one; null with the snapshot.
    Column("totals", AsJson(RunTotals), nullable=True),
    Column("committed_at", Float, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("term", Integer, ForeignKey("leases.term"), primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("rollout_id", String, nullable=False),
    Column("kind", AsWord(LedgerEventKind), nullable=False),
    Column("reason", AsWord(EvictionReason), nullable=True),
    Column("step", Integer, nullable=True),
)

steps = Table(
    "steps",
    metadata,
    Column("term", Integer, ForeignKey("leases.term"), primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("record", AsJson(StepRecord), nullable=False),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("term", Integer, ForeignKey("leases.term"), primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("record", AsJson(EvaluationRecord), nullable=False),
)

# How many events were ever stored, by kind and reason ("" for none), superseded ones included.
event_totals = Table(
    "event_totals",
    metadata,
    Column("kind", String, primary_key=True),
    Column("reason", String, primary_key=True),
    Column("count", BigInteger, nullable=False),
)

# One row: of every step that was ever stored, superseded ones included.
step_totals = Table(
    "step_totals",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("totals", AsJson(RunTotals), nullable=False),
)

submissions = Table(
    "submissions",
    metadata,
    # The order of acceptance.
    Column("position", Integer, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    # Null once nothing can play it again: it was cancelled, or is over.
    Column("request", AsJson(RolloutRequest), nullable=True),
    Column("digest", String, nullable=False),
    Column("num_samples", Integer, nullable=False),
    Column("num_bytes", Integer, nullable=False),
    Column("accepted_at", Float, nullable=False),
    Column("is_cancelled", Boolean, nullable=False, default=False),
    # How it ended; null as long as it is not over.
    Column("ended", AsJson(SubmissionView), nullable=True),
    sqlite_autoincrement=True,
)

# Which group a term gave a submission; written before the group is admitted.
bindings = Table(
    "bindings",
    metadata,
    Column("term", Integer, ForeignKey("leases.term"), primary_key=True),
    Column("group_id", String, primary_key=True),
    Column("submission_id", String, ForeignKey("submissions.id"), nullable=False),
)

# What attempts of submitted rollouts came to; stored together with the ledger's events.
results = Table(
    "results",
    metadata,
    Column("term", Integer, ForeignKey("leases.term"), primary_key=True),
    Column("rollout_id", String, primary_key=True, index=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("result", AsJson(RolloutResult), nullable=False),
)
