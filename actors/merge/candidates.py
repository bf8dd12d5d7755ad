"""A trajectory that stands in its group's baseline, and what models say of its samples; pure.

The trained tokens of a trajectory are numbered as they were played, whatever sample they lie in.
Called by `step` and `credit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from actors.batch import Float32s
from actors.merge.shaping import KlInReward, kl_penalties
from actors.types import Sample, Trajectory


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A trajectory in its group's baseline.

    rewards: [K] float64, one a turn, behind shaping and the outcome's rule; their sum is
    baseline_return. token_rewards: [N] float64, what falls on trained tokens beside.
    """

    trajectory: Trajectory
    rewards: NDArray[np.float64]
    baseline_return: float
    token_rewards: NDArray[np.float64]

    @property
    def name(self) -> str:
        return self.trajectory.trajectory_id

    @property
    def bounds(self) -> NDArray[np.int64]:
        """[K + 1]: turn k's trained tokens are number bounds[k] to bounds[k + 1], as played."""
        counts = np.zeros(len(self.trajectory.turns), np.int64)
        for sample in self.trajectory.samples:
            mask = sample.mask
            for turn in sample.turns:
                counts[turn.index] = np.count_nonzero(mask[turn.tokens])
        return np.append(0, np.cumsum(counts))

    def scores(self, scores: Scores, *, what: str) -> list[Float32s]:
        """Of each sample, one kind of score, as long as the sample.

        Raises: ValueError, naming the trajectory.
        """
        found = [getattr(scored, what) for scored in scores.get(self.name, ())]
        lengths = [None if values is None else values.shape[0] for values in found]
        expected = [sample.num_tokens for sample in self.trajectory.samples]
        if lengths != expected:
            raise ValueError(
                f"merge: trajectory {self.name} has {what} of lengths {lengths} for samples of "
                f"{expected} tokens; ask the trainer to score the samples of this step first"
            )
        return found


def candidate(
    trajectory: Trajectory,
    *,
    rewards: NDArray[np.float64],
    baseline_return: float,
    kl: KlInReward | None = None,
    scores: Scores = NO_SCORES,
) -> Candidate:
    """Put a trajectory into its group's baseline, its return less what KL takes of it.

    Raises: ValueError when KL is charged and the reference's scores are missing or do not fit.
    """
    num_trained = trajectory.num_trained
    plain = Candidate(
        trajectory=trajectory,
        rewards=rewards,
        baseline_return=baseline_return,
        token_rewards=np.zeros(num_trained, np.float64),
    )
    if kl is None:
        return plain
    found = plain.scores(scores, what="reference_logprobs")
    charged = np.zeros(num_trained, np.float64)
    bounds = plain.bounds
    for sample, scored in zip(trajectory.samples, found, strict=True):
        trained = sample.mask == 1
        charged[places_of(sample, bounds)] = kl_penalties(
            sample.logprobs[trained], scored[trained], kl=kl, name=plain.name
        )
    return replace(plain, token_rewards=charged, baseline_return=baseline_return + charged.sum())


def places_of(sample: Sample, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of a sample's trained tokens. Args: bounds: as `Candidate.bounds`."""
    return np.concatenate(
        [np.arange(bounds[turn.index], bounds[turn.index + 1]) for turn in sample.turns]
    )
