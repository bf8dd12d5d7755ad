"""Check a tracker of the user's own before a run starts. Called by `preflight`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from actors.environment.user_names import BadName, find
from service.config.file import ConfigError
from service.config.trackers import OwnTrackerSettings

KEY = "trackers.own.use"
# The arguments that every tracker's constructor gets.
_GIVEN = ("run_id", "name", "config", "directory")
# The arguments of each method, without the tracker itself.
_CALLS: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
    "write": ((None,), {}),
    "flush": ((), {}),
    "close": ((), {"is_ended": True}),
}


def check_own_tracker(settings: OwnTrackerSettings) -> None:
    """Check that the class can be imported and called as a tracker is.

    Raises: ConfigError.
    """
    try:
        found = find(settings.use, what=KEY)
    except BadName as error:
        raise ConfigError(str(error)) from error
    if not isinstance(found, type):
        raise ConfigError(
            f"{KEY}: {settings.use} is a {type(found).__name__}, expected a class with the methods "
            "write, flush and close; name the class"
        )
    given = dict.fromkeys(_GIVEN)
    if both := sorted(given.keys() & settings.options.keys()):
        raise ConfigError(
            f"trackers.own.options: got {', '.join(both)}, which Rayloom passes itself; expected "
            "other names; rename the option"
        )
    _check_call(found, "the constructor", (), {**given, **settings.options}, use=settings.use)
    for name, (arguments, named) in _CALLS.items():
        method = getattr(found, name, None)
        if not callable(method):
            raise ConfigError(
                f"{KEY}: {settings.use} has no method {name}, expected write(point), flush() and "
                "close(*, is_ended); add it"
            )
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
        own = (None,) if _takes_tracker(found, name) else ()
        _check_call(method, name, (*own, *arguments), named, use=settings.use, num_own=len(own))


def _takes_tracker(kind: type, name: str) -> bool:
    """Return whether a method, read from its class, takes the tracker as its first argument."""
    method = inspect.getattr_static(kind, name)
    # A class method has its class already. An object without `__get__` is never bound.
    return not isinstance(method, staticmethod | classmethod) and hasattr(type(method), "__get__")


def _check_call(
    called: Any,
    what: str,
    arguments: tuple[object, ...],
    named: Mapping[str, object],
    *,
    use: str,
    num_own: int = 0,
) -> None:
    """Check that a call would fit the signature.

    num_own: number of leading arguments that Python passes itself. Raises: ConfigError.
    """
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        # Code in C has no signature.
        return
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        shown = ", ".join(
            [*("point" for _ in arguments[num_own:]), *(f"{name}=…" for name in named)]
        )
        raise ConfigError(
            f"{KEY}: {what} of {use} takes {signature}, expected one that can be called with "
            f"({shown}): {error}; change its arguments"
        ) from None
