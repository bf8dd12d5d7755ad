"""Tests of samples that are made of chats: which tokens are trained, which chats are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from worlds.models.chatml import chatml_tokenizer

from actors.environment.chats import BadChat, ChatEncoder, read_chats
from actors.environment.tasks import BadTaskFile
from actors.environment.tokenizer import with_template
from actors.trainer.tiny.tokenizer import build_tokenizer
from actors.types import Sample

CHAT = [
    {"role": "system", "content": "Guess."},
    {"role": "user", "content": "higher"},
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "lower"},
    {"role": "assistant", "content": "5"},
]


def encoder_of(tokenizer: PreTrainedTokenizerFast) -> ChatEncoder:
    return ChatEncoder(tokenizer, stop_token_ids=[tokenizer.eos_token_id])


def shown(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> str:
    """Return the text of a sample with its trained tokens in braces."""
    runs: list[tuple[bool, list[int]]] = []
    for token, is_trained in zip(sample.token_ids.tolist(), sample.mask.tolist(), strict=True):
        if not runs or runs[-1][0] != bool(is_trained):
            runs.append((bool(is_trained), []))
        runs[-1][1].append(token)
    texts = [(trained, tokenizer.decode(ids)) for trained, ids in runs]
    return "".join(f"{{{text}}}" if trained else text for trained, text in texts)


def trained(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **columns: Any
) -> list[str]:
    samples = encoder_of(tokenizer).samples({"messages": messages, **columns}, "chat")
    return [shown(tokenizer, sample) for sample in samples]


def test_the_replies_and_the_tokens_that_end_them_are_trained() -> None:
    assert trained(build_tokenizer(), CHAT) == [
        "<|system|>Guess.<|end|><|user|>higher<|end|><|assistant|>{6<|end|>}"
        "<|user|>lower<|end|><|assistant|>{5<|end|>}"
    ]


def test_the_line_break_after_the_end_of_a_reply_is_not_trained() -> None:
    [text] = trained(chatml_tokenizer(), CHAT)
    assert text.endswith(
        "assistant\n{6<|im_end|>}\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n"
        "{5<|im_end|>}"
    )


def test_the_text_of_a_reply_is_not_trained_in_its_prompt() -> None:
    """Check the mask of a reply whose text also occurs in the question before it."""
    messages = [{"role": "user", "content": "6 6"}, {"role": "assistant", "content": "6"}]
    assert trained(build_tokenizer(), messages) == ["<|user|>6 6<|end|><|assistant|>{6<|end|>}"]


def test_a_message_of_weight_0_is_context_only() -> None:
    messages = [each | {"weight": 0} if each["content"] == "6" else each for each in CHAT]
    [text] = trained(build_tokenizer(), messages)
    assert "<|assistant|>6<|end|>" in text and text.endswith("{5<|end|>}")


@pytest.mark.parametrize(
    ("call_ids", "result_ids", "shown_order"),
    [
        (("call_f", "call_f"), ("call_f", "call_f"), "12"),
        ((None, None), ("a", "b"), "12"),
        ((None, None), (None, None), "12"),
        (("a", "b"), ("b", "a"), "21"),
        (("a", "b"), (None, None), "12"),
        (("a", "a", "b"), ("b", "a", "a"), "231"),
        # The calls after the last result may lack a result.
        (("call_f", "call_f"), ("call_f",), "1"),
    ],
)
def test_results_of_calls_whose_ids_repeat_or_are_missing_are_paired_in_order(
    call_ids: tuple[str | None, ...], result_ids: tuple[str | None, ...], shown_order: str
) -> None:
    function = {"name": "lookup", "arguments": {}}
    calls = [{"function": function, **({"id": each} if each else {})} for each in call_ids]
    results = [
        {"role": "tool", "content": f"{number}", **({"tool_call_id": each} if each else {})}
        for number, each in enumerate(result_ids, start=1)
    ]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    [text] = trained(build_tokenizer(), [ASKED, said, *results, CHAT[4]])
    assert "".join(re.findall(r"<\|tool\|>(\d)<", text)) == shown_order


def test_calls_are_trained_and_their_results_are_not() -> None:
    call = {"id": "a", "function": {"name": "calculator", "arguments": '{"expression": "1+2"}'}}
    messages = [
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "a"},
        {"role": "assistant", "content": "3"},
    ]
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    for given in (tools, json.dumps(tools)):
        [text] = trained(build_tokenizer(), messages, tools=given)
        assert text.startswith("<|system|>Tools:\n")
        assert text.endswith(
            '<|assistant|>{<tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}'
            "</tool_call><|end|>}<|tool|>3<|end|><|assistant|>{3<|end|>}"
        )


def test_a_template_that_drops_earlier_thoughts_gives_a_sample_for_each_reply() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning and loop.last %}"
        "({{ m.reasoning }}){% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    messages: list[dict[str, Any]] = [
        each | {"reasoning": f"so {each['content']}"} if each["role"] == "assistant" else each
        for each in CHAT
    ]
    before = "<|system|>Guess.<|end|><|user|>higher<|end|><|assistant|>"
    assert trained(tokenizer, messages) == [
        f"{before}{{(so 6)6<|end|>}}",
        f"{before}6<|end|><|user|>lower<|end|><|assistant|>{{(so 5)5<|end|>}}",
    ]


def test_a_reply_is_encoded_separately_from_its_prompt() -> None:
    tokenizer = chatml_tokenizer()
    double = "\n\n"
    tokenizer.add_tokens([double])
    reply = {"role": "assistant", "content": "\n6"}
    [text] = trained(tokenizer, [{"role": "user", "content": "higher"}, reply])
    assert text.endswith("<|im_start|>assistant\n{\n6<|im_end|>}")
    joined = tokenizer.encode("assistant\n\n6", add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids(double) in joined


def test_raw_prompts_train_the_text_and_the_end() -> None:
    tokenizer = build_tokenizer()
    with_template(tokenizer, "none")
    messages = [
        {"role": "user", "content": "What is 1+2? "},
        {"role": "assistant", "content": "3"},
    ]
    assert trained(tokenizer, messages) == ["What is 1+2? {3<|end|>}"]


def test_a_template_that_ends_only_earlier_replies_still_trains_the_end() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% if not (loop.last and m.role == 'assistant') %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    [text] = trained(tokenizer, CHAT)
    assert text.count("<|end|>}") == 2


ASKED = {"role": "user", "content": "higher"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ASKED], "got no reply of the assistant to train"),
        ([ASKED, {"role": "assistant", "content": "6", "weight": 0}], "got no reply of the"),
        (
            [{"role": "assistant", "content": "6"}, ASKED],
            r"messages\[0\]: got a reply .* as the first",
        ),
        ([ASKED, {"role": "assistant", "content": " "}], r"messages\[1\]: got an empty reply"),
        (
            [ASKED, {"role": "assistant", "content": "6<|end|>7"}],
            r"messages\[1\]: the reply contains the token '<\|end\|>'",
        ),
        (
            [ASKED, {"role": "assistant", "content": "6", "reasoning": "a thought of mine"}],
            r"messages\[1\]: the chat template does not show the thought of the reply",
        ),
        ([{"role": "user", "content": "6", "tool_calls": [{"function": {"name": "a"}}]}], "role"),
        ([ASKED, {"role": "user", "content": None}, CHAT[2]], r"messages\[1\]: .* user is null"),
        (
            [ASKED | {"name": "Ada"}, CHAT[2], ASKED | {"name": "Bob"}, CHAT[4]],
            "the names 'Ada' and 'Bob' of messages of role user",
        ),
        (
            [CHAT[0] | {"name": "Ada"}, CHAT[0] | {"name": "Bob"}, *CHAT],
            "'Ada' and 'Bob' of messages of role system",
        ),
    ],
)
def test_a_chat_that_cannot_be_trained_as_written_is_refused(
    messages: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(BadChat, match=reason):
        trained(build_tokenizer(), messages)


def test_a_generation_prompt_that_rendered_replies_lack_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>(so{% endif %}"
    )
    with pytest.raises(BadChat, match="renders the prompt of the reply differently"):
        trained(tokenizer, CHAT)


def test_a_template_without_an_end_token_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(BadChat, match="without a token at which an engine stops"):
        trained(tokenizer, CHAT)


def read(path: Path, rows: list[Any], **options: Any) -> list[tuple[Sample, ...]]:
    file = path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {
        "columns": {},
        "split": "train",
        "subset": None,
        "max_tokens": 64,
        "leaves_out_long": False,
        "section": "sft",
        "tell": lambda text: None,
    }
    return read_chats(str(file), encoder_of(build_tokenizer()), **{**given, **options})


GOOD = {"messages": CHAT}
LONG = {"messages": [{"role": "user", "content": "7" * 99}, CHAT[2]]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, r"row 2: data\.messages: got a list that is empty"),
        ({"messages": [ASKED]}, "row 2: messages: got no reply of the assistant"),
        ({"messages": [{"role": "robot", "content": "6"}]}, r"row 2: data\.messages\[0\]\.role"),
        ({"chat": CHAT}, "row 2: data: messages missing"),
        (LONG, r"row 2: messages: got a chat of 104 tokens, expected at most .* \(64\)"),
        ({"messages": CHAT, "tools": "[{"}, "row 2: tools: got a list that cannot be read"),
    ],
)
def test_a_bad_row_is_refused_with_its_number(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadTaskFile, match=reason) as refused:
        read(tmp_path, [GOOD, row])
    assert "sft.columns" in str(refused.value)


def test_long_chats_are_left_out_if_the_option_is_set_and_never_cut(tmp_path: Path) -> None:
    warnings: list[str] = []
    chats = read(tmp_path, [GOOD, LONG, GOOD], leaves_out_long=True, tell=warnings.append)
    assert len(chats) == 2
    assert warnings == ["1 of 3 chats are longer than 64 tokens and are left out"]
    with pytest.raises(BadTaskFile, match="all 1 chats are longer"):
        read(tmp_path, [LONG], leaves_out_long=True)


def test_columns_of_other_names_are_read(tmp_path: Path) -> None:
    rows = [{"conversation": CHAT, "score": 3}]
    [[sample]] = read(tmp_path, rows, columns={"messages": "conversation"})
    assert sample.num_trained == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", False),
        ("train", False),
        ("training", 0),
        ("trainable", False),
        ("loss_mask", 0),
        ("loss_weight", 0.5),
        ("train_on_turn", False),
        ("train_detail", [{"begin_offset": 0, "end_offset": 0, "train": False}]),
        ("masked", True),
        ("mask", False),
        ("mask", True),
        ("ignore_loss", True),
    ],
)
def test_a_reply_that_another_field_than_weight_leaves_out_is_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    """Other libraries mark untrained replies by such a field."""
    marked = [each | {name: value} if each["content"] == "6" else each for each in CHAT]
    with pytest.raises(
        BadTaskFile, match=rf"row 2: messages\[2\]: .* {name}, expected weight"
    ) as got:
        read(tmp_path, [GOOD, {"messages": marked}])
    assert ("libraries read mask in both ways" in str(got.value)) is (name == "mask")
    # A weight of 0 says the same.
    weights = [each | {"weight": 0} if each["content"] == "6" else each for each in marked]
    assert read(tmp_path, [{"messages": weights}])
    # Arrow gives all messages of a column the same fields.
    assert read(tmp_path, [{"messages": [each | {name: None} for each in CHAT]}])
    others = [each | {name: value} if each["role"] != "assistant" else each for each in CHAT]
    assert read(tmp_path, [{"messages": others}])


def test_a_field_that_leaves_no_reply_out_is_accepted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {
        **dict.fromkeys(("train", "loss", "trainable"), True),
        **dict.fromkeys(("loss_mask", "loss_weight"), 1.0),
        **dict.fromkeys(("masked", "no_loss"), False),
        **dict.fromkeys(("training_source", "train_split", "trainer", "lossless"), "web"),
        **dict.fromkeys(("mask_id", "masked_text", "pii_masked"), "web"),
    }
    assert read(tmp_path, [{"messages": [each | fields for each in CHAT]}])
    assert all(any(f"the field {name}," in text for text in caplog.messages) for name in fields)


def test_a_field_of_a_message_that_is_not_read_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefixed = {"messages": [each | {"prefix": False, "refusal": None} for each in CHAT]}
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    read(tmp_path, [GOOD, prefixed, prefixed | {"tools": tools}])
    [warning] = caplog.messages
    assert "row 2: messages: a message has the field prefix, which is not read" in warning


def test_hidden_names_of_one_speaker_for_each_role_are_accepted() -> None:
    names = {"system": "Developer", "user": "Human", "assistant": "Bob"}
    named = [each | {"name": names[each["role"]]} for each in CHAT]
    developer = CHAT[0] | {"role": "developer", "name": "developer"}
    other_case = named[3] | {"name": "human"}
    for chat in (named, [developer, *named[1:3], other_case, named[4]]):
        assert trained(build_tokenizer(), chat) == trained(build_tokenizer(), CHAT)
    # Messages without a name, or with that of the role, say nothing about who speaks.
    users = [ASKED, ASKED | {"name": "User"}, ASKED | {"name": "Ada"}, CHAT[2]]
    assert trained(build_tokenizer(), users)
    systems = [CHAT[0], CHAT[0] | {"name": "System"}, developer, *CHAT[1:]]
    assert trained(build_tokenizer(), systems)


def test_names_that_the_template_shows_or_the_policy_lacks_are_accepted() -> None:
    tokenizer = build_tokenizer()
    reply = CHAT[2] | {"name": "Bob"}
    # A name that repeats the role says no more than the role; a reply of the policy has no name.
    assert trained(tokenizer, [ASKED | {"name": "user"}, reply])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'user' %}{{ m.name }}: {% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert trained(tokenizer, [ASKED | {"name": "Ada"}, reply]) == [
        "<|user|>Ada: higher<|end|><|assistant|>{6<|end|>}"
    ]
