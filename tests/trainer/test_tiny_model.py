"""Tests of the tiny model: its tokenizer, chat template, warm-up data and build."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from actors.environment.builtin.calculator import CALCULATOR
from actors.environment.builtin.guessing import HIGHER, LOWER
from actors.environment.protocol import Message, Role
from actors.environment.rendering import ChatRenderer
from actors.environment.tool_calls import parse_tool_calls
from actors.trainer.tiny.built import MARKER
from actors.trainer.tiny.model import build_tiny_model
from actors.trainer.tiny.tokenizer import TOOL_TOKENS, TURN_END, VOCAB_SIZE, build_tokenizer
from actors.trainer.tiny.warmup import (
    IGNORED,
    MALFORMED_SHARE,
    Decks,
    answer_conversation,
    calculator_conversation,
    encode,
    guessing_conversation,
)

TOKENIZER = build_tokenizer()
CALL = {"function": {"name": "calculator", "arguments": {"expression": "3+4"}}}


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    text: str = TOKENIZER.apply_chat_template(messages, tokenize=False, **options)
    return text


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    build_tiny_model(path, warmup_steps=2)
    return path


@given(st.text())
def test_any_text_is_decoded_as_it_was_encoded(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token < VOCAB_SIZE for token in ids)


@given(st.integers(min_value=0))
def test_each_digit_is_a_token(number: int) -> None:
    assert len(TOKENIZER.encode(f"{number}", add_special_tokens=False)) == len(f"{number}")


@pytest.mark.parametrize(
    "word", [HIGHER, LOWER, "user", "assistant", "system", "tool", " calculator", *TOOL_TOKENS]
)
def test_common_words_are_one_token(word: str) -> None:
    assert len(TOKENIZER.encode(word, add_special_tokens=False)) == 1


def test_tool_markup_is_kept_when_special_tokens_are_skipped() -> None:
    ids = TOKENIZER.encode(f"<tool_call>1</tool_call>{TURN_END}", add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<tool_call>1</tool_call>"


def test_a_chat_is_rendered_by_the_template() -> None:
    text = render(
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "What is 3+4?"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "7"},
        ],
        add_generation_prompt=True,
    )
    assert text == (
        "<|system|>Be short.<|end|><|user|>What is 3+4?<|end|>"
        '<|assistant|><tool_call>{"name": "calculator", "arguments": '
        '{"expression": "3+4"}}</tool_call><|end|>'
        "<|tool|>7<|end|><|assistant|>"
    )


def test_tools_are_listed_in_the_system_turn() -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    text = render(messages, tools=[CALCULATOR.for_template()])
    assert text.startswith('<|system|>Be short.\nTools:\n{"type": "function"')
    assert text.count("Be short.") == 1
    assert text.endswith("<|end|><|user|>Hi<|end|>")


def test_written_calls_can_be_parsed() -> None:
    text = render([{"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}])
    reply = text.removeprefix("<|assistant|>").removesuffix("<|end|>")
    calls = parse_tool_calls(reply, [CALCULATOR])
    assert [call.arguments for call in calls] == [{"expression": "3+4"}] * 2  # type: ignore[union-attr]


_ROLES = st.sampled_from(["user", "assistant", "tool"])
_CHATS = st.lists(st.tuples(_ROLES, st.text(max_size=12)), min_size=1, max_size=6)


@given(_CHATS, st.booleans(), st.booleans())
def test_a_longer_chat_extends_its_prefix(
    chat: list[tuple[str, str]], has_system: bool, has_tools: bool
) -> None:
    messages = [{"role": "system", "content": "s"}] if has_system else []
    messages += [{"role": role, "content": content} for role, content in chat]
    tools = [CALCULATOR.for_template()] if has_tools else None
    whole = TOKENIZER.encode(render(messages, tools=tools), add_special_tokens=False)
    for length in range(1, len(messages)):
        prefix = TOKENIZER.encode(render(messages[:length], tools=tools), add_special_tokens=False)
        assert whole[: len(prefix)] == prefix


def test_the_renderer_extends_a_prompt_without_breaks() -> None:
    renderer = ChatRenderer(TOKENIZER)
    invitation = Message(role=Role.USER, content="Guess.")
    prompt = renderer.first_prompt((invitation,), ())
    sampled = np.array(TOKENIZER.encode(f"3{TURN_END}", add_special_tokens=False), dtype=np.int32)
    for role in (Role.USER, Role.TOOL):
        extension = renderer.extend(
            prompt,
            sampled,
            history=(invitation, Message(role=Role.ASSISTANT, content="3")),
            new_messages=(Message(role=role, content="higher"),),
            tools=(),
        )
        assert extension.break_reason is None
        assert extension.num_inserted == 0


def test_only_assistant_tokens_are_warm_up_targets() -> None:
    dice = random.Random(0)
    decks = Decks()
    makers = (
        lambda dice: guessing_conversation(dice, decks),
        calculator_conversation,
        answer_conversation,
    )
    for make in makers:
        for _ in range(20):
            conversation = make(dice)
            ids, labels = encode(TOKENIZER, conversation)
            targets = [token for token in labels if token != IGNORED]
            assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
            assert TOKENIZER.decode(targets) == "".join(
                content + TURN_END
                for index, (role, content) in enumerate(conversation.messages)
                if role == "assistant" and index not in conversation.untrained
            )


def test_warm_up_guesses_do_not_depend_on_the_hints() -> None:
    """Check that guesses after a hint are uniform over the whole range, not only over the rest."""
    dice = random.Random(0)
    decks = Decks()
    below: Counter[tuple[str, bool]] = Counter()
    for _ in range(20_000):
        messages = guessing_conversation(dice, decks).messages
        if len(messages) < 4 or "1 to 7." not in messages[0][1] or not messages[3][1].isdigit():
            continue
        if messages[1][1] == "3":
            below[messages[2][1], int(messages[3][1]) < 3] += 1
    for hint in (HIGHER, LOWER):
        share = below[hint, True] / (below[hint, True] + below[hint, False])
        assert share == pytest.approx(2 / 7, abs=0.07)


def test_the_stated_share_of_warm_up_calls_is_malformed() -> None:
    dice = random.Random(0)
    calls = [calculator_conversation(dice).messages[1][1] for _ in range(2000)]
    is_malformed = [
        type(parse_tool_calls(call, [CALCULATOR])[0]).__name__ == "MalformedCall" for call in calls
    ]
    assert sum(is_malformed) / 2000 == pytest.approx(MALFORMED_SHARE, abs=0.04)


def test_transformers_loads_a_built_model(directory: Path) -> None:
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert 500_000 < model.num_parameters() < 1_500_000
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template == TOKENIZER.chat_template
    text = "What is 12+345?<|end|>\n"
    assert tokenizer.encode(text) == TOKENIZER.encode(text)
    assert model(input_ids=torch.tensor([tokenizer.encode(text)])).logits.shape[-1] == VOCAB_SIZE


def test_equal_settings_give_equal_weights(directory: Path, tmp_path: Path) -> None:
    torch.manual_seed(12345)
    build_tiny_model(tmp_path / "again", warmup_steps=2)
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (directory / name).read_bytes()


def test_a_built_model_is_reused_and_another_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    assert not build_tiny_model(path, warmup_steps=0)
    assert build_tiny_model(path, warmup_steps=0)
    assert not build_tiny_model(path, warmup_steps=0, tie_word_embeddings=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


def test_a_directory_that_is_not_a_tiny_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is not a tiny model"):
        build_tiny_model(tmp_path, warmup_steps=0)
    assert (tmp_path / "precious.txt").read_text() == "keep"


@pytest.mark.parametrize("content", ["", "[1]", "3"])
def test_a_tiny_model_with_a_damaged_marker_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / MARKER).write_text(content)
    with pytest.raises(FileExistsError, match=f"{MARKER} cannot be read .*; remove .*/"):
        build_tiny_model(tmp_path, warmup_steps=0)


def test_an_interrupted_build_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("actors.trainer.tiny.model.warm_up", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_tiny_model(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []
