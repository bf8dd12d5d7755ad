"""A second tokenizer, whose chat template shares no code with that of the tiny policy.

The renderer must work with any template. This one differs from the tiny one in every respect: it is
ChatML as Qwen writes it, with two tokens and line breaks around each message, a line break after
the end token that no policy samples, and tool results inside a user's turn.
"""

from transformers import PreTrainedTokenizerFast

from actors.trainer.tiny.tokenizer import build_tokenizer

TEMPLATE = """
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with the tiny vocabulary and ChatML's markers.

    The tiny policy does not know these markers.
    """
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens(["<tool_response>", "</tool_response>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer
