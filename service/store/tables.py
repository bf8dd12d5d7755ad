"""The tables of a run's database, as SQLAlchemy describes them.

Each start, recovery or return to a checkpoint begins a new term of the run. A row in `checkpoints`
commits a checkpoint, from which a later term can continue. Each row of `events`, `steps` and
`evaluations` names its term. `lineage.py` decides which of these rows are valid in a later term,
and `retention.py` decides how long rows are kept. `event_totals` and `step_totals` count everything
that was ever stored. Rows of submissions, sessions, keys and uploads stay valid in every term.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    true,
)

from actors.environment.protocol import Message, ToolSchema
from actors.environment.rendering import BreakReason
from actors.trajectory_queue.ledger import EvictionReason, LedgerEventKind
from actors.trajectory_queue.messages import QueueSnapshot
from actors.types import FinishReason, Outcome, VersionSpan
from service.access.keys import KeyLimits, Scope
from service.intake.listing import FeedKind
from service.intake.session import LimitRefusal, SessionEnd, SessionSpec, SessionStatus
from service.intake.submission import RolloutRequest, RolloutResult, SubmissionView
from service.store.errors import Damaged
from service.store.migrations import newest_format
from service.telemetry.records import EvaluationRecord, StepRecord
from service.telemetry.totals import RunTotals


class Pausable(StrEnum):
    """The parts of a run that can be paused; the values are the names that the API uses."""

    ADMISSION = "admission"
    """No new group is admitted to the window; admitted groups are played and trained."""
    GENERATION = "generation"
    """Engines freeze the turns in flight and begin no new turns; workers get no new rollout."""
    TRAINING = "training"
    """The current step is finished and published; the next one is not begun."""


class RunKind(StrEnum):
    """The command that began a run, which decides where all tasks of the run come from.

    `rayloom train` takes the configuration's tasks, and `rayloom serve` takes submitted ones.
    """

    TRAIN = "train"
    SERVE = "serve"


# A change of a table, or of a stored record that an older Rayloom then cannot read, needs a step in
# `migrations`.
FORMAT = newest_format()

metadata = MetaData()

Word = TypeVar("Word", bound=StrEnum)


class AsJson(TypeDecorator[Any]):
    """A column type for dataclasses, stored as JSON; a float that is not finite is stored as null.

    Raises: Damaged if a stored value cannot be read.
    """

    impl = Text
    cache_ok = True

    def __init__(self, kind: Any, *, left_out: Any = None) -> None:
        """Create a column type for values of the Python type `kind`.

        left_out: derived fields that are not stored, in the form of pydantic's `exclude`.
        """
        super().__init__()
        self.kind = kind
        self._adapter: TypeAdapter[Any] = TypeAdapter(kind)
        self._left_out = left_out

    def text_of(self, value: Any) -> str:
        """Return a value as the JSON text that is stored."""
        return self._adapter.dump_json(value, exclude=self._left_out).decode()

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else self.text_of(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        try:
            return None if value is None else self._adapter.validate_json(value)
        except ValidationError as error:
            kind = self.kind.__name__ if isinstance(self.kind, type) else self.kind
            raise Damaged(f"a stored {kind} cannot be read") from error


class AsWord(TypeDecorator[Any]):
    """A column type for the members of an enum, stored as their values.

    Raises: Damaged if a stored value is unknown.
    """

    impl = String
    cache_ok = True

    def __init__(self, kind: type[StrEnum]) -> None:
        super().__init__(length=64)
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else self.kind(value).value

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else word_of(self.kind, value)


class AsLimitRefusal(TypeDecorator[LimitRefusal]):
    """A column type for `LimitRefusal`: outcome, num_turns and follows, separated by spaces.

    Older versions stored only the outcome. Raises: Damaged if a stored value cannot be read.
    """

    impl = String
    cache_ok = True

    def __init__(self) -> None:
        super().__init__(length=64)

    def process_bind_param(self, value: LimitRefusal | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        numbers = (value.num_turns, value.follows)
        return " ".join([value.outcome, *("-" if each is None else str(each) for each in numbers)])

    def process_result_value(self, value: str | None, dialect: Dialect) -> LimitRefusal | None:
        if value is None:
            return None
        word, *numbers = value.split(" ")
        try:
            num_turns, follows = (None if n == "-" else int(n) for n in numbers or ("-", "-"))
        except ValueError as error:
            raise Damaged(
                f"a stored LimitRefusal is {value!r:.80}, expected an outcome and two numbers"
            ) from error
        return LimitRefusal(outcome=word_of(Outcome, word), num_turns=num_turns, follows=follows)


class AsColumn(TypeDecorator[NDArray[Any]]):
    """A column type for arrays [T]: token ids, or a number for each token, as little-endian bytes.

    The arrays that a query returns are read-only. Raises: Damaged if a stored value cannot be read.
    """

    impl = LargeBinary
    cache_ok = True

    def __init__(self, kind: type[np.int32] | type[np.float32]) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: NDArray[Any] | None, dialect: Dialect) -> bytes | None:
        return None if value is None else _bytes_of(value, np.dtype(self.kind))

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> NDArray[Any] | None:
        return None if value is None else _array_of(value, np.dtype(self.kind))


# The first byte of the stored value is the number of its type.
_EXPERT_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.int16)}
# The number of the type, and the three lengths.
_EXPERT_HEAD = struct.Struct("<B3I")


class AsExperts(TypeDecorator[NDArray[Any]]):
    """A column type for recorded experts, [R, L, K] uint8 or int16 (see `Turn.expert_indices`).

    An array is stored as type, shape and little-endian bytes. The arrays that a query returns are
    read-only. Raises: Damaged if a stored value cannot be read.
    """

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: NDArray[Any] | None, dialect: Dialect) -> bytes | None:
        if value is None:
            return None
        [code] = [code for code, dtype in _EXPERT_TYPES.items() if dtype == value.dtype]
        return _EXPERT_HEAD.pack(code, *value.shape) + _bytes_of(value, value.dtype)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> NDArray[Any] | None:
        if value is None:
            return None
        if len(value) < _EXPERT_HEAD.size or value[0] not in _EXPERT_TYPES:
            raise Damaged("stored experts do not begin with type and shape")
        code, *shape = _EXPERT_HEAD.unpack_from(value)
        indices = _array_of(value[_EXPERT_HEAD.size :], _EXPERT_TYPES[code])
        # Python's integers do not overflow.
        if len(indices) != shape[0] * shape[1] * shape[2]:
            raise Damaged(f"{len(indices)} experts are stored, expected {shape}")
        return indices.reshape(shape)


def _bytes_of(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return np.ascontiguousarray(array, dtype.newbyteorder("<")).tobytes()


def _array_of(stored: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(stored) % dtype.itemsize:
        raise Damaged(f"{len(stored)} bytes are stored, expected a multiple of {dtype.itemsize}")
    array = np.frombuffer(stored, dtype.newbyteorder("<")).astype(dtype, copy=False)
    array.flags.writeable = False
    return array


def word_of(kind: type[Word], value: str) -> Word:
    """Return the member of an enum with the given value. Raises: Damaged if there is none."""
    try:
        return kind(value)
    except ValueError as error:
        raise Damaged(f"a stored {kind.__name__} is not one of {', '.join(kind)}") from error


# One row: the format of all other tables and of their records. Format 1 had no such table.
formats = Table(
    "format",
    metadata,
    Column("number", Integer, primary_key=True),
    # Mark of the newest write, for a writer whose connection broke during the commit. Every writer
    # locks this row first.
    Column("last_write", String, nullable=True),
)

leases = Table(
    "leases",
    metadata,
    Column("term", Integer, primary_key=True, autoincrement=False),
    # HOST:PID of the supervisor.
    Column("owner", String, nullable=False),
    # Distinguishes the owner's process from a later process with its PID; empty if unknown.
    Column("process", String, nullable=False),
    # The path of the run directory that the owner used; empty if unknown.
    Column("directory", String, nullable=False),
    # The run's kind, equal in all its terms.
    Column("kind", AsWord(RunKind), nullable=False),
    # By the owner's own clock.
    Column("acquired_at", Float, nullable=False),
    # Time of the owner's last renewal, by the store's clock; null after the lease's end.
    Column("renewed_at", Float, nullable=True),
    # The checkpoint that this term started from; null for a fresh start.
    Column("parent_checkpoint", Integer, ForeignKey("checkpoints.id"), nullable=True),
    # Whether an operator requested that checkpoint: later commits are undone, and the run does not
    # go back to them, even if this term commits nothing.
    Column("is_return", Boolean, nullable=False, default=False),
)

# The version of Rayloom that began each term; terms of formats before 12 have none.
versions = Table(
    "versions",
    metadata,
    Column("term", Integer, primary_key=True, autoincrement=False),
    Column("version", String, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("term", Integer, ForeignKey("leases.term"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("directory", String, nullable=False),
    # Null once the run can no longer go back to this checkpoint; the row then only shows where a
    # term began.
    Column("queue_snapshot", AsJson(QueueSnapshot), nullable=True),
    # Shares of passed samples in the newest groups, by task or by environment.
    Column("curriculum", AsJson(Mapping[str, tuple[float, ...]]), nullable=True),
    Column("last_event_seq", Integer, nullable=False),
    # Totals of the lineage's steps up to this step; null if queue_snapshot is null.
    Column("totals", AsJson(RunTotals), nullable=True),
    Column("committed_at", Float, nullable=False),
    # Number of the feed's newest entry at the commit; a return to the checkpoint voids newer ones.
    Column("feed_number", Integer, nullable=False),
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
    # 0: the scheduled evaluation; 1, 2, 3, …: those of named sets, and requested ones.
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("record", AsJson(EvaluationRecord), nullable=False),
)

# Counts of all events ever stored, by kind and reason ("" for none), superseded ones included.
event_totals = Table(
    "event_totals",
    metadata,
    Column("kind", String, primary_key=True),
    Column("reason", String, primary_key=True),
    Column("count", BigInteger, nullable=False),
)

# One row: the totals of all steps ever stored, superseded ones included.
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
    # Null once the submission cannot be played again: it was cancelled, or is over.
    Column("request", AsJson(RolloutRequest), nullable=True),
    Column("digest", String, nullable=False),
    Column("num_samples", Integer, nullable=False),
    Column("num_bytes", Integer, nullable=False),
    Column("accepted_at", Float, nullable=False),
    Column("environment", String, nullable=False),
    # The tenant that owns the submission; empty if the run itself owns it.
    Column("tenant", String, nullable=False, index=True),
    # Name of the key with which it was submitted; empty: the first admin key, or no key.
    Column("key_name", String, nullable=False),
    # The client's name for a batch of tasks; empty without one.
    Column("batch", String, nullable=False, index=True),
    # SHA-256 of the Idempotency-Key of the request that submitted the task, and the digest of the
    # request's content; null without such a key.
    Column("request_key", String, nullable=True, index=True),
    Column("request_digest", String, nullable=True),
    Column("is_cancelled", Boolean, nullable=False, default=False),
    # The final state of the submission; null while it is not over.
    Column("ended", AsJson(SubmissionView), nullable=True),
    sqlite_autoincrement=True,
)

# The group of a submission in a term; written before the group is admitted.
bindings = Table(
    "bindings",
    metadata,
    Column("term", Integer, ForeignKey("leases.term"), primary_key=True),
    Column("group_id", String, primary_key=True),
    Column("submission_id", String, ForeignKey("submissions.id"), nullable=False),
)

# The results of attempts of submitted rollouts; stored together with the ledger's events.
results = Table(
    "results",
    metadata,
    Column("term", Integer, ForeignKey("leases.term"), primary_key=True),
    Column("rollout_id", String, primary_key=True, index=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("result", AsJson(RolloutResult), nullable=False),
)

# The columns are the fields of `FeedEntry`, and its tenant.
feed = Table(
    "feed",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("kind", AsWord(FeedKind), nullable=False),
    Column("task", String, nullable=True),
    Column("member", Integer, nullable=True),
    Column("outcome", AsWord(Outcome), nullable=True),
    Column("reward", Float, nullable=True),
    Column("step", Integer, nullable=True),
    Column("reason", AsWord(EvictionReason), nullable=True),
    Column("session_status", AsWord(SessionStatus), nullable=True),
    Column("void_after", Integer, nullable=True),
    # The tenant to which the entry is shown; empty if it is shown only to admins.
    Column("tenant", String, nullable=False, default=""),
    # 1, 2, 3, … in the tenant's own feed; null without a tenant.
    Column("own_number", Integer, nullable=True),
    Index("feed_of_tenant", "tenant", "own_number"),
    sqlite_autoincrement=True,
)

# The newest number in each tenant's own feed; kept when entries are removed, so that no number is
# used twice.
feed_numbers = Table(
    "feed_numbers",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("newest", Integer, nullable=False),
)

# One row for each rollout of a submission that external agents play; deleted with the submission.
sessions = Table(
    "sessions",
    metadata,
    Column("id", String, primary_key=True),
    Column("submission_id", String, ForeignKey("submissions.id"), nullable=False, index=True),
    Column("member", Integer, nullable=False),
    Column("spec", AsJson(SessionSpec), nullable=False),
    # SHA-256, hexadecimal.
    Column("agent_key", String, nullable=False),
    Column("reward_key", String, nullable=False),
    # The tenant of the session's submission.
    Column("tenant", String, nullable=False),
    Column("key_name", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("opened_at", Float, nullable=True),
    Column("claimed_by", String, nullable=False, default=""),
    Column("claimed_at", Float, nullable=True),
    Column("cut", AsLimitRefusal(), nullable=True),
    Column("end", AsJson(SessionEnd), nullable=True),
)

# The columns are the fields of `SessionTurn`. Deleted once the submission cannot be played again.
# Not "without rowid" in SQLite: so a new row is added after all others, pages are filled in order,
# and the key's index stays small. The blobs are the last columns, so that reading the others, or
# changing is_unseen, reads none of the blobs' pages.
session_turns = Table(
    "session_turns",
    metadata,
    Column("session_id", String, ForeignKey("sessions.id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    # The term that wrote the row.
    Column("term", Integer, ForeignKey("leases.term"), nullable=False),
    Column("is_unseen", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("request_id", String, nullable=False),
    Column("request_digest", String, nullable=False),
    Column("idempotency_key", String, nullable=False),
    Column("parent", Integer, nullable=True),
    Column("extends_parent", Boolean, nullable=False),
    Column("finish_reason", AsWord(FinishReason), nullable=False),
    Column("break_reason", AsWord(BreakReason), nullable=True),
    Column("num_inserted", Integer, nullable=False),
    Column("is_malformed", Boolean, nullable=False),
    Column("is_auxiliary", Boolean, nullable=False),
    Column("cache_salt", String, nullable=False),
    Column("replica", String, nullable=False),
    Column("is_instructed", Boolean, nullable=False, server_default=true()),
    Column("stop_string", String, nullable=False, server_default=""),
    Column("ignored", AsJson(tuple[str, ...]), nullable=False, server_default="[]"),
    Column("template_options", AsJson(dict[str, Any]), nullable=False, server_default="{}"),
    Column("version_spans", AsJson(tuple[VersionSpan, ...]), nullable=False),
    Column("tools", AsJson(tuple[ToolSchema, ...]), nullable=False),
    # A message derives call_texts from its calls.
    Column("reply", AsJson(Message, left_out={"call_texts"}), nullable=False),
    Column(
        "new_messages",
        AsJson(tuple[Message, ...], left_out={"__all__": {"call_texts"}}),
        nullable=False,
    ),
    Column("sampled_token_ids", AsColumn(np.int32), nullable=False),
    Column("logprobs", AsColumn(np.float32), nullable=False),
    Column("new_token_ids", AsColumn(np.int32), nullable=False),
    Column("expert_indices", AsExperts, nullable=True),
)

# Groups of uploaded trajectories. The columns are the fields of `UploadGroup`. Deleted with the
# submission that a group becomes.
upload_groups = Table(
    "upload_groups",
    metadata,
    Column("id", String, primary_key=True),
    Column("num_uploaded", Integer, nullable=False),
    Column("num_members", Integer, nullable=True),
    Column("is_closed", Boolean, nullable=False),
)

uploads = Table(
    "uploads",
    metadata,
    Column("id", String, primary_key=True),
    Column("group_id", String, ForeignKey("upload_groups.id"), nullable=False),
    # Number of the rollout in its group.
    Column("member", Integer, nullable=False),
    # The term that wrote the row.
    Column("term", Integer, ForeignKey("leases.term"), nullable=False),
    Column("digest", String, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("metadata", AsJson(dict[str, Any]), nullable=False),
    # Null once the upload cannot be delivered again. The last column, like the blobs of
    # `session_turns`.
    Column("content", LargeBinary, nullable=True),
    UniqueConstraint("group_id", "member"),
)

# The columns are the fields of `NamedKey`. Rows stay after a revocation.
keys = Table(
    "keys",
    metadata,
    Column("name", String, primary_key=True),
    # SHA-256, hexadecimal.
    Column("digest", String, nullable=False, unique=True),
    Column("scope", AsWord(Scope), nullable=False),
    Column("tenant", String, nullable=False),
    Column("limits", AsJson(KeyLimits), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float, nullable=True),
)

# The paused parts, one row for each. A pause belongs to no term: only a resume ends it.
pauses = Table(
    "pauses",
    metadata,
    Column("part", AsWord(Pausable), primary_key=True),
    Column("since", Float, nullable=False),
    Column("reason", String, nullable=False),
)

# The newest requests of operators, refused ones included.
admin_calls = Table(
    "admin_calls",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    # The name of the key; empty if the run has no keys.
    Column("caller", String, nullable=False),
    # Such as "POST /api/v1/control/training/pause".
    Column("call", String, nullable=False),
    # The body of the request, cut to a length.
    Column("body", Text, nullable=False),
    Column("status", Integer, nullable=False),
    Column("answer", Text, nullable=False),
)
