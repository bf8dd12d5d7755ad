"""The loop's source of tasks, and the one of a run that plays its configuration's own tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from actors.environment.tasks import TaskSource
from actors.trajectory_queue.groups import GroupRequest
from actors.trajectory_queue.messages import OpenSlot

# Replacement r of group k plays task k + r * 2^32, which is no other group's first task.
_REPLACEMENT_STRIDE = 2**32


class TaskFeed(Protocol):
    """Gives group numbers their tasks: the configuration's task set, or what clients submit."""

    async def fill(self, slots: Sequence[OpenSlot]) -> list[GroupRequest]:
        """Tasks for as many of these open slots as there are tasks now, in order.

        May wait a moment for the first one; an empty list means that none came.
        """
        ...


def task_index(slot: OpenSlot) -> int:
    """The task of an open slot, the same after every restart."""
    return slot.group_number + slot.replacement * _REPLACEMENT_STRIDE


class ConfiguredTasks:
    """An endless task source: group number k always plays task k."""

    def __init__(
        self, source: TaskSource, *, group_size: int, min_usable_samples: int | None = None
    ) -> None:
        self._source = source
        self._group_size = group_size
        self._min_usable_samples = min_usable_samples

    async def fill(self, slots: Sequence[OpenSlot]) -> list[GroupRequest]:
        # A large task file is shuffled for each of its epochs.
        return await asyncio.to_thread(self._fill, slots)

    def _fill(self, slots: Sequence[OpenSlot]) -> list[GroupRequest]:
        return [
            GroupRequest(
                group_number=slot.group_number,
                task=self._source.task(task_index(slot)),
                num_samples=self._group_size,
                min_usable_samples=self._min_usable_samples,
            )
            for slot in slots
        ]
