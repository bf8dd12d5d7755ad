"""The open sessions of a run: requests in, turns out, and at the end a trajectory.

Invariants: a turn is stored before a client is shown it; what a session holds in memory is what the
store has of it, so that another gateway can go on after a kill; a trajectory holds each turn that a
client may have seen once. Tokenising and hashing run in a thread. Nothing here knows Ray: the actor
(`service.gateway.actor`) hands its calls on.

`Sessions` is where calls come in. Its parts: `loaded` finds a session, `answers` answers its agent,
`sampling` samples its turns, `ends` ends it, `groups` hands out those of a group, `trajectory`
makes what is trained of it; `changes` alone changes what is stored.
"""

from __future__ import annotations

import asyncio
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
from service.access.keys import NO_LIMITS, Caller, KeyBook, KeyLimits, NamedKey
from service.config.sessions import SessionSettings, Titles
from service.gateway.answers import Answers
from service.gateway.background import Background
from service.gateway.calls import ChatCall, Finish, SessionView
from service.gateway.changes import SessionChanges
from service.gateway.chat import ChatReply, RefusalCode, Refused, unavailable
from service.gateway.commits import GroupCommit
from service.gateway.ends import Ends
from service.gateway.engine import Engine
from service.gateway.groups import Groups
from service.gateway.loaded import LoadedSessions
from service.gateway.sampling import Sampler, TurnRates
from service.gateway.session import Session, closed, view_of
from service.gateway.trajectory import trajectory_of
from service.intake.session import session_id
from service.store.errors import StoreError
from service.store.sessions import SessionStore

LOOK_EVERY_S = 1.0


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
        """metrics: told of what happens. read_keys: the run's named keys, of its store. now:
        seconds since 1970. Raises: StoreError."""
        self._settings = settings
        self._commits = commits
        self._metrics = metrics or GatewayMetrics()
        self._read_keys = read_keys
        self._now = now
        self._keys = KeyBook(read_keys())
        self._background = Background()
        self._changes = SessionChanges(commits, metrics=self._metrics, now=now)
        self._loaded = LoadedSessions(
            store,
            keys=self._keys,
            background=self._background,
            leaves_titles_out=settings.sessions.titles is Titles.LEAVE_OUT,
            now=now,
        )
        self._rates = TurnRates(self._keys, default_limits=settings.default_limits, now=now)
        sampler = Sampler(
            renderer=renderer,
            engine=Engine(make_policy),
            changes=self._changes,
            background=self._background,
            rates=self._rates,
            max_context_tokens=settings.max_context_tokens,
            temperature=settings.rollouts.temperature,
            stop=settings.rollouts.stop,
            now=now,
            system_messages=settings.sessions.system_messages,
            reads_calls=not settings.finds_parser or call_form(renderer) is not None,
        )
        self._answers = Answers(sampler, changes=self._changes, background=self._background)
        self._ends = Ends(self._changes, background=self._background, now=now)
        self._groups = Groups(self._loaded, changes=self._changes, ends=self._ends, now=now)

    # -- what agents ask ----------------------------------------------------------------------

    async def chat(self, call: ChatCall) -> ChatReply:
        """Sample a turn, or give the one that this request has got already. Raises: Refused."""
        began = time.monotonic()
        try:
            reply = await self._chat(call)
        except Refused as refused:
            self._metrics.refused.labels(code=refused.code.value).inc()
            raise
        self._metrics.seconds.observe(time.monotonic() - began)
        return reply

    async def num_prompt_tokens(self, call: ChatCall) -> int:
        """Return the prompt's length for a request; nothing is sampled or stored.

        Raises: Refused.
        """
        session = await self._asked(call)
        return await self._answers.num_prompt_tokens(session, call.request)

    async def _chat(self, call: ChatCall) -> ChatReply:
        deadline_at = asyncio.get_running_loop().time() + call.deadline_s
        session = await self._asked(call)
        await _until_admitted(session, deadline_at)
        return await self._answers.answer(session, call, deadline_at=deadline_at)

    async def _asked(self, call: ChatCall) -> Session:
        """The session that an agent asks. Raises: Refused."""
        session = await self._loaded.of_agent(call.session_id, call.key_digest)
        if not session.stored.is_taken:
            raise Refused(
                RefusalCode.FORBIDDEN,
                f"nobody has claimed session {call.session_id}; claim one of its group with POST "
                "/api/v1/sessions and a name of your own in `session`",
            )
        session.last_request_at = self._now()
        return session

    async def check_key(self, session_id: str, key_digest: str) -> None:
        """As `LoadedSessions.check_key`. Raises: Refused."""
        await self._loaded.check_key(session_id, key_digest)

    async def abandon(self, session_id: str, request_id: str) -> None:
        """As `Answers.abandon`. Raises: Refused."""
        session = await self._loaded.find(session_id)
        if session is not None:
            self._answers.abandon(session, request_id)

    def take_turn(self, key_name: str) -> None:
        """Of what is sampled without a session. As `TurnRates.take`. Raises: Refused."""
        self._rates.take(key_name)

    # -- what clients ask ---------------------------------------------------------------------

    async def claim(self, submission_id: str, name: str, sees: str | None = None) -> int | None:
        """As `Groups.claim`. Raises: Refused."""
        return await self._groups.claim(submission_id, name, sees)

    async def close_group(self, submission_id: str, sees: str | None = None) -> int | None:
        """As `Groups.close`. Raises: Refused."""
        return await self._groups.close(submission_id, sees)

    async def discard(self, session_id: str, sees: str | None = None) -> SessionView | None:
        """End a session that is not to be trained; nothing where it has ended.

        sees: as `view`. Returns: None: unknown, or not shown. Raises: Refused.
        """
        session = await self._loaded.shown(session_id, sees)
        if session is None:
            return None
        await self._ends.discard(session, "it was discarded")
        return view_of(session)

    async def view(self, session_id: str, sees: str | None = None) -> SessionView | None:
        """None: there is no such session, or it is not shown.

        sees: the tenant whose sessions are shown; None: every tenant's. Raises: Refused.
        """
        session = await self._loaded.shown(session_id, sees)
        return None if session is None else view_of(session)

    # -- what the holder of the reward's key asks ---------------------------------------------

    async def finish(
        self, session_id: str, key_digest: str, finish: Finish, client: Caller | None = None
    ) -> SessionView:
        """End a session. The same request again changes nothing.

        client: who asks by a key of its own, not by the session's; its tenant has to be the
        session's. Raises: Refused.
        """
        session = await self._loaded.of_reward(session_id, key_digest, client)
        await self._ends.finish(session, finish)
        return view_of(session)

    async def give_reward(
        self, session_id: str, key_digest: str, given: Finish, client: Caller | None = None
    ) -> SessionView:
        """Give the reward that a finished session waits for. As `finish`. Raises: Refused."""
        session = await self._loaded.of_reward(session_id, key_digest, client)
        await self._ends.give_reward(session, given)
        return view_of(session)

    # -- what the queue asks ------------------------------------------------------------------

    async def play(self, assignment: RolloutAssignment) -> Trajectory:
        """Open the session of a rollout, and wait for its end."""
        member = int(assignment.rollout_id.rpartition("-")[2])
        name = session_id(assignment.task.task_id, member)
        session = await self._loaded.find(name)
        if session is None:
            return Trajectory.of(
                assignment,
                Outcome.INFRASTRUCTURE_ERROR,
                detail=f"the store knows no session {name}",
            )
        self._changes.open(session)
        session.last_request_at = self._now()
        session.admitted.set()
        await session.over.wait()
        oldest_version = oldest_admitted_version(
            assignment.group_number,
            self._settings.algorithm,
            num_ahead=self._settings.num_ahead,
        )
        trajectory = await self._background.in_thread(
            trajectory_of, session, assignment, oldest_version=oldest_version
        )
        self._count_end(session, trajectory)
        self._loaded.forget(name)
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
        return sum(each.admitted.is_set() and each.is_open for each in self._loaded.all())

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
                for session, end in await self._loaded.ended_in_store():
                    self._ends.learn(session, end)
            self._ends.end_overdue(self._loaded.all())

    def close(self) -> None:
        """Take nothing more: what is asked from here on is for the next gateway."""
        self._loaded.close()
        self._background.close()


async def _until_admitted(session: Session, deadline_at: float) -> None:
    """deadline_at: in the loop's time. Raises: Refused."""
    try:
        async with asyncio.timeout_at(deadline_at):
            await session.admitted.wait()
    except TimeoutError:
        raise unavailable(
            f"session {session.stored.id} waits for its group's place in the window; look at "
            f"GET /api/v1/sessions/{session.stored.id} before its agent is started"
        ) from None
    if not session.is_open:
        raise closed(session)
