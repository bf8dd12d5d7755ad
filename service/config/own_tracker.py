"""Check a tracker of the user's own before a run starts; `preflight` calls this module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import singledispatchmethod
from typing import Any

from actors.environment.user_names import BadName, find
from actors.user_code import describe, type_of
from service.config.file import ConfigError
from service.config.trackers import OwnTrackerSettings

KEY = "trackers.own.use"
# The arguments that every tracker's constructor gets.
_GIVEN = ("run_id", "name", "config", "directory")
# The arguments of each method, without `self`.
_CALLS: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
    "write": ((None,), {}),
    "flush": ((), {}),
    "close": ((), {"is_ended": True}),
}


def check_own_tracker(settings: OwnTrackerSettings) -> None:
    """Check that the user's class can be imported, and that it accepts the calls of a tracker.

    Raises: ConfigError if it does not.
    """
    try:
        found = find(settings.use, what=KEY)
    except BadName as error:
        raise ConfigError(str(error)) from error
    if not isinstance(found, type):
        raise ConfigError(
            f"{KEY}: {settings.use} is {type_of(found)}, expected a class with the methods write, "
            "flush and close; name the class"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ConfigError(
            f"{KEY}: {settings.use} is abstract, expected a class that defines "
            f"{missing}; define the methods, or name a subclass"
        )
    given = dict.fromkeys(_GIVEN)
    if both := sorted(given.keys() & settings.options.keys()):
        raise ConfigError(
            f"trackers.own.options: got {', '.join(both)}, which Rayloom passes itself; expected "
            "other names; rename the option"
        )
    _check_call(found, "the constructor", (), {**given, **settings.options}, use=settings.use)
    for name, (arguments, named) in _CALLS.items():
        method = _method(found, name, use=settings.use)
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise ConfigError(
                f"{KEY}: {settings.use}.{name} is async, expected a plain method, which a thread "
                "calls; remove async"
            )
        if inspect.isgeneratorfunction(method):
            raise ConfigError(
                f"{KEY}: {settings.use}.{name} is a generator, whose body would never run, "
                "expected a plain method; remove yield"
            )
        _check_call(method, name, arguments, named, use=settings.use)


def _method(kind: type, name: str, *, use: str) -> Callable[..., object]:
    """Return a method bound to an object, to check its signature.

    Raises: ConfigError if the class has no such method.
    """
    try:
        method = inspect.getattr_static(kind, name, None)
        if isinstance(method, singledispatchmethod):
            # Even if bound to an instance, the dispatcher itself has `self` in its signature.
            method = method.func
        if hasattr(type(method), "__get__"):
            # Bind it to any object: the signature is the same as for an instance of the class.
            method = method.__get__(object(), kind)
    except Exception as error:
        # A metaclass and a descriptor of the user's may raise anything.
        raise ConfigError(
            f"{KEY}: the method {name} of {use} cannot be read ({describe(error)}); expected a "
            "class whose methods are defined in its body; define it there"
        ) from error
    if not callable(method):
        raise ConfigError(
            f"{KEY}: {use} has no method {name}, expected write(point), flush() and "
            "close(*, is_ended); add it"
        )
    return method


def _check_call(
    called: Any,
    what: str,
    arguments: tuple[object, ...],
    named: Mapping[str, object],
    *,
    use: str,
) -> None:
    """Check that a call with these arguments fits the signature. Raises: ConfigError if not."""
    try:
        signature = inspect.signature(called)
    except Exception:  # noqa: BLE001
        # Code in C has no signature, and a metaclass of the user's may raise anything.
        return
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        shown = ", ".join([*("point" for _ in arguments), *(f"{name}=…" for name in named)])
        raise ConfigError(
            f"{KEY}: {what} of {use} takes {signature}, expected one that can be called with "
            f"({shown}): {error}; change its arguments"
        ) from None
