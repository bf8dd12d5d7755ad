"""Sample the turns of a session: render the prompt, call the engine, and make the stored turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.environment.chat_template import RenderError, system_merged
from actors.environment.policy import (
    GenerateReply,
    GenerateRequest,
    PolicyClient,
    PolicyDeadlineExceeded,
    PolicyUnavailable,
    UnusableReply,
    check_reply,
)
from actors.environment.rendering import ChatRenderer
from actors.types import FinishReason, Turn
from service.access.keys import KeyBook, KeyLimits, Rates, tenant_of
from service.config.sessions import SystemMessages
from service.gateway.background import Background
from service.gateway.chat import ChatCall, RefusalCode, Refused, unavailable
from service.gateway.prompts import Place, Prompt, next_prompt
from service.gateway.replies import shown_reply
from service.intake.session import StoredSession
from service.intake.turns import SessionTurn

log = logging.getLogger("rayloom.gateway")

# A text's normalisation shortens it at most by this factor.
MOST_CHARACTERS_FACTOR = 4


@dataclass(slots=True, kw_only=True, eq=False)
class PendingTurn:
    """A turn that is being sampled, and the request that waits for it."""

    call: ChatCall
    """The request for which the turn is sampled."""
    place: Place
    deadline_at: float
    """The deadline, in the event loop's time."""
    task: asyncio.Task[SessionTurn] = field(init=False)
    is_abandoned: bool = False
    """Whether the client of the newest request has disconnected."""
    is_committing: bool = False
    """Whether the turn has been sampled; it then counts even if the session ends."""


class TurnRates:
    """The rate limits of turns under named keys."""

    def __init__(
        self, keys: KeyBook, *, default_limits: KeyLimits, now: Callable[[], float]
    ) -> None:
        """Start with no turns counted. default_limits: for keys without limits of their own."""
        self._keys = keys
        self._default_limits = default_limits
        self._rates = Rates(now=now)

    def take(self, key_name: str) -> None:
        """Count a turn that begins under a client's key; `key_name` may be empty.

        Raises: Refused if the key has reached its limit.
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


class EngineClient:
    """A client of the engines that returns a reply that fits its request, or raises a refusal.

    Belongs to one event loop.
    """

    def __init__(self, make_policy: Callable[[], PolicyClient]) -> None:
        self._make_policy = make_policy
        self._policy: PolicyClient | None = None

    async def sample(self, request: GenerateRequest, *, param: str) -> tuple[Turn, GenerateReply]:
        """Sample a turn; if there is no engine, wait for one until the request's deadline.

        param: the key of the client's body that a refusal of the prompt names. Raises: Refused.
        """
        try:
            # Create this within the event loop that uses it.
            self._policy = self._policy or self._make_policy()
            reply = await self._policy.generate(request)
            turn = check_reply(request, reply)
        except ValueError as error:
            raise Refused(RefusalCode.INVALID_REQUEST, str(error), param=param) from error
        except UnusableReply as error:
            log.warning("a reply of the engine cannot be used: %s", error)
            raise unavailable(
                f"the engine's reply cannot be used ({error}); send the request again"
            ) from error
        except (PolicyUnavailable, PolicyDeadlineExceeded) as error:
            raise unavailable(
                f"no engine answered in time ({error}); send the request again"
            ) from error
        if turn.finish_reason is FinishReason.ABORT:
            raise unavailable("the engine aborted the turn; send the request again")
        return turn, reply


class Sampler:
    """Renders, samples and parses turns: one per gateway; belongs to one event loop."""

    def __init__(
        self,
        *,
        renderer: ChatRenderer,
        engine: EngineClient,
        background: Background,
        rates: TurnRates,
        max_context_tokens: int,
        temperature: float,
        now: Callable[[], float],
        stop: tuple[str, ...] = (),
        system_messages: SystemMessages = "merge",
        reads_calls: bool = True,
    ) -> None:
        """Store the parts from which turns are made.

        Args: max_context_tokens: the limit of prompt and reply together. now: returns seconds since
        1970. stop: the run's stop strings, at which the engine ends turns; a request's stop strings
        only cut the text that its client receives. reads_calls: whether the engine can parse calls
        in this model's replies.
        """
        self._renderer = renderer
        self._merges_system = system_messages == "merge"
        self._reads_calls = reads_calls
        self.engine = engine
        self._background = background
        self.rates = rates
        self._max_context_tokens = max_context_tokens
        self._temperature = temperature
        self._stop = stop
        self._now = now

    async def prompt(self, place: Place, *, may_call: bool) -> Prompt:
        """Make the prompt of a request at this place.

        Raises: Refused if the chat template cannot render a message or does not show it, or if the
            messages are far too long.
        """
        if num_characters := self._num_too_many(place):
            raise self._no_room(f"{num_characters} characters")
        if place.tools and may_call and not self._reads_calls:
            raise Refused(
                RefusalCode.INVALID_REQUEST,
                "inference.tool_parser is auto, and the model's chat template writes calls in an "
                "unknown form, so that none could be read; leave the tools out, or "
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
        """Return the number of characters of the new messages if they cannot fit, else 0.

        Such messages are not tokenized: millions of tokens would delay all other sessions.
        """
        messages = place.new_messages
        num_characters = sum(len(each.content) + len(each.reasoning or "") for each in messages)
        longest = self._renderer.longest_token * MOST_CHARACTERS_FACTOR
        return num_characters if num_characters > self._max_context_tokens * longest else 0

    def _no_room(self, size: str) -> Refused:
        return Refused(
            RefusalCode.CONTEXT_LENGTH_EXCEEDED,
            f"the messages have {size}, which leaves no room for a reply; expected less than "
            f"{self._max_context_tokens} tokens; shorten them",
            param="messages",
        )

    def request(
        self,
        pending: PendingTurn,
        prompt: Prompt,
        *,
        session: StoredSession,
        parent: SessionTurn | None,
    ) -> GenerateRequest:
        """Return the engine's request for a prompt. parent: the turn that it continues.

        Raises: Refused for a prompt that leaves no room.
        """
        call, place = pending.call, pending.place
        room = self._max_context_tokens - prompt.token_ids.shape[0]
        if room < 1:
            raise self._no_room(f"{prompt.token_ids.shape[0]} tokens")
        most = min(room, session.spec.max_tokens_per_turn)
        left_s = pending.deadline_at - asyncio.get_running_loop().time()
        return GenerateRequest(
            prompt_token_ids=prompt.token_ids,
            max_tokens=min(most, call.request.max_tokens or most),
            temperature=self._temperature,
            deadline_s=max(0.001, left_s),
            cache_salt=parent.cache_salt or None if parent else None,
            tenant=tenant_of(session.id),
            replica=parent.replica if parent else "",
            stop=self._stop,
            tools=place.tools if call.request.may_call else (),
        )

    def turn(
        self,
        pending: PendingTurn,
        prompt: Prompt,
        turn: Turn,
        reply: GenerateReply,
        *,
        number: int,
        turn_id: str,
    ) -> SessionTurn:
        """Return the session's next turn, as it is stored. number: the turn's number."""
        call, place = pending.call, pending.place
        shown = shown_reply(
            self._renderer.decode(turn.sampled_token_ids),
            reply.parsed,
            place.tools,
            turn.finish_reason,
            turn_id=turn_id,
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
            # The text that its client receives ends there, whatever was sampled after it.
            finish_reason=FinishReason.STOP if shown.stop_string else turn.finish_reason,
            num_inserted=prompt.num_inserted,
            break_reason=prompt.break_reason,
            is_malformed=shown.is_malformed,
            is_auxiliary=call.request.is_auxiliary,
            is_unseen=pending.is_abandoned,
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
