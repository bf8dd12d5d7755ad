"""Sample the turns of a session: make the prompt, call the engine, make the turn and the reply.

A prompt consists of the token ids of the turn that the request continues, and the ids of the
request's new messages. The client receives a parsed reply; the sampled ids are trained unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from actors.algorithm import AlgorithmSettings
from actors.environment.chat_template import RenderError, system_merged
from actors.environment.policy import (
    GenerateReply,
    GenerateRequest,
    ParsedReply,
    PolicyClient,
    PolicyDeadlineExceeded,
    PolicyUnavailable,
    UnusableReply,
    check_reply,
)
from actors.environment.protocol import MalformedCall, Message, Role, ToolCall, ToolSchema
from actors.environment.rendering import BreakReason, ChatRenderer
from actors.environment.settings import RolloutSettings
from actors.environment.template_traits import call_form
from actors.environment.text_patterns import before_stop
from actors.environment.tool_calls import arguments_of, visible_text
from actors.expert_records import ModelShape
from actors.types import FinishReason, TokenIds, Turn, original_numbers
from service.access.keys import NO_LIMITS, KeyBook, KeyLimits, Rates, tenant_of
from service.api.problems import shown
from service.config.sections import SessionSettings
from service.gateway.chat import (
    ChatCall,
    ChatReply,
    ChatRequest,
    RefusalCode,
    Refused,
    StopReason,
    unavailable,
)
from service.gateway.tree import Place, SessionTree
from service.intake.session import SessionTurn, StoredSession
from service.worker_thread import WorkerThread

log = logging.getLogger("rayloom.gateway")

# The tokenizer's normalisation of a text makes it shorter at most by this factor.
MOST_CHARACTERS_FACTOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The part of the configuration that the gateway uses."""

    sessions: SessionSettings
    rollouts: RolloutSettings
    algorithm: AlgorithmSettings
    max_context_tokens: int
    """Maximum number of tokens of prompt and reply together, by the engine's limit."""
    chat_template: str | None
    """Chat template of the run; None: the tokenizer's own."""
    default_limits: KeyLimits = NO_LIMITS
    """The run's limits for a named key, used for each limit that the key itself does not set."""
    finds_parser: bool = False
    """Whether the chat template decides how calls are parsed (inference.tool_parser: auto)."""
    num_ahead: int = 0
    """Difference between the policy's version and the number of finished steps, when the
    supervisor's current lease began."""
    republished: tuple[int, ...] = ()
    """Versions published without a new step, when the gateway starts (`actors.policy_age`)."""
    shape: ModelShape | None = None
    """Size of the trained model's vocabulary and its experts; None: not known."""


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
    """Whether the client that sent the newest request for this turn has disconnected."""
    is_committing: bool = False
    """Whether the turn is sampled and being stored; the session's end no longer cancels it."""


class TurnRates:
    """Limits how many turns per minute may begin under each named key."""

    def __init__(
        self, keys: KeyBook, *, default_limits: KeyLimits, now: Callable[[], float]
    ) -> None:
        """Start with no turns counted. A limit that a key does not set is taken from
        `default_limits`.
        """
        self._keys = keys
        self._default_limits = default_limits
        self._rates = Rates(now=now)

    def take(self, key_name: str) -> None:
        """Count a turn that begins under a named key.

        key_name: name of the key; empty: a caller without a named key, who has no limit. Raises:
        Refused if the key has reached its limit.
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
    """A client of the inference engines: checks replies, and raises errors as `Refused`.

    Belongs to one event loop.
    """

    def __init__(self, make_policy: Callable[[], PolicyClient]) -> None:
        self._make_policy = make_policy
        self._policy: PolicyClient | None = None

    async def sample(self, request: GenerateRequest, *, param: str) -> tuple[Turn, GenerateReply]:
        """Sample a turn. If no engine is available, wait for one until the request's deadline.

        param: the field of the client's body that contains the prompt. If the prompt is refused,
        the error names this field. Raises: Refused.
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
    """Renders prompts, samples turns and parses replies, for all sessions of a gateway.

    Belongs to one event loop.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        renderer: ChatRenderer,
        engine: EngineClient,
        background: WorkerThread,
        rates: TurnRates,
        now: Callable[[], float],
    ) -> None:
        """Make a sampler. now: returns seconds since 1970."""
        self._renderer = renderer
        self._engine = engine
        self._background = background
        self.rates = rates
        self._max_context_tokens = settings.max_context_tokens
        self._temperature = settings.rollouts.temperature
        # The engine ends turns at these strings. The stop strings of a request only cut the text
        # that its client receives.
        self._stop = settings.rollouts.stop
        self._ignores = settings.sessions.unsupported == "ignore"
        self._merges_system = settings.sessions.system_messages == "merge"
        self._reads_calls = not settings.finds_parser or call_form(renderer) is not None
        self._now = now

    async def sample(
        self, pending: PendingTurn, session: StoredSession, tree: SessionTree
    ) -> SessionTurn:
        """Sample the next turn of a session, and return the record to be stored.

        The caller must add the turn to the tree before it awaits anything else, because the turn
        has the tree's next number. Raises: Refused, also if the prompt leaves no room for a reply.
        """
        prompt = await self.prompt(pending.place, may_call=pending.call.request.may_call)
        request = self._request(pending, prompt, session, tree)
        turn, reply = await self._engine.sample(request, param="messages")
        return self._turn(pending, prompt, turn, reply, tree)

    def with_shown_names(self, request: ChatRequest) -> ChatRequest:
        """Return a copy of the request without the names that the chat template would not show.

        A name is the field `name` of a message. Names of tool results are kept.

        Raises: Refused if `sessions.unsupported` is "refuse" and the template would not show two
            different names of system messages, or several speakers among user messages. A single
            name is counted as ignored.
        """
        template = self._renderer.under(request.template_options).template
        messages, ignored = list(request.messages), request.ignored
        # A user without a name, or with the role's name, is another speaker than one with a name.
        speakers = {(m.role, (m.name or m.role).casefold()) for m in messages}
        speakers -= {(Role.SYSTEM, Role.SYSTEM)}
        roles = [role for role, _ in speakers]
        for number, message in enumerate(messages):
            name, role = message.name, message.role
            if name is None or role is Role.TOOL or template.shows_author(role):
                continue
            messages[number] = replace(message, name=None)
            if role is Role.ASSISTANT or name in ("", role):
                continue
            if roles.count(role) > 1 and not self._ignores:
                where = f"messages[{number}].name"
                raise Refused(
                    RefusalCode.UNSUPPORTED_PARAMETER,
                    f"{where}: got {shown(name)!r} and another speaker, but the model's chat "
                    f"template does not show the names of messages of role {role}; write the names "
                    "into the texts, remove them, or set sessions.unsupported: ignore",
                    param=where,
                )
            ignored = (*request.ignored, "messages.name")
        return replace(request, messages=tuple(messages), ignored=ignored)

    async def prompt(self, place: Place, *, may_call: bool) -> Prompt:
        """Make the prompt of a request. place: the request's position in the session's tree.

        Raises: Refused if the chat template cannot render a message or leaves a message out, if the
            request has tools but no parser could read their calls, or if the messages are far too
            long.
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
            return await self._background.compute(
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
        """Return the new messages' number of characters if they cannot fit the context; else 0."""
        messages = place.new_messages
        # Not tokenized: tokenizing very long messages would delay all other sessions.
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

    def _request(
        self, pending: PendingTurn, prompt: Prompt, session: StoredSession, tree: SessionTree
    ) -> GenerateRequest:
        call, place = pending.call, pending.place
        parent = None if place.parent is None else tree.turn(place.parent)
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

    def _turn(
        self,
        pending: PendingTurn,
        prompt: Prompt,
        turn: Turn,
        reply: GenerateReply,
        tree: SessionTree,
    ) -> SessionTurn:
        call, place, number = pending.call, pending.place, tree.num_turns
        message, is_malformed, stop_string = _as_message(
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
            reply=message,
            extends_parent=prompt.extends_parent,
            new_token_ids=prompt.new_token_ids,
            sampled_token_ids=turn.sampled_token_ids,
            logprobs=turn.logprobs,
            version_spans=turn.version_spans,
            # The client's text ends at the stop string, whatever was sampled after it.
            finish_reason=FinishReason.STOP if stop_string else turn.finish_reason,
            num_inserted=prompt.num_inserted,
            break_reason=prompt.break_reason,
            is_malformed=is_malformed,
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
            stop_string=stop_string,
            ignored=call.request.ignored,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of a request; fields without a docstring are described in `SessionTurn`."""

    token_ids: TokenIds
    """[P] int32, the whole prompt."""
    extends_parent: bool
    new_token_ids: TokenIds
    """[N] int32; the ids that follow the parent's ids if the prompt extends the parent turn, else
    the whole prompt."""
    num_inserted: int = 0
    break_reason: BreakReason | None = None


def next_prompt(place: Place, renderer: ChatRenderer, *, merges_system: bool = False) -> Prompt:
    """Make the prompt of a request; may run in a thread.

    If the chat template refuses the chat or leaves a part of it out, and `merges_system` is set,
    try again with all system texts in one message at the front.
    Args: place: the request's position in the session's tree.
    Raises: RenderError if the template still refuses the chat or leaves a part out.
    """
    renderer = renderer.under(place.template_options)
    try:
        return _prompt(place, renderer)
    except RenderError as error:
        messages = (*place.history, *place.new_messages)
        merged = system_merged(messages)
        if not merges_system or merged == messages:
            raise
        try:
            whole = renderer.first_prompt(merged, place.tools)
        except RenderError:
            raise error from None
    reason = None if place.parent is None else BreakReason.SYSTEM_MERGED
    return Prompt(token_ids=whole, extends_parent=False, new_token_ids=whole, break_reason=reason)


def _prompt(place: Place, renderer: ChatRenderer) -> Prompt:
    sampled = place.parent_sampled
    calls = place.history[-1].call_texts if place.history else ()
    renderer.template.check_results(
        place.new_messages, [(call_id, name) for call_id, name, _ in calls]
    )
    if sampled is None:
        renderer.check_tools(place.new_messages, place.tools)
        whole = renderer.first_prompt(place.new_messages, place.tools)
        return Prompt(token_ids=whole, extends_parent=False, new_token_ids=whole)
    previous = np.concatenate(place.parent_prompt)
    extension = renderer.extend(
        previous,
        sampled,
        history=place.history,
        new_messages=place.new_messages,
        tools=place.tools,
    )
    whole = extension.prompt_token_ids
    is_appended = extension.break_reason is None
    num_known = previous.shape[0] + sampled.shape[0]
    return Prompt(
        token_ids=whole,
        extends_parent=is_appended,
        # Copy the ids, because a view would keep the whole prompt in memory.
        new_token_ids=whole[num_known:].copy() if is_appended else whole,
        num_inserted=extension.num_inserted,
        break_reason=extension.break_reason,
    )


def _as_message(
    text: str,
    parsed: ParsedReply | None,
    tools: tuple[ToolSchema, ...],
    finish_reason: FinishReason,
    *,
    turn_id: str,
    stop: tuple[str, ...],
) -> tuple[Message, bool, str]:
    """Return the message for the client, whether the reply is malformed, and the stop string.

    The message ends before the first string of `stop`, and then has no calls. If the text has no
    such string, the returned stop string is empty. A reply is malformed if a tool call cannot be
    parsed, has arguments that are not a JSON object, or names an undeclared tool.
    text: the decoded reply, without its end tokens.
    """
    if parsed is None:
        content, stopped = before_stop(text, stop)
        return _assistant(content), False, stopped
    content, stopped = before_stop(parsed.content, stop)
    if stopped:
        return _assistant(content, reasoning=parsed.reasoning), False, stopped
    found = parsed.calls
    if finish_reason is FinishReason.LENGTH and found:
        # Some parsers return a call that was cut off.
        found = found[:-1]
    calls: list[ToolCall] = []
    names = {tool.name for tool in tools}
    for call in found:
        arguments = None if isinstance(call, MalformedCall) else arguments_of(call)
        if isinstance(call, MalformedCall) or arguments is None:
            # Drop the other calls too: if the agent executed only some of the calls, the policy
            # could mistake the result of one call for the result of another.
            content, stopped = before_stop(visible_text(text), stop)
            return _assistant(content, reasoning=parsed.reasoning), True, stopped
        taken = {each.id for each in calls}
        call_id = call.id if call.id and call.id not in taken else f"{turn_id}.{len(calls)}"
        calls.append(ToolCall(name=call.name, arguments=arguments, id=call_id))
    # Keep a call of an undeclared tool, so that the agent can report the error to the policy.
    message = _assistant(content, reasoning=parsed.reasoning, tool_calls=tuple(calls))
    return message, any(call.name not in names for call in calls), stopped


def as_reply(tree: SessionTree, turn: SessionTurn, *, shows_tokens: bool) -> ChatReply:
    """Return the reply that a client receives for a stored turn.

    shows_tokens: whether the reply has the sampled ids and their log-probabilities.
    """
    return ChatReply(
        turn_id=tree.turn_id(turn.number),
        message=turn.reply,
        stop_reason=_stop_reason(turn.reply, turn.finish_reason),
        stop_string=turn.stop_string,
        num_prompt_tokens=tree.nodes[turn.number].num_prompt_tokens,
        num_sampled_tokens=turn.num_sampled,
        policy_version=_newest_version(turn),
        created_at=turn.created_at,
        sampled_token_ids=turn.sampled_token_ids if shows_tokens else None,
        logprobs=turn.logprobs if shows_tokens else None,
    )


def _stop_reason(message: Message, finish_reason: FinishReason) -> StopReason:
    if finish_reason is FinishReason.LENGTH:
        return "length"
    return "calls" if message.call_texts else "stop"


def _assistant(text: str, **parts: Any) -> Message:
    return Message(role=Role.ASSISTANT, content=text, **parts)


def _newest_version(turn: SessionTurn) -> int:
    versions = [span.version for span in turn.version_spans]
    return int(original_numbers(np.array(versions, np.int32)).max(initial=0))
