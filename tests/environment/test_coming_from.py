"""Tests of each row of docs/coming-from.md on reward functions: what works, and what differs.

The functions are loaded unchanged; their signatures are those of the documents of TRL 1.16 and of
verifiers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds.checks.missing_tools import need_package
from worlds.runs.run_driver import ROOT

from actors.environment.protocol import Action, RewardError, StepResult
from actors.environment.registry import BadEnvironmentOptions, resolve
from actors.environment.trainer_arguments import TrainerState, trainer_state
from actors.types import Task

MODULE = """
import asyncio
import re

def by_length(completions, **kwargs):
    return [float(len(text)) for text in completions]

def by_format(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(r"^<think>.*?</think><answer>.*?</answer>$", text) for text in contents]
    return [1.0 if match else 0.0 for match in matches]

def boxed(completions, ground_truth, **kwargs):
    found = [re.search(r"\\\\boxed\\{(.*?)\\}", text) for text in completions]
    read = [match.group(1) if match else "" for match in found]
    return [1.0 if text == truth else 0.0 for text, truth in zip(read, ground_truth)]

def of_math(prompts, completions, task, **kwargs):
    return [1.0 if each == "math" else None for each in task]

def of_code(prompts, completions, task, **kwargs):
    return [-1.0 if each == "code" else None for each in task]

async def slow(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0 if text else 0.0 for text in completions]

def later(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step >= trainer_state.max_steps / 2) for _ in completions]

def by_epoch(completions, trainer_state):
    return [trainer_state.epoch for _ in completions]

def logs(completions, answer, log_metric=None, log_extra=None, **kwargs):
    right = [text == wanted for text, wanted in zip(completions, answer)]
    log_metric("accuracy", sum(right) / len(right))
    log_metric("accuracy", 0.0)
    log_metric("unknown", float("nan"))
    log_extra("wanted", answer)
    return [2.0] * len(completions)

def logs_in_kwargs(completions, **kwargs):
    kwargs["log_extra"]("start", [text[:1] for text in completions])
    return [0.0] * len(completions)

def one_answer(completion, log_metric, log_extra, trainer_state, **columns):
    assert columns == {"prompt": "?", "answer": "4"}
    log_metric("steps", trainer_state.max_steps)
    log_extra("read", {"as": completion})
    return 1.0

def by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def nothing(completions, **kwargs):
    return [None for _ in completions]

async def verifiers(completion, answer) -> float:
    return 1.0 if completion == answer else 0.0

async def verifiers_chat(completion, answer) -> float:
    return 1.0 if completion[-1]["content"] == answer else 0.0

class Penalty:
    __name__ = "penalty"

    def __call__(self, completions, **kwargs):
        return [-1.0 for _ in completions]

penalty = Penalty()
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("coming_from")
    (directory / "functions_from_trl.py").write_text(MODULE)
    sys.path.insert(0, str(directory))
    yield
    sys.path.remove(str(directory))


async def scored(*names: str, text: str = "4", **data: Any) -> StepResult:
    reward = [f"functions_from_trl.py:{name}" for name in names]
    environment = resolve("single_turn", {"reward": reward})()
    columns = {"prompt": "?", "answer": "4", **data}
    await environment.reset(Task(task_id="t", environment="single_turn", seed=0, data=columns))
    return await environment.step(Action(text=text))


CHAT = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("names", "text", "data", "reward"),
    [
        (["by_length"], "four", {}, 4.0),
        (["by_format"], "<think>so</think><answer>4</answer>", {"prompt": CHAT}, 1.0),
        (["boxed"], "It is \\boxed{2}.", {"ground_truth": "2"}, 1.0),
        (["of_math", "of_code"], "x", {"task": "math"}, 1.0),
        (["of_math", "of_code"], "x", {"task": "code"}, -1.0),
        (["slow"], "x", {}, 1.0),
        (["penalty"], "x", {}, -1.0),
        (["verifiers"], "4", {}, 1.0),
    ],
)
async def test_reward_functions_of_the_documents_work_unchanged(
    names: list[str], text: str, data: dict[str, Any], reward: float
) -> None:
    assert (await scored(*names, text=text, **data)).reward == reward


@pytest.mark.parametrize(("step", "reward"), [(3, 0.0), (5, 1.0)])
async def test_the_trainer_state_has_the_current_step_and_the_number_of_steps(
    step: int, reward: float
) -> None:
    trainer_state.set(TrainerState(global_step=step, max_steps=10))
    assert (await scored("later")).reward == reward


async def test_logged_metrics_and_columns_are_returned_with_the_score_and_not_rewarded() -> None:
    found = await scored("logs", "logs_in_kwargs")
    assert found.reward == 2.0 and found.reward_components == {"logs": 2.0, "logs_in_kwargs": 0.0}
    assert found.metrics == {"accuracy": 0.5}
    assert found.extra_columns == {"wanted": "4", "start": "4"}
    trainer_state.set(TrainerState(max_steps=7))
    found = await scored("one_answer")
    assert found.metrics == {"steps": 7.0}
    assert found.extra_columns == {"read": '{"as": "4"}'}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("by_epoch", r"trainer_state\.epoch is not known .* expected one of global_step"),
        ("nothing", "none of the reward functions gave a number"),
        ("verifiers_chat", "TypeError"),
    ],
)
async def test_an_unsupported_function_gives_a_missing_score_and_not_0(
    name: str, words: str
) -> None:
    with pytest.raises(RewardError, match=words):
        await scored(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("functions_from_trl.py:by_tokens", "needs completion_ids, which only a trainer has"),
        ("org/reward-model", r"expected FILE\.py:NAME"),
    ],
)
def test_reward_functions_that_cannot_be_called_are_refused_before_the_start(
    name: str, words: str
) -> None:
    with pytest.raises(BadEnvironmentOptions, match=words):
        resolve("single_turn", {"reward": name})


async def test_a_grader_of_verl_scores_a_row_of_verl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    row = json.loads(Path("docs/examples/verl/numbers.jsonl").read_text().splitlines()[0])
    environment = resolve("single_turn", {"reward": "docs/examples/verl/my.py:score"})()
    await environment.reset(Task(task_id="a", environment="single_turn", seed=0, data=row))
    result = await environment.step(Action(text="2"))
    assert result.reward == pytest.approx(1.1)
    assert result.reward_components == {"score": pytest.approx(1.1), "acc": 1.0}


async def test_an_environment_of_skyrl_plays_a_row_of_its_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_package("skyrl_gym", "skyrl-gym")
    monkeypatch.chdir(ROOT)
    row = json.loads(Path("docs/examples/skyrl/numbers.jsonl").read_text().splitlines()[0])
    environment = resolve("skyrl_gym", {"id": "docs/examples/skyrl/my.py:NextNumber"})()
    await environment.reset(Task(task_id="a", environment="skyrl_gym", seed=0, data=row))
    result = await environment.step(Action(text="2"))
    assert result.terminated and result.reward == pytest.approx(1.1)
