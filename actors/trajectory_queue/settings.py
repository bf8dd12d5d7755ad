"""The queue's part of the configuration, and the settings of its actor and of its players."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.algorithm import AlgorithmSettings
from actors.limits import MIB, STRICT, Positive
from actors.outcomes import OutcomePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Bounds on what is handed out and buffered.

    Above either bound, only the step that is being collected gets further rollouts.
    """

    __pydantic_config__ = STRICT

    max_items: Positive | None = None
    """Rollouts handed out or buffered; null: two steps more than the lag needs."""
    max_mib: Positive = 1024
    """Payload bytes buffered, MiB."""

    @property
    def max_bytes(self) -> int:
        return self.max_mib * MIB

    def max_items_with(self, algorithm: AlgorithmSettings) -> int:
        """Return the bound on rollouts handed out or buffered, with its default."""
        steps_ahead = algorithm.max_policy_age + 2
        return self.max_items or steps_ahead * algorithm.rollouts_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStateSettings:
    """The settings of the queue actor."""

    algorithm: AlgorithmSettings
    queue: QueueSettings
    num_steps: int | None = None
    """Steps of the whole run, beyond which no group is admitted; None: no limit."""
    policies: Mapping[str, OutcomePolicy] = field(default_factory=dict)
    """Outcome rules by environment; an environment that is absent has the defaults."""
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
    """The times and limits of a player's exchange with the queue."""

    poll_s: float = 1.0
    """Seconds that one request for assignments may wait in the queue."""
    tick_s: float = 0.02
    """Seconds; trajectories that finish within a tick are sent together."""
    max_block: int = 64
    """Largest number of trajectories that are sent together."""
    queue_deadline_s: float = 60.0
    """Seconds that the queue may take to answer beyond a poll."""
