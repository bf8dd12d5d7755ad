"""A rollout of an evaluation: its assignment, and its record as a line of JSON.

The line has every token that the engine received or returned, as the journal has for trained
rollouts. The environment actor, which has the tokenizer, makes the line, and
`service.run.actor_pool` writes it to a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from actors.environment.settings import Sampling
from actors.types import RolloutAssignment, Sample, Task, TokenIds, Trajectory, TrajectorySummary


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A set of tasks for an evaluation, and how the policy's answers to them are sampled."""

    name: str
    """The name of the set; empty: the run's own held-out tasks."""
    tasks: Sequence[Task]
    sampling: Sampling
    is_part: bool = False
    """Whether the set is one part of a mixture; all parts together are the run's held-out tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result of one rollout of an evaluation."""

    summary: TrajectorySummary
    line: Any = None
    """Reference to the bytes of `rollout_line` in the object store; None if not requested."""


def plays_of(tasks: Sequence[Task], num_samples: int) -> list[RolloutAssignment]:
    """Return the assignments of an evaluation: num_samples rollouts of each task.

    The rollouts of a task are adjacent in the list, and their ids end with the numbers 0, 1, ….
    """
    return [
        RolloutAssignment(
            rollout_id=f"evaluation-{task.task_id}-{number}",
            group_id=f"evaluation-{task.task_id}",
            group_number=-1,
            attempt=0,
            task=task,
        )
        for task in tasks
        for number in range(num_samples)
    ]


def rollout_line(trajectory: Trajectory, *, decode: Callable[[TokenIds], str]) -> bytes:
    """Return the record of an evaluation's rollout as a line of JSON, without a newline.

    trajectory: the result of an assignment from `plays_of`. decode: converts token ids to text.
    """
    components: Counter[str] = Counter()
    for turn in trajectory.turns:
        components.update(turn.reward_components)
    versions = trajectory.versions
    return msgspec.json.encode(
        {
            "task_id": trajectory.task_id,
            "sample": int(trajectory.rollout_id.rpartition("-")[2]),
            "environment": trajectory.environment,
            "outcome": trajectory.outcome,
            "detail": trajectory.detail,
            "return": trajectory.episode_return,
            "best_return": trajectory.best_return,
            "components": dict(components),
            "metrics": trajectory.metrics,
            "extra_columns": trajectory.extra_columns,
            "answer": trajectory.answer,
            "num_turns": len(trajectory.turns),
            "policy_versions": versions,
            "samples": [_sample(each, decode) for each in trajectory.samples],
        }
    )


def _sample(sample: Sample, decode: Callable[[TokenIds], str]) -> dict[str, Any]:
    """Return a sample as JSON; a token that was not sampled has 0 in `mask` and `logprobs`."""
    return {
        "token_ids": sample.token_ids.tolist(),
        "mask": sample.mask.tolist(),
        "logprobs": sample.logprobs.tolist(),
        "text": decode(sample.token_ids),
    }
