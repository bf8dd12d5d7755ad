"""Which loss is trained: the choices, their numbers, and what is refused.

Each choice is one pure function elsewhere in this package; docs/algorithms.md has the table. How
tokens are aggregated is not here: the merge side makes it a weight of each token. Called by
`micro_batch`; `service` fills it from the configuration. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from actors.choices import take_choices


class Objective(StrEnum):
    """What stops the push of a token (`objectives`)."""

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
    """What the ratio compares current with: the sampler, or the trainer at the step's start."""

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


# By token alone: over a trajectory they would be another algorithm than the one they are named for.
TOKEN_OBJECTIVES = frozenset({Objective.SAPO, Objective.DPPO_TV, Objective.DPPO_KL})
DPPO_OBJECTIVES = frozenset({Objective.DPPO_TV, Objective.DPPO_KL})

Band = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the loss is made of; the defaults are PPO's clip against the behaviour policy.

    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high] (ppo_clip,
        dual_clip, cispo). dual_clip: bound of the loss of bad tokens, in advantages.
    ratio_cap: largest detached ratio (reinforce, dppo_*). divergence_bound: of dppo_*.
    sapo_tau_*: steepness of SAPO's gate by the sign of the advantage.
    negative_weight: what negative advantages are multiplied by; 0: positive only.
    correction, correction_cap: the importance weight old / behaviour, and its largest value.
    token_band, sequence_band: [low, high] that a token's ratio, or the geometric mean of a
        trajectory's, must lie in to be trained. outlier_below: a trajectory with a token of a
        lower ratio is not trained. None: off. The ratio is trainer / behaviour, the trainer being
        old where that is the denominator, else current.
    kl_coefficient: of KL(current || reference) in the loss; 0: no reference model is loaded.
    is_kl_corrected: the KL term is weighed by current / behaviour.
    entropy_coefficient: of the entropy bonus, over all trained tokens, masked ones too.
    Raises: ValueError, with the remedy, for what is out of range or makes no sense together.
    """

    objective: Objective = Objective.PPO_CLIP
    ratio: Ratio = Ratio.TOKEN
    denominator: Denominator = Denominator.BEHAVIOUR
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    ratio_cap: float = 20.0
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    divergence_bound: float = 0.15
    negative_weight: float = 1.0
    correction: Correction = Correction.NONE
    correction_cap: float = 2.0
    token_band: Band | None = None
    sequence_band: Band | None = None
    outlier_below: float | None = None
    kl_estimator: KlEstimator = KlEstimator.K3
    kl_coefficient: float = 0.0
    is_kl_corrected: bool = False
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        take_choices(
            self,
            {
                "objective": Objective,
                "ratio": Ratio,
                "denominator": Denominator,
                "correction": Correction,
                "kl_estimator": KlEstimator,
            },
            room="loss",
        )
        for problem in (*_range_problems(self), *_band_problems(self), *_disagreements(self)):
            raise ValueError(problem)

    @property
    def needs_old(self) -> bool:
        """Whether the trainer's log-probabilities at the step's start are asked for."""
        return self.denominator is Denominator.OLD

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient != 0.0

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coefficient != 0.0


def _range_problems(settings: LossSettings) -> list[str]:
    found = []
    if not 0 < settings.clip_low <= 1 or not 0 < settings.clip_high < math.inf:
        found.append(
            f"loss.clip_low, clip_high: got {settings.clip_low}, {settings.clip_high}, expected "
            "0 < clip_low <= 1 and clip_high > 0"
        )
    if not 1 < settings.dual_clip < math.inf:
        found.append(
            f"loss.dual_clip: got {settings.dual_clip}, expected more than 1; a lower bound would "
            "stop tokens that have not moved; the paper has 3"
        )
    for name in (
        "ratio_cap",
        "sapo_tau_positive",
        "sapo_tau_negative",
        "divergence_bound",
        "correction_cap",
    ):
        if not 0 < getattr(settings, name) < math.inf:
            found.append(f"loss.{name}: got {getattr(settings, name)}, expected more than 0")
    for name in ("negative_weight", "kl_coefficient", "entropy_coefficient"):
        if not 0 <= getattr(settings, name) < math.inf:
            found.append(f"loss.{name}: got {getattr(settings, name)}, expected at least 0")
    if settings.objective is Objective.DPPO_TV and settings.divergence_bound >= 1:
        found.append(
            f"loss.divergence_bound: got {settings.divergence_bound} for dppo_tv, expected less "
            "than 1, the largest total variation; the paper has 0.15"
        )
    return found


def _band_problems(settings: LossSettings) -> list[str]:
    found = []
    for name in ("token_band", "sequence_band"):
        band = getattr(settings, name)
        if band is not None and not _is_around_one(band):
            found.append(
                f"loss.{name}: got {list(band)}, expected 0 < low <= 1 <= high and low < high; "
                "a ratio of 1 is what unchanged data has and must stay inside"
            )
    below = settings.outlier_below
    if below is not None and not 0 < below < 1:
        found.append(
            f"loss.outlier_below: got {below}, expected more than 0 and less than 1; leave it out "
            "to keep every trajectory"
        )
    return found


def _is_around_one(band: Band) -> bool:
    return len(band) == 2 and 0 < band[0] <= 1 <= band[1] < math.inf and band[0] < band[1]


def _disagreements(settings: LossSettings) -> list[str]:
    found = []
    objective, over_old = settings.objective, settings.denominator is Denominator.OLD
    if settings.ratio is Ratio.SEQUENCE and objective in TOKEN_OBJECTIVES:
        found.append(
            f"loss.ratio is sequence with objective {objective.value}, whose gate is of single "
            "tokens; expected ratio token, or one of ppo_clip, dual_clip, cispo, reinforce"
        )
    if objective in DPPO_OBJECTIVES and over_old:
        found.append(
            f"loss.denominator is old with objective {objective.value}, whose trust region is "
            "around the behaviour policy; expected denominator behaviour"
        )
    if settings.correction is not Correction.NONE and not over_old:
        found.append(
            f"loss.correction is {settings.correction.value} with denominator behaviour: the ratio "
            "already corrects for the sampler and would count twice; set denominator to old, or "
            "correction to none"
        )
    is_k1 = settings.needs_reference and settings.kl_estimator is KlEstimator.K1
    if is_k1 and not settings.is_kl_corrected:
        found.append(
            "loss.kl_estimator is k1 without importance correction: its gradient is 0 in "
            "expectation; weigh it by the ratio (kl.corrected), or choose k2 or k3"
        )
    return found
