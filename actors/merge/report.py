"""What a step says about itself: counts and statistics, made from the same values as the batch.

A statistic that is not known (no return, nothing trained) is absent, never 0. Called by `step`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.batch import MicroBatch, RankShard
from actors.limits import MAX_REWARD
from actors.merge.mismatch import MismatchKind
from actors.merge.prefix import Merged
from actors.statistics import STATISTICS, Reduction, Source
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Outcome, Trajectory

_REDUCE: Mapping[Reduction, Callable[[NDArray[np.float64]], np.floating]] = {
    Reduction.MEAN: np.mean,
    Reduction.STD: np.std,
    Reduction.MIN: np.min,
    Reduction.MAX: np.max,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    samples_before: int
    """Turns: without merging each is a sample."""
    samples_after: int
    mismatches: Mapping[MismatchKind, int]
    """Turns that extended no open sample, by kind of divergence."""
    num_saved_tokens: int
    """What the turns as rows of their own would hold beyond the merged samples."""
    num_masked_tokens: int
    """Sampled, without a finite log-probability."""

    @property
    def ratio(self) -> float | None:
        """Turns a sample, >= 1; None for no turns."""
        return self.samples_before / self.samples_after if self.samples_after else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What went into a step, counted when its batch was made."""

    step: int
    trainer_version: int
    num_groups: int
    num_zero_variance_groups: int
    num_trajectories: int
    outcomes: Mapping[Outcome, int]
    evictions: Mapping[EvictionReason, int]
    num_malformed_rewarded: int
    merge: MergeReport
    statistics: Mapping[str, float]
    """By name, those of rewards, of trajectories' advantages and of the policy's age."""
    num_turns: int
    num_malformed_turns: int
    num_inserted_tokens: int
    num_sampled_tokens: int
    num_trained_tokens: int
    num_packed_tokens: int
    """Of all rows, fillers included."""
    num_micro_batches: int
    num_fillers: int
    num_overruled_records: int
    """Of expert choices, in shared prefixes (`row_experts`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTallies:
    """What `step` knows when the batch is made. merged: None for misaligned trajectories.

    returns: of each trajectory, with all shaping, before the outcome's rule.
    """

    trajectories: Sequence[Trajectory]
    merged: Sequence[Merged | None]
    returns: Sequence[float]
    advantages: Sequence[float]
    evictions: Sequence[EvictionReason]
    num_groups: int
    num_zero_variance_groups: int
    num_malformed_rewarded: int


def report_step(tallies: StepTallies, shards: Sequence[RankShard]) -> StepReport:
    """Describe a step by its trajectories and its packed rows."""
    trajectories = tallies.trajectories
    rows = [r for shard in shards for part in shard.minibatches for r in part.micro_batches]
    ages = shards[0].trainer_version - _versions(rows)
    graded = [t for t in trajectories if t.is_graded and abs(t.episode_return) <= MAX_REWARD]
    shaped = [
        value
        for trajectory, value in zip(trajectories, tallies.returns, strict=True)
        if trajectory.is_graded and abs(value) <= MAX_REWARD
    ]
    scaled = [t.episode_return / t.best_return for t in graded if t.best_return]
    return StepReport(
        step=shards[0].step,
        trainer_version=shards[0].trainer_version,
        num_groups=tallies.num_groups,
        num_zero_variance_groups=tallies.num_zero_variance_groups,
        num_trajectories=len(trajectories),
        outcomes=dict(Counter(t.outcome for t in trajectories)),
        evictions=dict(Counter(tallies.evictions)),
        num_malformed_rewarded=tallies.num_malformed_rewarded,
        merge=report_merge([merged for merged in tallies.merged if merged is not None]),
        statistics=_statistics(
            {
                # Before the outcome's rule: what was played, not what training makes of it.
                "reward": shaped,
                "scaled_reward": scaled,
                "trajectory_advantage": tallies.advantages,
                "policy_age": ages,
            }
        ),
        num_turns=sum(len(t.turns) for t in trajectories),
        num_malformed_turns=sum(t.num_malformed_turns for t in trajectories),
        num_inserted_tokens=sum(t.num_inserted_tokens for t in trajectories),
        num_sampled_tokens=sum(t.num_sampled for t in trajectories),
        num_trained_tokens=int(ages.size),
        num_packed_tokens=sum(row.num_tokens for row in rows),
        num_micro_batches=len(rows),
        num_fillers=sum(row.num_trained == 0 for row in rows),
        num_overruled_records=sum(row.num_overruled_records for row in rows),
    )


def report_merge(merged: Sequence[Merged]) -> MergeReport:
    """Add up how merging went over trajectories."""
    kinds = Counter(mismatch.kind for each in merged for mismatch in each.mismatches)
    return MergeReport(
        samples_before=sum(each.num_turns for each in merged),
        samples_after=sum(len(each.samples) for each in merged),
        mismatches=dict(kinds),
        num_saved_tokens=sum(each.num_unmerged_tokens - each.num_merged_tokens for each in merged),
        num_masked_tokens=sum(each.num_masked_tokens for each in merged),
    )


def _statistics(values: Mapping[str, Sequence[float] | NDArray[np.int32]]) -> dict[str, float]:
    """Reduce the values by the table; what has no values is absent."""
    arrays = {name: np.asarray(of_name, np.float64) for name, of_name in values.items()}
    return {
        each.name: float(_REDUCE[each.reduction](arrays[each.values]))
        for each in STATISTICS
        if each.source is Source.MERGE and arrays[each.values].size
    }


def _versions(rows: Sequence[MicroBatch]) -> NDArray[np.int32]:
    return np.concatenate([np.empty(0, np.int32), *(row.sampled_versions for row in rows)])
