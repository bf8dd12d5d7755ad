"""Which tasks a run trains on and is evaluated on, from its configuration."""

from __future__ import annotations

from actors.environment.tasks import (
    BadTaskFile,
    FileTasks,
    GeneratedTasks,
    TaskSource,
    read_tasks,
)
from service.config.file import ConfigError
from service.config.tree import Config


def open_tasks(config: Config) -> TaskSource:
    """Open the task set. Raises: ConfigError when a file cannot be used."""
    settings = config.tasks
    if settings.file is None:
        return GeneratedTasks(settings.environment, run_seed=config.run.seed)
    try:
        tasks = read_tasks(settings.file)
        source = FileTasks(tasks, run_seed=config.run.seed, num_held_out=settings.evaluation_tasks)
    except BadTaskFile as error:
        raise ConfigError(f"tasks.file: {error}") from error
    except ValueError as error:
        raise ConfigError(f"tasks.evaluation_tasks: {error}") from error
    foreign = {task.environment for task in tasks} - {settings.environment}
    if foreign:
        raise ConfigError(
            f"tasks.file: {settings.file} holds tasks of {sorted(foreign)}, expected only "
            f"{settings.environment!r} (tasks.environment); split the file or change the setting"
        )
    return source
