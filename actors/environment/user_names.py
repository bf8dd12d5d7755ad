"""A user's own functions and classes by name: FILE.py:NAME, or package.module:NAME.

A file lies below the directory that the command is started in, which is on the import path of every
process of the run. Called for reward functions and tools, and by what a run keeps of its sources.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from actors.environment.user_code import describe

_EXPECTED = "expected a name of a module that can be imported from where the command is started"


class BadName(ValueError):
    """Nothing is found by the name."""


def module_of(text: str, *, what: str) -> str:
    """The module of a name. what: the option that has it, for the error. Raises: BadName.

    Example: rewards/my.py:score -> rewards.my
    """
    place, colon, name = text.partition(":")
    if place.endswith(".py"):
        place = place.removesuffix(".py").removeprefix("./").replace("/", ".")
    if not colon or not name or not place or place.startswith("."):
        raise BadName(
            f"{what}: got {text!r}, expected FILE.py:NAME below the directory that the command "
            "is started in, or package.module:NAME"
        )
    return place


def find(text: str, *, what: str) -> Any:
    """Import what a name means. what: as `module_of`. Raises: BadName; what the import raises."""
    place, _, name = text.partition(":")
    try:
        module = importlib.import_module(module_of(text, what=what))
        _check_file(module, place, what=what)
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        own = module_of(text, what=what)
        if error.name is not None and not f"{own}.".startswith(f"{error.name}."):
            raise BadName(
                f"{what}: {text}: its module needs {error.name}, which is not installed; install it"
            ) from error
        raise BadName(f"{what}: {text}: {error}; {_EXPECTED}") from error
    except (ImportError, AttributeError) as error:
        raise BadName(f"{what}: {text}: {error}; {_EXPECTED}") from error
    except (Exception, SystemExit) as error:
        raise BadName(
            f"{what}: {text}: its module raised {describe(error)}; expected one that can be "
            "imported; mend it"
        ) from error
    return found


def _check_file(module: ModuleType, place: str, *, what: str) -> None:
    """A file's name may be that of another module, which is imported then. Raises: BadName."""
    if not place.endswith(".py") or not (file := Path(place)).is_file():
        return
    found = getattr(module, "__file__", None)
    if found is None or not file.samefile(found):
        raise BadName(
            f"{what}: {place} is not what Python imports by its name ({found or 'a built-in'} is); "
            "rename the file"
        )
