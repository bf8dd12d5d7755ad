"""The gateway of a run: the sessions of its external agents, and the Ray actor that serves them.

Invariants: a session has the same state in memory and in the store, so that another gateway can
continue after a kill. A trajectory has every turn that a client may have seen, exactly once. Only
sessions in use stay in memory.

`Sessions` finds the session that a call names, and checks the call's key. The module `session` does
the rest.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from actors.environment.policy import PolicyClient
from actors.environment.rendering import ChatRenderer, load_renderer
from actors.metrics import GatewayMetrics
from actors.trajectory_queue.exchange import RolloutExchange
from actors.trajectory_queue.window import oldest_admitted_version
from actors.types import SESSION, UPLOADED, Outcome, RolloutAssignment, Trajectory
from service.access.keys import Caller, KeyBook, NamedKey, digest_of, may_see
from service.gateway.chat import ChatCall, ChatReply, RefusalCode, Refused, unavailable
from service.gateway.commits import GroupCommit
from service.gateway.ends import stopping, trajectory_of
from service.gateway.key_check import unknown_session
from service.gateway.sampling import EngineClient, GatewaySettings, Sampler, TurnRates
from service.gateway.session import Session
from service.gateway.uploads import Uploads
from service.intake.session import Finish, StoredSession, session_id
from service.store.controls import read_keys
from service.store.database import PATIENCE_S
from service.store.errors import StoreError
from service.store.run_store import RunStore
from service.store.sessions import SessionStore
from service.store.uploads import UploadStore
from service.telemetry.endpoint import Reading, push_forever
from service.worker_thread import WorkerThread

WATCH_EVERY_S = 1.0
# Seconds to wait for the database; shorter than the time after which the store itself gives up.
STORE_HOLD_S = PATIENCE_S / 2
# The digest of a request without a key.
NO_KEY = digest_of("")


class Sessions:
    """The sessions of a run: loads them when they are called, and ends those whose time is up.

    Belongs to one event loop.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        renderer: ChatRenderer,
        make_policy: Callable[[], PolicyClient],
        store: SessionStore,
        commits: GroupCommit,
        metrics: GatewayMetrics | None = None,
        read_keys: Callable[[], Sequence[NamedKey]] = lambda: (),
        now: Callable[[], float] = time.time,
    ) -> None:
        """Read the named keys, and start without sessions in memory.

        now: returns seconds since 1970. Raises: StoreError.
        """
        self._settings = settings
        self.republished = settings.republished
        self._store = store
        self._commits = commits
        self._metrics = metrics or GatewayMetrics()
        self._read_keys = read_keys
        self._now = now
        self._keys = KeyBook(read_keys())
        self._background = WorkerThread("gateway", expected=Refused)
        self._rates = TurnRates(self._keys, default_limits=settings.default_limits, now=now)
        self._sampler = Sampler(
            settings,
            renderer=renderer,
            engine=EngineClient(make_policy),
            background=self._background,
            rates=self._rates,
            now=now,
        )
        self._sessions: dict[str, asyncio.Task[Session | None]] = {}
        """The tasks that load, or have loaded, the sessions in memory, by the session's name."""
        self._claiming = asyncio.Lock()
        self._is_closed = False

    # -- calls of agents ----------------------------------------------------------------------

    async def chat(self, call: ChatCall) -> ChatReply:
        """Answer an agent's request with a new turn, or a repeated request with its stored turn.

        Raises: Refused.
        """
        began = time.monotonic()
        deadline_at = asyncio.get_running_loop().time() + call.deadline_s
        try:
            session = await self._of_key(call.session_id, call.key_digest, wanted="agent")
            reply = await session.ask(call, deadline_at=deadline_at)
        except Refused as refused:
            self._metrics.refused.labels(code=refused.code.value).inc()
            raise
        self._metrics.seconds.observe(time.monotonic() - began)
        return reply

    async def num_prompt_tokens(self, call: ChatCall) -> int:
        """Return the number of tokens of a request's prompt; sample and store nothing.

        Raises: Refused.
        """
        session = await self._of_key(call.session_id, call.key_digest, wanted="agent")
        return await session.num_prompt_tokens(call.request)

    async def check_key(self, session_id: str, key_digest: str) -> None:
        """Check that a key is one of a session's two keys. Raises: Refused if it is not."""
        try:
            await self._of_key(session_id, key_digest, wanted="agent")
        except Refused as refused:
            # The reward key is a key of the session too; the call itself checks what it allows.
            if refused.code is not RefusalCode.FORBIDDEN:
                raise

    async def abandon(self, session_id: str, request_id: str) -> None:
        """Record that the client of a request left before the answer (`Session.abandon`).

        Do nothing if the session does not exist. Raises: Refused if the store does not answer.
        """
        session = await self._find(session_id)
        if session is not None:
            session.abandon(request_id)

    def count_turn(self, key_name: str) -> None:
        """Count a turn without a session (/api/v1/generate) in the rate limit of a named key.

        Raises: Refused if the key has reached its limit.
        """
        self._rates.take(key_name)

    # -- calls of clients ---------------------------------------------------------------------

    async def claim(self, submission_id: str, name: str, sees: str | None = None) -> int | None:
        """Give the next unclaimed session of a group to an agent that joins the group.

        Args: submission_id: the group's id. name: chosen by the client for this agent; the same
        name gets the same session again. sees: the tenant that must own the group; None: any.
        Returns: the session's number in the group; None if there is no such group.
        Raises: Refused if no session of the group is free.
        """
        async with self._claiming:
            group = await self._of_submission(submission_id, sees)
            if not group:
                return None
            for session in group:
                if session.stored.claimed_by == name:
                    return session.stored.member
            none_free = Refused(
                RefusalCode.CONFLICT,
                f"none of the {len(group)} sessions of group {submission_id} is free: all are "
                "claimed, or the group is closed or cancelled; begin another group",
            )
            free = _free(group)
            if not free:
                raise none_free
            try:
                await free[0].claim(name)
            except Refused as refused:
                # The group is over, but only the store had recorded this.
                is_over = refused.code is RefusalCode.SESSION_CLOSED
                raise (none_free if is_over else refused) from refused.__cause__
            return free[0].stored.member

    async def close_group(self, submission_id: str, sees: str | None = None) -> int | None:
        """End a group's unclaimed sessions without training them, and return their number.

        sees: the tenant that must own the group; None: any tenant. Returns: None if there is no
        such group. Raises: Refused.
        """
        async with self._claiming:
            group = await self._of_submission(submission_id, sees)
            free = _free(group)
            for session in free:
                await session.discard("its group was closed")
            return len(free) if group else None

    async def discard(self, session_id: str, sees: str | None = None) -> StoredSession | None:
        """End a session without training its turns, and return its state.

        A session that has ended stays as it is. sees: the tenant that must own the session; None:
        any tenant. Returns: None if there is no such session. Raises: Refused.
        """
        session = await self._visible(session_id, sees)
        if session is None:
            return None
        await session.discard("it was discarded")
        return session.view()

    async def view(self, session_id: str, sees: str | None = None) -> StoredSession | None:
        """Return the state of a session, or None if there is no such session.

        sees: the tenant that must own the session; None: any tenant. Raises: Refused.
        """
        session = await self._visible(session_id, sees)
        return None if session is None else session.view()

    # -- calls with the reward key ------------------------------------------------------------

    async def finish(
        self, session_id: str, key_digest: str, finish: Finish, client: Caller | None = None
    ) -> StoredSession:
        """End a session with the reward and outcome in `finish`, and return the session's state.

        The same request again changes nothing. client: the caller, if it sent a named key instead
        of the session's reward key; it must be allowed to see the session. Raises: Refused.
        """
        session = await self._of_reward(session_id, key_digest, client)
        await session.finish(finish)
        return session.view()

    async def give_reward(
        self, session_id: str, key_digest: str, given: Finish, client: Caller | None = None
    ) -> StoredSession:
        """Give a finished session its pending reward, and return the session's state.

        client: the caller, if it sent a named key instead of the session's reward key. Raises:
        Refused.
        """
        session = await self._of_reward(session_id, key_digest, client)
        await session.reward(given)
        return session.view()

    # -- calls of the queue -------------------------------------------------------------------

    async def play(self, assignment: RolloutAssignment) -> Trajectory:
        """Open the session of a rollout, wait for its end, and return its trajectory."""
        member = int(assignment.rollout_id.rpartition("-")[2])
        name = session_id(assignment.task.task_id, member)
        session = await self._find(name)
        if session is None:
            return Trajectory.of(
                assignment,
                Outcome.INFRASTRUCTURE_ERROR,
                detail=f"the store has no session {name}",
            )
        session.open()
        await session.until_over()
        oldest_version = oldest_admitted_version(
            assignment.group_number,
            self._settings.algorithm,
            num_ahead=self._settings.num_ahead,
            republished=self.republished,
        )
        trajectory = await self._background.compute(
            trajectory_of, session.stored, session.tree, assignment, oldest_version=oldest_version
        )
        self._count_end(session, trajectory)
        self._forget(name)
        return trajectory

    def _count_end(self, session: Session, trajectory: Trajectory) -> None:
        turns, left_out = self._metrics.turns, trajectory.left_out
        self._metrics.ended.labels(outcome=trajectory.outcome.value).inc()
        turns.labels(use="trained").inc(session.tree.num_turns - len(left_out))
        for reason in left_out.values():
            turns.labels(use=reason.value).inc()

    # -- calls of the actor -------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Number of sessions that are admitted and have not ended."""
        return sum(each.is_open for each in self.in_memory())

    def in_memory(self) -> list[Session]:
        """Return the sessions that are loaded, without those that are still being loaded."""
        tasks = list(self._sessions.values())
        done = [t for t in tasks if t.done() and not t.cancelled() and t.exception() is None]
        return [session for task in done if (session := task.result()) is not None]

    async def watch(self) -> None:
        """End sessions whose time limit has passed, every WATCH_EVERY_S seconds.

        Also read from the store which keys were revoked and which sessions were ended by another
        process. Never returns. Raises: StoreError, LeaseLost when nothing can be stored any more.
        """
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if self._commits.failure is not None:
                raise self._commits.failure
            with suppress(StoreError):
                self._keys.update(await asyncio.to_thread(self._read_keys))
                # Sessions that are open here may have ended in the store.
                live = {each.stored.id: each for each in self.in_memory() if each.is_live}
                ends = await asyncio.to_thread(self._store.ends, list(live))
                for name, end in ends.items():
                    live[name].learn(end)
            for session in self.in_memory():
                session.end_if_overdue()

    def close(self) -> None:
        """Cancel background work, and refuse all later requests.

        Clients send a refused request again, and the next gateway answers it.
        """
        self._is_closed = True
        self._background.close()

    # -- finding sessions ---------------------------------------------------------------------

    async def _find(self, name: str) -> Session | None:
        task = self._sessions.get(name)
        if task is None:
            task = self._sessions[name] = self._background.begin_task(self._load(name))
        try:
            session = await asyncio.shield(task)
        except StoreError as error:
            self._forget(name)
            raise unavailable(str(error)) from error
        if session is None or session.is_over:
            self._forget(name)
        return session

    async def _load(self, name: str) -> Session | None:
        found = await asyncio.to_thread(self._store.load, name)
        if found is None:
            return None
        stored, turns = found
        return Session(
            stored,
            turns,
            sampler=self._sampler,
            commits=self._commits,
            background=self._background,
            metrics=self._metrics,
            now=self._now,
            leaves_titles_out=self._settings.sessions.titles == "leave_out",
        )

    def _forget(self, name: str) -> None:
        self._sessions.pop(name, None)

    async def _visible(self, name: str, sees: str | None) -> Session | None:
        """Return a session that the tenant `sees` owns. None allows any tenant."""
        session = await self._find(name)
        if session is None or not may_see(sees, session.stored.tenant):
            return None
        return session

    async def _of_submission(self, submission_id: str, sees: str | None) -> list[Session]:
        """Return a group's sessions that the tenant `sees` owns. None allows any tenant."""
        try:
            stored = await asyncio.to_thread(self._store.of_submission, submission_id)
        except StoreError as error:
            raise unavailable(str(error)) from error
        found = [await self._find(each.id) for each in stored if may_see(sees, each.tenant)]
        return [session for session in found if session is not None]

    async def _of_reward(self, name: str, key_digest: str, client: Caller | None) -> Session:
        """Return a session after checking that the caller may end and reward it.

        client: the caller, if it sent a named key. If None, the session's reward key is checked.
        """
        if client is None:
            return await self._of_key(name, key_digest, wanted="reward")
        if self._is_closed:
            raise stopping()
        session = await self._visible(name, client.sees)
        if session is None:
            raise unknown_session(name)
        return session

    async def _of_key(self, name: str, key_digest: str, *, wanted: str) -> Session:
        """Return a session if the caller sent the right one of the session's two keys.

        wanted: "agent" or "reward". Raises: Refused.
        """
        if key_digest == NO_KEY:
            raise Refused(
                RefusalCode.INVALID_KEY,
                f"this needs the {wanted} key of session {name}, got none",
            )
        if self._is_closed:
            raise stopping()
        session = await self._find(name)
        if session is None:
            raise unknown_session(name)
        keys = session.stored.keys
        own, other = (keys.agent, keys.reward) if wanted == "agent" else (keys.reward, keys.agent)
        is_own = hmac.compare_digest(own, key_digest)
        # The error of an unknown session, so that it does not show that this session exists.
        if not is_own and not hmac.compare_digest(other, key_digest):
            raise unknown_session(name)
        if self._keys.is_revoked(session.stored.key_name):
            raise Refused(
                RefusalCode.INVALID_KEY,
                f"the client's key that created session {name} was revoked, and so were the "
                "session's keys; another key of its tenant can end it",
            )
        if not is_own:
            raise Refused(
                RefusalCode.FORBIDDEN,
                f"this needs the {wanted} key of session {name}, got the session's other key",
            )
        return session


def _free(group: list[Session]) -> list[Session]:
    return [each for each in group if each.is_live and not each.stored.is_taken]


class Gateway:
    """The gateway as an asynchronous Ray actor: it plays sessions, and delivers uploads.

    Each run has one, on the supervisor's node, because the run's database may be a file. All state
    is in the store: if the actor dies, a new actor gets the same rollouts from the queue again.
    `service.run.actor_pool` calls `run`, `ping` and `stop`; the API's replicas call `ask`, through
    `service.gateway.client`.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        actor_id: str,
        tokenizer_path: str,
        make_policy: Callable[[], PolicyClient],
        queue: Any,
        database_url: str,
        run_id: str,
        term: int,
    ) -> None:
        """Connect to the store and load the tokenizer. Raises: StoreError.

        tokenizer_path: a directory or hub name. run_id: names the endpoint of the gateway's
        metrics. term: number of the supervisor's lease on the run; the store refuses changes of an
        older lease.
        """
        store = RunStore(database_url)
        self._run_id, self._actor_id = run_id, actor_id
        self._metrics = GatewayMetrics()
        self._commits = GroupCommit(
            SessionStore(store), term=term, hold_s=min(settings.sessions.hold_s, STORE_HOLD_S)
        )
        renderer = load_renderer(
            tokenizer_path,
            template_options=settings.rollouts.template_options,
            history=settings.rollouts.history,
            chat_template=settings.chat_template,
        )
        self._sessions = Sessions(
            settings,
            renderer=renderer,
            make_policy=make_policy,
            store=SessionStore(store),
            commits=self._commits,
            metrics=self._metrics,
            read_keys=lambda: read_keys(store),
        )
        self._uploads = Uploads(
            settings,
            renderer=renderer,
            store=UploadStore(store),
            term=term,
            make_policy=make_policy,
            count_turn=self._sessions.count_turn,
        )
        self._exchange = RolloutExchange(
            self._play,
            actor_id=actor_id,
            queue=queue,
            environments=(SESSION, UPLOADED),
            num_slots=settings.sessions.max_open,
            is_durable=True,
        )

    async def run(self) -> None:
        """Take rollouts from the queue and return their trajectories to it, until `stop`.

        Raises: QueueUnreachable; StoreError, LeaseLost when nothing can be stored any more.
        """
        exchanging = asyncio.create_task(self._exchange.run())
        watching = asyncio.create_task(self._sessions.watch())
        pushing = asyncio.create_task(
            push_forever(self._run_id, role=self._actor_id, read=self._read_metrics)
        )
        try:
            await asyncio.wait((exchanging, watching), return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, exchanging):
                if task.done():
                    task.result()
        finally:
            for task in (exchanging, watching, pushing):
                task.cancel()

    def _read_metrics(self) -> Reading:
        metrics = self._metrics
        metrics.open.set(self._sessions.num_open)
        return Reading(
            gained=list(metrics.gained.collect()), values=tuple(metrics.values.collect())
        )

    async def _play(self, assignment: RolloutAssignment) -> Trajectory:
        is_uploaded = assignment.task.environment == UPLOADED
        player = self._uploads if is_uploaded else self._sessions
        return await player.play(assignment)

    async def ping(self) -> None:
        """Return at once: a caller that gets no answer knows that the event loop is blocked."""

    async def set_republished(self, versions: tuple[int, ...]) -> None:
        """Set the versions published without a new step, before the newest is published.

        The age of a token does not count these versions, so they decide what is stale.
        """
        self._sessions.republished = self._uploads.republished = versions

    async def stop(self) -> None:
        """Accept no more requests, and store all changes that are not stored yet."""
        await self._exchange.stop()
        self._sessions.close()
        await self._commits.close()

    async def ask(self, part: str, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of `Sessions` or `Uploads` and return its answer.

        If the method raises Refused, return the exception instead, because Ray logs raised errors.

        Args: part: "sessions" or "uploads".
        """
        called = {"sessions": self._sessions, "uploads": self._uploads}[part]
        try:
            return await getattr(called, method)(*arguments, **named)
        except Refused as refused:
            return refused
