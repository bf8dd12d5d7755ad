"""Answers the requests of agents: with the turn that a request has got, or one sampled for it.

A request that is sent again is answered with the turn of the first; who asked last counts for
whether a client has seen the turn.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from service.gateway.background import Background
from service.gateway.calls import ChatCall
from service.gateway.changes import SessionChanges
from service.gateway.chat import ChatReply, ChatRequest, RefusalCode, Refused, unavailable
from service.gateway.replies import as_reply
from service.gateway.sampling import Sampler
from service.gateway.session import Sampling, Session, closed, stopping
from service.gateway.tree import Place, read
from service.intake.turns import SessionTurn


class Answers:
    """One for a gateway; belongs to one event loop."""

    def __init__(
        self, sampler: Sampler, *, changes: SessionChanges, background: Background
    ) -> None:
        self._sampler = sampler
        self._changes = changes
        self._background = background

    async def answer(self, session: Session, call: ChatCall, *, deadline_at: float) -> ChatReply:
        """Answer a request of a session that is admitted.

        deadline_at: in the loop's time. Raises: Refused.
        """
        call = replace(call, request=session.tree.resolved(call.request))
        place = await self._place(session, call.request)
        # First: what is being stored is in the tree already.
        sampling = _under_way(session, call, place.request_digest)
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
            sampling = self._sampler.begin(session, call, place, deadline_at=deadline_at)
        session.askers[sampling.request_id] = call.request_id
        sampling.is_abandoned = False
        left_s = deadline_at - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left_s):
                turn = await asyncio.shield(sampling.task)
        except TimeoutError:
            self.abandon(session, call.request_id)
            raise unavailable("the turn was not sampled in time; send the request again") from None
        except asyncio.CancelledError:
            if sampling.task.cancelled():
                raise (stopping() if session.is_open else closed(session)) from None
            raise
        turn = session.tree.turn(turn.number)
        if sampling.is_abandoned:
            return as_reply(session, turn)
        return await self._show(session, turn)

    async def num_prompt_tokens(self, session: Session, request: ChatRequest) -> int:
        """Count the prompt tokens of a request's turn; sample nothing. Raises: Refused."""
        place = await self._place(session, session.tree.resolved(request))
        return await self._sampler.num_prompt_tokens(place, may_call=request.may_call)

    async def _place(self, session: Session, request: ChatRequest) -> Place:
        """Raises: Refused."""
        reading = await self._background.in_thread(read, request)
        return session.tree.find(request, reading)

    def abandon(self, session: Session, request_id: str) -> None:
        """The client of this request has gone before it was answered.

        It changes nothing where another request, a retry of this one, is answered with the turn.
        """
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
            self._changes.hide(session, number)

    async def _show(self, session: Session, turn: SessionTurn) -> ChatReply:
        """Answer with a turn that is stored; that it is seen is stored before. Raises: Refused."""
        number = turn.number
        if turn.is_unseen:
            if not session.is_open:
                raise closed(session)
            storing = self._changes.show(session, number)
            session.showing[number] = self._background.begin(storing)
        if (showing := session.showing.get(number)) is not None:
            try:
                await asyncio.shield(showing)
            except Refused:
                self._changes.hide(session, number)
                raise
            if session.showing.get(number) is showing:
                del session.showing[number]
        return as_reply(session, turn)


def _under_way(session: Session, call: ChatCall, digest: str) -> Sampling | None:
    """What is being sampled for this very request; None: nothing. Raises: Refused."""
    if (same := session.sampling.get(call.request_id)) is not None:
        return same
    for sampling in session.sampling.values():
        key = call.request.idempotency_key
        if key and sampling.idempotency_key == key:
            if sampling.digest != digest:
                raise Refused(
                    RefusalCode.CONFLICT,
                    "this Idempotency-Key names another request, which is being answered; take a "
                    "key of its own for each request",
                )
            return sampling
        # A retry under another idempotency key repeats a request that never arrived.
        is_same = sampling.digest == digest and key in ("", sampling.idempotency_key)
        if call.request.is_retry and is_same:
            return sampling
    return None
