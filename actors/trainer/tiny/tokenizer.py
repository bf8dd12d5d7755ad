"""The tokenizer and chat template of the tiny policy, trained on the corpus in this file.

The tokenizer is byte-level BPE, so that any text can be encoded. Invariants: a digit is always a
token of its own. Special tokens are never split. A chat renders as the concatenation of its
messages' renderings, so that a longer chat extends the ids of its prefix.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
MAX_POSITIONS = 2048
"""Number of positions of the tiny model, defined here so that reading it does not import torch."""
END_OF_TEXT = "<|endoftext|>"
TURN_END = "<|end|>"
ROLE_TOKENS = {role: f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
TOOL_TOKENS = ("<tool_call>", "</tool_call>")

# One token opens a message and one ends it: the template is short because generation takes most of
# the time on a CPU. Every message is rendered separately: otherwise a longer chat would not extend
# the ids of a shorter one.
CHAT_TEMPLATE = """
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}{%- for part in content -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|system|>' -}}
{%- if messages and messages[0].role == 'system' -%}
{{- text(messages[0].content) + '\\n' -}}
{%- endif -%}
{{- 'Tools:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and tools and loop.first -%}
{%- elif message.role in ['system', 'user', 'tool'] -%}
{{- '<|' + message.role + '|>' + text(message.content) + '<|end|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' + text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function else call -%}
{{- '<tool_call>{"name": ' + (function.name | tojson) + ', "arguments": ' -}}
{%- if function.arguments is string -%}{{- function.arguments -}}
{%- else -%}{{- function.arguments | tojson -}}
{%- endif -%}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- else -%}
{{- raise_exception('chat template: unknown role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

# Words are repeated as a weight: merges are learnt in the order of how often their pairs occur.
_WORDS = (
    "higher lower user assistant system tool number guess guesses from to name arguments "
    "calculator expression answer correct error Say one You have Guess my Tools What is of the "
    "and in a function description parameters properties object required string type with Use "
    "city weather search result"
).split()

_SENTENCES = (
    "Guess my number from 1 to 7. You have 3 guesses.",
    "Say one number from 1 to 7.",
    "Guess a number from 1 to 9 in 4 guesses.",
    "higher",
    "lower",
    "correct",
    "What is 3+4? Use the calculator.",
    "What is 12 * 5 - 7? Answer with a number.",
    '{"name": "calculator", "arguments": {"expression": "3+4"}}',
    '{"error": "not a number"}',
    '{"type": "function", "function": {"name": "calculator", "description": "Evaluate an '
    'arithmetic expression.", "parameters": {"type": "object", "properties": {"expression": '
    '{"type": "string"}}, "required": ["expression"]}}}',
    "<answer>7</answer>",
    "The answer is 12.",
    "Please give your final answer in the form <answer>number</answer>.",
    "The tool call is not valid JSON. Try again.",
)


def corpus() -> list[str]:
    """Return the fixed training text: words with and without a space before them, and sentences."""
    alone = [word for word in _WORDS for _ in range(20)]
    spaced = [f" {word}" for word in _WORDS for _ in range(20)]
    return alone + spaced + [sentence for sentence in _SENTENCES for _ in range(10)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer; the same call always gives the same vocabulary.

    Returns: a tokenizer with `VOCAB_SIZE` ids, the chat template, `<|end|>` as end of sequence
    and `<|endoftext|>` as padding.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    control = (END_OF_TEXT, TURN_END, *ROLE_TOKENS.values())
    special = [AddedToken(text, special=True) for text in control]
    # Not special, so that decoding with skip_special_tokens keeps the markup of a tool call.
    markup = [AddedToken(text, special=False, normalized=False) for text in TOOL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(markup),
        show_progress=False,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(corpus(), trainer)
    bpe.add_tokens(markup)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
