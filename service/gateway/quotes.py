"""Find a sampled reply, or parts of it, in the messages of a later prompt.

A client may continue an earlier conversation in a new one (a hand-off, a helper, a summary). Only
quoted text then shows that the two belong together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial

from actors.environment.protocol import Message, Role

# Characters of a prompt that are searched; a longer prompt is refused later.
MOST_CHARACTERS = 1 << 21
MOST_STRINGS, LONG = 16, 12  # strings of a reply's JSON; characters of one that is a single word


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

        They are the content, the calls' arguments as clients print them, the strings in these
        arguments, and long strings in the content's JSON.
        """
        found = [self.message.content, *_long_strings(self.message.content)]
        for arguments in (json.loads(text) for _, _, text in self.message.call_texts):
            found += [*_printed(arguments), *_strings(arguments)]
        return tuple(dict.fromkeys(t for each in found if (t := each.strip()) not in ("", "{}")))

    def was_given(self, text: str) -> bool:
        """Return whether a text was already in the reply's prompt.

        If it was, a later prompt that has the text may not quote the reply.
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
        """Return whether the messages have the reply, one of its calls, or a text it introduced."""
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


def strings_of(text: str) -> set[str]:
    """Return the strings in the JSON of a text, such as a fenced block; empty without JSON."""
    begin = min((at for at in (text.find("{"), text.find("[")) if at >= 0), default=0)
    with suppress(ValueError, RecursionError):
        tree = json.loads(text[begin : max(text.rfind("}"), text.rfind("]")) + 1])
        return {each.strip() for each in _strings(tree)}
    return set()


def _long_strings(text: str) -> list[str]:
    """Return the longest strings of a text's JSON; a later prompt may have short ones by chance."""
    long = {each for each in strings_of(text) if len(each) >= LONG or len(each.split()) > 1}
    return sorted(long, key=len, reverse=True)[:MOST_STRINGS]


def _printed(arguments: object) -> tuple[str, ...]:
    """Return a call's arguments as JSON of Python and JavaScript, and as repr (Google's ADK)."""
    dump = partial(json.dumps, arguments, ensure_ascii=False)
    return dump(), json.dumps(arguments), dump(separators=(",", ":")), repr(arguments)


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
    """Return whether `whole` has the text as whole words: "a0" is in "so: a0.", not in "a01"."""
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
