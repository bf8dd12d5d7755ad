"""A session in memory: its agent's turns, and the rules by which it changes.

Everything that happens to a session is a `Change`. `Session.apply` makes the change in memory, and
`service.store.sessions` makes the same change in the database. Only this file writes a session's
fields. A claim, an end and a late reward are stored before they are applied in memory; all other
changes are stored afterwards. A client receives a turn only after the turn is stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from actors.metrics import GatewayMetrics
from actors.types import Outcome
from service.gateway.chat import ChatCall, ChatReply, ChatRequest, RefusalCode, Refused, unavailable
from service.gateway.commits import GroupCommit, StoreAway, TooLate
from service.gateway.ends import (
    broken_off,
    check_turns,
    closed,
    ended_otherwise,
    follows,
    overdue,
    seen_outcome,
    settled,
    stopping,
    totals_of,
)
from service.gateway.sampling import PendingTurn, Sampler, as_reply
from service.gateway.tree import Place, SessionTree, request_keys
from service.intake.session import (
    Change,
    Finish,
    LimitReached,
    LimitRefusal,
    SessionClaimed,
    SessionEnd,
    SessionEnded,
    SessionOpened,
    SessionStatus,
    SessionTurn,
    StoredSession,
    TurnAdded,
    TurnMarked,
)
from service.store.errors import StoreError
from service.worker_thread import WorkerThread


class Session:
    """One session in memory: its turns, its requests in progress and its end.

    Belongs to one event loop.
    """

    def __init__(
        self,
        stored: StoredSession,
        turns: Iterable[SessionTurn],
        *,
        sampler: Sampler,
        commits: GroupCommit,
        background: WorkerThread,
        metrics: GatewayMetrics,
        now: Callable[[], float],
        leaves_titles_out: bool,
    ) -> None:
        """Rebuild the state of a stored session.

        Args:
            turns: The session's turns, in the order of their numbers.
            now: Returns the time in seconds since 1970.
            leaves_titles_out: Whether to exclude from training the turns that only make a title
                for a conversation.
        """
        self.stored = stored
        self.tree = SessionTree(stored.id, leaves_titles_out=leaves_titles_out)
        self._sampler = sampler
        self._commits = commits
        self._background = background
        self._metrics = metrics
        self._now = now
        self._last_request_at = now()
        self._admitted = asyncio.Event()
        """Set when this gateway has begun to play the session's rollout, or the session has ended.
        Requests wait until then."""
        self._over = asyncio.Event()
        """Set when the session has ended, and its reward is known or will never be."""
        self._pending: dict[str, PendingTurn] = {}
        """The turns that are being sampled, by request id."""
        self._askers: dict[str, str] = {}
        """The id of the newest request for a turn, by the id of the request that began the turn."""
        self._showing: dict[int, asyncio.Task[None]] = {}
        """The tasks that store that an unseen turn is now seen, by the turn's number."""
        self._ending: asyncio.Task[None] | None = None
        """The task that stores an end, or a late reward."""
        self._ending_digest = ""
        """Digest of the `Finish` that began `_ending`; empty if a discard or a time limit began
        it."""
        for turn in turns:
            self.apply(TurnAdded(session_id=stored.id, turn=turn))
        if stored.end is not None:
            self.apply(SessionEnded(session_id=stored.id, end=stored.end))

    @property
    def is_live(self) -> bool:
        """Whether the session has not ended and is not being ended; it may wait for admission."""
        return self.stored.end is None and self._ending is None

    @property
    def is_over(self) -> bool:
        """Whether the session has ended and no reward is pending."""
        return self._over.is_set()

    @property
    def is_open(self) -> bool:
        """Whether the session is admitted and has not ended."""
        return self._admitted.is_set() and self.is_live

    # -- changes, in memory and in the store together -----------------------------------------

    def apply(self, change: Change) -> None:
        """Apply a change in memory, as the store applies it to its rows."""
        match change:
            case TurnAdded(turn=turn):
                self.tree.add(turn)
            case TurnMarked(number=number, is_unseen=is_unseen):
                self.tree.mark_unseen(number, is_unseen=is_unseen)
            case SessionOpened(opened_at=opened_at):
                self.stored = replace(self.stored, opened_at=opened_at)
            case SessionClaimed(name=name, claimed_at=claimed_at):
                self.stored = replace(self.stored, claimed_by=name, claimed_at=claimed_at)
            case LimitReached(refusal=refusal):
                self.stored = replace(self.stored, limit_refusal=refusal)
            case SessionEnded(end=end):
                self.stored = replace(self.stored, end=end)
                # Wake requests that wait for the session's admission: they are refused now.
                self._admitted.set()
                if end.reward_until is None:
                    self._over.set()

    def _note(self, change: Change) -> None:
        self.apply(change)
        self._commits.add(change)

    async def _commit(self, change: Change) -> None:
        """Store a change without applying it in memory, and wait until it is durable."""
        try:
            await self._commits.commit(change)
        except (StoreAway, StoreError) as error:
            raise unavailable(str(error)) from error
        except TooLate as error:
            raise Refused(RefusalCode.SESSION_CLOSED, str(error)) from error

    async def _add(self, turn: SessionTurn) -> None:
        # No request can continue this turn, or get it as answer, before it is stored: until then
        # the request for it is in progress.
        change = TurnAdded(session_id=self.stored.id, turn=turn)
        self.apply(change)
        began = time.monotonic()
        try:
            await self._commits.commit(change)
        except StoreAway as error:
            # `GroupCommit.commit` has queued the same change for the store.
            self.apply(self._marked(turn.number, is_unseen=True))
            raise unavailable(str(error)) from error
        except TooLate as error:
            # The session's group was cancelled.
            self._end_in_memory(str(error))
            raise closed(self.stored) from error
        self._metrics.commit_seconds.observe(time.monotonic() - began)

    def _see(self, number: int) -> Coroutine[Any, Any, None]:
        """Mark an unseen turn as seen in memory at once; the returned coroutine stores the mark."""
        change = self._marked(number, is_unseen=False)
        self.apply(change)
        return self._commit(change)

    def _hide(self, number: int) -> None:
        """Mark a turn as unseen, because no client received it."""
        self._note(self._marked(number, is_unseen=True))

    def _marked(self, number: int, *, is_unseen: bool) -> TurnMarked:
        return TurnMarked(session_id=self.stored.id, number=number, is_unseen=is_unseen)

    def _hit_limit(self, call: ChatCall, place: Place, outcome: Outcome, *, num_turns: int) -> None:
        """Record that a limit refused a request when the session had `num_turns` turns."""
        if call.request.is_auxiliary:
            return
        before, followed = self.stored.limit_refusal, follows(self.tree, place)
        refusal = LimitRefusal(outcome=outcome, num_turns=num_turns, follows=followed)
        # A refused title must not replace the refusal of a conversation.
        if refusal != before and (before is None or followed is not None):
            self._note(LimitReached(session_id=self.stored.id, refusal=refusal))

    async def _store_end(self, end: SessionEnd) -> None:
        end = replace(settled(end, self.tree), totals=totals_of(self.tree))
        change = SessionEnded(session_id=self.stored.id, end=end)
        while True:
            try:
                await self._commits.commit(change)
                break
            except StoreAway:
                # The end is still in the queue; storing an equal end again changes nothing.
                continue
            except StoreError as error:
                raise unavailable(str(error)) from error
            except TooLate as error:
                self._end_in_memory(str(error))
                raise ended_otherwise(self.stored) from error
        self.apply(change)

    def _end_in_memory(self, why: str) -> None:
        """End the session in memory, because it has already ended in the store."""
        if self.stored.end is None:
            end = broken_off(SessionStatus.DISCARDED, why, at=self._now())
            self.apply(SessionEnded(session_id=self.stored.id, end=end))

    # -- calls of its agent -------------------------------------------------------------------

    async def ask(self, call: ChatCall, *, deadline_at: float) -> ChatReply:
        """Answer an agent's request with a new turn, or a repeated request with its stored turn.

        deadline_at: in the event loop's time. Raises: Refused.
        """
        self._accept_request()
        await self._until_admitted(deadline_at)
        request = self._sampler.with_shown_names(self.tree.resolved(call.request))
        call = replace(call, request=request)
        place = await self._place(call.request)
        # Do this before `answered`: a turn that is being stored is in the tree already.
        pending = self._under_way(call, place.request_digest)
        if pending is None:
            turn = self.tree.answered(
                request_id=call.request_id,
                idempotency_key=call.request.idempotency_key,
                is_retry=call.request.is_retry,
                digest=place.request_digest,
            )
            if turn is not None:
                self._askers[turn.request_id] = call.request_id
                return await self._show(turn)
            pending = self._begin(call, place, deadline_at=deadline_at)
        self._askers[pending.call.request_id] = call.request_id
        pending.is_abandoned = False
        left_s = deadline_at - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left_s):
                turn = await asyncio.shield(pending.task)
        except TimeoutError:
            self.abandon(call.request_id)
            raise unavailable("the turn was not sampled in time; send the request again") from None
        except asyncio.CancelledError:
            if pending.task.cancelled():
                raise (stopping() if self.is_live else closed(self.stored)) from None
            raise
        turn = self.tree.turn(turn.number)
        # If the newest request's client has left, the turn stays unseen, whoever else gets it.
        return self._reply(turn) if pending.is_abandoned else await self._show(turn)

    async def num_prompt_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt; sample nothing. Raises: Refused."""
        self._accept_request()
        request = self._sampler.with_shown_names(self.tree.resolved(request))
        place = await self._place(request)
        prompt = await self._sampler.prompt(place, may_call=request.may_call)
        return int(prompt.token_ids.shape[0])

    def abandon(self, request_id: str) -> None:
        """Mark the turn of a request as unseen, because the client left before the answer.

        Do nothing if a newer retry of the request gets the answer.
        """
        answered = (first for first, newest in self._askers.items() if newest == request_id)
        # `_askers` does not have a request whose turn another gateway began.
        first = next(answered, None if request_id in self._askers else request_id)
        if first is None:
            return
        if (pending := self._pending.get(first)) is not None:
            pending.is_abandoned = True
            if not pending.task.done():
                return
        if (number := self.tree.number_of(first)) is not None and self.is_live:
            self._hide(number)

    def _accept_request(self) -> None:
        if not self.is_live:
            raise closed(self.stored)
        if not self.stored.is_taken:
            raise Refused(
                RefusalCode.FORBIDDEN,
                f"session {self.stored.id} is not claimed; claim one of its group with POST "
                "/api/v1/sessions and a name that you choose in `session`",
            )
        self._last_request_at = self._now()

    async def _until_admitted(self, deadline_at: float) -> None:
        try:
            async with asyncio.timeout_at(deadline_at):
                await self._admitted.wait()
        except TimeoutError:
            raise unavailable(
                f"session {self.stored.id} waits until its group is admitted to the window; check "
                f"GET /api/v1/sessions/{self.stored.id} before you start its agent"
            ) from None
        if not self.is_live:
            raise closed(self.stored)

    async def _place(self, request: ChatRequest) -> Place:
        return self.tree.find(request, await self._background.compute(request_keys, request))

    def _under_way(self, call: ChatCall, digest: str) -> PendingTurn | None:
        """Return the turn that is being sampled for the same request; None if there is none.

        Raises: Refused if a different request in progress has the same idempotency key.
        """
        if (same := self._pending.get(call.request_id)) is not None:
            return same
        key = call.request.idempotency_key
        for pending in self._pending.values():
            other = pending.call.request.idempotency_key
            is_same = pending.place.request_digest == digest
            if key and other == key:
                if not is_same:
                    raise Refused(
                        RefusalCode.CONFLICT,
                        "this Idempotency-Key names another request, which is being answered; use "
                        "a different key for each request",
                    )
                return pending
            # A retry under another idempotency key repeats a request that never arrived.
            if call.request.is_retry and is_same and key in ("", other):
                return pending
        return None

    def _begin(self, call: ChatCall, place: Place, *, deadline_at: float) -> PendingTurn:
        """Begin to sample a turn. deadline_at: by the event loop's clock."""
        if not self.is_live:
            raise closed(self.stored)
        self._sampler.rates.take(self.stored.key_name)
        most, num_turns = self.stored.spec.max_turns, self._num_begun()
        # Untrained turns count too.
        if num_turns >= most:
            self._hit_limit(call, place, Outcome.MAX_TURNS, num_turns=num_turns)
            raise Refused(
                RefusalCode.ROLLOUT_STOPPED,
                f"session {self.stored.id} has {num_turns} turns, expected at most {most}; "
                "finish it",
            )
        self.tree.note_request(place.request_digest)
        pending = PendingTurn(call=call, place=place, deadline_at=deadline_at)
        pending.task = self._background.begin_task(self._sample(pending))
        self._pending[call.request_id] = pending
        pending.task.add_done_callback(lambda _: self._pending.pop(call.request_id, None))
        return pending

    async def _sample(self, pending: PendingTurn) -> SessionTurn:
        try:
            new = await self._sampler.sample(pending, self.stored, self.tree)
        except Refused as refused:
            if refused.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED:
                # The request itself is in progress, and will not become a turn.
                num_turns, limit = self._num_begun() - 1, Outcome.TRUNCATED_CONTEXT
                self._hit_limit(pending.call, pending.place, limit, num_turns=num_turns)
            raise
        if not self.is_live:
            raise closed(self.stored)
        pending.is_committing = True
        await self._add(new)
        if pending.is_abandoned and not new.is_unseen:
            self._hide(new.number)
        return new

    def _num_begun(self) -> int:
        waiting = (each for each in self._pending.values() if not each.is_committing)
        return self.tree.num_turns + sum(1 for _ in waiting)

    async def _show(self, turn: SessionTurn) -> ChatReply:
        """Return a stored turn as a reply. Before that, store that a client has seen the turn."""
        number = turn.number
        if turn.is_unseen:
            if not self.is_live:
                raise closed(self.stored)
            self._showing[number] = self._background.begin_task(self._see(number))
        if (showing := self._showing.get(number)) is not None:
            try:
                await asyncio.shield(showing)
            except Refused:
                self._hide(number)
                raise
            if self._showing.get(number) is showing:
                del self._showing[number]
        return self._reply(turn)

    def _reply(self, turn: SessionTurn) -> ChatReply:
        return as_reply(self.tree, turn, shows_tokens=self.stored.spec.shows_tokens)

    # -- calls of its client ------------------------------------------------------------------

    async def claim(self, name: str) -> None:
        """Give the unclaimed session to an agent, which then plays it. Raises: Refused.

        name: the name that the client chose for the agent.
        """
        now = self._now()
        change = SessionClaimed(session_id=self.stored.id, name=name, claimed_at=now)
        await self._commit(change)
        self.apply(change)
        self._last_request_at = now

    async def finish(self, finish: Finish) -> None:
        """End the session as its client asks; the same request again changes nothing.

        Raises: Refused.
        """
        end = self.stored.end
        if end is not None:
            if end.digest == finish.digest:
                return
            raise ended_otherwise(self.stored)
        check_turns(self.tree, turn_rewards=finish.turn_rewards, named=finish.turn)
        until = self._now() + self.stored.spec.reward_deadline_s
        await self._end(
            SessionEnd(
                status=SessionStatus.FINISHED,
                outcome=finish.outcome or Outcome.COMPLETED,
                reward=finish.reward,
                components=finish.components,
                turn_rewards=finish.turn_rewards,
                judged=finish.turn,
                detail=finish.detail,
                ended_at=self._now(),
                reward_until=until if finish.is_reward_pending else None,
                digest=finish.digest,
            ),
            is_stated=finish.outcome is not None,
        )

    async def reward(self, given: Finish) -> None:
        """Give a finished session its reward; a repeat changes nothing. Raises: Refused."""
        end = self.stored.end
        if end is None:
            raise Refused(
                RefusalCode.CONFLICT,
                f"session {self.stored.id} is not finished; finish it, with the reward or with "
                "reward_pending",
            )
        if end.reward_until is None:
            rewards = end.reward, dict(end.components)
            if (
                rewards == (given.reward, dict(given.components))
                and given.turn_rewards.items() <= end.turn_rewards.items()
            ):
                return
            raise ended_otherwise(self.stored)
        check_turns(self.tree, turn_rewards=given.turn_rewards, named=None)
        rewarded = replace(
            end,
            reward=given.reward,
            components=given.components,
            turn_rewards={**end.turn_rewards, **given.turn_rewards},
            reward_until=None,
        )
        await self._store_once(given.digest, self._store_end(rewarded))

    async def discard(self, why: str) -> None:
        """End the session without training its turns. Do nothing if the session has ended.

        If another call is ending the session, wait for that call first. Raises: Refused if the
        session's end cannot be stored.
        """
        while self.stored.end is None:
            if (ending := self._ending) is not None:
                await asyncio.wait({ending})
                # Waiting for a finished task does not yield to the event loop; this does.
                await asyncio.sleep(0)
                continue
            try:
                await self._end(broken_off(SessionStatus.DISCARDED, why, at=self._now()))
            except Refused:
                if self.stored.end is None:
                    raise

    def view(self) -> StoredSession:
        """Return the session with its totals, as the API shows it to clients."""
        end = self.stored.end
        # The turns of a trained session are deleted.
        return replace(self.stored, totals=(end and end.totals) or totals_of(self.tree))

    # -- calls of the run ---------------------------------------------------------------------

    def open(self) -> None:
        """Record that the session's group is admitted; waiting requests now continue."""
        if self.stored.opened_at is None and self.stored.end is None:
            self._note(SessionOpened(session_id=self.stored.id, opened_at=self._now()))
        self._last_request_at = self._now()
        self._admitted.set()

    async def until_over(self) -> None:
        """Wait until the session has ended and no reward is pending."""
        await self._over.wait()

    def learn(self, end: SessionEnd) -> None:
        """End the session in memory, because another process has already stored its end.

        Example: its group was cancelled.
        """
        if self.is_live:
            self.apply(SessionEnded(session_id=self.stored.id, end=end))
            self._cancel_unsampled()

    def end_if_overdue(self) -> None:
        """Begin to end the session if its time limit has passed."""
        if self._ending is None:
            end = overdue(
                self.stored,
                last_request_at=self._last_request_at,
                is_sampling=bool(self._pending),
                now=self._now(),
            )
            if end is not None:
                self._background.begin_task(self._end_overdue(end))

    # -- its end ------------------------------------------------------------------------------

    async def _end(self, end: SessionEnd, *, is_stated: bool = False) -> None:
        """End the session, or wait if an equal request is ending it.

        is_stated: whether the client states the outcome; otherwise the turns determine it.
        """
        await self._store_once(end.digest, self._cancel_and_end(end, is_stated=is_stated))

    async def _cancel_and_end(self, end: SessionEnd, *, is_stated: bool) -> None:
        self._cancel_unsampled()
        # Wait for the turns that are being stored.
        tasks = [pending.task for pending in self._pending.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        if end.status is SessionStatus.FINISHED:
            # Check again: turns that were being stored are in the tree now.
            check_turns(self.tree, turn_rewards=end.turn_rewards, named=end.judged)
            if not is_stated:
                outcome = seen_outcome(self.tree, self.stored.limit_refusal, end.judged)
                end = replace(end, outcome=outcome)
        await self._store_end(end)

    async def _store_once(self, digest: str, work: Coroutine[Any, Any, None]) -> None:
        """Run the work that stores an end or a late reward, or wait if equal work is in progress.

        digest: the digest of the client's `Finish`; empty for a discard or a time limit.
        Raises: Refused if work with another digest is in progress; errors of `work`.
        """
        ending = self._ending
        if ending is not None:
            work.close()
            if self._ending_digest != digest:
                raise ended_otherwise(self.stored)
        else:
            ending = self._ending = self._background.begin_task(work)
            self._ending_digest = digest
            ending.add_done_callback(lambda _: setattr(self, "_ending", None))
        # The work continues if this caller leaves, because the end may be stored already.
        await asyncio.shield(ending)

    async def _end_overdue(self, end: SessionEnd) -> None:
        """End the session because of a time limit, or store that its late reward did not come."""
        if self.stored.end is None:
            await self._end(end)
        else:
            await self._store_once("", self._store_end(end))

    def _cancel_unsampled(self) -> None:
        for pending in self._pending.values():
            if not pending.is_committing:
                pending.task.cancel()
