"""Tests of the table of a template's traits, which are found by rendering chats."""

from __future__ import annotations

import json

import pytest
from worlds.models.tool_families import FAMILIES
from worlds.models.trait_templates import renderer, tokenizer

from actors.environment.builtin.calculator import CALCULATOR
from actors.environment.rendering import ChatRenderer
from actors.environment.template_traits import (
    call_form,
    describe_traits,
    num_repeated,
    template_traits,
)

MIDDLE = "system message in mid-conversation"
TOOLS, CALLS, READ_BACK = "tools", "calls", "calls read back"
CONTENT, BESIDE = "content of a message that only calls", "text beside a call"
RESULTS, PARSER = "results of calls", "parser of calls"
NEWEST, EARLIER = "reasoning of the newest reply", "reasoning of earlier replies"
PLAIN = {
    "first system message": "shown",
    "second system message": "shown",
    MIDDLE: "shown",
    TOOLS: "shown",
    CALLS: "shown, with arguments as a mapping",
    CONTENT: "empty",
    BESIDE: "shown",
    RESULTS: "shown",
    READ_BACK: "yes",
    NEWEST: "not shown",
    EARLIER: "not shown",
    PARSER: "hermes",
    "parser of reasoning": "none: the template has no thoughts",
    "text at the end of a reply": r"'<|im_end|>\n'",
}


@pytest.mark.parametrize(
    ("trait", "differs"),
    [
        ("plain", {}),
        ("escapes and trims", {}),
        ("wants contents in parts", {}),
        ("numbers results", {}),
        ("hoists system texts", {MIDDLE: "moved to the front: a new sample begins"}),
        ("shows the first system text", {MIDDLE: "not shown; sessions merge it into the first"}),
        (
            "wants system first and once",
            {
                MIDDLE: "refused (chat template: a system message may only come first); "
                "sessions merge it into the first"
            },
        ),
        ("shows a call without content", {CONTENT: "none", BESIDE: "shown, as two messages"}),
        ("hides the text beside a call", {BESIDE: "shown, as two messages"}),
        (
            "knows no tools",
            {
                TOOLS: "not shown: sessions refuse them",
                CALLS: "not shown",
                CONTENT: "calls are not shown",
                BESIDE: "not shown",
                RESULTS: "not shown",
                READ_BACK: "no",
                PARSER: "none known: tools are refused until inference.tool_parser names one",
            },
        ),
        ("strips thoughts", {"parser of reasoning": "deepseek_r1"}),
    ],
)
def test_the_table_of_a_template_differs_by_its_trait(trait: str, differs: dict[str, str]) -> None:
    table = template_traits(renderer(trait))
    if MIDDLE in differs and "front" not in differs[MIDDLE]:
        differs = {**differs, "second system message": differs[MIDDLE]}
    assert table == {**PLAIN, **differs}


def test_the_tables_of_known_families_of_models() -> None:
    qwen = template_traits(FAMILIES["qwen3"].renderer)
    deepseek = template_traits(FAMILIES["deepseek"].renderer)
    assert (qwen[NEWEST], qwen[EARLIER]) == ("shown", "not shown")
    assert deepseek[CALLS] == "shown, with arguments as JSON text"
    assert deepseek[TOOLS] == ("not shown, although calls are; list the tools in the system text")
    lines = describe_traits(template_traits(FAMILIES["glm"].renderer)).splitlines()
    assert "calls read back                       not tried here; vLLM's glm47 reads" in lines[8]
    assert len({line.index(line.split("  ")[-1].strip()) for line in lines}) == 1


@pytest.mark.parametrize(
    ("call", "parser"),
    [
        ('<tool_call>{"name": "NAME", "arguments": ARGUMENTS}</tool_call>', "hermes"),
        ("<tool_call>NAME<sep>ARGUMENTS</tool_call>", None),
        ("<tool_call><function=NAME>ARGUMENTS</function></tool_call>", "qwen3_xml"),
        ("<minimax:tool_call><invoke name=NAME>ARGUMENTS", "minimax_m2"),
        ('{"name": "NAME", "parameters": ARGUMENTS}', "llama3_json"),
        ("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "mistral"),
        ("NAME(ARGUMENTS)", None),
    ],
)
def test_the_parser_of_calls_is_found_by_rendering_a_call(call: str, parser: str | None) -> None:
    made = call.replace("NAME", "{{ c.function.name }}").replace(
        "ARGUMENTS", "{{ c.function.arguments | tojson }}"
    )
    copied = tokenizer("plain").__class__(
        tokenizer_object=tokenizer("plain").backend_tokenizer,
        chat_template="{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        f"{made}{{% endfor %}}{{% endfor %}}",
    )
    chat = ChatRenderer(copied)
    form = call_form(chat)
    assert chat.template.shows_calls
    assert (form and form.parser) == parser


SHOWN_TOOLS = "{{ tools | tojson if tools else '' }}"


@pytest.mark.parametrize(
    ("front", "turn"),
    [
        (SHOWN_TOOLS, ""),
        ("", f"{{% if m.role == 'user' %}}{SHOWN_TOOLS}{{% endif %}}"),
        # As Mistral's templates.
        ("", f"{{% if m.role == 'user' and loop.last %}}{SHOWN_TOOLS}{{% endif %}}"),
    ],
)
def test_tools_that_each_message_of_a_user_shows_again_are_counted(front: str, turn: str) -> None:
    copied = tokenizer("plain").__class__(
        tokenizer_object=tokenizer("plain").backend_tokenizer,
        chat_template=f"{front}{{% for m in messages %}}{turn}<|im_start|>"
        "{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    chat = ChatRenderer(copied)
    shown = "shown again with each user's message" if turn else "shown"
    assert template_traits(chat)[TOOLS] == shown
    written = copied(json.dumps([CALCULATOR.for_template()]), add_special_tokens=False).input_ids
    assert num_repeated(chat, (CALCULATOR,)) == (len(written) if turn else 0)
    assert num_repeated(chat, ()) == 0
