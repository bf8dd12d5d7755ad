"""Sums over a run's step records, updated with each step, so that old rows are not read again.

The metrics use the totals of all steps that were ever stored. The report and summary.json leave out
steps that were undone because the run went back to an older checkpoint. Therefore the store keeps,
with each checkpoint, the totals of the steps that led to it. Invariant: adding records one by one
with `plus` gives bitwise the same sums as a loop over all records.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from actors.merge.report import MergeReport
from actors.metrics import AGE_BUCKETS, SECONDS_BUCKETS, STEP_COUNTERS
from actors.trajectory_queue.ledger import TokenCounts
from actors.types import Outcome
from service.telemetry.records import StepRecord

# The fields of a step's record that are added up.
SUMMED = (*STEP_COUNTERS, "num_trajectories", "num_packed_tokens")
Key = TypeVar("Key")
_NO_TURNS = MergeReport(
    samples_before=0, samples_after=0, branches={}, num_saved_tokens=0, num_masked_tokens=0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A histogram of values: the count in each bucket, and the sum of all values."""

    counts: tuple[int, ...] = ()
    """Number of values in each bucket: above the previous bound, up to the bucket's own bound.

    The last bucket has the values above all bounds.
    """
    sum: float = 0.0

    def plus(self, value: float, bounds: Sequence[float]) -> Distribution:
        counts = list(self.counts or [0] * (len(bounds) + 1))
        counts[bisect_left(bounds, value)] += 1
        return Distribution(counts=tuple(counts), sum=self.sum + value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """First, least, greatest and last value of a statistic over the steps that have it."""

    first: float
    least: float
    greatest: float
    last: float

    def plus(self, value: float) -> Extent:
        return Extent(
            first=self.first,
            least=min(self.least, value),
            greatest=max(self.greatest, value),
            last=value,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """Sums and extremes over the step records of a run."""

    num_steps: int = 0
    summed: Mapping[str, int] = field(default_factory=dict)
    """Sums by field name, for the fields in SUMMED."""
    merge: MergeReport = _NO_TURNS
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    tokens: TokenCounts = field(default_factory=TokenCounts)
    stage_seconds: Mapping[str, Distribution] = field(default_factory=dict)
    policy_age: Distribution = field(default_factory=Distribution)
    """Histogram of the steps' largest policy age in versions, over steps that trained a token."""
    max_policy_age: int = 0
    mismatch_tokens: float = 0.0
    """Number of trained tokens of the steps whose record has k3, the estimate of the mismatch."""
    mismatch_sum: float = 0.0
    """Sum over steps of k3 times the trained tokens; nats."""
    checked_s: float = 0.0
    """Seconds that the log-probability checks after publications took, over all steps."""
    statistics: Mapping[str, Extent] = field(default_factory=dict)
    """First, least, greatest and last value of each statistic, by its name."""
    last_version: int | None = None
    num_version_breaks: int = 0
    """Number of steps whose policy version is not the previous version plus one."""
    wall_s: float = 0.0
    """Seconds from the start of each term to its last step, summed over terms."""
    last_wall_time: float = 0.0
    """Time of the newest step; seconds since 1970."""

    def plus(self, record: StepRecord, *, begun_at: float = 0.0) -> RunTotals:
        """Return the totals with the record of the next step added.

        Args: begun_at: start of the step's term (the time under one lease of the run), in seconds
        since 1970. The time between the previous step and this start does not count in `wall_s`.
        """
        statistics = dict(self.statistics)
        for name, value in record.statistics.items():
            if math.isfinite(value):
                before = statistics.get(name)
                statistics[name] = (
                    Extent(first=value, least=value, greatest=value, last=value)
                    if before is None
                    else before.plus(value)
                )
        k3, age = record.value("mismatch_k3_mean"), record.policy_age_max
        is_break = self.last_version is not None and record.policy_version != self.last_version + 1
        since = max(self.last_wall_time, begun_at)
        return RunTotals(
            num_steps=self.num_steps + 1,
            summed={name: self.summed.get(name, 0) + int(getattr(record, name)) for name in SUMMED},
            merge=_merged(self.merge, record.merge),
            outcomes=_added(self.outcomes, record.outcomes),
            tokens=self.tokens.plus(record.tokens),
            stage_seconds={
                stage: self.stage_seconds.get(stage, Distribution()).plus(seconds, SECONDS_BUCKETS)
                for stage, seconds in record.stages.by_name().items()
            },
            policy_age=(
                self.policy_age.plus(age, AGE_BUCKETS)
                if record.num_trained_tokens
                else self.policy_age
            ),
            max_policy_age=max(self.max_policy_age, age),
            mismatch_tokens=self.mismatch_tokens + (0 if k3 is None else record.num_trained_tokens),
            mismatch_sum=self.mismatch_sum + (0 if k3 is None else record.num_trained_tokens * k3),
            checked_s=self.checked_s + (record.value("logprob_check_seconds") or 0.0),
            statistics=statistics,
            last_version=record.policy_version,
            num_version_breaks=self.num_version_breaks + is_break,
            wall_s=self.wall_s + max(record.wall_time - since, 0.0),
            last_wall_time=record.wall_time,
        )

    @property
    def mean_k3(self) -> float | None:
        """Mean k3 of the steps, weighted by their trained tokens, in nats; None if no step has k3.

        k3 estimates the KL divergence between trainer and engines.
        """
        return self.mismatch_sum / self.mismatch_tokens if self.mismatch_tokens else None

    def greatest(self, name: str) -> float | None:
        """Return the greatest value of a statistic; None if no step has it."""
        found = self.statistics.get(name)
        return None if found is None else found.greatest


def totals_of(
    records: Iterable[StepRecord], *, base: RunTotals | None = None, begun_at: float = 0.0
) -> RunTotals:
    """Return the totals over successive step records.

    Args: base: totals of the earlier steps; None if there are no earlier steps. begun_at: as for
    `RunTotals.plus`; all the records are of one term.
    """
    totals = base or RunTotals()
    for record in records:
        totals = totals.plus(record, begun_at=begun_at)
    return totals


def _merged(one: MergeReport, other: MergeReport) -> MergeReport:
    return replace(
        one,
        samples_before=one.samples_before + other.samples_before,
        samples_after=one.samples_after + other.samples_after,
        branches=_added(one.branches, other.branches),
        num_saved_tokens=one.num_saved_tokens + other.num_saved_tokens,
        num_masked_tokens=one.num_masked_tokens + other.num_masked_tokens,
    )


def _added(one: Mapping[Key, int], other: Mapping[Key, int]) -> dict[Key, int]:
    sums = dict(one)
    for key, count in other.items():
        sums[key] = sums.get(key, 0) + count
    return sums
