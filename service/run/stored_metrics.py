"""The metrics that are computed from a run's stored steps, events and evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable

from actors.merge.report import MergeReport
from actors.metrics import Metrics
from actors.trajectory_queue.ledger import LedgerEvent, LedgerEventKind, TokenCounts
from service.store.lineage import count_events, stored_totals
from service.store.run_store import RunStore
from service.telemetry.records import EvaluationRecord, StepRecord
from service.telemetry.totals import RunTotals


class StoredMetrics:
    """The metrics that are computed from the rows of the run's database.

    Counters and histograms include every row that was ever stored, and never decrease: they also
    count rows that the run later undid or removed, and a resumed run continues from the stored
    totals. The gauges show the newest surviving step and evaluation. After a row is stored, all its
    metrics change together, so no scrape sees only some of the changes.
    """

    def __init__(self, metrics: Metrics, store: RunStore) -> None:
        self._metrics = metrics
        totals, steps = stored_totals(store), metrics.steps
        with metrics.together():
            steps.done.inc(totals.num_steps)
            for field, counter in steps.counted.items():
                counter.inc(totals.summed.get(field, 0))
            if totals.num_steps:
                self._count_merge(totals.merge)
                self._count_tokens(totals.tokens)
                self._show_totals(totals)
            for (kind, reason), count in count_events(store).items():
                self._count_events(kind, reason, count)

    def begin_term(self, step: StepRecord | None, evaluation: EvaluationRecord | None) -> None:
        """Set the gauges when a term begins, at each start or recovery of the run.

        step, evaluation: the newest records that were not undone. If a record is None, its gauges
        show no value.
        """
        with self._metrics.together():
            self._show_step(step)
            self._show_evaluation(evaluation)

    def step(self, record: StepRecord, events: Iterable[LedgerEvent], totals: RunTotals) -> None:
        """Add a stored step to the counters, and show it in the gauges.

        events: the events stored with the step. totals: totals of all steps ever stored, including
        this step.
        """
        steps = self._metrics.steps
        with self._metrics.together():
            self.events(events)
            steps.done.inc()
            for field, counter in steps.counted.items():
                counter.inc(getattr(record, field))
            self._count_merge(record.merge)
            self._count_tokens(record.tokens)
            self._show_totals(totals)
            self._show_step(record)

    def events(self, events: Iterable[LedgerEvent]) -> None:
        with self._metrics.together():
            for item in events:
                self._count_events(item.kind, item.reason, 1)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._show_evaluation(record)

    def _count_events(self, kind: str, reason: str | None, count: int) -> None:
        self._metrics.ledger.events.labels(kind=kind, reason=reason or "").inc(count)

    def _count_merge(self, merge: MergeReport) -> None:
        steps = self._metrics.steps
        steps.samples.labels(side="before").inc(merge.samples_before)
        steps.samples.labels(side="after").inc(merge.samples_after)
        for reason, count in merge.branches.items():
            steps.branches.labels(reason=reason).inc(count)

    def _count_tokens(self, tokens: TokenCounts) -> None:
        counter = self._metrics.steps.played_tokens
        counter.labels(fate=LedgerEventKind.TRAINED.value).inc(tokens.trained)
        for cause, count in tokens.untrained.items():
            counter.labels(fate=cause.value).inc(count)

    def _show_totals(self, totals: RunTotals) -> None:
        steps, age = self._metrics.steps, totals.policy_age
        steps.policy_age.show({"": (age.counts, age.sum)})
        steps.stage_seconds.show(
            {stage: (each.counts, each.sum) for stage, each in totals.stage_seconds.items()}
        )

    def _show_step(self, record: StepRecord | None) -> None:
        steps = self._metrics.steps
        steps.newest.set(None if record is None else record.step)
        steps.newest_time.set(None if record is None else record.wall_time)
        steps.newest_seconds.show({} if record is None else record.stages.by_name())
        steps.newest_tokens.show({} if record is None else tokens_of(record))
        steps.policy_version.set(None if record is None else record.policy_version)
        shown = self._metrics.statistics
        shown.show({} if record is None else record.statistics)
        shown.reward_components.show({} if record is None else record.reward_components)

    def _show_evaluation(self, record: EvaluationRecord | None) -> None:
        value = None if record is None else record.scaled_reward_mean
        # As in the store, a value that is not finite counts as unknown.
        is_known = value is not None and math.isfinite(value)
        self._metrics.statistics.evaluation_reward.set(value if is_known else None)


def tokens_of(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step's tokens, under the names "sampled" and "trained"."""
    return {"sampled": record.num_sampled_tokens, "trained": record.num_trained_tokens}
