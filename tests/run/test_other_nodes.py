"""Tests of the files that are sent to other nodes, and of the checks of these nodes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from service.config.file import ConfigError, parse_config
from service.config.sections import ServiceSettings
from service.config.tree import Config
from service.launch.cluster import check_places, seen_from_afar, shipped_files
from service.launch.other_nodes import (
    SharedPath,
    check_api_place,
    check_other_nodes,
    digest_of,
    find_unshared,
)
from service.launch.placement import ROLES
from service.launch.run_dir import RunDir


def config_with(**sections: Any) -> Config:
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}, **sections}
    return parse_config(tree, source="test")


def shared(directory: Path, witness: Path, **named: Any) -> SharedPath:
    return SharedPath(
        key="run directory",
        path=directory,
        witness=witness,
        digest=named.pop("digest", digest_of(witness)),
        roles=frozenset(ROLES),
        **named,
    )


def test_a_path_with_the_same_content_on_both_nodes_passes(tmp_path: Path) -> None:
    witness = tmp_path / "seen"
    witness.write_text("a")
    assert find_unshared([shared(tmp_path, witness, is_written=True)]) is None
    assert list(tmp_path.iterdir()) == [witness]


@pytest.mark.parametrize("content", [None, "of another run"])
def test_a_directory_that_differs_between_nodes_is_refused(
    tmp_path: Path, content: str | None
) -> None:
    witness = tmp_path / "seen"
    witness.write_text("a")
    there = digest_of(witness)
    if content is None:
        witness.unlink()
    else:
        witness.write_text(content)
    fault = find_unshared([shared(tmp_path, witness, digest=there)])
    assert fault is not None
    assert fault.startswith(
        f"run directory: {tmp_path} differs from this path on the command's node"
    )
    assert "mount at the same place" in fault


def test_a_shared_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    witness = tmp_path / "seen"
    witness.write_text("a")
    fault = find_unshared([shared(tmp_path / "gone", witness, is_written=True)])
    assert fault is not None and "cannot be written (No such file or directory)" in fault
    assert find_unshared([shared(tmp_path / "gone", witness)]) is None


def test_no_files_are_sent_for_an_installed_environment(tmp_path: Path) -> None:
    assert shipped_files(config_with(), cwd=tmp_path) == {}
    installed = config_with(tasks={"environment": "yaml.nodes:Node"})
    assert shipped_files(installed, cwd=tmp_path) == {}


def test_a_users_module_is_sent_with_its_directory_or_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_games"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "own_game.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name, module in (("own_games", package), ("own_game", tmp_path / "own_game.py")):
        config = config_with(tasks={"environment": f"{name}:Game"})
        assert shipped_files(config, cwd=tmp_path)["working_dir"] == str(tmp_path)
        assert shipped_files(config, cwd=tmp_path / "other") == {"py_modules": [str(module)]}


@pytest.mark.parametrize(
    ("environment", "option"),
    [("retrieval_qa", "corpus"), ("code_search", "root"), ("sql", "root")],
)
def test_data_of_options_are_sent_if_their_path_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)

    def shipped(path: str, cwd: Path) -> Any:
        config = config_with(tasks={"environment": environment, "options": {option: path}})
        return shipped_files(config, cwd=cwd).get("working_dir")

    assert shipped("data", tmp_path) == str(tmp_path)
    assert shipped("../data", tmp_path) is None
    # An absolute path is taken to be the same on every node, as on a shared file system.
    assert shipped(str(tmp_path / "data"), tmp_path) is None


def test_a_task_file_is_sent_if_it_is_in_the_working_directory(tmp_path: Path) -> None:
    inside = config_with(tasks={"environment": "guessing", "file": str(tmp_path / "t.jsonl")})
    assert shipped_files(inside, cwd=tmp_path)["working_dir"] == str(tmp_path)
    assert seen_from_afar(inside, cwd=tmp_path).tasks.file == Path("t.jsonl")
    evaluated = config_with(evaluation={"sets": {"a": {"file": str(tmp_path / "a.jsonl")}}})
    assert shipped_files(evaluated, cwd=tmp_path)["working_dir"] == str(tmp_path)
    assert seen_from_afar(evaluated, cwd=tmp_path).evaluation.sets["a"].file == Path("a.jsonl")
    other = tmp_path / "other"
    assert shipped_files(inside, cwd=other) == {}
    assert seen_from_afar(inside, cwd=other).tasks.file == tmp_path / "t.jsonl"


def test_a_reference_in_the_working_directory_gets_an_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    loss = {"kl": {"coefficient": 0.1, "estimator": "k3"}}
    for name, seen in (("base", str(tmp_path / "base")), ("hub/name", "hub/name")):
        config = config_with(algorithm={"reference": name, "loss": loss})
        assert seen_from_afar(config, cwd=tmp_path).algorithm.reference == seen


def test_a_cluster_without_room_is_refused_with_the_part_that_does_not_fit(cluster: None) -> None:
    check_places(config_with())
    with pytest.raises(ConfigError, match=r"no room for the run: trainer rank \d+ of 50 asks for"):
        check_places(config_with(trainer={"num_ranks": 50}))


def test_a_cluster_of_a_single_node_is_not_checked(cluster: None, tmp_path: Path) -> None:
    # The directory does not exist, so that a check would fail.
    check_other_nodes(config_with(), RunDir(path=tmp_path / "run"), model="hub/name")
    check_api_place(ServiceSettings())
