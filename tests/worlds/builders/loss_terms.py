"""Random tokens of a small update, and settings of every loss, for tests of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from actors.algorithm import (
    KlSettings,
    LossSettings,
    Objective,
)
from actors.trainer.loss.micro_batch import MicroBatchTerms

_OLD = LossSettings(denominator="old")
# Each objective, ratio, correction, mask and term occurs at least once.
EVERY_LOSS: dict[str, LossSettings] = {
    "ppo": LossSettings(),
    "dual_clip": LossSettings(objective=Objective.DUAL_CLIP, dual_clip=1.5),
    "cispo": LossSettings(objective=Objective.CISPO),
    "reinforce": LossSettings(objective=Objective.REINFORCE, ratio_cap=1.5),
    "sapo": LossSettings(objective=Objective.SAPO),
    "dppo_tv": LossSettings(objective=Objective.DPPO_TV, divergence_bound=0.02),
    "dppo_kl": LossSettings(objective=Objective.DPPO_KL, divergence_bound=0.005),
    "positive_only": LossSettings(negative_weight=0.0),
    "gspo": LossSettings(ratio="sequence", clip_low=0.05, clip_high=0.05),
    "gspo_dual": LossSettings(ratio="sequence", objective=Objective.DUAL_CLIP, dual_clip=1.01),
    "sequence_reinforce": LossSettings(ratio="sequence", objective=Objective.REINFORCE),
    "decoupled": _OLD,
    "decoupled_token": replace(_OLD, correction="truncate_token", correction_cap=1.1),
    "decoupled_sequence": replace(_OLD, correction="truncate_sequence"),
    "token_band": LossSettings(token_band=(0.8, 1.3)),
    "sequence_band": replace(_OLD, sequence_band=(0.95, 1.1)),
    "outlier": LossSettings(outlier_below=0.7),
    "k2": LossSettings(kl=KlSettings(coefficient=0.1, estimator="k2")),
    "k3": LossSettings(kl=KlSettings(coefficient=0.1)),
    "k1_corrected": LossSettings(kl=KlSettings(coefficient=0.1, estimator="k1", corrected=True)),
    "k3_corrected": LossSettings(
        kl=KlSettings(coefficient=0.1, corrected=True), token_band=(0.8, 1.3)
    ),
    "entropy": LossSettings(entropy_coefficient=0.02),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The trained tokens of an update: arrays [M], with log-probabilities in nats."""

    current: np.ndarray
    behaviour: np.ndarray
    old: np.ndarray
    reference: np.ndarray
    entropy: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    trajectory: np.ndarray


def random_tokens(seed: int, *, num_trajectories: int = 4, max_tokens: int = 6) -> Tokens:
    """Draw tokens whose log-probabilities differ by about 0.2 between the policies.

    All tokens of a trajectory have the same advantage and weight.
    """
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, max_tokens + 1, num_trajectories)
    trajectory = np.repeat(np.arange(num_trajectories), counts)
    behaviour = np.log(rng.uniform(0.05, 0.7, len(trajectory)))
    near = {name: rng.normal(0, 0.2, len(trajectory)) for name in ("old", "current", "reference")}
    return Tokens(
        current=behaviour + near["current"],
        behaviour=behaviour,
        old=behaviour + near["old"],
        reference=behaviour + near["reference"],
        entropy=rng.uniform(0, 3, len(trajectory)),
        advantage=rng.normal(size=num_trajectories)[trajectory],
        weight=rng.uniform(0.01, 0.1, num_trajectories)[trajectory],
        trajectory=trajectory,
    )


def terms_of(tokens: Tokens, chosen: Sequence[int] | np.ndarray | None = None) -> MicroBatchTerms:
    """Return the terms of the chosen tokens of an update, in the given order, as new leaf tensors.

    The terms are float64, so that rounding cannot explain a difference.

    chosen: indices of the tokens; None chooses all.
    """
    places = np.arange(len(tokens.current)) if chosen is None else np.asarray(chosen, np.int64)
    _, index = np.unique(tokens.trajectory[places], return_inverse=True)

    def take(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values[places], dtype=torch.float64)

    return MicroBatchTerms(
        current_logprobs=take(tokens.current).requires_grad_(),
        behaviour_logprobs=take(tokens.behaviour),
        entropies=take(tokens.entropy).requires_grad_(),
        advantages=take(tokens.advantage),
        loss_weights=take(tokens.weight),
        trajectory_index=torch.tensor(index, dtype=torch.int64),
        sampled_versions=torch.full((len(places),), 3),
        trainer_version=3,
        old_logprobs=take(tokens.old),
        reference_logprobs=take(tokens.reference),
    )
