"""Chat templates of several families of models that call tools, and the replies of their policies.

A template is written from the family's format, and `say` writes the same format in plain code. So a
prompt that grew by appending is compared with a rendering that shares no code with it. The tiny
vocabulary replaces each family's own, with the family's markers as tokens.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from actors.environment.protocol import Message
from actors.environment.rendering import ChatRenderer
from actors.trainer.tiny.tokenizer import CHAT_TEMPLATE, TURN_END, build_tokenizer

_CHATML_TURN = "<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n"
_CHATML_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
_TOOL_LIST = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}"
    "{{- (tool | tojson) + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
)

# Thoughts before the last question are omitted; neighbouring results share one turn.
QWEN3 = (
    _TOOL_LIST + "{%- set ns = namespace(last_question=-1) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- set ns.last_question = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}"
    "{%- endif %}{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}"
    "{%- if loop.index0 > ns.last_question and (loop.last or thought) %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + m.content.lstrip('\n') }}"
    "{%- else %}{{- m.content }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}"
    "{%- if m.content or not loop.first %}{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- else %}{{- '" + _CHATML_TURN + "' }}{%- endif %}{%- endfor %}"
) + _CHATML_PROMPT

# The text of a reply that calls is omitted, and a result must name its tool.
HERMES = (
    _TOOL_LIST + "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if m.name is not defined %}{{- raise_exception('a tool without a name') }}{%- endif %}"
    '{{- \'<|im_start|>tool\n<tool_response>\n{"name": "\' + m.name + \'", "content": \' }}'
    "{{- (m.content | tojson) + '}\n</tool_response> <|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' and m.tool_calls is defined %}"
    "{{- '<|im_start|>assistant' }}{%- for call in m.tool_calls %}"
    "{{- '\n<tool_call>\n{ \"arguments\": ' + (call.function.arguments | tojson) }}"
    "{{- ', \"name\": \"' + call.function.name + '\"}\n</tool_call> ' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- else %}{{- '" + _CHATML_TURN + "' }}{%- endif %}{%- endfor %}"
) + _CHATML_PROMPT

# A reply has one call and then ends with another token than a text.
LLAMA = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{{- ({'output': m.content} | tojson) + '<|eot_id|>' }}{%- elif 'tool_calls' in m %}"
    "{%- if m.tool_calls | length > 1 %}{{- raise_exception('one call at once') }}{%- endif %}"
    "{%- set function = m.tool_calls[0].function %}"
    '{{- \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + function.name }}'
    "{{- '\", \"parameters\": ' + (function.arguments | tojson) + '}<|eom_id|>' }}{%- else %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{- (m.content | trim) + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)

# Calls and results carry ids of nine letters; no header precedes a reply.
MISTRAL = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{- raise_exception('an id without nine letters') }}{%- endif %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + (m.content | tojson) }}"
    "{{- ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- elif m.tool_calls is defined %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}"
    "{%- if call.id is not defined or call.id | length != 9 %}"
    "{{- raise_exception('an id without nine letters') }}{%- endif %}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{{- ', ' if not loop.last else ']</s>' }}{%- endfor %}"
    "{%- else %}{{- ' ' + m.content + '</s>' }}{%- endif %}{%- endfor %}"
)

# The arguments are text, and no header separates results from the reply to them.
DEEPSEEK = (
    "{%- set ns = namespace(in_results=false) %}{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '\n' if ns.in_results else '<tool_outputs>' }}{%- set ns.in_results = true %}"
    "{{- '<tool_output>' + m.content + '</tool_output>' }}{%- else %}"
    "{%- if ns.in_results %}{{- '</tool_outputs>' }}{%- set ns.in_results = false %}{%- endif %}"
    "{%- if m.role == 'user' %}{{- '<|User|>' + m.content + '<|Assistant|>' }}{%- else %}"
    "{{- m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- '<tool_calls>' if loop.first else '\n' }}"
    "{{- '<call>' + call.type + '<sep>' + call.function.name + '\n```json\n' }}"
    "{{- call.function.arguments + '\n```</call>' }}"
    "{{- '</tool_calls>' if loop.last }}{%- endfor %}{{- '<|end_of_sentence|>' }}"
    "{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if ns.in_results %}{{- '</tool_outputs>' }}"
    "{%- elif add_generation_prompt and messages[-1].role == 'assistant' %}{{- '<|Assistant|>' }}"
    "{%- endif %}"
)

# No token ends a reply: the header of the next message stops the engine, and is written once.
GLM = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}"
    "{%- endif %}{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|assistant|>\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>' + call.function.name }}"
    "{%- for key, value in call.function.arguments | items %}"
    "{{- '\n<arg_key>' + key + '</arg_key>\n<arg_value>' }}"
    "{{- (value if value is string else value | tojson) + '</arg_value>' }}{%- endfor %}"
    "{{- '\n</tool_call>' }}{%- endfor %}"
    "{%- else %}{{- '<|' + m.role + '|>\n' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of chat template, and the policy that was trained on it."""

    name: str
    template: str
    say: Callable[[Message], str]
    """Returns the policy's text for a reply, including the token that stops the engine."""
    end: str
    markers: tuple[str, ...] = ()
    """The family's own tokens besides `end`."""
    stops: tuple[str, ...] = ()
    """Tokens that stop the engine, besides `end`."""
    max_calls: int = 3
    """The largest number of calls in one reply."""
    can_say_and_call: bool = True
    """Whether the text of a reply that calls stays in the history."""
    has_thoughts: bool = False

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return _tokenizer(self.name)

    @property
    def renderer(self) -> ChatRenderer:
        tokenizer = self.tokenizer
        stops = tokenizer.convert_tokens_to_ids(list(self.stops))
        return ChatRenderer(tokenizer, stop_token_ids=stops)


def json_text(value: Any) -> str:
    """Return a value as JSON, as transformers' own `tojson` writes it."""
    return json.dumps(value, ensure_ascii=False)


def _say_qwen3(reply: Message) -> str:
    thought = "" if reply.reasoning is None else f"<think>\n{reply.reasoning}\n</think>\n\n"
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {json_text(call.arguments)}}}\n'
        "</tool_call>"
        for call in reply.tool_calls
    ]
    return thought + "\n".join(([reply.content] if reply.content else []) + calls) + "<|im_end|>"


def _say_hermes(reply: Message) -> str:
    # The line break before the first call is part of the generation prompt.
    calls = [
        f'<tool_call>\n{{ "arguments": {json_text(call.arguments)}, "name": "{call.name}"}}\n'
        "</tool_call> "
        for call in reply.tool_calls
    ]
    return ("\n".join(calls) or reply.content) + "<|im_end|>"


def _say_llama(reply: Message) -> str:
    for call in reply.tool_calls:
        return f'{{"name": "{call.name}", "parameters": {json_text(call.arguments)}}}<|eom_id|>'
    return reply.content + "<|eot_id|>"


def _say_mistral(reply: Message) -> str:
    calls = [
        f'{{"name": "{call.name}", "arguments": {json_text(call.arguments)}, "id": "{call.id}"}}'
        for call in reply.tool_calls
    ]
    return (f"[TOOL_CALLS] [{', '.join(calls)}]" if calls else f" {reply.content}") + "</s>"


def _say_deepseek(reply: Message) -> str:
    calls = [
        f"<call>function<sep>{call.name}\n```json\n{json_text(call.arguments)}\n```</call>"
        for call in reply.tool_calls
    ]
    called = f"<tool_calls>{chr(10).join(calls)}</tool_calls>" if calls else ""
    return reply.content + called + "<|end_of_sentence|>"


def _say_glm(reply: Message) -> str:
    said = reply.content
    for call in reply.tool_calls:
        said += f"\n<tool_call>{call.name}"
        for key, value in call.arguments.items():
            text = value if isinstance(value, str) else json_text(value)
            said += f"\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>"
        said += "\n</tool_call>"
    return said + ("<|observation|>" if reply.tool_calls else "<|user|>")


def _say_tiny(reply: Message) -> str:
    calls = [
        f'<tool_call>{{"name": {json_text(call.name)}, "arguments": {json_text(call.arguments)}}}'
        "</tool_call>"
        for call in reply.tool_calls
    ]
    return reply.content + "".join(calls) + TURN_END


def _of_vllm(name: str) -> str:
    """Return a template from vLLM's package; it is found without importing vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    directory = Path(spec.submodule_search_locations[0]) / "transformers_utils/chat_templates"
    return (directory / name).read_text()


_CHATML = ("<|im_start|>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_QWEN3 = Family(
    name="qwen3",
    template=QWEN3,
    say=_say_qwen3,
    end="<|im_end|>",
    markers=_CHATML,
    has_thoughts=True,
)
_MINICPM = Family(
    name="minicpm",
    template=_of_vllm("template_minicpmv45.jinja"),
    say=_say_qwen3,
    end="<|im_end|>",
    markers=_CHATML,
    has_thoughts=True,
)
_HERMES = Family(
    name="hermes",
    template=HERMES,
    say=_say_hermes,
    end="<|im_end|>",
    markers=_CHATML,
    can_say_and_call=False,
)
_LLAMA = Family(
    name="llama",
    template=LLAMA,
    say=_say_llama,
    end="<|eot_id|>",
    markers=("<|start_header_id|>", "<|end_header_id|>"),
    stops=("<|eom_id|>",),
    max_calls=1,
    can_say_and_call=False,
)
_MISTRAL = Family(
    name="mistral",
    template=MISTRAL,
    say=_say_mistral,
    end="</s>",
    markers=("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    can_say_and_call=False,
)
_DEEPSEEK = Family(
    name="deepseek",
    template=DEEPSEEK,
    say=_say_deepseek,
    end="<|end_of_sentence|>",
    markers=("<|User|>", "<|Assistant|>", "<tool_calls>", "</tool_calls>", "</tool_outputs>"),
)
_GLM = Family(
    name="glm",
    template=GLM,
    say=_say_glm,
    end="<|endoftext|>",
    markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    stops=("<|user|>", "<|observation|>"),
)
_TINY = Family(name="tiny", template=CHAT_TEMPLATE, say=_say_tiny, end=TURN_END)
FAMILIES = {
    family.name: family
    for family in (_QWEN3, _MINICPM, _HERMES, _LLAMA, _MISTRAL, _DEEPSEEK, _GLM, _TINY)
}


@cache
def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([*family.markers, *family.stops], special_tokens=True)
    tokenizer.add_special_tokens({"eos_token": family.end})
    tokenizer.chat_template = family.template
    return tokenizer
