"""The tables of a run's durable state: lease, checkpoints, ledger events, records, submissions.

A row of `checkpoints` is the commit point: what it names as trained is trained. Rows of `events`
and `steps` carry the epoch that wrote them; which of them survive is `lineage.py`'s question.
A row of `submissions` is a promise to a client and belongs to no epoch.
"""

from __future__ import annotations

from sqlalchemy import JSON, Boolean, Column, Float, ForeignKey, Integer, MetaData, String, Table

metadata = MetaData()

leases = Table(
    "leases",
    metadata,
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column("holder", String, nullable=False),
    Column("acquired_at", Float, nullable=False),
    # The checkpoint that this epoch started from; null for a fresh start.
    Column("parent_checkpoint", Integer, ForeignKey("checkpoints.id"), nullable=True),
)

# When the holder of an epoch last showed that it is alive; no row: it ended in order.
presence = Table(
    "presence",
    metadata,
    Column("epoch", Integer, ForeignKey("leases.epoch"), primary_key=True),
    Column("renewed_at", Float, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("epoch", Integer, ForeignKey("leases.epoch"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("directory", String, nullable=False),
    Column("queue_snapshot", JSON, nullable=False),
    Column("last_event_seq", Integer, nullable=False),
    Column("committed_at", Float, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("epoch", Integer, ForeignKey("leases.epoch"), primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("rollout_id", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("reason", String, nullable=True),
    Column("step", Integer, nullable=True),
)

steps = Table(
    "steps",
    metadata,
    Column("epoch", Integer, ForeignKey("leases.epoch"), primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("record", JSON, nullable=False),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("epoch", Integer, ForeignKey("leases.epoch"), primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("record", JSON, nullable=False),
)

submissions = Table(
    "submissions",
    metadata,
    # The order of acceptance.
    Column("place", Integer, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("task", JSON, nullable=False),
    Column("num_samples", Integer, nullable=False),
    Column("min_usable_samples", Integer, nullable=True),
    Column("accepted_at", Float, nullable=False),
    Column("is_cancelled", Boolean, nullable=False, default=False),
    sqlite_autoincrement=True,
)

# Which group an epoch gave a submission; written before the group is admitted.
bindings = Table(
    "bindings",
    metadata,
    Column("epoch", Integer, ForeignKey("leases.epoch"), primary_key=True),
    Column("group_id", String, primary_key=True),
    Column("submission_id", String, ForeignKey("submissions.id"), nullable=False),
)

# What attempts of submitted rollouts came to; stored together with the ledger's events.
results = Table(
    "results",
    metadata,
    Column("epoch", Integer, ForeignKey("leases.epoch"), primary_key=True),
    Column("rollout_id", String, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("result", JSON, nullable=False),
)
