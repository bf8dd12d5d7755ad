"""Tests of the configuration of `rayloom sft` and of what it refuses before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rayloom
from service.cli.commands.configuration import sft_configuration
from service.cli.main import app
from service.config.file import ConfigError, dump_config, load_sft, parse_sft

TREE: dict[str, Any] = {"model": {"tiny": {}}, "sft": {"dataset": "chats.jsonl"}}


def test_a_configuration_is_the_same_after_it_is_written_and_read(tmp_path: Path) -> None:
    config = parse_sft(TREE, source="test", overrides=["sft.epochs=3", "trainer.num_ranks=1"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_sft(tmp_path / "config.yaml") == config
    assert (config.sft.epochs, config.trainer.num_ranks) == (3, 1)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("run.steps=3", "run: unknown key; expected one of model, trainer, sft"),
        ("sft.epoch=3", "sft.epoch: unknown key; did you mean 'epochs'"),
        ("sft.long_chats=cut", "sft.long_chats: got 'cut'"),
        ("model.path=here", "expected exactly one of model.path and model.tiny; got both"),
        ("trainer.schedule.kind=wsd", "trainer.schedule.decay_updates is null with kind wsd"),
        ("trainer.device=cuda", "trainer.device is cuda with trainer.gpus_per_rank 0"),
    ],
)
def test_a_wrong_setting_is_refused(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_sft(TREE, source="test", overrides=[override])


def test_options_make_a_configuration() -> None:
    config = sft_configuration(None, dataset="a.jsonl", model="007", overrides=["sft.seed=4"])
    assert (config.sft.dataset, config.model.path, config.sft.seed) == ("a.jsonl", "007", 4)
    with pytest.raises(ConfigError, match="got no data set, expected --dataset"):
        sft_configuration(None, dataset=None, model="007", overrides=[])


def test_a_bad_row_or_a_directory_with_other_files_is_refused_without_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "higher"}]}) + "\n"
    )
    asked = ["sft", "--model", model, "--dataset", "chats.jsonl", "--run-dir", "warm"]
    refused = CliRunner().invoke(app, asked).exception
    assert isinstance(refused, ConfigError)
    assert "row 1: messages: got no reply of the assistant to train" in str(refused)
    assert not Path("warm").exists()
    Path("mine").mkdir()
    Path("mine", "notes.txt").write_text("mine")
    refused = CliRunner().invoke(app, [*asked[:-1], "mine"]).exception
    assert "is not empty (it holds notes.txt)" in str(refused)
    refused = CliRunner().invoke(app, ["sft", "--resume", "mine"]).exception
    assert "there is no supervised training" in str(refused)


def test_the_python_api_refuses_what_the_command_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": "user", "content": "higher"}]}]
    with pytest.raises(rayloom.ConfigError, match=r"sft\.epochz: unknown key"):
        rayloom.sft(rows, sft={"epochz": 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "named"), [(["train", "--resume"], "--resume"), (["move"], "move")]
)
def test_commands_for_runs_refuse_the_directory_of_a_supervised_training(
    command: list[str], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(parse_sft(TREE, source="test")))
    (tmp_path / "chats.json").write_text('{"digest": "0", "num_chats": 1}')
    done = CliRunner().invoke(app, [*command, str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    said = str(done.exception)
    assert f"{named} {tmp_path}: got the directory of a supervised training" in said
    assert f"`rayloom sft --resume {tmp_path}`" in said
