"""Chats that are played over a published template, and the results of playing them.

A chat is what a client sends and what the policy replies. It is played over the real routes,
sessions and tree; only the engine is a script. The script writes each reply as the template renders
it after the generation prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look {name} up.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "population")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply of the policy in a turn."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    is_cut: bool = False
    """Whether the reply was cut at its largest length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A turn: the messages that the client adds to the conversation, and the reply to them."""

    new: tuple[dict[str, Any], ...]
    """A tool's result has `answers`, the number of its call in the newest reply."""
    reply: Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One conversation of a client."""

    name: str
    steps: tuple[Step, ...]
    has_tools: bool = False
    content_of_calls: str | None = None
    """The content that the client sends back for a reply that has only calls."""
    thoughts: str = "kept"
    """kept: the client sends them back unchanged; dropped: it drops them; inlined: it puts them
    into the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSeen:
    """The observed result of a turn."""

    status: int
    error: str = ""
    lost: tuple[str, ...] = ()
    """Texts of the conversation that the prompt lacks, with the message that had each."""
    prompt: str = ""
    appended: str | None = None
    """The text appended to the previous prompt and reply; None: the chat was rendered from its
    beginning."""
    rendered: str = ""
    """The whole chat as the template renders it; empty: the template refuses it."""

    @property
    def is_as_rendered(self) -> bool:
        """Whether the appended text is the one that the template writes there."""
        if self.appended is None or not self.rendered:
            return True
        return without_spaces(self.rendered).endswith(without_spaces(self.appended))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The observed result of a chat."""

    turns: tuple[TurnSeen, ...]
    num_samples: int
    breaks: Mapping[str, int] = field(default_factory=dict)
    """How often the chat was rendered from its beginning, by reason."""
    branches: tuple[str, ...] = ()
    """Why each sample except the first begins."""

    @property
    def is_refused(self) -> bool:
        return self.turns[-1].status != 200

    @property
    def summary(self) -> str:
        """Return "lost", "refused" with the number of turns so far, or the number of samples."""
        if self.lost:
            return "lost"
        return f"refused {len(self.turns)}" if self.is_refused else str(self.num_samples)

    @property
    def lost(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for turn in self.turns for text in turn.lost))


@lru_cache(4096)
def without_spaces(text: str) -> str:
    return re.sub(r"\s|▁|\\n", "", text)


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def result(content: str, *, answers: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": content, "answers": answers}


class Words:
    """A source of texts none of which contains another."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._number = 0

    def __call__(self, kind: str) -> str:
        self._number += 1
        word = "".join(
            self._random.choice("bcdfghklmnprtvz") + self._random.choice("aeiou") for _ in range(3)
        )
        return f"{kind} {word} number {self._number}, so much."


def fixed_chats() -> tuple[Chat, ...]:
    """Return chats of every form in which a text may get lost."""
    w = Words(0)

    def plain(*roles: str) -> Step:
        return Step(
            new=tuple(said(role, w(role)) for role in roles), reply=Reply(content=w("reply"))
        )

    def call(*cities: str, content: str = "", reasoning: str = "") -> Reply:
        calls = tuple(
            (("weather", "population")[n % 2], {"city": city}) for n, city in enumerate(cities)
        )
        return Reply(calls=calls, content=content, reasoning=reasoning)

    def answer(num: int = 1) -> Step:
        return Step(
            new=tuple(result(w("result"), answers=n) for n in range(num)),
            reply=Reply(content=w("reply")),
        )

    def ask(reply: Reply, *roles: str) -> Step:
        return Step(new=tuple(said(role, w(role)) for role in roles or ("user",)), reply=reply)

    def think() -> Reply:
        return Reply(content=w("reply"), reasoning=w("thought"))

    same = w("rule")
    old_call = {
        "id": "oldcall01",
        "type": "function",
        "function": {"name": "weather", "arguments": json.dumps({"city": "Oslo"})},
    }
    return (
        Chat(name="plain", steps=(plain("user"), plain("user"), plain("user"))),
        Chat(
            name="system_later",
            steps=(plain("system", "user"), plain("system", "user"), plain("user")),
        ),
        Chat(name="system_last", steps=(plain("user"), plain("user", "system"), plain("user"))),
        Chat(name="developer", steps=(plain("developer", "user"), plain("developer", "user"))),
        Chat(name="two_systems", steps=(plain("system", "system", "user"), plain("user"))),
        Chat(
            name="system_repeated",
            steps=(
                Step(
                    new=(said("system", same), said("user", w("user"))),
                    reply=Reply(content=w("reply")),
                ),
                Step(
                    new=(said("system", same), said("user", w("user"))),
                    reply=Reply(content=w("reply")),
                ),
            ),
        ),
        Chat(
            name="tools",
            has_tools=True,
            steps=(ask(call("Paris"), "system", "user"), answer(), ask(call("Lima")), answer()),
        ),
        Chat(
            name="tools_two",
            has_tools=True,
            steps=(ask(call("Paris", "Quito")), answer(2), plain("user")),
        ),
        Chat(
            name="tools_and_text",
            has_tools=True,
            steps=(ask(call("Paris", content=w("reply"))), answer(), plain("user")),
        ),
        Chat(
            name="tools_then_system",
            has_tools=True,
            steps=(
                ask(call("Paris"), "system", "user"),
                Step(
                    new=(result(w("result")), said("system", w("system"))),
                    reply=Reply(content=w("reply")),
                ),
                plain("user"),
            ),
        ),
        Chat(
            name="tools_before",
            has_tools=True,
            steps=(
                Step(
                    new=(
                        said("user", w("user")),
                        {"role": "assistant", "content": None, "tool_calls": [old_call]},
                        {"role": "tool", "content": w("result"), "tool_call_id": "oldcall01"},
                        said("assistant", w("old")),
                        said("user", w("user")),
                    ),
                    reply=Reply(content=w("reply")),
                ),
                plain("user"),
            ),
        ),
        Chat(
            name="tools_repeated",
            has_tools=True,
            steps=tuple(
                Step(new=(message,), reply=reply)
                for _ in range(2)
                for message, reply in (
                    (said("user", same), call("Paris")),
                    (result("21 degrees"), Reply(content="It is warm.")),
                )
            ),
        ),
        Chat(
            name="empty_results",
            has_tools=True,
            steps=(
                ask(call("Paris")),
                Step(new=(result(""),), reply=call("Rome")),
                Step(new=(result(" "),), reply=Reply(content=w("reply"))),
            ),
        ),
        Chat(name="thoughts", steps=(ask(think()), ask(think()), ask(think()))),
        Chat(
            name="thoughts_inlined",
            thoughts="inlined",
            steps=(ask(think()), ask(think()), ask(think())),
        ),
        Chat(
            name="thoughts_and_tools",
            has_tools=True,
            steps=(
                ask(call("Paris", reasoning=w("thought"))),
                Step(new=(result(w("result")),), reply=think()),
                ask(call("Rome", reasoning=w("thought"))),
                Step(new=(result(w("result")),), reply=think()),
            ),
        ),
        Chat(
            name="odd_texts",
            steps=tuple(
                Step(new=(said("user", text),), reply=Reply(content=w("reply")))
                for text in (
                    '  {"a": "b\\n", "c": [1, 2]} & <b>bold</b> "quoted" \'single\'\n\n',
                    "naïve 你好 🙂 {{ not jinja }} {% neither %}",
                    "line\n\n  indented\n```py\nx = '</b>'\n```",
                )
            ),
        ),
        Chat(
            name="odd_results",
            has_tools=True,
            steps=(
                ask(call('Pa"ris\n')),
                Step(
                    new=(result('{"t": 21.50, "u": "°C", "l": [true, null]}'),),
                    reply=Reply(content=w("reply")),
                ),
                ask(call("Lima")),
                Step(new=(result('<b>21</b> & "more"\n'),), reply=Reply(content=w("reply"))),
            ),
        ),
    )


def random_chat(seed: int) -> Chat:
    """Make a chat of up to five turns with all kinds of messages that clients send."""
    rng, w = Random(seed), Words(seed)
    has_tools, thinks = rng.random() < 0.5, rng.random() < 0.3
    steps: list[Step] = []
    num_open = 0
    for number in range(rng.randint(2, 5)):
        new = [result(w("result"), answers=each) for each in range(num_open)]
        if number == 0 and rng.random() < 0.5:
            new.append(said(rng.choice(("system", "developer")), w("system")))
        elif number and rng.random() < 0.15:
            new.append(said("system", w("system")))
        if not num_open or rng.random() < 0.1:
            new.append(said("user", w("user")))
        num_open = rng.choice((0, 1, 1, 2)) if has_tools else 0
        calls = tuple(
            (rng.choice(("weather", "population")), {"city": w("city"), "days": rng.randint(1, 9)})
            for _ in range(num_open)
        )
        content = w("reply") if not calls or rng.random() < 0.3 else ""
        reasoning = w("thought") if thinks else ""
        steps.append(
            Step(new=tuple(new), reply=Reply(content=content, reasoning=reasoning, calls=calls))
        )
    return Chat(
        name=f"random_{seed}",
        steps=tuple(steps),
        has_tools=has_tools,
        content_of_calls=rng.choice((None, "")),
        thoughts=rng.choice(("kept", "dropped", "inlined")) if thinks else "kept",
    )


CHATS = (*fixed_chats(), *(random_chat(seed) for seed in range(3)))
