"""Tests of signatures of a user's tools: defaults, nested types, decorators, kinds of methods."""

from __future__ import annotations

import enum
import functools
import sys
import typing
from dataclasses import dataclass, field
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from transformers.utils import get_json_schema
from typing_extensions import TypedDict

from actors.environment.function_tools import BadArguments, BadTool, load_tools, read_function


@dataclass
class Basket:
    items: list[str] = field(default_factory=list)


def fill(
    query: str,
    n: int = Field(5, description="How many.", ge=1),
    unit: str = Field(description="Of one."),
    tags: list[str] = Field(default_factory=list),  # noqa: B008
    more: list[str] = field(default_factory=list),  # noqa: B008
    most: int = field(default=9),
    basket: Basket = field(default_factory=Basket),  # noqa: B008
) -> Any:
    """Fill a basket.

    Args:
        unit: Of each.
    """
    tags.append(query)
    more.append(query)
    basket.items.append(query)
    return [n, unit, tags, more, most, basket.items]


class Jar(BaseModel):
    default: float = 1.0
    inner: list[Jar] = []


class LooseJar(Jar):
    model_config = ConfigDict(extra="allow", allow_inf_nan=True)


class Lid(TypedDict, total=False):
    size: float


@dataclass
class Shelf:
    jar: Jar = field(default_factory=Jar)
    size: float = 1.0


class Size(tuple[int, int], enum.Enum):
    SMALL = (1, 2)


class Box(BaseModel):
    size: Size = Size.SMALL


def pack(box: Box, size: Size = Size.SMALL) -> str:
    """Pack a box."""
    return f"{box.size} {size}"


def store(
    jar: Jar = Jar(),  # noqa: B008
    loose: LooseJar = LooseJar(),  # noqa: B008
    lid: Lid = {},  # noqa: B006
    shelf: Shelf = Shelf(),  # noqa: B008
    either: Jar | Basket | None = None,
    jars: dict[str, Jar] = {},  # noqa: B006
    size: float = 1.0,
    any_size: Annotated[float, Field(allow_inf_nan=True)] = 1.0,
) -> str:
    """Store jars."""
    return "stored"


def counted(function: Any) -> Any:
    """Decorate without functools.wraps."""

    def wrapper(self: Any, query: str) -> str:
        """Search, and count."""
        return f"counted {function(self, query)}"

    return wrapper


def undescribed(function: Any) -> Any:
    def wrapper(self: Any, query: str) -> Any:
        return function(self, query)

    return wrapper


def hidden(function: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        """Search."""
        return function(*args, **kwargs)

    return wrapper


def searcher_of(place: str) -> Any:
    def inner(query: str) -> str:
        """Search."""
        return f"{query} in {place}"

    return inner


search_attic = searcher_of("the attic")
search_cellar = searcher_of("the cellar")


class Archive(dict[str, str]):
    """A class with each kind of method; methods of its built-in base class are not tools."""

    def __init__(self) -> None:
        super().__init__()

    @counted
    def find(self, query: str) -> str:
        return query

    seek = find

    @classmethod
    def about(cls, query: str) -> str:
        """Tell about the archive."""
        return f"about {query}"

    @staticmethod
    def double(query: str) -> str:
        """Double the query."""
        return query * 2

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def cached(self, query: str) -> str:
        """Search once."""
        return f"cached {query}"

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class Undescribed:
    @undescribed
    def find(self, query: str) -> str:
        """Search."""
        return query


class Hidden:
    @hidden
    def find(self, query: str) -> str:
        """Search."""
        return query


def half_typed(query: str, limit=5, near=None) -> str:  # type: ignore[no-untyped-def]
    """Search."""
    return query * limit


class Partial:
    def find(self, place: str, query: str) -> str:
        """Search."""
        return f"{query} in {place}"

    find_here = functools.partialmethod(find, "here")


Bounded = Field(ge=1, description="How big.")


def optional(
    count: int = None,  # type: ignore[assignment]  # noqa: RUF013
    size: Annotated[int, Bounded] = None,  # type: ignore[assignment]  # noqa: RUF013
    width: int = Field(None, ge=1),
    height: Annotated[int, Field(ge=1)] = 0,
    order: Literal["up", "down"] = "up",
    ratio: float = 1,
) -> Any:
    """Count."""
    return [count, size, width, height, order, ratio]


def wrong_default(name: str = 5) -> str:  # type: ignore[assignment]
    """Say it."""
    return name


def no_number(ratio: float = float("nan")) -> str:
    """Say it."""
    return str(ratio)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("signatures_of_test")
    vars(module).update({name: value for name, value in globals().items() if name[0] != "_"})
    monkeypatch.setitem(sys.modules, "signatures_of_test", module)


def loaded(name: str) -> Any:
    return load_tools([f"signatures_of_test:{name}"])[0]


async def test_a_default_may_be_a_field_of_pydantic_or_of_a_dataclass() -> None:
    tool = loaded("fill")
    shown = tool.schema.parameters
    assert shown["required"] == ["query", "unit"]
    assert shown["properties"]["n"] == {
        "type": "integer", "default": 5, "description": "How many.", "minimum": 1,
    }  # fmt: skip
    assert shown["properties"]["unit"]["description"] == "Of each."
    for _ in range(2):
        answer = await tool.call({"query": "fig", "unit": "kg"}, limit_s=5)
        assert answer == '[5, "kg", ["fig"], ["fig"], 9, ["fig"]]'
    with pytest.raises(BadArguments, match="Argument n: Input should be greater than or equal"):
        await tool.call({"query": "fig", "unit": "kg", "n": 0}, limit_s=5)


async def test_none_as_default_makes_an_argument_optional() -> None:
    tool = loaded("optional")
    shown = tool.schema.parameters["properties"]
    assert "required" not in tool.schema.parameters
    null, bounded = {"type": "null"}, {"type": "integer", "minimum": 1}
    assert shown["count"] == {"anyOf": [{"type": "integer"}, null], "default": None}
    optional_size = {"anyOf": [bounded, null], "default": None}
    assert shown["size"] == {**optional_size, "description": "How big."}
    assert shown["width"] == optional_size and shown["height"] == {**bounded, "default": 0}
    assert await tool.call({}, limit_s=5) == '[null, null, null, 0, "up", 1]'
    assert await tool.call({"count": None, "size": 2}, limit_s=5) == '[null, 2, null, 0, "up", 1]'
    with pytest.raises(BadArguments, match="Argument size"):
        await tool.call({"size": 0}, limit_s=5)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"jar": {"aa": 2}}, "jar.aa"),
        ({"jar": {"inner": [{"inner": [{"aa": 2}]}]}}, "jar.inner.0.inner.0.aa"),
        ({"loose": {"inner": [{"aa": 2}]}}, "loose.inner.0.aa"),
        ({"lid": {"aa": 2}}, "lid.aa"),
        ({"shelf": {"aa": 2}}, "shelf.aa"),
        ({"shelf": {"jar": {"aa": 2}}}, "shelf.jar.aa"),
        ({"either": {"aa": 2}}, "either.Jar.aa"),
        ({"jars": {"a": {"aa": 2}}}, "jars.a.aa"),
        ({"jar": '{"aa": 2}'}, "jar.aa"),
    ],
)
async def test_a_field_that_a_nested_type_does_not_have_is_refused(
    arguments: dict[str, Any], where: str
) -> None:
    with pytest.raises(BadArguments) as refused:
        await loaded("store").call(arguments, limit_s=5)
    said = str(refused.value)
    assert said.removeprefix(f"Argument {where}: ") in (
        "Extra inputs are not permitted.",
        "Unexpected keyword argument.",
    )


@pytest.mark.parametrize(
    "arguments", [{}, {"loose": {"aa": 2}}, {"jar": {"inner": [{"default": 2}]}, "lid": {}}]
)
async def test_a_nested_type_accepts_its_fields_and_the_extra_ones_that_it_allows(
    arguments: dict[str, Any],
) -> None:
    assert await loaded("store").call(arguments, limit_s=5) == "stored"


async def test_the_members_of_an_enum_may_be_tuples() -> None:
    assert await loaded("pack").call({"box": {}}, limit_s=5) == "Size.SMALL Size.SMALL"


@pytest.mark.parametrize("number", ["nan", "Infinity", "1e999", float("nan"), float("-inf")])
async def test_a_number_that_is_not_finite_is_refused_unless_the_type_allows_it(
    number: str | float,
) -> None:
    for arguments in (
        {"size": number},
        {"lid": {"size": number}},
        {"jar": {"default": number}},
        {"shelf": {"jar": {"inner": [{"default": number}]}}},
        {"loose": {"inner": [{"default": number}]}},
    ):
        with pytest.raises(BadArguments, match=r"Input should be a finite number\.$"):
            await loaded("store").call(arguments, limit_s=5)
    for arguments in ({"any_size": number}, {"loose": {"default": number}}):
        assert await loaded("store").call(arguments, limit_s=5) == "stored"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong_default", "name has the default 5, which is not of its type, expected str"),
        ("no_number", "argument ratio has the default nan, which JSON does not have"),
        ("half_typed", "argument limit has no type, expected one such as limit: int, because"),
    ],
)
def test_a_default_that_cannot_be_shown_is_refused(name: str, words: str) -> None:
    with pytest.raises(BadTool, match=words):
        loaded(name)


class OfTyping(typing.TypedDict):
    size: float


def test_the_refusal_of_a_typed_dict_names_one_that_pydantic_accepts() -> None:
    def cover(lid: OfTyping) -> str:
        """Cover the jar."""
        return ""

    with pytest.raises(BadTool, match=r"expected .* or typing_extensions\.TypedDict$"):
        read_function(cover, where="tool cover")


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


GOOGLE = """Add.

Only whole numbers.

Example:
    add(a=1, b=2)

    gives 3

Args:
    a: One.
    b: Two.

Returns:
    The sum.
"""
AFTER_ARGS = """Add.

Args:
    a, b: The two numbers.

Raises:
    ValueError: If there is none.

Note:
    Only whole numbers.

Be brief.
"""
MANY_SECTIONS = """Add.

Args:
    a: One that
spans two lines.
    b: Two.
Example:
    add(a=1, b=2)
Warning: Slow.
Returns: The sum.

Todo:
    * Subtract.

See Also:
    subtract

Output:
    A number.

These are refused:

    nothing
"""
NUMPY = """Add.

Parameters
----------
a, b : int
    The two numbers.

Returns
-------
int
    The sum.

Notes
-----
Only whole numbers.

See Also
--------
subtract

Examples
--------
>>> add(1, 2)
"""


@pytest.mark.parametrize(
    ("docstring", "description"),
    [
        (GOOGLE, GOOGLE.partition("\n\nArgs:")[0]),
        (AFTER_ARGS, "Add.\n\nNote:\n    Only whole numbers.\n\nBe brief."),
        (
            MANY_SECTIONS,
            "Add.\n\nExample:\n    add(a=1, b=2)\n\nWarning: Slow.\n\n"
            "These are refused:\n\n    nothing",
        ),
        (
            NUMPY,
            "Add.\n\nNotes\n-----\nOnly whole numbers.\n\nExamples\n--------\n>>> add(1, 2)",
        ),
    ],
    ids=[
        "example_before_the_arguments",
        "note_after_the_arguments",
        "sections_without_text_for_the_policy",
        "sections_of_numpy",
    ],
)
def test_the_policy_reads_the_examples_and_notes_of_a_docstring(
    docstring: str, description: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(add, "__doc__", docstring)
    schema = read_function(add, where="tool add").schema
    assert schema.description == description
    shown = schema.parameters["properties"]
    if docstring is MANY_SECTIONS:
        # The line that is not indented ends the section.
        assert shown["a"]["description"] == "One that"
        return
    assert all(shown[name]["description"] for name in ("a", "b"))
    if docstring is GOOGLE:
        assert get_json_schema(add)["function"]["description"] == description
    else:
        assert shown["a"] == shown["b"] == {"type": "integer", "description": "The two numbers."}


async def test_each_kind_of_public_method_is_a_tool_by_its_name_in_the_class() -> None:
    archive = loaded("Archive")
    tools = {tool.schema.name: tool for tool in archive.bound(archive.make())}
    answers = {name: await tool.call({"query": "x"}, limit_s=5) for name, tool in tools.items()}
    assert answers == {
        "about": "about x",
        "cached": "cached x",
        "double": "xx",
        "find": "counted x",
        "seek": "counted x",
    }


async def test_a_function_made_by_another_has_the_name_given_in_the_options() -> None:
    tools = [loaded("search_attic"), loaded("search_cellar")]
    assert [tool.schema.name for tool in tools] == ["search_attic", "search_cellar"]
    assert await tools[1].call({"query": "x"}, limit_s=5) == "x in the cellar"


WITHOUT_COLONS = """Add.

Args:
    a: One, for example:

        add(1, 2)

    The first is shown
    first.
    b (int, optional)
        Two.

Raises:
    ValueError if there is none
"""


def test_a_line_without_a_colon_does_not_hide_the_descriptions_of_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(add, "__doc__", WITHOUT_COLONS)
    schema = read_function(add, where="tool add").schema
    assert schema.description == "Add."
    shown = {name: each["description"] for name, each in schema.parameters["properties"].items()}
    assert shown == {"a": "One, for example:\nadd(1, 2)\n\nThe first is shown\nfirst.", "b": "Two."}
    # The colon may be in the description below the argument's name.
    below = "Add.\n\nArgs:\n    a: One\n    of two.\n    b (int)\n        Two: not one."
    monkeypatch.setattr(add, "__doc__", below)
    shown = read_function(add, where="tool add").schema.parameters["properties"]
    assert (shown["a"]["description"], shown["b"]["description"]) == (
        "One\nof two.",
        "Two: not one.",
    )


@pytest.mark.parametrize(
    "entries",
    [
        ("a {int} -- One.", "b {int} -- Two."),
        ("a: The first. Terms are", "added.", 'Write it like this: "1".', "b: Two."),
        ("a: One.", "b - the other"),
        ("a: One.", "b, the other"),
        ("a (int): One.", "b (int) the other"),
        ("a: One.", "- b the other"),
    ],
    ids=["no_colon", "colon_in_a_text", "dash", "comma", "type", "list"],
)
def test_nothing_is_left_out_of_a_section_that_cannot_be_read(
    entries: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    docstring = "\n    ".join(("Add.\n\nArgs:", *entries))
    monkeypatch.setattr(add, "__doc__", docstring)
    schema = read_function(add, where="tool add").schema
    assert schema.description == docstring
    assert not any("description" in each for each in schema.parameters["properties"].values())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Undescribed", r"Undescribed\.find has no docstring, .*; if a decorator made it, use"),
        ("Hidden", r"Hidden\.find takes \*\*kwargs, .* hides its arguments: if a"),
        (
            "Partial",
            r"Partial\.find_here has no docstring, expected one: the .*description; if find_here "
            "is not a tool, begin its name with _$",
        ),
    ],
)
def test_a_method_that_cannot_be_described_is_refused_by_its_own_name(
    name: str, words: str
) -> None:
    with pytest.raises(BadTool, match=words):
        loaded(name)
