"""Tests of code and commands on pages of docs/, up to the score of the first answer."""

from __future__ import annotations

import argparse
import ast
import asyncio
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from _pytest.mark.expression import Expression

from actors.environment.protocol import Action, ToolCall
from actors.environment.registry import resolve
from actors.types import Task
from deploy.reference import configuration_page
from service.cli.commands.configuration import run_configuration
from service.config.file import load_config
from service.config.tasks import first_observation, open_tasks
from service.config.tree import Config

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from.md"
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef
# The commands of the TRL and verifiers examples; test_coming_from.py tests the other examples.
COMMANDS = re.findall(
    r"^\$ cd (\S+)\n\$ rayloom train (--dataset \S+ --reward \S+(?: --tools \S+)?)$",
    PAGE.read_text(),
    re.MULTILINE,
)


def options_of(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--dataset", "--reward", "--tools"):
        parser.add_argument(name)
    return parser.parse_args(shlex.split(line))


@pytest.mark.parametrize(("place", "line"), COMMANDS)
def test_a_ported_example_gives_a_right_answer_a_higher_score_than_a_wrong_one(
    place: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / place)
    # The command line has the directory that it is started in on its path.
    monkeypatch.syspath_prepend(str(ROOT / place))
    monkeypatch.delitem(sys.modules, "my", raising=False)
    asked = options_of(line)
    config = run_configuration(
        None,
        dataset=asked.dataset,
        rewards=[asked.reward],
        tools=[asked.tools] if asked.tools else [],
        model=None,
        overrides=[],
    )
    begun = first_observation(config)
    assert [tool.name for tool in begun.tools] == (["calculator"] if asked.tools else [])
    task = open_tasks(config).task(0)
    right = asyncio.run(reward_of(config, task, str(task.data["answer"])))
    wrong = asyncio.run(reward_of(config, task, "none"))
    assert right >= 1 > wrong
    monkeypatch.delitem(sys.modules, "my")


async def reward_of(config: Config, task: Task, answer: str) -> float:
    """Play the task with an answer, after a call of the calculator if there is one."""
    environment = resolve(str(config.tasks.environment), config.tasks.options)()
    if (await environment.reset(task)).tools:
        call = ToolCall(name="calculator", arguments={"expression": "1+2"}, id="c")
        told = await environment.step(Action(text="", calls=(call,)))
        assert [message.content for message in told.messages] == ["3"]
    result = await environment.step(Action(text=answer))
    await environment.close()
    return result.reward


def test_the_settings_in_the_comparison_with_other_libraries_exist() -> None:
    rows = re.findall(r"^\| `.+? \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    words = {word for row in rows for word in re.findall(r"`(\w+(?:\.\w+)+)[`:]", row)}
    sections = {field.name for field in fields(Config)}
    named = {word for word in words if word.partition(".")[0] in sections}
    known = re.findall(r"^\| `([\w.]+)` \|", configuration_page(), re.MULTILINE)
    free = ("tasks.options.", "rollouts.outcomes.")
    assert len(named) > 30 and len(COMMANDS) == 3
    assert {word for word in named if not word.startswith(free)} <= {*known}


def test_the_environment_on_the_page_can_be_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    code = re.search(r"^```python\n(# my_game\.py.+?)^```$", page, re.MULTILINE | re.DOTALL)
    command = re.search(r"^\$ \S+rayloom train (\S+) (--set .+)$", page, re.MULTILINE)
    assert code is not None and command is not None
    (tmp_path / "my_game.py").write_text(code[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = [each for each in shlex.split(command[2]) if each != "--set"]
    config = load_config(ROOT / command[1], overrides)
    task = open_tasks(config).task(0)
    said = first_observation(config).messages[0].content
    assert said == f"Is {task.seed} even or odd?"
    right, wrong = ("even", "odd") if task.seed % 2 == 0 else ("odd", "even")
    assert asyncio.run(reward_of(config, task, right)) == 1.0
    assert asyncio.run(reward_of(config, task, wrong)) == 0.0


def test_the_tutorials_game_equals_its_example_and_plays_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ROOT / "docs" / "examples" / "sticks"
    page = (ROOT / "docs" / "environment-tutorial.md").read_text()
    shown, by_hand = re.findall(r"^```python\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    assert (place / "sticks.py").read_text().endswith(f"\n\n{shown}")
    (tmp_path / "sticks.py").write_text(shown)
    played = subprocess.run(
        [sys.executable, "-c", by_hand],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"```\n{played.stdout}```\n" in page
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    assert "left." in first_observation(load_config(place / "sticks.yaml")).messages[1].content


def test_each_block_of_yaml_on_a_page_can_be_read() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    block = re.compile(r"^ *```ya?ml\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    read = 0
    for page in pages:
        for found in block.findall(page.read_text()):
            try:
                list(yaml.safe_load_all(textwrap.dedent(found)))
            except yaml.YAMLError as error:
                pytest.fail(f"{page.name}: {error}\n{found}")
            read += 1
    assert read > 30


def test_each_expression_of_a_page_selects_a_test() -> None:
    named = re.compile(r"`(?:pytest )?(?:tests/)?([\w/]+\.py)[^`]*? -k (\"[^\"]+\"|\w+)")
    found = [
        (page.name, file, words.strip('"'))
        for page in sorted((ROOT / "docs").glob("*.md"))
        for file, words in named.findall(page.read_text())
    ]
    assert found
    assert [each for each in found if not selects_a_test(*each[1:])] == []


def test_each_test_that_a_page_names_exists() -> None:
    defined = [
        name
        for file in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
    ]
    named = {
        (page.name, name)
        for page in sorted((ROOT / "docs").glob("*.md"))
        for name in re.findall(r"`(test_\w+…?)`", page.read_text())
    }
    assert named
    gone = [
        (page, name)
        for page, name in sorted(named)
        if not any(
            each.startswith(name[:-1]) if name.endswith("…") else each == name for each in defined
        )
    ]
    assert gone == []


def selects_a_test(file: str, words: str) -> bool:
    """Return whether `pytest FILE -k WORDS` selects a test, without importing the file."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    names = [node.name for node in ast.walk(tree) if isinstance(node, DEFINITIONS)]
    tests = [name for name in names if name.startswith("test_")]
    matches = Expression.compile(words).evaluate
    return any(matches(lambda word, name=name: word in name) for name in tests)
