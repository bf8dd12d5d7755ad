"""Find a sampled reply, or parts of it, in the messages of a later prompt.

A client may continue an earlier conversation in a new one (a hand-off, a helper, a summary). Only
quoted text then shows that the two belong together. Pure; used by `ends`, which decides which turns
are trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property

from actors.environment.protocol import Message, Role

# Characters of a prompt that are searched; a longer prompt is refused later.
MOST_CHARACTERS = 1 << 21
# Strings of a reply's JSON that are searched, and the characters that make a single word one.
MOST_STRINGS, LONG = 16, 12


class ReplyText:
    """A sampled reply, and the parts of it that are searched for in later prompts."""

    def __init__(self, message: Message, history: Callable[[], Sequence[Message]]) -> None:
        """Store a reply. `history` returns the messages of the prompt from which it was sampled."""
        self.message, self._history = message, history

    @cached_property
    def calls(self) -> frozenset[tuple[str, str]]:
        """The name and the arguments (JSON with sorted keys) of each tool call in the reply."""
        return frozenset((name, _ordered(text)) for _, name, text in self.message.call_texts)

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The texts of the reply that a later prompt may quote; empty ones are left out.

        They are the reply's content, the arguments of each call as clients print them, the strings
        in these arguments, and long strings in the content's JSON.
        """
        given = [json.loads(text) for _, _, text in self.message.call_texts]
        printed = (each for arguments in given for each in _printed(arguments))
        inner = (each for arguments in given for each in _strings(arguments))
        said = _long_strings(self.message.content)
        found = (each.strip() for each in (self.message.content, *printed, *inner, *said))
        return tuple(dict.fromkeys(each for each in found if each and each != "{}"))

    def was_given(self, text: str) -> bool:
        """Return whether a text was already in the reply's prompt.

        If it was, finding it in a later prompt does not prove that this prompt quotes the reply.
        """
        return any(_has_words(each, text) for each in _texts(self._history()))


class PromptText:
    """The messages of a later prompt, in which earlier replies are searched for."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._texts, room = [], MOST_CHARACTERS
        for text in _texts(messages):
            self._texts.append(text[:room])
            room -= len(text)
            if room <= 0:
                break
        said = [each for each in messages if each.role is Role.ASSISTANT]
        self._contents = {each.content.strip() for each in said}
        self._calls = {(name, _ordered(text)) for m in said for _, name, text in m.call_texts}

    def quotes(self, reply: ReplyText) -> bool:
        """Return whether the messages contain the reply, one of its calls, or one of its new texts.

        A text is new if the prompt from which the reply was sampled did not have it.
        """
        content = reply.message.content.strip()
        if (content and content in self._contents) or self._calls & reply.calls:
            return True
        return any(
            any(_has_words(each, text) for each in self._texts) and not reply.was_given(text)
            for text in reply.texts
        )


def values_of(messages: Iterable[Message]) -> Iterator[str]:
    """Yield the content of each message and each value in its calls' arguments, as text."""
    for message in messages:
        yield message.content.strip()
        for _, _, arguments in message.call_texts:
            yield from (each.strip() for each in _strings(json.loads(arguments), all_values=True))


def user_texts(messages: Iterable[Message]) -> list[str]:
    """Return the texts of the user's messages, without empty ones."""
    found = (each.content.strip() for each in messages if each.role is Role.USER)
    return [text for text in found if text]


def _texts(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        yield message.content
        yield from (arguments for _, _, arguments in message.call_texts)


def _long_strings(text: str) -> list[str]:
    """Return the longest strings of the JSON in a text; the JSON may be in a fenced block.

    A string has several words or at least LONG characters: another prompt may have a shorter one
    by chance.
    """
    starts = [at for at in (text.find("{"), text.find("[")) if at >= 0]
    with suppress(ValueError, RecursionError):
        tree = json.loads(text[min(starts) : max(text.rfind("}"), text.rfind("]")) + 1])
        long = {each for each in _strings(tree) if len(each) >= LONG or len(each.split()) > 1}
        return sorted(long, key=len, reverse=True)[:MOST_STRINGS]
    return []


def _printed(arguments: object) -> tuple[str, ...]:
    """Return a call's arguments in Python's and JavaScript's form of JSON, and as Python's repr."""
    compact = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return (
        json.dumps(arguments, ensure_ascii=False),
        json.dumps(arguments),
        compact,
        # Google's ADK shows a call of another agent with repr.
        repr(arguments),
    )


def _strings(value: object, *, all_values: bool = False) -> Iterator[str]:
    """Yield the strings in a JSON value. all_values: also yield other values, as JSON text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings(each, all_values=all_values)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each, all_values=all_values)
    elif all_values:
        yield json.dumps(value)


def _ordered(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True)


def _has_words(whole: str, text: str) -> bool:
    """Return whether `whole` contains the text, and not only as a part of a longer word.

    Example: "a0" is in "so: a0.", but not in "a01".
    """
    at = whole.find(text)
    while at >= 0:
        end = at + len(text)
        is_begun = at > 0 and _joins(whole[at - 1], text[0])
        if not is_begun and not (end < len(whole) and _joins(text[-1], whole[end])):
            return True
        at = whole.find(text, at + 1)
    return False


def _joins(left: str, right: str) -> bool:
    return all(each.isascii() and each.isalnum() for each in (left, right))
