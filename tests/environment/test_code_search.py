"""Tests of the code search environment: grading, malformed turns, whole episodes, its tasks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from worlds.builders.code_repository import FILES, git_repository, write_repository
from worlds.builders.episode_builders import ASSIGNMENT, SETTINGS, FakePolicy, renderer, reply

from actors.algorithm import RewardSettings
from actors.environment.plugins.code_search.environment import (
    BAD_ANSWER,
    NO_CALL,
    NO_CALLS_LEFT,
    CodeSearchEnvironment,
    CodeSearchOptions,
    canonical_path,
    grade_files,
)
from actors.environment.plugins.code_search.from_git import QuestionSource
from actors.environment.plugins.code_search.tools import ANSWER, SEARCH_TOOLS, _Pool
from actors.environment.protocol import Action, Role, StepResult
from actors.environment.registry import BadEnvironmentOptions, resolve
from actors.environment.settings import RolloutSettings, rollout_settings
from actors.environment.task_data import data_schema_of
from actors.environment.tasks import read_tasks
from actors.environment.tool_calls import parse_tool_calls
from actors.environment.turn_loop import play_episode
from actors.merge.groups import classify
from actors.types import Outcome, Task
from service.cli.artifacts import write_code_search
from service.config.file import ConfigError

TRUTH = ["shop/cart.py", "tests/test_cart.py"]
DATA = {"question": "Where is the cart?", "repository": "shop", "files": TRUTH, "extra": 1}


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[object]:
    """Return a function that starts an environment with options on the data of a task."""
    write_repository(tmp_path / "shop")
    made = []

    async def started(data: dict[str, object] = DATA, **options: object) -> CodeSearchEnvironment:
        environment = CodeSearchEnvironment(CodeSearchOptions(root=str(tmp_path), **options))  # type: ignore[arg-type]
        made.append(environment)
        await environment.reset(Task(task_id="t", environment="code_search", seed=0, data=data))
        return environment

    yield started
    for environment in made:
        await environment.close()
    assert _Pool.pids() == []


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def step(environment: CodeSearchEnvironment, text: str) -> StepResult:
    calls = parse_tool_calls(text, (*SEARCH_TOOLS, ANSWER))
    return await environment.step(Action(text=text, calls=calls))


def test_grades_are_those_computed_by_hand() -> None:
    values: list[tuple[list[str], list[str], tuple[float, float, float]]] = [
        (["a", "b"], ["a", "b"], (1, 1, 1)),
        (["a"], ["a", "b"], (1, 1 / 2, 2 / 3)),
        (["a", "x", "y"], ["a", "b"], (1 / 3, 1 / 2, 2 / 5)),
        # A file counts once, however its path is spelled.
        (["./a", "a", "a"], ["a"], (1, 1, 1)),
        (["d//e", "d/./e"], ["./d/e"], (1, 1, 1)),
        # Each of these paths names another file than the true one, or no file.
        (["A"], ["a"], (0, 0, 0)),
        (["d", "d/"], ["d/e"], (0, 0, 0)),
        (["/a", "../a", "b/../a", "a/", "a ", ""], ["a"], (0, 0, 0)),
        (["a", "gone"], ["a"], (1 / 2, 1, 2 / 3)),
        # An empty answer or an empty truth gives 0, never 1.
        ([], ["a"], (0, 0, 0)),
        ([], [], (0, 0, 0)),
        (["a"], [], (0, 0, 0)),
        ([""], [], (0, 0, 0)),
    ]
    for answered, truth, expected in values:
        grade = grade_files(answered, truth)
        found = (grade["precision"], grade["recall"], grade["f1"])
        assert found == pytest.approx(expected), (answered, truth)


PATHS = st.lists(st.sampled_from(["a", "b", "./a", "c/d", "c//d", "c", "/a", "..", ""]), max_size=6)


@given(answered=PATHS, truth=st.lists(st.sampled_from(["a", "b", "c/d"]), max_size=3))
def test_only_the_true_files_get_the_grade_1(answered: list[str], truth: list[str]) -> None:
    grade = grade_files(answered, truth)
    same = {canonical_path(path) for path in answered} == set(truth)
    assert (grade["f1"] == 1) == (same and bool(truth))
    assert 0 <= min(grade["precision"], grade["recall"]) <= grade["f1"] <= 1
    assert grade == grade_files([*answered, *answered][::-1], truth)


async def test_a_question_is_searched_answered_and_graded(start) -> None:  # type: ignore[no-untyped-def]
    environment = await start()
    found = await step(environment, call("grep", pattern="Cart") + call("list_files"))
    assert [message.role for message in found.messages] == [Role.TOOL, Role.TOOL]
    assert "shop/cart.py:4" in found.messages[0].content and not found.reward
    absent = await step(environment, call("read_file", path="nothing"))
    assert absent.messages[0].content == "error: There is no such path." and not absent.is_malformed
    done = await step(environment, call("answer", files=["./shop/cart.py", "README.md"]))
    assert done.terminated and done.reward == pytest.approx(0.5) and not done.is_malformed
    parts = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "num_calls": 3.0}
    assert done.reward_components == parts and done.answer == "README.md\nshop/cart.py"


async def test_an_empty_truth_is_never_rewarded(start) -> None:  # type: ignore[no-untyped-def]
    for files in ([], ["README.md"]):
        environment = await start({**DATA, "files": []})
        done = await step(environment, call("answer", files=files))
        assert done.terminated and done.reward == 0.0 and not done.is_malformed


async def test_malformed_turns_are_penalised_and_only_several_in_a_row_end_the_task(start) -> None:  # type: ignore[no-untyped-def]
    malformed = {
        "The cart is in shop/cart.py.": NO_CALL,
        '```json\n["shop/cart.py"]\n```': NO_CALL,
        "": NO_CALL,
        "<tool_call>{oops}</tool_call>": "error: The tool call is not valid JSON.",
        call("rm", path="x"): "error: No such tool.",
        call("answer", files="shop/cart.py"): "error: Argument files must be of type array.",
        call("answer", files=[1]): f"error: {BAD_ANSWER}",
        call("answer", files=["x"] * 65): f"error: {BAD_ANSWER}",
        call("answer", files=["x" * 2000]): f"error: {BAD_ANSWER}",
        call("answer", files=[]) + call("answer", files=TRUTH): "error: Call answer once",
        call("grep", pattern="x") + call("answer", files=TRUTH): "error: Call answer once",
        call("grep", pattern="x") * 9: "error: At most 8 calls",
        call("grep", pattern="("): "error: The pattern is not a regular expression",
        call("read_file", path="/etc/passwd"): "error: Paths are relative",
        call("grep", pattern="Cart") + "<tool_call>{": "shop/cart.py",
    }
    environment = await start(max_malformed=1, malformed_penalty=0.25)
    for text, shown in malformed.items():
        result = await step(environment, text)
        assert result.is_malformed and not result.terminated, text
        assert result.messages[0].content.startswith(shown), (text, result.messages)
        assert result.reward == -0.25 and result.reward_components == {"malformed": -0.25}
        assert not (await step(environment, call("list_files"))).is_malformed
    assert not (await step(environment, "x")).terminated
    last = await step(environment, "x")
    assert last.terminated and last.ended_by_malformed and last.messages == () and last.reward < 0


async def test_calls_beyond_the_limit_are_answered_with_an_error(start) -> None:  # type: ignore[no-untyped-def]
    environment = await start(max_calls=2)
    for expected in (False, False, True, True):
        found = await step(environment, call("list_files"))
        assert (found.messages[0].content == f"error: {NO_CALLS_LEFT}") == expected
        assert not found.is_malformed
    done = await step(environment, call("answer", files=TRUTH))
    assert done.reward == 1.0 and done.reward_components["num_calls"] == 2.0


async def test_more_calls_in_a_turn_than_the_run_allows_are_malformed(start) -> None:  # type: ignore[no-untyped-def]
    environment = await start()
    assert not (await step(environment, call("list_files") * 8)).is_malformed
    rollout_settings.set(RolloutSettings(max_calls_per_turn=2))
    result = await step(environment, call("list_files") * 3)
    assert result.is_malformed and "2" in result.messages[0].content


async def test_a_task_with_wrong_data_is_refused_with_the_reason(start) -> None:  # type: ignore[no-untyped-def]
    for change, word in (
        ({"question": ""}, "data.question"),
        ({"question": None}, "data.question"),
        ({"repository": "../shop"}, "without .."),
        ({"repository": "none"}, "not found in"),
        ({"files": "shop/cart.py"}, "data.files: got a text"),
        ({"files": None}, "data.files: got null"),
        ({"files": ["/etc/passwd"]}, "not the path of a file"),
        ({"files": ["gone.py", "shop"]}, "are not in 'shop'"),
    ):
        with pytest.raises(ValueError, match=word):
            await start({**DATA, **change})


def test_options_outside_their_bounds_are_refused() -> None:
    make = resolve("code_search", {"root": "."})
    assert isinstance(make(), CodeSearchEnvironment)
    wrong: list[dict[str, object]] = [
        {}, {"root": ""}, {"root": ".", "max_calls": 0}, {"root": ".", "malformed_penalty": -1},
        {"root": ".", "call_limit_s": 0}, {"root": ".", "max_malformed": -1},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(BadEnvironmentOptions, match=r"options\..*(expected|required)"):
            resolve("code_search", options)


class Generous(CodeSearchEnvironment):
    """A defective environment that gives a reward for malformed turns."""

    async def step(self, action: Action) -> StepResult:
        return replace(await super().step(action), reward=1.0)


@pytest.mark.parametrize("kind", [CodeSearchEnvironment, Generous])
async def test_a_reward_for_a_malformed_end_is_reported(
    tmp_path: Path, kind: type[CodeSearchEnvironment]
) -> None:
    write_repository(tmp_path / "shop")
    task = Task(task_id="t", environment="code_search", seed=0, data=DATA)
    trajectory = await play_episode(
        replace(ASSIGNMENT, task=task),
        make_environment=lambda: kind(CodeSearchOptions(root=str(tmp_path), max_malformed=1)),
        policy=FakePolicy(reply(call("list_files") + "<|im_end|>"), reply("no call<|im_end|>")),
        renderer=renderer(),
        settings=replace(SETTINGS, max_tokens_per_turn=200),
        max_context_tokens=4_000,
    )
    assert trajectory.outcome is Outcome.MALFORMED_TOOL_CALL and trajectory.num_malformed_turns == 2
    member = classify(trajectory, policies={}, reward=RewardSettings())
    assert member.is_malformed_rewarded == (kind is Generous)
    assert _Pool.pids() == []


def test_questions_are_made_of_the_commits_and_docstrings_of_a_repository(tmp_path: Path) -> None:
    repository = git_repository(
        tmp_path / "repository",
        ("shop: add a cart", {**FILES, "old.py": "", "CHANGELOG.md": "1\n"}),
        ("prices: tax what is sold", {"shop/prices.py": "TAX = 1\n", "CHANGELOG.md": "2\n"}),
        ("rename cart.py for good", {"shop/cart.py": '"""What is chosen by a customer."""\n'}),
        ("old: fall out of use", {"old.py": "x = 1\n"}),
        ("drop it", {"old.py": None}),
        ("Revert all of these changes", {"README.md": "# Shop 2\n"}),
        ("tests: hold the cart's total", {"tests/test_cart.py": "'A.'\n", "README.md": "# 3\n"}),
        ("tests: hold the cart's total", {"tests/test_cart.py": '"""One of a kind.\n\nTwo."""\n'}),
        ("an empty commit of ours", {}),
    )
    out = tmp_path / "sets" / "own.jsonl"

    def written(source: QuestionSource, **options: int) -> dict[str, list[str]]:
        limits = {"count": 10, "max_files": 2, **options}
        write_code_search(repository, out, source=source, **limits)
        tasks = read_tasks(out)
        assert {task.data["repository"] for task in tasks} == {"own.tar.gz"}
        return {task.data["question"]: task.data["files"] for task in tasks}

    commits = {
        "tests: hold the cart's total": ["tests/test_cart.py"],
        "prices: tax what is sold": ["shop/prices.py"],
    }
    assert written("commits") == commits
    assert len(written("commits", count=1)) == 1
    assert written("docstrings") == {
        "What is chosen by a customer.": ["shop/cart.py"],
        "One of a kind.": ["tests/test_cart.py"],
    }
    for place, word in ((tmp_path / "sets", "git archive: "), (tmp_path / "none", "git archive: ")):
        with pytest.raises(ConfigError, match=word):
            write_code_search(place, out, source="commits", count=1, max_files=1)
    empty = git_repository(tmp_path / "empty", ("first", {"a": "x"}))
    with pytest.raises(ConfigError, match="got no commits that make a question"):
        write_code_search(empty, out, source="commits", count=1, max_files=1)


async def test_a_written_data_set_can_be_played(tmp_path: Path) -> None:
    repository = git_repository(tmp_path / "repository", ("shop: add a cart", FILES))
    out = tmp_path / "own.parquet"
    write_code_search(repository, out, source="commits", count=1, max_files=len(FILES))
    (task,) = read_tasks(out)
    environment = CodeSearchEnvironment(CodeSearchOptions(root=str(tmp_path)))
    await environment.reset(task)
    done = await step(environment, call("answer", files=sorted(FILES)))
    await environment.close()
    assert done.reward == 1.0


def test_the_schema_of_the_data_accepts_only_data_that_can_be_played() -> None:
    validator = Draft202012Validator(data_schema_of(CodeSearchEnvironment))
    assert validator.is_valid(DATA) and validator.is_valid({**DATA, "files": []})
    for change in ({"question": ""}, {"files": "shop/cart.py"}, {"files": [1]}, {"repository": 3}):
        assert not validator.is_valid({**DATA, **change})
    assert not validator.is_valid({"question": "Where?"})
