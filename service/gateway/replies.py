"""What a client is shown of a sampled turn. The ids that are trained are the raw ones anyway."""

from __future__ import annotations

from dataclasses import dataclass

from actors.environment.protocol import MalformedCall, Message, Role, ToolCall, ToolSchema
from actors.environment.tool_calls import arguments_of, visible_text
from actors.policy import ParsedReply
from actors.types import FinishReason
from service.gateway.chat import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownReply:
    """A turn's message, and what it was made of."""

    message: Message
    is_malformed: bool
    """A call could not be read, its arguments are no JSON object, or its tool is not declared."""


def shown_reply(
    text: str,
    parsed: ParsedReply | None,
    tools: tuple[ToolSchema, ...],
    finish_reason: FinishReason,
    *,
    turn_id: str,
) -> ShownReply:
    """Make the message of a reply.

    Calls that can be read are shown, also of a tool that nobody declared, whose fault the agent
    tells its model. Where none of several can be read, the text is shown as it was said.
    Args: text: the decoded reply, without the end tokens behind it. parsed: None: not parsed.
    turn_id: of which calls get an id that the parser gave none of their own.
    """
    if parsed is None:
        return ShownReply(message=_assistant(text), is_malformed=False)
    found = parsed.calls
    if finish_reason is FinishReason.LENGTH and found:
        # Some parsers make a call of one that was cut off.
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
    content = parsed.content
    if is_malformed and not calls:
        content = visible_text(text)
    message = Message(
        role=Role.ASSISTANT,
        content=content,
        reasoning=parsed.reasoning,
        tool_calls=tuple(calls),
    )
    return ShownReply(message=message, is_malformed=is_malformed)


def stop_reason(message: Message, finish_reason: FinishReason) -> StopReason:
    """Why a turn ended, in the words of a reply."""
    if finish_reason is FinishReason.LENGTH:
        return StopReason.LENGTH
    return StopReason.CALLS if message.call_texts else StopReason.STOP


def _assistant(text: str) -> Message:
    return Message(role=Role.ASSISTANT, content=text)
