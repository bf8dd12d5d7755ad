"""The trainer's ranks as one object that the supervisor awaits.

Every call goes to all ranks and has a deadline. For calls whose time depends on the model's size,
the deadline limits the time in which no rank makes progress (`IDLE_S`).

Invariant: after `TrainerRankLost` or `TrainerStartFailed`, no rank is alive, so that no unfinished
call can take effect later. After `TrainerRankLost`, `service/run/restartable_trainer.py` makes a
new group; after `TrainerStartFailed`, a new group would fail in the same way. Errors that all ranks
raise, such as a refused shard, leave the ranks alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.batch import Float32s, MicroBatch
from actors.deadline import ActorLost, wait_while_moving, within
from actors.deaths import ACTOR_DEATHS
from actors.expert_records import ModelShape
from actors.trainer.actor import CONCURRENCY, TrainerRankActor
from actors.trainer.agreement import PolicyTooOld, ShardRefused, StepAbandoned
from actors.trainer.checkpoint import CheckpointError, Progress
from actors.trainer.settings import RankSettings
from actors.trainer.statistics import StepStats
from actors.weights.board import WeightGroup

_AGREED = (ShardRefused, PolicyTooOld, CheckpointError, StepAbandoned)
# If a rank's own code raises in one of these calls, it would raise again in a new group.
_START_METHODS = ("node_id", "open_rendezvous", "join", "load")
# Errors caused by another process that ended or still holds memory; a new group may succeed.
_CAUSED_ELSEWHERE = (RayError, ConnectionError, TimeoutError, MemoryError)
# Deadlines of every call except a step, in seconds.
PLACE_S = 300.0
"""Time to wait until the cluster has room for the ranks."""
IDLE_S = 300.0
"""Longest time in which no rank makes progress during a start, a load, a checkpoint or a publish,
or in which the weight board makes no progress while it copies the weights.
"""
CHECK_S = 60.0
STOP_S = 10.0
_GRACE_S = 10.0
_BLAME_S = 2.0
# Time to wait for one node that has room for all ranks; after that they are spread over several.
_ONE_NODE_S = 5.0
_LOOK_EVERY_S = 2.0
_Result = TypeVar("_Result")

log = logging.getLogger("rayloom.trainer")


class _RankFailure(Exception):
    """A call failed on one rank; the whole group has been killed."""

    sentence: str

    def __init__(self, rank: int, method: str, reason: str) -> None:
        super().__init__(rank, method, reason)
        self.rank, self.method, self.reason = rank, method, reason

    def __str__(self) -> str:
        return self.sentence.format(rank=self.rank, method=self.method, reason=self.reason)


class TrainerRankLost(_RankFailure, ActorLost):
    """A rank died, failed or did not answer in time; the whole group has been killed."""

    sentence = "trainer: rank {rank} was lost in {method} ({reason}); its group is stopped"


class ShardLost(TrainerRankLost):
    """A shard to be trained is no longer in the object store; the whole group has been killed."""

    sentence = "trainer: rank {rank} could not fetch its shard for {method} ({reason})"


class TrainerStartFailed(_RankFailure):
    """A rank's own code raised during the start; the whole group has been killed."""

    sentence = (
        "trainer: rank {rank} cannot start ({method}: {reason}); a new group would fail in the "
        "same way: correct the model or the trainer's settings"
    )


def reservation_name(run_id: str, term: int) -> str:
    """Return the name of the placement group of a term's ranks."""
    return f"{run_id}-ranks-{term}"


def remove_reservations(run_id: str, *, before_term: int) -> None:
    """Remove the placement groups that earlier starts of a run have left in Ray.

    Each start or recovery of a run begins a term. The groups of terms below `before_term` are
    removed. Ray keeps a placement group as long as the job of its creator runs, even if the creator
    was killed. An old group would hold the CPUs and GPUs that the new ranks wait for.
    """
    older = {reservation_name(run_id, term) for term in range(1, before_term)}
    for group in placement_group_table().values():
        if group["name"] in older and group["state"] != "REMOVED":
            with suppress(ValueError):
                remove_placement_group(get_placement_group(group["name"]))


class TrainerGroup:
    """A group of rank actors with one interface; call `start` first and `stop` last.

    version: the policy version that the ranks hold, which each step increments. shape: the model's
    shape; None before the start.
    """

    def __init__(
        self,
        settings: RankSettings,
        *,
        resources: Mapping[str, float] | None = None,
        reservation: str = "",
    ) -> None:
        """Create a group; `start` starts its ranks.

        Args: resources: resources that a rank requests besides its CPU and its GPUs. reservation:
        the name of the group's placement group (`reservation_name`); empty for no name.
        """
        self.settings = settings
        self._reservation = reservation
        self._resources = dict(resources or {})
        self.version = 0
        self.shape: ModelShape | None = None
        self._ranks: list[ActorHandle] = []
        self._lost: _RankFailure | None = None
        """The error that every call raises after the group has been killed."""
        self._saves: list[ObjectRef] = []
        self._placement: PlacementGroup | None = None

    async def reserve(self) -> None:
        """Reserve the ranks' resources, so that no other actor takes them before `start`.

        `start` calls this if it was not called before.

        Raises: TrainerRankLost if the resources are not available in time.
        """
        if self._placement is not None:
            return
        num_ranks, timeout_s = self.settings.trainer.num_ranks, PLACE_S
        num_gpus = self.settings.trainer.gpus_per_rank
        bundle = {"CPU": 1, **self._resources, **({"GPU": num_gpus} if num_gpus else {})}
        # Prefer one node for all ranks: otherwise gradients cross the network at each step.
        if await self._reserve(bundle, "STRICT_PACK", min(_ONE_NODE_S, timeout_s)):
            return
        log.warning(
            "trainer: no node has room for %d ranks of %s; waiting %g s for one or several nodes",
            num_ranks,
            ", ".join(f"{amount:g} {name}" for name, amount in bundle.items()),
            timeout_s,
        )
        if not await self._reserve(bundle, "PACK", timeout_s):
            raise TrainerRankLost(
                0, "start", f"no room for {num_ranks} ranks of {bundle} within {timeout_s} s"
            )

    async def start(self) -> None:
        """Start the ranks, connect them and load the model.

        Raises: TrainerStartFailed, with the first rank's reason, if the model is missing or its
            architecture cannot be trained; TrainerRankLost if a rank died or the resources are not
            available in time.
        """
        self._check_not_killed()
        await self.reserve()
        # If the group was killed in the meantime, nothing would end ranks that are started now.
        self._check_not_killed()
        options = {
            "num_cpus": 1,
            "num_gpus": self.settings.trainer.gpus_per_rank,
            "resources": self._resources,
            "max_restarts": 0,
        }
        actor_class = ray.remote(concurrency_groups=CONCURRENCY)(TrainerRankActor)
        self._ranks = [
            actor_class.options(**options, **self._bundle(rank)).remote(self.settings, rank)
            for rank in range(self.settings.trainer.num_ranks)
        ]
        is_local = len(set(await self._on_all("node_id"))) == 1
        rendezvous = await self._on_first("open_rendezvous", is_local)
        shapes = await self._on_all("join", rendezvous, is_local)
        self.shape = shapes[0]

    @property
    def serves_engines(self) -> bool:
        """Whether engines receive the current version directly from the ranks, by a broadcast."""
        return self.settings.weight_backend == "collective"

    async def check_alive(self) -> tuple[int, ...]:
        """Check that every rank is alive; a rank also answers while it works on another call.

        Returns: the peak memory of each rank in bytes; () before the start.
        Raises: TrainerRankLost if a rank is dead or no longer broadcasts its weights.
        """
        self._check_not_killed()
        if not self._ranks:
            return ()
        return tuple(await self._on_all("check", timeout_s=self.settings.trainer.step_deadline_s))

    async def score(self, shard_refs: Sequence[ObjectRef]) -> tuple[ObjectRef, ...]:
        """Score rows before they are trained; each rank fetches only its own shard.

        Args: shard_refs: one reference to a `RankShard` for each rank, in the order of ranks.
        Returns: for each rank, a reference to a tuple with the `RowScores` of each of its rows.
        Raises: ShardRefused, StepAbandoned; TrainerRankLost.
        """
        calls = [rank.score_rows.remote(ref) for rank, ref in self._dealt(shard_refs)]
        return tuple(await self._join("score_rows", calls, self.settings.trainer.step_deadline_s))

    async def step(self, shard_refs: Sequence[ObjectRef]) -> StepStats:
        """Train one step; each rank fetches only its own shard.

        Args: shard_refs: one reference to a `RankShard` for each rank, in the order of ranks.
        Returns: statistics over all ranks; the seconds are rank 0's.
        Raises: ShardRefused, PolicyTooOld or StepAbandoned, with the weights unchanged;
            TrainerRankLost.
        """
        calls = [rank.call.remote("train_step", ref) for rank, ref in self._dealt(shard_refs)]
        stats: StepStats = (
            await self._join("train_step", calls, self.settings.trainer.step_deadline_s)
        )[0]
        self.version = stats.trainer_version + 1
        return stats

    async def abandon(self) -> None:
        """Request that the current step is abandoned if none of its updates has been applied.

        `step` or `score` then raises StepAbandoned, or TrainerRankLost if a rank was lost.
        """
        asked = [asyncio.wrap_future(rank.abandon.remote().future()) for rank in self._ranks]
        _ignore_results(asked)
        if asked:
            await asyncio.wait(asked, timeout=_LOOK_EVERY_S)

    async def publish(self, board: ActorHandle, term: int, version: int) -> tuple[WeightGroup, ...]:
        """Publish the ranks' weights on the weight board, so that the engines load them.

        The call does not wait for the engines. It ends when the board has copied the weights. If
        rank 0 broadcasts the weights to the engines, the board gets only their description.

        Returns: the published weights, packed by layer; without their bytes if rank 0 broadcasts.
        Raises: ValueError if the ranks hold another version; TrainerRankLost; ActorLost if the
            board died or makes no progress; the board's own errors (`actors.weights.board`).
        """
        if version != self.version:
            raise ValueError(f"trainer: got version {version}, expected {self.version} to publish")
        groups: tuple[WeightGroup, ...]
        if self.serves_engines:
            packed = await self._on_all("keep_weights", board, term, version)
        else:
            packed = await self._on_all("put_weights")
        groups = packed[0]
        try:
            await self._hand_over(board, term, version, groups)
        except (RayError, TimeoutError) as error:
            # Ray frees the objects of a dead rank; if a rank died, this raises TrainerRankLost.
            await self.check_alive()
            raise ActorLost(f"the weight board is lost: {error}") from error
        return groups

    async def _hand_over(
        self, board: ActorHandle, term: int, version: int, groups: tuple[WeightGroup, ...]
    ) -> None:
        """Give packed weights to the board; raise TimeoutError if the board makes no progress."""

        async def progress() -> dict[int, int]:
            with suppress(RayError, TimeoutError):
                return {0: await within(_LOOK_EVERY_S, board.num_moved.remote())}
            return {}

        answer = asyncio.wrap_future(board.publish.remote(term, version, groups).future())
        _ignore_results([answer])
        await wait_while_moving([answer], progress, idle_s=IDLE_S, look_s=_LOOK_EVERY_S)
        if not answer.done():
            raise TimeoutError(f"it has fetched and copied nothing for {IDLE_S:g} s")
        await _answer(answer, _GRACE_S)

    async def check_logprobs(self, rows: Sequence[MicroBatch] = ()) -> Float32s:
        """Score rows with the current weights (`TrainerRank.check_logprobs`).

        Raises: TrainerRankLost.
        """
        # The limit of a step: the rows may fill the context.
        timeout_s = self.settings.trainer.step_deadline_s if rows else CHECK_S
        found = await self._call_all("check_logprobs", tuple(rows), timeout_s=timeout_s)
        logprobs: Float32s = found[0]
        return logprobs

    async def begin_save(self, step: int, *, term: int) -> None:
        """Copy the ranks' state and start to write it; a step may start before the write ends.

        Raises: TrainerRankLost.
        """
        await self._call_all("begin_save", step, term)
        self._saves = [rank.finish_save.remote() for rank in self._ranks]

    async def finish_save(self) -> Path:
        """Wait until the checkpoint that was begun last is complete; return its directory.

        Raises: CheckpointError; TrainerRankLost.
        """
        return Path((await self._join("finish_save", self._saves, None))[0])

    async def fingerprint(self) -> tuple[int, ...]:
        """Return a hash of each rank's weights and optimiser; equal states have equal hashes.

        Raises: TrainerRankLost.
        """
        timeout_s = self.settings.trainer.step_deadline_s
        return tuple(await self._call_all("fingerprint", timeout_s=timeout_s))

    async def renumber(self, version: int, republished: tuple[int, ...]) -> None:
        """Set the version number of the ranks' weights; the weights do not change.

        republished: versions that were published without a new step, after a restart of ranks.
        Raises: TrainerRankLost.
        """
        await self._call_all("renumber", version, republished, timeout_s=CHECK_S)
        self.version = version

    async def load(self, path: Path) -> Progress:
        """Load weights, optimiser, version and progress from a checkpoint.

        Raises: CheckpointError, after which another checkpoint must be loaded; TrainerStartFailed;
            TrainerRankLost.
        """
        found = await self._call_all("load", path)
        progress: Progress = found[0]
        self.version = progress.version
        return progress

    async def stop(self) -> None:
        """Close the ranks, and kill those that do not end in time."""
        try:
            if self._ranks:
                await self._on_all("close", timeout_s=STOP_S)
        except TrainerRankLost:
            return
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the ranks at once."""
        self._lost = self._lost or TrainerRankLost(0, "kill", "the group was ended")
        for rank in self._ranks:
            ray.kill(rank, no_restart=True)
        self._ranks = []
        self._release_places()

    def _release_places(self) -> None:
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    async def _reserve(self, bundle: dict[str, float], strategy: str, timeout_s: float) -> bool:
        """Create the placement group. If it is not ready in time, remove it and return False."""
        count = self.settings.trainer.num_ranks
        self._placement = placement_group(
            [bundle] * count, strategy=strategy, name=self._reservation
        )
        try:
            await _answer(self._placement.ready(), timeout_s)
        except TimeoutError:
            self._release_places()
            return False
        return True

    def _bundle(self, rank: int) -> dict[str, Any]:
        if self._placement is None:
            return {}
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._placement, placement_group_bundle_index=rank
        )
        return {"scheduling_strategy": strategy}

    def _check_not_killed(self) -> None:
        """Raise the error for which the group was killed; do nothing if it was not killed."""
        if self._lost is not None:
            raise self._lost

    def _dealt(self, shard_refs: Sequence[ObjectRef]) -> list[tuple[ActorHandle, ObjectRef]]:
        self._check_not_killed()
        if len(shard_refs) != len(self._ranks):
            raise ValueError(f"trainer: got {len(shard_refs)} shards for {len(self._ranks)} ranks")
        return list(zip(self._ranks, shard_refs, strict=True))

    async def _call_all(
        self, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every `TrainerRank`. timeout_s: None waits while ranks make progress."""
        calls = [rank.call.remote(method, *arguments) for rank in self._ranks]
        return await self._join(method, calls, timeout_s)

    async def _on_all(
        self, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every `TrainerRankActor`. timeout_s: as for `_call_all`."""
        calls = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        return await self._join(method, calls, timeout_s)

    async def _on_first(self, method: str, *arguments: Any) -> Any:
        self._check_not_killed()
        call = getattr(self._ranks[0], method).remote(*arguments)
        return (await self._join(method, [call], None))[0]

    async def _join(
        self, method: str, calls: Sequence[ObjectRef], timeout_s: float | None
    ) -> list[Any]:
        """Await every rank's answer; if a rank fails or is late, kill the group and raise."""
        if not calls:
            self._check_not_killed()
            raise RuntimeError(f"trainer: {method} on a group that is not running; start it")
        answers = [asyncio.wrap_future(call.future()) for call in calls]
        try:
            if timeout_s is not None:
                await asyncio.wait(answers, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            else:
                await wait_while_moving(
                    answers, self._progress, idle_s=IDLE_S, look_s=_LOOK_EVERY_S
                )
        except asyncio.CancelledError:
            _ignore_results(answers)
            raise
        if any(answer.done() and _agreed_error(answer) is not None for answer in answers):
            # The ranks agree on such an error: wait until the others have raised it too.
            await asyncio.wait(answers, timeout=_GRACE_S)
            errors = [_agreed_error(answer) if answer.done() else None for answer in answers]
            if errors[0] is not None and all(errors):
                raise errors[0]
        if all(answer.done() and answer.exception() is None for answer in answers):
            return [answer.result() for answer in answers]
        if not any(_has_died(answer) for answer in answers):
            # A broken connection to a peer is often noticed before the death of that peer.
            await asyncio.wait(answers, timeout=_BLAME_S)
        limit = f"progress for {IDLE_S:g} s"
        lost = _blame(
            method, answers, limit if timeout_s is None else f"answer within {timeout_s:g} s"
        )
        failure = _start_failure(method, answers) if method in _START_METHODS else None
        # The first loss is kept, because it causes those that follow.
        self._lost = self._lost or failure or lost
        self.kill()
        _ignore_results(answers)
        raise self._lost

    async def _progress(self) -> dict[int, int]:
        looks = [asyncio.wrap_future(rank.progress.remote().future()) for rank in self._ranks]
        if looks:
            await asyncio.wait(looks, timeout=_LOOK_EVERY_S)
        _ignore_results(looks)
        return {
            rank: look.result()
            for rank, look in enumerate(looks)
            if look.done() and not look.cancelled() and look.exception() is None
        }


async def _answer(call: Awaitable[_Result], timeout_s: float) -> _Result:
    try:
        return await within(timeout_s, call)
    except RayTaskError as error:
        raise error.cause from error


def _blame(method: str, answers: Sequence[asyncio.Future[Any]], limit: str) -> TrainerRankLost:
    """Choose the rank to blame for a failed call: dead, else failed, else late; return its error.

    limit: what a late rank failed to give, such as "progress for 60 s".
    """
    failed = [
        (rank, error)
        for rank, answer in enumerate(answers)
        if answer.done() and (error := answer.exception()) is not None
    ]
    if not failed:
        late = next(rank for rank, answer in enumerate(answers) if not answer.done())
        return TrainerRankLost(late, method, f"no {limit}")
    rank, error = min(failed, key=lambda item: not isinstance(item[1], ACTOR_DEATHS))
    kind = ShardLost if isinstance(error, ObjectLostError) else TrainerRankLost
    lost = kind(rank, method, _reason(error))
    lost.__cause__ = error
    return lost


def _start_failure(
    method: str, answers: Sequence[asyncio.Future[Any]]
) -> TrainerStartFailed | None:
    """Return the first error that a rank's own code raised; None if a rank died or none raised."""
    errors = [answer.exception() if answer.done() else None for answer in answers]
    if any(isinstance(error, ACTOR_DEATHS) for error in errors):
        return None
    for rank, error in enumerate(errors):
        if isinstance(error, RayTaskError) and not _is_caused_elsewhere(error.cause):
            failure = TrainerStartFailed(rank, method, _reason(error))
            failure.__cause__ = error
            return failure
    return None


def _is_caused_elsewhere(cause: BaseException) -> bool:
    # These imports take two seconds. A group that starts without an error does not need them.
    import torch
    import torch.distributed as dist

    kinds = (*_CAUSED_ELSEWHERE, dist.DistError, torch.OutOfMemoryError)
    # Gloo has no exception type for a lost peer.
    return isinstance(cause, kinds) or "gloo" in str(cause).lower()


def _has_died(answer: asyncio.Future[Any]) -> bool:
    return answer.done() and isinstance(answer.exception(), ACTOR_DEATHS)


def _agreed_error(answer: asyncio.Future[Any]) -> Exception | None:
    error = None if answer.cancelled() else answer.exception()
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, _AGREED) else None


def _ignore_results(answers: Sequence[asyncio.Future[Any]]) -> None:
    for answer in answers:
        answer.add_done_callback(_ignore_result)


def _ignore_result(answer: asyncio.Future[Any]) -> None:
    """Read the error of a call that is no longer awaited, because asyncio logs unread errors."""
    if not answer.cancelled():
        answer.exception()


def _reason(error: BaseException) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    kind = "the process died" if isinstance(cause, RayError) else type(cause).__name__
    text = str(cause).strip().splitlines()
    return f"{kind}: {text[0][:300]}" if text else kind
