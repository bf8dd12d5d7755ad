"""The algorithm: what the queue, the merge actor and the trainer must agree on.

`algorithm` of the configuration, each setting declared once, with what is derived from it. Plain
values: no Ray, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.limits import STRICT, Fraction, ModelName, Natural, Positive
from actors.merge.advantages import Baseline, CriticSettings, Scale, Truncation
from actors.merge.shaping import RewardSettings
from actors.trainer.loss.settings import LossSettings


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
