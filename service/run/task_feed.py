"""The source of a run's tasks if clients submit none: the configured tasks and a curriculum.

If clients submit tasks, `service.backlog.queue` gives the loop the tasks instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from actors.environment.settings import CurriculumSettings
from actors.environment.tasks import OTHER_SOURCE, OTHER_TASK, SLOTS, TaskSource, derived_seed
from actors.merge.report import GroupReturns
from actors.trajectory_queue.groups import GroupRequest
from actors.trajectory_queue.messages import OpenSlot
from actors.types import Task

# The curriculum considers several tasks for a slot. These numbers are added to the slot's index:
# first those for other tasks of the same source, then those for the next sources.
_OTHERS = (*(n * OTHER_TASK for n in range(8)), *(n * OTHER_SOURCE for n in range(1, 9)))
_COIN_SIDES = 2**30


def task_index(slot: OpenSlot) -> int:
    """Return the index of a new group's task in the task source; a curriculum may choose another.

    slot: the new group's number, and how many earlier groups had the same number.
    The index is the same after every restart. A group that replaces another group gets a new index.
    """
    return slot.group_number + slot.replacement * SLOTS


class Curriculum:
    """Chooses the tasks to play; tasks that are too easy or too hard are played less often.

    A task is judged by its results: the share of passed samples in each of its newest groups. A
    task that can be played more than once has its own results. A task that is made from a seed is
    played only once, so all such tasks of an environment share their results. Each checkpoint
    stores the results, and a run that continues from the checkpoint restores them.
    """

    def __init__(
        self,
        settings: CurriculumSettings,
        source: TaskSource,
        *,
        results: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Start with stored results.

        results: an earlier value of the property `results`, such as the value that a checkpoint
        stores; None for no results.
        """
        self._settings = settings
        self._source = source
        self._results = {key: tuple(passed) for key, passed in (results or {}).items()}

    @property
    def results(self) -> dict[str, tuple[float, ...]]:
        """The share of passed samples in each of the newest groups of each task or environment.

        The oldest group is first. The key is the task's id, or the environment's name for tasks
        made from seeds.
        """
        return dict(self._results)

    def task(self, slot: OpenSlot) -> Task:
        """Choose the task that the group of an open slot plays."""
        index = task_index(slot)
        choices = (self._source.task(index + other) for other in _OTHERS)
        return choose(
            ((task, self._key(task)) for task in choices), self._results, self._settings, slot=index
        )

    def learn(self, groups: Sequence[GroupReturns]) -> None:
        """Add the share of passed samples of each group of a step to the results."""
        settings = self._settings
        for group in groups:
            if not group.returns:
                continue
            task = Task(task_id=group.task_id, environment=group.environment, seed=0)
            passed = [value >= settings.pass_reward for value in group.returns]
            key = self._key(task)
            newest = (*self._results.get(key, ()), sum(passed) / len(passed))
            self._results[key] = newest[-settings.window :]

    def _key(self, task: Task) -> str:
        return task.task_id if self._source.comes_again(task) else task.environment


class ConfiguredTasks:
    """An endless source of tasks: group k plays task k, or the task that the curriculum chooses."""

    def __init__(
        self,
        source: TaskSource,
        *,
        group_size: int,
        min_usable_samples: int | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._source = source
        self._group_size = group_size
        self._min_usable_samples = min_usable_samples
        self._curriculum = curriculum

    async def fill(self, slots: Sequence[OpenSlot]) -> list[GroupRequest]:
        # Run this in a thread, because a large task file is shuffled for each of its epochs.
        return await asyncio.to_thread(self._fill, slots)

    def _fill(self, slots: Sequence[OpenSlot]) -> list[GroupRequest]:
        return [
            GroupRequest(
                group_number=slot.group_number,
                task=self._task(slot),
                num_samples=self._group_size,
                min_usable_samples=self._min_usable_samples,
            )
            for slot in slots
        ]

    def _task(self, slot: OpenSlot) -> Task:
        if self._curriculum is None:
            return self._source.task(task_index(slot))
        return self._curriculum.task(slot)


def choose(
    choices: Iterable[tuple[Task, str]],
    results: Mapping[str, Sequence[float]],
    settings: CurriculumSettings,
    *,
    slot: int,
) -> Task:
    """Return the first of `choices` that may be played now.

    A task rests (`is_resting`) if almost all or almost none of its last samples passed: its
    advantages are then 0, and it teaches nothing. A resting task is played only with the
    probability `resting_share`, to notice if its results change. If no task may be played now,
    return the first of `choices`.

    Args: choices: one or more tasks, each with its key in `results`. results: for each key, the
    share of passed samples in each of the newest groups, oldest first. slot: index of the group to
    fill. The random choice depends only on the index and the key, so a restart repeats it.
    """
    first: Task | None = None
    for task, key in choices:
        first = first or task
        coin = derived_seed("curriculum", slot, key) / _COIN_SIDES
        if not is_resting(results.get(key, ()), settings) or coin < settings.resting_share:
            return task
    assert first is not None
    return first


def is_resting(passed: Sequence[float], settings: CurriculumSettings) -> bool:
    """Return whether a task rests, because too many or too few samples of its last groups passed.

    passed: for each group, the share of samples that passed. The last `window` groups count; with
    fewer groups, the task does not rest. Example: with window 2 the task rests for [1, 1] or [0,
    0], not for [0.5, 0] or [1].
    """
    newest = passed[-settings.window :]
    if len(newest) < settings.window:
        return False
    mean = sum(newest) / len(newest)
    return mean >= settings.solved_from or mean <= settings.hopeless_to
