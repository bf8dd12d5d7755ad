"""Check whether a rendering shows the texts of a chat's messages.

A template may drop, move, trim or escape a text. So each text is checked in two renderings. The
first has the text, and must show the text's words in their order. The second has a mark, a word
that occurs nowhere else, in place of the text. It must show the mark, because the words in the
first rendering could come from another message.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from actors.environment.tool_calls import without_thought

_MARK = re.compile(r"qz[cmt][\dc]+[cmt]zq")
_WORD = re.compile(r"\w+")
_UNICODE_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_WHITE_ESCAPES = frozenset("nrtbf")
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A text in a chat's message, which a rendering of the chat must show."""

    number: int
    """Index of the message in the chat, from 0."""
    message: Message
    mark: str
    """The text that `marked` puts in place of the message's text."""
    texts: tuple[str, ...]
    is_call: bool = False

    def __str__(self) -> str:
        shown = " ".join(" ".join(self.texts).split())
        if len(shown) > _SHOWN_CHARS:
            shown = f"{shown[:_SHOWN_CHARS]}…"
        what = "a call" if self.is_call else "the content"
        return f"{what} of message {self.number} ({self.message.role.value}): {shown!r}"

    @property
    def remedy(self) -> str:
        """Return the advice for a user whose model's template does not show this text."""
        if self.message.role is Role.SYSTEM:
            # Some templates (Mistral Nemo) do not show the first system text in every chat.
            first = "" if self.number == 0 else "send system texts as the first message, or "
            return f"{first}put the text into a user's message"
        if self.message.role is Role.TOOL or self.is_call:
            return "train a model whose template shows calls and their results"
        return "send it in another form, or train a model whose template shows it"


def said(messages: Sequence[Message]) -> Iterator[Said]:
    """Yield the texts of messages: contents, and the names and the arguments of their calls.

    Thoughts are not yielded, because a template may leave out the thoughts of earlier turns.
    """
    for number, message in enumerate(messages):
        content = _visible(message)
        if content.strip():
            yield Said(
                number=number,
                message=message,
                mark=_content_mark(number),
                texts=(content,),
            )
        for index, (_, name, arguments) in enumerate(message.call_texts):
            yield Said(
                number=number,
                message=message,
                mark=_call_mark(number, index),
                texts=(name, *_leaves(json.loads(arguments))),
                is_call=True,
            )


def marked(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the chat with a unique mark in place of each text; ids and names stay the same."""
    return tuple(
        replace(
            message,
            content=_content_mark(number) if _visible(message).strip() else "",
            reasoning=message.reasoning and "thought",
            tool_calls=_marked_calls(message, number),
        )
        for number, message in enumerate(messages)
    )


def with_mark(messages: Sequence[Message], said: Said) -> tuple[Message, ...]:
    """Return the chat with a mark appended to the text of one message.

    Some templates read a text to decide how to render it. They can still read a text to which a
    mark is appended, but not a text that a mark replaces.
    """
    message = messages[said.number]
    changed = replace(message, content=f"{message.content} {said.mark}")
    return (*messages[: said.number], changed, *messages[said.number + 1 :])


def marked_tools(tools: Sequence[ToolSchema]) -> tuple[ToolSchema, ...]:
    return tuple(replace(tool, name=tool_mark(number)) for number, tool in enumerate(tools))


def tool_mark(number: int) -> str:
    return f"qzt{number}tzq"


def marks_in(text: str) -> frozenset[str]:
    return frozenset(_MARK.findall(text))


def holds(rendering: str, text: str, *, times: int = 1) -> bool:
    """Return whether a rendering shows all words of a text; it may trim, escape or wrap the text.

    times: how often the text must occur at least. Occurrences are counted only if the rendering has
    the text unchanged or escaped; otherwise one occurrence is enough.
    """
    text = text.strip()
    if found := count_unchanged(rendering, text):
        return found >= times
    plain = _unescaped(rendering)
    return _in_order(plain, _units(text)) or _in_order(plain, _units(_unescaped(text)))


def count_unchanged(rendering: str, text: str) -> int:
    """Return how often a rendering shows a text as it is or escaped."""
    # One message may be shown unchanged and another, with the same text, escaped.
    as_json = {json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)}
    return sum(map(rendering.count, {text, html.escape(text), *as_json}))


def unshown(
    texts: Iterable[Said],
    *,
    text: str,
    marks: frozenset[str] | None,
    in_place: Callable[[Said], bool],
) -> Iterator[Said]:
    """Yield the texts of a chat that the chat's rendering does not show.

    A text counts as shown if `text` has its words and `marks` has its mark. The mark is a unique
    word that takes the text's place in a second rendering.

    Args:
        text: The rendering of the chat.
        marks: The marks that the second rendering shows (see `marked`). None if the template
            refuses the marks; then only the words are checked.
        in_place: Called if the mark of a message's content is missing. Returns whether the template
            shows the mark when the mark is appended to the content (`with_mark`).
    """
    times: Counter[tuple[str, ...]] = Counter()
    for each in texts:
        # A template may leave out a text that an earlier message has too.
        times[each.texts] += not each.is_call
        # Templates may remove the thought from a reply, whatever its form.
        is_reply = each.message.role is Role.ASSISTANT and not each.is_call
        is_shown = is_reply or all(
            holds(text, part, times=times[each.texts] or 1) for part in each.texts
        )
        if is_shown and marks is not None and each.mark not in marks:
            is_shown = not each.is_call and in_place(each)
        if not is_shown:
            yield each


def marked_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the chat with a unique mark in place of each system text."""
    return tuple(
        replace(each, content=_content_mark(number)) if each.role is Role.SYSTEM else each
        for number, each in enumerate(messages)
    )


def only_moves(
    text: str, tail: str, history: Sequence[Message], *, bare: str, with_marks: str
) -> bool:
    """Return whether a rendering would end with `tail` if no system text were moved.

    Some templates (Mistral Nemo) move the system text into the newest message of the user. Any
    other effect of a system text, such as a switch of the template's mode, gives False.

    Args:
        text: The rendering of the chat, which ends differently than `tail`.
        tail: The expected end: the text of the new messages.
        history: The chat's messages before the new ones.
        bare: The rendering of the chat without its system texts.
        with_marks: The rendering of the chat with marks in place of system texts
            (`marked_system`).
    """
    # A move is harmless: the tokens of `history` have the system text already, at its first place.
    text, tail, bare, with_marks = map(_dense, (text, tail, bare, with_marks))
    if text.endswith(tail) or not bare.endswith(tail):
        return False
    # The system texts may only insert one part into `bare`, and are shown as they are.
    num_before = _num_shared(bare, with_marks)
    num_after = _num_shared(bare[::-1], with_marks[::-1])
    for number, each in enumerate(history):
        if each.role is Role.SYSTEM:
            with_marks = with_marks.replace(_content_mark(number), _dense(each.content))
    return num_before + num_after >= len(bare) and with_marks == text


def _visible(message: Message) -> str:
    is_reply = message.role is Role.ASSISTANT
    return without_thought(message.content) if is_reply else message.content


def _content_mark(number: int) -> str:
    return f"qzm{number}mzq"


def _call_mark(number: int, index: int) -> str:
    return f"qzc{number}c{index}czq"


def _calls_of(message: Message) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(id=call_id, name=name, arguments=json.loads(arguments))
        for call_id, name, arguments in message.call_texts
    )


def _marked_calls(message: Message, number: int) -> tuple[ToolCall, ...]:
    calls = []
    for index, call in enumerate(_calls_of(message)):
        mark = _call_mark(number, index)
        arguments = {key: _marked_value(each, mark) for key, each in call.arguments.items()}
        if mark not in json.dumps(arguments):
            arguments = {**arguments, "argument": mark}
        calls.append(replace(call, arguments=arguments))
    return tuple(calls)


def _marked_value(value: Any, mark: str) -> Any:
    """Return a call's argument with a mark in place of each text."""
    if isinstance(value, str):
        return mark
    if isinstance(value, dict):
        return {key: _marked_value(each, mark) for key, each in value.items()}
    if isinstance(value, list):
        return [_marked_value(each, mark) for each in value]
    # Numbers stay, because a template may calculate with them.
    return value


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(value)


def _unescaped(text: str) -> str:
    """Undo the escapes of JSON and HTML, because the `quot` of `&quot;` would be read as a word."""
    if "\\" in text:
        text = _UNICODE_ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        text = _ESCAPE.sub(lambda found: " " if found[1] in _WHITE_ESCAPES else found[1], text)
    return html.unescape(text).casefold()


def _units(text: str) -> list[str]:
    """Return the words of a text; if it has none, its characters."""
    text = text.casefold()
    return _WORD.findall(text) or [each for each in text if not each.isspace()]


def _in_order(text: str, units: Sequence[str]) -> bool:
    position = 0
    for unit in units:
        position = text.find(unit, position)
        if position < 0:
            return False
        position += len(unit)
    return True


def _num_shared(one: str, other: str) -> int:
    """Return how many of their first characters two texts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _dense(text: str) -> str:
    return "".join(text.split())
