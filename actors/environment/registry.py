"""Find environments by name: built-in and registered names, entry points, and "module:Class".

`resolve` checks a name and its options once, before anything starts, and returns a function that
makes an environment for an episode. The configuration's checks and the environment actor call it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType, MethodType
from typing import Any, TypeVar, get_origin

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
from actors.environment.user_names import hides_arguments, missing_module
from actors.options import BadOptions, is_options_type, read, sections_in, shown_type
from actors.user_code import type_of

ENTRY_POINT_GROUP = "rayloom.environments"

# A factory is called with an instance of a class of options if its only argument is annotated with
# such a class, otherwise with the options as keyword arguments; a class is its own factory.
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
# These modules are imported when a configuration names the environment.
_plugins = {
    "code_search": "actors.environment.plugins.code_search.environment:CodeSearchEnvironment",
    "retrieval_qa": "actors.environment.plugins.retrieval_qa.environment:RetrievalQaEnvironment",
    "sql": "actors.environment.plugins.sql.environment:SqlEnvironment",
}


class UnknownEnvironment(ValueError):
    """Raised if a name belongs to no environment, or if its class cannot be imported."""


class BadEnvironmentOptions(ValueError):
    """Raised if an environment does not accept its options."""


def register(name: str, factory: EnvironmentFactory) -> None:
    """Register an environment under a name in this process.

    Raises: ValueError if the name is taken by another factory or contains a colon.
    """
    if ":" in name or not name:
        raise ValueError(f"environment name: got {name!r}, expected a word without a colon")
    if name in _plugins or _factories.get(name, factory) is not factory:
        raise ValueError(f"environment {name!r} is registered already; choose another name")
    _factories[name] = factory


def is_built_in(name: str) -> bool:
    """Return whether a name is a built-in environment, or was registered in this process."""
    return name in _factories or name in _plugins


def known_names() -> list[str]:
    """Return every name that `resolve` knows, sorted. `resolve` also accepts "module:Class"."""
    return sorted({*_factories, *_plugins, *(point.name for point in _entry_points())})


def resolve(name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """Find an environment, bind its options, and make one instance to check its methods.

    Args: name: a registered name, an entry point's name or "module:Class". options: the fields of
    the environment's class of options, or keyword arguments.
    Returns: a function that makes a fresh environment in each call.
    Raises: UnknownEnvironment; BadEnvironmentOptions; ImportError if an optional package that the
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
    """Return an environment's factory with the options bound.

    Raises: BadOptions; BadEnvironmentOptions for keyword arguments that the factory does not take.
    """
    signature = _signature_of(factory)
    if (parameter := _options_parameter(factory, signature)) is not None:
        if not options and parameter.default is not parameter.empty:
            return factory
        found = read(parameter.annotation, options, where="options")
        if parameter.kind is parameter.KEYWORD_ONLY:
            return partial(factory, options=found)
        return partial(factory, found)
    _check_keywords(name, signature, options)
    return partial(factory, **options)


def _check_keywords(name: str, signature: inspect.Signature, options: Mapping[str, Any]) -> None:
    parameters = signature.parameters
    for argument in parameters.keys() & options.keys():
        made = [each for each in sections_in(parameters[argument].annotation) if _is_made(each)]
        if made:
            raise BadEnvironmentOptions(
                f"environment {name!r}: its argument {argument} is a {made[0].__qualname__}, which "
                "has options as its fields; expected the constructor to have no other argument, "
                "and this one to have the name options; rename the argument, and write the fields "
                "of the class directly into tasks.options"
            )
    try:
        signature.bind(**options)
    except TypeError as error:
        accepted = ", ".join(parameters) or "none"
        raise BadEnvironmentOptions(
            f"environment {name!r}: {error}; got options {sorted(options)}, expected {accepted}; "
            "correct its options in the configuration"
        ) from None


def _is_made(section: type[Any]) -> bool:
    """Return whether a class of options makes objects of itself; a TypedDict makes plain dicts."""
    return not issubclass(section, dict)


def read_options(name: str, options: Mapping[str, Any]) -> Any:
    """Return an environment's options as an instance of the environment's class of options.

    Examples, by the arguments of the environment's factory:

    - options: GridOptions, with {"size": 4} -> GridOptions(size=4)
    - options: GridOptions = SMALL, with {} -> SMALL
    - options: GridOptions | None = None, with {} -> None
    - size: int, with {"size": 4} -> None, because the factory has no class of options

    Raises: BadEnvironmentOptions, UnknownEnvironment.
    """
    factory = _find(name)
    try:
        if (parameter := _options_parameter(factory, _signature_of(factory))) is None:
            return None
        default = parameter.default
        if not options and default is not parameter.empty:
            return default if is_options_type(type(default)) else None
        return read(parameter.annotation, options, where="options")
    except BadOptions as error:
        raise BadEnvironmentOptions(f"environment {name!r}: {error}") from error


def _options_parameter(
    factory: EnvironmentFactory, signature: inspect.Signature
) -> inspect.Parameter | None:
    """Return a factory's parameter `options`, if its type is a class of options or a union of them.

    Return None if the factory takes its options as keyword arguments.
    Raises: BadOptions if the type is undefined or a container, or if there are other parameters.
    """
    if (parameter := signature.parameters.get("options")) is None:
        return None
    shown, kind = getattr(factory, "__qualname__", repr(factory)), parameter.annotation
    bound = factory.keywords if isinstance(factory, partial) else {}
    others = ", ".join(name for name in signature.parameters if name not in ("options", *bound))
    if (unknown := _unknown_names(kind)) and not others:
        raise BadOptions(
            f"{shown}: the type {unknown} of its argument options is not known; expected a "
            "dataclass that its module defines or imports, outside of functions and of `if "
            "TYPE_CHECKING`; move the definition or the import, or name the dataclass instead of a "
            "type variable"
        )
    # If the factory has other arguments, the type may be unknown because third-party code
    # defines it; then the options are keyword arguments.
    if unknown or not sections_in(kind):
        return None
    if not is_options_type(kind) or parameter.kind in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    ):
        raise BadOptions(
            f"{shown} takes {parameter}, expected one dataclass or a union of dataclasses, such as "
            f"options: {shown_type(kind)}; correct the argument"
        )
    if others:
        raise BadOptions(
            f"{shown} takes options: {shown_type(kind)} and {others}, expected a dataclass of "
            f"options to be the only argument; make {others} fields of {shown_type(kind)}"
        )
    return parameter


def _unknown_names(annotation: Any) -> str:
    """Return the undefined names and type variables in a type. Example: list[T] -> T"""
    # A string is an annotation that could not be evaluated.
    if isinstance(annotation, str):
        return annotation
    # A generic class has type variables as well, but needs no values of them.
    variables = () if isinstance(annotation, type) else getattr(annotation, "__parameters__", ())
    found = (annotation,) if isinstance(annotation, TypeVar) else variables
    return ", ".join(each.__name__ for each in found)


def _signature_of(
    factory: EnvironmentFactory, unknown: Mapping[str, Any] = MappingProxyType({})
) -> inspect.Signature:
    """Return the signature of a factory, with evaluated annotations.

    An undefined name becomes a type variable; `unknown` has the variables that were made so far. An
    annotation that still cannot be evaluated stays a string.
    """
    called: Any = get_origin(factory) or factory
    try:
        if isinstance(called, type) and hides_arguments(called):
            # A metaclass or `__new__` passes all arguments on.
            called = MethodType(getattr(called, "__init__"), called)  # noqa: B009
        return inspect.signature(called, eval_str=True, locals=dict(unknown))
    except NameError as error:
        if error.name and error.name not in unknown:
            variable: Any = TypeVar
            return _signature_of(factory, {**unknown, error.name: variable(error.name)})
    except Exception:  # noqa: BLE001  # the user's annotations may raise anything
        pass
    try:
        return inspect.signature(called)
    except (TypeError, ValueError):
        # Some classes written in C have no signature.
        return inspect.signature(lambda *args, **named: None)


def _check_methods(made: object) -> None:
    """Raise TypeError if reset, step or close is missing, not async, or takes other arguments."""
    for name, arguments in (("reset", ("task",)), ("step", ("action",)), ("close", ())):
        _check_method(made, name, arguments)


def _check_method(made: object, name: str, arguments: tuple[str, ...]) -> None:
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
        place = ""
        if isinstance(error, ModuleNotFoundError):
            own = file if rest else module_name.strip().replace(".", "/")
            place = f", or {own}.py is below the directory that the command is started in"
        raise UnknownEnvironment(
            f"environment {point.name!r}: {error}; expected an importable {point.value!r}; "
            f"{remedy}check the spelling and that its package is installed on every node{place}"
        ) from error
    if not callable(found):
        raise UnknownEnvironment(
            f"environment {point.name!r}: got {type_of(found)}, expected a class or a "
            "function that returns an environment; name one"
        )
    factory: EnvironmentFactory = found
    return factory
