"""Find in a model's chat template how the model writes its calls and its thoughts, without vLLM.

A form is recognised by its signs, in the template's text or in its rendering of a call. The
engine's replica uses this module and reads replies with vLLM's parser of the form; the gateway and
the checks before a start use it too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from actors.environment.rendering import ChatRenderer
from actors.environment.tool_calls import OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The form in which a family of models writes its calls."""

    parser: str
    """Name of the parser in vLLM."""
    start: str | None
    """The text that begins a call; None if nothing distinguishes a call from text."""
    signs: tuple[str, ...]
    """Texts that identify the form: all of them occur in the chat template or its rendered call."""


USUAL = CallForm(parser="hermes", start=OPEN, signs=(OPEN,))
# The first form whose signs are all present is taken, so a special case precedes its general form.
CALL_FORMS = (
    CallForm(parser="minimax_m2", start="<minimax:tool_call>", signs=("<minimax:tool_call>",)),
    CallForm(parser="seed_oss", start="<seed:tool_call>", signs=("<seed:tool_call>",)),
    CallForm(parser="qwen3_xml", start=OPEN, signs=(OPEN, "<function=")),
    CallForm(parser="glm47", start=OPEN, signs=(OPEN, "<arg_key>")),
    USUAL,
    CallForm(parser="mistral", start="[TOOL_CALLS]", signs=("[TOOL_CALLS]",)),
    CallForm(
        parser="kimi_k2",
        start="<|tool_calls_section_begin|>",
        signs=("<|tool_calls_section_begin|>",),
    ),
    CallForm(
        parser="deepseek_v3",
        start="<\uff5ctool\u2581calls\u2581begin\uff5c>",
        signs=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```json"),
    ),
    CallForm(
        parser="deepseek_v31",
        start="<\uff5ctool\u2581calls\u2581begin\uff5c>",
        signs=("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
    ),
    CallForm(parser="cohere_command3", start="<|START_ACTION|>", signs=("<|START_ACTION|>",)),
    CallForm(parser="lfm2", start="<|tool_call_start|>", signs=("<|tool_call_start|>",)),
    CallForm(parser="gemma4", start="<|tool_call>", signs=("<|tool_call>",)),
    CallForm(parser="granite", start="<|tool_call|>", signs=("<|tool_call|>",)),
    CallForm(
        parser="functiongemma", start="<start_function_call>", signs=("<start_function_call>",)
    ),
    CallForm(parser="apertus", start="<|tools_prefix|>", signs=("<|tools_prefix|>",)),
    CallForm(parser="longcat", start="<longcat_tool_call>", signs=("<longcat_tool_call>",)),
    CallForm(parser="olmo3", start="<function_calls>", signs=("<function_calls>",)),
    CallForm(
        parser="llama3_json",
        start="<|python_tag|>",
        signs=('{"name": function name, "parameters": ',),
    ),
    CallForm(parser="pythonic", start=None, signs=("[func_name1(params_name1=params_value1",)),
)
_JSON_CALL = re.compile(rf"{re.escape(OPEN)}\s*\{{")
_BARE_JSON_CALL = re.compile(r'\{\s*"name": *"probe", *"parameters": *\{')
# A text in the template, and its parser. vLLM's `qwen3` lets a call end the thought around it;
# `deepseek_r1` splits at the end of the thought, so that a call inside a thought is ignored.
_THINKING = (("[THINK]", "mistral"), ("</think>", "deepseek_r1"))


def call_form(renderer: ChatRenderer) -> CallForm | None:
    """Return the form of a model's calls; None if it is not known."""
    rendered = renderer.template.rendered_call
    text = f"{renderer.template.source}\n{rendered}"
    for form in CALL_FORMS:
        if all(sign in text for sign in form.signs):
            # Other families use the same marks without JSON between them.
            is_other = form is USUAL and OPEN in rendered and not _JSON_CALL.search(rendered)
            return None if is_other else form
    if _BARE_JSON_CALL.search(rendered):
        return form_of("llama3_json")
    return None


def form_of(parser: str | None) -> CallForm | None:
    """Return the form that one of vLLM's parsers reads; None if it is not in the table."""
    return next((form for form in CALL_FORMS if form.parser == parser), None)


def reasoning_parser(renderer: ChatRenderer) -> str | None:
    """Return vLLM's name of the parser of a model's thoughts; None if its template shows none."""
    text = renderer.template.source
    return next((name for sign, name in _THINKING if sign in text), None)
