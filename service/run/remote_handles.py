"""Call actors of a run as if they were local objects.

`remote_handle` wraps an actor in an object with the actor's methods, so that only the actor
declares the signatures. `run_client` gives the API a client of the run's supervisor. Each call has
a deadline, and raises `ActorLost` instead of Ray's own errors if the actor has died or is late.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.deadline import ActorLost, within
from service.access.keys import NO_LIMITS, KeyLimits
from service.api.control import ControlPort
from service.api.ports import RunPort
from service.api.problems import RunUnavailable
from service.intake.submission import RolloutRequest, SubmitReply
from service.launch.cluster import on_this_node
from service.remote_calls import NAMESPACE, SUPERVISOR_DEADLINE_S, Answer, await_reply
from service.store.errors import LeaseLost, StoreError
from service.store.submissions import offer_of

RPC_DEADLINE_S = 60.0
MERGE_DEADLINE_S = 300.0
BOARD_DEADLINE_S = 10.0
# Limit for a process that starts, imports a tokenizer, and reads files of a few steps.
JOURNAL_DEADLINE_S = 60.0
# Limits for the supervisor's methods that wait for such a process.
DEADLINES_S = dict.fromkeys(("journal", "trajectory"), 2 * JOURNAL_DEADLINE_S)
# Limit for the first call: a supervisor that is starting does not answer, but /readyz must.
CONTACT_DEADLINE_S = 5.0
# Limit for the submissions in one call; a larger submission is sent in a call of its own.
MAX_CALL_BYTES = 1 << 20
_REPLIES = msgspec.msgpack.Decoder(SubmitReply)
Actor = TypeVar("Actor")


async def in_another_process(
    function: Callable[..., Answer], *arguments: Any, name: str, deadline_s: float
) -> Answer:
    """Run a function in another process on this node, and return its result.

    The function's own errors are raised unchanged. name: name of the function in errors.
    Raises: ActorLost if the process dies or exceeds the deadline.
    """
    task = ray.remote(function).options(
        num_cpus=0, max_retries=0, scheduling_strategy=on_this_node()
    )
    return await await_reply(task.remote(*arguments), name=name, deadline_s=deadline_s)


def remote_handle(actor: ActorHandle, kind: type[Actor], *, name: str, deadline_s: float) -> Actor:
    """Return an object with the actor's methods; each call is awaited with a deadline.

    kind: the actor's class, or a Protocol with the same methods. name: name of the actor in errors.
    deadline_s: limit for each call.
    """

    async def ask(method: str, *arguments: Any, **named: Any) -> Any:
        call = getattr(actor, method).remote(*arguments, **named)
        return await await_reply(call, name=name, deadline_s=deadline_s)

    return cast(Actor, _Calls(ask))


class _Calls:
    """An object that has every method: `calls.name(x)` calls `ask("name", x)`."""

    def __init__(self, ask: Callable[..., Awaitable[Any]]) -> None:
        self._ask = ask

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._ask, method)


@contextmanager
def _as_unavailable() -> Iterator[None]:
    """Raise RunUnavailable if the supervisor is lost, or has lost its lease or its database."""
    try:
        yield
    except (LeaseLost, StoreError) as error:
        raise RunUnavailable(str(error)) from error
    except ActorLost as error:
        raise RunUnavailable(f"the run does not answer: {error}") from error


def run_client(run_id: str, *, host: Any = None) -> RunPort:
    """Return a client of a run's supervisor; it works in any process of the cluster.

    The client finds the supervisor by the run's id. host: handle of the run's
    `service.serve.serve_host.RunHost`; None if the run is not on Ray Serve.
    """
    return cast(RunPort, _SupervisorClient(run_id, host=host))


class _SupervisorClient(_Calls):
    """A client that passes each call to the run's supervisor.

    `submit` collects the submissions that arrive during a call, and sends them in the next call.
    """

    def __init__(self, run_id: str, *, host: Any) -> None:
        super().__init__(self._ask_supervisor)
        self._run_id = run_id
        self._host = host
        self._actor: Any = None
        # Packed submissions (offers) to send, each with the future of its reply.
        self._unsent: deque[tuple[bytes, asyncio.Future[bytes]]] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        *,
        key: str = "",
        limits: KeyLimits = NO_LIMITS,
    ) -> SubmitReply:
        offer = msgspec.msgpack.encode(offer_of(requests, key=key, limits=limits))
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._unsent.append((offer, reply))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        with _as_unavailable():
            # After the deadline the offer is not sent any more.
            answer = await await_reply(reply, name="supervisor", deadline_s=SUPERVISOR_DEADLINE_S)
        return _REPLIES.decode(answer)

    async def _send(self) -> None:
        """Send the waiting submissions, several in each call, and pass each reply to its caller."""
        try:
            while batch := self._next_batch():
                answers: Sequence[bytes | Exception]
                try:
                    answers = await self._ask("submit", list(batch.values()))
                except Exception as error:  # noqa: BLE001  # raised again at each reply
                    answers = [error] * len(batch)
                for reply, answer in zip(batch, answers, strict=True):
                    if reply.done():
                        continue
                    if isinstance(answer, Exception):
                        reply.set_exception(answer)
                    else:
                        reply.set_result(answer)
        finally:
            self._sending = None

    def _next_batch(self) -> dict[asyncio.Future[bytes], bytes]:
        """Take waiting submissions for the next call, until they exceed MAX_CALL_BYTES."""
        batch: dict[asyncio.Future[bytes], bytes] = {}
        num_bytes = 0
        while self._unsent and num_bytes < MAX_CALL_BYTES:
            offer, reply = self._unsent.popleft()
            # Leave out an offer if its caller does not wait any more.
            if not reply.done():
                batch[reply] = offer
                num_bytes += len(offer)
        return batch

    async def gateway(self) -> Any:
        """Return the handle of the run's gateway. Raises: RunUnavailable while there is none."""
        found = await self._ask("gateway")
        if found is None:
            raise RunUnavailable(
                "the run cannot serve sessions now, because it is starting or recovering; try "
                "again in a few seconds"
            )
        return found

    @property
    def control(self) -> ControlPort:
        return cast(ControlPort, _Calls(partial(self._ask, "control")))

    async def _ask_supervisor(self, method: str, *arguments: Any, **named: Any) -> Any:
        deadline_s = DEADLINES_S.get(method, SUPERVISOR_DEADLINE_S)
        with _as_unavailable():
            try:
                call = getattr(await self._find(), method).remote(*arguments, **named)
                return await await_reply(call, name="supervisor", deadline_s=deadline_s)
            except ActorLost:
                # Look the supervisor up again at the next call: it may have been replaced.
                self._actor = None
                raise

    async def _find(self) -> Any:
        """Return the supervisor's handle; the first time, check that the supervisor answers."""
        if self._actor is not None:
            return self._actor
        try:
            actor = ray.get_actor(self._run_id, namespace=NAMESPACE)
        except (ValueError, RayError) as error:
            why = await self._why_down() or f"the run {self._run_id} is not running: {error}"
            raise RunUnavailable(why) from error
        contact = actor.readiness.remote()
        try:
            await await_reply(contact, name="supervisor", deadline_s=CONTACT_DEADLINE_S)
        except ActorLost as error:
            raise RunUnavailable(f"the run is starting, or has died: {error}") from error
        self._actor = actor
        return actor

    async def _why_down(self) -> str:
        """Ask the run's host on Ray Serve why the run is down; return "" if it is not known."""
        if self._host is None:
            return ""
        try:
            return str(await within(CONTACT_DEADLINE_S, self._host.why_down.remote()))
        except (RayError, TimeoutError):
            return ""
