"""Make the reply that a client receives from a sampled turn; the raw ids are trained unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.environment.policy import ParsedReply
from actors.environment.protocol import MalformedCall, Message, Role, ToolCall, ToolSchema
from actors.environment.text_patterns import before_stop
from actors.environment.tool_calls import arguments_of, visible_text
from actors.types import FinishReason, original_numbers
from service.gateway.chat import ChatReply, StopReason
from service.gateway.tree import SessionTree
from service.intake.turns import SessionTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownReply:
    """A turn's message, and whether a call was malformed or the text was cut."""

    message: Message
    is_malformed: bool
    """Whether a call is unreadable, has arguments that are no JSON object, or an undeclared tool.
    """
    stop_string: str = ""
    """The stop string before which the text was cut; empty: it was not cut."""


def shown_reply(
    text: str,
    parsed: ParsedReply | None,
    tools: tuple[ToolSchema, ...],
    finish_reason: FinishReason,
    *,
    turn_id: str,
    stop: tuple[str, ...] = (),
) -> ShownReply:
    """Make the message of a reply.

    Readable calls are shown, also of an undeclared tool, so that the agent can report the error to
    its model. If calls are malformed and none is readable, the text is shown as it was sampled.
    Args: text: the decoded reply, without its end tokens. parsed: the parsed reply; None if it was
    not parsed. turn_id: used to make ids for calls to which the parser gave none. stop: stop
    strings. If the text contains one, it is cut before the first, and no calls are shown, because
    they come after the text.
    """
    if parsed is None:
        content, stopped = before_stop(text, stop)
        return ShownReply(message=_assistant(content), is_malformed=False, stop_string=stopped)
    content, stopped = before_stop(parsed.content, stop)
    if stopped:
        message = _assistant(content, reasoning=parsed.reasoning)
        return ShownReply(message=message, is_malformed=False, stop_string=stopped)
    found = parsed.calls
    if finish_reason is FinishReason.LENGTH and found:
        # Some parsers return a call that was cut off.
        found = found[:-1]
    calls: list[ToolCall] = []
    is_malformed = False
    names = {tool.name for tool in tools}
    for call in found:
        arguments = None if isinstance(call, MalformedCall) else arguments_of(call)
        if isinstance(call, MalformedCall) or arguments is None:
            is_malformed = True
        else:
            is_malformed |= call.name not in names
            taken = {each.id for each in calls}
            call_id = call.id if call.id and call.id not in taken else f"{turn_id}.{len(calls)}"
            calls.append(ToolCall(name=call.name, arguments=arguments, id=call_id))
    if is_malformed and not calls:
        content, stopped = before_stop(visible_text(text), stop)
    message = _assistant(content, reasoning=parsed.reasoning, tool_calls=tuple(calls))
    return ShownReply(message=message, is_malformed=is_malformed, stop_string=stopped)


def as_reply(tree: SessionTree, turn: SessionTurn, *, shows_tokens: bool) -> ChatReply:
    """Return a stored turn as its client receives it."""
    return ChatReply(
        turn_id=tree.turn_id(turn.number),
        message=turn.reply,
        stop_reason=stop_reason(turn.reply, turn.finish_reason),
        stop_string=turn.stop_string,
        num_prompt_tokens=tree.num_prompt_tokens(turn.number),
        num_sampled_tokens=turn.num_sampled,
        policy_version=_newest_version(turn),
        created_at=turn.created_at,
        sampled_token_ids=turn.sampled_token_ids if shows_tokens else None,
        logprobs=turn.logprobs if shows_tokens else None,
    )


def stop_reason(message: Message, finish_reason: FinishReason) -> StopReason:
    """Return the reason why a turn ended, for its reply."""
    if finish_reason is FinishReason.LENGTH:
        return StopReason.LENGTH
    return StopReason.CALLS if message.call_texts else StopReason.STOP


def _assistant(text: str, **parts: Any) -> Message:
    return Message(role=Role.ASSISTANT, content=text, **parts)


def _newest_version(turn: SessionTurn) -> int:
    versions = [span.version for span in turn.version_spans]
    return int(original_numbers(np.array(versions, np.int32)).max(initial=0))
