"""Tests of the log-probability check with a real engine and trainer, without and with faults.

The publisher, the weight board and vLLM are in this process, the trainer's rank is in another one.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import pytest_asyncio
import torch
from worlds.builders.settings import rank_settings
from worlds.faults.unequal_trainers import (
    cast_temperatures,
    drop_in_layers,
    let_samples_see_each_other,
    take_another_rope_table,
)
from worlds.models.families import write_family
from worlds.parts.trainer_world import World, random_samples

from actors.batch import Float32s, MicroBatch
from actors.metrics import PublishPhase
from actors.trainer.rank import TrainerRank
from actors.trainer.tiny.model import build_tiny_model
from actors.types import Dtype
from actors.weights.actor import WeightBoard
from actors.weights.board import Publication, WeightGroup
from actors.weights.buffers import pack_group
from actors.weights.logprob_check import (
    ALONE,
    BOUNDS,
    PACKED,
    LogprobCheck,
    sampled_name,
    start_text,
)
from service.inference.settings import EngineSettings, InferenceSettings
from service.run.engines import Publisher

if TYPE_CHECKING:
    from service.inference.engine import PolicyEngine

pytestmark = [
    pytest.mark.proof,
    pytest.mark.training,
    pytest.mark.timeout(900),
    # vLLM's imports give warnings. Other tests import it only in separate processes.
    pytest.mark.filterwarnings("ignore"),
]

CONTEXT, SMALL = 2048, 512
HEAD, NORM = "lm_head.weight", "model.norm.weight"


def no_measure(phase: PublishPhase) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class PipedTrainer:
    """A trainer rank in another process; its published groups are kept here for the engine."""

    world: World
    withheld: str = ""
    """The end of the names of tensors that are never published."""
    stale: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that are published in place of the current ones."""
    groups: tuple[WeightGroup, ...] = ()
    is_restarting = False

    def is_withheld(self, name: str) -> bool:
        return name.endswith(self.withheld)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(each) for name, each in self.world.weights().items()}

    async def publish(self, board: Any, term: int, version: int) -> None:
        named = self.weights() | self.stale
        if self.withheld:
            named = {name: each for name, each in named.items() if not self.is_withheld(name)}
        self.groups = (pack_group(list(named.items())),)
        # Publish without the bytes, as a broadcast does: the board would put them into Ray's store.
        await board.publish.remote(term, version, [replace(self.groups[0], buffer=None)])

    async def check_logprobs(self, rows: Sequence[MicroBatch] = ()) -> Float32s:
        scores: Float32s = self.world.call("check_logprobs", rows=tuple(rows))[0]
        return scores


class Handle:
    """A replacement for Ray's actor handle that calls a board in this process."""

    def __init__(self, board: WeightBoard) -> None:
        self._board = board

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(self._board, method))


@dataclass
class LeapingClock:
    """A clock that can be set ahead, so that a step has time for a whole check."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@dataclass
class Run:
    """A term: a new trainer with the model's own weights, and the engine that all tests share."""

    engine: PolicyEngine
    trainer: PipedTrainer
    board: WeightBoard
    publisher: Publisher
    clock: LeapingClock
    term: int
    version: int = 0

    async def start(self) -> LogprobCheck:
        await self.load()
        check = await self.publisher.check_start(0)
        assert check is not None
        return check

    async def train(self) -> LogprobCheck:
        """Train a step and publish it; return the result of the check."""
        samples = random_samples(self.version, 6, version=self.version)
        self.trainer.world.step([samples], version=self.version, step=self.version + 1)
        self.version += 1
        self.clock.ahead_s += 3600.0
        await self.load()
        check = await self.publisher.wait_until_loaded(self.version)
        assert check is not None
        return check

    async def load(self) -> None:
        await self.publisher.publish(self.version)
        found = await self.board.poll("a", None, None, 0.0)
        assert isinstance(found, Publication)
        groups = self.trainer.groups
        publication = replace(found, groups=groups)
        buffers = [group.buffer for group in groups]
        await self.engine.apply(publication, buffers, on_progress=lambda: None)
        scores = await self.engine.check_logprobs(found.check)
        assert scores is not None
        await self.board.report("a", self.term, self.version, scores)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("untied")
    build_tiny_model(directory, seed=0, tie_word_embeddings=False, warmup_steps=0)
    return directory


@asynccontextmanager
async def started_engine(
    model: Path, directory: Path, *, dtype: Dtype, context: int
) -> AsyncIterator[PolicyEngine]:
    settings = EngineSettings(
        inference=InferenceSettings(max_num_seqs=8, kv_cache_gib=0.2, enforce_eager=True),
        model=str(model),
        dtype=dtype,
        chat_template=None,
        max_context_tokens=context,
        stop_token_ids=(),
        reads_text=False,
        resets_prefix_cache=False,
        seed=0,
    )
    os.environ.update(settings.environment)
    from service.inference.engine import PolicyEngine

    engine = PolicyEngine(settings, directory)
    await engine.start()
    yield engine
    engine.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[PolicyEngine]:
    directory = tmp_path_factory.mktemp("engine")
    async with started_engine(model, directory, dtype=Dtype.FLOAT32, context=CONTEXT) as engine:
        yield engine


TERMS = iter(range(1, 100))


def opened_run(
    engine: PolicyEngine, world: World, model: Path, directory: Path, *, dtype: Dtype, context: int
) -> Run:
    settings = rank_settings(
        str(model), directory, learning_rate=1e-3, dtype=dtype, max_context_tokens=context
    )
    trainer = PipedTrainer(world.start(settings))
    board, term = WeightBoard(), next(TERMS)
    text = start_text(
        [], max_context_tokens=context, limit=None, is_on_cpu=True, vocab_size=300,
        temperatures=[1.2],
    )  # fmt: skip
    clock = LeapingClock()
    publisher = Publisher(
        cast(Any, trainer),
        cast(Any, Handle(board)),
        term=term,
        quiet_limit_s=60.0,
        measure=no_measure,
        text=text,
        most_tokens=context - 1,
        dtype=dtype,
        clock=clock,
    )
    return Run(
        engine=engine, trainer=trainer, board=board, publisher=publisher, clock=clock, term=term
    )


@pytest.fixture
def run(engine: PolicyEngine, one_rank: World, model: Path, tmp_path: Path) -> Run:
    return opened_run(engine, one_rank, model, tmp_path, dtype=Dtype.FLOAT32, context=CONTEXT)


@pytest.mark.asyncio(loop_scope="module")
async def test_correct_trainer_is_within_the_bounds_at_every_length_and_temperature(
    run: Run,
) -> None:
    start = await run.start()
    assert not start.is_beyond and start.ratio < 0.5, start
    assert start.num_tokens == CONTEXT and len(start.comparisons) == 5
    # The first check is joined with the start's. A later text is a prompt, which must be one token
    # shorter than the context.
    for num_tokens in (CONTEXT, CONTEXT - 1):
        later = await run.train()
        assert not later.is_beyond and later.num_tokens == num_tokens, later


@pytest.mark.parametrize(
    ("fault", "right", "cause"),
    [
        (take_another_rope_table, "", "one of the two computes this architecture differently"),
        (cast_temperatures, ALONE, "different temperatures"),
        (let_samples_see_each_other, ALONE, "the samples of a packed row"),
        (drop_in_layers, "", "one of the two computes this architecture differently"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_trainer_that_computes_differently_is_refused_at_the_start(
    run: Run, fault: Callable[[TrainerRank], None], right: str, cause: str
) -> None:
    """Check that each fault's cause is named. right: the comparison that stays correct."""
    run.trainer.world.call("plant", fault=fault)
    check = await run.start()
    print(check)
    assert check.is_beyond and cause in str(check), check
    by_name = {each.name: each for each in check.comparisons}
    if right:
        assert by_name[right].largest < 1e-3
    if fault is let_samples_see_each_other:
        assert by_name[PACKED].mean > 1e-3
    if fault is cast_temperatures:
        # bfloat16 holds 1 exactly. Other temperatures than 0.7 may stay within the bounds, because
        # the distribution of random weights has no peak.
        beyond = {name for name, each in by_name.items() if each.ratio(BOUNDS[check.dtype]) > 1}
        assert sampled_name(0.7) in beyond and sampled_name(1.0) not in beyond, check


@pytest.mark.parametrize("fault", ["stale head", "withheld norm"])
@pytest.mark.asyncio(loop_scope="module")
async def test_tensor_that_is_not_published_is_found_after_the_first_publication(
    run: Run, fault: str
) -> None:
    start = await run.start()
    assert not start.is_beyond, start
    if fault == "stale head":
        run.trainer.stale = {HEAD: run.trainer.weights()[HEAD]}
    else:
        run.trainer.withheld = NORM
    for _ in range(3):
        check = await run.train()
        print(check)
        assert check.is_beyond and "the engine holds other weights" in str(check), check


@pytest.mark.asyncio(loop_scope="module")
async def test_buffer_that_is_not_published_is_refused_at_the_start(
    one_rank: World, tmp_path: Path
) -> None:
    """Withhold xIELU's constants, buffers of Apertus that an engine's first load leaves unset."""
    model, small = tmp_path / "apertus", Dtype.BFLOAT16
    write_family("apertus, bfloat16", model)
    async with started_engine(model, tmp_path, dtype=small, context=SMALL) as engine:
        for withheld in ("", "act_fn.beta"):
            run = opened_run(engine, one_rank, model, tmp_path, dtype=small, context=SMALL)
            run.trainer.withheld = withheld
            assert any(run.trainer.is_withheld(name) for name in run.trainer.weights())
            check = await run.start()
            print(check)
            assert check.is_beyond is bool(withheld), check
    assert "a tensor or a buffer that is not published" in str(check)
