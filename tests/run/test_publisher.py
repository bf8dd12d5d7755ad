"""How long a published version is waited for: the board in this process, on a clock of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from actors.deadline import ActorLost
from actors.metrics import PublishPhase
from actors.weights.actor import WeightBoard
from actors.weights.board import WeightGroup, WeightManifest
from service.run.engines import Publisher

GROUP = WeightGroup(
    manifest=WeightManifest(names=(), dtypes=(), shapes=(), offsets=(), num_bytes=0),
    checksum="",
    buffer=None,
)
SCORES = np.zeros(16, np.float32)
# `inference.start_deadline_s`.
LIMIT_S = 600.0
STEP_S = 5.0


@dataclass
class Handle:
    """Calls a board of this process as Ray would."""

    board: WeightBoard

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(self.board, method))


class Trainer:
    is_restarting = False

    async def publish(self, board: Any, term: int, version: int) -> None:
        await board.publish.remote(term, version, [GROUP])

    async def check_logprobs(self) -> Any:
        return SCORES


class World:
    """A board, one engine that holds version 0, and version 1, which is waited for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.trainer = Trainer()
        self.board = WeightBoard(clock=lambda: self.now)
        handle: Any = Handle(self.board)
        self.phases: list[PublishPhase] = []
        """Entered so far."""
        self.publisher = Publisher(
            cast(Any, self.trainer),
            handle,
            term=1,
            quiet_limit_s=LIMIT_S,
            measure=self._measure,
        )
        self.waiting: asyncio.Task[float | None]

    def _measure(self, phase: PublishPhase) -> AbstractContextManager[None]:
        self.phases.append(phase)
        return nullcontext()

    async def begin(self) -> None:
        await self.publisher.publish(0)
        await self.board.poll("a", None, None, 0.0)
        await self.board.report("a", 1, 0, SCORES)
        assert await self.publisher.wait_until_loaded(0) == 0.0
        await self.publisher.publish(1)
        self.waiting = asyncio.ensure_future(self.publisher.wait_until_loaded(1))

    async def pass_time(self, seconds: float, do: Callable[[], Awaitable[None]]) -> None:
        """Pass it in steps, at each of which something is done and all that waits looks again."""
        end = self.now + seconds
        while self.now < end and not self.waiting.done():
            self.now += STEP_S
            await do()
            # Wakes what waits at the board.
            await self.board.leave("nobody")
            for _ in range(50):
                await asyncio.sleep(0)

    async def nothing(self) -> None: ...

    async def crash_in_each_start(self) -> None:
        """A start of 20 s, of one engine after the other."""
        number, work = divmod(self.now, 20.0)
        await self.board.starting(f"replica-{number:.0f}", work)

    async def live_and_load_nothing(self) -> None:
        await self.board.poll("a", 1, 0, 0.0)
        await self.board.beat("a", 0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.begin()
    yield world
    world.waiting.cancel()
    await asyncio.gather(world.waiting, return_exceptions=True)


async def test_an_engine_that_is_away_for_minutes_in_a_publish_does_not_send_the_trainer_back(
    world: World,
) -> None:
    await world.pass_time(LIMIT_S - 60.0, world.nothing)
    assert not world.waiting.done() and (await world.board.status()).replicas == ()
    # Whoever gets on with its start is waited for, however long it takes.
    work = 0.0

    async def start() -> None:
        nonlocal work
        work += 1.0
        await world.board.starting("b", work)

    await world.pass_time(3 * LIMIT_S, start)
    assert not world.waiting.done()
    assert await world.board.poll("b", None, None, 0.0) is not None
    num_loaded = 0

    async def load() -> None:
        nonlocal num_loaded
        num_loaded += 1
        await world.board.beat("b", num_loaded)

    await world.pass_time(3 * LIMIT_S, load)
    assert not world.waiting.done()
    await world.board.report("b", 1, 1, SCORES + 0.5)
    assert await world.waiting == 0.5
    assert world.phases == 2 * [PublishPhase.SEND, PublishPhase.CHECK, PublishPhase.LOAD]


@pytest.mark.parametrize("engine", ["nothing", "crash_in_each_start", "live_and_load_nothing"])
async def test_engines_that_never_get_further_end_the_term(world: World, engine: str) -> None:
    await world.pass_time(LIMIT_S - 60.0, getattr(world, engine))
    assert not world.waiting.done()
    await world.pass_time(LIMIT_S, getattr(world, engine))
    assert world.now < LIMIT_S + 60.0
    with pytest.raises(ActorLost, match=r"engines hold version 1, and for 6\d\d s none has got"):
        await world.waiting


async def test_engines_are_waited_for_while_ranks_are_replaced_and_no_longer(world: World) -> None:
    world.trainer.is_restarting = True
    await world.pass_time(2 * LIMIT_S, world.live_and_load_nothing)
    assert not world.waiting.done()
    # As a new group does, of which the engines then get the version.
    await world.board.publish(1, 1, [GROUP])
    world.trainer.is_restarting = False
    await world.pass_time(LIMIT_S - 60.0, world.live_and_load_nothing)
    assert not world.waiting.done()
    await world.board.report("a", 1, 1, SCORES)
    assert await world.waiting == 0.0
