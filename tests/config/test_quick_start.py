"""Tests of a run from a data set and a reward function, without a configuration file."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from actors.environment.builtin.single_turn import chat_message
from actors.environment.protocol import Observation
from actors.environment.tokenizer import load_tokenizer
from service.cli.commands.configuration import (
    MAX_TOOL_TURNS,
    quick_tree,
    run_configuration,
    sft_configuration,
    tasks_of,
)
from service.config.file import ConfigError
from service.config.sections import TasksSettings
from service.config.tasks import check_prompt, first_observation, open_sets, open_tasks
from service.config.tree import Config

FUNCTIONS = """
def score(completion, answer):
    return float(completion == answer)

def misspelt(completion, anser):
    return 1.0

def reads_calls(completion, messages):
    return 1.0

def look(place: str) -> str:
    "Look at a place."
    return place

class Room:
    look = staticmethod(look)
    def get_reward(self):
        return 1.0
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "quick_rewards.py").write_text(FUNCTIONS)
    rows = [{"prompt": f"{number} + 1", "answer": str(number + 1)} for number in range(20)]
    file = tmp_path / "My sums (1).jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def asked(
    data: str | None, *overrides: str, file: Path | None = None, reward: str = "score"
) -> Config:
    return run_configuration(
        file,
        dataset=data,
        rewards=[f"quick_rewards.py:{reward}"],
        tools=[],
        model=None,
        overrides=list(overrides),
    )


def test_a_data_set_and_a_function_are_enough(data: str) -> None:
    config = asked(data, "run.steps=7")
    assert (config.run.name, config.run.steps, config.rollouts.max_turns) == ("My-sums-1", 7, 1)
    assert config.tasks.options == {"reward": "quick_rewards.py:score"}
    tasks = open_tasks(config)
    assert len({tasks.task(index).task_id for index in range(20)}) == 20
    assert first_observation(config).messages[0].content == f"{tasks.task(0).data['prompt']}"


def test_a_model_named_by_an_override_replaces_the_tiny_model(data: str) -> None:
    config = asked(data, "model.path=models/mine")
    assert (config.model.path, config.model.tiny) == ("models/mine", None)
    # It is trained with the settings for --model and not with those for the tiny model.
    assert config.trainer.learning_rate == 1e-6
    assert asked(data, "model.path=null").model.tiny is not None
    with pytest.raises(ConfigError, match=r"exactly one of model\.path and model\.tiny; got both"):
        asked(data, "model.path=models/mine", "model.tiny={}")
    sft = sft_configuration(None, dataset=data, model=None, overrides=["model.path=models/mine"])
    assert (sft.model.path, sft.model.tiny) == ("models/mine", None)


def test_the_data_set_and_function_replace_those_of_a_file(tmp_path: Path, data: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {tiny: {}}\nrun: {steps: 3}\n"
        "tasks: {environment: guessing, file: t.jsonl, evaluation_tasks: 5}\n"
    )
    config = asked(data, file=file)
    assert (config.run.steps, config.tasks.environment, config.tasks.file) == (
        3, "single_turn", None,
    )  # fmt: skip
    assert config.tasks.evaluation_tasks == 5


def test_missing_columns_of_a_function_are_reported_before_the_start(data: str) -> None:
    config = asked(data, "tasks.columns={result: answer}")
    with pytest.raises(ConfigError, match="score needs answer, got the columns prompt, result"):
        first_observation(config)
    config = asked(data, "tasks.columns={prompt: null}")
    words = r"prompt missing.*has the columns prompt, answer: .* such as \{prompt: COLUMN\}$"
    with pytest.raises(ConfigError, match=words):
        open_tasks(config)
    words = r"misspelt needs anser, .*; did you mean 'answer'\? If .* as \{anser: COLUMN\}$"
    with pytest.raises(ConfigError, match=words):
        open_tasks(asked(data, reward="misspelt"))
    words = "needs messages, .*; a run with tools gives messages; set --tools or tasks"
    with pytest.raises(ConfigError, match=words):
        open_tasks(asked(data, reward="reads_calls"))


def test_tools_need_no_reward_function_if_a_class_has_get_reward(data: str) -> None:
    def with_tools(name: str, *rewards: str, overrides: Sequence[str] = ()) -> Config:
        return run_configuration(
            None,
            dataset=data,
            rewards=[f"quick_rewards.py:{each}" for each in rewards],
            tools=[f"quick_rewards.py:{name}"],
            model=None,
            overrides=list(overrides),
        )

    config = with_tools("Room")
    assert config.tasks.options == {"tools": ["quick_rewards.py:Room"]}
    assert [tool.name for tool in first_observation(config).tools] == ["look"]
    with pytest.raises(ConfigError, match=r"got no function, and no class of tools with get_rew"):
        first_observation(with_tools("look"))
    # No column has the messages, which the environment gives.
    config = with_tools("look", "reads_calls", overrides=["tasks.columns={prompt: null}"])
    with pytest.raises(ConfigError, match=r"prompt missing.* such as \{prompt: COLUMN\}$"):
        open_tasks(config)


def test_the_remedy_for_one_row_is_to_correct_it(data: str) -> None:
    with Path(data).open("a") as file:
        file.write('{"answer": "1"}\n')
    with pytest.raises(ConfigError, match=r"row 21: .*\{prompt: COLUMN\}, or correct or remove"):
        open_tasks(asked(data))


def test_a_users_model_has_a_small_learning_rate_and_shares_the_gpu() -> None:
    tree = quick_tree("org/set", model="org/model", has_gpu=True, has_tools=False)
    assert tree["model"] == {"path": "org/model", "dtype": "bfloat16"}
    assert tree["trainer"]["learning_rate"] == 1e-6 and tree["trainer"]["device"] == "cuda"
    assert tree["inference"]["gpus_per_replica"] + tree["trainer"]["gpus_per_rank"] == 1
    on_cpu = quick_tree("org/set", model="org/model", has_gpu=False, has_tools=False)
    assert on_cpu["inference"] == {"enforce_eager": True} and "dtype" not in on_cpu["model"]
    # The tiny model runs on the CPU.
    tiny = quick_tree("d.csv", model=None, has_gpu=True, has_tools=True)
    assert "device" not in tiny["trainer"] and tiny["rollouts"]["max_turns"] == MAX_TOOL_TURNS
    for each in (tree, tiny):
        cut_off = {"truncated_tokens": {"disposition": "train_clamped"}}
        assert each["rollouts"]["outcomes"] == cut_off
    two = tasks_of("d.csv", ["a.py:f", "b.py:g"], [])
    assert two["options"] == {"reward": ["a.py:f", "b.py:g"]}
    with_tools = tasks_of("d.csv", ["a.py:f"], ["t.py:search"])
    assert with_tools["environment"] == "tools"
    assert with_tools["options"] == {"reward": "a.py:f", "tools": ["t.py:search"]}


def test_a_prompt_with_a_token_that_the_model_lacks_is_refused(
    tmp_path: Path, data: str, small_model: str
) -> None:
    """Check this for an image token in the tokenizer that has no row in the model's embedding."""
    model = Path(shutil.copytree(small_model, tmp_path / "model"))
    tokenizer: Any = load_tokenizer(str(model))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    tokenizer.save_pretrained(model)
    file = tmp_path / "images.jsonl"
    rows = [{"prompt": prompt, "answer": "1"} for prompt in ("How much?", "What is <|image|>?")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = asked(str(file), "tasks.evaluation_tasks=0")
    words = r"the prompt of row-\w+ \(row 2\) contains '<\|image\|>', token 512 .*only 512 tokens"
    with pytest.raises(ConfigError, match=words):
        open_tasks(config, model_path=str(model), tell=print)


def test_prompts_with_the_chat_template_already_applied_are_reported(
    tmp_path: Path, data: str, small_model: str
) -> None:
    file = tmp_path / "rendered.jsonl"
    rows = [{"prompt": prompt, "answer": "1"} for prompt in ("2?", "<|user|>1?<|end|>", "3?")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told: list[str] = []
    config = asked(str(file), "tasks.evaluation_tasks=0")
    open_tasks(config, model_path=small_model, tell=told.append)
    assert told[0].startswith("1 of 3 prompts contain the text of a special token, such as '<|")
    raw = asked(str(file), "tasks.evaluation_tasks=0", "model.chat_template=none")
    open_tasks(raw, model_path=small_model, tell=told.append)
    assert len(told) == 1


def test_prompts_that_leave_no_room_for_an_answer_are_left_out_and_counted(
    tmp_path: Path, data: str, small_model: str
) -> None:
    rows = [{"prompt": "How much? " * number, "answer": "1"} for number in (1, 2, 3, 100, 200)]
    file = tmp_path / "lengths.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["model.max_context_tokens=128", "rollouts.max_tokens_per_turn=32"]
    config = asked(str(file), *sizes, "tasks.evaluation_tasks=1")
    told: list[str] = []
    tasks = open_tasks(config, model_path=small_model, tell=told.append)
    played = [tasks.task(0), tasks.task(1), *tasks.held_out(1)]
    assert {len(task.data["prompt"]) for task in played} == {10, 20, 30}
    assert told == [
        "2 of 5 prompts have more than 96 tokens (model.max_context_tokens less "
        "rollouts.max_tokens_per_turn) and are left out"
    ]
    sets = f"evaluation.sets.more.dataset={file}"
    config = asked(str(file), *sizes, "tasks.evaluation_tasks=1", sets)
    own, more = open_sets(config, tasks, model_path=small_model, tell=told.append)
    assert (len(own.tasks), len(more.tasks)) == (1, 3)
    assert told[1] == f"evaluation.sets.more: {told[0]}"
    # The evaluation's prompts are measured even if the training tasks are generated.
    made = replace(config, tasks=replace(config.tasks, dataset=None, evaluation_tasks=0))
    (measured,) = open_sets(made, open_tasks(made), model_path=small_model, tell=told.append)
    assert len(measured.tasks) == 3
    assert told.pop() == told[1]
    checked: list[str] = []
    check_prompt(config, small_model, first_observation(config), tell=checked.append)
    assert checked == told
    config = asked(str(file), "model.max_context_tokens=33", "rollouts.max_tokens_per_turn=32")
    with pytest.raises(ConfigError, match="5 of 5 prompts have more than 1 tokens"):
        check_prompt(config, small_model, first_observation(config))


def test_a_prompt_whose_result_would_be_read_as_that_of_another_call_is_refused(
    tmp_path: Path, data: str, small_model: str
) -> None:
    calls = [{"id": each, "function": {"name": "lookup", "arguments": {}}} for each in "ab"]
    chat = [
        {"role": "user", "content": "How much?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "3"},
    ]
    file = tmp_path / "calls.jsonl"
    rows = [{"prompt": prompt, "answer": "3"} for prompt in ("How much?", chat)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = asked(str(file), "tasks.evaluation_tasks=0")
    words = r"tasks: the prompt of row-\w+ \(row 2\): got no result for call 1 \(lookup\)"
    with pytest.raises(ConfigError, match=words):
        open_tasks(config, model_path=small_model)
    # Another environment's first messages are checked when its first task is begun.
    seen = Observation(messages=tuple(map(chat_message, chat)))
    made = replace(config, tasks=TasksSettings(environment="guessing"))
    with pytest.raises(ConfigError, match="tasks: the first prompt: got no result for call 1"):
        check_prompt(made, small_model, seen)


def test_a_prompt_with_a_name_that_the_template_does_not_show_is_refused(
    tmp_path: Path, data: str, small_model: str
) -> None:
    chat = [{"role": "user", "name": name, "content": "How much?"} for name in ("Ada", "Bob")]
    file = tmp_path / "names.jsonl"
    rows = [{"prompt": prompt, "answer": "3"} for prompt in ("How much?", chat)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = asked(str(file), "tasks.evaluation_tasks=0")
    words = r"tasks: the prompt of row-\w+ \(row 2\): got the names 'Ada' and 'Bob' .*; write"
    with pytest.raises(ConfigError, match=words):
        open_tasks(config, model_path=small_model)
