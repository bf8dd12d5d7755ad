"""Run supervised training on chats, with checkpoints and a record of each step.

Ranks and checkpoints work as in RL (`rayloom train`), but the directory has no database. A
checkpoint is complete if it has a manifest. A resumed training continues from the newest complete
checkpoint. Invariants: a step depends only on the chats, the seed and the step's number, so a
resumed training has the same losses. `metrics.jsonl` has one line for each step.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import ray

from actors.batch import RankShard, array_bytes
from actors.deadline import beside, race
from actors.merge.settings import StepSettings
from actors.merge.step import IMITATION, chats_of_step, imitation_shards, steps_per_epoch
from actors.trainer.checkpoint import CLAIM, CheckpointError, claim, read_manifest
from actors.trainer.group import TrainerGroup
from actors.trainer.settings import RankSettings
from actors.trainer.statistics import StepStats
from actors.types import Sample
from service import units
from service.config.sft import SftConfig
from service.launch.run_dir import RunDir
from service.run.health import RunFailed
from service.run.restartable_trainer import RestartableTrainer

_LOOK_S = 0.2
_NAME = re.compile(r"step-(\d+)-t(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SftStep:
    """A step's record, one line of `metrics.jsonl`."""

    step: int
    epoch: int
    loss: float | None
    """Mean of -log p over the trained tokens, in nats; None if the update was skipped."""
    num_tokens: int
    """Number of trained tokens."""
    num_packed: int
    """Number of tokens in the rows that were trained, in which shared prefixes count once."""
    learning_rate: float
    grad_norm: float | None
    """Global norm of the gradient before clipping; None if the update was skipped."""
    seconds: float

    def line(self, *, num_steps: int) -> str:
        """Return the step as one line of text for the display."""
        return (
            f"step {self.step}/{num_steps}  epoch {self.epoch}  loss {units.significant(self.loss)}"
            f"  tokens {units.full_count(self.num_tokens)}"
            f"  lr {units.significant(self.learning_rate)}"
            f"  grad norm {units.significant(self.grad_norm)}  {units.duration(self.seconds)}"
        )


def num_steps_of(config: SftConfig, num_chats: int) -> int:
    """Return the number of steps in all epochs of a training."""
    return steps_per_epoch(num_chats, config.sft.chats_per_step) * config.sft.epochs


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the directories of checkpoints whose manifest can be read, the newest first."""
    found = []
    for path in directory.glob("step-*-t*"):
        if (name := _NAME.fullmatch(path.name)) is None:
            continue
        try:
            read_manifest(path)
        except CheckpointError:
            continue
        found.append((int(name[1]), int(name[2]), path))
    return [path for _, _, path in sorted(found, reverse=True)]


class SftRun:
    """A supervised training in this process, new or resumed."""

    def __init__(
        self,
        config: SftConfig,
        chats: Sequence[Sequence[Sample]],
        run_dir: RunDir,
        *,
        model: str,
        is_stop_asked: Callable[[], bool],
        tell: Callable[[str], None],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a training.

        chats: the samples of each chat. is_stop_asked: returns whether to end after the current
        step. tell: called with each line to show. on_start: called when the ranks have started.
        """
        self._config = config
        self._chats = chats
        self._run_dir = run_dir
        self._is_stop_asked = is_stop_asked
        self._tell, self._on_start = tell, on_start
        self.num_steps = num_steps_of(config, len(chats))
        run = config.as_run(num_steps=self.num_steps)
        ranks = run.rank_settings(model=model, checkpoint_dir=run_dir.checkpoints)
        self._ranks: RankSettings = replace(ranks, algorithm=IMITATION)
        self._steps = StepSettings(
            algorithm=IMITATION,
            trainer=config.trainer,
            max_context_tokens=config.model.max_context_tokens,
            seed=config.sft.seed,
        )
        self._term = _newest_term(run_dir.checkpoints) + 1
        self._metrics = run_dir.path / "metrics.jsonl"

    async def run(self) -> Path | None:
        """Train until the last step, and return its checkpoint; None if a stop was requested.

        After a stop, write a checkpoint of the last finished step. Raises: ActorLost,
        TrainerStartFailed, CheckpointError, RunFailed.
        """
        claim(self._run_dir.checkpoints, self._term)
        async with race(self._start(), self._wait_for_stop()) as (starting, stopping):
            if stopping.done():
                return None
            trainer, done, path = starting.result()
        try:
            return await beside(self._train(trainer, done, path), trainer.watch())
        finally:
            await trainer.stop()

    async def _wait_for_stop(self) -> None:
        while not self._is_stop_asked():
            await asyncio.sleep(_LOOK_S)

    async def _start(self) -> tuple[RestartableTrainer, int, Path | None]:
        """Start the ranks from the newest checkpoint that loads, or from the model if none exists.

        Returns: the trainer, the number of finished steps, and the checkpoint (None for the model).
        """
        stored = complete_checkpoints(self._run_dir.checkpoints)
        for number, path in enumerate([*stored, None]):
            done = 0 if path is None else read_manifest(path).step
            trainer = RestartableTrainer(
                partial(TrainerGroup, self._ranks),
                parent=path,
                first_step=done + 1,
                max_kept_bytes=self._config.trainer.max_replay_mib * 2**20,
                on_restart=self._tell,
                on_check=lambda peak_bytes: None,
            )
            try:
                await trainer.start()
            except CheckpointError as error:
                trainer.kill()
                if number + 1 == len(stored):
                    raise
                self._tell(f"{error}; continuing from an older checkpoint")
            except BaseException:
                trainer.kill()
                raise
            else:
                return trainer, done, path
        raise AssertionError("the loop ends with a start from the model")

    async def _train(
        self, trainer: RestartableTrainer, done: int, newest: Path | None
    ) -> Path | None:
        self._on_start()
        self._keep_metrics(done)
        self._tell(f"training from step {done + 1} to step {self.num_steps}")
        num_skipped = 0
        for step in range(done + 1, self.num_steps + 1):
            if self._is_stop_asked():
                return await self._stopped(trainer, step - 1, newest)
            record = await self._step(trainer, step)
            num_skipped = 0 if record.loss is not None else num_skipped + 1
            if num_skipped > self._config.trainer.max_skipped_steps:
                raise RunFailed(
                    f"{num_skipped} steps in a row had no finite update, expected at most "
                    f"trainer.max_skipped_steps; lower trainer.learning_rate"
                )
            if step == self.num_steps or step % self._config.sft.checkpoint_every == 0:
                newest = await self._save(trainer, step)
        return newest

    async def _stopped(
        self, trainer: RestartableTrainer, done: int, newest: Path | None
    ) -> Path | None:
        if done and (newest is None or read_manifest(newest).step < done):
            await self._save(trainer, done)
        return None

    async def _step(self, trainer: RestartableTrainer, step: int) -> SftStep:
        began, settings = time.monotonic(), self._config.sft
        chosen = chats_of_step(
            step,
            num_chats=len(self._chats),
            chats_per_step=settings.chats_per_step,
            seed=settings.seed,
        )
        shards: tuple[RankShard, ...] = await asyncio.to_thread(
            imitation_shards,
            [self._chats[number] for number in chosen],
            step=step,
            settings=self._steps,
        )
        stats = await trainer.step(
            [ray.put(shard) for shard in shards], num_bytes=array_bytes(shards)
        )
        epoch = 1 + (step - 1) // steps_per_epoch(len(self._chats), settings.chats_per_step)
        record = _record(stats, epoch=epoch, seconds=time.monotonic() - began)
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        self._tell(record.line(num_steps=self.num_steps))
        return record

    async def _save(self, trainer: RestartableTrainer, step: int) -> Path:
        """Write a checkpoint, remove the oldest checkpoints, and return the new one's directory."""
        path: Path | None = None
        # Repeat the write if ranks are lost.
        while path is None:
            await trainer.begin_save(step, term=self._term)
            path = await trainer.finish_save()
        await trainer.committed(step, path)
        for old in complete_checkpoints(self._run_dir.checkpoints)[
            self._config.sft.keep_checkpoints :
        ]:
            shutil.rmtree(old, ignore_errors=True)
        return path

    def _keep_metrics(self, done: int) -> None:
        """Remove from `metrics.jsonl` the steps after `done`, which are trained again."""
        if not self._metrics.exists():
            return
        lines = self._metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= done]
        aside = self._metrics.with_suffix(".part")
        aside.write_text("".join(kept), encoding="utf-8")
        aside.replace(self._metrics)


def _step_of(line: str) -> float:
    """Return the step's number in a line of `metrics.jsonl`; infinity if the line is damaged."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _record(stats: StepStats, *, epoch: int, seconds: float) -> SftStep:
    loss = None if stats.is_skipped else stats.statistics.get("loss", math.nan)
    return SftStep(
        step=stats.step,
        epoch=epoch,
        loss=loss,
        num_tokens=stats.trained_tokens,
        num_packed=stats.packed_tokens,
        learning_rate=stats.learning_rate,
        grad_norm=stats.statistics.get("grad_norm"),
        seconds=round(seconds, 3),
    )


def _newest_term(directory: Path) -> int:
    """Return the newest term (number of a start) that claimed the directory; 0 if none has."""
    file = directory / CLAIM
    return int(file.read_text() or 0) if file.is_file() else 0
