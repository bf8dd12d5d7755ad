"""From a group's rewards to what each trajectory, turn or token of it is credited with; pure.

One of three levels, by the settings: the trajectory (group statistics), its turns (`turn_credit`)
or its action tokens (`gae`). All are made from trajectories; samples only receive them, so that
how turns were cut into samples changes no advantage. Called by `step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from actors.batch import Float32s
from actors.merge.advantages import Baseline, group_advantages, group_divisor
from actors.merge.gae import end_value, refuse_branches, token_advantages
from actors.merge.normalization import normalise_over_tokens
from actors.merge.prefix import Merged, Sample
from actors.merge.settings import StepSettings
from actors.merge.shaping import KlInReward, kl_penalties
from actors.merge.turn_credit import turn_advantages
from actors.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScores:
    """What a model says of one sample; None: it was not asked.

    reference_logprobs: [T] float32, nats, of each token behind its predecessors (the first: any).
    values: [T] float32, of the state that ends with each token.
    """

    reference_logprobs: Float32s | None = None
    values: Float32s | None = None


# By trajectory id, the scores of its samples in their order.
Scores = Mapping[str, tuple[SampleScores, ...]]
NO_SCORES: Scores = {}


class Level(Enum):
    """What one number of a credit stands for."""

    TRAJECTORY = "trajectory"
    TURN = "turn"
    TOKEN = "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A trajectory in its group's baseline.

    rewards: [K] float64, one a turn, behind shaping and the outcome's rule; their sum is
    baseline_return. token_rewards: [N] float64, what falls on trained tokens beside.
    """

    trajectory: Trajectory
    merged: Merged
    rewards: NDArray[np.float64]
    baseline_return: float
    token_rewards: NDArray[np.float64]

    @property
    def name(self) -> str:
        return self.trajectory.trajectory_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Advantages of one trajectory: [1], [K] turns or [N] trained tokens, float64.

    num_tokens: [1], [K] or [N] int64, the trained tokens that each number stands at.
    old_values, value_targets: [N] float32, for the critic's own training; None: there is none.
    """

    level: Level
    values: NDArray[np.float64]
    num_tokens: NDArray[np.int64]
    old_values: Float32s | None = None
    value_targets: Float32s | None = None

    @property
    def mean(self) -> float:
        """Over the trajectory's trained tokens; of one number, that number."""
        if self.values.shape[0] == 1:
            return float(self.values[0])
        return float((self.values * self.num_tokens).sum() / max(1, self.num_tokens.sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCredits:
    """credits: of each candidate. has_signal: False when every advantage is 0 by equal returns."""

    credits: tuple[Credit, ...]
    has_signal: bool


def candidate(
    trajectory: Trajectory,
    merged: Merged,
    *,
    rewards: NDArray[np.float64],
    baseline_return: float,
    kl: KlInReward | None = None,
    scores: Scores = NO_SCORES,
) -> Candidate:
    """Put a trajectory into its group's baseline, its return less what KL takes of it.

    Raises: ValueError when KL is charged and the reference's scores are missing or do not fit.
    """
    num_trained = merged.num_trained_tokens
    plain = Candidate(
        trajectory=trajectory,
        merged=merged,
        rewards=rewards,
        baseline_return=baseline_return,
        token_rewards=np.zeros(num_trained, np.float64),
    )
    if kl is None:
        return plain
    found = _sample_scores(plain, scores, what="reference_logprobs")
    charged = np.zeros(num_trained, np.float64)
    bounds = np.append(0, np.cumsum(_tokens_by_turn(plain)))
    for sample, scored in zip(merged.samples, found, strict=True):
        trained = sample.mask == 1
        charged[_places(sample, bounds)] = kl_penalties(
            sample.logprobs[trained], scored[trained], kl=kl, name=plain.name
        )
    return replace(plain, token_rewards=charged, baseline_return=baseline_return + charged.sum())


def credit_group(
    candidates: Sequence[Candidate], settings: StepSettings, *, scores: Scores = NO_SCORES
) -> GroupCredits:
    """Credit the members of one group's baseline.

    Raises: ValueError as `group_advantages`, `turn_advantages` and `token_advantages`, and when a
    critic's values are missing; each names the trajectory.
    """
    names = [each.name for each in candidates]
    returns = [each.baseline_return for each in candidates]
    if settings.baseline is Baseline.CRITIC:
        divisor = group_divisor(returns, scale=settings.scale, names=names)
        credits = tuple(_token_credit(each, settings, scores, divisor) for each in candidates)
        return GroupCredits(credits=credits, has_signal=divisor != 0)
    if settings.turn_discount is not None:
        values, has_signal = turn_advantages(
            [_turn_rewards(each) for each in candidates],
            discount=settings.turn_discount,
            baseline=settings.baseline,
            scale=settings.scale,
            names=names,
        )
        credits = tuple(
            Credit(
                level=Level.TURN,
                values=of_turns,
                # What has no turns stands with its return, and has no tokens.
                num_tokens=np.resize(_tokens_by_turn(each), of_turns.shape),
            )
            for each, of_turns in zip(candidates, values, strict=True)
        )
        return GroupCredits(credits=credits, has_signal=has_signal)
    result = group_advantages(
        returns, baseline=settings.baseline, scale=settings.scale, names=names
    )
    credits = tuple(
        Credit(
            level=Level.TRAJECTORY,
            values=result.values[index : index + 1],
            num_tokens=np.array([each.merged.num_trained_tokens]),
        )
        for index, each in enumerate(candidates)
    )
    return GroupCredits(credits=credits, has_signal=result.has_signal)


def normalised(credits: Sequence[Credit]) -> list[Credit]:
    """REINFORCE++: the credits of a whole step, as `normalise_over_tokens` makes them."""
    values = normalise_over_tokens(
        [credit.values for credit in credits], [credit.num_tokens for credit in credits]
    )
    return [replace(credit, values=new) for credit, new in zip(credits, values, strict=True)]


def sample_advantage(credit: Credit, trajectory: Trajectory, sample: Sample) -> float | Float32s:
    """What a sample's trained tokens get: one number, or [T] float32 (0 where not trained)."""
    if credit.level is Level.TRAJECTORY:
        return float(credit.values[0])
    advantages = np.zeros(sample.num_tokens, np.float32)
    if credit.level is Level.TURN:
        for index in sample.turns:
            advantages[_span(trajectory, index)] = credit.values[index]
        advantages[sample.mask == 0] = 0
    else:
        # By token only a trajectory of one sample is credited: its tokens are the trajectory's.
        advantages[sample.mask == 1] = credit.values
    return advantages


def trained_advantages(credit: Credit, trajectory: Trajectory, sample: Sample) -> Float32s:
    """[M] float32, of the sample's trained tokens in order."""
    advantage = np.asarray(sample_advantage(credit, trajectory, sample), np.float32)
    return np.broadcast_to(advantage, (sample.num_tokens,))[sample.mask == 1]


def _span(trajectory: Trajectory, index: int) -> slice:
    """Where a turn's sampled tokens lie in the sample that holds it."""
    turn = trajectory.turns[index]
    start = turn.prompt_token_ids.shape[0]
    return slice(start, start + turn.num_sampled)


def _tokens_by_turn(each: Candidate) -> NDArray[np.int64]:
    """[K] trained tokens of each turn."""
    counts = np.zeros(len(each.trajectory.turns), np.int64)
    for sample in each.merged.samples:
        for index in sample.turns:
            counts[index] = np.count_nonzero(sample.mask[_span(each.trajectory, index)])
    return counts


def _places(sample: Sample, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where a sample's trained tokens stand among the trajectory's, in the order of play.

    bounds: [K + 1], between which two those of each turn of the trajectory stand.
    """
    return np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in sample.turns])


def _turn_rewards(each: Candidate) -> NDArray[np.float64]:
    """[K] rewards of the turns, with what falls on their tokens; [1] for one without turns."""
    if not each.trajectory.turns:
        return np.array([each.baseline_return])
    ends = np.cumsum(_tokens_by_turn(each))
    sums = np.append(0.0, np.cumsum(each.token_rewards))
    return each.rewards + np.diff(sums[ends], prepend=0.0)


def _token_rewards(each: Candidate) -> NDArray[np.float64]:
    """[N] rewards of the trained tokens of a trajectory of one sample.

    A turn's comes with its last one, but for what it recorded by token, which stands where it was
    earned. What falls on no trained token comes with the last one before it, or else the first.
    """
    rewards = each.token_rewards.copy()
    (sample,) = each.merged.samples
    last = np.maximum(np.cumsum(_tokens_by_turn(each)) - 1, 0)
    of_turns = each.rewards
    if sample.token_rewards is not None:
        earned = sample.token_rewards.astype(np.float64)
        at = np.flatnonzero(earned)
        behind = np.searchsorted(np.flatnonzero(sample.mask), at, side="right") - 1
        np.add.at(rewards, np.maximum(behind, 0), earned[at])
        spans = [_span(each.trajectory, index) for index in sample.turns]
        of_turns = of_turns - np.array([earned[span].sum() for span in spans])
    np.add.at(rewards, last, of_turns)
    return rewards


def _token_credit(
    each: Candidate, settings: StepSettings, scores: Scores, divisor: float
) -> Credit:
    refuse_branches(len(each.merged.samples), name=each.name)
    ones = np.ones(each.merged.num_trained_tokens, np.int64)
    if not ones.shape[0]:
        return Credit(level=Level.TOKEN, values=np.empty(0), num_tokens=ones)
    (values,) = _sample_scores(each, scores, what="values")
    (sample,) = each.merged.samples
    critic = settings.critic
    # The state in which a token was sampled ends with the token before it.
    old_values = values[np.flatnonzero(sample.mask) - 1]
    result = token_advantages(
        _token_rewards(each),
        old_values.astype(np.float64),
        discount=critic.discount,
        decay=critic.decay,
        end_value=end_value(
            float(values[-1]),
            is_truncated=each.trajectory.is_truncated,
            truncation=critic.truncation,
        ),
        name=each.name,
    )
    return Credit(
        level=Level.TOKEN,
        values=result.advantages / divisor if divisor else np.zeros_like(result.advantages),
        num_tokens=ones,
        old_values=old_values.astype(np.float32),
        value_targets=result.value_targets.astype(np.float32),
    )


def _sample_scores(each: Candidate, scores: Scores, *, what: str) -> list[Float32s]:
    """Of each sample, one kind of score, as long as the sample.

    Raises: ValueError, naming the trajectory.
    """
    found = [getattr(scored, what) for scored in scores.get(each.name, ())]
    lengths = [None if values is None else values.shape[0] for values in found]
    expected = [sample.num_tokens for sample in each.merged.samples]
    if lengths != expected:
        raise ValueError(
            f"merge: trajectory {each.name} has {what} of lengths {lengths} for samples of "
            f"{expected} tokens; ask the trainer to score the samples of this step first"
        )
    return found
