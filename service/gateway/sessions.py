"""The open sessions of a run: requests in, turns out, and at the end a trajectory.

Invariants: what a session holds in memory is what the store has of it, so that another gateway can
go on after a kill; a trajectory holds each turn that a client may have seen once. Only sessions
that somebody plays stay in memory: the store has the rest. Tokenising and hashing run in a thread.
Nothing here knows Ray: the actor (`service.gateway.actor`) hands its calls on.

`Sessions` finds the session of a call by its name and key, and calls it (`session`). A session
samples its turns (`sampling`), knows where a request goes on (`tree`), stores what happens to it
(`commits`), and ends by the rules in `ends`.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from actors.algorithm import AlgorithmSettings
from actors.environment.call_forms import call_form
from actors.environment.policy import PolicyClient
from actors.environment.rendering import ChatRenderer
from actors.environment.settings import RolloutSettings
from actors.expert_records import ModelShape
from actors.metrics import GatewayMetrics
from actors.trajectory_queue.window import oldest_admitted_version
from actors.types import Outcome, RolloutAssignment, Trajectory
from service.access.keys import NO_LIMITS, Caller, KeyBook, KeyLimits, NamedKey, digest_of, may_see
from service.config.sessions import SessionSettings, Titles
from service.gateway.admission import unknown_session
from service.gateway.background import Background
from service.gateway.calls import ChatCall, Finish, SessionView
from service.gateway.chat import ChatReply, RefusalCode, Refused, unavailable
from service.gateway.commits import GroupCommit
from service.gateway.ends import trajectory_of
from service.gateway.sampling import Engine, Sampler, TurnRates
from service.gateway.session import Session, stopping
from service.intake.session import session_id
from service.store.errors import StoreError
from service.store.sessions import SessionStore

LOOK_EVERY_S = 1.0
# The digest of the key that was not sent.
NO_KEY = digest_of("")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What the gateway is told of the configuration."""

    sessions: SessionSettings
    rollouts: RolloutSettings
    algorithm: AlgorithmSettings
    max_context_tokens: int
    """Prompt and reply together, as the engine allows."""
    chat_template: str | None
    """Chat template of the run; None: the tokenizer's own."""
    default_limits: KeyLimits = NO_LIMITS
    """Of named keys without limits of their own."""
    finds_parser: bool = False
    """Whether calls are read as the chat template writes them (inference.tool_parser: auto)."""
    num_ahead: int = 0
    """By how much versions were ahead of steps when the term began."""
    shape: ModelShape | None = None
    """Vocabulary and routing of the trained model; None: not known."""


class Sessions:
    """All sessions of a run; belongs to one event loop."""

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
        """read_keys: reads the run's named keys from its store. now: returns seconds since 1970.

        Raises: StoreError.
        """
        self._settings = settings
        self._store = store
        self._commits = commits
        self._metrics = metrics or GatewayMetrics()
        self._read_keys = read_keys
        self._now = now
        self._keys = KeyBook(read_keys())
        self._background = Background()
        self._rates = TurnRates(self._keys, default_limits=settings.default_limits, now=now)
        self._sampler = Sampler(
            renderer=renderer,
            engine=Engine(make_policy),
            background=self._background,
            rates=self._rates,
            max_context_tokens=settings.max_context_tokens,
            temperature=settings.rollouts.temperature,
            stop=settings.rollouts.stop,
            now=now,
            system_messages=settings.sessions.system_messages,
            reads_calls=not settings.finds_parser or call_form(renderer) is not None,
        )
        self._loading: dict[str, asyncio.Task[Session | None]] = {}
        """By name: sessions that are in memory, or on the way there."""
        self._claiming = asyncio.Lock()
        self._is_closed = False

    # -- what agents ask ----------------------------------------------------------------------

    async def chat(self, call: ChatCall) -> ChatReply:
        """Sample a turn, or give the one that this request has got already. Raises: Refused."""
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
        """Return the prompt's length for a request; nothing is sampled or stored.

        Raises: Refused.
        """
        session = await self._of_key(call.session_id, call.key_digest, wanted="agent")
        return await session.num_prompt_tokens(call.request)

    async def check_key(self, session_id: str, key_digest: str) -> None:
        """Raises: Refused if the key is neither of the session's two keys."""
        try:
            await self._of_key(session_id, key_digest, wanted="agent")
        except Refused as refused:
            # It is the session's other key: the route says what that key may not do.
            if refused.code is not RefusalCode.FORBIDDEN:
                raise

    async def abandon(self, session_id: str, request_id: str) -> None:
        """Call `abandon` of the session, if there is one. Raises: Refused if the store is away."""
        session = await self._find(session_id)
        if session is not None:
            session.abandon(request_id)

    def take_turn(self, key_name: str) -> None:
        """Count a turn that is sampled without a session. As `TurnRates.take`. Raises: Refused."""
        self._rates.take(key_name)

    # -- what clients ask ---------------------------------------------------------------------

    async def claim(self, submission_id: str, name: str, sees: str | None = None) -> int | None:
        """Give a group's next free session to a client that comes, the same one again to the same.

        Args: name: what the client calls it. sees: as `view`.
        Returns: the member's number; None: no such group.
        Raises: Refused, where none is free.
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
                f"group {submission_id} has no free session of {len(group)}: all are claimed, or "
                "it is closed or cancelled; begin another group",
            )
            free = _free(group)
            if not free:
                raise none_free
            try:
                await free[0].claim(name)
            except Refused as refused:
                # Its group is over, as the store alone knows so far.
                is_over = refused.code is RefusalCode.SESSION_CLOSED
                raise (none_free if is_over else refused) from refused.__cause__
            return free[0].stored.member

    async def close_group(self, submission_id: str, sees: str | None = None) -> int | None:
        """Give up a group's sessions that nobody has claimed. Returns: how many; None: no group.

        sees: as `view`. Raises: Refused.
        """
        async with self._claiming:
            group = await self._of_submission(submission_id, sees)
            free = _free(group)
            for session in free:
                await session.discard("its group was closed")
            return len(free) if group else None

    async def discard(self, session_id: str, sees: str | None = None) -> SessionView | None:
        """End a session that is not to be trained; nothing where it has ended.

        sees: as `view`. Returns: None: unknown, or not shown. Raises: Refused.
        """
        session = await self._shown(session_id, sees)
        if session is None:
            return None
        await session.discard("it was discarded")
        return session.view()

    async def view(self, session_id: str, sees: str | None = None) -> SessionView | None:
        """None: there is no such session, or it is not shown.

        sees: the tenant whose sessions are shown; None: every tenant's. Raises: Refused.
        """
        session = await self._shown(session_id, sees)
        return None if session is None else session.view()

    # -- what the holder of the reward's key asks ---------------------------------------------

    async def finish(
        self, session_id: str, key_digest: str, finish: Finish, client: Caller | None = None
    ) -> SessionView:
        """End a session. The same request again changes nothing.

        client: who asks by a key of its own, not by the session's; its tenant has to be the
        session's. Raises: Refused.
        """
        session = await self._of_reward(session_id, key_digest, client)
        await session.finish(finish)
        return session.view()

    async def give_reward(
        self, session_id: str, key_digest: str, given: Finish, client: Caller | None = None
    ) -> SessionView:
        """Give the reward that a finished session waits for. As `finish`. Raises: Refused."""
        session = await self._of_reward(session_id, key_digest, client)
        await session.reward(given)
        return session.view()

    # -- what the queue asks ------------------------------------------------------------------

    async def play(self, assignment: RolloutAssignment) -> Trajectory:
        """Open the session of a rollout, and wait for its end."""
        member = int(assignment.rollout_id.rpartition("-")[2])
        name = session_id(assignment.task.task_id, member)
        session = await self._find(name)
        if session is None:
            return Trajectory.of(
                assignment,
                Outcome.INFRASTRUCTURE_ERROR,
                detail=f"the store knows no session {name}",
            )
        session.open()
        await session.until_over()
        oldest_version = oldest_admitted_version(
            assignment.group_number,
            self._settings.algorithm,
            num_ahead=self._settings.num_ahead,
        )
        trajectory = await self._background.in_thread(
            trajectory_of, session.stored, session.tree, assignment, oldest_version=oldest_version
        )
        self._count_end(session, trajectory)
        self._forget(name)
        return trajectory

    def _count_end(self, session: Session, trajectory: Trajectory) -> None:
        counts, turns = session.tree.counts(), self._metrics.turns
        self._metrics.ended.labels(outcome=trajectory.outcome.value).inc()
        turns.labels(use="trained").inc(counts.num_counted)
        for reason in counts.left_out.values():
            turns.labels(use=reason.value).inc()

    # -- what the actor asks ------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Sessions that are admitted and have not ended."""
        return sum(each.is_playing for each in self.in_memory())

    def in_memory(self) -> list[Session]:
        tasks = list(self._loading.values())
        done = [t for t in tasks if t.done() and not t.cancelled() and t.exception() is None]
        return [session for task in done if (session := task.result()) is not None]

    async def look_forever(self) -> None:
        """End the sessions whose time is up, and learn of groups that are over and of keys that
        were revoked; never returns.

        Raises: StoreError, LeaseLost when nothing can be stored any more.
        """
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._commits.failure is not None:
                raise self._commits.failure
            with suppress(StoreError):
                self._keys.update(await asyncio.to_thread(self._read_keys))
                # Those that are open here may have ended in the store.
                is_open = {each.stored.id: each for each in self.in_memory() if each.is_open}
                ends = await asyncio.to_thread(self._store.ends, list(is_open))
                for name, end in ends.items():
                    is_open[name].learn(end)
            for session in self.in_memory():
                session.end_if_overdue()

    def close(self) -> None:
        """Take nothing more: what is asked from here on is for the next gateway."""
        self._is_closed = True
        self._background.close()

    # -- where sessions are found -------------------------------------------------------------

    async def _find(self, name: str) -> Session | None:
        """Return a session, or None if there is none. Raises: Refused if the store is away."""
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = self._background.begin(self._load(name))
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
        stored, turns, _ = found
        return Session(
            stored,
            turns,
            sampler=self._sampler,
            commits=self._commits,
            background=self._background,
            metrics=self._metrics,
            now=self._now,
            leaves_titles_out=self._settings.sessions.titles is Titles.LEAVE_OUT,
        )

    def _forget(self, name: str) -> None:
        """Read from the store what is asked of it from here on."""
        self._loading.pop(name, None)

    async def _shown(self, name: str, sees: str | None) -> Session | None:
        """None: there is no such session, or it is not shown. sees: as `view`. Raises: Refused."""
        session = await self._find(name)
        if session is None or not may_see(sees, session.stored.tenant):
            return None
        return session

    async def _of_submission(self, submission_id: str, sees: str | None) -> list[Session]:
        """Return a submission's sessions that are shown. sees: as `view`. Raises: Refused."""
        try:
            stored = await asyncio.to_thread(self._store.of_submission, submission_id)
        except StoreError as error:
            raise unavailable(str(error)) from error
        found = [await self._find(each.id) for each in stored if may_see(sees, each.tenant)]
        return [session for session in found if session is not None]

    async def _of_reward(self, name: str, key_digest: str, client: Caller | None) -> Session:
        """client: as `finish`. Raises: Refused."""
        if client is None:
            return await self._of_key(name, key_digest, wanted="reward")
        if self._is_closed:
            raise stopping()
        session = await self._shown(name, client.sees)
        if session is None:
            raise unknown_session(name)
        return session

    async def _of_key(self, name: str, key_digest: str, *, wanted: str) -> Session:
        """Return the session, of which this is the wanted key.

        One that is not known is refused as one that has other keys: who has none of them learns
        nothing of it. Raises: Refused.
        """
        if key_digest == NO_KEY:
            raise Refused(
                RefusalCode.INVALID_KEY,
                f"this needs the {wanted}'s key of session {name}, got none",
            )
        if self._is_closed:
            raise stopping()
        session = await self._find(name)
        if session is None:
            raise unknown_session(name)
        keys = session.stored.keys
        own, other = (keys.agent, keys.reward) if wanted == "agent" else (keys.reward, keys.agent)
        is_own = hmac.compare_digest(own, key_digest)
        if not is_own and not hmac.compare_digest(other, key_digest):
            raise unknown_session(name)
        if self._keys.is_revoked(session.stored.key_name):
            raise Refused(
                RefusalCode.INVALID_KEY,
                f"the client's key that created session {name} was revoked, and the session's keys "
                "with it; another key of its tenant can end it",
            )
        if not is_own:
            raise Refused(
                RefusalCode.FORBIDDEN,
                f"this needs the {wanted}'s key of session {name}, got the session's other one",
            )
        return session


def _free(group: list[Session]) -> list[Session]:
    return [each for each in group if each.is_open and not each.stored.is_taken]
