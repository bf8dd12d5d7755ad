"""Find a user's functions and classes by name, which is FILE.py:NAME or package.module:NAME.

FILE.py is below the directory in which the command is started; every process of the run has this
directory on its import path. This module finds reward functions and tools, and the modules
whose files a run records at its start. It also reads the names of a function's arguments.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from actors.user_code import describe

_EXPECTED = "expected a name of a module that can be imported from where the command is started"
_FORMS = (
    "expected FILE.py:NAME below the directory that the command is started in, or "
    "package.module:NAME"
)


HIDES = (
    "its signature (*args, **kwargs) hides its arguments: if a decorator made it, use "
    "functools.wraps there"
)


class BadName(ValueError):
    """Raised if a name cannot be resolved."""


def module_of(text: str, *, what: str) -> str:
    """Return the module in a name such as FILE.py:NAME.

    what: name of the option that contains `text`, for the error.
    Raises: BadName if the name has another form.
    Example: rewards/my.py:score -> rewards.my
    """
    place, colon, name = text.partition(":")
    if Path(place).is_absolute():
        raise BadName(f"{what}: got {text!r}, {_FORMS}{_below(Path.cwd(), text)}")
    if place.endswith(".py"):
        place = os.path.normpath(place).removesuffix(".py").replace("/", ".")
    if not colon or not name or not place or place.startswith("."):
        raise BadName(f"{what}: got {text!r}, {_FORMS}")
    return place


def _below(directory: Path, text: str) -> str:
    """Return a remedy for a name with an absolute path, as the end of an error's text.

    Example: _below(Path("/home/a"), "/home/a/my.py:score") -> "; write 'my.py:score'"
    """
    if Path(text).is_relative_to(directory):
        return f"; write {str(Path(text).relative_to(directory))!r}"
    return f"; start the command in a directory above the file instead of {directory}"


def is_importable(name: str) -> bool:
    """Return whether another process can import a function's module.

    The result is False for a module that this process made itself, without a file to import.
    """
    with suppress(BadName):
        module = sys.modules.get(module_of(name, what="function"))
        return module is None or getattr(module, "__spec__", None) is not None
    return False


def find(text: str, *, what: str) -> Any:
    """Import and return the function, class or other object that has a name.

    what: name of the option that contains `text`, for the error.
    Raises: BadName if there is no such object.
    """
    place, _, name = text.partition(":")
    module_name = module_of(text, what=what)
    here = _directory()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if problem := missing_module(error, module_name):
            raise BadName(f"{what}: {text}: {problem}") from error
        raise BadName(f"{what}: {text}: {_not_found(place, error)}") from error
    except ImportError as error:
        raise BadName(f"{what}: {text}: {error}{_importing(error)}; {_EXPECTED}") from error
    except (Exception, SystemExit) as error:
        raise BadName(
            f"{what}: {text}: its module raised {describe(error)}{_importing(error)}; expected a "
            "module that can be imported; correct it"
        ) from error
    if here is not None and (now := _directory()) != here:
        os.chdir(here)
        raise BadName(
            f"{what}: {text}: importing its module changed the working directory from {here} to "
            f"{now}, expected no change, because other paths are relative to it; remove os.chdir "
            "from the module, and use absolute paths"
        )
    _check_file(module, place, what=what)
    owner: Any = None
    found: Any = module
    for part in name.split("."):
        try:
            owner, found = found, getattr(found, part)
        except AttributeError as error:
            raise BadName(f"{what}: {text}: {error}; {_names_in(found, part)}") from error
        except Exception as error:
            raise BadName(
                f"{what}: {text}: reading {part} raised {describe(error)}, expected a function "
                "that is defined there; correct the module"
            ) from error
    is_method = isinstance(owner, type) and inspect.isfunction(found)
    if is_method and not isinstance(inspect.getattr_static(owner, part), staticmethod):
        raise BadName(
            f"{what}: {text} is a method of the class {owner.__name__} and has no instance, "
            f"expected a function; assign an instance in the module, such as "
            f"own = {owner.__name__}(), and use own.{part}"
        )
    return found


def helpers_from_elsewhere(text: str) -> Iterator[str]:
    """Yield a warning for each import that ignored a module in the directory of the user's file.

    Example: rewards/my.py has `import helpers`, there are rewards/helpers.py and helpers.py, and
    the user starts the command in the directory above rewards. Python then loads helpers.py and
    ignores rewards/helpers.py. Imports of the standard library cause no warning.

    text: name of a function or class in the user's file, which must be imported already.
    """
    module = sys.modules.get(module_of(text, what="function"))
    file = Path(getattr(module, "__file__", None) or "")
    for name in _imported_by(file):
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded is None or name in sys.stdlib_module_names:
            continue
        for beside in (file.parent / f"{name}.py", file.parent / name / "__init__.py"):
            if beside.is_file() and not _is_same(beside, Path(loaded)):
                yield (
                    f"{file} imports {name}, which is {loaded}, and {beside} is not used, because "
                    f"modules are looked up from {Path.cwd()}, where the command is started. To "
                    f"use {beside}, start the command in {file.parent}, or import the file by its "
                    "name from here; otherwise rename one of the two"
                )


def _is_same(file: Path, loaded: Path) -> bool:
    """Return whether the two are one file; False if `loaded` was removed or is in a zip archive."""
    with suppress(OSError):
        return file.samefile(loaded)
    return False


def _imported_by(file: Path) -> list[str]:
    """Return the top-level modules of a file's absolute imports, such as a for `import a.b`."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return []
    names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    names += [
        node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        if node.module and not node.level
    ]
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def _directory() -> Path | None:
    """Return the working directory; None if it was removed."""
    with suppress(OSError):
        return Path.cwd()
    return None


def _not_found(place: str, error: ModuleNotFoundError) -> str:
    if place.endswith(".py") and Path(place).is_file():
        without_dots = os.path.normpath(place).removesuffix(".py").replace(".", "_")
        return (
            "the file exists, but a module's name cannot have the dots in its path; expected no "
            f"dot except before py; rename it, for example to {without_dots}.py"
        )
    problem = f"there is no such file in {Path.cwd()}" if place.endswith(".py") else str(error)
    return f"{problem}; {_FORMS}; correct the name, or start the command in the right directory"


def _names_in(owner: Any, part: str) -> str:
    """Return a hint for a name that `owner` does not have: a similar name, or all its names."""
    # `getattr` may run a property, or import the modules of a package that loads them on demand.
    found = {name: inspect.getattr_static(owner, name, None) for name in dir(owner)}
    known = [name for name, value in found.items() if callable(value) and name[0] != "_"]
    if isinstance(owner, ModuleType):
        known = [n for n in known if getattr(found[n], "__module__", "") == owner.__name__]
    if near := difflib.get_close_matches(part, known, n=1):
        return f"did you mean {near[0]!r}?"
    return f"expected one of {', '.join(known)}" if known else "expected a function that it defines"


def missing_module(error: ModuleNotFoundError, own: str) -> str:
    """Return a sentence that says which module was not found, which file imports it, and a remedy.

    Args: own: name of the module whose import failed.
    Returns: the sentence; empty if the missing module is `own` itself.
    """
    missing = error.name
    if missing is None or f"{own}.".startswith(f"{missing}."):
        return ""
    places = _module_frames(error)
    at = places[-1] if places else None
    importer = f"{at.filename}:{at.lineno} imports" if at is not None else "its module needs"
    first = missing.partition(".")[0]
    folder = Path(at.filename).parent if at is not None else None
    if folder is not None and ((folder / first).is_dir() or (folder / f"{first}.py").is_file()):
        return (
            f"{importer} {missing}, which is not found, although {first} is in {folder}: modules "
            f"are looked up from {Path.cwd()}, where the command is started; start it in {folder}, "
            "or import the module by its name from here"
        )
    return f"{importer} {missing}, which is not installed; install it, or correct the name"


def _importing(error: BaseException) -> str:
    """Return where an import failed, such as " (b.py:3, imported at a.py:1)", or ""."""
    places = [f"{each.filename}:{each.lineno}" for each in reversed(_module_frames(error))]
    return f" ({', imported at '.join(places[:3])})" if places else ""


def _module_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return an error's frames in code that runs while a module is imported."""
    frames = traceback.extract_tb(error.__traceback__)
    return [each for each in frames if each.name == "<module>"]


def hides_arguments(function: Callable[..., Any]) -> bool:
    """Return whether a function's signature is (*args, **kwargs), and so hides its arguments.

    A decorator that does not use `functools.wraps` makes such a signature.
    """
    kinds = [each.kind for each in inspect.signature(function).parameters.values()]
    return kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


def bound_name(function: Callable[..., Any]) -> str:
    """Return the name that a bound method gives its first argument, usually "self".

    Empty for a plain function. No column is passed under this name.
    """
    if isinstance(function, partial) and function.args:
        # A method of an instance that a worker keeps: a placeholder takes the place of self.
        return next(iter(inspect.signature(function.func).parameters), "")
    method = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004
    plain = getattr(method, "__func__", None)
    return next(iter(inspect.signature(plain).parameters), "") if plain is not None else ""


def arguments_of(function: Callable[..., Any]) -> dict[str, bool]:
    """Return the arguments that can be given by name, and whether each of them is required."""
    return {
        name: each.default is each.empty
        for name, each in inspect.signature(function).parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }


def renaming(names: Collection[str], *, takes_lists: bool) -> str:
    """Return a hint for an error's text if an argument should be renamed, else an empty text.

    A reward function that scores a list of answers has the arguments `completions` and `prompts`.
    A reward function that scores one answer has the arguments `completion` and `prompt`.

    names: the arguments' names. takes_lists: whether the function scores a list of answers.
    Example: renaming(["prompt"], takes_lists=True)
        -> "in a function with lists the argument is prompts; rename prompt"
    """
    one, lists = ("completion", "prompt"), ("completions", "prompts")
    wrong, right, form = (
        (one, lists, "with lists") if takes_lists else (lists, one, "of one answer")
    )
    found = [pair for pair in zip(wrong, right, strict=True) if pair[0] in names]
    return "".join(
        f"in a function {form} the argument is {new}; rename {old}" for old, new in found[:1]
    )


def remedy_of_missing(
    names: Sequence[str],
    columns: Collection[str],
    *,
    takes_lists: bool,
    of_tools: Collection[str],
) -> str:
    """Return the remedy for a reward function that requires arguments that it is not given.

    Args:
        names: The arguments' names.
        columns: The columns of the data.
        takes_lists: Whether the function scores a list of answers.
        of_tools: Arguments that only the environment `tools` gives.

    Example: names=["anser"] and columns=["answer"] -> "did you mean 'answer'? If not, give the data
        such a column, or the argument a default"
    """
    if hint := renaming(names, takes_lists=takes_lists):
        return hint
    if lacking := [name for name in names if name in of_tools]:
        return (
            f"a run with tools gives {' and '.join(lacking)}; set --tools or "
            "tasks.options.tools, or remove the argument: the answer is "
            f"{'completions' if takes_lists else 'completion'}"
        )
    near = difflib.get_close_matches(names[0], columns, n=1)
    hint = f"did you mean {near[0]!r}? If not, " if near else ""
    return f"{hint}give the data such a column, or the argument a default"


def _check_file(module: ModuleType, place: str, *, what: str) -> None:
    """Raise BadName if Python imported the module from a file other than `place`."""
    if not place.endswith(".py") or not (file := Path(place)).is_file():
        return
    found = getattr(module, "__file__", None)
    if found is None or not file.samefile(found):
        raise BadName(
            f"{what}: {place}: by this name Python imports {found or 'a built-in module'} instead; "
            "rename the file"
        )
