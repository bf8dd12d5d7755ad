"""The quick check of task data accepts nothing that jsonschema refuses."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from actors.environment.task_data import PROMPT_DATA, DataCheck

CLOSED = {
    "type": "object",
    "properties": {"level": {"type": "string", "enum": ["easy", "hard"]}},
    "required": ["level"],
    "additionalProperties": False,
}
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
def test_what_is_accepted_is_what_the_schema_accepts(data: dict[str, Any]) -> None:
    for schema in (PROMPT_DATA, CLOSED):
        check = DataCheck(schema)
        is_valid = Draft202012Validator(dict(schema)).is_valid(data)
        assert (check.problem(data) == "") == is_valid
        assert check._accepts is not None and (not check._accepts(data) or is_valid)


def test_a_chat_needs_no_second_look() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    accepts = DataCheck(PROMPT_DATA)._accepts
    assert accepts is not None and accepts({"prompt": chat, "answer": 3})
    assert not accepts({"prompt": [{"role": "user"}]}) and not accepts({"prompt": []})


def test_a_keyword_that_it_does_not_know_is_left_to_jsonschema() -> None:
    check = DataCheck({"type": "object", "properties": {"n": {"minimum": 3}}})
    assert check._accepts is None
    assert "minimum" in check.problem({"n": 2}) and not check.problem({"n": 3})
