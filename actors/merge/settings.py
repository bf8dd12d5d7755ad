"""What a step is built with: parts of the configuration, and the shape of the trained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.algorithm import AlgorithmSettings
from actors.expert_records import ModelShape
from actors.outcomes import OutcomePolicy
from actors.trainer.settings import TrainerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Held by the merge actor for a whole term of a run."""

    algorithm: AlgorithmSettings
    trainer: TrainerSettings
    max_context_tokens: int
    """The divisor of aggregation constant where `algorithm.loss.constant_tokens` is not set."""
    seed: int
    """Seeds the split into minibatches."""
    policies: Mapping[str, OutcomePolicy] = field(default_factory=dict)
    """Outcome rules by environment, the defaults where it has none."""
    shape: ModelShape | None = None
    """Vocabulary and routing of the trained model, for `find_misfit`; None: not checked."""
    attention_tokens: int = 8192
    """Sample length at which attention costs as much as all the rest, for the balance of ranks."""

    @property
    def constant_tokens(self) -> int:
        """The divisor of aggregation constant, tokens for each trajectory."""
        return self.algorithm.loss.constant_tokens or self.max_context_tokens
