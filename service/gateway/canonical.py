"""Compute digests ("keys") of conversations, by which a session finds the turn to continue.

Clients often change a conversation before they send it back. They drop or move reasoning, rewrite
the arguments of tool calls, round numbers as JavaScript does, rename the ids of calls, or put
bookkeeping into the system text. Each message is brought into a canonical form first, so that these
changes do not change the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

from actors.environment.protocol import Message, Role, ToolSchema
from actors.environment.tool_calls import split_thought
from service.gateway.chat import ChatRequest

START = b""
"""The key of a conversation without messages."""

# Claude Code changes this line in every request.
_ROTATING_LINE = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
# JavaScript represents every integer up to this one, but not every larger integer.
_MOST_EXACT = 2**53


class Link(NamedTuple):
    """A message's position in its conversation, identified by a digest of all messages up to it."""

    key: bytes
    """Digest of the conversation up to and including this message."""
    answers: int | None
    """Index of the call that this message answers among all tool calls; None: no known call."""


def links_of(
    messages: Iterable[Message],
    *,
    after: bytes = START,
    num_calls: int = 0,
    call_before: Callable[[str], int | None] | None = None,
) -> list[Link]:
    """Return a link for each message: a digest of the conversation up to and with this message.

    The link of a tool's result also has the index of the call that it answers: the newest call with
    the result's id. If the last reply has several calls with one id, results answer them in order.
    Args: after: key of the message before `messages`. num_calls: number of tool calls before
    `messages`. call_before: takes an id, and returns the index of the newest call with this id
    before `messages`, or None.
    """
    key, links = after, []
    newest: dict[str, int] = {}
    # The calls with each id in the last reply that have no result.
    unanswered: dict[str, list[int]] = {}
    for message in messages:
        answers = None
        if call_id := message.tool_call_id:
            if same := unanswered.get(call_id):
                answers = same.pop(0)
            elif (answers := newest.get(call_id)) is None and call_before is not None:
                answers = call_before(call_id)
        key = _digest(key, _canonical(message, answers))
        links.append(Link(key, answers))
        if message.role is Role.ASSISTANT:
            unanswered = {}
        for call_id, _, _ in message.call_texts:
            newest[call_id] = num_calls
            unanswered.setdefault(call_id, []).append(num_calls)
            num_calls += 1
    return links


def tools_key(
    tools: Sequence[ToolSchema], template_options: Mapping[str, object] | None = None
) -> bytes:
    """Return a key of tools and template options, which does not depend on the order of tools."""
    options = [_json(dict(template_options))] if template_options else []
    forms = [(tool.name, tool.description, dict(tool.parameters)) for tool in tools]
    return _digest(*sorted(map(_json, forms)), *options)


def request_digest(request: ChatRequest, *, key: bytes, tools: bytes) -> str:
    """Return a hexadecimal digest of a request; a repetition of the request has the same digest.

    The digest also depends on the ids of tool calls and on the reasoning, unlike the conversation's
    key. Two sampled replies may differ only in these ids or the reasoning. A request that continues
    one of the replies does not repeat a request that continues the other reply.
    Args: key: key of the whole conversation. tools: key of the tools.
    """
    shown = [
        (shown_reasoning(message), [call_id for call_id, _, _ in message.call_texts])
        for message in request.messages
        if message.role is Role.ASSISTANT
    ]
    asked: tuple[object, ...] = (request.continues, request.max_tokens, request.is_auxiliary, shown)
    if not request.may_call:
        asked = (*asked, request.may_call)
    stop = [_json(request.stop)] if request.stop else []
    return _digest(key, tools, _json(asked), *stop).hex()


def shown_reasoning(message: Message) -> str | None:
    """Return an assistant's reasoning, from its own field or the start of the content."""
    return message.reasoning or split_thought(message.content)[0] or message.reasoning


def _canonical(message: Message, answers: int | None) -> bytes:
    content = message.content
    if message.role is Role.ASSISTANT:
        calls = [[name, _values(arguments)] for _, name, arguments in message.call_texts]
        content = split_thought(content)[1]
        return _json((message.role, content.strip(), message.name, calls))
    if message.role is Role.TOOL:
        return _json((message.role, content, message.tool_call_id if answers is None else answers))
    if message.role is Role.SYSTEM:
        content = _ROTATING_LINE.sub("", content)
    return _json((message.role, content, message.name))


def _values(arguments: str) -> object:
    return json.loads(arguments, parse_float=_number, parse_int=_whole_number)


def _number(text: str) -> float | int:
    """Return a number as JavaScript writes it. Example: 1.0 -> 1"""
    value = float(text)
    return int(value) if value.is_integer() else value


def _whole_number(text: str) -> float | int:
    """Return a number as JavaScript reads it: 1234567890123456789 as 1234567890123456800."""
    value = int(text)
    return value if abs(value) <= _MOST_EXACT else _number(text)


def _json(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def _digest(*parts: bytes) -> bytes:
    """Return one SHA-256 of all parts; ("ab", "c") and ("a", "bc") have different digests."""
    hashed = sha256()
    for part in parts:
        hashed.update(b"%d:" % len(part))
        hashed.update(part)
    return hashed.digest()
