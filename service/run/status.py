"""A look at a running run: what the supervisor answers to whoever shows it.

Twice a second the command line asks for a RunStatus and hands it to a display; lists that only
grow (records, evaluations, notices) come as what is new since the asker's cursor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from actors.trajectory_queue.ledger import LedgerCounts
from service.telemetry.records import EvaluationRecord, StepRecord


class Phase(StrEnum):
    """What a run is doing, in words that are shown as they are."""

    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    CHECKPOINTING = "writing a checkpoint"
    RECOVERING = "recovering"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Where a run stands.

    phase_detail: a few words, such as "starting 2 engines". step: finished training steps; steps:
    planned ones. records, evaluations, notices: new since the last status, in order; a record
    whose step was shown before supersedes it (the run went back to a checkpoint).
    rollouts_done: trajectories that ended; sampled_tokens: in them; both only grow in an epoch.
    started_at: unix seconds. metrics_address: URL, or None where nothing listens. exit_reason:
    one sentence, only once is_done.
    """

    name: str
    phase: Phase
    started_at: float
    steps: int
    step: int = 0
    policy_version: int = 0
    phase_detail: str = ""
    records: tuple[StepRecord, ...] = ()
    evaluations: tuple[EvaluationRecord, ...] = ()
    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    queue_items: int = 0
    queue_bytes: int = 0
    rollouts_done: int = 0
    sampled_tokens: int = 0
    engines_ready: int = 0
    notices: tuple[str, ...] = ()
    metrics_address: str | None = None
    run_dir: str = ""
    is_done: bool = False
    exit_reason: str | None = None
