"""The metrics of what is stored: counters and sums equal the rows, in every epoch and process.

Counters and histograms never go down, so they count every row that the run ever stored, those
included that it later went back on, and a resumed run goes on from its stored rows. The gauges
show the newest step and evaluation that survive. A change of metrics follows its row, all of it
between two scrapes. Held by the recorder, which stores the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from actors.metrics import Metrics
from actors.trajectory_queue.ledger import LedgerEvent
from service.store.lineage import all_steps, count_events, newest_records
from service.store.run_store import RunStore
from service.telemetry.records import EvaluationRecord, StepRecord


class StoredMetrics:
    """Starts with what the store holds already: nothing, or the rows of the run so far."""

    def __init__(self, metrics: Metrics, store: RunStore) -> None:
        self._metrics = metrics
        self._store = store
        with metrics.together():
            for record in all_steps(store):
                self._count_step(record)
            for (kind, reason), count in count_events(store).items():
                self._count_events(kind, reason, count)

    def begin_epoch(self) -> None:
        """Show what survives: the checkpoint that the run goes on from, or nothing yet."""
        step, evaluation = newest_records(self._store)
        with self._metrics.together():
            self._show_step(step)
            self._show_evaluation(evaluation)

    def step(self, record: StepRecord, events: Iterable[LedgerEvent]) -> None:
        with self._metrics.together():
            self.events(events)
            self._count_step(record)
            self._show_step(record)

    def events(self, events: Iterable[LedgerEvent]) -> None:
        with self._metrics.together():
            for item in events:
                self._count_events(item.kind, item.reason, 1)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._show_evaluation(record)

    def _count_events(self, kind: str, reason: str | None, count: int) -> None:
        self._metrics.ledger.events.labels(kind=kind, reason=reason or "").inc(count)

    def _count_step(self, record: StepRecord) -> None:
        steps, merge = self._metrics.steps, self._metrics.merge
        steps.done.inc()
        steps.skipped.inc(int(record.is_skipped))
        steps.sampled_tokens.inc(record.sampled_tokens)
        steps.trained_tokens.inc(record.trained_tokens)
        if record.trained_tokens:
            steps.policy_age.observe(record.policy_age_max)
        for stage, seconds in record.stages.by_name().items():
            steps.stage_seconds.labels(stage=stage).observe(seconds)
        merge.samples.labels(side="before").inc(record.samples_before)
        merge.samples.labels(side="after").inc(record.samples_after)
        for kind, count in record.mismatches.items():
            merge.mismatches.labels(kind=kind).inc(count)
        merge.inserted_tokens.inc(record.inserted_tokens)
        merge.malformed_turns.inc(record.malformed_turns)
        merge.malformed_rewarded.inc(record.malformed_rewarded)
        merge.zero_variance_groups.inc(record.zero_variance_groups)

    def _show_step(self, record: StepRecord | None) -> None:
        steps, learning = self._metrics.steps, self._metrics.learning
        shown = {
            steps.newest: "step",
            steps.policy_version: "policy_version",
            learning.reward_mean: "reward_mean",
            learning.scaled_reward_mean: "scaled_reward_mean",
            learning.loss: "loss",
            learning.grad_norm: "grad_norm",
            learning.entropy: "entropy",
            learning.mismatch_k3: "mismatch_k3",
            learning.mismatch_max: "mismatch_max",
            learning.parity_max: "parity_max",
        }
        for gauge, field in shown.items():
            gauge.set(_known(None if record is None else getattr(record, field)))
        learning.statistics.show({} if record is None else record.statistics)

    def _show_evaluation(self, record: EvaluationRecord | None) -> None:
        gauge = self._metrics.learning.evaluation_reward
        gauge.set(_known(None if record is None else record.scaled_reward_mean))


def _known(value: float | None) -> float | None:
    """As the store has it: what is not finite is not known."""
    return value if value is not None and math.isfinite(value) else None
