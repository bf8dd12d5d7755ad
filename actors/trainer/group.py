"""The trainer's ranks as one object that the supervisor awaits.

Every call goes to all ranks and has a deadline. Invariant: after `TrainerRankLost` no rank of the
group is alive, so nothing half-done can come later; the supervisor makes a new group and loads the
newest checkpoint. Errors that all ranks agree on (a refused shard, a broken checkpoint) leave the
group as it was. `TrainerStartFailed` ends it too, and a new one would fail alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
import torch.distributed as dist
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.batch import Float32s
from actors.deadline import ActorLost, within
from actors.expert_records import ModelShape
from actors.trainer.actor import RankProcess, TrainerRankActor
from actors.trainer.checkpoint import CheckpointError, Progress
from actors.trainer.process_group import LOOPBACK
from actors.trainer.settings import Device, RankSettings, WeightBackend
from actors.trainer.shard_check import PolicyTooOld, ShardRefused
from actors.trainer.statistics import StepStats
from actors.weights.board import WeightGroup

_AGREED = (ShardRefused, PolicyTooOld, CheckpointError)
# What a rank's own code raises in these, it would raise again in a new group.
_START_METHODS = ("process", "open_rendezvous", "join", "load")
# Caused by another process that ended or still holds memory; a new group may not meet them.
_CAUSED_ELSEWHERE = (
    RayError,
    dist.DistError,
    ConnectionError,
    TimeoutError,
    MemoryError,
    torch.OutOfMemoryError,
)
_GRACE_S = 10.0
_BLAME_S = 2.0
_WATCH_EVERY_S = 2.0
_Result = TypeVar("_Result")


class _RankFailure(Exception):
    """What one rank did not do; the whole group has been killed."""

    sentence: str

    def __init__(self, rank: int, method: str, reason: str) -> None:
        super().__init__(rank, method, reason)
        self.rank, self.method, self.reason = rank, method, reason

    def __str__(self) -> str:
        return self.sentence.format(rank=self.rank, method=self.method, reason=self.reason)


class TrainerRankLost(_RankFailure, ActorLost):
    """A rank died, failed or did not answer in time; the whole group has been killed."""

    sentence = (
        "trainer: rank {rank} was lost in {method} ({reason}); the group is stopped, start a new "
        "one from the newest checkpoint"
    )


class TrainerStartFailed(_RankFailure):
    """A rank's own code raised during the start; the whole group has been killed."""

    sentence = (
        "trainer: rank {rank} cannot start ({method}: {reason}); a new group would fail alike: "
        "correct the model or the trainer's settings"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds until a call other than a step must have ended on every rank."""

    start_s: float = 300.0
    publish_s: float = 300.0
    check_s: float = 60.0
    checkpoint_s: float = 300.0
    stop_s: float = 10.0


class TrainerGroup:
    """N rank actors behind one interface; `start` it, then use it, then `stop` it.

    version: the policy version that the ranks hold; one more after each step. shape: of the model;
    None before the start.
    """

    def __init__(
        self,
        settings: RankSettings,
        *,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.settings = settings
        self.deadlines = deadlines or Deadlines()
        self.version = 0
        self.shape: ModelShape | None = None
        self.processes: tuple[RankProcess, ...] = ()
        self._ranks: list[ActorHandle] = []
        self._placement: PlacementGroup | None = None

    async def start(self) -> None:
        """Start the ranks, let them meet, load the model.

        Raises: TrainerStartFailed, with the first rank's reason, for a model that is not there or
            an architecture that cannot be trained; TrainerRankLost for a rank that died, or
            resources that do not come in time.
        """
        timeout_s = self.deadlines.start_s
        options = await self._actor_options(timeout_s)
        actor_class = ray.remote(TrainerRankActor)
        self._ranks = [
            actor_class.options(**options, **self._bundle(rank)).remote(self.settings, rank)
            for rank in range(self.settings.trainer.num_ranks)
        ]
        self.processes = tuple(await self._on_all("process", timeout_s=timeout_s))
        is_local = len({process.node_id for process in self.processes}) == 1
        address = LOOPBACK if is_local else self.processes[0].node_address
        rendezvous = await self._on_first("open_rendezvous", address, timeout_s=timeout_s)
        shapes = await self._on_all("join", rendezvous, is_local, timeout_s=timeout_s)
        self.shape = shapes[0]

    async def watch(self) -> None:
        """Raise TrainerRankLost soon after a rank has died, also while nothing is asked of it."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            if self._ranks:
                # It waits behind a step that is under way, which has the same deadline.
                await self._on_all("process", timeout_s=self.settings.trainer.step_deadline_s)

    async def score(self, shard_refs: Sequence[ObjectRef]) -> tuple[ObjectRef, ...]:
        """Score rows before they are trained; each rank fetches only its own shard.

        Args: as `step`.
        Returns: of each rank, a reference to its `RowScores`, one a row.
        Raises: as `step`.
        """
        calls = [rank.score_rows.remote(ref) for rank, ref in self._dealt(shard_refs)]
        return tuple(await self._join("score_rows", calls, self.settings.trainer.step_deadline_s))

    async def step(
        self, shard_refs: Sequence[ObjectRef], value_shard_refs: Sequence[ObjectRef] = ()
    ) -> StepStats:
        """Train one step; each rank fetches only its own shard.

        Args: shard_refs: one reference to a `RankShard` for each rank, in the order of ranks.
        value_shard_refs: likewise to a `ValueShard`, where there is a critic.
        Returns: statistics over all ranks; the seconds are rank 0's.
        Raises: ShardRefused, PolicyTooOld with the weights unchanged; TrainerRankLost.
        """
        values = value_shard_refs or [None] * len(shard_refs)
        calls = [
            rank.call.remote("train_step", ref, of_values)
            for (rank, ref), of_values in zip(self._dealt(shard_refs), values, strict=True)
        ]
        stats: StepStats = (
            await self._join("train_step", calls, self.settings.trainer.step_deadline_s)
        )[0]
        self.version = stats.trainer_version + 1
        return stats

    async def publish(self, board: ActorHandle, term: int, version: int) -> tuple[WeightGroup, ...]:
        """Make the ranks' weights the board's current publication.

        Returns: what the board was given, once it holds copies of its own; empty when the weights
            travel through vLLM's own transfer.
        Raises: ValueError for a version that the ranks do not hold; TrainerRankLost; the board's
            own errors (`actors.weights.board`); TimeoutError when the board does not answer.
        """
        if version != self.version:
            raise ValueError(f"trainer: got version {version}, expected {self.version} to publish")
        timeout_s = self.deadlines.publish_s
        if self.settings.weight_backend != WeightBackend.OBJECT_STORE:
            # Engines can be on other nodes than the trainer, so never loopback.
            address = self.processes[0].node_address
            meeting = await self._on_first("transfer_port", address, timeout_s=timeout_s)
            await self._on_all("send_weights", board, term, version, meeting, timeout_s=timeout_s)
            return ()
        groups: tuple[WeightGroup, ...]
        groups = (await self._on_all("put_weights", timeout_s=timeout_s))[0]
        await _answer(board.publish.remote(term, version, groups), timeout_s)
        return groups

    async def check_logprobs(self) -> Float32s:
        """Score `weights.board.check_tokens` with the weights as they are: [16] float32, nats.

        Raises: TrainerRankLost.
        """
        found = await self._call_all("check_logprobs", timeout_s=self.deadlines.check_s)
        logprobs: Float32s = found[0]
        return logprobs

    async def save(self, step: int, *, version: int, term: int) -> Path:
        """Write a checkpoint; return its directory once it counts.

        Raises: ValueError for a version that the ranks do not hold; CheckpointError;
            TrainerRankLost.
        """
        if version != self.version:
            raise ValueError(f"trainer: got version {version}, expected {self.version} to save")
        paths = await self._call_all("save", step, term, timeout_s=self.deadlines.checkpoint_s)
        return Path(paths[0])

    async def load(self, path: Path) -> Progress:
        """Take weights, optimiser, version and progress from a checkpoint.

        Raises: CheckpointError (load another one before going on); TrainerStartFailed;
            TrainerRankLost.
        """
        found = await self._call_all("load", path, timeout_s=self.deadlines.checkpoint_s)
        progress: Progress = found[0]
        self.version = progress.version
        return progress

    async def stop(self) -> None:
        """Let the ranks leave in order, then end them whatever they do."""
        try:
            if self._ranks:
                await self._on_all("close", timeout_s=self.deadlines.stop_s)
        except TrainerRankLost:
            return
        finally:
            self.kill()

    def kill(self) -> None:
        """End the ranks at once, whatever they do."""
        for rank in self._ranks:
            ray.kill(rank, no_restart=True)
        self._ranks = []
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    async def _actor_options(self, timeout_s: float) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0}
        if self.settings.trainer.device == Device.CPU:
            return {**options, "scheduling_strategy": "SPREAD"}
        num_gpus = self.settings.trainer.gpus_per_rank
        bundle = {"CPU": 1, "GPU": num_gpus}
        self._placement = placement_group(
            [bundle] * self.settings.trainer.num_ranks, strategy="PACK"
        )
        try:
            await _answer(self._placement.ready(), timeout_s)
        except TimeoutError as error:
            self.kill()
            raise TrainerRankLost(
                0, "start", f"no {self.settings.trainer.num_ranks} x {bundle} within {timeout_s} s"
            ) from error
        return {**options, "num_gpus": num_gpus}

    def _bundle(self, rank: int) -> dict[str, Any]:
        if self._placement is None:
            return {}
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._placement, placement_group_bundle_index=rank
        )
        return {"scheduling_strategy": strategy}

    def _dealt(self, shard_refs: Sequence[ObjectRef]) -> list[tuple[ActorHandle, ObjectRef]]:
        if len(shard_refs) != len(self._ranks):
            raise ValueError(f"trainer: got {len(shard_refs)} shards for {len(self._ranks)} ranks")
        return list(zip(self._ranks, shard_refs, strict=True))

    async def _call_all(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """Call a method of every `TrainerRank`."""
        calls = [rank.call.remote(method, *arguments) for rank in self._ranks]
        return await self._join(method, calls, timeout_s)

    async def _on_all(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """Call a method of every actor."""
        calls = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        return await self._join(method, calls, timeout_s)

    async def _on_first(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        call = getattr(self._ranks[0], method).remote(*arguments)
        return (await self._join(method, [call], timeout_s))[0]

    async def _join(self, method: str, calls: Sequence[ObjectRef], timeout_s: float) -> list[Any]:
        """Await every rank; the first that fails or is late decides for all."""
        if not calls:
            raise RuntimeError(f"trainer: {method} on a group that is not running; start it")
        answers = [asyncio.wrap_future(call.future()) for call in calls]
        try:
            await asyncio.wait(answers, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            _abandon(answers)
            raise
        if any(answer.done() and _agreed_error(answer) is not None for answer in answers):
            # The others are raising the same.
            await asyncio.wait(answers, timeout=_GRACE_S)
            errors = [_agreed_error(answer) if answer.done() else None for answer in answers]
            if errors[0] is not None and all(errors):
                raise errors[0]
        if all(answer.done() and answer.exception() is None for answer in answers):
            return [answer.result() for answer in answers]
        # A peer's broken connection often shows before the death that broke it.
        await asyncio.wait(answers, timeout=_BLAME_S)
        lost = _blame(method, answers, timeout_s)
        failure = _start_failure(method, answers) if method in _START_METHODS else None
        self.kill()
        _abandon(answers)
        raise failure or lost


async def _answer(call: Awaitable[_Result], timeout_s: float) -> _Result:
    """Await a Ray call; an error raised by the callee comes out as itself."""
    try:
        return await within(timeout_s, call)
    except RayTaskError as error:
        raise error.cause from error


def _blame(
    method: str, answers: Sequence[asyncio.Future[Any]], timeout_s: float
) -> TrainerRankLost:
    """Name the rank to blame: one that died, else one that failed, else one that is late."""
    failed = [
        (rank, error)
        for rank, answer in enumerate(answers)
        if answer.done() and (error := answer.exception()) is not None
    ]
    if not failed:
        late = next(rank for rank, answer in enumerate(answers) if not answer.done())
        return TrainerRankLost(late, method, f"no answer within {timeout_s:g} s")
    rank, error = min(failed, key=lambda item: not isinstance(item[1], ActorDiedError))
    lost = TrainerRankLost(rank, method, _reason(error))
    lost.__cause__ = error
    return lost


def _start_failure(
    method: str, answers: Sequence[asyncio.Future[Any]]
) -> TrainerStartFailed | None:
    """The first error that a rank raised of its own, where no rank died."""
    errors = [answer.exception() if answer.done() else None for answer in answers]
    if any(isinstance(error, ActorDiedError) for error in errors):
        return None
    for rank, error in enumerate(errors):
        if isinstance(error, RayTaskError) and not _is_caused_elsewhere(error.cause):
            failure = TrainerStartFailed(rank, method, _reason(error))
            failure.__cause__ = error
            return failure
    return None


def _is_caused_elsewhere(cause: BaseException) -> bool:
    # Gloo has no type of its own for a peer that is gone.
    return isinstance(cause, _CAUSED_ELSEWHERE) or "gloo" in str(cause).lower()


def _agreed_error(answer: asyncio.Future[Any]) -> Exception | None:
    error = None if answer.cancelled() else answer.exception()
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, _AGREED) else None


def _abandon(answers: Sequence[asyncio.Future[Any]]) -> None:
    for answer in answers:
        answer.add_done_callback(_ignore_result)


def _ignore_result(answer: asyncio.Future[Any]) -> None:
    """Read the error of a call that is no longer awaited: asyncio logs unread ones."""
    if not answer.cancelled():
        answer.exception()


def _reason(error: BaseException) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    kind = "the process died" if isinstance(cause, RayError) else type(cause).__name__
    text = str(cause).strip().splitlines()
    return f"{kind}: {text[0][:300]}" if text else kind
