"""Functions that fill, play, finalise and restart the queue's state machine in tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from pydantic import TypeAdapter

from actors.trajectory_queue.groups import BlockRow, Group, GroupRequest
from actors.trajectory_queue.ledger import LedgerCounts
from actors.trajectory_queue.messages import QueueCut, QueueSnapshot, QueueStats
from actors.trajectory_queue.settings import QueueStateSettings
from actors.trajectory_queue.state import QueueState
from actors.types import Outcome, RolloutAssignment
from worlds.builders.settings import queue_settings
from worlds.builders.trajectory_builders import make_summary, make_task

Value = TypeVar("Value")
# The environment of the tasks of `make_task`.
GAME = ("game",)


def make_settings(
    *, step: int = 2, lag: int = 1, window: int = 2, max_items: int = 100, **fields: object
) -> QueueStateSettings:
    return queue_settings(
        groups_per_step=step, max_lag=lag, window_groups=window, max_items=max_items, **fields
    )


def fill(
    queue: QueueState,
    *,
    num_samples: int = 2,
    enough: int | None = None,
    environments: Sequence[str] = GAME,
) -> list[int]:
    """Admit a group for each free slot, with the environments in turn. Return the group numbers."""
    numbers = [slot.group_number for slot in queue.admissible()]
    queue.admit(
        [
            GroupRequest(
                group_number=number,
                task=replace(
                    make_task(number), environment=environments[number % len(environments)]
                ),
                num_samples=num_samples,
                min_usable_samples=enough,
            )
            for number in numbers
        ]
    )
    return numbers


def queue_stats(ledger: LedgerCounts) -> QueueStats:
    """Return an empty queue's statistics, with this ledger and 1.5 s as the longest wait."""
    return replace(QueueState(make_settings()).stats(), ledger=ledger, oldest_s=1.5)


def take(
    queue: QueueState, count: int, *, actor: str = "a", environments: Collection[str] = GAME
) -> list[RolloutAssignment]:
    return queue.take_rollouts(actor, max_count=count, environments=environments)


def take_all(
    queue: QueueState, *, actor: str = "a", environments: Collection[str] = GAME
) -> list[RolloutAssignment]:
    return take(queue, 1000, actor=actor, environments=environments)


def end(
    queue: QueueState,
    assignment: RolloutAssignment,
    *,
    outcome: Outcome = Outcome.COMPLETED,
    actor: str = "a",
    num_bytes: int = 100,
    version: int = 0,
    reward: float = 0.0,
    num_sampled: int = 2,
    arrived_at: float = 0.0,
) -> bool:
    """Hand in the trajectory of an assignment. Return whether the queue accepted it."""
    summary = make_summary(
        assignment.rollout_id,
        attempt=assignment.attempt,
        outcome=outcome,
        num_bytes=num_bytes,
        version=version,
        reward=reward,
    )
    summary = replace(summary, num_sampled=num_sampled)
    payload = BlockRow(block=object(), row=0, num_bytes=num_bytes, arrived_at=arrived_at)
    return queue.put(actor, summary, payload)


def finalise_all(queue: QueueState, step: int, groups: Sequence[Group]) -> list[str]:
    """Finalise a step in which every finished rollout is trained. Return the rollouts' ids."""
    rollouts = [rollout.rollout_id for group in groups for rollout in group.finished()]
    queue.finalise(step, dict.fromkeys(rollouts))
    return rollouts


def restart(queue: QueueState) -> QueueState:
    """Return a new queue that is restored from a snapshot of the old one, through JSON."""
    return QueueState(queue.settings, snapshot=through_json(queue.snapshot()))


def cut(queue: QueueState) -> tuple[QueueSnapshot, QueueCut]:
    """Drain the queue. Return its snapshot after that, and the events that it drained."""
    drained = queue.drain()
    return queue.snapshot(), drained


def through_json(value: Value) -> Value:
    """Write a dataclass as JSON, and return what is read from it."""
    adapter = TypeAdapter(type(value))
    return adapter.validate_json(adapter.dump_json(value))


def evicted(queue: QueueState) -> dict[str, int]:
    return {str(reason): count for reason, count in queue.stats().ledger.evicted.items()}
