"""The open sessions of a run: requests in, turns out, and at the end a trajectory.

Invariants: a turn is stored before a client is shown it; what a session holds in memory is what the
store has of it, so that another gateway can go on after a kill; a trajectory holds each turn that a
client may have seen once. Tokenising and hashing run in a thread. Nothing here knows Ray: the actor
(`service.gateway.actor`) hands its calls on.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from actors.algorithm import AlgorithmSettings
from actors.environment.rendering import ChatRenderer, RenderError
from actors.environment.settings import RolloutSettings
from actors.expert_records import ModelShape
from actors.metrics import GatewayMetrics
from actors.policy import (
    GenerateReply,
    GenerateRequest,
    PolicyClient,
    PolicyDeadlineExceeded,
    PolicyUnavailable,
    UnusableReply,
    check_reply,
)
from actors.trajectory_queue.window import oldest_admitted_version
from actors.types import (
    PLAYED_OUT,
    TRUNCATIONS,
    FinishReason,
    Outcome,
    RolloutAssignment,
    Timings,
    Trajectory,
    Turn,
)
from service.access.keys import (
    NO_LIMITS,
    Caller,
    KeyBook,
    KeyLimits,
    NamedKey,
    digest_of,
    may_see,
)
from service.access.rates import Rates
from service.gateway.calls import ChatCall, Finish, SessionView
from service.gateway.chat import ChatReply, RefusalCode, Refused, unavailable
from service.gateway.commits import GroupCommit, StoreAway, TooLate
from service.gateway.replies import shown_reply
from service.gateway.session import (
    Ending,
    Sampling,
    Session,
    as_reply,
    check_turns,
    closed,
    ended_otherwise,
    stopping,
    totals_of,
    under_way,
    unknown,
    unsampled,
)
from service.gateway.settings import SessionSettings
from service.gateway.tree import Place, Prompt, SessionTree, next_prompt, read
from service.gateway.turns import (
    Change,
    IntentAdded,
    IntentDropped,
    SessionClaimed,
    SessionCut,
    SessionEnded,
    SessionIntent,
    SessionOpened,
    SessionTurn,
    TurnAdded,
    TurnSeen,
    TurnUnseen,
)
from service.intake.session import (
    SessionEnd,
    SessionStatus,
    session_id,
)
from service.store.errors import StoreError
from service.store.sessions import SessionStore

log = logging.getLogger("rayloom.gateway")

LOOK_EVERY_S = 1.0
# Outcomes of which a missing reward is an error of its own.
GRADED = PLAYED_OUT | TRUNCATIONS
# A session's turns, auxiliary ones too, over those of its limit.
MOST_TURNS_FACTOR = 8
# The digest of the key that was not sent.
NO_KEY = digest_of("")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What the gateway is told of the configuration."""

    sessions: SessionSettings
    rollouts: RolloutSettings
    algorithm: AlgorithmSettings
    max_context_tokens: int
    """Prompt and reply together, as the engine allows."""
    default_limits: KeyLimits = NO_LIMITS
    """Of named keys without limits of their own."""
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
        self._metrics = metrics or GatewayMetrics()
        self._settings = settings
        self._renderer = renderer
        self._make_policy = make_policy
        self._policy: PolicyClient | None = None
        self._store = store
        self._commits = commits
        self._now = now
        self._read_keys = read_keys
        self._keys = KeyBook(read_keys())
        self._turn_rates = Rates(now=now)
        self._known: dict[str, asyncio.Task[Session | None]] = {}
        """Sessions that are in memory, or on the way there."""
        self._claiming = asyncio.Lock()
        # One thread: a tokenizer is not for two at once.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")
        self._begun: set[asyncio.Task[Any]] = set()
        self._is_closed = False

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

    async def _chat(self, call: ChatCall) -> ChatReply:
        deadline_at = asyncio.get_running_loop().time() + call.deadline_s
        session = await self._of_agent(call.session_id, call.key_digest)
        if not session.stored.is_taken:
            raise Refused(
                RefusalCode.FORBIDDEN,
                f"nobody has claimed session {call.session_id}; claim one of its group with POST "
                "/api/v1/sessions and a name of your own in `session`",
            )
        session.last_request_at = self._now()
        await self._until_admitted(session, deadline_at)
        place = session.tree.find(call.request, await self._in_thread(read, call.request))
        # First: what is being stored is in the tree already.
        sampling = under_way(session, call, place.request_digest)
        if sampling is None:
            turn = session.tree.answered(
                request_id=call.request_id,
                idempotency_key=call.request.idempotency_key,
                is_retry=call.request.is_retry,
                digest=place.request_digest,
            )
            if turn is not None:
                session.askers[turn.request_id] = call.request_id
                return await self._show(session, turn)
            sampling = self._begin(session, call, place, deadline_at)
        session.askers[sampling.request_id] = call.request_id
        sampling.is_abandoned = False
        left_s = deadline_at - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left_s):
                turn = await asyncio.shield(sampling.task)
        except TimeoutError:
            await self.abandon(call.session_id, call.request_id)
            raise unavailable("the turn was not sampled in time; send the request again") from None
        except asyncio.CancelledError:
            if sampling.task.cancelled():
                raise (stopping() if session.is_open else closed(session)) from None
            raise
        turn = session.tree.turn(turn.number)
        if sampling.is_abandoned:
            return as_reply(session, turn)
        return await self._show(session, turn)

    async def _show(self, session: Session, turn: SessionTurn) -> ChatReply:
        """Answer with a turn that is stored; that it is seen is stored before. Raises: Refused."""
        number = turn.number
        if turn.is_unseen:
            if not session.is_open:
                raise closed(session)
            # In memory at once: what becomes of it next is stored behind this.
            session.tree.mark_unseen(number, is_unseen=False)
            seen = TurnSeen(session_id=session.stored.id, number=number)
            session.showing[number] = self._keep_going(self._commit([seen]))
        if (showing := session.showing.get(number)) is not None:
            try:
                await asyncio.shield(showing)
            except Refused:
                self._hide(session, number)
                raise
            if session.showing.get(number) is showing:
                del session.showing[number]
        return as_reply(session, turn)

    def _hide(self, session: Session, number: int) -> None:
        session.tree.mark_unseen(number, is_unseen=True)
        self._commits.add([TurnUnseen(session_id=session.stored.id, number=number)])

    async def abandon(self, session_id: str, request_id: str) -> None:
        """The client of this request has gone before it was answered.

        It changes nothing where another request, a retry of this one, is answered with the turn.
        """
        session = await self._find(session_id)
        if session is None:
            return
        answered = (first for first, newest in session.askers.items() if newest == request_id)
        # One that asked another gateway is not among them.
        first = next(answered, None if request_id in session.askers else request_id)
        if first is None:
            return
        if (sampling := session.sampling.get(first)) is not None:
            sampling.is_abandoned = True
            if not sampling.task.done():
                return
        if (number := session.tree.number_of(first)) is not None and session.is_open:
            self._hide(session, number)

    # -- what clients ask ---------------------------------------------------------------------

    async def claim(self, submission_id: str, name: str, sees: str | None = None) -> int | None:
        """Give a group's next free session to a client that comes, the same one again to the same.

        Args: name: what the client calls it. sees: the tenant whose sessions are shown; None: every
            tenant's.
        Returns: the member's number; None: no such group. Raises: Refused, where none is free.
        """
        async with self._claiming:
            group = await self._members(submission_id, sees)
            if not group:
                return None
            for session in group:
                if session.stored.claimed_by == name:
                    return session.stored.member
            free = [each for each in group if each.is_open and not each.stored.is_taken]
            if not free:
                raise Refused(
                    RefusalCode.CONFLICT,
                    f"group {submission_id} has no free session of {len(group)}: all are claimed, "
                    "or it is closed; begin another group",
                )
            session, now = free[0], self._now()
            await self._commit(
                [SessionClaimed(session_id=session.stored.id, name=name, claimed_at=now)]
            )
            session.stored = replace(session.stored, claimed_by=name, claimed_at=now)
            session.last_request_at = now
            return session.stored.member

    async def close_group(self, submission_id: str, sees: str | None = None) -> int | None:
        """Give up a group's sessions that nobody has claimed. Returns: how many; None: no group.

        sees: as `claim`.
        """
        async with self._claiming:
            group = await self._members(submission_id, sees)
            free = [each for each in group if each.is_open and not each.stored.is_taken]
            for session in free:
                end = self._broken_off(SessionStatus.DISCARDED, "its group was closed")
                await self._end(session, end)
            return len(free) if group else None

    async def _members(self, submission_id: str, sees: str | None) -> list[Session]:
        """Those that are shown. Raises: Refused."""
        try:
            stored = await asyncio.to_thread(self._store.of_submission, submission_id)
        except StoreError as error:
            raise unavailable(str(error)) from error
        found = [
            await self._find(session.id) for session in stored if may_see(sees, session.tenant)
        ]
        return [session for session in found if session is not None]

    # -- what the holder of the reward's key asks ---------------------------------------------

    async def finish(
        self, session_id: str, key_digest: str, finish: Finish, client: Caller | None = None
    ) -> SessionView:
        """End a session. The same request again changes nothing.

        client: who asks by a key of its own, not by the session's; its tenant has to be the
        session's. Raises: Refused.
        """
        session = await self._of_reward(session_id, key_digest, client)
        end = session.stored.end
        if end is not None:
            if end.digest == finish.digest:
                return await self._view(session)
            raise ended_otherwise(session)
        check_turns(session, finish)
        until = self._now() + session.stored.spec.reward_deadline_s
        await self._end(
            session,
            SessionEnd(
                status=SessionStatus.FINISHED,
                outcome=finish.outcome or Outcome.COMPLETED,
                reward=finish.reward,
                components=finish.components,
                turn_rewards=finish.turn_rewards,
                detail=finish.detail,
                ended_at=self._now(),
                reward_until=until if finish.is_reward_pending else None,
                digest=finish.digest,
            ),
            is_stated=finish.outcome is not None,
        )
        return await self._view(session)

    async def give_reward(
        self, session_id: str, key_digest: str, given: Finish, client: Caller | None = None
    ) -> SessionView:
        """Give the reward that a finished session waits for. As `finish`. Raises: Refused."""
        session = await self._of_reward(session_id, key_digest, client)
        end = session.stored.end
        if end is None:
            raise Refused(
                RefusalCode.CONFLICT,
                f"session {session_id} is not finished; finish it, with the reward or with "
                "reward_pending",
            )
        if end.reward_until is None:
            is_same = (end.reward, dict(end.components)) == (given.reward, dict(given.components))
            if is_same:
                return await self._view(session)
            raise ended_otherwise(session)
        check_turns(session, given)
        rewarded = replace(
            end,
            reward=given.reward,
            components=given.components,
            turn_rewards={**end.turn_rewards, **given.turn_rewards},
            reward_until=None,
        )
        await self._ended(session, given.digest, self._keep_end(session, rewarded))
        return await self._view(session)

    async def discard(self, session_id: str, sees: str | None = None) -> SessionView | None:
        """End a session that is not to be trained; nothing where it has ended. None: unknown, or
        not shown. sees: as `close_group`."""
        session = await self._find(session_id)
        if session is None or not may_see(sees, session.stored.tenant):
            return None
        if session.stored.end is None:
            await self._end(session, self._broken_off(SessionStatus.DISCARDED, "it was discarded"))
        return await self._view(session)

    async def view(self, session_id: str, sees: str | None = None) -> SessionView | None:
        """None: there is no such session, or it is not shown. sees: as `close_group`."""
        session = await self._find(session_id)
        if session is None or not may_see(sees, session.stored.tenant):
            return None
        return await self._view(session)

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
        if session.stored.opened_at is None and session.stored.end is None:
            opened_at = self._now()
            session.stored = replace(session.stored, opened_at=opened_at)
            self._commits.add([SessionOpened(session_id=name, opened_at=opened_at)])
        session.last_request_at = self._now()
        session.admitted.set()
        await session.over.wait()
        trajectory = await self._in_thread(self._trajectory, session, assignment)
        self._count_end(session, trajectory)
        # What is asked of it from here on is read from the store.
        self._known.pop(name, None)
        return trajectory

    @property
    def num_open(self) -> int:
        """Sessions that are admitted and have not ended."""
        return sum(each.admitted.is_set() and each.is_open for each in self._loaded())

    def _loaded(self) -> list[Session]:
        tasks = list(self._known.values())
        done = [t for t in tasks if t.done() and not t.cancelled() and t.exception() is None]
        return [session for task in done if (session := task.result()) is not None]

    async def look_forever(self) -> None:
        """End the sessions whose time is up, and learn of keys that were revoked; never returns.

        Raises: StoreError, LeaseLost when nothing can be stored any more.
        """
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._commits.failure is not None:
                raise self._commits.failure
            with suppress(StoreError):
                self._keys.update(await asyncio.to_thread(self._read_keys))
            for session in self._loaded():
                if session.ending is None and (end := self._overdue(session)) is not None:
                    self._keep_going(self._end_overdue(session, end))

    def close(self) -> None:
        """Take nothing more: what is asked from here on is for the next gateway."""
        self._is_closed = True
        for task in self._begun:
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- sampling -----------------------------------------------------------------------------

    def _begin(
        self, session: Session, call: ChatCall, place: Place, deadline_at: float
    ) -> Sampling:
        if not session.is_open:
            raise closed(session)
        self.take_turn(session.stored.key_name)
        spec, num_begun = session.stored.spec, len(session.sampling)
        # Calls that are no part of the task are not counted, but cost as much.
        is_over = session.tree.num_turns + num_begun >= MOST_TURNS_FACTOR * spec.max_turns
        if is_over or session.tree.num_counted + num_begun >= spec.max_turns:
            self._cut(session, Outcome.MAX_TURNS)
            raise Refused(
                RefusalCode.ROLLOUT_STOPPED,
                f"session {call.session_id} has {session.tree.num_counted + num_begun} turns, "
                f"expected at most {spec.max_turns}; finish it",
            )
        session.tree.note_request(place.request_digest)
        sampling = Sampling(
            request_id=call.request_id,
            digest=place.request_digest,
            idempotency_key=call.request.idempotency_key,
        )
        sampling.task = self._keep_going(self._sample(session, call, place, sampling, deadline_at))
        session.sampling[call.request_id] = sampling
        sampling.task.add_done_callback(lambda _: session.sampling.pop(call.request_id, None))
        return sampling

    async def _sample(
        self,
        session: Session,
        call: ChatCall,
        place: Place,
        sampling: Sampling,
        deadline_at: float,
    ) -> SessionTurn:
        """Raises: Refused."""
        try:
            prompt = await self._in_thread(next_prompt, place, self._renderer)
        except RenderError as error:
            raise Refused(
                RefusalCode.INVALID_REQUEST,
                f"the model's chat template cannot render these messages: {error}",
                param="messages",
            ) from error
        request = self._request(session, call, place, prompt, deadline_at)
        turn, reply = await self._ask(session, call, place, request)
        text = self._renderer.decode(turn.sampled_token_ids)
        if not session.is_open:
            raise closed(session)
        shown = shown_reply(
            text,
            reply.parsed,
            place.tools,
            turn.finish_reason,
            turn_id=session.tree.turn_id(session.tree.num_turns),
        )
        sampling.is_committing = True
        stored = SessionTurn(
            number=session.tree.num_turns,
            parent=place.parent,
            tools=() if place.parent is not None else place.tools,
            new_messages=place.new_messages,
            reply=shown.message,
            extends_parent=prompt.extends_parent,
            new_token_ids=prompt.new_token_ids,
            sampled_token_ids=turn.sampled_token_ids,
            logprobs=turn.logprobs,
            version_spans=turn.version_spans,
            finish_reason=turn.finish_reason,
            num_inserted=prompt.num_inserted,
            break_reason=prompt.break_reason,
            is_malformed=shown.is_malformed,
            is_auxiliary=call.request.is_auxiliary,
            is_unseen=sampling.is_abandoned,
            expert_indices=turn.expert_indices,
            cache_salt=reply.cache_salt,
            replica=reply.replica,
            request_id=call.request_id,
            request_digest=place.request_digest,
            idempotency_key=call.request.idempotency_key,
            created_at=self._now(),
        )
        await self._keep_turn(session, stored)
        if sampling.is_abandoned and not stored.is_unseen:
            self._hide(session, stored.number)
        return stored

    def _request(
        self, session: Session, call: ChatCall, place: Place, prompt: Prompt, deadline_at: float
    ) -> GenerateRequest:
        """Raises: Refused for a prompt that leaves no room."""
        room = self._settings.max_context_tokens - prompt.token_ids.shape[0]
        if room < 1:
            self._cut(session, Outcome.TRUNCATED_CONTEXT)
            raise Refused(
                RefusalCode.CONTEXT_LENGTH_EXCEEDED,
                f"the messages have {prompt.token_ids.shape[0]} tokens, which leaves no room for a "
                f"reply; expected less than {self._settings.max_context_tokens}; shorten them",
                param="messages",
            )
        most = min(room, session.stored.spec.max_tokens_per_turn)
        parent = None if place.parent is None else session.tree.turn(place.parent)
        return GenerateRequest(
            prompt_token_ids=prompt.token_ids,
            max_tokens=min(most, call.request.max_tokens or most),
            temperature=self._settings.rollouts.temperature,
            deadline_s=max(0.001, deadline_at - asyncio.get_running_loop().time()),
            cache_salt=parent.cache_salt or None if parent else None,
            replica=parent.replica if parent else "",
            tools=place.tools,
        )

    async def _ask(
        self, session: Session, call: ChatCall, place: Place, request: GenerateRequest
    ) -> tuple[Turn, GenerateReply]:
        """Note that the engine is asked, and ask it. Raises: Refused."""
        self._commits.add(
            [
                IntentAdded(
                    session_id=session.stored.id,
                    intent=SessionIntent(
                        request_id=call.request_id,
                        request_digest=place.request_digest,
                        parent=place.parent,
                        policy_version=None,
                        created_at=self._now(),
                    ),
                )
            ]
        )
        try:
            reply = await self._client().generate(request)
            turn = check_reply(request, reply)
        except (PolicyUnavailable, PolicyDeadlineExceeded, UnusableReply, ValueError) as error:
            self._forget_intent(session, call.request_id)
            raise unsampled(error) from error
        if turn.finish_reason is FinishReason.ABORT:
            self._forget_intent(session, call.request_id)
            raise unavailable("the engine gave the turn up; send the request again")
        return turn, reply

    async def _keep_turn(self, session: Session, stored: SessionTurn) -> None:
        """Raises: Refused."""
        # Nobody can go on from it, or be answered with it, before it is stored: the request is
        # under way until then.
        session.tree.add(stored)
        began = time.monotonic()
        try:
            await self._commits.commit([TurnAdded(session_id=session.stored.id, turn=stored)])
        except StoreAway as error:
            session.tree.mark_unseen(stored.number, is_unseen=True)
            raise unavailable(str(error)) from error
        except TooLate as error:
            # Its group was cancelled.
            self._drop(session, str(error))
            raise closed(session) from error
        self._metrics.commit_seconds.observe(time.monotonic() - began)

    def take_turn(self, key_name: str) -> None:
        """Count a turn that begins under a client's key. Raises: Refused for one too many."""
        per_minute = (
            self._keys.limits_of(key_name).over(self._settings.default_limits).turns_per_minute
        )
        if not key_name or per_minute is None:
            return
        if wait_s := self._turn_rates.take(key_name, per_s=per_minute / 60, burst=per_minute):
            raise Refused(
                RefusalCode.TOO_MANY_REQUESTS,
                f"more than {per_minute:g} turns have begun in a minute under the client's key "
                f"(turns_per_minute of the key); send the request again in {wait_s} s",
                retry_after_s=wait_s,
            )

    def _cut(self, session: Session, outcome: Outcome) -> None:
        if session.stored.cut is not outcome:
            session.stored = replace(session.stored, cut=outcome)
            self._commits.add([SessionCut(session_id=session.stored.id, outcome=outcome)])

    def _forget_intent(self, session: Session, request_id: str) -> None:
        self._commits.add([IntentDropped(session_id=session.stored.id, request_id=request_id)])

    # -- the end ------------------------------------------------------------------------------

    async def _end(self, session: Session, end: SessionEnd, *, is_stated: bool = False) -> None:
        """End a session; the same end again waits for the first. Raises: Refused."""

        async def give_up_and_keep() -> None:
            for sampling in list(session.sampling.values()):
                if not sampling.is_committing:
                    sampling.task.cancel()
            tasks = [sampling.task for sampling in session.sampling.values()]
            await asyncio.gather(*tasks, return_exceptions=True)
            seen = end
            if not is_stated and end.status is SessionStatus.FINISHED:
                seen = replace(end, outcome=self._seen_outcome(session))
            await self._keep_end(session, seen)

        await self._ended(session, end.digest, give_up_and_keep())

    async def _ended(self, session: Session, digest: str, work: Coroutine[Any, Any, None]) -> None:
        """Begin the work that ends a session, or wait for what was begun. Raises: Refused."""
        ending = session.ending
        if ending is not None:
            work.close()
            if ending.digest != digest:
                raise ended_otherwise(session)
        else:
            ending = session.ending = Ending(digest=digest, task=self._keep_going(work))
            ending.task.add_done_callback(lambda _: setattr(session, "ending", None))
        # It goes on when this caller is gone: the end may be stored already.
        await asyncio.shield(ending.task)

    async def _keep_end(self, session: Session, end: SessionEnd) -> None:
        """Raises: Refused."""
        end = replace(end, totals=totals_of(session))
        while True:
            try:
                await self._commits.commit([SessionEnded(session_id=session.stored.id, end=end)])
                break
            except StoreAway:
                # It will be stored, or nothing any more: the same end again is no other one.
                continue
            except StoreError as error:
                raise unavailable(str(error)) from error
            except TooLate as error:
                self._drop(session, str(error))
                raise closed(session) from error
        session.stored = replace(session.stored, end=end)
        if end.reward_until is None:
            session.over.set()

    async def _end_overdue(self, session: Session, end: SessionEnd) -> None:
        if session.stored.end is None:
            await self._end(session, end)
        else:
            await self._ended(session, "", self._keep_end(session, end))

    def _seen_outcome(self, session: Session) -> Outcome:
        """How a session ended of which the client says nothing."""
        last = session.tree.last_counted()
        if last is None:
            return Outcome.EMPTY
        if session.stored.cut is not None:
            return session.stored.cut
        if last.finish_reason is FinishReason.LENGTH:
            return Outcome.TRUNCATED_TOKENS
        return Outcome.COMPLETED

    def _drop(self, session: Session, why: str) -> None:
        """End a session that the store knows to be over."""
        if session.stored.end is None:
            end = self._broken_off(SessionStatus.DISCARDED, why)
            session.stored = replace(session.stored, end=end)
            session.over.set()

    def _overdue(self, session: Session) -> SessionEnd | None:
        """The end of a session whose time is up; None: it has some left."""
        now, stored = self._now(), session.stored
        if stored.end is not None:
            until = stored.end.reward_until
            if until is None or now < until:
                return None
            return replace(stored.end, reward_until=None, detail="no reward came in time")
        if stored.opened_at is None or not session.is_open:
            return None
        join_s, begun_at = stored.spec.join_s, stored.begun_at
        if begun_at is None:
            if join_s is None or now < stored.opened_at + join_s:
                return None
            return self._broken_off(
                SessionStatus.DISCARDED, f"no agent claimed it within {join_s:g} s"
            )
        if now >= begun_at + stored.spec.ttl_s:
            why = f"it was not finished within {stored.spec.ttl_s:g} s"
        elif not session.sampling and now >= session.last_request_at + stored.spec.idle_s:
            why = f"nothing was asked of it for {stored.spec.idle_s:g} s"
        else:
            return None
        return self._broken_off(SessionStatus.EXPIRED, why)

    def _broken_off(self, status: SessionStatus, why: str) -> SessionEnd:
        is_expired = status is SessionStatus.EXPIRED
        return SessionEnd(
            status=status,
            outcome=Outcome.WALL_TIMEOUT if is_expired else Outcome.CANCELLED,
            reward=None,
            detail=why,
            ended_at=self._now(),
        )

    def _trajectory(self, session: Session, assignment: RolloutAssignment) -> Trajectory:
        stored, end = session.stored, session.stored.end
        assert end is not None, "a trajectory of a session that is not over"
        samples = session.tree.samples(
            assignment.trajectory_id,
            reward=end.reward or 0.0,
            components=end.components,
            turn_rewards=end.turn_rewards,
        )
        counts = session.tree.counts()
        trajectory = replace(
            Trajectory.of(assignment, end.outcome, detail=end.detail),
            samples=samples,
            num_inserted_tokens=counts.num_inserted,
            render_breaks=counts.render_breaks,
            timings=Timings(wall_s=max(0.0, end.ended_at - (stored.opened_at or end.ended_at))),
        )
        outcome, detail = end.outcome, end.detail
        versions = trajectory.versions
        oldest = oldest_admitted_version(
            assignment.group_number,
            self._settings.algorithm,
            num_ahead=self._settings.num_ahead,
        )
        if end.status is SessionStatus.FINISHED and not samples:
            outcome, detail = Outcome.EMPTY, detail or "no turn of it was sampled"
        elif end.outcome in GRADED and end.reward is None:
            outcome, detail = Outcome.REWARD_ERROR, detail or "it was finished without a reward"
        elif versions is not None and versions[0] < oldest:
            outcome = Outcome.STALE
            detail = f"sampled by version {versions[0]}, expected at least {oldest}"
        return replace(trajectory, outcome=outcome, detail=detail)

    def _count_end(self, session: Session, trajectory: Trajectory) -> None:
        counts, turns = session.tree.counts(), self._metrics.turns
        self._metrics.ended.labels(outcome=trajectory.outcome.value).inc()
        turns.labels(use="trained").inc(counts.num_counted)
        turns.labels(use="auxiliary").inc(counts.num_auxiliary)
        turns.labels(use="unseen").inc(counts.num_unseen)

    # -- finding and keeping ------------------------------------------------------------------

    async def _of_agent(self, name: str, key_digest: str) -> Session:
        """Raises: Refused."""
        session = await self._of_key(name, key_digest, wanted="agent")
        if not session.is_open:
            raise closed(session)
        return session

    async def _of_reward(self, name: str, key_digest: str, client: Caller | None) -> Session:
        """Raises: Refused."""
        if client is None:
            return await self._of_key(name, key_digest, wanted="reward")
        if self._is_closed:
            raise stopping()
        session = await self._find(name)
        if session is None or not may_see(client.sees, session.stored.tenant):
            raise unknown(name)
        return session

    async def _of_key(self, name: str, key_digest: str, *, wanted: str) -> Session:
        """The session, of which this is the wanted key.

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
            raise unknown(name)
        keys = session.stored.keys
        own, other = (keys.agent, keys.reward) if wanted == "agent" else (keys.reward, keys.agent)
        is_own = hmac.compare_digest(own, key_digest)
        if not is_own and not hmac.compare_digest(other, key_digest):
            raise unknown(name)
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

    async def _find(self, name: str) -> Session | None:
        task = self._known.get(name)
        if task is None:
            task = self._known[name] = self._keep_going(self._load(name))
        try:
            session = await asyncio.shield(task)
        except StoreError as error:
            self._known.pop(name, None)
            raise unavailable(str(error)) from error
        if session is None or session.over.is_set():
            # Kept only while somebody plays it: the store has the rest.
            self._known.pop(name, None)
        return session

    async def _load(self, name: str) -> Session | None:
        found = await asyncio.to_thread(self._store.load, name)
        if found is None:
            return None
        stored, turns, _ = found
        trains_all = self._settings.sessions.trains_single_turns
        session = Session(
            stored=stored,
            tree=SessionTree(name, single_roots_are_auxiliary=not trains_all),
            last_request_at=self._now(),
        )
        for turn in turns:
            session.tree.add(turn)
        end = stored.end
        if end is not None and end.reward_until is None:
            session.over.set()
        return session

    async def _until_admitted(self, session: Session, deadline_at: float) -> None:
        left_s = deadline_at - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left_s):
                await session.admitted.wait()
        except TimeoutError:
            raise unavailable(
                f"session {session.stored.id} waits for its group's place in the window; look at "
                f"GET /api/v1/sessions/{session.stored.id} before its agent is started"
            ) from None
        if not session.is_open:
            raise closed(session)

    async def _view(self, session: Session) -> SessionView:
        stored, end = session.stored, session.stored.end
        status = SessionStatus.QUEUED if stored.opened_at is None else SessionStatus.OPEN
        # The turns of one that is trained are gone.
        totals = (end and end.totals) or totals_of(session)
        return SessionView(
            id=stored.id,
            submission_id=stored.submission_id,
            member=stored.member,
            status=end.status if end else status,
            created_at=stored.created_at,
            opened_at=stored.opened_at,
            ended_at=end.ended_at if end else None,
            totals=totals,
            reward=end.reward if end else None,
            is_reward_pending=end is not None and end.reward_until is not None,
            outcome=end.outcome if end else None,
            detail=end.detail if end else "",
        )

    async def _commit(self, changes: Sequence[Change]) -> None:
        """Raises: Refused."""
        try:
            await self._commits.commit(changes)
        except (StoreAway, StoreError) as error:
            raise unavailable(str(error)) from error
        except TooLate as error:
            raise Refused(RefusalCode.SESSION_CLOSED, str(error)) from error

    def _client(self) -> PolicyClient:
        # Made within the event loop that uses it.
        if self._policy is None:
            self._policy = self._make_policy()
        return self._policy

    async def _in_thread(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*arguments))

    def _keep_going(self, work: Any) -> asyncio.Task[Any]:
        """Begin work that goes on without its caller."""
        task = asyncio.create_task(work)
        self._begun.add(task)
        task.add_done_callback(self._let_go)
        return task

    def _let_go(self, task: asyncio.Task[Any]) -> None:
        self._begun.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, Refused) else logging.ERROR
            log.log(level, "%s: %s", type(error).__name__, error)
