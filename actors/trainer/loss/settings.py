"""The loss to train: the choices and their numbers, `algorithm.loss` of the configuration.

Each choice is one pure function elsewhere in this package; docs/algorithms.md has the table. Only
the aggregation is not part of the loss function: the merge side makes it a weight of each token.
Read by `micro_batch` and the merge actor. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from annotated_types import Gt, Lt

from actors.limits import STRICT, NotNegative, Positive, Rate, Share
from actors.merge.aggregation import Aggregation


class Objective(StrEnum):
    """The rule that stops the update of a token (`objectives`)."""

    PPO_CLIP = "ppo_clip"
    DUAL_CLIP = "dual_clip"
    CISPO = "cispo"
    REINFORCE = "reinforce"
    SAPO = "sapo"
    DPPO_TV = "dppo_tv"
    DPPO_KL = "dppo_kl"


class Ratio(StrEnum):
    """Whether a ratio is of a token, or of its whole trajectory (`ratios`)."""

    TOKEN = "token"
    SEQUENCE = "sequence"


class Denominator(StrEnum):
    """The policy that current is compared with: the sampler, or the trainer at the step's start."""

    BEHAVIOUR = "behaviour"
    OLD = "old"


class Correction(StrEnum):
    """The importance weight old / behaviour beside a ratio over old (`corrections`)."""

    NONE = "none"
    TRUNCATE_TOKEN = "truncate_token"
    TRUNCATE_SEQUENCE = "truncate_sequence"


class KlEstimator(StrEnum):
    """Schulman's three estimators of KL(q || p) from samples of q (`divergence`)."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


@dataclass(frozen=True, slots=True, kw_only=True)
class KlSettings:
    """KL(policy || reference) as a term of the loss."""

    __pydantic_config__ = STRICT

    coefficient: NotNegative = 0.0
    """Weight of the term; 0: no reference model is loaded for it."""
    estimator: KlEstimator = KlEstimator.K3
    """Estimator of the KL at each token."""
    corrected: bool = False
    """Weigh it by policy / sampler, as k1 needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The loss that an update minimises; the defaults are PPO's clip against the behaviour policy.

    A band is [low, high] of a ratio trainer / sampler. The trainer is old if the denominator is
    old, else current.
    """

    __pydantic_config__ = STRICT

    objective: Objective = Objective.PPO_CLIP
    """The policy objective: what bounds how far a token's probability moves."""
    ratio: Ratio = Ratio.TOKEN
    """Of each token by itself, or the geometric mean of its trajectory (GSPO)."""
    denominator: Denominator = Denominator.BEHAVIOUR
    """What the ratio divides by: the sampler, or the trainer at the step's start."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """What has equal say in the update."""
    constant_tokens: Positive | None = None
    """What aggregation constant divides a trajectory by; null: model.max_context_tokens."""
    clip_low: Share = 0.2
    """The ratio is clipped below 1 - clip_low (ppo_clip, dual_clip, cispo)."""
    clip_high: Rate = 0.28
    """The ratio is clipped above 1 + clip_high (ppo_clip, dual_clip, cispo)."""
    dual_clip: Annotated[float, Gt(1)] = 3.0
    """Bad tokens stop at this ratio (dual_clip); at 1, tokens that have not moved would stop."""
    ratio_cap: Rate = 20.0
    """Largest weight of a token (reinforce, dppo_*)."""
    sapo_tau_positive: Rate = 1.0
    """Steepness of SAPO's gate, advantage above 0."""
    sapo_tau_negative: Rate = 1.05
    """Steepness of SAPO's gate, advantage below 0."""
    divergence_bound: Rate = 0.15
    """Trust region of dppo_*; 0.05 suits dppo_kl."""
    negative_weight: NotNegative = 1.0
    """What negative advantages are multiplied by; 0: positive only."""
    correction: Correction = Correction.NONE
    """Importance weight old / behaviour, beside denominator old."""
    correction_cap: Rate = 2.0
    """Largest importance weight."""
    token_band: tuple[Rate, Rate] | None = None
    """Tokens with another ratio trainer / sampler are not trained."""
    sequence_band: tuple[Rate, Rate] | None = None
    """Trajectories with another geometric-mean ratio are not trained."""
    outlier_below: Annotated[float, Gt(0), Lt(1)] | None = None
    """A trajectory with a token of a lower ratio is not trained."""
    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus, over all trained tokens, masked ones too."""
    kl: KlSettings = field(default_factory=KlSettings)

    @property
    def needs_old(self) -> bool:
        """Whether the trainer's log-probabilities at the step's start are needed."""
        return self.denominator is Denominator.OLD

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient != 0.0

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coefficient != 0.0
