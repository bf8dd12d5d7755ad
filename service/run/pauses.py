"""The parts of a run that an operator has paused, and the gates at which the loop waits meanwhile.

The parts are admission, training and generation (`Pausable`). A pause is stored in the database,
and lasts until the operator resumes the part, even with a new term or a new supervisor. The loop
waits at the gates of admission and training. If generation is paused, nothing waits at its gate:
`service.run.term` stops the queue and the engines directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from service.store.controls import PauseAnswer
from service.store.tables import Pausable


class Gate:
    """A point that code may pass only while the gate is open.

    Closing the gate does not interrupt code that has passed it.
    """

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._num_passing = 0
        self._passed = asyncio.Event()
        self._passed.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def until_open(self) -> None:
        await self._opened.wait()

    @contextmanager
    def passing(self) -> Iterator[bool]:
        """Yield whether the gate is open; if it is closed, the `with` block must not do its work.

        `until_passed` waits for the end of each block that found the gate open.
        """
        if not self.is_open:
            yield False
            return
        self._num_passing += 1
        self._passed.clear()
        try:
            yield True
        finally:
            self._num_passing -= 1
            if self._num_passing == 0:
                self._passed.set()

    def open(self) -> None:
        self._opened.set()

    def shut(self) -> None:
        """Close the gate."""
        self._opened.clear()

    async def until_passed(self) -> None:
        """Wait until all blocks that are passing the gate (see `passing`) have ended."""
        await self._passed.wait()


class Pauses:
    """The paused parts of a run, and a gate for each part, which is closed during a pause."""

    def __init__(self) -> None:
        self._paused: dict[Pausable, PauseAnswer] = {}
        self._gates = {part: Gate() for part in Pausable}

    def gate(self, part: Pausable) -> Gate:
        return self._gates[part]

    def find(self, part: Pausable) -> PauseAnswer | None:
        return self._paused.get(part)

    @property
    def paused(self) -> tuple[PauseAnswer, ...]:
        """The current pauses, in the order of `Pausable`."""
        return tuple(self._paused[part] for part in Pausable if part in self._paused)

    @property
    def holds_generation(self) -> bool:
        return Pausable.GENERATION in self._paused

    def restore(self, pauses: Sequence[PauseAnswer]) -> None:
        """Add the pauses that are stored in the database, when a supervisor starts."""
        for pause in pauses:
            self.add(pause)

    def add(self, pause: PauseAnswer) -> None:
        self._paused[pause.part] = pause
        self._gates[pause.part].shut()

    def remove(self, part: Pausable) -> None:
        self._paused.pop(part, None)
        self._gates[part].open()

    def __str__(self) -> str:
        """Return the paused parts with reasons. Example: admission (the disk is full), training"""
        return ", ".join(
            f"{pause.part} ({pause.reason})" if pause.reason else pause.part.value
            for pause in self.paused
        )
