"""What an environment actor is told, and what it tells of itself. Plain values, no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.environment.turn_loop import EpisodeSettings
from actors.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """One environment that an actor can play: its registered name, options and limits."""

    name: str
    episode: EpisodeSettings
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentActorSettings:
    """What one environment actor is told.

    slots: episodes at once. template_options: passed to the chat template. poll_s: how long one
    request for assignments may wait in the queue. tick_s, max_block: trajectories that finish
    within a tick travel together, at most max_block of them. queue_deadline_s: how long the queue
    may take to answer beyond a poll; put_attempts: of the same block (the queue knows a
    trajectory that it has already).
    """

    actor_id: str
    environments: tuple[EnvironmentSettings, ...]
    slots: int = 128
    template_options: Mapping[str, Any] = field(default_factory=dict)
    poll_s: float = 1.0
    tick_s: float = 0.02
    max_block: int = 64
    queue_deadline_s: float = 60.0
    put_attempts: int = 4

    def __post_init__(self) -> None:
        if min(self.slots, self.max_block, self.put_attempts) < 1 or not self.environments:
            raise ValueError(
                f"environment actor: got slots={self.slots}, max_block={self.max_block}, "
                f"put_attempts={self.put_attempts}, {len(self.environments)} environments; "
                "expected each to be 1 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentActorStatus:
    """Counts since the actor's start, but num_running, num_unsent, num_stuck: at this moment.

    num_refused: trajectories that the queue did not want (a rollout given to another actor
    meanwhile). num_stuck: environment calls that ignore their cancellation.
    """

    actor_id: str
    slots: int
    is_running: bool
    num_running: int
    num_unsent: int
    num_stuck: int
    num_taken: int
    num_sent: int
    num_refused: int
    num_evaluated: int
    num_turns: int
    num_sampled: int
    num_inserted_tokens: int
    outcomes: Mapping[Outcome, int]
    render_breaks: Mapping[str, int]
