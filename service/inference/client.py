"""The policy as environments see it: one awaitable a turn, many turns a Serve call.

The requests of about one millisecond that go to the same replica travel together (see `wire`), over
gRPC. First turns have no replica yet: they are split into small calls, so that Serve's queue
lengths can spread them. One client serves one event loop; it is picklable, by application name.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.policy import (
    GenerateReply,
    GenerateRequest,
    PolicyUnavailable,
)
from service.inference.patience import until_available
from service.inference.wire import Answer, GenerateFailure, split_salt

# Beyond the request's own deadline, for the replica's answer that it has passed.
DEADLINE_MARGIN_S = 1.0
MAX_REQUESTS_PER_CALL = 256
MAX_FIRST_TURNS_PER_CALL = 16
# Turns that one engine step ended come back to the environments together, but need not reach the
# next generate in the same tick; a tenth of a step's time gathers them.
LINGER_S = 0.001

TRANSPORT_ERRORS = (RayError, RayServeException, grpc.RpcError)


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """A request on its way; `answer` is cancelled when nobody waits for it any more."""

    request: GenerateRequest
    answer: asyncio.Future[Answer]
    deadline_at: float = field(default=0.0)


class ServePolicyClient:
    """Implements `actors.policy.PolicyClient` over a deployment's handle."""

    def __init__(self, app_name: str) -> None:
        self.app_name = app_name
        self._handle: DeploymentHandle[Any] | None = None
        self._connecting: asyncio.Lock | None = None
        self._waiting: dict[str, list[_Call]] = {}
        self._batches: set[asyncio.Task[None]] = set()

    def __reduce__(self) -> tuple[type[ServePolicyClient], tuple[str]]:
        return ServePolicyClient, (self.app_name,)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample one turn; while no engine is there, ask again until the deadline.

        Raises: PolicyDeadlineExceeded, PolicyUnavailable; ValueError for a request that can never
            be served.
        """
        deadline_at = asyncio.get_running_loop().time() + request.deadline_s
        return await until_available(
            lambda: self._ask(request, deadline_at),
            deadline_s=request.deadline_s,
            margin_s=DEADLINE_MARGIN_S,
        )

    async def _ask(self, request: GenerateRequest, deadline_at: float) -> GenerateReply:
        loop = asyncio.get_running_loop()
        call = _Call(request=request, answer=loop.create_future(), deadline_at=deadline_at)
        try:
            if self._handle is None:
                await self._connect()
            self._enqueue(call, loop)
            answer = await call.answer
        finally:
            call.answer.cancel()
        if isinstance(answer, GenerateFailure):
            raise answer.exception()
        return answer

    async def _connect(self) -> None:
        self._connecting = self._connecting or asyncio.Lock()
        async with self._connecting:
            if self._handle is not None:
                return
            try:
                handle = await asyncio.to_thread(serve.get_app_handle, self.app_name)
            except TRANSPORT_ERRORS as error:
                raise PolicyUnavailable(
                    f"inference: no deployment {self.app_name!r}; deploy it first"
                ) from error
            # gRPC by value: three times the calls a second of Serve's default by reference.
            self._handle = handle.options(
                method_name="generate_batch", stream=True, _by_reference=False
            )

    def _enqueue(self, call: _Call, loop: asyncio.AbstractEventLoop) -> None:
        _, replica = split_salt(call.request.cache_salt)
        if not self._waiting:
            loop.call_later(LINGER_S, self._flush)
        self._waiting.setdefault(replica, []).append(call)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for replica, calls in waiting.items():
            size = MAX_REQUESTS_PER_CALL if replica else MAX_FIRST_TURNS_PER_CALL
            for start in range(0, len(calls), size):
                batch = calls[start : start + size]
                task = asyncio.create_task(self._exchange(replica, batch))
                self._batches.add(task)
                task.add_done_callback(self._batches.discard)
                _cancel_when_abandoned(task, batch)

    async def _exchange(self, replica: str, batch: list[_Call]) -> None:
        assert self._handle is not None
        handle = self._handle.options(session_id=replica) if replica else self._handle
        now = asyncio.get_running_loop().time()
        # The deadline counts from the caller's call, wherever the request waited since.
        requests = [
            replace(call.request, deadline_s=max(call.deadline_at - now, 0.0)) for call in batch
        ]
        response = handle.remote(requests)
        try:
            async for chunk in response:
                for position, answer in chunk:
                    _settle(batch[position], answer)
        except TRANSPORT_ERRORS as error:
            failure = GenerateFailure.of(
                PolicyUnavailable(f"inference: the replica is gone ({type(error).__name__})")
            )
        except asyncio.CancelledError:
            response.cancel()
            raise
        else:
            failure = GenerateFailure.of(
                PolicyUnavailable("inference: the replica ended a batch without an answer")
            )
        for call in batch:
            _settle(call, failure)


def _settle(call: _Call, answer: Answer) -> None:
    if not call.answer.done():
        call.answer.set_result(answer)


def _cancel_when_abandoned(task: asyncio.Task[None], batch: list[_Call]) -> None:
    """Cancel the exchange once nobody waits for any of its answers; the engine then aborts them."""
    num_open = len(batch)

    def count(future: asyncio.Future[Answer]) -> None:
        nonlocal num_open
        num_open -= 1
        if num_open == 0 and future.cancelled():
            task.cancel()

    for call in batch:
        call.answer.add_done_callback(count)
