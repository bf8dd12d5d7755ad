"""Compute the counts and statistics of a training step, for its record.

They are computed from the step's trajectories (`Member`) and from the packed rows of the batch. A
statistic without a value is left out instead of being 0, for example if nothing was trained.
`actors.merge.step` calls this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actors.batch import MicroBatch, RankShard
from actors.limits import MAX_REWARD
from actors.merge.member import Member
from actors.policy_age import policy_ages
from actors.statistics import STATISTICS, Reduction
from actors.trajectory_queue.ledger import (
    EvictionReason,
    TokenCause,
    TokenCounts,
    token_cause,
    untrained_tokens,
)
from actors.types import BranchReason, Outcome, Trajectory

# Limits for a step are needed because environments choose the names, in any number.
MAX_COMPONENTS = 32
MAX_COMPONENT_NAME = 64

_REDUCE: Mapping[Reduction, Callable[[NDArray[np.float64]], np.floating]] = {
    "mean": np.mean,
    "std": np.std,
    "min": np.min,
    "max": np.max,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    samples_before: int
    """Number of turns, which is the number of samples without merging."""
    samples_after: int
    branches: Mapping[BranchReason, int]
    """Number of samples that branched off an earlier sample, by reason."""
    num_saved_tokens: int
    """Number of tokens that merging saved: the tokens of one sample for each turn, minus the tokens
    of the merged samples.
    """
    num_masked_tokens: int
    """Number of sampled tokens without a finite log-probability, which are not trained."""

    @property
    def ratio(self) -> float | None:
        """Turns per sample, >= 1; None without turns."""
        return self.samples_before / self.samples_after if self.samples_after else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReturns:
    """The returns of the rollouts of one task."""

    task_id: str
    environment: str
    returns: tuple[float, ...]
    """Returns of the graded rollouts, divided by the best possible return if the environment knows
    it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReport:
    """Counts and mean returns of a step's trajectories of one environment.

    In a mixture of tasks, each source counts as an environment.
    """

    num_trajectories: int
    outcomes: Mapping[Outcome, int]
    num_sampled_tokens: int
    num_turns: int
    reward_mean: float | None
    """Mean return of the graded trajectories; None if no trajectory is graded."""
    scaled_reward_mean: float | None

    @property
    def best_known_reward(self) -> float | None:
        """The mean return, divided by the best possible return.

        If the best possible return is not known, the mean return itself.
        """
        return self.reward_mean if self.scaled_reward_mean is None else self.scaled_reward_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Counts and statistics of one step."""

    step: int
    trainer_version: int
    num_groups: int
    num_zero_variance_groups: int
    num_negative_return_groups: int = 0
    num_trajectories: int
    outcomes: Mapping[Outcome, int]
    evictions: Mapping[EvictionReason, int]
    num_malformed_rewarded: int
    merge: MergeReport
    statistics: Mapping[str, float]
    """Values of the statistics of `"merge"`, by their name in `actors.statistics`."""
    num_turns: int
    num_malformed_turns: int
    num_inserted_tokens: int
    num_sampled_tokens: int
    num_trained_tokens: int
    num_packed_tokens: int
    """Number of tokens of all rows, after sharing prefixes, including padding rows."""
    num_micro_batches: int
    num_padding_rows: int
    """Number of micro-batches that train nothing; `num_micro_batches` includes them."""
    num_overruled_records: int
    """Number of expert records that differ from the record that the row has at the same position
    (`row_experts`).
    """
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """The mean of each named part of the reward over the graded trajectories that have it, after
    summing over turns; only the first MAX_COMPONENTS names."""
    logged_metrics: Mapping[str, float] = field(default_factory=dict)
    """The mean of each logged number over the trajectories whose environment logged it, by name;
    only the first MAX_COMPONENTS names. These numbers are not rewarded.
    """
    environments: Mapping[str, EnvironmentReport] = field(default_factory=dict)
    """The report of each environment, by name; empty if the step has only one environment."""
    tokens: TokenCounts = field(default_factory=TokenCounts)
    """Counts of trained tokens, and of untrained tokens by cause, among the sampled tokens of the
    step's trajectories. A stored record also counts the tokens of attempts that ended since the
    previous step and are in no step.
    """


def report_step(groups: Sequence[Sequence[Member]], shards: Sequence[RankShard]) -> StepReport:
    """Count and average what a step trains.

    Args:
        groups: The step's trajectories, group by group.
        shards: The packed rows that each trainer rank trains.
    """
    members = [member for group in groups for member in group]
    trajectories = [member.trajectory for member in members]
    rows = [r for shard in shards for part in shard.minibatches for r in part]
    first = shards[0]
    ages = policy_ages(_versions(rows), first.trainer_version, first.republished)
    graded = _graded(trajectories)
    shaped = [
        member.shaped_return
        for member in members
        if member.trajectory.is_graded and abs(member.shaped_return) <= MAX_REWARD
    ]
    advantages = [np.concatenate(member.advantages) for member in members if member.is_trained]
    # For each group, the values of its members' `no_signal`. A group may have several, because a
    # member that is out of the loss for another reason has None.
    reasons = [{member.no_signal for member in group} for group in groups]
    return StepReport(
        step=first.step,
        trainer_version=first.trainer_version,
        num_groups=len(groups),
        num_zero_variance_groups=sum(EvictionReason.ZERO_VARIANCE in found for found in reasons),
        num_negative_return_groups=sum(
            EvictionReason.NEGATIVE_RETURN in found for found in reasons
        ),
        num_trajectories=len(members),
        outcomes=dict(Counter(t.outcome for t in trajectories)),
        evictions=dict(Counter(member.reason for member in members if member.reason is not None)),
        num_malformed_rewarded=sum(member.is_malformed_rewarded for member in members),
        merge=report_merge(trajectories),
        statistics=_statistics(
            {
                # Use the returns before the outcome's rule changes them, because they are the
                # returns that the policy earned.
                "reward": shaped,
                "scaled_reward": _scaled(graded),
                "trajectory_advantage": [float(values.mean()) for values in advantages],
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
        num_padding_rows=sum(row.num_trained == 0 for row in rows),
        num_overruled_records=sum(row.num_overruled_records for row in rows),
        reward_components=mean_components(graded),
        logged_metrics=_means([each.metrics for each in trajectories]),
        environments=report_environments(trajectories),
        tokens=count_tokens(members),
    )


def count_tokens(members: Sequence[Member]) -> TokenCounts:
    """Count the members' sampled tokens: the trained ones, and the untrained ones by cause.

    Example: two members of 3 and 5 tokens, the second cut off and masked -> 3 trained, 5
    truncated_tokens
    """
    counts = TokenCounts()
    for member in members:
        trajectory, reason = member.trajectory, member.reason
        if reason is None:
            # A token without a finite log-probability is not in the loss, whatever its trajectory.
            num_unfit = trajectory.num_sampled - trajectory.num_trained
            untrained: dict[TokenCause, int] = {EvictionReason.TOKEN_MISALIGNED: num_unfit}
            untrained.update(trajectory.left_out_tokens.items())
            own = TokenCounts(trained=trajectory.num_trained, untrained=untrained)
            counts = counts.plus(own.known())
        else:
            cause = token_cause(reason, trajectory.outcome)
            counts = counts.plus(untrained_tokens(trajectory, cause))
    return counts


def report_environments(trajectories: Sequence[Trajectory]) -> dict[str, EnvironmentReport]:
    """Describe each environment's share of a step, sorted by name.

    The result is empty if the step has only one environment.
    """
    names = sorted({each.environment for each in trajectories})
    if len(names) < 2:
        return {}
    found = {}
    for name in names:
        own = [each for each in trajectories if each.environment == name]
        graded = _graded(own)
        found[name] = EnvironmentReport(
            num_trajectories=len(own),
            outcomes=dict(Counter(each.outcome for each in own)),
            num_sampled_tokens=sum(each.num_sampled for each in own),
            num_turns=sum(len(each.turns) for each in own),
            reward_mean=_mean([each.episode_return for each in graded]),
            scaled_reward_mean=_mean(_scaled(graded)),
        )
    return found


def group_returns(groups: Sequence[Sequence[Member]]) -> tuple[GroupReturns, ...]:
    """Return the returns of the graded rollouts of each group, also of groups that are not trained.

    A rollout is graded if its return says how good it was (`Trajectory.is_graded`).
    """
    found = []
    for group in groups:
        scored = _graded([member.trajectory for member in group])
        values = [t.episode_return / (t.best_return or 1.0) for t in scored]
        first = group[0].trajectory
        found.append(
            GroupReturns(
                task_id=first.task_id, environment=first.environment, returns=tuple(values)
            )
        )
    return tuple(found)


def _graded(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [t for t in trajectories if t.is_graded and abs(t.episode_return) <= MAX_REWARD]


def _scaled(graded: Sequence[Trajectory]) -> list[float]:
    return [t.episode_return / t.best_return for t in graded if t.best_return]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def mean_components(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Average each component of the reward over the trajectories that have it, sorted by name.

    A trajectory's value is the sum over its turns. Names are cut to MAX_COMPONENT_NAME characters;
    names beyond MAX_COMPONENTS are left out.
    Example: {"form": 1} and {"form": 0.5} in the turns of one trajectory, {"form": 0} in another
    -> {"form": 0.75}, the mean of 1.5 and 0
    """
    owns = []
    for trajectory in trajectories:
        own: dict[str, float] = {}
        for turn in trajectory.turns:
            for name, value in turn.reward_components.items():
                short = name[:MAX_COMPONENT_NAME]
                own[short] = own.get(short, 0.0) + value
        owns.append(own)
    return _means(owns)


def _means(named: Sequence[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for own in named:
        for name, value in own.items():
            sums.setdefault(name[:MAX_COMPONENT_NAME], []).append(value)
    return {name: float(np.mean(sums[name])) for name in sorted(sums)[:MAX_COMPONENTS]}


def report_merge(trajectories: Sequence[Trajectory]) -> MergeReport:
    """Count a step's turns, the samples into which they were merged, and the saved tokens."""
    samples = [sample for trajectory in trajectories for sample in trajectory.samples]
    turns = [turn for sample in samples for turn in sample.turns]
    num_sampled = sum(turn.num_sampled for turn in turns)
    return MergeReport(
        samples_before=len(turns),
        samples_after=len(samples),
        branches=dict(Counter(each.branch_reason for each in samples if each.branch_reason)),
        # A turn in a separate sample would have its prompt and reply, which are all tokens up to
        # its end. Neither count includes the tokens of a sample after its last turn.
        num_saved_tokens=sum(turn.end for turn in turns) - sum(s.turns[-1].end for s in samples),
        num_masked_tokens=num_sampled - sum(sample.num_trained for sample in samples),
    )


def _statistics(values: Mapping[str, Sequence[float] | NDArray[np.int32]]) -> dict[str, float]:
    arrays = {name: np.asarray(of_name, np.float64) for name, of_name in values.items()}
    return {
        each.name: float(_REDUCE[each.reduction](arrays[each.values]))
        for each in STATISTICS
        if each.source == "merge" and arrays[each.values].size
    }


def _versions(rows: Sequence[MicroBatch]) -> NDArray[np.int32]:
    return np.concatenate([np.empty(0, np.int32), *(row.sampled_versions for row in rows)])
