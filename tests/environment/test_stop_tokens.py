"""Which tokens end a turn, as the model's own files say."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import GenerationConfig

from actors.environment.rendering import load_renderer
from actors.environment.tokenizer import stop_token_ids
from actors.trainer.tiny.tokenizer import build_tokenizer

# The tiny tokenizer's own.
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
def test_the_generation_settings_add_to_the_tokenizers_own(
    model: Path, added: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    GenerationConfig(eos_token_id=added).save_pretrained(model)
    assert stop_token_ids(str(model)) == expected


def test_a_model_without_generation_settings_ends_with_its_tokenizers_own(model: Path) -> None:
    assert stop_token_ids(str(model)) == (OWN,)


def test_a_model_that_names_none_is_refused(model: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model, save_jinja_files=False)
    with pytest.raises(ValueError, match="neither its tokenizer nor its generation settings"):
        stop_token_ids(str(model))


def test_a_models_renderer_knows_all_that_ends_a_turn(model: Path) -> None:
    GenerationConfig(eos_token_id=[OWN, 7]).save_pretrained(model)
    renderer = load_renderer(str(model), template_options={}, history="appended")
    word = build_tokenizer().encode("higher")
    assert renderer.decode(np.array([*word, 7, OWN], dtype=np.int32)) == "higher"
    assert renderer.decode(np.array([*word, 8, OWN], dtype=np.int32)) != "higher"
