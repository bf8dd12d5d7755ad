"""Which tasks a run has, which data they may hold, and whether the first prompt can be had.

The environment begins a task, the chat template renders it, and an answer fits behind it; no turn
is played. Called by `service.config.preflight`, by the run, and by the API's settings.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections.abc import Callable
from typing import Any

from actors.deadline import within
from actors.environment.data_sets import read_data_set
from actors.environment.protocol import Environment, Message, Observation, Role
from actors.environment.registry import BadEnvironmentOptions, UnknownEnvironment, resolve
from actors.environment.rendering import (
    ChatRenderer,
    RenderError,
    load_tokenizer,
    template_variables,
)
from actors.environment.task_data import DataCheck, data_schema_of
from actors.environment.tasks import (
    BadTaskFile,
    FileTasks,
    GeneratedTasks,
    TaskSource,
    read_tasks,
)
from actors.environment.user_code import describe, location, root_cause
from actors.types import Task
from service.config.file import ConfigError
from service.config.tree import Config

RESET_LIMIT_S = 60.0


def open_tasks(config: Config) -> TaskSource:
    """Open the task set. Raises: ConfigError when a file cannot be used."""
    settings = config.tasks
    if settings.file is None:
        return GeneratedTasks(settings.environment, run_seed=config.run.seed)
    try:
        checks = {name: DataCheck(schema) for name, schema in data_schemas(config).items()}
        tasks = (
            read_tasks(settings.file, checks=checks)
            if settings.columns is None
            else read_data_set(
                settings.file,
                environment=settings.environment,
                columns=settings.columns,
                split=settings.split,
                check=checks.get(settings.environment),
            )
        )
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


def data_schemas(config: Config) -> dict[str, dict[str, Any]]:
    """By environment, the JSON schema of its tasks' data; none of what agents outside play.

    Raises: ConfigError for an environment that cannot be made, or declares no schema.
    """
    if not config.has_environment:
        return {}
    make_environment = _maker(config)
    return {config.tasks.environment: data_schema_of(make_environment())}


class _Exited(Exception):
    """The environment tried to end the process."""


def check_prompt(config: Config, model_path: str, observation: Observation) -> None:
    """The first prompt can be rendered, and leaves room for an answer. Raises: ConfigError."""
    num_prompt = _num_prompt_tokens(config, model_path, observation)
    room = config.model.max_context_tokens - num_prompt
    if room < config.rollouts.max_tokens_per_turn:
        raise ConfigError(
            f"the first prompt has {num_prompt} tokens and an answer may take "
            f"{config.rollouts.max_tokens_per_turn} (rollouts.max_tokens_per_turn); expected both "
            f"within model.max_context_tokens ({config.model.max_context_tokens}); raise that, "
            "or shorten the prompt or the answer"
        )


def first_observation(config: Config) -> Observation:
    """Begin the first task in an environment, as an episode does. Raises: ConfigError.

    Where agents outside play, something that any of them may begin with.
    """
    name = config.tasks.environment
    if not config.has_environment:
        return Observation(messages=(Message(role=Role.USER, content="Hello."),))
    make_environment = _maker(config)
    task = open_tasks(config).task(0)
    try:
        found = asyncio.run(_begin(make_environment, task))
    except KeyboardInterrupt:
        raise
    except TimeoutError as error:
        raise ConfigError(
            f"tasks.environment: {name!r} did not begin task {task.task_id!r} within "
            f"{RESET_LIMIT_S:.0f} s; look at its reset"
        ) from error
    except BaseException as error:
        # The user's own code runs here, in this one place before the start: any type can come.
        raise ConfigError(
            f"tasks.environment: {name!r} could not begin task {task.task_id!r}: "
            f"{_told(error)}; mend the task or the environment"
        ) from error
    if not isinstance(found, Observation):
        raise ConfigError(
            f"tasks.environment: reset of {name!r} returned a {type(found).__name__}, expected an "
            "Observation of actors.environment.protocol"
        )
    return found


def _maker(config: Config) -> Callable[[], Environment]:
    name = config.tasks.environment
    try:
        return resolve(name, config.tasks.options)
    except (UnknownEnvironment, BadEnvironmentOptions, ImportError) as error:
        raise ConfigError(f"tasks.environment: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Its module is imported and an environment made: the user's own code again.
        raise ConfigError(
            f"tasks.environment: {name!r} cannot be made: {_told(error)}; mend the environment"
        ) from error


def _told(error: BaseException) -> str:
    root = root_cause(error)
    at = location(root)
    return f"{describe(root)}{f' ({at})' if at else ''}"


async def _begin(make_environment: Callable[[], Environment], task: Task) -> object:
    try:
        environment = make_environment()
        try:
            return await within(RESET_LIMIT_S, environment.reset(task))
        finally:
            await within(RESET_LIMIT_S, environment.close())
    except SystemExit as error:
        # In a task it would end the event loop, and then the command with the code it chose.
        raise _Exited from error


def _num_prompt_tokens(config: Config, model_path: str, observation: Observation) -> int:
    options = config.rollouts.template_options
    try:
        tokenizer = load_tokenizer(model_path)
        _check_template_options(tokenizer, options)
        renderer = ChatRenderer(tokenizer, template_options=options)
        return int(renderer.first_prompt(observation.messages, observation.tools).shape[0])
    except (RenderError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model: its chat template cannot render a prompt: {error}") from error


def _check_template_options(tokenizer: Any, options: dict[str, Any]) -> None:
    """Each option is a variable of the template, which ignores a misspelt one in silence."""
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    known = template_variables(tokenizer.chat_template)
    for name in options:
        if name in taken:
            raise ConfigError(
                f"rollouts.template_options: {name} is the renderer's own; expected variables of "
                "the model's chat template, such as enable_thinking; remove it"
            )
        if known is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "remove it"
            raise ConfigError(
                f"rollouts.template_options: the model's chat template does not look at {name!r}; "
                f"expected one of {', '.join(sorted(known - taken.keys())) or 'none'}; {remedy}"
            )
