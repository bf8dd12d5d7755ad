"""A ChatML tokenizer as real models have it: two tokens and line breaks around each message."""

from transformers import PreTrainedTokenizerFast

from actors.trainer.tiny_tokenizer import build_tokenizer

TEMPLATE = """
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}{%- for part in content -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages and messages[0].role == 'system' -%}
{{- text(messages[0].content) + '\\n' -}}
{%- endif -%}
{{- 'Tools:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and tools and loop.first -%}
{%- elif message.role in ['system', 'user'] -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function else call -%}
{{- '<tool_call>{"name": ' + (function.name | tojson) + ', "arguments": ' -}}
{%- if function.arguments is string -%}{{- function.arguments -}}
{%- else -%}{{- function.arguments | tojson -}}
{%- endif -%}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>' + text(message.content) -}}
{{- '</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- raise_exception('chat template: unknown role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny vocabulary with ChatML's markers and a template in Qwen's style."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens(["<tool_response>", "</tool_response>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer
