"""Open a run's tasks, check their data, and check that the first prompt can be rendered.

For the last check the environment begins a task, the chat template renders the prompt, and an
answer must fit after it; no turn is played. `service.config.preflight`, the run and the API's
settings call this module.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from actors.environment import protocol
from actors.environment.chat_template import RenderError
from actors.environment.data_sets import read_data_set
from actors.environment.evaluation import EvaluationSet
from actors.environment.protocol import Environment, Message, Observation, Role, ToolSchema
from actors.environment.registry import (
    BadEnvironmentOptions,
    UnknownEnvironment,
    read_options,
    resolve,
)
from actors.environment.rendering import ChatRenderer
from actors.environment.task_data import DataCheck, check_of, data_schema_of
from actors.environment.tasks import (
    BadTaskFile,
    FileTasks,
    GeneratedTasks,
    MixedTasks,
    PackedTasks,
    TaskSource,
    by_hash,
    read_tasks,
)
from actors.environment.template_traits import call_form
from actors.options import user_code
from actors.types import SESSION, Task, TokenIds
from actors.user_code import closing, describe, location, note_of_close, root_cause, type_of
from service.config.file import ConfigError
from service.config.model_files import check_prompt_ids, renderer_of, vocabulary_size
from service.config.sections import EvaluationSetSettings, TasksSettings
from service.config.tree import Config
from service.inference.settings import AUTO

_logger = logging.getLogger(__name__)
ROOM = "model.max_context_tokens less rollouts.max_tokens_per_turn"
"""The settings that `room_for_prompt` computes with, for messages."""
RESET_LIMIT_S = 60.0
"""Time limit for the first task's reset, and for its close, in seconds."""
BLOCKED_S = 5.0
"""Seconds to wait for a result after the time limits of reset and close have passed. An environment
that still has no result then blocks its event loop, which enforces these limits.
"""


def open_tasks(
    config: Config,
    *,
    model_path: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> TaskSource:
    """Return the source of a run's tasks, without the tasks whose prompts are too long.

    Args: model_path: model whose tokenizer measures the prompts. If it is None, or the environment
        does not build prompts from data, no task is left out. tell: called with each warning, such
        as the number of tasks that were left out.
    Raises: ConfigError if a file cannot be used, or has no prompt that fits.
    """
    if config.mixture:
        sources: dict[str, TaskSource] = {}
        for name, member in config.members.items():
            with _named_refusals(name):
                tell_member = partial(_tell_with_key, f"mixture.{name}", tell)
                sources[name] = open_tasks(member, model_path=model_path, tell=tell_member)
        weights = {name: member.weight for name, member in config.mixture.items()}
        return MixedTasks(sources, weights)
    settings = config.tasks
    if settings.file is None and settings.dataset is None:
        return GeneratedTasks(settings.environment, run_seed=config.run.seed)
    checks = _data_checks(config)
    key = "file" if settings.dataset is None else "dataset"
    try:
        tasks, held_out = _read(settings, checks)
    except BadTaskFile as error:
        raise ConfigError(f"tasks.{key}: {error}") from error
    _check_environment(tasks, config, key=f"tasks.file {settings.file}")
    if model_path is not None:
        tasks = _fitting(config, tasks, model_path, tell)
        held_out = held_out and _fitting(config, held_out, model_path, tell)
    try:
        found = FileTasks(
            tasks,
            run_seed=config.run.seed,
            num_held_out=settings.evaluation_tasks,
            held_out=held_out,
        )
    except ValueError as error:
        source = f"task file {settings.file}" if key == "file" else f"data set {settings.dataset}"
        raise ConfigError(
            f"tasks.evaluation_tasks: {source}: {error}; set tasks.evaluation_tasks (default: "
            f"{TasksSettings().evaluation_tasks}) to a smaller number, or to 0 for no evaluation"
        ) from error
    # Two tasks of a file with equal data may differ in their seeds, so files are not checked.
    if settings.dataset is not None and (count := found.num_trained_held_out):
        _logger.warning(
            "data set %s: %d of the held-out tasks have the same data as training tasks, so that "
            "evaluations measure what was trained; expected different rows; remove the repeated "
            "ones, or name a split without them in tasks.evaluation_split",
            settings.dataset,
            count,
        )
    return found


def open_sets(
    config: Config,
    tasks: TaskSource,
    *,
    model_path: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[EvaluationSet]:
    """Return the sets to evaluate: the run's own held-out tasks, if any, then each named set.

    A mixture of environments has only one set for each environment: the environment's held-out
    tasks, if any, under the environment's name.

    tasks: the run's tasks. model_path, tell: the arguments of `open_tasks`.
    Raises: ConfigError if a set's tasks cannot be read.
    """
    if isinstance(tasks, MixedTasks):
        parts = [
            EvaluationSet(
                name=name,
                tasks=tasks.held_out_of(name, member.tasks.evaluation_tasks),
                sampling=member.evaluation.sampling,
                is_part=True,
            )
            for name, member in config.members.items()
        ]
        return [each for each in parts if each.tasks]
    own = tasks.held_out(config.tasks.evaluation_tasks)
    found = [EvaluationSet(name="", tasks=own, sampling=config.evaluation.sampling)] if own else []
    for name, settings in config.evaluation.sets.items():
        key = f"evaluation.sets.{name}"
        chosen: Sequence[Task] = own
        if (source := _source_of(config, settings)) is not None:
            read = _tasks_of(config, source, key=key)
            if model_path is not None:
                read = _fitting(config, read, model_path, partial(_tell_with_key, key, tell))
            chosen = by_hash(read)
        count = len(chosen) if settings.tasks is None else settings.tasks
        if count > len(chosen):
            raise ConfigError(
                f"{key}.tasks is {count}, expected at most {len(chosen)}, the number of its tasks; "
                "lower it"
            )
        found.append(
            EvaluationSet(name=name, tasks=list(chosen[:count]), sampling=settings.sampling)
        )
    return found


def held_out_tasks(config: Config, tasks: TaskSource) -> list[Task]:
    """Return the run's held-out tasks, which an operator may evaluate."""
    if isinstance(tasks, MixedTasks):
        return [task for each in open_sets(config, tasks) for task in each.tasks]
    return tasks.held_out(config.tasks.evaluation_tasks)


@contextmanager
def _named_refusals(name: str) -> Iterator[None]:
    """Put the mixture part's name before the text of each ConfigError of the `with` block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"mixture.{name}: {error}") from error


def _tell_with_key(key: str, tell: Callable[[str], None], text: str) -> None:
    tell(f"{key}: {text}")


def _source_of(config: Config, settings: EvaluationSetSettings) -> TasksSettings | None:
    """Return the settings of an evaluation set's own tasks; None if it uses the held-out tasks."""
    columns = settings.columns
    named = (settings.file, settings.dataset, settings.subset, settings.split, columns)
    if all(each is None for each in named):
        return None
    is_file = settings.dataset is not None and Path(settings.dataset).expanduser().is_file()
    return replace(
        config.tasks,
        file=settings.file,
        dataset=None if settings.file else settings.dataset or config.tasks.dataset,
        subset=settings.subset or (None if settings.dataset else config.tasks.subset),
        split=settings.split or ("train" if is_file else config.tasks.split),
        columns=config.tasks.columns if columns is None else columns,
        evaluation_split=None,
    )


def _tasks_of(config: Config, settings: TasksSettings, *, key: str) -> PackedTasks:
    checks = _data_checks(config)
    try:
        tasks, _ = _read(settings, checks)
    except BadTaskFile as error:
        raise ConfigError(f"{key}: {error}") from error
    _check_environment(tasks, config, key=f"{key}.file")
    return tasks


def _check_environment(tasks: PackedTasks, config: Config, *, key: str) -> None:
    foreign = tasks.environments - {config.tasks.environment}
    if foreign:
        raise ConfigError(
            f"{key}: it holds tasks of {sorted(foreign)}, expected only "
            f"{config.tasks.environment!r} (tasks.environment); split the file or change the "
            "setting"
        )


def _read(
    settings: TasksSettings, checks: Mapping[str, DataCheck]
) -> tuple[PackedTasks, PackedTasks | None]:
    """Return the training tasks, and the tasks of evaluation_split; None if it is not set."""
    if settings.dataset is None:
        assert settings.file is not None
        return PackedTasks(read_tasks(settings.file, checks=checks)), None
    read = partial(
        read_data_set,
        settings.dataset,
        environment=settings.environment,
        columns=settings.columns,
        subset=settings.subset,
        check=checks.get(settings.environment),
    )
    split = settings.evaluation_split
    return read(split=settings.split), None if split is None else read(split=split)


def _fitting(
    config: Config, tasks: PackedTasks, model_path: str, tell: Callable[[str], None]
) -> PackedTasks:
    """Return the tasks whose prompts leave room for an answer."""
    # None means that the environment does not build prompts from data.
    if (first_messages := _first_messages(config)) is None:
        return tasks
    room = config.model.max_context_tokens - config.rollouts.max_tokens_per_turn
    tools = getattr(maker(config)(), "tools", ())
    renderer = renderer_of(config, model_path)
    _check_tools(config, renderer, (), tools)
    vocabulary = vocabulary_size(Path(model_path))
    fitting: list[int] = []
    special: list[str] = []
    for position, task in enumerate(tasks):
        messages = first_messages(task.data)
        if token := renderer.special_in(messages):
            special.append(f"{token!r} in {task.task_id}")
        what = f"the prompt of {task.task_id} (row {position + 1})"
        prompt = _first_prompt(renderer, messages, tools, what=what)
        check_prompt_ids(prompt, vocabulary, renderer, what=what)
        if prompt.shape[0] <= room:
            fitting.append(position)
    if special:
        tell(
            f"{len(special)} of {len(tasks)} prompts contain the text of a special token, such as "
            f"{special[0]}, which the model reads as that token; expected plain text; if the chat "
            "template was applied to the prompts already, set model.chat_template: none"
        )
    problem = (
        f"{len(tasks) - len(fitting)} of {len(tasks)} prompts have more than {room} tokens ({ROOM})"
    )
    if not fitting:
        raise ConfigError(f"tasks.dataset: {problem}; expected shorter ones, or a longer context")
    if len(fitting) < len(tasks):
        tell(f"{problem} and are left out")
    return tasks.selected(fitting)


def room_for_prompt(config: Config) -> int | None:
    """Return how many tokens a prompt of a run may have; None if the run does not measure prompts.

    config: the configuration of one environment; for a mixture, call this with each of its parts.
    """
    is_data = config.tasks.file is not None or config.tasks.dataset is not None
    if not is_data or _first_messages(config) is None:
        return None
    return config.model.max_context_tokens - config.rollouts.max_tokens_per_turn


def _first_messages(
    config: Config,
) -> Callable[[Mapping[str, Any]], Sequence[Message]] | None:
    """Return the function that builds a task's prompt from its data; None if there is none."""
    if not config.has_environment:
        return None
    return getattr(maker(config)(), "first_messages", None)


def _data_checks(config: Config) -> dict[str, DataCheck]:
    if not config.has_environment:
        return {}
    return {name: check_of(maker(each)()) for name, each in config.members.items()}


def data_schemas(config: Config) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each environment's task data, by the environment's name.

    The result is empty if external agents play all tasks. Raises: ConfigError if an environment
    cannot be created, or declares no schema.
    """
    if not config.has_environment:
        return {}
    return {name: data_schema_of(maker(each)()) for name, each in config.members.items()}


class _Exited(Exception):
    """Raised in place of SystemExit if an environment tries to end the process."""


def check_prompt(
    config: Config,
    model_path: str,
    observation: Observation,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Check that the first prompt can be rendered and leaves room for an answer.

    If the environment builds its prompts from data, check the prompts of all tasks instead; at
    least one must leave room.
    config: the configuration of one environment, such as a part of a mixture. observation: the
    environment's first observation. tell: called with each warning.
    Raises: ConfigError if a prompt cannot be rendered or none leaves room.
    """
    if _first_messages(config) is not None:
        tasks = open_tasks(config, model_path=model_path, tell=tell)
        open_sets(config, tasks, model_path=model_path, tell=tell)
        return
    num_prompt = _num_prompt_tokens(config, model_path, observation)
    room = config.model.max_context_tokens - num_prompt
    if room < config.rollouts.max_tokens_per_turn:
        raise ConfigError(
            f"the first prompt has {num_prompt} tokens and an answer may take "
            f"{config.rollouts.max_tokens_per_turn} (rollouts.max_tokens_per_turn); expected both "
            f"within model.max_context_tokens ({config.model.max_context_tokens}); raise that, "
            "or shorten the prompt or the answer"
        )


def first_observations(config: Config) -> dict[str, Observation]:
    """Return the first observation of each environment, by the environment's name.

    Raises: ConfigError if a first task cannot be begun.
    """
    if not config.mixture:
        return {config.tasks.environment: first_observation(config)}
    found = {}
    for name, member in config.members.items():
        with _named_refusals(name):
            found[name] = first_observation(member)
    return found


def check_prompts(
    config: Config,
    model_path: str,
    observations: Mapping[str, Observation],
    *,
    tell: Callable[[str], None],
) -> None:
    """Call `check_prompt` for each environment. Raises: ConfigError if a check fails."""
    if not config.mixture:
        return check_prompt(config, model_path, observations[config.tasks.environment], tell=tell)
    for name, member in config.members.items():
        with _named_refusals(name):
            tell_member = partial(_tell_with_key, f"mixture.{name}", tell)
            check_prompt(member, model_path, observations[name], tell=tell_member)


def first_observation(config: Config) -> Observation:
    """Begin the first task in an environment, as an episode does, and return the observation.

    If external agents play, return a user's message "Hello." instead. Raises: ConfigError if the
    task cannot be begun.
    """
    name = config.tasks.environment
    if not config.has_environment:
        return Observation(messages=(Message(role=Role.USER, content="Hello."),))
    make_environment = maker(config)
    tasks = open_tasks(config)
    # Fail now, not after hours, if the tasks of an evaluation cannot be used.
    open_sets(config, tasks)
    task = tasks.task(0)
    try:
        found = _begun(make_environment, task)
    except KeyboardInterrupt:
        raise
    except _TooLong as error:
        raise ConfigError(
            f"tasks.environment: {name!r} did not begin and close task {task.task_id!r}: {error}"
            f"{note_of_close(error)}"
        ) from error
    except BaseException as error:
        # The user's own code has run here, which may raise any exception.
        raise ConfigError(
            f"tasks.environment: {name!r} could not begin task {task.task_id!r}: "
            f"{_error_text(error)}; fix the task or the environment"
        ) from error
    if not isinstance(found, Observation):
        raise ConfigError(
            f"tasks.environment: reset of {name!r} returned {type_of(found)}, expected a "
            "rayloom.Observation; return one"
        )
    return found


def options_read(settings: TasksSettings) -> Any:
    """Return the environment's options as a dataclass; None if the environment declares none.

    Also return None for external agents. Raises: ConfigError if an option cannot be used.
    """
    if settings.environment in ("", SESSION):
        return None
    try:
        return read_options(settings.environment, settings.options)
    except (UnknownEnvironment, BadEnvironmentOptions) as error:
        raise ConfigError(f"tasks.{error}") from error


def own_names(settings: TasksSettings) -> list[str]:
    """Return the names of the user's own functions, classes and modules in the settings of tasks.

    Raises: ConfigError if the environment's options cannot be read.
    """
    if ":" in settings.environment:
        return [settings.environment]
    options = options_read(settings)
    return [] if options is None else user_code(options)


def maker(config: Config) -> Callable[[], Environment]:
    """Return a function that makes the configured environment.

    Raises: ConfigError if the environment cannot be imported or made.
    """
    name = config.tasks.environment
    try:
        return resolve(name, config.tasks.options)
    except (UnknownEnvironment, BadEnvironmentOptions) as error:
        raise ConfigError(f"tasks.{error}") from error
    except ImportError as error:
        raise ConfigError(f"tasks.environment: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Importing the module and making an environment runs the user's own code.
        raise ConfigError(
            f"tasks.environment: {name!r} cannot be made: {_error_text(error)}; fix the environment"
        ) from error


def _error_text(error: BaseException) -> str:
    root = root_cause(error)
    at = location(root, outside=protocol.CHECKING_FILES)
    return f"{describe(root)}{f' ({at})' if at else ''}"


class _TooLong(Exception):
    """Raised if a method does not end in time; the message names the place and the remedy."""


def _begun(make_environment: Callable[[], Environment], task: Task) -> object:
    """Return the result of `reset`, called in a thread because the user's code may block.

    Raises: _TooLong if `reset` or `close` does not end in time; any exception of the user's code.
    """
    found: Future[object] = Future()

    def begin() -> None:
        try:
            found.set_result(asyncio.run(_begin(make_environment, task)))
        except BaseException as error:  # noqa: BLE001  # raised again by the waiting thread
            found.set_exception(error)

    thread = Thread(target=begin, name="first-task", daemon=True)
    thread.start()
    if wait([found], timeout=2 * RESET_LIMIT_S + BLOCKED_S).done:
        return found.result()
    frame = sys._current_frames().get(thread.ident or 0)
    at = traceback.extract_stack(frame)[-1] if frame is not None else None
    raise _TooLong(
        f"it blocks the event loop{f' ({at.filename}:{at.lineno} in {at.name})' if at else ''}, "
        "which other episodes share; await what takes long, or use asyncio.to_thread"
    )


async def _begin(make_environment: Callable[[], Environment], task: Task) -> object:
    try:
        environment = make_environment()
        async with closing(lambda: _ended("close", environment.close())):
            return await _ended("reset", environment.reset(task.own_copy()))
    except SystemExit as error:
        # In a task, SystemExit would end the event loop, and then the command with its exit code.
        raise _Exited from error


async def _ended(method: str, call: Awaitable[Any]) -> object:
    try:
        async with asyncio.timeout(RESET_LIMIT_S) as limit:
            return await call
    except TimeoutError as error:
        if not limit.expired():
            # The user's code has raised this error.
            raise
        raise _TooLong(f"its {method} took more than {RESET_LIMIT_S:.0f} s; shorten it") from error


def _num_prompt_tokens(config: Config, model_path: str, observation: Observation) -> int:
    renderer, what = renderer_of(config, model_path), "the first prompt"
    _check_tools(config, renderer, observation.messages, observation.tools)
    prompt = _first_prompt(renderer, observation.messages, observation.tools, what=what)
    check_prompt_ids(prompt, vocabulary_size(Path(model_path)), renderer, what=what)
    return int(prompt.shape[0])


def _first_prompt(
    renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[ToolSchema], *, what: str
) -> TokenIds:
    try:
        renderer.template.check_chat(messages)
    except RenderError as error:
        raise ConfigError(f"tasks: {what}: {error}") from error
    try:
        return renderer.first_prompt(messages, tools)
    except RenderError as error:
        raise ConfigError(f"model: its chat template cannot render {what}: {error}") from error


def _schema_problem(schema: dict[str, Any]) -> str | None:
    """Return why a JSON schema is invalid; None if it is valid."""
    drafts = [Draft202012Validator, Draft7Validator, Draft4Validator]
    problems = []
    # A schema that names no draft must be valid in one of the three drafts.
    for draft in [validator_for(schema)] if "$schema" in schema else drafts:
        try:
            draft.check_schema(schema)
        except SchemaError as error:
            problems.append(error.message)
        else:
            return None
    return problems[0]


def _check_tools(
    config: Config, renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> None:
    if not tools:
        return
    for tool in tools:
        if problem := _schema_problem(dict(tool.parameters)):
            raise ConfigError(
                f"tasks.environment: tool {tool.name}: its parameters are not a JSON schema "
                f"({problem:.200}); correct them"
            )
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"tasks.environment: {', '.join(twice)} is the name of two tools, expected unique "
            "names; rename one"
        )
    try:
        renderer.check_tools(messages, tools)
    except RenderError as error:
        raise ConfigError(f"model: {error}") from error
    if config.inference.tool_parser == AUTO and call_form(renderer) is None:
        raise ConfigError(
            f"inference.tool_parser is auto, and {config.tasks.environment!r} declares tools, but "
            "the form of calls in the model's chat template is not known; name one of "
            "vLLM's parsers, or none if the environment reads calls out of the text itself"
        )
