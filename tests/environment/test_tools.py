"""Tests of tools that are a user's functions and classes: their schemas, calls and rewards."""

from __future__ import annotations

import asyncio
import enum
import math
import sys
import time
from dataclasses import dataclass
from datetime import date
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pandas as pd
import pytest
from pydantic import BaseModel, Field

from actors.environment.builtin.tools import ToolsEnvironment, ToolsOptions
from actors.environment.function_tools import (
    BadArguments,
    BadTool,
    FunctionTool,
    as_text,
    load_tools,
    read_function,
)
from actors.environment.protocol import (
    Action,
    MalformedCall,
    RewardError,
    ToolCall,
)
from actors.environment.registry import BadEnvironmentOptions, resolve
from actors.environment.reward_functions import load_functions
from actors.options import read
from actors.types import Task


class Order(enum.Enum):
    NEWEST = "newest"
    OLDEST = "oldest"


@dataclass
class Place:
    city: str
    zip: int = 0


class Share(BaseModel):
    part: float


CYCLE: list[Any] = [1]
CYCLE.append(CYCLE)


def search(
    query: str, limit: int = 5, order: Order = Order.NEWEST, near: Place | None = None
) -> Any:
    """Search the archive.

    Looks at titles too.

    Args:
        query: Words to look for.
        limit: How many
            come back.
    """
    return {"query": query, "limit": limit, "order": order.value, "near": near and near.city}


async def slow(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


def blocking(seconds: float) -> str:
    """Wait in a thread."""
    time.sleep(seconds)
    return "done"


def failing(kind: Literal["plain", "exit", "quiet"]) -> str:
    """Fail."""
    raise {"plain": ValueError("no such row"), "exit": SystemExit(3), "quiet": KeyError()}[kind]


def long(count: int) -> str:
    """Say much."""
    return "x" * count


class Counter:
    """An environment in the form of TRL."""

    closed: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.total = 0

    def reset(self, **columns: Any) -> str:
        self.target = columns["target"]
        return " Start at 0."

    def add(self, amount: int) -> int:
        """Add to the total.

        Args:
            amount: How much.
        """
        if self.total + amount > 10:
            raise ValueError("Too much.")
        self.total += amount
        return self.total

    def close(self) -> None:
        self.closed.append(self.total)


class Vault:
    """An environment in the form of TRL that has its own reward."""

    def reset(self, secret: str, name: str, **columns: Any) -> None:
        self.secret, self.is_open = secret, False

    def try_digit(self, digit: int) -> str:
        """Try a digit."""
        self.is_open = str(digit) == self.secret
        return "open" if self.is_open else "closed"

    def get_reward(self) -> float:
        return float(self.is_open)


class Cards:
    """A class that changes a list of the data."""

    def reset(self, deck: list[int], **columns: Any) -> str:
        self.deck = deck
        return f" Your card: {deck.pop()}."

    def draw(self) -> int:
        """Draw a card."""
        return self.deck.pop()


def make_vault() -> Vault:
    return Vault()


def make_something():  # type: ignore[no-untyped-def]
    """Make something."""
    return Vault()


class Tree(BaseModel):
    children: list[Tree] = []


class Options(BaseModel):
    title: str = "x"


def draw(
    stars: Annotated[int, Field(description="From 1 to 5.")],
    tree: Tree,
    pens: Annotated[list[int], "Numbers of pens."],
    options: dict[str, Any] = {"title": "y", "default": 1},  # noqa: B006
) -> str:
    """Draw."""
    return str(stars)


class NeedsMore:
    def __init__(self, url: str) -> None:
        self.url = url


class Empty:
    def reset(self) -> None: ...


def refers(tree: Tree, options: dict[str, Any] = {"$ref": "z"}) -> str:  # noqa: B006
    """Draw."""
    return str(options)


def untyped(query) -> str:  # type: ignore[no-untyped-def]
    """Search."""
    return str(query)


def starred(*queries: str) -> str:
    """Search."""
    return ""


def undocumented(query: str) -> str:
    return query


def yielding(query: str) -> Any:
    """Search."""
    yield query


def own_names(copy: str, model_dump: int, _private: bool, self: str = "") -> str:
    """Take arguments with names that libraries reserve."""
    return f"{copy} {model_dump} {_private} {self}"


def odd_error() -> str:
    """Fail oddly."""

    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    raise Odd


class Static:
    @staticmethod
    def double(number: int) -> int:
        """Double it."""
        return 2 * number


def unknown_type(query: asyncio.Queue[int]) -> str:
    """Search."""
    return ""


NOT_CALLABLE = 3


def exact(completion: str, answer: str = "") -> float:
    return float(completion.strip() == answer)


def by_messages(messages: list[dict[str, Any]]) -> dict[str, float]:
    return {"calls": float(sum("tool_calls" in each for each in messages)), "all": len(messages)}


def by_environments(environments: list[Counter], **kwargs: Any) -> list[float]:
    return [float(each.total == each.target) for each in environments]


def by_environment(environment: Counter) -> float:
    return float(environment.total)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tools_of_test")
    vars(module).update({name: value for name, value in globals().items() if name[0] != "_"})
    monkeypatch.setitem(sys.modules, "tools_of_test", module)


def named(*names: str) -> list[str]:
    return [f"tools_of_test:{name}" for name in names]


def made(*tools: str, reward: str = "exact", **options: Any) -> ToolsEnvironment:
    given = {"reward": named(reward), "tools": named(*tools), **options}
    return ToolsEnvironment(read(ToolsOptions, given, where="options"))


def task(**data: Any) -> Task:
    return Task(task_id="t", environment="tools", seed=0, data={"prompt": "Go.", **data})


def call(name: str, **arguments: Any) -> Action:
    return Action(text="…", calls=(ToolCall(name=name, arguments=arguments, id="c1"),))


def test_the_schema_comes_from_the_signature_and_the_docstring() -> None:
    schema = read_function(search, where="tool search").schema
    assert schema.name == "search"
    assert schema.description == "Search the archive.\n\nLooks at titles too."
    properties = schema.parameters["properties"]
    assert properties["query"] == {"type": "string", "description": "Words to look for."}
    assert properties["limit"] == {
        "type": "integer", "default": 5, "description": "How many\ncome back.",
    }  # fmt: skip
    assert schema.parameters["required"] == ["query"]
    # vLLM's parsers for Qwen's models do not follow references.
    assert "$defs" not in schema.parameters and "$ref" not in str(schema.parameters)
    assert properties["order"]["enum"] == ["newest", "oldest"]
    assert "'title'" not in str(schema.for_template())
    # The order of transformers, so that the policy sees the same text as in TRL.
    assert list(properties["query"]) == ["type", "description"]


class City(BaseModel):
    name: str


def visit(city: City, days: int = 1) -> str:
    """Plan a visit."""
    return f"{city.name}, {days}"


@pytest.mark.parametrize(
    "docstring",
    [
        "Plan a visit.\n\nArgs:\n    days: How long.",
        "Plan a visit.\n\nParameters\n----------\ndays : int\n    How long.",
        "Plan a visit.\n\n:param days: How long.",
    ],
    ids=["Google", "NumPy", "Sphinx"],
)
async def test_docstrings_of_three_styles_are_read_and_models_are_passed_as_models(
    docstring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visit, "__doc__", docstring)
    tool = read_function(visit, where="tool visit")
    assert tool.schema.description == "Plan a visit."
    assert tool.schema.parameters["properties"]["days"]["description"] == "How long."
    assert await tool.call({"city": {"name": "Ur"}, "days": "2"}, limit_s=20) == "Ur, 2"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("untyped", "the argument query has no type"),
        ("starred", r"takes \*queries, expected arguments that can be passed by name"),
        ("undocumented", "has no docstring"),
        ("unknown_type", "no JSON schema can be made"),
        ("refers", "no JSON schema can be made"),
        ("NOT_CALLABLE", "is an int, expected a function, or a class"),
        ("yielding", "yields, expected a function that returns"),
        ("NeedsMore", "NeedsMore needs url to be made"),
        ("Empty", "has no public method besides reset, close and"),
        ("nowhere", "has no attribute 'nowhere'"),
    ],
)
def test_functions_and_classes_that_cannot_be_tools_are_refused_before_the_start(
    name: str, words: str
) -> None:
    with pytest.raises(BadEnvironmentOptions, match=words):
        resolve("tools", {"reward": named("exact"), "tools": named(name)})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": []}, "tools: got none"),
        ({"tools": "a.py"}, "expected FILE.py:NAME"),
        ({"mcp": [{"url": "http://x"}]}, "mcp: got .*, expected a map of names to values"),
        ({"tools": named("long"), "call_limit_s": 0}, "call_limit_s: got 0, expected more than 0"),
        (
            {"tools": named("long"), "max_answer_chars": 0},
            "max_answer_chars: got 0, expected 1 or more",
        ),
        ({}, "tools: got none"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadEnvironmentOptions, match=words):
        resolve("tools", {"reward": named("exact"), **options})


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(BadTool, match="search is the name of two tools"):
        load_tools(["tools_of_test:search", "tools_of_test.py:search"])


async def test_calls_are_converted_answered_in_order_and_the_answer_is_scored() -> None:
    environment = made("search", "slow")
    start = await environment.reset(task(answer="7"))
    assert [each.name for each in start.tools] == ["search", "slow"]
    two = Action(
        text="…",
        calls=(
            ToolCall(name="search", arguments={"query": "é", "order": "oldest"}, id="c1"),
            ToolCall(name="search", arguments={"query": "x", "near": {"city": "Rome"}}, id="c2"),
        ),
    )
    result = await environment.step(two)
    assert [(m.name, m.tool_call_id, m.content) for m in result.messages] == [
        ("search", "c1", '{"query": "é", "limit": 5, "order": "oldest", "near": null}'),
        ("search", "c2", '{"query": "x", "limit": 5, "order": "newest", "near": "Rome"}'),
    ]
    assert not result.is_malformed and not result.terminated and result.reward == 0
    last = await environment.step(Action(text="<think>so</think>7"))
    assert not last.is_malformed and last.terminated and last.answer == "7"


@pytest.mark.parametrize(
    ("action", "content", "is_malformed"),
    [
        (call("search", query="x", limit="many"), "error: Argument limit: Input should be", True),
        (call("search", query="x", order="best"), "error: Argument order: Input should be", True),
        (call("search"), "error: Argument query: Field required.", True),
        (call("failing", kind="plain"), "error: no such row", False),
        (call("failing", kind="exit"), "error: SystemExit: 3", False),
        (call("failing", kind="quiet"), "error: KeyError", False),
        (call("slow", seconds=5), "error: no answer within 0.2 s.", False),
        (call("blocking", seconds=1), "error: no answer within 0.2 s.", False),
        (call("long", count=50), "x" * 20, False),
        (
            Action(
                text="…",
                calls=(MalformedCall(reason="invalid_json", message="No JSON."),),
            ),
            "error: No JSON.",
            True,
        ),
    ],
)
async def test_the_policy_is_shown_errors_of_calls_and_the_episode_continues(
    action: Action, content: str, is_malformed: bool
) -> None:
    tools = ("search", "failing", "slow", "blocking", "long")
    environment = made(
        *tools, call_limit_s=0.2, max_answer_chars=20 if "long" in str(action) else 99
    )
    await environment.reset(task())
    result = await environment.step(action)
    [message] = result.messages
    assert message.content.startswith(content) and result.is_malformed is is_malformed
    assert not result.terminated and result.reward == 0


async def test_blocking_calls_run_concurrently_and_waiting_does_not_count_to_their_limit() -> None:
    environments = [made("blocking", call_limit_s=1.0) for _ in range(40)]
    for environment in environments:
        await environment.reset(task())
    begun = time.monotonic()
    found = await asyncio.gather(
        *(each.step(call("blocking", seconds=0.2)) for each in environments)
    )
    assert {each.messages[0].content for each in found} == {"done"}
    # In the few threads of Python's default executor the calls would take seconds.
    assert time.monotonic() - begun < 40 * 0.2 / 2


async def test_malformed_turns_in_a_row_end_the_episode_and_a_good_turn_resets_the_count() -> None:
    environment = made("search", max_malformed=1)
    await environment.reset(task())
    bad, good = call("search"), call("search", query="x")
    found = [await environment.step(each) for each in (bad, good, bad, bad)]
    assert [each.ended_by_malformed for each in found] == [False, False, False, True]
    assert found[-1].terminated and found[-1].messages == ()


async def test_a_turn_of_too_many_calls_is_malformed_and_the_first_are_answered() -> None:
    environment = made("long")
    await environment.reset(task())
    calls = tuple(ToolCall(name="long", arguments={"count": 1}) for _ in range(9))
    result = await environment.step(Action(text="…", calls=calls))
    assert result.is_malformed and len(result.messages) == 8


@pytest.mark.parametrize(
    ("reward", "expected"), [("by_environments", 1.0), ("by_environment", 7.0)]
)
async def test_each_episode_has_its_own_instance_of_a_class_as_in_trl(
    reward: str, expected: float
) -> None:
    Counter.closed.clear()
    environment = made("Counter", reward=reward)
    other = made("Counter", reward=reward)
    start = await environment.reset(task(target=7))
    await other.reset(task(target=1))
    assert start.messages[-1].content == "Go. Start at 0."
    assert [tool.name for tool in start.tools] == ["add"]
    for amount in (3, 4):
        result = await environment.step(call("add", amount=amount))
    assert result.messages[0].content == "7"
    refused = await environment.step(call("add", amount=9))
    assert refused.messages[0].content == "error: Too much."
    assert (await environment.step(Action(text="Done."))).reward == expected
    await environment.close()
    await environment.close()
    assert Counter.closed == [7]


async def test_each_instance_in_this_process_has_its_own_copy_of_the_data() -> None:
    played = task(deck=[1, 2, 3])
    for _ in range(2):
        environment = made("Cards")
        start = await environment.reset(played)
        assert start.messages[-1].content == "Go. Your card: 3."
        assert (await environment.step(call("draw"))).messages[0].content == "2"
    assert played.data["deck"] == [1, 2, 3]


async def test_arguments_of_any_name_and_errors_of_any_kind_work() -> None:
    environment = made("own_names", "odd_error", "Static")
    await environment.reset(task())
    names = {"copy": "a", "model_dump": 3, "_private": True, "self": "b"}
    for action, content in (
        (call("own_names", **names), "a 3 True b"),
        (call("odd_error"), "error: Odd"),
        (call("double", number=4), "8"),
    ):
        [message] = (await environment.step(action)).messages
        assert message.content == content


async def test_reward_functions_can_read_the_conversation() -> None:
    environment = made("long", reward="by_messages")
    await environment.reset(task())
    await environment.step(call("long", count=3))
    result = await environment.step(Action(text="Done."))
    assert result.reward_components == {"calls": 1.0, "all": 3.0}


async def test_a_failing_reward_function_is_a_reward_error() -> None:
    environment = made("long", reward="by_environments")
    await environment.reset(task())
    with pytest.raises(RewardError, match="by_environments raised AttributeError"):
        await environment.step(Action(text="Done."))


async def test_a_function_that_does_not_take_the_messages_costs_no_copy_of_them() -> None:
    messages: list[Any] = []
    messages.append(messages)  # a list that contains itself cannot be copied
    [reads], [ignores] = map(load_functions, named("by_messages", "by_environment"))
    extras = {"environment": Counter(), "messages": messages}
    assert (await ignores.score("Done.", {}, extras=extras)).value == 0.0
    with pytest.raises(RecursionError):
        await reads.score("Done.", {}, extras=extras)


@pytest.mark.parametrize("tools", ["Vault", "make_vault"])
async def test_get_reward_of_a_class_is_its_reward_and_not_a_tool(tools: str) -> None:
    environment = ToolsEnvironment(read(ToolsOptions, {"tools": named(tools)}, where="options"))
    start = await environment.reset(task(secret="3", name="the column of this name"))
    assert [tool.name for tool in start.tools] == ["try_digit"]
    await environment.step(call("try_digit", digit=3))
    assert (await environment.step(Action(text="Done."))).reward == 1.0
    await environment.close()
    both = made(tools)
    await both.reset(task(secret="3", name="", answer="Done."))
    found = await both.step(Action(text="Done."))
    assert found.reward == 1.0 and found.reward_components == {"exact": 1.0, "get_reward": 0.0}


def test_a_function_that_may_be_a_tool_or_a_factory_is_refused() -> None:
    with pytest.raises(BadTool, match="takes no argument and has no return annotation"):
        load_tools(named("make_something"))


def test_descriptions_defaults_and_recursive_types_are_in_the_schema() -> None:
    schema = read_function(draw, where="tool draw").schema.parameters
    assert schema["properties"]["stars"]["description"] == "From 1 to 5."
    assert schema["properties"]["pens"]["description"] == "Numbers of pens."
    assert schema["properties"]["options"]["default"] == {"title": "y", "default": 1}
    assert schema["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert schema["$defs"]["Tree"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}


async def test_an_object_given_as_json_text_is_parsed() -> None:
    [tool] = load_tools(named("visit"))
    assert isinstance(tool, FunctionTool)
    given = {"city": '{"name": "Bern"}', "days": 2}
    assert await tool.call(given, limit_s=5) == "Bern, 2"
    with pytest.raises(BadArguments, match="Argument city"):
        await tool.call({"city": "{Bern}"}, limit_s=5)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        ({"a": 1.5, "b": [True, None]}, '{"a": 1.5, "b": [true, null]}'),
        (Place("Köln"), '{"city": "Köln", "zip": 0}'),
        ([Place("Bonn"), Order.NEWEST], '[{"city": "Bonn", "zip": 0}, "newest"]'),
        (Order.NEWEST, "newest"),
        (np.arange(3), "[0, 1, 2]"),
        (np.zeros(2000), "[0. 0. 0. ... 0. 0. 0.]"),
        (pd.Series({"ash": 3, "bay": 2}), "ash    3\nbay    2\ndtype: int64"),
        (
            {"mean": np.float32(1.5), "day": date(2026, 11, 29)},
            '{"mean": 1.5, "day": "2026-11-29"}',
        ),
        ({"b", "a"}, '["a", "b"]'),
        (["a.txt", "\ud800.txt"], '["a.txt", "\ufffd.txt"]'),
        ([{"type": "text", "text": "4 results"}], "4 results"),
        ([{"type": "text", "text": "a", "page": 2}], '[{"type": "text", "text": "a", "page": 2}]'),
        # Values that JSON does not have.
        ({"a": math.nan, "b": -math.inf}, '{"a": NaN, "b": -Infinity}'),
        (Share(part=math.nan), '{"part":null}'),
        ({(1, 2): "<A at 0x7f>"}, "{(1, 2): '<A at 0x7f>'}"),
        (CYCLE, "[1, [...]]"),
        (b"text", "text"),
        (b"\xff <A at 0x7f>", "b'\\xff <A at 0x7f>'"),
        ([b"\xff"], "[b'\\xff']"),
    ],
)
def test_a_result_that_is_not_text_is_shown_as_json_if_possible(found: object, text: str) -> None:
    assert as_text(found) == text
