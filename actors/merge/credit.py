"""From a group's rewards to what each trajectory, turn or token of it is credited with; pure.

One of three levels, by the settings: the trajectory (group statistics), its turns (`turn_credit`)
or its action tokens (`gae`). All are made from trajectories; samples only receive them, so that
how turns were cut into samples changes no advantage. Called by `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from actors.batch import Float32s
from actors.merge.advantages import Baseline, group_advantages, group_divisor
from actors.merge.candidates import NO_SCORES, Candidate, Scores, places_of
from actors.merge.normalization import normalise_over_tokens
from actors.merge.settings import StepSettings
from actors.merge.token_credit import credit_tokens
from actors.merge.turn_credit import turn_advantages
from actors.types import Sample


class Level(Enum):
    """What one number of a credit stands for."""

    TRAJECTORY = "trajectory"
    TURN = "turn"
    TOKEN = "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Advantages of one trajectory: [1], [K] turns or [N] trained tokens, float64.

    num_tokens: [1], [K] or [N] int64, the trained tokens that each number stands at.
    bounds: by token, between which two the numbers of each turn stand, [K + 1]. old_values,
    value_targets: [N] float32, for the critic's own training; None: there is none.
    """

    level: Level
    values: NDArray[np.float64]
    num_tokens: NDArray[np.int64]
    bounds: NDArray[np.int64] | None = None
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
                num_tokens=np.resize(np.diff(each.bounds), of_turns.shape),
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
            num_tokens=np.array([each.trajectory.num_trained]),
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


def sample_advantage(credit: Credit, sample: Sample) -> float | Float32s:
    """What a sample's trained tokens get: one number, or [T] float32 (0 where not trained)."""
    if credit.level is Level.TRAJECTORY:
        return float(credit.values[0])
    advantages = np.zeros(sample.num_tokens, np.float32)
    if credit.level is Level.TURN:
        for turn in sample.turns:
            advantages[turn.tokens] = credit.values[turn.index]
        advantages[sample.mask == 0] = 0
    elif credit.bounds is not None:
        advantages[sample.mask == 1] = credit.values[places_of(sample, credit.bounds)]
    return advantages


def trained_advantages(credit: Credit, sample: Sample) -> Float32s:
    """[M] float32, of the sample's trained tokens in order."""
    advantage = np.asarray(sample_advantage(credit, sample), np.float32)
    return np.broadcast_to(advantage, (sample.num_tokens,))[sample.mask == 1]


def _turn_rewards(each: Candidate) -> NDArray[np.float64]:
    """[K] rewards of the turns, with what falls on their tokens; [1] for one without turns."""
    if not each.trajectory.turns:
        return np.array([each.baseline_return])
    sums = np.append(0.0, np.cumsum(each.token_rewards))
    return each.rewards + np.diff(sums[each.bounds])


def _token_credit(
    each: Candidate, settings: StepSettings, scores: Scores, divisor: float
) -> Credit:
    ones = np.ones(each.trajectory.num_trained, np.int64)
    if not ones.shape[0]:
        return Credit(level=Level.TOKEN, values=np.empty(0), num_tokens=ones)
    values = each.scores(scores, what="values")
    result, old_values = credit_tokens(each, values, settings.critic)
    return Credit(
        level=Level.TOKEN,
        values=result.advantages / divisor if divisor else np.zeros_like(result.advantages),
        num_tokens=ones,
        bounds=each.bounds,
        old_values=old_values,
        value_targets=result.value_targets.astype(np.float32),
    )
