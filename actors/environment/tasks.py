"""Task sources: which task has which index, the same in every process and after every restart.

Training tasks and held-out tasks never overlap: generated ones draw their seeds from disjoint
ranges, a file's are split by a hash of their ids. Called by the loop, which numbers the groups.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

from actors.types import Task

# Below 2^31, so that a seed suits every generator there is (some take 32 bits, some signed).
_SEEDS_PER_RANGE = 2**30


class TaskSource(Protocol):
    """Tasks by index, without end, and some that training never sees."""

    def task(self, index: int) -> Task:
        """The training task of this index, index >= 0."""
        ...

    def held_out(self, count: int) -> list[Task]:
        """The first `count` evaluation tasks. Raises: ValueError when there are fewer."""
        ...


def derived_seed(*parts: str | int) -> int:
    """Hash the parts to a seed in [0, 2^30), the same on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) % _SEEDS_PER_RANGE


class GeneratedTasks:
    """Tasks of an environment that makes a game from a seed alone.

    Training seeds lie in [0, 2^30), held-out seeds in [2^30, 2^31). The held-out tasks do not
    depend on the run's seed, so that two runs are evaluated on the same ones.
    """

    def __init__(
        self, environment: str, *, run_seed: int, data: Mapping[str, Any] | None = None
    ) -> None:
        self._environment = environment
        self._run_seed = run_seed
        self._data = dict(data or {})

    def task(self, index: int) -> Task:
        _check_index(index)
        return self._make("train", index, derived_seed("train", self._run_seed, index))

    def held_out(self, count: int) -> list[Task]:
        return [
            self._make("held-out", index, _SEEDS_PER_RANGE + derived_seed("held-out", index))
            for index in range(count)
        ]

    def _make(self, split: str, index: int, seed: int) -> Task:
        return Task(
            task_id=f"{self._environment}-{split}-{index}",
            environment=self._environment,
            seed=seed,
            data=self._data,
        )


class FileTasks:
    """A fixed list of tasks, repeated epoch after epoch, each in a seeded order of its own.

    The `num_held_out` tasks whose ids hash lowest are kept for evaluation: the same ones for
    every run seed, and for the same tasks in any order.
    """

    def __init__(self, tasks: Sequence[Task], *, run_seed: int, num_held_out: int = 0) -> None:
        if not 0 <= num_held_out < len(tasks):
            raise ValueError(
                f"task file: got {num_held_out} held-out tasks of {len(tasks)} tasks; expected "
                "at least one task left for training; hold out fewer, or write more tasks"
            )
        by_hash = sorted(tasks, key=lambda task: (derived_seed(task.task_id), task.task_id))
        self._held_out = by_hash[:num_held_out]
        self._train = by_hash[num_held_out:]
        self._run_seed = run_seed
        self._epoch = -1
        self._order: list[int] = []

    def task(self, index: int) -> Task:
        _check_index(index)
        epoch, position = divmod(index, len(self._train))
        if epoch != self._epoch:
            self._order = list(range(len(self._train)))
            random.Random(derived_seed("epoch", self._run_seed, epoch)).shuffle(self._order)
            self._epoch = epoch
        return self._train[self._order[position]]

    def held_out(self, count: int) -> list[Task]:
        if count > len(self._held_out):
            raise ValueError(
                f"task file: got a request for {count} held-out tasks, expected at most "
                f"{len(self._held_out)}; hold out more of the file, or evaluate on fewer"
            )
        return self._held_out[:count]


def _check_index(index: int) -> None:
    if index < 0:
        raise ValueError(f"task index: got {index}, expected 0 or more")
