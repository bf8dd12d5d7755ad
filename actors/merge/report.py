"""What a step says about itself: counts and spreads, made from the same values as the batch.

A number that is not known (no return, nothing trained) is None, never 0. Called by `step`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.batch import MicroBatch, RankShard
from actors.bounds import MAX_REWARD
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import BranchReason, Outcome, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of a list of numbers; std is the population deviation."""

    mean: float
    std: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[np.float64]) -> Spread | None:
        """None for no values."""
        array = np.asarray(values, np.float64)
        if array.size == 0:
            return None
        return cls(
            mean=float(array.mean()),
            std=float(array.std()),
            min=float(array.min()),
            max=float(array.max()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """samples_before: turns, one row each without merging. num_saved_tokens: what those rows
    would hold beyond the merged ones. num_masked_tokens: sampled, without a finite
    log-probability.
    """

    samples_before: int
    samples_after: int
    branches: Mapping[BranchReason, int]
    num_saved_tokens: int
    num_masked_tokens: int

    @property
    def ratio(self) -> float | None:
        """Samples after over before; None for no turns."""
        return self.samples_after / self.samples_before if self.samples_before else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """returns: shaped and unclamped, of the step's graded trajectories, without reward errors;
    scaled_return_mean: the
    environment's own, over the best possible, where known. advantages: of the trajectories in the
    loss, each the mean over its tokens. policy_age_*: versions, of trained tokens.
    num_packed_tokens: of all rows, fillers included. num_overruled_records: of expert choices, in
    shared prefixes (`row_experts`).
    """

    step: int
    trainer_version: int
    num_groups: int
    num_zero_variance_groups: int
    num_trajectories: int
    outcomes: Mapping[Outcome, int]
    evictions: Mapping[EvictionReason, int]
    num_malformed_rewarded: int
    merge: MergeReport
    returns: Spread | None
    scaled_return_mean: float | None
    advantages: Spread | None
    policy_age_max: int | None
    policy_age_mean: float | None
    num_turns: int
    num_malformed_turns: int
    num_inserted_tokens: int
    num_sampled_tokens: int
    num_trained_tokens: int
    num_packed_tokens: int
    num_micro_batches: int
    num_fillers: int
    num_overruled_records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTallies:
    """What `step` knows when the batch is made.

    returns: of each trajectory, with all shaping, before the outcome's rule.
    """

    trajectories: Sequence[Trajectory]
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
        merge=report_merge(trajectories),
        returns=Spread.of(shaped),
        scaled_return_mean=float(np.mean(scaled)) if scaled else None,
        advantages=Spread.of(tallies.advantages),
        policy_age_max=int(ages.max()) if ages.size else None,
        policy_age_mean=float(ages.mean()) if ages.size else None,
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


def report_merge(trajectories: Sequence[Trajectory]) -> MergeReport:
    """Add up what merging came to over trajectories."""
    samples = [sample for trajectory in trajectories for sample in trajectory.samples]
    turns = [turn for sample in samples for turn in sample.turns]
    num_sampled = sum(turn.num_sampled for turn in turns)
    return MergeReport(
        samples_before=len(turns),
        samples_after=len(samples),
        branches=dict(Counter(each.branch_reason for each in samples if each.branch_reason)),
        # A row for each turn would end where the turn ends.
        num_saved_tokens=sum(turn.end for turn in turns) - sum(s.num_tokens for s in samples),
        num_masked_tokens=num_sampled - sum(sample.num_trained for sample in samples),
    )


def _versions(rows: Sequence[MicroBatch]) -> NDArray[np.int32]:
    return np.concatenate([np.empty(0, np.int32), *(row.sampled_versions for row in rows)])
