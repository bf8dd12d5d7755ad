"""Tests of reading from the files of a model which tokens end a turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, GenerationConfig

from actors.environment.rendering import load_renderer
from actors.environment.tokenizer import stop_token_ids
from actors.trainer.tiny.tokenizer import build_tokenizer

# The end token of the tiny tokenizer.
OWN = 1


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = build_tokenizer()
    assert tokenizer.eos_token_id == OWN
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    return directory


@pytest.fixture
def model(tokenizer_files: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tokenizer_files, tmp_path / "model"))


@pytest.mark.parametrize(
    ("added", "expected"),
    [(None, (OWN,)), (OWN, (OWN,)), (7, (OWN, 7)), ([9, OWN, 4], (OWN, 4, 9))],
)
def test_generation_settings_add_stop_tokens_to_that_of_the_tokenizer(
    model: Path, added: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    GenerationConfig(eos_token_id=added).save_pretrained(model)
    assert stop_token_ids(str(model)) == expected


def test_without_generation_settings_the_stop_token_is_that_of_the_tokenizer(model: Path) -> None:
    assert stop_token_ids(str(model)) == (OWN,)


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        pytest.param({"model_type": "llama", "eos_token_id": [OWN, 7]}, 7, id="as_written"),
        pytest.param({"model_type": "llama"}, 2, id="by_default_of_the_class"),
        pytest.param(
            {"model_type": "gemma3", "eos_token_id": None, "text_config": {"eos_token_id": 9}},
            9,
            id="of_the_text_model",
        ),
    ],
)
def test_without_generation_settings_the_models_configuration_adds_stop_tokens_as_in_vllm(
    model: Path, settings: dict[str, Any], added: int
) -> None:
    (model / "config.json").write_text(json.dumps(settings))
    assert stop_token_ids(str(model)) == (OWN, added)
    # vLLM reads a model without generation settings in this way.
    read = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model)).eos_token_id
    assert {OWN, *(read if isinstance(read, list) else [read])} == {OWN, added}
    # Generation settings that name no end are not completed from the configuration.
    GenerationConfig().save_pretrained(model)
    assert stop_token_ids(str(model)) == (OWN,)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([], id="a_list"),
        pytest.param({"model_type": "llama", "hidden_size": 63}, id="refused_by_the_class"),
        pytest.param({"model_type": "gemma3", "text_config": [1]}, id="a_part_is_a_list"),
    ],
)
def test_a_configuration_that_transformers_cannot_read_adds_no_stop_token(
    model: Path, settings: Any
) -> None:
    (model / "config.json").write_text(json.dumps(settings))
    assert stop_token_ids(str(model)) == (OWN,)


def test_a_model_without_a_stop_token_is_refused(model: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model, save_jinja_files=False)
    with pytest.raises(ValueError, match="neither its tokenizer nor its generation settings"):
        stop_token_ids(str(model))


def test_the_renderer_of_a_model_knows_all_its_stop_tokens(model: Path) -> None:
    GenerationConfig(eos_token_id=[OWN, 7]).save_pretrained(model)
    renderer = load_renderer(str(model), template_options={}, history="appended")
    word = build_tokenizer().encode("higher")
    assert renderer.decode(np.array([*word, 7, OWN], dtype=np.int32)) == "higher"
    assert renderer.decode(np.array([*word, 8, OWN], dtype=np.int32)) != "higher"
