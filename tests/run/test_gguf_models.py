"""Tests of GGUF files: they are converted completely and once, or refused with a reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from worlds.builders.gguf_files import TEMPLATE, TOKENS, tiny_llama, write_gguf

from actors.environment.tokenizer import stop_token_ids
from service.config.file import ConfigError, parse_config
from service.config.preflight import check_model_source
from service.launch.model_directories import (
    MARKER,
    converted_model,
    models_directory,
    with_converted_models,
    write_smollm2,
)

END = TOKENS.index("<|im_end|>")


def refuse_to_convert(text: str) -> None:
    raise AssertionError(f"converted again: {text}")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, model: LlamaForCausalLM) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return models_directory()


def test_a_gguf_file_becomes_the_same_model_with_its_template_and_stop_token(
    cache: Path, file: Path, model: LlamaForCausalLM
) -> None:
    directory = converted_model(file, key="model.path", tell=lambda _text: None)
    check_model_source(str(directory), key="model.path")
    ids = torch.tensor([[4, 9, 7, 200, 3]])
    found = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(found(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [END]
    assert stop_token_ids(str(directory)) == (END,)
    assert (directory / "model.safetensors").stat().st_mode & 0o044
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())


def test_a_file_is_converted_once_and_a_partial_conversion_is_replaced(
    cache: Path, file: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    tree = {"model": {"path": str(file)}, "tasks": {"environment": "guessing"}}
    config = parse_config(tree, source="the test")
    found = with_converted_models(config, tell=told.append).model.path
    assert found is not None and Path(found).parent == cache and len(told) == 1
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(file.read_bytes())
    assert converted_model(copy, key="model.path", tell=refuse_to_convert) == Path(found)
    # Leave the directory as an interrupted copy does.
    (Path(found) / MARKER).unlink()
    (Path(found) / "config.json").write_text("{")
    again = converted_model(file, key="model.path", tell=told.append)
    assert len(told) == 2 and json.loads((again / "config.json").read_text())
    assert os.listdir(cache) == [again.name]


def test_all_stop_tokens_of_a_gguf_file_are_used(
    cache: Path, tmp_path: Path, model: LlamaForCausalLM
) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 0}
    file = write_gguf(tmp_path / "two.gguf", model, extra=ends)
    directory = converted_model(file, key="model.path", tell=lambda _text: None)
    assert stop_token_ids(str(directory)) == (0, END)


def test_an_unusable_gguf_file_is_refused_and_leaves_no_files(
    cache: Path, file: Path, tmp_path: Path, model: LlamaForCausalLM
) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-4000])
    write_gguf(tmp_path / "clip.gguf", model, architecture="clip")
    write_gguf(tmp_path / "words.gguf", model, tokenizer="rwkv")
    write_gguf(tmp_path / "holes.gguf", model, without="layers.1.mlp.up_proj")
    write_gguf(tmp_path / "split.gguf", model, extra={"split.count": 3})
    for name, words in {
        "text": "does not begin as a GGUF file",
        "cut": "cannot be converted",
        "clip": "architecture clip is not supported",
        "words": "rwkv",
        "holes": "lacks 1 of its weights",
        "split": "one of 3 files",
        "absent": "cannot be read (No such file",
    }.items():
        with pytest.raises(ConfigError, match=r"^algorithm\.reference: ") as refused:
            converted_model(tmp_path / f"{name}.gguf", key="algorithm.reference", tell=len)
        assert words in str(refused.value), refused.value
        assert "expected" in str(refused.value)
    assert not cache.exists() or os.listdir(cache) == []


def test_smollm2_is_not_written_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else"):
        write_smollm2(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
