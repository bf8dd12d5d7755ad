"""What an operator has paused of a run, and the gates at which the loop waits meanwhile.

A pause belongs to the run: it is stored, and holds in every later term, of a later supervisor too,
until it is resumed. `Pauses` is the supervisor's; the loop looks at the gates of admission and
training, the term brings that of generation to the queue and the weight board.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from service.store.controls import Pause
from service.store.tables import Pausable


class Gate:
    """Open, or closed. What has passed the open gate is not held up, but can be waited for."""

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
        """Yields: whether the gate is open; then `close` waits for the end of this block."""
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
        """Let nobody else pass, from now on."""
        self._opened.clear()

    async def until_passed(self) -> None:
        """Wait for those who have passed."""
        await self._passed.wait()


class Pauses:
    """The paused parts, and a gate for each part."""

    def __init__(self) -> None:
        self._paused: dict[Pausable, Pause] = {}
        self._gates = {part: Gate() for part in Pausable}

    def gate(self, part: Pausable) -> Gate:
        return self._gates[part]

    def find(self, part: Pausable) -> Pause | None:
        return self._paused.get(part)

    @property
    def paused(self) -> tuple[Pause, ...]:
        """In the order of `Pausable`."""
        return tuple(self._paused[part] for part in Pausable if part in self._paused)

    @property
    def holds_generation(self) -> bool:
        return Pausable.GENERATION in self._paused

    def restore(self, pauses: Sequence[Pause]) -> None:
        """Begin with what is stored."""
        for pause in pauses:
            self.add(pause)

    def add(self, pause: Pause) -> None:
        self._paused[pause.part] = pause
        self._gates[pause.part].shut()

    def remove(self, part: Pausable) -> None:
        self._paused.pop(part, None)
        self._gates[part].open()

    def __str__(self) -> str:
        """Example: admission (the disk is full), training"""
        return ", ".join(
            f"{pause.part} ({pause.reason})" if pause.reason else pause.part.value
            for pause in self.paused
        )
