"""Samples the turns of sessions: their limits, the prompt, the engine, the turn that is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from actors.environment.chat_template import RenderError, system_merged
from actors.environment.policy import GenerateReply, GenerateRequest
from actors.environment.rendering import ChatRenderer
from actors.types import FinishReason, Outcome, Turn
from service.access.keys import KeyBook, KeyLimits
from service.access.names import tenant_of
from service.access.rates import Rates
from service.config.sessions import SystemMessages
from service.gateway.background import Background
from service.gateway.calls import ChatCall
from service.gateway.changes import SessionChanges
from service.gateway.chat import RefusalCode, Refused
from service.gateway.engine import Engine
from service.gateway.replies import shown_reply
from service.gateway.session import Sampling, Session, closed
from service.gateway.tree import Place, Prompt, next_prompt
from service.intake.session import Cut
from service.intake.turns import SessionIntent, SessionTurn

# Of a text before it is normalised, over those after it.
MOST_CHARACTERS_FACTOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A turn that is to be sampled."""

    session: Session
    call: ChatCall
    place: Place
    deadline_at: float
    """In the loop's time."""


class TurnRates:
    """How often turns may begin under a named key."""

    def __init__(
        self, keys: KeyBook, *, default_limits: KeyLimits, now: Callable[[], float]
    ) -> None:
        """default_limits: of keys without limits of their own."""
        self._keys = keys
        self._default_limits = default_limits
        self._rates = Rates(now=now)

    def take(self, key_name: str) -> None:
        """Count a turn that begins under a client's key; empty: a key without a name.

        Raises: Refused for one too many.
        """
        per_minute = self._keys.limits_of(key_name).over(self._default_limits).turns_per_minute
        if not key_name or per_minute is None:
            return
        if wait_s := self._rates.take(key_name, per_s=per_minute / 60, burst=per_minute):
            raise Refused(
                RefusalCode.TOO_MANY_REQUESTS,
                f"more than {per_minute:g} turns have begun in a minute under the client's key "
                f"(turns_per_minute of the key); send the request again in {wait_s} s",
                retry_after_s=wait_s,
            )


class Sampler:
    """One for a gateway; belongs to one event loop."""

    def __init__(
        self,
        *,
        renderer: ChatRenderer,
        engine: Engine,
        changes: SessionChanges,
        background: Background,
        rates: TurnRates,
        max_context_tokens: int,
        temperature: float,
        now: Callable[[], float],
        stop: tuple[str, ...] = (),
        system_messages: SystemMessages = SystemMessages.MERGE,
        reads_calls: bool = True,
    ) -> None:
        """max_context_tokens: the limit of prompt and reply together. now: returns seconds since
        1970. stop: the run's stop strings, at which the engine ends turns; the stop strings of a
        request only cut the text that the client is shown. reads_calls: whether the engine can read
        calls out of replies of this model."""
        self._renderer = renderer
        self._merges_system = system_messages is SystemMessages.MERGE
        self._reads_calls = reads_calls
        self._engine = engine
        self._changes = changes
        self._background = background
        self._rates = rates
        self._max_context_tokens = max_context_tokens
        self._temperature = temperature
        self._stop = stop
        self._now = now

    def begin(
        self, session: Session, call: ChatCall, place: Place, *, deadline_at: float
    ) -> Sampling:
        """Begin a turn; its task gives the turn, stored.

        deadline_at: in the loop's time. Raises: Refused; so does the task.
        """
        if not session.is_open:
            raise closed(session)
        self._rates.take(session.stored.key_name)
        self._check_turns(session, call, place)
        session.tree.note_request(place.request_digest)
        sampling = Sampling(
            request_id=call.request_id,
            digest=place.request_digest,
            idempotency_key=call.request.idempotency_key,
        )
        wanted = _Wanted(session=session, call=call, place=place, deadline_at=deadline_at)
        sampling.task = self._background.begin(self._sample(wanted, sampling))
        session.sampling[call.request_id] = sampling
        sampling.task.add_done_callback(lambda _: session.sampling.pop(call.request_id, None))
        return sampling

    def _check_turns(self, session: Session, call: ChatCall, place: Place) -> None:
        """Raises: Refused for a session that has all its turns; those left out count too."""
        most, num_turns = session.stored.spec.max_turns, _num_begun(session)
        if num_turns >= most:
            self._cut(session, call, place, Outcome.MAX_TURNS, num_turns=num_turns)
            raise Refused(
                RefusalCode.ROLLOUT_STOPPED,
                f"session {session.stored.id} has {num_turns} turns, expected at most {most}; "
                "finish it",
            )

    def _cut(
        self, session: Session, call: ChatCall, place: Place, outcome: Outcome, *, num_turns: int
    ) -> None:
        """Note that a request is refused, unless it is no part of the task."""
        if not call.request.is_auxiliary:
            follows = session.tree.follows(place)
            cut = Cut(outcome=outcome, num_turns=num_turns, follows=follows)
            self._changes.cut(session, cut)

    async def _sample(self, wanted: _Wanted, sampling: Sampling) -> SessionTurn:
        """Raises: Refused."""
        session = wanted.session
        if num_characters := self._num_too_many(wanted.place):
            raise self._too_long(wanted, f"{num_characters} characters")
        prompt = await self._prompt(wanted.place, may_call=wanted.call.request.may_call)
        request = self._request(wanted, prompt)
        turn, reply = await self._ask(wanted, request)
        if not session.is_open:
            raise closed(session)
        stored = self._stored(wanted, prompt, turn, reply, is_unseen=sampling.is_abandoned)
        sampling.is_committing = True
        await self._changes.add_turn(session, stored)
        if sampling.is_abandoned and not stored.is_unseen:
            self._changes.hide(session, stored.number)
        return stored

    async def num_prompt_tokens(self, place: Place, *, may_call: bool) -> int:
        """Return how long the prompt of a request at this place is. Raises: Refused."""
        if num_characters := self._num_too_many(place):
            raise self._no_room(f"{num_characters} characters")
        prompt = await self._prompt(place, may_call=may_call)
        return int(prompt.token_ids.shape[0])

    async def _prompt(self, place: Place, *, may_call: bool) -> Prompt:
        """Raises: Refused if the chat template cannot render a message, or does not show it."""
        if place.tools and may_call and not self._reads_calls:
            raise Refused(
                RefusalCode.INVALID_REQUEST,
                "inference.tool_parser is auto, and the form of calls in the model's chat template "
                "is not known, so that no call could be read; leave the tools out, or "
                "name the model's parser in inference.tool_parser",
                param="tools",
            )
        try:
            return await self._background.in_thread(
                next_prompt, place, self._renderer, merges_system=self._merges_system
            )
        except RenderError as error:
            remedy = ""
            messages = (*place.history, *place.new_messages)
            if not self._merges_system and system_merged(messages) != messages:
                remedy = (
                    "; sessions.system_messages: merge puts all system texts into the first message"
                )
            raise Refused(
                RefusalCode.INVALID_REQUEST,
                f"the model's chat template cannot render these messages: {error}{remedy}",
                param=error.param,
            ) from error

    def _num_too_many(self, place: Place) -> int:
        """Return the characters of new messages that cannot fit; 0 if they may fit. Tokenizing
        millions of tokens would delay all other sessions."""
        messages = place.new_messages
        num_characters = sum(len(each.content) + len(each.reasoning or "") for each in messages)
        longest = self._renderer.longest_token * MOST_CHARACTERS_FACTOR
        return num_characters if num_characters > self._max_context_tokens * longest else 0

    def _too_long(self, wanted: _Wanted, told: str) -> Refused:
        session = wanted.session
        # The request itself is among those under way, and will not be a turn.
        num_turns = _num_begun(session) - 1
        outcome = Outcome.TRUNCATED_CONTEXT
        self._cut(session, wanted.call, wanted.place, outcome, num_turns=num_turns)
        return self._no_room(told)

    def _no_room(self, told: str) -> Refused:
        return Refused(
            RefusalCode.CONTEXT_LENGTH_EXCEEDED,
            f"the messages have {told}, which leaves no room for a reply; expected less than "
            f"{self._max_context_tokens} tokens; shorten them",
            param="messages",
        )

    def _request(self, wanted: _Wanted, prompt: Prompt) -> GenerateRequest:
        """Raises: Refused for a prompt that leaves no room."""
        session, place = wanted.session, wanted.place
        room = self._max_context_tokens - prompt.token_ids.shape[0]
        if room < 1:
            raise self._too_long(wanted, f"{prompt.token_ids.shape[0]} tokens")
        most = min(room, session.stored.spec.max_tokens_per_turn)
        parent = None if place.parent is None else session.tree.turn(place.parent)
        left_s = wanted.deadline_at - asyncio.get_running_loop().time()
        return GenerateRequest(
            prompt_token_ids=prompt.token_ids,
            max_tokens=min(most, wanted.call.request.max_tokens or most),
            temperature=self._temperature,
            deadline_s=max(0.001, left_s),
            cache_salt=parent.cache_salt or None if parent else None,
            tenant=tenant_of(session.stored.id),
            replica=parent.replica if parent else "",
            stop=self._stop,
            tools=place.tools if wanted.call.request.may_call else (),
        )

    async def _ask(self, wanted: _Wanted, request: GenerateRequest) -> tuple[Turn, GenerateReply]:
        """Note that the engine is asked, and ask it. Raises: Refused."""
        session, request_id = wanted.session, wanted.call.request_id
        intent = SessionIntent(
            request_id=request_id,
            request_digest=wanted.place.request_digest,
            parent=wanted.place.parent,
            policy_version=None,
            created_at=self._now(),
        )
        self._changes.add_intent(session, intent)
        try:
            return await self._engine.sample(request, param="messages")
        except Refused:
            self._changes.drop_intent(session, request_id)
            raise

    def _stored(
        self,
        wanted: _Wanted,
        prompt: Prompt,
        turn: Turn,
        reply: GenerateReply,
        *,
        is_unseen: bool,
    ) -> SessionTurn:
        """The turn as it is stored: the session's next."""
        tree, place, call = wanted.session.tree, wanted.place, wanted.call
        number = tree.num_turns
        shown = shown_reply(
            self._renderer.decode(turn.sampled_token_ids),
            reply.parsed,
            place.tools,
            turn.finish_reason,
            turn_id=tree.turn_id(number),
            stop=(*call.request.stop, *self._stop),
        )
        return SessionTurn(
            number=number,
            parent=place.parent,
            tools=() if place.parent is not None else place.tools,
            new_messages=place.new_messages,
            reply=shown.message,
            extends_parent=prompt.extends_parent,
            new_token_ids=prompt.new_token_ids,
            sampled_token_ids=turn.sampled_token_ids,
            logprobs=turn.logprobs,
            version_spans=turn.version_spans,
            # What its client was shown ended there, whatever came after it.
            finish_reason=FinishReason.STOP if shown.stop_string else turn.finish_reason,
            num_inserted=prompt.num_inserted,
            break_reason=prompt.break_reason,
            is_malformed=shown.is_malformed,
            is_auxiliary=call.request.is_auxiliary,
            is_unseen=is_unseen,
            expert_indices=turn.expert_indices,
            cache_salt=reply.cache_salt,
            replica=reply.replica,
            request_id=call.request_id,
            request_digest=place.request_digest,
            idempotency_key=call.request.idempotency_key,
            created_at=self._now(),
            template_options={} if place.parent is not None else place.template_options,
            is_instructed=place.is_instructed,
            stop_string=shown.stop_string,
            ignored=call.request.ignored,
        )


def _num_begun(session: Session) -> int:
    """Its turns, with those that are under way and not yet among them."""
    waiting = (each for each in session.sampling.values() if not each.is_committing)
    return session.tree.num_turns + sum(1 for _ in waiting)
