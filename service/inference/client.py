"""The client with which environments sample turns; it sends many turns in one Serve call.

    client = ServePolicyClient(app_name)
    first = await client.generate(request)
    # Send the trajectory's next turn to the replica that has its prefix cached.
    await client.generate(replace(later, cache_salt=first.cache_salt, replica=first.replica))

A Serve call takes longer than a turn of a small model. So requests to the same replica within a few
milliseconds share a call, and the replica streams the answers back as they finish. Turns without a
replica, such as a trajectory's first turn, are sent in small calls, which Serve distributes by
load. A client belongs to one event loop; pickling keeps only the name of its application.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from actors.deadline import TaskSet, retry
from actors.environment.policy import (
    GenerateReply,
    GenerateRequest,
    PolicyDeadlineExceeded,
    PolicyUnavailable,
)

# Seconds after a request's deadline in which the replica can still report the missed deadline.
DEADLINE_MARGIN_S = 1.0
MAX_REQUESTS_PER_CALL = 256
MAX_FIRST_TURNS_PER_CALL = 16
MAX_LOST = 64
# To make fewer calls, requests are gathered for this share of a turn's time, within bounds.
# The next requests of turns that ended in the same engine step may arrive at different times.
LINGER_SHARE = 0.02
SHORTEST_LINGER_S, LONGEST_LINGER_S = 0.001, 0.005

DEPLOYMENT_NAME = "InferenceReplica"
TRANSPORT_ERRORS = (RayError, RayServeException, grpc.RpcError)

Failure = PolicyUnavailable | PolicyDeadlineExceeded | ValueError
Answer = GenerateReply | Failure
# (position in the batch, answer) of the requests that finished in one tick of the replica.
AnswerChunk = list[tuple[int, Answer]]

_Answered = TypeVar("_Answered")


class ReplicaAffinityRouter(RequestRouter):
    """A router that sends a call to the replica that the call's session id names.

    If the session id names no live replica, the call goes to the less busy of two random replicas.
    The trajectory's later calls then name the replica that answered (`GenerateRequest.replica`), so
    the trajectories of a lost replica are distributed by load.

    Serve's default router may send a waiting call to a replica that was chosen for another call.
    Serve imports this class by its name in each process that uses a handle.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one group of replicas, from which Serve picks the replica with the shortest queue.

        If the request's session id names a live replica, the group has only that replica.
        Otherwise it has two random replicas.
        """
        if not candidate_replicas:
            return []
        wanted = "" if pending_request is None else pending_request.metadata.session_id
        named = [each for each in candidate_replicas if each.replica_id.unique_id == wanted]
        return [named or random.sample(candidate_replicas, min(2, len(candidate_replicas)))]


def engines_handle(app_name: str) -> DeploymentHandle[Any]:
    """Return the Serve handle through which to call the engines of an application.

    The engines' deployment is not always the application's ingress (`HaproxyIngress`).
    Raises: RayServeException if there is no such deployment.
    """
    try:
        return serve.get_deployment_handle(DEPLOYMENT_NAME, app_name)
    except KeyError as error:
        raise RayServeException(f"the application {app_name!r} has no engines") from error


def as_answer(error: Failure) -> Failure:
    """Convert an error of an engine to an error that can be pickled and sent to the client.

    The result has the same message, and is a PolicyUnavailable, PolicyDeadlineExceeded or
    ValueError. vLLM raises subclasses of these, some of which cannot be pickled.
    """
    for kind in (PolicyUnavailable, PolicyDeadlineExceeded):
        if isinstance(error, kind):
            return kind(str(error))
    return ValueError(str(error))


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """A request that waits for its answer."""

    request: GenerateRequest
    answer: asyncio.Future[Answer]
    """The future that gets the answer; it is cancelled if the caller no longer waits."""
    deadline_at: float
    """The request's deadline by the event loop's clock, in seconds."""


class LostReplicas:
    """A record of the newest `MAX_LOST` replicas that did not answer a request sent to them."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def address(self, replica: str) -> str:
        """Return the replica to which to send a request: `replica`, or "" (any) if it is lost."""
        return "" if replica in self._names else replica

    def learn(self, asked: str, answer: Answer) -> None:
        """Update the record of lost replicas from the answer to a request.

        The replica `asked` is recorded as lost if the answer is PolicyUnavailable, or if Serve sent
        the request to another replica. A replica that answered is no longer recorded as lost.
        Args: asked: the replica that the request named; empty if it named none.
        """
        if isinstance(answer, GenerateReply):
            self._names.pop(answer.replica, None)
        is_elsewhere = isinstance(answer, GenerateReply) and answer.replica != asked
        if asked and (is_elsewhere or isinstance(answer, PolicyUnavailable)):
            self._names[asked] = None
            if len(self._names) > MAX_LOST:
                del self._names[next(iter(self._names))]


class ServePolicyClient:
    """The `PolicyClient` (`actors.environment.policy`) that calls the engines through Serve."""

    def __init__(self, app_name: str) -> None:
        self.app_name = app_name
        self._handle: DeploymentHandle[Any] | None = None
        self._connecting: asyncio.Lock | None = None
        self._waiting: dict[str, list[_Call]] = {}
        self._lost = LostReplicas()
        self._turn_s = 0.0
        """Moving average of the seconds from a request to its answer."""
        self._batches = TaskSet()

    def __reduce__(self) -> tuple[type[ServePolicyClient], tuple[str]]:
        return ServePolicyClient, (self.app_name,)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample one turn, and return the reply; if there is no engine, retry until the deadline.

        Raises: PolicyDeadlineExceeded and PolicyUnavailable as in `until_available`; ValueError if
            the request can never be served.
        """
        deadline_at = asyncio.get_running_loop().time() + request.deadline_s
        return await until_available(
            lambda: self._ask(request, deadline_at),
            deadline_s=request.deadline_s,
            margin_s=DEADLINE_MARGIN_S,
        )

    async def _ask(self, request: GenerateRequest, deadline_at: float) -> GenerateReply:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        call = _Call(request=request, answer=loop.create_future(), deadline_at=deadline_at)
        try:
            if self._handle is None:
                await self._connect()
            self._enqueue(call, loop)
            answer = await call.answer
        finally:
            call.answer.cancel()
        self._lost.learn(request.replica, answer)
        if isinstance(answer, Exception):
            raise answer
        self._turn_s += 0.1 * (loop.time() - asked_at - self._turn_s)
        return answer

    async def _connect(self) -> None:
        self._connecting = self._connecting or asyncio.Lock()
        async with self._connecting:
            if self._handle is not None:
                return
            try:
                handle = await asyncio.to_thread(engines_handle, self.app_name)
            except TRANSPORT_ERRORS as error:
                raise PolicyUnavailable(
                    f"inference: no deployment {self.app_name!r}; deploy it first"
                ) from error
            # Run the router in this event loop, so that no chunk is passed between event loops.
            # Serve caches its own handle for the process's other loops, so make a new one.
            handle = DeploymentHandle(handle.deployment_name, handle.app_name)
            handle._init(_run_router_in_separate_loop=False)
            # gRPC by value makes three times as many calls per second as Serve's default by
            # reference.
            self._handle = handle.options(
                method_name="generate_batch",
                stream=True,
                _by_reference=False,
                request_serialization="pickle",
                response_serialization="pickle",
            )

    def _enqueue(self, call: _Call, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            loop.call_later(linger_s(self._turn_s), self._flush)
        self._waiting.setdefault(self._lost.address(call.request.replica), []).append(call)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for replica, calls in waiting.items():
            size = MAX_REQUESTS_PER_CALL if replica else MAX_FIRST_TURNS_PER_CALL
            for start in range(0, len(calls), size):
                batch = calls[start : start + size]
                task = self._batches.begin(self._exchange(replica, batch))
                _cancel_when_abandoned(task, batch)

    async def _exchange(self, replica: str, batch: list[_Call]) -> None:
        assert self._handle is not None
        handle = self._handle.options(session_id=replica) if replica else self._handle
        now = asyncio.get_running_loop().time()
        requests = [
            replace(call.request, deadline_s=max(call.deadline_at - now, 0.0)) for call in batch
        ]
        response = handle.remote(requests)
        try:
            async for chunk in response:
                for position, answer in chunk:
                    _resolve(batch[position], answer)
        except TRANSPORT_ERRORS as error:
            problem = f"the replica was lost ({type(error).__name__})"
        except asyncio.CancelledError:
            response.cancel()
            raise
        else:
            problem = "the replica ended a batch without an answer"
        for call in batch:
            _resolve(call, PolicyUnavailable(f"inference: {problem}"))


def linger_s(turn_s: float) -> float:
    """Return how many seconds the client gathers requests before it sends them in one call.

    Args: turn_s: mean duration of a turn in seconds. Example: linger_s(0.2) -> 0.004
    """
    return min(max(LINGER_SHARE * turn_s, SHORTEST_LINGER_S), LONGEST_LINGER_S)


def _resolve(call: _Call, answer: Answer) -> None:
    if not call.answer.done():
        call.answer.set_result(answer)


def _cancel_when_abandoned(task: asyncio.Task[None], batch: list[_Call]) -> None:
    """Cancel a batch once no caller waits for its answers; the engine then aborts its turns."""
    num_open = len(batch)

    def count(future: asyncio.Future[Answer]) -> None:
        nonlocal num_open
        num_open -= 1
        if num_open == 0 and future.cancelled():
            task.cancel()

    for call in batch:
        call.answer.add_done_callback(count)


async def until_available(
    attempt: Callable[[], Awaitable[_Answered]], *, deadline_s: float, margin_s: float = 0.0
) -> _Answered:
    """Call `attempt` until it succeeds, for at most deadline_s, and return its result.

    If no engine answered (PolicyUnavailable), pause and try again. Any other error is raised at
    once. Repeating a request is safe, because a dead engine has returned none of its tokens.
    Args: margin_s: seconds after the deadline until a running attempt is cancelled. In this time
    the attempt can raise PolicyDeadlineExceeded itself.
    Raises: after the deadline, PolicyUnavailable if any attempt found no engine, otherwise
    PolicyDeadlineExceeded.
    """
    lost: PolicyUnavailable | None = None

    async def ask() -> _Answered:
        nonlocal lost
        try:
            return await attempt()
        except PolicyUnavailable as error:
            lost = error
            raise

    try:
        async with asyncio.timeout(deadline_s + margin_s):
            return await retry(ask, on=PolicyUnavailable, limit_s=deadline_s)
    except (TimeoutError, PolicyDeadlineExceeded, PolicyUnavailable) as error:
        if lost is not None:
            raise PolicyUnavailable(
                f"inference: no engine answered within {deadline_s:.3g} s; last error: {lost}"
            ) from error
        if isinstance(error, PolicyDeadlineExceeded):
            raise
        raise PolicyDeadlineExceeded(f"inference: no answer within {deadline_s:.3g} s") from error
