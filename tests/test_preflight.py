"""What is refused before anything starts, because this machine or these files cannot run it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from actors.trainer.tiny_model import build_tiny_model
from service import run_dir
from service.config import preflight
from service.config.file import ConfigError, parse_config
from service.config.tree import Config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny_model(directory, warmup_steps=0)
    return str(directory)


def config_with(model_path: str, **sections: Any) -> Config:
    tree = {"model": {"path": model_path}, "tasks": {"environment": "guessing"}, **sections}
    return parse_config(tree, source="test")


def test_a_sound_configuration_passes(model: str) -> None:
    preflight.check_before_start(config_with(model), model_path=model)


@pytest.mark.parametrize("path", ["/no/such/model", "./none", "none"])
def test_a_model_that_is_not_there_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*is not there.*rayloom model tiny"):
        preflight.check_model_source(path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.json, \*\.safetensors"):
        preflight.check_model_source(str(tmp_path))


def test_a_context_beyond_the_model_is_refused(model: str) -> None:
    config = config_with(model, model={"path": model, "max_context_tokens": 10**6})
    with pytest.raises(ConfigError, match=r"max_context_tokens is 1000000.*2048 positions"):
        preflight.check_before_start(config, model_path=model)


def test_a_prompt_longer_than_the_context_is_refused(model: str) -> None:
    config = config_with(
        model,
        model={"path": model, "max_context_tokens": 32},
        # The tool's schema stands in the prompt.
        tasks={"environment": "calculator"},
        rollouts={"max_tokens_per_turn": 8},
    )
    with pytest.raises(ConfigError, match=r"first prompt has \d+ tokens.*raise that"):
        preflight.check_before_start(config, model_path=model)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({"environment": "gessing"}, "guessing"),
        ({"environment": "guessing", "options": {"maximum": 3}}, "maximum"),
        ({"environment": "no.such.module:Environment"}, "no.such.module"),
        ({"environment": "guessing", "file": "/no/tasks.jsonl"}, "tasks.file"),
        ({"environment": "guessing", "file": "tasks.csv"}, "jsonl"),
    ],
)
def test_an_environment_or_task_file_that_cannot_be_used_is_refused(
    model: str, tasks: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        preflight.check_before_start(config_with(model, tasks=tasks), model_path=model)


def test_tasks_of_another_environment_are_refused(model: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task_id": "a", "environment": "calculator", "seed": 1}\n' * 1)
    tasks = {"environment": "guessing", "file": str(file), "evaluation_tasks": 0}
    with pytest.raises(ConfigError, match="'calculator'"):
        preflight.check_before_start(config_with(model, tasks=tasks), model_path=model)


def test_more_memory_than_the_machine_has_is_refused(model: str) -> None:
    config = config_with(model, inference={"kv_cache_gib": 1e6})
    with pytest.raises(ConfigError, match=r"kv_cache_gib.*GiB.*lower them"):
        preflight.check_before_start(config, model_path=model)


def test_gpus_that_are_not_there_are_refused(model: str) -> None:
    config = config_with(model, inference={"gpus_per_replica": 512.0})
    with pytest.raises(ConfigError, match=r"asks for 512 GPUs.*--address"):
        preflight.check_before_start(config, model_path=model)


def test_a_metrics_port_in_use_is_refused(model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"metrics\.port.*or 0 for any free one"):
            preflight.check_before_start(
                config_with(model, metrics={"port": port}), model_path=model
            )


def test_a_run_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"is not empty.*--resume"):
        run_dir.create(run_dir.RunDir(path=tmp_path))


def test_resuming_where_no_run_lies_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run lies there"):
        run_dir.check_resumable(run_dir.RunDir(path=tmp_path), config_with(model))


@pytest.mark.parametrize(
    ("sections", "words"),
    [({"tasks": {"environment": "calculator"}}, "section tasks"), ({"run": {"seed": 1}}, "seed")],
)
def test_resuming_with_another_task_order_is_refused(
    model: str, tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    place = run_dir.RunDir(path=tmp_path)
    run_dir.write_config(place, config_with(model))
    place.database_file.touch()
    with pytest.raises(ConfigError, match=words):
        run_dir.check_resumable(place, config_with(model, **sections))
    run_dir.check_resumable(place, config_with(model, run={"steps": 500}))
