"""The queue's part of the configuration, and the settings of the queue actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.algorithm import AlgorithmSettings
from actors.limits import MIB, STRICT, Positive
from actors.outcomes import OutcomePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Bounds on the rollouts that are handed out or buffered.

    If either bound is reached, the queue hands out only rollouts of the step that is being
    collected. It hands out no rollouts of later steps.
    """

    __pydantic_config__ = STRICT

    max_items: Positive | None = None
    """Largest number of rollouts handed out or buffered; null: the rollouts of A + 2 steps, where A
    is the largest policy age."""
    max_mib: Positive = 1024
    """Largest size of the buffered payloads, in MiB."""

    @property
    def max_bytes(self) -> int:
        return self.max_mib * MIB

    def max_items_with(self, algorithm: AlgorithmSettings) -> int:
        """Return the bound on rollouts handed out or buffered: max_items or its default."""
        steps_ahead = algorithm.max_policy_age + 2
        return self.max_items or steps_ahead * algorithm.rollouts_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStateSettings:
    """The settings of the queue actor."""

    algorithm: AlgorithmSettings
    queue: QueueSettings
    num_steps: int | None = None
    """Number of steps of the whole run, beyond which no group is admitted; None for no limit."""
    policies: Mapping[str, OutcomePolicy] = field(default_factory=dict)
    """Outcome rules by environment; an environment that is absent has the defaults."""
    durable: frozenset[str] = frozenset()
    """Names of the environments whose turns are stored when they are sampled. If an actor dies, no
    turn is lost, so its rollouts are handed out again without counting a failed attempt."""
    scores_groups: frozenset[str] = frozenset()
    """Names of the environments whose groups are scored as a whole after all their rollouts have
    ended."""

    @property
    def max_items(self) -> int:
        return self.queue.max_items_with(self.algorithm)

    @property
    def max_bytes(self) -> int:
        return self.queue.max_bytes

    def policy(self, environment: str) -> OutcomePolicy:
        return self.policies.get(environment, OutcomePolicy())
