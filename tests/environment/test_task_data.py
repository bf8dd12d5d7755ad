"""Tests of checking task data: the quick check accepts nothing that jsonschema refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from annotated_types import Ge, MinLen
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from actors.environment.task_data import PROMPT_DATA, BadDataSchema, DataCheck, data_schema_of
from actors.limits import STRICT

CLOSED = {
    "type": "object",
    "properties": {"level": {"type": "string", "enum": ["easy", "hard"]}},
    "required": ["level"],
    "additionalProperties": False,
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a question, which may have parts too."""

    text: Annotated[str, MinLen(1)]
    weight: Annotated[int, Ge(0)] = 1
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Question:
    """Data of a task."""

    __pydantic_config__ = STRICT

    parts: tuple[Part, ...]
    """The parts of the question."""
    answer: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


class Plain:
    """A class whose fields are unknown."""


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.sampled_from(["", "x", "easy"]))
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "system", "nobody", 3]),
        "content": st.one_of(LEAVES, st.lists(st.fixed_dictionaries({"type": LEAVES}))),
        "tool_calls": st.one_of(
            LEAVES, st.lists(st.fixed_dictionaries({"function": st.dictionaries(LEAVES, LEAVES)}))
        ),
        "name": LEAVES,
    },
)
DATA = st.fixed_dictionaries(
    {}, optional={"prompt": st.one_of(LEAVES, st.lists(MESSAGES, max_size=3)), "level": LEAVES}
)


@given(DATA)
def test_the_check_accepts_the_data_that_the_schema_accepts(data: dict[str, Any]) -> None:
    for schema in (PROMPT_DATA, CLOSED):
        check = DataCheck(schema)
        is_valid = Draft202012Validator(dict(schema)).is_valid(data)
        assert (check.problem(data) == "") == is_valid
        assert check._accepts is not None and (not check._accepts(data) or is_valid)


def test_the_quick_check_accepts_a_valid_chat() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    accepts = DataCheck(PROMPT_DATA)._accepts
    assert accepts is not None and accepts({"prompt": chat, "answer": 3})
    assert not accepts({"prompt": [{"role": "user"}]}) and not accepts({"prompt": []})


def test_jsonschema_checks_keywords_that_the_quick_check_does_not_know() -> None:
    check = DataCheck({"type": "object", "properties": {"n": {"minimum": 3}}})
    assert check._accepts is None
    assert "minimum" in check.problem({"n": 2}) and not check.problem({"n": 3})


def schema_of(declared: object) -> dict[str, Any]:
    return data_schema_of(SimpleNamespace(data_schema=declared))


def test_the_schema_of_a_dataclass_checks_the_data() -> None:
    schema = schema_of(Question)
    assert schema["properties"]["parts"]["description"] == "The parts of the question."
    check = DataCheck(schema)
    assert check.names == {"parts", "answer", "more"}
    part = {"text": "3+4", "parts": [{"text": "3", "weight": 2}]}
    assert check.problem({"parts": [part], "answer": None, "more": {"a": 1}}) == ""
    assert check.problem({}) == "data: parts missing; give it"
    assert "unknown fields solution" in check.problem({"parts": [], "solution": "7"})
    assert check.problem({"parts": [], "answer": 7}).startswith("data.answer: got a number")
    assert check.problem({"parts": [{"text": ""}]}).startswith("data.parts[0].text: got a text")
    deep = {"text": "3", "parts": [{"text": "4", "weight": -1}]}
    assert check.problem({"parts": [deep]}).startswith(
        "data.parts[0].parts[0].weight: got a number"
    )


def test_the_schema_of_a_recursive_class_has_its_fields() -> None:
    check = DataCheck(schema_of(Part))
    assert check.problem({"text": "3", "parts": [{"text": "4"}], "other": 1}) == ""
    assert check.problem({}) == "data: text missing; give it"
    assert schema_of(Part)["properties"].keys() == {"text", "weight", "parts"}


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (Plain, r"data_schema: Plain: it has no JSON schema \(.*\), expected a dataclass"),
        (int, "data_schema: got the class int, whose values are not JSON objects"),
        (["text"], "data_schema: got a list, expected a dataclass of the task data, or their"),
    ],
)
def test_a_declaration_that_is_not_a_schema_is_refused(declared: object, words: str) -> None:
    with pytest.raises(BadDataSchema, match=words):
        schema_of(declared)


def test_a_message_with_other_keys_is_refused_with_those_of_a_chat() -> None:
    check = DataCheck(PROMPT_DATA)
    assert check.problem({"prompt": [{"from": "human", "value": "1 + 1"}]}) == (
        "data.prompt[0]: got an object with the keys from, value, expected role and content or "
        "tool_calls; rename from to role and value to content, and write the roles as user, "
        "assistant, system or tool"
    )
    assert check.problem({"prompt": [{"role": "user", "text": "1 + 1"}]}) == (
        "data.prompt[0]: got an object with the keys role, text, expected content or tool_calls; "
        "correct it"
    )


@pytest.mark.parametrize("depth", [100, 101, 500])
def test_data_nested_too_deeply_are_refused_with_the_entry(depth: int) -> None:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    problem = DataCheck(PROMPT_DATA).problem({"prompt": "a", "more": value})
    expected = "data.more: got a value of more than 100 nested lists and objects, expected fewer"
    assert problem.startswith(expected) if depth > 100 else problem == ""
