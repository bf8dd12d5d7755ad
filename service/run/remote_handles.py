"""The run's actors as the service calls them: each call with a deadline, Ray's errors translated.

A handle has its actor's own methods, so that their signatures are stated once, at the actor. Every
call may raise `ActorLost`; the supervisor then starts a new term from the newest checkpoint.
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
from service.access.keys import NO_LIMITS, KeyLimits, NamedKey
from service.api.ports import Readiness
from service.api.problems import RunUnavailable
from service.inspect.listing import Filters
from service.inspect.lookup import JournalPage, Place
from service.intake.feed import FeedPage
from service.intake.listing import SessionFilter, SessionPage, SessionPlace, TaskFilter, TaskPage
from service.intake.submission import RolloutRequest, SubmissionView, SubmitReply
from service.launch.cluster import on_this_node
from service.remote_calls import NAMESPACE, SUPERVISOR_DEADLINE_S, Answer, await_reply
from service.report.document import RunPicture
from service.store.run_store import LeaseLost, StoreError
from service.store.submissions import offer_of

RPC_DEADLINE_S = 60.0
MERGE_DEADLINE_S = 300.0
BOARD_DEADLINE_S = 10.0
# Of a process that starts, imports a tokenizer, and reads files of a few steps.
JOURNAL_DEADLINE_S = 60.0
# Of the first call: a supervisor that is starting does not answer, but /readyz has to.
CONTACT_DEADLINE_S = 5.0
# Of the submissions in one call; a larger one has a call of its own.
MAX_CALL_BYTES = 1 << 20
_REPLIES = msgspec.msgpack.Decoder(SubmitReply)
Actor = TypeVar("Actor")


async def in_another_process(
    function: Callable[..., Answer], *arguments: Any, name: str, deadline_s: float
) -> Answer:
    """Run a function in a process of its own on this node; its errors come out as themselves.

    name: for an error's text. Raises: ActorLost when it has died or takes too long.
    """
    task = ray.remote(function).options(
        num_cpus=0, max_retries=0, scheduling_strategy=on_this_node()
    )
    return await await_reply(task.remote(*arguments), name=name, deadline_s=deadline_s)


def remote_handle(actor: ActorHandle, kind: type[Actor], *, name: str, deadline_s: float) -> Actor:
    """An object with the actor's methods; each call is awaited, with a deadline.

    kind: its class, or a Protocol. name: for an error's text. deadline_s: of each call.
    """
    return cast(Actor, _RemoteHandle(actor, name=name, deadline_s=deadline_s))


class _RemoteHandle:
    def __init__(self, actor: ActorHandle, *, name: str, deadline_s: float) -> None:
        self._actor, self._name, self._deadline_s = actor, name, deadline_s

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._call, method)

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        call = getattr(self._actor, method).remote(*arguments, **named)
        return await await_reply(call, name=self._name, deadline_s=self._deadline_s)


@contextmanager
def _as_unavailable() -> Iterator[None]:
    """Raises: RunUnavailable for a supervisor that is gone, or can write nothing."""
    try:
        yield
    except (LeaseLost, StoreError) as error:
        raise RunUnavailable(str(error)) from error
    except ActorLost as error:
        raise RunUnavailable(f"the run does not answer: {error}") from error


class SupervisorClient:
    """`service.api.ports.RunPort` in any process: the supervisor, found by the run's id.

    What is submitted while a call with submissions is under way goes with the next one, in order.
    """

    def __init__(self, run_id: str, *, host: Any = None) -> None:
        """host: a handle of `service.serve.serve_host.RunHost`, where there is one."""
        self._run_id = run_id
        self._host = host
        self._actor: Any = None
        # Offers, and where their replies are waited for.
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
            # Given up, it is not sent any more.
            answer = await await_reply(reply, name="supervisor", deadline_s=SUPERVISOR_DEADLINE_S)
        return _REPLIES.decode(answer)

    async def _send(self) -> None:
        """Send what waits, in one call after the other."""
        try:
            while batch := self._next_batch():
                answers: Sequence[bytes | Exception]
                try:
                    answers = await self._ask("submit", list(batch.values()))
                except Exception as error:  # noqa: BLE001  # raised again where each waits
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
        """By where its reply is waited for, each offer that goes with the next call."""
        batch: dict[asyncio.Future[bytes], bytes] = {}
        num_bytes = 0
        while self._unsent and num_bytes < MAX_CALL_BYTES:
            offer, reply = self._unsent.popleft()
            # Nobody waits any more for the others.
            if not reply.done():
                batch[reply] = offer
                num_bytes += len(offer)
        return batch

    async def submission(
        self, submission_id: str, *, sees: str | None = None
    ) -> SubmissionView | None:
        return await self._ask("submission", submission_id, sees)

    async def tasks(self, wanted: TaskFilter, *, after: int, limit: int) -> TaskPage:
        return await self._ask("tasks", wanted, after, limit)

    async def sessions(
        self, wanted: SessionFilter, *, after: SessionPlace | None, limit: int
    ) -> SessionPage:
        return await self._ask("sessions", wanted, after, limit)

    async def feed(self, *, after: int, limit: int, sees: str | None = None) -> FeedPage:
        return await self._ask("feed", after, limit, sees)

    async def picture(self, *, term: int, after: int) -> RunPicture:
        return await self._ask("picture", term, after)

    async def journal(self, wanted: Filters, *, after: Place | None) -> JournalPage:
        return await self._ask("journal", wanted, after, deadline_s=2 * JOURNAL_DEADLINE_S)

    async def trajectory(self, name: str) -> bytes | None:
        return await self._ask("trajectory", name, deadline_s=2 * JOURNAL_DEADLINE_S)

    async def cancel(self, submission_id: str, *, sees: str | None = None) -> SubmissionView | None:
        return await self._ask("cancel", submission_id, sees)

    async def keys(self) -> tuple[NamedKey, ...]:
        return await self._ask("keys")

    async def add_key(self, key: NamedKey) -> bool:
        return await self._ask("add_key", key)

    async def revoke_key(self, name: str) -> NamedKey | None:
        return await self._ask("revoke_key", name)

    async def stop(self, grace_s: float | None) -> None:
        await self._ask("stop", grace_s)

    async def readiness(self) -> Readiness:
        return await self._ask("readiness")

    async def gateway(self) -> Any:
        """The handle of the run's gateway. Raises: RunUnavailable while there is none."""
        found = await self._ask("gateway")
        if found is None:
            raise RunUnavailable("the run has no gateway for sessions now: it starts, or recovers")
        return found

    async def control(self, call: str, *arguments: Any) -> Any:
        """Make a call of `service.run.control.Control`. Raises: ControlRefused, RunUnavailable."""
        return await self._ask("control", call, *arguments)

    async def _ask(
        self, method: str, *arguments: Any, deadline_s: float = SUPERVISOR_DEADLINE_S
    ) -> Any:
        with _as_unavailable():
            try:
                call = getattr(await self._find(), method).remote(*arguments)
                return await await_reply(call, name="supervisor", deadline_s=deadline_s)
            except ActorLost:
                # Looked up anew at the next call: it may have been replaced.
                self._actor = None
                raise

    async def _find(self) -> Any:
        """The supervisor, once it has answered. Raises: RunUnavailable for one that starts."""
        if self._actor is not None:
            return self._actor
        try:
            actor = ray.get_actor(self._run_id, namespace=NAMESPACE)
        except (ValueError, RayError) as error:
            why = await self._why_down() or f"the run {self._run_id} is not there: {error}"
            raise RunUnavailable(why) from error
        contact = actor.readiness.remote()
        try:
            await await_reply(contact, name="supervisor", deadline_s=CONTACT_DEADLINE_S)
        except ActorLost as error:
            raise RunUnavailable(f"the run is starting, or has died: {error}") from error
        self._actor = actor
        return actor

    async def _why_down(self) -> str:
        """What the run's host says; empty where nothing is known."""
        if self._host is None:
            return ""
        try:
            return str(await within(CONTACT_DEADLINE_S, self._host.why_down.remote()))
        except (RayError, TimeoutError):
            return ""
