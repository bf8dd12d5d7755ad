"""Read the configuration that a command's arguments and options name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from service.cli.outlet import say
from service.config.file import ConfigError, load_config, load_sft, parse_config, parse_sft
from service.config.quick_start import quick_tree, sft_tree, tasks_of
from service.config.sft import SftConfig
from service.config.tree import Config

if TYPE_CHECKING:
    from service.config.trial import Trial


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
    """Return the file's configuration, or a configuration for a data set and rewards.

    Raises: ConfigError if the arguments do not name one of them, or it is refused.
    """
    tasks = tasks_of(dataset, rewards, tools, group_rewards)
    given = [f"tasks.{key}={json.dumps(value)}" for key, value in tasks.items()]
    if file is not None:
        if dataset is not None:
            given.append("tasks.file=null")
        return load_config(file, with_model([*given, *overrides], model))
    if bool(dataset) != bool(rewards or group_rewards):
        has, lacks = ("--dataset", "--reward") if dataset else ("--reward", "--dataset")
        raise ConfigError(f"got {has} without CONFIG, expected {lacks} too; add {lacks} or CONFIG")
    if not dataset:
        raise ConfigError(
            "got no CONFIG, expected a YAML file, or --dataset DATA with --reward "
            "FILE.py:FUNCTION, or --resume RUN_DIR"
        )
    has_gpu = Path("/dev/nvidia0").exists()
    tree = quick_tree(dataset, model=model, has_gpu=has_gpu, has_tools=bool(tools))
    tree["tasks"] = {"evaluation_tasks": 0, **tasks}
    return parse_config(tree, source="for --dataset and --reward", overrides=overrides)


def sft_configuration(
    file: Path | None, *, dataset: str | None, model: str | None, overrides: list[str]
) -> SftConfig:
    """Return the file's configuration, or a configuration for a data set of chats.

    Raises: ConfigError if the arguments do not name one of them, or it is refused.
    """
    given = [] if dataset is None else [f"sft.dataset={json.dumps(dataset)}"]
    if file is not None:
        return load_sft(file, with_model([*given, *overrides], model))
    if dataset is None:
        raise ConfigError(
            "sft: got no data set, expected --dataset DATA with a column messages, a CONFIG, or "
            "--resume RUN_DIR"
        )
    tree = sft_tree(model=model, has_gpu=Path("/dev/nvidia0").exists())
    return parse_sft(tree, source="for --dataset", overrides=[*given, *overrides])


def own_config(run: Path, *, option: str = "--resume ", is_sft: bool = False) -> Path:
    """Return the configuration file in a run's directory. Raises: ConfigError if there is none.

    option: the option that named the directory, for messages. is_sft: whether the directory of a
    supervised training is accepted.
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
    """Return the overrides with one for --model, quoted because a name may look like a number."""
    if model is None:
        return list(overrides)
    return [*overrides, f"model.path={json.dumps(model)}", "model.tiny=null"]


def converted(config: Config) -> Config:
    """Return the configuration with its GGUF files converted to model directories.

    Raises: ConfigError if a file cannot be converted.
    """
    from service.launch.gguf_models import with_converted_models

    return with_converted_models(config, tell=partial(say, err=True))


def use_functions(run: Path | None) -> None:
    """Make the functions importable that `rayloom.train` stored in a run's directory, if any."""
    from service.launch.run_dir import RunDir

    if run is None or not (functions := RunDir(path=run).functions).is_dir():
        return
    sys.path.insert(0, str(functions))
    # Every process of the run reads this variable.
    paths = [str(functions), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in paths if each)


def trial_of(call: bool | None, answer: str | None) -> Trial:
    """Return the selection of the user's functions that are called before the start."""
    from service.config.trial import Trial

    return Trial(functions=call is not False, judges=call is True, answer=answer)
