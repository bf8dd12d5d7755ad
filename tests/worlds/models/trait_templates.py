"""Small chat templates written for the tests, each with a trait of some family of models."""

from __future__ import annotations

from functools import cache

from transformers import PreTrainedTokenizerFast

from actors.environment.rendering import ChatRenderer
from worlds.models.chatml import chatml_tokenizer

_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}"
    "{{- (tool | tojson) + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
)
_CALLS = (
    "{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + ({'name': c.function.name, "
    "'arguments': c.function.arguments} | tojson) + '</tool_call>' }}{%- endfor %}"
)
_TURN = "{{- '<|im_start|>' + m.role + '\n' + m.content }}" + _CALLS + "{{- '<|im_end|>\n' }}"
_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"


def _each(turn: str, *, before: str = "") -> str:
    return _TOOLS + before + "{%- for m in messages %}" + turn + "{%- endfor %}" + _PROMPT


def _unless(condition: str) -> str:
    return f"{{%- if not ({condition}) %}}{_TURN}{{%- endif %}}"


TEMPLATES = {
    "plain": _each(_TURN),
    "hoists system texts": _each(
        _unless("m.role == 'system'"),
        before="{%- for m in messages if m.role == 'system' %}" + _TURN + "{%- endfor %}",
    ),
    "shows the first system text": _each(_unless("m.role == 'system' and not loop.first")),
    "says a system text once": _each(
        "{%- if m.role == 'system' and m.content in ns.said %}{%- else %}"
        + _TURN
        + "{%- if m.role == 'system' %}{%- set ns.said = ns.said + [m.content] %}{%- endif %}"
        "{%- endif %}",
        before="{%- set ns = namespace(said=[]) %}",
    ),
    "shows the last system text": _each(
        _unless("m.role == 'system'"),
        before="{%- set ns = namespace(text='') %}{%- for m in messages if m.role == 'system' %}"
        "{%- set ns.text = m.content %}{%- endfor %}"
        "{%- if ns.text %}{{- '<|im_start|>system\n' + ns.text + '<|im_end|>\n' }}{%- endif %}",
    ),
    "wants system first and once": _each(
        "{%- if m.role == 'system' and not loop.first %}"
        "{{- raise_exception('a system message may only come first') }}{%- endif %}" + _TURN
    ),
    "shows a call without content": _each(
        "{%- if m.role == 'assistant' and m.content is none %}{{- '<|im_start|>assistant\n' }}"
        + _CALLS
        + "{{- '<|im_end|>\n' }}{%- else %}"
        + _TURN.replace(_CALLS, "")
        + "{%- endif %}"
    ),
    "hides the text beside a call": _each(
        _TURN.replace("m.content", "('' if m.tool_calls else m.content)")
    ),
    "numbers results": _each(
        "{%- if m.role == 'tool' %}{%- set ns.n = ns.n + 1 %}"
        "{{- '<|im_start|>tool ' ~ ns.n ~ '\n' + m.content + '<|im_end|>\n' }}{%- else %}"
        + _TURN
        + "{%- endif %}",
        before="{%- set ns = namespace(n=0) %}",
    ),
    "knows no tools": _each(
        "{%- if m.role != 'tool' %}" + _TURN.replace(_CALLS, "") + "{%- endif %}"
    ).replace(_TOOLS, ""),
    "escapes and trims": _each(
        _TURN.replace(
            "m.content", "((m.content | tojson) if m.role == 'tool' else (m.content | trim))"
        )
    ),
    "strips thoughts": _each(
        "{%- set text = m.content.split('</think>')[-1].lstrip('\n') %}"
        + _TURN.replace("m.content", "text")
    ),
    "wants contents in parts": _each(
        _TURN.replace(
            "+ m.content }}",
            "}}{%- if m.content is not string %}"
            "{%- for part in m.content or [] %}{{- part.text }}{%- endfor %}{%- endif %}",
        )
    ),
}


@cache
def tokenizer(trait: str) -> PreTrainedTokenizerFast:
    made = chatml_tokenizer()
    made.chat_template = TEMPLATES[trait]
    return made


def renderer(trait: str) -> ChatRenderer:
    return ChatRenderer(tokenizer(trait))
