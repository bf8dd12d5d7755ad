"""The options that several commands share, and functions that make a configuration from them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.environment.builtin.single_turn import SINGLE_TURN
from actors.environment.builtin.tools import TOOLS
from actors.environment.settings import GROUP_REWARD
from service.cli.outlet import say
from service.config.file import ConfigError, load_config, load_sft, parse_config, parse_sft
from service.config.sft import SftConfig
from service.config.tree import Config

if TYPE_CHECKING:
    from service.config.trial import Trial

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="setting to change, such as run.steps=10; repeatable"
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="a directory, GGUF file or hub name; replaces the model of the configuration",
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="DATA",
        help="prompts: a JSONL, JSON, CSV or Parquet file, a directory, or a hub name",
    ),
]
Rewards = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        metavar="FILE.py:FUNCTION",
        help="function that scores an answer; repeatable, scores are added",
    ),
]
GroupRewards = Annotated[
    list[str] | None,
    typer.Option(
        "--group-reward",
        metavar="FILE.py:FUNCTION",
        help="function that scores the answers of a group together; repeatable, scores are added",
    ),
]
Tools = Annotated[
    list[str] | None,
    typer.Option(
        "--tools",
        metavar="FILE.py:FUNCTION",
        help="function that the policy may call, or a class of such functions; repeatable",
    ),
]
CallOption = Annotated[
    bool | None,
    typer.Option(
        "--call/--no-call",
        metavar="",
        help="call functions and judges before the start, or call nothing; default: only functions",
    ),
]
AnswerOption = Annotated[
    str | None,
    typer.Option(
        "--answer",
        metavar="COLUMN",
        help="column of reference answers, with which functions are called before the start",
    ),
]
Temperature = Annotated[float | None, typer.Option(min=0, help="sampling temperature")]


def path_option(option: str, text: str | None, *, what: str = "a directory") -> Path | None:
    if text is not None and not text.strip():
        raise ConfigError(f"{option}: got an empty text, expected {what}; name one")
    # A shell does not expand ~ in --run-dir=~/run.
    return None if text is None else Path(os.path.expanduser(text))


def run_configuration(
    file: Path | None,
    *,
    dataset: str | None,
    rewards: list[str],
    tools: list[str],
    model: str | None,
    overrides: list[str],
    group_rewards: Sequence[str] = (),
) -> Config:
    """Return the configuration in `file`. If `file` is None, make one for a data set and rewards.

    Raises: ConfigError if there is neither a file nor a data set with rewards (or with tools, which
    may score answers by `get_reward`), or if the configuration is refused.
    """
    tasks = tasks_of(dataset, rewards, tools, group_rewards)
    given = [f"tasks.{key}={json.dumps(value)}" for key, value in tasks.items()]
    if file is not None:
        if dataset is not None:
            given.append("tasks.file=null")
        return load_config(file, with_model([*given, *overrides], model))
    # With tools, the environment checks that something scores the answers.
    if bool(dataset) != bool(rewards or group_rewards or (dataset and tools)):
        has, lacks = ("--dataset", "--reward") if dataset else ("--reward", "--dataset")
        raise ConfigError(f"got {has} without CONFIG, expected {lacks} too; add {lacks} or CONFIG")
    if not dataset:
        raise ConfigError(
            "got no CONFIG, expected a YAML file, or --dataset DATA with --reward "
            "FILE.py:FUNCTION, or --resume RUN_DIR"
        )
    has_gpu = Path("/dev/nvidia0").exists()
    model = model or _model_in(overrides)
    tree = quick_tree(dataset, model=model, has_gpu=has_gpu, has_tools=bool(tools))
    tree["tasks"] = {"evaluation_tasks": 0, **tasks}
    return parse_config(tree, source="for --dataset and --reward", overrides=overrides)


def sft_configuration(
    file: Path | None, *, dataset: str | None, model: str | None, overrides: list[str]
) -> SftConfig:
    """Return the configuration in `file`. If `file` is None, make one for a data set of chats.

    Raises: ConfigError if there is neither a file nor a data set, or if the configuration is
    refused.
    """
    given = [] if dataset is None else [f"sft.dataset={json.dumps(dataset)}"]
    if file is not None:
        return load_sft(file, with_model([*given, *overrides], model))
    if dataset is None:
        raise ConfigError(
            "sft: got no data set, expected --dataset DATA with a column messages, a CONFIG, or "
            "--resume RUN_DIR"
        )
    model = model or _model_in(overrides)
    tree = _sft_tree(model=model, has_gpu=Path("/dev/nvidia0").exists())
    return parse_sft(tree, source="for --dataset", overrides=[*given, *overrides])


def own_config(run: Path, *, option: str = "--resume ", is_sft: bool = False) -> Path:
    """Return the configuration file in a run's directory. Raises: ConfigError if there is none.

    option: the command-line option with which the user named the directory; errors quote it.
    is_sft: accept the directory of a supervised training; otherwise such a directory is refused.
    """
    from service.launch.run_dir import RunDir, check_no_sft

    file = RunDir(path=run).config_file
    if not is_sft:
        check_no_sft(RunDir(path=run), what=option.strip())
    if not file.is_file():
        raise ConfigError(
            f"{option}{run}: got no {file.name} in it, expected a run's directory; correct it"
        )
    return file


def with_model(overrides: list[str], model: str | None) -> list[str]:
    """Return the overrides, followed by overrides that select `model`, the value of --model.

    If --model was not given, `model` is None, and nothing is added.
    The model's name is quoted as JSON, because YAML would read some names as numbers.
    """
    if model is None:
        return list(overrides)
    return [*overrides, f"model.path={json.dumps(model)}", "model.tiny=null"]


def _model_in(overrides: Sequence[str]) -> str | None:
    """Return the model.path that the overrides set; None if they set none, or set model.tiny."""
    values = {key: value for key, _, value in (each.partition("=") for each in overrides)}
    if "model.tiny" in values:
        return None
    path = values.get("model.path", "").strip()
    return None if path in ("", "null", "~") else path


def converted(config: Config) -> Config:
    """Return the configuration with its GGUF files converted to model directories.

    Raises: ConfigError if a file cannot be converted.
    """
    from service.launch.model_directories import with_converted_models

    return with_converted_models(config, tell=partial(say, err=True))


def use_functions(run: Path | None) -> None:
    """Put a run's stored functions on the import path of this process and its child processes.

    `rayloom.train` stores the user's functions in the run's directory. Without a run, or if it has
    no stored functions, nothing changes.
    """
    from service.launch.run_dir import RunDir

    if run is None or not (functions := RunDir(path=run).functions).is_dir():
        return
    sys.path.insert(0, str(functions))
    # Every process of the run reads this variable.
    paths = [str(functions), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in paths if each)


def trial_of(call: bool | None, answer: str | None) -> Trial:
    """Return which of the user's functions are called before the start.

    call: the value of --call; None if the option was not given. answer: the value of --answer.
    """
    from service.config.trial import Trial

    return Trial(functions=call is not False, judges=call is True, answer=answer)


# The configurations of `rayloom train --dataset … --reward …` and of `rayloom sft --dataset …`,
# which have no file. Pure.
#
# The result is a tree like that of a file; `--set` overrides its values. Without a model, the tiny
# model is built and trained on the CPU. With another model, engine and trainer share a GPU if there
# is one.

# Maximum number of turns of an episode with tools: calls and answers.
MAX_TOOL_TURNS = 8
# Learning rates of a pretrained model: for training with rewards, and on chats.
_LEARNING_RATE, _SFT_LEARNING_RATE = 1e-6, 1e-5
# Answers that were cut off are trained and not masked, because of the measurements in
# docs/reward-functions.md, "Answers that were cut off".
_CUT_OFF: dict[str, Any] = {"truncated_tokens": {"disposition": "train_clamped"}}
# Settings with which the tiny model learns: deploy/configs/guessing-cpu.yaml says why.
_TINY: dict[str, Any] = {
    "model": {"tiny": {}},
    "rollouts": {"max_turns": 1, "max_tokens_per_turn": 16, "outcomes": _CUT_OFF},
    "algorithm": {
        "scale": "none",
        "loss": {"kl": {"coefficient": 0.01, "estimator": "k3"}},
        "minibatches": 2,
    },
    "inference": {"enforce_eager": True, "max_num_seqs": 256},
    "trainer": {
        "num_ranks": 1,
        "learning_rate": 6e-4,
        "warmup_updates": 20,
        "betas": [0.9, 0.99],
        "adam_epsilon": 1e-5,
    },
}


def _sft_tree(*, model: str | None, has_gpu: bool) -> dict[str, Any]:
    """Return the sections `model` and `trainer` of a configuration of `rayloom sft`."""
    if model is None:
        return {"model": {"tiny": {}}, "trainer": {"num_ranks": 1, "learning_rate": 1e-3}}
    trainer: dict[str, Any] = {"num_ranks": 1, "learning_rate": _SFT_LEARNING_RATE}
    if has_gpu:
        trainer |= {
            "device": "cuda",
            "gpus_per_rank": 1,
            "dtype": "bfloat16",
            "gradient_checkpointing": True,
        }
    return {"model": {"path": model}, "trainer": trainer}


def tasks_of(
    dataset: str | None, rewards: list[str], tools: list[str], group_rewards: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the section `tasks` for a data set, functions and tools; each may be omitted."""
    tasks: dict[str, Any] = {} if dataset is None else {"dataset": dataset}
    options: dict[str, Any] = {
        name: functions[0] if len(functions) == 1 else list(functions)
        for name, functions in (("reward", rewards), (GROUP_REWARD, group_rewards))
        if functions
    }
    if options:
        tasks |= {"environment": SINGLE_TURN, "options": options}
    if tools:
        options = {**tasks.get("options", {}), "tools": tools}
        tasks |= {"environment": TOOLS, "options": options}
    return tasks


def quick_tree(
    dataset: str, *, model: str | None, has_gpu: bool, has_tools: bool
) -> dict[str, Any]:
    """Return all sections of a run's configuration except `tasks`.

    Args: dataset: the data set, from whose name the run's name is made. model: a directory or hub
    name; None for the tiny model. has_tools: whether the policy may call tools, which needs several
    turns.
    """
    tree = _tree(dataset, model=model, has_gpu=has_gpu)
    if has_tools:
        tree["rollouts"] |= {"max_turns": MAX_TOOL_TURNS}
        if model is None:
            # A call of a tool is longer than an answer.
            tree["rollouts"]["max_tokens_per_turn"] = 32
            tree["model"]["max_context_tokens"] = 512
    return tree


def _tree(dataset: str, *, model: str | None, has_gpu: bool) -> dict[str, Any]:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(dataset).stem).strip("-.") or "run"
    named = {"run": {"name": name[:64]}}
    if model is None:
        return {**deepcopy(_TINY), **named}
    tree: dict[str, Any] = {
        **named,
        "model": {"path": model},
        "rollouts": {
            "max_turns": 1,
            "max_tokens_per_turn": 512,
            "outcomes": deepcopy(_CUT_OFF),
        },
        "trainer": {"num_ranks": 1, "learning_rate": _LEARNING_RATE},
    }
    if has_gpu:
        tree["model"] |= {"dtype": "bfloat16"}
        tree["inference"] = {"gpus_per_replica": 0.5, "gpu_memory_fraction": 0.4}
        tree["trainer"] |= {
            "device": "cuda",
            "gpus_per_rank": 0.5,
            "dtype": "bfloat16",
            "gradient_checkpointing": True,
        }
    else:
        # To compile takes a minute at every start, also with vLLM's cache, and a C++ compiler.
        tree["inference"] = {"enforce_eager": True}
    return tree
