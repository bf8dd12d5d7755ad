"""Environments by name: the built-in ones, registered ones, entry points, and "module:Class".

`resolve` checks a name and its options once, before anything starts, and returns a function that
makes an environment for an episode. Called by the configuration's checks and by the environment
actor.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

from actors.environment.builtin.calculator import CalculatorEnvironment
from actors.environment.builtin.guessing import GuessingEnvironment
from actors.environment.builtin.gymnasium_env import GYMNASIUM, GymnasiumEnvironment
from actors.environment.builtin.openenv_env import OpenEnvEnvironment
from actors.environment.builtin.reasoning_gym_env import ReasoningGymEnvironment
from actors.environment.builtin.single_turn import SINGLE_TURN, SingleTurnEnvironment
from actors.environment.builtin.skyrl_gym_env import SKYRL_GYM, SkyRLGymEnvironment
from actors.environment.builtin.textarena_env import TEXTARENA, TextArenaEnvironment
from actors.environment.builtin.tools import TOOLS, ToolsEnvironment
from actors.environment.protocol import Environment
from actors.environment.settings import GROUP_REWARD
from actors.environment.task_data import BadDataSchema, data_schema_of
from actors.environment.user_names import missing_module
from actors.options import BadOptions, dataclass_of, read

ENTRY_POINT_GROUP = "rayloom.environments"

# Called with a dataclass of options if its only argument is annotated with one, else with the
# options as keyword arguments; a class is its own factory.
EnvironmentFactory = Callable[..., Environment]

_factories: dict[str, EnvironmentFactory] = {
    "guessing": GuessingEnvironment,
    "calculator": CalculatorEnvironment,
    "openenv": OpenEnvEnvironment,
    "reasoning_gym": ReasoningGymEnvironment,
    GYMNASIUM: GymnasiumEnvironment,
    SINGLE_TURN: SingleTurnEnvironment,
    SKYRL_GYM: SkyRLGymEnvironment,
    TEXTARENA: TextArenaEnvironment,
    TOOLS: ToolsEnvironment,
}
# Imported when a configuration names one.
_plugins = {
    "code_search": "actors.environment.plugins.code_search.environment:CodeSearchEnvironment",
    "retrieval_qa": "actors.environment.plugins.retrieval_qa.environment:RetrievalQaEnvironment",
    "sql": "actors.environment.plugins.sql.environment:SqlEnvironment",
}


class UnknownEnvironment(ValueError):
    """The name belongs to no environment, or its class cannot be imported."""


class BadEnvironmentOptions(ValueError):
    """The environment does not accept these options."""


def register(name: str, factory: EnvironmentFactory) -> None:
    """Add an environment of this process.

    Raises: ValueError if the name is taken by another factory or contains a colon.
    """
    if ":" in name or not name:
        raise ValueError(f"environment name: got {name!r}, expected a word without a colon")
    if name in _plugins or _factories.get(name, factory) is not factory:
        raise ValueError(f"environment {name!r} is registered already; choose another name")
    _factories[name] = factory


def is_built_in(name: str) -> bool:
    """Whether a name is a built-in environment, or was registered in this process."""
    return name in _factories or name in _plugins


def known_names() -> list[str]:
    """Return every name that `resolve` knows, sorted; it also accepts "module:Class"."""
    return sorted({*_factories, *_plugins, *(point.name for point in _entry_points())})


def resolve(name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """Find an environment and bind its options.

    Args: name: a registered name, an entry point's name or "module:Class". options: the fields of
    the environment's dataclass of options, or keyword arguments.
    Returns: a callable that makes a fresh environment.
    Raises: UnknownEnvironment, BadEnvironmentOptions; ImportError if an optional package that the
    environment needs is missing (the message has the remedy).
    """
    try:
        make = _bound(name, _find(name), options)
        made = make()
        _check_methods(made)
        if options.get(GROUP_REWARD):
            _check_method(made, "score_group", ("task", "completions"))
        data_schema_of(made)
    except BadDataSchema as error:
        raise BadEnvironmentOptions(f"environment {name!r}: {error}; correct the class") from error
    except (BadEnvironmentOptions, UnknownEnvironment):
        raise
    except (TypeError, ValueError) as error:
        raise BadEnvironmentOptions(f"environment {name!r}: {error}") from error
    return make


def _bound(
    name: str, factory: EnvironmentFactory, options: Mapping[str, Any]
) -> Callable[[], Environment]:
    """Bind an environment's options to its factory.

    Raises: BadOptions; BadEnvironmentOptions for keyword arguments that the factory does not take.
    """
    if (kind := options_of(factory)) is not None:
        has_default = inspect.signature(factory).parameters["options"].default is None
        if has_default and not options:
            return factory
        return partial(factory, read(kind, options, where="options"))
    hints = _hints(factory)
    for argument in options:
        if kind := dataclass_of(hints.get(argument)):
            raise BadEnvironmentOptions(
                f"environment {name!r}: its argument {argument} is a {kind.__qualname__}, which "
                "is not made from the configuration; expected that dataclass as the type of the "
                "constructor's only argument, with the name options; rename the argument, and "
                "write the dataclass's fields directly into tasks.options"
            )
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        accepted = ", ".join(inspect.signature(factory).parameters) or "none"
        raise BadEnvironmentOptions(
            f"environment {name!r}: {error}; got options {sorted(options)}, expected {accepted}; "
            "correct its options in the configuration"
        ) from None
    return partial(factory, **options)


def read_options(name: str, options: Mapping[str, Any]) -> Any:
    """Return an environment's options as its dataclass; None if they are keyword arguments.

    Raises: BadEnvironmentOptions, UnknownEnvironment.
    """
    try:
        kind = options_of(_find(name))
        return None if kind is None else read(kind, options, where="options")
    except BadOptions as error:
        raise BadEnvironmentOptions(f"environment {name!r}: {error}") from error


def options_of(factory: EnvironmentFactory) -> type[Any] | None:
    """Return the dataclass of an environment's options: the type of its only argument, `options`.

    None if the options are keyword arguments. Raises: BadEnvironmentOptions if its argument
    `options` has a dataclass and others are beside it, or a type that cannot be found.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None
    if "options" not in parameters:
        return None
    shown = getattr(factory, "__qualname__", repr(factory))
    try:
        kind = dataclass_of(_hints(factory, is_strict=True).get("options"))
    except NameError as error:
        if list(parameters) != ["options"]:
            # An annotation of third-party code, which need not be importable.
            return None
        raise BadEnvironmentOptions(
            f"{shown}: the type of its argument options was not found ({error}); expected a "
            "dataclass that its module defines or imports, outside of functions and of `if "
            "TYPE_CHECKING`; move the definition or the import"
        ) from error
    if kind is None:
        return None
    if others := [name for name in parameters if name != "options"]:
        raise BadEnvironmentOptions(
            f"{shown} takes options: {kind.__qualname__} and {', '.join(others)}, expected a "
            f"dataclass of options to be the only argument; make {', '.join(others)} fields of "
            f"{kind.__qualname__}"
        )
    return kind


def _hints(factory: EnvironmentFactory, *, is_strict: bool = False) -> Mapping[str, Any]:
    """Return the types of a factory's arguments, as far as they are known.

    Raises: NameError for a type that was not found, if `is_strict`.
    """
    made_by = getattr(factory, "__init__") if inspect.isclass(factory) else factory  # noqa: B009
    try:
        return get_type_hints(made_by)
    except NameError:
        if is_strict:
            raise
        return {}
    except (AttributeError, TypeError, ValueError):
        return {}


def _check_methods(made: object) -> None:
    """Raise TypeError if reset, step or close is missing, not async, or takes other arguments."""
    for name, arguments in (("reset", ("task",)), ("step", ("action",)), ("close", ())):
        _check_method(made, name, arguments)


def _check_method(made: object, name: str, arguments: tuple[str, ...]) -> None:
    """Raise TypeError if a method is missing or does not take these arguments by position."""
    method = getattr(made, name, None)
    wanted = f"async def {name}({', '.join(('self', *arguments))})"
    if not callable(method):
        raise TypeError(f"it has no method {name}, expected `{wanted}`")
    plain = inspect.unwrap(method)
    if inspect.isroutine(plain) and not inspect.iscoroutinefunction(plain):
        raise TypeError(f"{name} is not a coroutine, expected `{wanted}`; add async before def")
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name}: {error}, expected `{wanted}`") from None


def _find(name: str) -> EnvironmentFactory:
    if name in _factories:
        return _factories[name]
    if name in _plugins or ":" in name:
        value = _plugins.get(name, name)
        return _load(EntryPoint(name=name, value=value, group=ENTRY_POINT_GROUP))
    for point in _entry_points():
        if point.name == name:
            return _load(point)
    raise UnknownEnvironment(
        f"environment: got {name!r}, expected one of {', '.join(known_names())}, "
        'or your own as "module:Class"'
    )


def _entry_points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _load(point: EntryPoint) -> EnvironmentFactory:
    module_name, _, path = point.value.partition(":")
    try:
        found: Any = importlib.import_module(module_name.strip())
        for part in path.strip().split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError):
            problem = missing_module(error, module_name.strip())
            if problem:
                raise UnknownEnvironment(f"environment {point.name!r}: {problem}") from error
        file, _, rest = point.value.partition(".py:")
        remedy = f"did you mean {file.replace('/', '.')}:{rest}? " if rest else ""
        raise UnknownEnvironment(
            f"environment {point.name!r}: {error}; expected an importable {point.value!r}; "
            f"{remedy}check the spelling and that its package is installed on every node"
        ) from error
    if not callable(found):
        raise UnknownEnvironment(
            f"environment {point.name!r}: got a {type(found).__name__}, expected a class or a "
            "function that returns an environment; name one"
        )
    factory: EnvironmentFactory = found
    return factory
