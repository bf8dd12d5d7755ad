"""`rayloom tasks`: write task files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from actors.environment.builtin.reasoning_gym_env import generate_tasks
from actors.environment.registry import UnknownEnvironment, resolve
from actors.environment.tasks import BadTaskFile, GeneratedTasks, write_tasks
from service.config.file import ConfigError


def write_reasoning_gym(
    family: str, out: Path, *, count: int, seed: int, options: Sequence[str]
) -> str:
    """Write tasks of a reasoning-gym family; returns a sentence on what was written.

    Raises: ConfigError.
    """
    try:
        tasks = generate_tasks(family, count, seed=seed, options=_parse_options(options))
        write_tasks(out, tasks)
    except (BadTaskFile, ImportError, ValueError, TypeError) as error:
        raise ConfigError(f"tasks reasoning-gym: {error}") from error
    return f"{count} tasks of {family} in {out}"


def write_generated(environment: str, out: Path, *, count: int, seed: int) -> str:
    """Write generated tasks of an environment. Raises: ConfigError."""
    try:
        resolve(environment, {})
        source = GeneratedTasks(environment, run_seed=seed)
        write_tasks(out, [source.task(index) for index in range(count)])
    except (BadTaskFile, UnknownEnvironment, ValueError) as error:
        raise ConfigError(f"tasks generate: {error}") from error
    return f"{count} tasks of {environment} in {out}"


def _parse_options(options: Sequence[str]) -> dict[str, object]:
    parsed: dict[str, object] = {}
    for option in options:
        key, separator, text = option.partition("=")
        if not separator:
            raise ConfigError(f"--option {option!r}: expected KEY=VALUE")
        parsed[key] = yaml.safe_load(text)
    return parsed
