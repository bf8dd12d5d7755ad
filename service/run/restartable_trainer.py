"""A trainer that outlives its ranks: it has the calls of `TrainerGroup`, but can replace the group.

If a rank is lost, a new group of ranks loads the newest committed checkpoint. The group trains the
later steps again from kept shards. Then the interrupted call is repeated; no rollout is.

On CUDA, or with another number of threads, the new ranks may get other weights than the lost ranks
had. Fingerprints of the ranks' state after every step show the difference. The weights of a version
must not change once an engine may have them: different weights become the next version. Until this
version is published, `score`, `step` and `begin_save` raise `WeightsMoved`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from actors.batch import Float32s, MicroBatch
from actors.deadline import ActorLost
from actors.expert_records import ModelShape
from actors.trainer.checkpoint import CheckpointError
from actors.trainer.group import ShardLost, TrainerGroup, TrainerRankLost
from actors.trainer.statistics import StepStats
from service.run.health import FaultCount, WeightsMoved

# Number of restarts without a new step between them; more end the term.
MAX_RESTARTS = 3
WATCH_EVERY_S = 0.5
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptStep:
    """A step since the newest committed checkpoint, kept to train it again if a rank is lost."""

    step: int
    version: int
    """The version of the ranks' weights when the step was trained."""
    shards: tuple[Any, ...]
    """References to the shards in the order of ranks; empty after they are dropped."""
    num_bytes: int


class RestartableTrainer:
    """The trainer of one term; call `start` first and `stop` last.

    A term begins when a run starts, recovers, or returns to an earlier checkpoint.

    version: version of the weights. republished: versions that were made without a new step,
    because restarted ranks had other weights. shape: shape of the model; None before the start.
    is_restarting: whether a new group is starting.
    """

    def __init__(
        self,
        make_group: Callable[[], TrainerGroup],
        *,
        parent: Path | None,
        first_step: int,
        max_kept_bytes: int,
        on_restart: Callable[[str], None],
        on_check: Callable[[Sequence[int]], None],
        on_republish: Callable[[tuple[int, ...]], Awaitable[None]] | None = None,
    ) -> None:
        """Make the first group of ranks.

        Args:
            make_group: Makes a group without starting it.
            parent: Checkpoint to begin with; None to begin with the base model.
            first_step: Number of the first step to train.
            max_kept_bytes: Limit for the shards that are kept to train steps again. Above this
                limit, the oldest shards are dropped. The ranks then cannot be replaced until the
                next checkpoint is committed.
            on_restart: Called with a sentence for each replaced group.
            on_check: Called by `watch` again and again with the peak memory of each rank in bytes,
                or with an empty sequence if a rank is lost.
            on_republish: Called with `republished`, before its newest version is published.
        """
        self._make_group = make_group
        self._group = make_group()
        self._checkpoint = parent
        self._max_kept_bytes = max_kept_bytes
        self._on_restart = on_restart
        self._on_check = on_check
        self._on_republish = on_republish
        self._lock = asyncio.Lock()
        """Held during each call and each restart, because a group does one thing at a time."""
        self._kept: list[_KeptStep] = []
        self._next_step = first_step
        self._saving: TrainerGroup | None = None
        self._restarts = FaultCount(limit=MAX_RESTARTS)
        self._fingerprint: tuple[int, ...] = ()
        self._logprobs: Float32s | None = None
        """The last result of `check_logprobs`; None if it was not called for `version`."""
        self._scored_rows: Sequence[MicroBatch] = ()
        """The rows of the last call of `check_logprobs`."""
        self._is_given_out = False
        """Whether `version` was sent to the weight board, so that an engine may have it."""
        self._must_publish = False
        self._published: tuple[Any, int] | None = None
        """The weight board and the term of the last publication; None before the first."""
        self.version = 0
        self.republished: tuple[int, ...] = ()
        self.is_restarting = False

    @property
    def shape(self) -> ModelShape | None:
        return self._group.shape

    async def reserve(self) -> None:
        """Reserve the ranks' resources before `start`. Raises: ActorLost."""
        await self._group.reserve()

    async def start(self) -> None:
        """Start the ranks.

        Raises: CheckpointError if the checkpoint to begin with cannot be loaded;
        TrainerStartFailed; ActorLost.
        """
        await self._open_group()
        self.version = self._group.version
        self._fingerprint = await self._group.fingerprint()

    async def watch(self) -> None:
        """Check the ranks regularly, and replace the group soon after a rank has died.

        Raises: the errors of `step`.
        """
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            group = self._group
            try:
                self._on_check(await group.check_alive())
            except ShardLost:
                raise
            except TrainerRankLost as loss:
                self._on_check(())
                async with self._lock:
                    if group is self._group:
                        await self._restart(loss)

    async def score(self, shards: Sequence[Any]) -> tuple[Any, ...]:
        """Score rows before they are trained; return a reference to the scores of each rank.

        shards: for each rank, a reference to the shard with its rows. Raises: the errors of `step`.
        """
        async with self._lock:
            return await self._ask(lambda group: group.score(shards))

    async def step(self, shards: Sequence[Any], *, num_bytes: int = 0) -> StepStats:
        """Train a step, keep its shards for a possible restart, and return its statistics.

        shards: a reference to the shard of each rank. num_bytes: total size of the shards.
        Raises: WeightsMoved; ActorLost if no new group starts or a shard is gone;
        TrainerStartFailed; ShardRefused, PolicyTooOld and StepAbandoned from the group.
        """

        async def train(group: TrainerGroup) -> tuple[StepStats, tuple[int, ...]]:
            stats = await group.step(shards)
            return stats, await group.fingerprint()

        async with self._lock:
            stats, self._fingerprint = await self._ask(train)
            self._keep(
                _KeptStep(
                    step=self._next_step,
                    version=self.version,
                    shards=tuple(shards),
                    num_bytes=num_bytes,
                )
            )
            self._next_step += 1
            self.version = self._group.version
            self._restarts.progressed()
            self._is_given_out, self._logprobs = False, None
            return stats

    async def abandon(self) -> None:
        """Make the current `score` or `step` raise StepAbandoned if it can still be abandoned.

        Do nothing during a restart, while a new group of ranks repeats the steps since the last
        checkpoint.
        """
        if not self.is_restarting:
            await self._group.abandon()

    async def publish(self, board: Any, term: int, version: int) -> None:
        """Send the ranks' weights to the weight board, as version `version` of term `term`.

        Raises: WeightsMoved if the weights are no longer `version`; otherwise the errors of `step`.
        """

        async def publish(group: TrainerGroup) -> None:
            if version != self.version:
                raise WeightsMoved(self.version)
            self._is_given_out, self._published = True, (board, term)
            await group.publish(board, term, version)

        async with self._lock:
            await self._ask(publish, is_publish=True)
            self._must_publish = False

    async def check_logprobs(self, rows: Sequence[MicroBatch] = ()) -> Float32s:
        """Return the log-probabilities of the tokens in `rows` under the current weights.

        rows: if empty, a fixed text is scored.
        Raises: the errors of `step`.
        """

        async def check(group: TrainerGroup) -> Float32s:
            return await group.check_logprobs(rows)

        async with self._lock:
            self._logprobs = await self._ask(check, is_publish=True)
            self._scored_rows = rows
            return self._logprobs

    async def begin_save(self, step: int, *, term: int) -> None:
        """Tell the ranks to copy their state and to begin to write a checkpoint.

        step: number of the last trained step; 0 before the first.
        Raises: as for `RestartableTrainer.step`.
        """
        async with self._lock:
            await self._ask(lambda group: group.begin_save(step, term=term))
            self._saving = self._group

    async def finish_save(self) -> Path | None:
        """Wait for the checkpoint that was begun last, and return its directory.

        Returns: None if a rank was lost meanwhile.
        Raises: CheckpointError.
        """
        assert self._saving is not None, "call begin_save first"
        try:
            return await self._saving.finish_save()
        except TrainerRankLost:
            return None

    async def committed(self, step: int, path: Path) -> None:
        """Drop the kept shards of step `step` and earlier steps, because a checkpoint is committed.

        path: directory of this checkpoint. If a rank is lost later, the new group loads it.
        """
        async with self._lock:
            self._checkpoint = path
            self._kept = [kept for kept in self._kept if kept.step > step]

    async def stop(self) -> None:
        await self._group.stop()

    def kill(self) -> None:
        self._group.kill()

    async def _ask(
        self, call: Callable[[TrainerGroup], Awaitable[_Result]], *, is_publish: bool = False
    ) -> _Result:
        """Call the group and return its answer. If a rank is lost, replace the group and repeat.

        Raises: WeightsMoved if a version must be published first, and `is_publish` is false.
        """
        while True:
            if self._must_publish and not is_publish:
                raise WeightsMoved(self.version)
            try:
                return await call(self._group)
            except ShardLost:
                raise
            except TrainerRankLost as loss:
                await self._restart(loss)

    async def _restart(self, loss: TrainerRankLost) -> None:
        self.is_restarting = True
        try:
            await self._replace_group(loss)
        finally:
            self.is_restarting = False

    async def _replace_group(self, loss: TrainerRankLost) -> None:
        started = time.monotonic()
        while True:
            self._count_restart(loss)
            self._group.kill()
            self._group = self._make_group()
            try:
                await self._open_group()
                for kept in self._kept:
                    await self._renumber(kept.version)
                    await self._group.step(kept.shards)
                await self._take_over()
            except ShardLost:
                raise
            except TrainerRankLost as again:
                loss = again
            except CheckpointError as error:
                raise ActorLost(f"{loss}; {error}") from error
            else:
                break
        self._on_restart(
            f"{loss}; a new group is at version {self.version} after "
            f"{time.monotonic() - started:.1f} s, {len(self._kept)} steps trained again"
        )

    def _count_restart(self, loss: TrainerRankLost) -> None:
        self._restarts.count()
        if self._restarts.are_too_many:
            raise ActorLost(
                f"{loss}; {MAX_RESTARTS} groups in a row ended before the next step"
            ) from loss
        if not all(kept.shards for kept in self._kept):
            raise ActorLost(
                f"{loss}; the steps since the newest checkpoint cannot be trained again: their "
                "shards exceed trainer.max_replay_mib"
            ) from loss

    async def _open_group(self) -> None:
        group = self._group
        await group.start()
        if self._checkpoint is not None:
            await group.load(self._checkpoint)
        if self.republished:
            await group.renumber(group.version, self.republished)

    async def _renumber(self, version: int) -> None:
        """Set the new ranks' policy version to `version`; the weights do not change."""
        # When a step is trained again, the ranks refuse shards that were made for another version.
        if self._group.version != version:
            await self._group.renumber(version, self.republished)

    async def _take_over(self) -> None:
        """Choose the version number of the new ranks' weights, and set it on the ranks.

        The number grows if the weights have changed and an engine may have the lost ranks' weights.
        """
        fingerprint = await self._group.fingerprint()
        is_same = fingerprint == self._fingerprint
        if is_same and self._logprobs is not None:
            again = await self._group.check_logprobs(self._scored_rows)
            is_same = np.array_equal(again, self._logprobs)
        version, republished = self.version, self.republished
        if not is_same and self._is_given_out:
            version += 1
            republished = (*republished, version)
        if (version, republished) != (self._group.version, self.republished):
            await self._group.renumber(version, republished)
        if version != self.version:
            self._must_publish, self._is_given_out, self._logprobs = True, False, None
        self.version, self.republished = version, republished
        if self._must_publish and self._on_republish is not None:
            await self._on_republish(republished)
        self._fingerprint = fingerprint
        if self._is_given_out and self._published is not None and self._group.serves_engines:
            # Some engines may not have loaded the version from the lost ranks yet.
            board, term = self._published
            await self._group.publish(board, term, self.version)

    def _keep(self, kept: _KeptStep) -> None:
        self._kept.append(kept)
        num_bytes = sum(each.num_bytes for each in self._kept if each.shards)
        for index, each in enumerate(self._kept):
            if num_bytes <= self._max_kept_bytes:
                break
            num_bytes -= each.num_bytes if each.shards else 0
            self._kept[index] = replace(each, shards=())
