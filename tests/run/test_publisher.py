"""Tests of the publisher: its waits for engines, and its log-probability checks.

The board is in this process, and the clock is the test's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from actors.batch import MicroBatch
from actors.deadline import ActorLost
from actors.metrics import PublishPhase
from actors.weights.actor import WeightBoard
from actors.weights.board import Publication, WeightGroup, WeightManifest
from actors.weights.logprob_check import (
    ALONE,
    COST_SHARE,
    PACKED,
    SHORT_TOKENS,
    CheckSample,
    CheckText,
    EngineScores,
    LogprobCheck,
    sampled_name,
    start_text,
)
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
    """A handle of a board in this process, with the interface of Ray."""

    board: WeightBoard

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(self.board, method))


def largest(check: LogprobCheck | None) -> float:
    assert check is not None
    return check.statistics["logprob_check_max"]


class Trainer:
    is_restarting = False
    num_scored: Sequence[int] = ()

    async def publish(self, board: Any, term: int, version: int) -> None:
        await board.publish.remote(term, version, [GROUP])

    async def check_logprobs(self, rows: Sequence[MicroBatch] = ()) -> Any:
        """Return the targets of the rows as their scores, or `SCORES` without rows."""
        self.num_scored = [row.num_trained for row in rows]
        return np.concatenate([row.targets for row in rows]).astype(np.float32) if rows else SCORES


class World:
    """A board with one engine that holds version 0, and a publisher that waits for version 1."""

    def __init__(self) -> None:
        self.now = 0.0
        self.trainer = Trainer()
        self.board = WeightBoard(clock=lambda: self.now)
        handle: Any = Handle(self.board)
        self.phases: list[PublishPhase] = []
        """The phases that were entered so far."""
        self.publisher = Publisher(
            cast(Any, self.trainer),
            handle,
            term=1,
            quiet_limit_s=LIMIT_S,
            measure=self._measure,
        )
        self.waiting: asyncio.Task[LogprobCheck | None]

    def _measure(self, phase: PublishPhase) -> AbstractContextManager[None]:
        self.phases.append(phase)
        return nullcontext()

    async def begin(self) -> None:
        await self.publisher.publish(0)
        await self.board.poll("a", None, None, 0.0)
        await self.board.report("a", 1, 0, EngineScores(logprobs=SCORES))
        assert largest(await self.publisher.wait_until_loaded(0)) == 0.0
        await self.publisher.publish(1)
        self.waiting = asyncio.ensure_future(self.publisher.wait_until_loaded(1))

    async def pass_time(self, seconds: float, do: Callable[[], Awaitable[None]]) -> None:
        """Advance the clock in steps; at each, call `do` and wake the waiting tasks."""
        end = self.now + seconds
        while self.now < end and not self.waiting.done():
            self.now += STEP_S
            await do()
            # This call wakes the tasks that wait at the board.
            await self.board.leave("nobody")
            for _ in range(50):
                await asyncio.sleep(0)

    async def nothing(self) -> None: ...

    async def crash_in_each_start(self) -> None:
        """Report the starts of one engine after the other, each of which crashes after 20 s."""
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


async def test_an_engine_may_be_away_for_minutes_during_a_publish(
    world: World,
) -> None:
    await world.pass_time(LIMIT_S - 60.0, world.nothing)
    assert not world.waiting.done() and (await world.board.status()).replicas == ()
    # The publisher waits for an engine as long as its start makes progress.
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
    await world.board.report("b", 1, 1, EngineScores(logprobs=SCORES + 0.5))
    assert largest(await world.waiting) == 0.5
    assert world.phases == 2 * ["send", "check", "load"]


@pytest.mark.parametrize("engine", ["nothing", "crash_in_each_start", "live_and_load_nothing"])
async def test_engines_without_progress_end_the_term(world: World, engine: str) -> None:
    await world.pass_time(LIMIT_S - 60.0, getattr(world, engine))
    assert not world.waiting.done()
    await world.pass_time(LIMIT_S, getattr(world, engine))
    assert world.now < LIMIT_S + 60.0
    with pytest.raises(
        ActorLost, match=r"engines hold version 1, and for 6\d\d s none has made progress"
    ):
        await world.waiting


async def test_the_limit_for_engines_does_not_run_while_ranks_are_replaced(world: World) -> None:
    world.trainer.is_restarting = True
    await world.pass_time(2 * LIMIT_S, world.live_and_load_nothing)
    assert not world.waiting.done()
    # A new group of ranks publishes the version again.
    await world.board.publish(1, 1, [GROUP])
    world.trainer.is_restarting = False
    await world.pass_time(LIMIT_S - 60.0, world.live_and_load_nothing)
    assert not world.waiting.done()
    await world.board.report("a", 1, 1, EngineScores(logprobs=SCORES))
    assert largest(await world.waiting) == 0.0


class CheckedWorld(World):
    """A world with a text to check; the engine's scores differ from the trainer's by `off`."""

    def __init__(self, *, context: int = 3000) -> None:
        super().__init__()
        self.off = 0.0
        self.long_s = self.short_s = 0.0
        """Seconds that the engine needs for the whole text, and for its beginning."""
        text = start_text(
            [], max_context_tokens=context, limit=None, is_on_cpu=True, vocab_size=50,
            temperatures=[0.7],
        )  # fmt: skip
        self.publisher = Publisher(
            cast(Any, self.trainer),
            cast(Any, Handle(self.board)),
            term=1,
            quiet_limit_s=LIMIT_S,
            measure=self._measure,
            text=text,
            most_tokens=context - 1,
            check_every=4,
            clock=lambda: self.now,
        )

    async def load(self, version: int, *, is_answered: bool = True) -> CheckText:
        """Publish a version, have the engine load it, and return the text of the publication."""
        await self.publisher.publish(version)
        publication = await self.board.poll("a", None, None, 0.0)
        assert isinstance(publication, Publication) and publication.check is not None
        text = publication.check
        if not text.token_ids.size:
            await self.board.report("a", 1, version, None)
            return text
        scores = text.token_ids[text.first_scored :].astype(np.float32) + self.off
        samples = []
        for temperature in text.temperatures:
            sampled = np.arange(text.num_sampled, dtype=np.int32)
            logprobs = sampled.astype(np.float32) + self.off
            samples.append(
                CheckSample(temperature=temperature, token_ids=sampled, logprobs=logprobs)
            )
        seconds = self.long_s if text.token_ids.size > SHORT_TOKENS else self.short_s
        answer = EngineScores(logprobs=scores, samples=tuple(samples), seconds=seconds)
        await self.board.report("a", 1, version, answer if is_answered else None)
        return text

    async def started(self) -> LogprobCheck | None:
        await self.load(0)
        return await self.publisher.check_start(0)

    async def step(self, version: int, *, seconds: float) -> tuple[CheckText, LogprobCheck]:
        text, check = await self.try_step(version, seconds=seconds)
        assert check is not None
        return text, check

    async def try_step(
        self, version: int, *, seconds: float
    ) -> tuple[CheckText, LogprobCheck | None]:
        self.now += seconds
        text = await self.load(version)
        return text, await self.publisher.wait_until_loaded(version)


async def test_the_check_at_the_start_compares_the_text_alone_packed_and_continued() -> None:
    world = CheckedWorld()
    check = await world.started()
    assert check is not None and not check.is_beyond and check.num_tokens == 3000
    names = [each.name for each in check.comparisons]
    assert names == [ALONE, PACKED, sampled_name(1.0), sampled_name(0.7)]
    assert [each.num_scores for each in check.comparisons] == [2935, 2935, 64, 64]


async def test_differing_scores_at_the_start_are_beyond_the_bound() -> None:
    world = CheckedWorld()
    world.off = 0.25
    check = await world.started()
    assert check is not None and check.is_beyond


async def test_a_publication_scores_the_end_of_the_text_and_every_fourth_one_all_of_it() -> None:
    world = CheckedWorld()
    await world.started()
    first_scored = []
    for version in range(1, 9):
        text, check = await world.step(version, seconds=10.0)
        assert text.token_ids.size == 2999 and text.num_sampled == 0
        assert world.trainer.num_scored == [2999 - text.first_scored]
        first_scored.append(text.first_scored)
        # The record of the first step includes the check of the start.
        assert check.num_tokens == (3000 if version == 1 else 2999)
    assert first_scored == [1975, 1975, 1975, 1, 1975, 1975, 1975, 1]


async def test_checks_take_no_more_than_their_share_of_the_time() -> None:
    world = CheckedWorld()
    await world.started()
    world.long_s = 1.0
    sizes, spent_s = [], 0.0
    for version in range(1, 13):
        text, check = await world.try_step(version, seconds=5.0)
        sizes.append(text.token_ids.size)
        spent_s += 0.0 if check is None else check.seconds
    # The start took no time. A long check of 1 s uses up the share of 20 s.
    assert sizes == [2999, 0, 0, *[SHORT_TOKENS] * 4, 2999, *[SHORT_TOKENS] * 3, 2999]
    assert spent_s == COST_SHARE * world.now


async def test_a_publication_without_time_for_a_short_check_has_none() -> None:
    world = CheckedWorld()
    world.long_s, world.short_s = 8.0, 0.5
    start = await world.started()
    sizes, spent_s, found = [], 0.0, []
    for version in range(1, 100):
        text, check = await world.try_step(version, seconds=5.0)
        num_tokens = text.token_ids.size
        sizes.append(num_tokens)
        assert (check is None) == (num_tokens == 0)
        assert bool(num_tokens) == bool(world.trainer.num_scored)
        world.trainer.num_scored = []
        if check is not None:
            found.append(check)
            spent_s += check.seconds
        # The cost of every check but the first is known from earlier ones.
        assert spent_s <= max(0.5, COST_SHARE * world.now)
    # Short checks take half of the time, and the long one is run after 300 s.
    assert sizes[:5] == [SHORT_TOKENS, 0, 0, 0, 0] and sizes.index(2999) == 59
    assert sizes.count(2999) == 1 and sizes.count(SHORT_TOKENS) == 24
    assert start is not None and found[0].num_tokens == start.num_tokens


async def test_a_text_beyond_its_bound_is_checked_again_whatever_the_cost() -> None:
    world = CheckedWorld()
    await world.started()
    world.long_s, world.off = 9.0, 0.5
    sizes = []
    for version in range(1, 4):
        text, check = await world.step(version, seconds=5.0)
        assert check.is_beyond
        sizes.append(text.token_ids.size)
    world.off = 0.0
    text, check = await world.step(4, seconds=5.0)
    assert not check.is_beyond
    sizes.append(text.token_ids.size)
    sizes.append((await world.try_step(5, seconds=5.0))[0].token_ids.size)
    assert sizes == [2999, 2999, 2999, 2999, 0]


async def test_the_engine_with_the_largest_difference_decides() -> None:
    world = CheckedWorld()
    await world.started()
    world.now += 10.0
    text = await world.load(1)
    await world.board.poll("b", None, None, 0.0)
    off = text.token_ids[text.first_scored :].astype(np.float32) - 2.0
    await world.board.report("b", 1, 1, EngineScores(logprobs=off))
    check = await world.publisher.wait_until_loaded(1)
    assert largest(check) == 2.0 and check is not None and check.is_beyond


async def test_a_text_that_no_engine_scored_in_time_is_shortened() -> None:
    world = CheckedWorld()
    await world.load(0, is_answered=False)
    assert await world.publisher.check_start(0) is None
    text, check = await world.step(1, seconds=1.0)
    assert text.token_ids.size == SHORT_TOKENS and not text.temperatures
    assert not check.is_beyond and check.num_tokens == SHORT_TOKENS
