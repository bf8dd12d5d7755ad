"""The algorithm's settings, which the queue, the merge actor and the trainer must share.

This is `algorithm` of the configuration: each setting is declared once, with its derived values.
Each choice of the loss is one pure function in `actors/trainer/loss`; docs/algorithms.md has the
table. The aggregation is not a part of the loss function: the merge side turns it into a weight of
each token. Plain values: no Ray, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from annotated_types import Gt, Lt

from actors.limits import STRICT, Fraction, ModelName, Natural, NotNegative, Positive, Rate, Share
from actors.outcomes import Disposition, OutcomeRule


class Baseline(StrEnum):
    """The number that a return is compared with."""

    MEAN = "mean"
    LEAVE_ONE_OUT = "leave_one_out"
    NONE = "none"
    CRITIC = "critic"


class Scale(StrEnum):
    """The number that the difference is divided by."""

    NONE = "none"
    STD = "std"
    MEAN = "mean"


class Truncation(StrEnum):
    """The treatment, with a critic, of a trajectory that was cut off.

    bootstrap: trained, with V(s_T) after the last token. terminal: trained, with 0 there. mask: not
    in the loss. penalty: as terminal, with an amount subtracted from the return. drop: in neither
    loss nor baseline.
    """

    BOOTSTRAP = "bootstrap"
    TERMINAL = "terminal"
    MASK = "mask"
    PENALTY = "penalty"
    DROP = "drop"


class ScheduleKind(StrEnum):
    """The decay of the rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """The decay of a learning rate after its warm-up."""

    __pydantic_config__ = STRICT

    kind: ScheduleKind = ScheduleKind.CONSTANT
    """constant: no decay; linear, cosine: decay from the end of the warm-up; wsd: constant, then
    linear decay over the last decay_updates."""
    updates: Positive | None = None
    """Number of updates, including the warm-up, after which the rate stays at its minimum; null:
    all updates of run.steps."""
    decay_updates: Positive | None = None
    """Number of updates of the decay, at the end of `updates`; only with wsd."""
    min_ratio: Fraction = 0.0
    """The minimum rate, as a fraction of the learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """A value model and GAE over its values (PPO); read only with baseline critic.

    The other settings of its optimiser are the policy's (`trainer`).
    """

    __pydantic_config__ = STRICT

    model: ModelName | None = None
    """Directory or hub name of the model that the critic starts from; null: the model that training
    starts from.
    """
    discount: Fraction = 1.0
    """Gamma, from one sampled token to the next."""
    decay: Fraction = 1.0
    """Lambda of GAE, from one sampled token to the next."""
    truncation: Truncation = Truncation.BOOTSTRAP
    """Treatment of a trajectory that was cut off: its end is worth V(s_T), or is worth 0; it is
    masked; its end is worth 0 and truncation_penalty is subtracted; or it is dropped.
    """
    truncation_penalty: NotNegative = 0.0
    """Subtracted from the return, with truncation penalty."""
    learning_rate: Rate = 1e-4
    """AdamW's learning rate after the warm-up."""
    warmup_updates: Natural = 5
    """Number of updates over which the learning rate grows linearly; one update a step."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    value_clip: Rate | None = 0.2
    """Largest change of a value in one step; null: no clip."""

    @property
    def truncation_rule(self) -> OutcomeRule:
        """The outcome rule of a trajectory that was cut off."""
        match self.truncation:
            case Truncation.BOOTSTRAP | Truncation.TERMINAL:
                return OutcomeRule(disposition=Disposition.TRAIN)
            case Truncation.MASK:
                return OutcomeRule(disposition=Disposition.MASK)
            case Truncation.PENALTY:
                penalised = Disposition.TRAIN_PENALISED
                return OutcomeRule(disposition=penalised, penalty=self.truncation_penalty)
            case Truncation.DROP:
                return OutcomeRule(disposition=Disposition.DROP)


class Aggregation(StrEnum):
    """The unit that has equal weight: tokens, trajectories, prompts (groups), or tokens at a fixed
    rate.
    """

    TOKEN_MEAN = "token_mean"
    TRAJECTORY_MEAN = "trajectory_mean"
    PROMPT_MEAN = "prompt_mean"
    CONSTANT = "constant"


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
    """Level of the importance ratio: each token, or the geometric mean of a trajectory (GSPO)."""
    denominator: Denominator = Denominator.BEHAVIOUR
    """Policy in the ratio's denominator: the sampler's, or the trainer's at the step's start."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """Unit that has equal weight in the update."""
    constant_tokens: Positive | None = None
    """Divisor of a trajectory, with aggregation constant; null: model.max_context_tokens."""
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
    """Factor of negative advantages; 0: only positive advantages are trained."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongSettings:
    """Soft punishment of length (DAPO)."""

    __pydantic_config__ = STRICT

    max_tokens: Positive
    """Number of sampled tokens of a trajectory that gets the full punishment; L_max."""
    cache_tokens: Positive
    """Tokens over which the punishment grows; L_cache, at most max_tokens."""
    factor: Rate = 1.0
    """Size of the full punishment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlRewardSettings:
    """KL(policy || reference) subtracted from the rewards, at each token."""

    __pydantic_config__ = STRICT

    coefficient: Rate
    """Amount subtracted from the return for each nat; beta."""
    estimator: Literal[KlEstimator.K1, KlEstimator.K3] = KlEstimator.K1
    """Estimator of the KL at each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """Shaping of returns before groups compare them; null and 0: not changed."""

    __pydantic_config__ = STRICT

    clip: tuple[float, float] | None = None
    """Lowest and highest return."""
    overlong: OverlongSettings | None = None
    missing_end_penalty: NotNegative = 0.0
    """Subtracted from the return if the last answer was cut off."""
    kl: KlRewardSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """The settings of groups, admission, advantages and loss."""

    __pydantic_config__ = STRICT

    groups_per_step: Positive = 16
    """P: groups that make one training step."""
    group_size: Positive = 16
    """Rollouts of one task that share a baseline."""
    min_group_size: Positive = 2
    """Usable members that a group must keep."""
    min_usable_samples: Positive | None = None
    """Close a group at this many usable members; null: when all ended."""
    max_lag: Natural = 0
    """S: versions that admission may run ahead; 0: synchronous."""
    window_groups: Positive | None = None
    """W: groups among which a step chooses the closed ones; null: P, or 1 with max_lag 0."""
    baseline: Baseline = Baseline.MEAN
    """What returns are compared with; critic: a value model, with GAE over tokens (PPO)."""
    scale: Scale = Scale.STD
    """What advantages divide by; std and mean need a group baseline."""
    turn_discount: Fraction | None = None
    """Credit by turn, later rewards discounted by this; null: by trajectory."""
    normalise_advantages: bool = False
    """Normalise them over all tokens of a step, after the group statistics (REINFORCE++)."""
    reward: RewardSettings = field(default_factory=RewardSettings)
    max_variance_refills: Natural = 0
    """Dynamic sampling: number of times that a group of equal returns is replaced by a new task."""
    loss: LossSettings = field(default_factory=LossSettings)
    reference: ModelName | None = None
    """The model that a KL term compares with, directory or hub name; null: the model that training
    starts from.
    """
    critic: CriticSettings = field(default_factory=CriticSettings)
    minibatches: Positive = 1
    """Optimiser updates that a step is split into."""
    epochs: Positive = 1
    """Passes over a step's data."""

    @property
    def has_critic(self) -> bool:
        return self.baseline is Baseline.CRITIC

    @property
    def bootstraps(self) -> bool:
        """Whether the end of a truncated trajectory has the value that a critic gives it."""
        return self.has_critic and self.critic.truncation is Truncation.BOOTSTRAP

    @property
    def has_group_baseline(self) -> bool:
        return self.baseline in (Baseline.MEAN, Baseline.LEAVE_ONE_OUT)

    @property
    def shapes_by_reference(self) -> bool:
        """Whether rewards need a reference's log-probabilities."""
        return self.reward.kl is not None

    @property
    def needs_reference(self) -> bool:
        """Whether the rewards or the loss compare with a reference."""
        return self.shapes_by_reference or self.loss.needs_reference

    @property
    def scores_first(self) -> bool:
        """Whether a critic or a reference must score the samples before advantages are made."""
        return self.has_critic or self.shapes_by_reference

    @property
    def trains_without_signal(self) -> bool:
        """Whether groups of equal returns are trained, with advantage 0.

        They are if the loss has a term (KL, entropy) whose gradient is not 0 there.
        """
        return self.loss.needs_reference or self.loss.needs_entropy_gradient

    @property
    def is_synchronous(self) -> bool:
        """Whether nothing is sampled by a version older than the trainer's."""
        return self.max_lag == 0

    @property
    def window(self) -> int:
        """W, with its default."""
        return self.window_groups or (1 if self.is_synchronous else self.groups_per_step)

    @property
    def max_policy_age(self) -> int:
        """S + ceil((W - 1) / P), versions (docs/semantics.md, Policy age).

        Examples: S=1, P=3, W=3 -> 2; S=3, P=8, W=9 -> 4; S=0, W=1 -> 0 (synchronous).
        """
        return self.max_lag + -(-(self.window - 1) // self.groups_per_step)

    @property
    def updates_per_step(self) -> int:
        """Number of the policy's optimiser updates in one step; a critic makes one."""
        return self.epochs * self.minibatches

    @property
    def rollouts_per_step(self) -> int:
        return self.groups_per_step * self.group_size
