"""The queue's part of the configuration, and what its actor and its players are started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.algorithm import AlgorithmSettings
from actors.limits import MIB, STRICT, Positive
from actors.outcomes import OutcomePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Bounds on what is handed out and buffered.

    Above either, only the step that is being collected gets further rollouts.
    """

    __pydantic_config__ = STRICT

    max_items: Positive | None = None
    """Rollouts in hand or buffered; null: two steps more than the lag needs."""
    max_mib: Positive = 1024
    """Payload bytes buffered, MiB."""

    @property
    def max_bytes(self) -> int:
        return self.max_mib * MIB

    def max_items_with(self, algorithm: AlgorithmSettings) -> int:
        """Rollouts in hand or buffered, with the default."""
        steps_ahead = algorithm.max_policy_age + 2
        return self.max_items or steps_ahead * algorithm.rollouts_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStateSettings:
    """All that the queue actor is started with."""

    algorithm: AlgorithmSettings
    queue: QueueSettings
    num_steps: int | None = None
    """Steps of the whole run, beyond which no group is admitted; None: without end."""
    policies: Mapping[str, OutcomePolicy] = field(default_factory=dict)
    """Outcome rules by environment; the defaults where it has none."""
    durable: frozenset[str] = frozenset()
    """Environments whose turns are stored as they are sampled: an actor that dies takes none with
    it, so that its rollouts are handed out again without a failed attempt."""
    scores_groups: frozenset[str] = frozenset()
    """Names of the environments whose groups are scored together, once all rollouts of a group have
    ended."""

    @property
    def max_items(self) -> int:
        return self.queue.max_items_with(self.algorithm)

    @property
    def max_bytes(self) -> int:
        return self.queue.max_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """How a player takes rollouts and hands over trajectories."""

    poll_s: float = 1.0
    """How long one request for assignments may wait in the queue."""
    tick_s: float = 0.02
    """Trajectories that finish within a tick travel together."""
    max_block: int = 64
    """Trajectories that travel together at most."""
    queue_deadline_s: float = 60.0
    """How long the queue may take to answer beyond a poll."""
