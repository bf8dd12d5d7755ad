"""The settings of step building: parts of the configuration, and the shape of the trained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.algorithm import AlgorithmSettings
from actors.expert_records import ModelShape
from actors.outcomes import OutcomePolicy
from actors.trainer.settings import TrainerSettings
from actors.types import Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The settings for building a batch, which are the same for every step until a restart."""

    algorithm: AlgorithmSettings
    trainer: TrainerSettings
    max_context_tokens: int
    """The divisor of the aggregation `constant` if `algorithm.loss.constant_tokens` is null."""
    seed: int
    """Seed of the split into minibatches."""
    policies: Mapping[str, OutcomePolicy] = field(default_factory=dict)
    """Outcome rules by environment; an environment that is absent has the defaults."""
    temperatures: Mapping[str, float] = field(default_factory=dict)
    """Training temperature by environment; 1 for an environment that is absent."""
    shape: ModelShape | None = None
    """Vocabulary and routing of the trained model, for `find_misfit`; None to check nothing."""
    attention_tokens: int = 8192
    """Sample length at which attention costs as much as all other computation; used to balance the
    costs of the ranks.
    """

    def temperature_of(self, trajectory: Attempt) -> float:
        """Return the temperature at which a trajectory's tokens were sampled."""
        return self.temperatures.get(trajectory.environment, 1.0)

    @property
    def constant_tokens(self) -> int:
        """The number by which the aggregation `constant` divides the loss of each trajectory."""
        return self.algorithm.loss.constant_tokens or self.max_context_tokens
