"""The algorithm's settings, which the queue, the merge actor and the trainer must share.

The module declares the section `algorithm` of the configuration, and computes values that derive
from its settings, such as the learning rate of an update. It imports neither Ray nor torch. The
functions of the loss (`actors/trainer/loss`, docs/algorithms.md) do not use `aggregation`: the
merge actor turns this setting into a weight for each token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from annotated_types import Gt, Lt

from actors.limits import STRICT, Fraction, ModelName, Natural, NotNegative, Positive, Rate, Share
from actors.outcomes import Disposition, OutcomeRule


class Baseline(StrEnum):
    """The value that is subtracted from a return."""

    MEAN = "mean"
    LEAVE_ONE_OUT = "leave_one_out"
    NONE = "none"
    CRITIC = "critic"


class Scale(StrEnum):
    """The divisor of the difference between a return and its baseline."""

    NONE = "none"
    STD = "std"
    MEAN = "mean"


Truncation = Literal["bootstrap", "terminal", "mask", "penalty", "drop"]
ScheduleKind = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """The decay of a learning rate after its warm-up."""

    __pydantic_config__ = STRICT

    kind: ScheduleKind = "constant"
    """constant: no decay; linear, cosine: decay from the end of the warm-up; wsd: constant, then
    linear decay over the last decay_updates."""
    updates: Positive | None = None
    """Number of updates, including the warm-up, after which the rate stays at its minimum; null:
    all updates of run.steps."""
    decay_updates: Positive | None = None
    """Number of updates over which the rate decays, at the end of `updates`; only with wsd."""
    min_ratio: Fraction = 0.0
    """The minimum rate, as a fraction of the learning rate."""


def learning_rate_at(
    num_updates: int,
    *,
    learning_rate: float,
    warmup_updates: int,
    schedule: ScheduleSettings,
) -> float:
    """Return the learning rate of the update after `num_updates` applied updates.

    The rate depends only on the arguments, so a checkpoint needs no state of a scheduler.
    - Warm-up: rate = learning_rate (num_updates + 1) / warmup_updates.
    - Afterwards: rate = learning_rate (m + (1 - m) f), with m = min_ratio. The factor f is 1
      (constant), 1 - p (linear, wsd) or (1 + cos(pi p)) / 2 (cosine).
    - Decay: p rises linearly from 0 to 1. The decay begins at the end of the warm-up, or with wsd
      at update `updates - decay_updates`. The decay ends at update `updates`.

    Source: transformers' `get_scheduler`. Deviation: here the warm-up begins at
    learning_rate / warmup_updates; in transformers it begins at 0, or with wsd at the minimum rate.

    Args: schedule: `updates` must be set unless the kind is constant.
    Examples, with learning_rate 1 and warmup_updates 4: constant -> .25, .5, .75, 1, 1, …;
        linear, updates 8 -> .25, .5, .75, 1, 1, .75, .5, .25, 0, 0, …
    """
    if num_updates < warmup_updates:
        return learning_rate * min(1.0, (num_updates + 1) / warmup_updates)
    if schedule.kind == "constant":
        return learning_rate
    end, begin = schedule.updates, warmup_updates
    assert end is not None, "a schedule that decays has an end"
    if schedule.kind == "wsd":
        assert schedule.decay_updates is not None, "wsd has the length of its decay"
        begin = end - schedule.decay_updates
    if num_updates >= end:
        factor = 0.0
    elif num_updates <= begin:
        factor = 1.0
    else:
        progress = (num_updates - begin) / (end - begin)
        is_cosine = schedule.kind == "cosine"
        factor = 0.5 * (1.0 + math.cos(math.pi * progress)) if is_cosine else 1.0 - progress
    return learning_rate * (factor * (1.0 - schedule.min_ratio) + schedule.min_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """A value model, and GAE over its values (PPO); used only if the baseline is critic.

    The value model has its own learning rate. Its optimiser's other settings are those of the
    policy's optimiser, in the section `trainer`.
    """

    __pydantic_config__ = STRICT

    model: ModelName | None = None
    """Directory or hub name of the model that the critic starts from; null: the model that training
    starts from.
    """
    discount: Fraction = 1.0
    """Discount (gamma) from one sampled token to the next."""
    decay: Fraction = 1.0
    """Lambda of GAE, from one sampled token to the next."""
    truncation: Truncation = "bootstrap"
    """How a trajectory that was cut off is treated. bootstrap: the value after its last token is
    V(s_T), the critic's value of its last state. terminal: that value is 0. mask: the trajectory is
    not in the loss. penalty: as terminal, and truncation_penalty is subtracted from its return.
    drop: it is left out.
    """
    truncation_penalty: NotNegative = 0.0
    """Amount subtracted from the return of a trajectory that was cut off, if truncation is
    penalty.
    """
    learning_rate: Share = 1e-4
    """AdamW's learning rate after the warm-up."""
    warmup_updates: Natural = 5
    """Number of updates over which the learning rate grows linearly; a step has one update."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    value_clip: Rate | None = 0.2
    """Clip of the value loss: the largest change of a state's value in one step; null: no clip."""

    @property
    def truncation_rule(self) -> OutcomeRule:
        """The rule for truncated trajectories: train, mask, penalise or drop them."""
        match self.truncation:
            case "bootstrap" | "terminal":
                return OutcomeRule(disposition=Disposition.TRAIN)
            case "mask":
                return OutcomeRule(disposition=Disposition.MASK)
            case "penalty":
                penalised = Disposition.TRAIN_PENALISED
                return OutcomeRule(disposition=penalised, penalty=self.truncation_penalty)
            case "drop":
                return OutcomeRule(disposition=Disposition.DROP)


Aggregation = Literal["token_mean", "trajectory_mean", "prompt_mean", "constant"]
"""The unit that has equal weight in an update: each token, trajectory or prompt (group), or each
token with a constant divisor.
"""


class Objective(StrEnum):
    """The policy objective, which limits how far a token's probability moves.

    `actors.trainer.loss.objectives` computes it.
    """

    PPO_CLIP = "ppo_clip"
    DUAL_CLIP = "dual_clip"
    CISPO = "cispo"
    REINFORCE = "reinforce"
    SAPO = "sapo"
    DPPO_TV = "dppo_tv"
    DPPO_KL = "dppo_kl"


Denominator = Literal["behaviour", "old"]
"""The policy in the ratio's denominator: the sampler's, or the trainer's at the step's start."""
KlEstimator = Literal["k1", "k2", "k3"]
"""Schulman's three estimators of KL(q || p) from samples of q
(`actors.trainer.loss.divergence`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlSettings:
    """A term KL(policy || reference) in the loss."""

    __pydantic_config__ = STRICT

    coefficient: NotNegative = 0.0
    """Weight of the term; if 0, no reference model is loaded for this term."""
    estimator: KlEstimator = "k3"
    """Estimator of the KL at each token."""
    corrected: bool = False
    """Whether the estimate at each token is multiplied by the ratio policy / sampler; required with
    k1.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The loss that an update minimises; the defaults are PPO's clip against the behaviour policy.

    The fields `token_band`, `sequence_band` and `outlier_below` leave tokens out of training if
    trainer and sampler disagree too much. The fields limit the ratio trainer / sampler, which is
    the trainer's probability of the token, divided by the sampler's probability. If `denominator`
    is old, the trainer's probability at the step's start is used, otherwise the current
    probability.
    """

    __pydantic_config__ = STRICT

    objective: Objective = Objective.PPO_CLIP
    """Policy objective, which limits how far a token's probability moves."""
    ratio: Literal["token", "sequence"] = "token"
    """Level of the importance ratio: each token, or the geometric mean of a trajectory (GSPO)."""
    denominator: Denominator = "behaviour"
    """Policy in the ratio's denominator: the sampler's, or the trainer's at the step's start."""
    aggregation: Aggregation = "token_mean"
    """Unit that has equal weight in the update."""
    constant_tokens: Positive | None = None
    """Divisor of a trajectory, with aggregation constant; null: model.max_context_tokens."""
    clip_low: Share = 0.2
    """The ratio is clipped below 1 - clip_low (ppo_clip, dual_clip, cispo)."""
    clip_high: Rate = 0.28
    """The ratio is clipped above 1 + clip_high (ppo_clip, dual_clip, cispo)."""
    dual_clip: Annotated[float, Gt(1)] = 3.0
    """With objective dual_clip, a token of negative advantage has no gradient if its ratio exceeds
    this value. The value must exceed 1, the ratio of a token whose probability has not changed.
    """
    ratio_cap: Rate = 20.0
    """Upper limit of the ratio that weights a token's gradient (reinforce, dppo_*)."""
    sapo_tau_positive: Rate = 1.0
    """Steepness of SAPO's gate for advantages above 0."""
    sapo_tau_negative: Rate = 1.05
    """Steepness of SAPO's gate for advantages below 0."""
    divergence_bound: Rate = 0.15
    """Size of the trust region of dppo_tv and dppo_kl; 0.05 suits dppo_kl."""
    negative_weight: NotNegative = 1.0
    """Factor of negative advantages; 0: only positive advantages are trained."""
    correction: Literal["none", "truncate_token", "truncate_sequence"] = "none"
    """Importance weight old / behaviour, truncated for each token or for each trajectory; only with
    denominator old.
    """
    correction_cap: Rate = 2.0
    """Upper limit of the importance weight (`correction`)."""
    token_band: tuple[Rate, Rate] | None = None
    """Tokens whose ratio trainer / sampler is outside this range are not trained."""
    sequence_band: tuple[Rate, Rate] | None = None
    """Trajectories whose geometric-mean ratio is outside this range are not trained."""
    outlier_below: Annotated[float, Gt(0), Lt(1)] | None = None
    """A trajectory is not trained if the ratio trainer / sampler of any of its tokens is below this
    value.
    """
    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus. The bonus is the entropy of all trained tokens, weighted as in
    the loss; tokens that a band or outlier_below removes from the policy loss are included."""
    kl: KlSettings = field(default_factory=KlSettings)

    @property
    def needs_old(self) -> bool:
        """Whether the loss needs the trainer's log-probabilities at the step's start."""
        return self.denominator == "old"

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient != 0.0

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coefficient != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongSettings:
    """A penalty on the return that grows as a trajectory nears its largest length (DAPO)."""

    __pydantic_config__ = STRICT

    max_tokens: Positive
    """Number of sampled tokens at which a trajectory gets the full punishment; L_max."""
    cache_tokens: Positive
    """Number of sampled tokens over which the punishment grows; L_cache, at most max_tokens."""
    factor: Rate = 1.0
    """Size of the full punishment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlRewardSettings:
    """The divergence KL(policy || reference), which is subtracted from the reward of each token."""

    __pydantic_config__ = STRICT

    coefficient: Rate
    """Amount subtracted from the return for each nat of the KL; beta."""
    estimator: Literal["k1", "k3"] = "k1"
    """Estimator of the KL at each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """Changes to the returns, made before the returns of a group are compared.

    A setting of null or 0 turns its change off.
    """

    __pydantic_config__ = STRICT

    clip: tuple[float, float] | None = None
    """Lowest and highest return, to which returns are clipped."""
    overlong: OverlongSettings | None = None
    missing_end_penalty: NotNegative = 0.0
    """Amount subtracted from the return if the last answer was cut off."""
    kl: KlRewardSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCreditSettings:
    """A second advantage, added to the group's advantage (GiGPO).

    It compares a turn with the turns of the same group that began in the same state of the
    environment.
    """

    __pydantic_config__ = STRICT

    weight: Rate = 1.0
    """Weight of the advantage that compares a turn with the group's turns that met the same state;
    omega.
    """
    discount: Fraction = 1.0
    """Discount of later rewards, from one turn to the next; gamma."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """The settings of groups, admission, advantages and loss."""

    __pydantic_config__ = STRICT

    groups_per_step: Positive = 16
    """P: number of groups in a training step."""
    group_size: Positive = 16
    """Number of rollouts of one task; they share a baseline."""
    min_group_size: Positive = 2
    """Number of usable members that a group needs to be trained; a member is usable if its return
    counts in the group's baseline."""
    min_usable_samples: Positive | None = None
    """Number of usable members at which a group closes; null: a group closes when all its members
    have ended.
    """
    max_lag: Natural = 0
    """S: number of versions that admission may run ahead of training; 0: synchronous."""
    window_groups: Positive | None = None
    """W: a step takes each of its groups from W consecutive group numbers, the first of which is
    the oldest that no step has taken; null: P, or 1 with max_lag 0."""
    baseline: Baseline = Baseline.MEAN
    """Value subtracted from returns; critic: the estimate of a value model, with GAE over tokens
    (PPO).
    """
    scale: Scale = Scale.STD
    """Divisor of advantages; std and mean need a group baseline."""
    turn_discount: Fraction | None = None
    """Discount of later rewards, with one advantage for each turn; null: one advantage for each
    trajectory.
    """
    state_credit: StateCreditSettings | None = None
    normalise_advantages: bool = False
    """Whether advantages are normalised over all tokens of a step, after the group statistics
    (REINFORCE++).
    """
    reward: RewardSettings = field(default_factory=RewardSettings)
    max_variance_refills: Natural = 0
    """Dynamic sampling: number of times that a group of equal returns is replaced by a new task."""
    loss: LossSettings = field(default_factory=LossSettings)
    reference: ModelName | None = None
    """Directory or hub name of the model that a KL term compares with; null: the model that
    training starts from.
    """
    critic: CriticSettings = field(default_factory=CriticSettings)
    minibatches: Positive = 1
    """Number of optimiser updates that a step is split into."""
    epochs: Positive = 1
    """Number of passes over a step's data."""

    @property
    def has_critic(self) -> bool:
        return self.baseline is Baseline.CRITIC

    @property
    def bootstraps(self) -> bool:
        """Whether a truncated trajectory's advantages use the critic's value of its last state.

        Otherwise that state has the value 0.
        """
        return self.has_critic and self.critic.truncation == "bootstrap"

    @property
    def has_group_baseline(self) -> bool:
        return self.baseline in (Baseline.MEAN, Baseline.LEAVE_ONE_OUT)

    @property
    def shapes_by_reference(self) -> bool:
        """Whether rewards need the reference model's log-probabilities."""
        return self.reward.kl is not None

    @property
    def needs_reference(self) -> bool:
        """Whether the rewards or the loss need the reference model's log-probabilities."""
        return self.shapes_by_reference or self.loss.needs_reference

    @property
    def scores_first(self) -> bool:
        """Whether a critic or a reference must score the samples before advantages are computed."""
        return self.has_critic or self.shapes_by_reference

    @property
    def trains_without_signal(self) -> bool:
        """Whether groups of equal returns are trained, with advantage 0.

        Such groups are trained if the loss has a KL term or an entropy bonus, whose gradient does
        not depend on the advantage.
        """
        return self.loss.needs_reference or self.loss.needs_entropy_gradient

    @property
    def is_synchronous(self) -> bool:
        """Whether a step's groups are admitted only after the previous step has been trained."""
        return self.max_lag == 0

    @property
    def window(self) -> int:
        """The size W of the window of groups from which a step chooses its next group.

        Groups are numbered in the order of admission. The window begins at the oldest group that no
        step has taken. Example: W = 3 and the oldest such group is 5 -> choose from 5, 6 and 7.
        If `window_groups` is null, W is P (`groups_per_step`), or 1 if training is synchronous.
        """
        return self.window_groups or (1 if self.is_synchronous else self.groups_per_step)

    @property
    def max_policy_age(self) -> int:
        """The largest age in versions that a token may have when it is trained.

        It is S + ceil((W - 1) / P), with S = max_lag, W = window and P = groups_per_step.
        See docs/semantics.md, Policy age.
        Examples: S=1, P=3, W=3 -> 2; S=3, P=8, W=9 -> 4; S=0, W=1 -> 0 (synchronous).
        """
        return self.max_lag + -(-(self.window - 1) // self.groups_per_step)

    @property
    def updates_per_step(self) -> int:
        """Number of the policy's optimiser updates in one step; a critic is updated once."""
        return self.epochs * self.minibatches

    @property
    def rollouts_per_step(self) -> int:
        return self.groups_per_step * self.group_size
