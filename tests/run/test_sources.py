"""Tests that a run is resumed only with the tasks, modules and model that it began with."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.config.file import ConfigError, dump_config, load_config, parse_config
from service.config.tree import Config
from service.launch.run_dir import RunDir, check_new
from service.launch.sources import (
    Sources,
    check_sources,
    sources_of,
    user_modules,
    write_sources,
)


def write(directory: Path, answers: list[str]) -> None:
    directory.mkdir(exist_ok=True)
    rows = [{"prompt": f"p{number}", "answer": text} for number, text in enumerate(answers)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "sources_rewards.py").write_text("def score(completion):\n    return 1.0\n")


def config_in(directory: Path, monkeypatch: pytest.MonkeyPatch, **tasks: Any) -> Config:
    """Return the configuration as a command reads it that is started in the directory."""
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", [str(directory), *sys.path])
    sys.modules.pop("sources_rewards", None)
    asked = {
        "environment": "single_turn",
        "options": {"reward": "sources_rewards.py:score"},
        "dataset": "data.jsonl",
        "evaluation_tasks": 0,
        **tasks,
    }
    return parse_config({"model": {"tiny": {}}, "tasks": asked}, source="test")


def test_a_run_of_external_agents_has_no_modules() -> None:
    tasks = {"environment": "session", "evaluation_tasks": 0}
    config = parse_config({"model": {"tiny": {}}, "tasks": tasks}, source="test")
    assert sources_of(config).modules == {}


def test_other_data_and_other_modules_of_the_same_names_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sources.json"
    write(tmp_path / "mine", ["1", "2"])
    began = sources_of(config_in(tmp_path / "mine", monkeypatch))
    write_sources(file, began)
    # The same rows, and a function that was edited in the same file, are accepted.
    write(tmp_path / "mine", ["1", "2"])
    (tmp_path / "mine" / "sources_rewards.py").write_text("def score(completion): return 2.0\n")
    again = sources_of(config_in(tmp_path / "mine", monkeypatch))
    assert again == began and again.modules.keys() == {"sources_rewards"}
    check_sources(file, again)
    monkeypatch.chdir(tmp_path)
    check_sources(file, again)
    write(tmp_path / "mine", ["1", "3"])
    with pytest.raises(ConfigError, match="the tasks are not those that the run began with"):
        check_sources(file, sources_of(config_in(tmp_path / "mine", monkeypatch)))
    write(tmp_path / "other", ["1", "2"])
    other = sources_of(config_in(tmp_path / "other", monkeypatch))
    with pytest.raises(ConfigError, match=r"mine/sources_rewards\.py; start where the run was"):
        check_sources(file, other)
    check_sources(tmp_path / "of-an-older-run.json", other)
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        check_sources(file, other)


def test_a_moved_run_uses_the_rows_and_functions_that_it_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(run: Path) -> tuple[Config, Sources]:
        monkeypatch.chdir(run.parent)
        monkeypatch.setattr(sys, "path", [str(run / "functions"), *sys.path])
        sys.modules.pop("sources_rewards", None)
        config = load_config(run / "config.yaml")
        return config, sources_of(config)

    began, moved = tmp_path / "began" / "run", tmp_path / "elsewhere" / "copy"
    began.mkdir(parents=True)
    write(began / "functions", ["1", "2"])
    (began / "functions" / "data.jsonl").rename(began / "functions" / "rows.jsonl")
    config = config_in(began.parent, monkeypatch, dataset="run/functions/rows.jsonl")
    (began / "config.yaml").write_text(dump_config(config))
    write_sources(began / "sources.json", read(began)[1])
    moved.parent.mkdir()
    shutil.copytree(began, moved)
    for place in (began, moved):
        config, sources = read(place)
        check_sources(place / "sources.json", sources)
        assert config.tasks.dataset == f"{place.name}/functions/rows.jsonl"
        assert sources.modules["sources_rewards"].startswith(str(place))
    # The original path is used as long as a file exists there.
    (moved.parent / "run" / "functions").mkdir(parents=True)
    write(moved.parent / "run" / "functions", ["3"])
    mine = moved.parent / "run" / "functions" / "rows.jsonl"
    mine.with_name("data.jsonl").rename(mine)
    assert load_config(moved / "config.yaml").tasks.dataset == "run/functions/rows.jsonl"
    mine.unlink()
    # An interrupted start is recognised from any directory.
    monkeypatch.chdir(tmp_path)
    check_new(RunDir(path=moved))
    monkeypatch.chdir(moved.parent)
    # The original path is kept if the stored file does not exist.
    (moved / "functions" / "rows.jsonl").unlink()
    assert load_config(moved / "config.yaml").tasks.dataset == "run/functions/rows.jsonl"


@pytest.mark.parametrize(
    "file",
    [
        "/usr/lib/python3/json.py",
        "{here}/.venv/lib/python3.11/site-packages/game.py",
        "{here}/runtime_resources/working_dir_files/_ray_pkg_0123/game.py",
    ],
)
def test_modules_that_are_installed_or_unpacked_by_ray_may_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.chdir(tmp_path)
    began = Sources(tasks="", modules={"game": file.format(here=tmp_path)})
    write_sources(tmp_path / "sources.json", began)
    check_sources(tmp_path / "sources.json", Sources(tasks="", modules={"game": "/elsewhere"}))


def test_the_scripts_of_mcp_servers_must_stay_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(place: Path) -> Sources:
        write(place, ["1"])
        (place / "server.py").touch()
        options = {
            "reward": "sources_rewards.py:score",
            "mcp": {
                "sums": {"command": ["python3", "server.py", "--port", "8000"]},
                "search": {"url": "http://127.0.0.1:1/mcp"},
            },
        }
        config = config_in(place, monkeypatch, environment="tools", options=options)
        return sources_of(config)

    file = tmp_path / "sources.json"
    began = asked(tmp_path / "mine")
    assert began.scripts == {"server.py": str(tmp_path / "mine" / "server.py")}
    write_sources(file, began)
    check_sources(file, began)
    with pytest.raises(ConfigError, match=r"the script server.py is .*other/server.py, the run"):
        check_sources(file, replace(asked(tmp_path / "other"), modules=began.modules))


def test_a_model_whose_chat_template_or_tokenizer_changed_is_refused(
    tmp_path: Path, small_model: str
) -> None:
    def asked(model: Path) -> Sources:
        tree = {"model": {"path": str(model)}, "tasks": {"environment": "guessing"}}
        return sources_of(parse_config(tree, source="test"))

    model, file = tmp_path / "model", tmp_path / "sources.json"
    shutil.copytree(small_model, model)
    began = asked(model)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= began.model.keys()
    write_sources(file, began)
    # The weights are not compared.
    (model / "model.safetensors").write_bytes(b"")
    # Files that do not influence prompts or tokens are not compared either.
    (model / "eval_results.json").write_text("{}")
    check_sources(file, asked(model))
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    with pytest.raises(ConfigError, match=r"model.path: tokenizer_config.json .* restore the file"):
        check_sources(file, asked(model))
    shutil.copy(Path(small_model) / "tokenizer_config.json", model)
    (model / "generation_config.json").unlink(missing_ok=True)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=r"model\.path: (chat_template|generation_config)"):
        check_sources(file, asked(model))
    # A run of an older version has no digests.
    write_sources(file, replace(began, model={}))
    check_sources(file, asked(model))


def test_tasks_generated_from_a_seed_have_no_digest() -> None:
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}}
    config = parse_config(tree, source="test")
    found = sources_of(config)
    assert (found.tasks, found.modules) == ("", {})
    own = replace(config, tasks=replace(config.tasks, environment="my_game:Game"))
    assert user_modules(own) == ["my_game"]


@pytest.mark.parametrize(
    ("environment", "options", "modules"),
    [
        ("tools", {"reward": {"a/one.py:f": 1.0}, "tools": ["two.py:g"]}, ["a.one", "two"]),
        ("single_turn", {"reward": "one.py:f"}, ["one"]),
        ("textarena", {"game": "Chess-v0", "opponent": "games.py:move"}, ["games"]),
        ("textarena", {"game": "Sokoban-v0"}, []),
        ("skyrl_gym", {"id": "envs/sums.py:Sums"}, ["envs.sums"]),
        ("skyrl_gym", {"id": "gsm8k"}, []),
        ("gymnasium", {"id": "my_lake:Lake-v0"}, ["my_lake"]),
    ],
)
def test_modules_named_in_options_belong_to_a_run(
    environment: str, options: dict[str, Any], modules: list[str]
) -> None:
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}}
    config = parse_config(tree, source="test")
    tasks = replace(config.tasks, environment=environment, options=options)
    assert user_modules(replace(config, tasks=tasks)) == modules


def test_leftovers_of_a_killed_start_do_not_prevent_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "run" / ".model.ev1x1jhj").mkdir(parents=True)
    check_new(RunDir(path=tmp_path / "run"))
