"""Store the functions and rows that a caller gives, so that the process of a run can read them.

An object is passed by its name, MODULE:NAME, if an importable module has the object under this
name. Any other object is passed by value: a function of a notebook or script, a wrapper, a bound
method. Its value and source are stored in the run's directory, and a resumed run uses the stored
value. Rows are written to a file in the run's directory.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import inspect
import io
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from contextlib import suppress
from copy import copy
from importlib.machinery import PathFinder
from itertools import chain, count
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_type_hints

import cloudpickle

from actors.user_code import type_of
from service.config.file import ConfigError

_logger = logging.getLogger(__name__)

Named = str | Callable[..., Any]
"""A function or a class, or its name: FILE.py:NAME, or package.module:NAME."""
Given = Named | Iterable[Named] | Mapping[Named, float]
"""One function, several, or functions with their weights."""
WEIGHTED = ("reward", "group_reward")
"""The arguments whose functions may have weights."""


def listed(given: Given, *, what: str) -> list[Named]:
    """Return the functions that were given for an argument, as a list.

    what: name of the argument, for errors. Raises: ConfigError if the argument has another form.
    Example: a mapping from functions to weights, {exact: 1.0, brief: 0.2} -> [exact, brief]
    """
    if isinstance(given, str) or callable(given):
        return [given]
    refused = Set | bytes if what in WEIGHTED else Set | bytes | Mapping
    if not isinstance(given, Iterable) or isinstance(given, refused):
        raise ConfigError(f"{what}: got {type_of(given)}, {_expected(what)}")
    functions = list(given)
    for each in functions:
        if not isinstance(each, str) and not callable(each):
            raise ConfigError(f"{what}: got {type_of(each)}, {_expected(what)}")
    return functions


def _expected(what: str) -> str:
    or_weights = ", or a mapping from functions to weights" if what in WEIGHTED else ""
    return f"expected a function, its name FILE.py:NAME, or a list of them{or_weights}; pass that"


def name_of(
    function: Named, store: Path, *, what: str, others: Collection[str] = frozenset()
) -> str:
    """Return the name MODULE:NAME by which a run can import a function or a class.

    If the object has no such name, it is first stored in a new module in `store`.
    Args: what: name of the argument that contains the object, for errors. others: names that are
    taken, such as module:score; another stored function `score` then gets the name score_2.
    Raises: ConfigError if the object cannot be stored, or if it uses a module that the run would
    import from another file.
    """
    if isinstance(function, str):
        return function
    if name := _own_name(function):
        module = sys.modules[name.partition(":")[0]]
        _check_files([module.__name__, *_modules_in(module)], what=what)
    return name or _stored(function, store, what=what, others=others)


def own_paths() -> list[str]:
    """Return the caller's import paths, except those of installed packages."""
    places = [Path(each).resolve() for each in sys.path if each]
    return [str(each) for each in places if each.exists() and not _is_installed(each)]


def _is_installed(place: Path) -> bool:
    return any(place.is_relative_to(Path(each).resolve()) for each in (sys.prefix, sys.base_prefix))


def _modules_in(module: ModuleType) -> set[str]:
    """Return the names of the modules that a module uses, or from which it has imported names."""
    return {name for each in list(vars(module).values()) if (name := _module_of(each))}


def _module_of(value: Any) -> str:
    """Return the name of a module, or of a class's or function's module; empty for other values."""
    name = None
    if isinstance(value, ModuleType):
        name = value.__name__
    elif isinstance(value, type | FunctionType):
        name = value.__module__
    # A metaclass may have any value there.
    return name if isinstance(name, str) else ""


def _check_files(modules: Iterable[str], *, what: str) -> None:
    """Raise ConfigError if the run would import one of the caller's modules from another file."""
    # The run looks in the working directory first, as each command does.
    path = [os.getcwd(), *own_paths(), *sys.path]
    for name in dict.fromkeys(modules):
        file = getattr(sys.modules.get(name), "__file__", None)
        if name == "__main__" or not file or _is_installed(Path(file).resolve()):
            continue
        found = _found_by_run(name, path)
        is_same = found in (None, file)
        with suppress(OSError):  # such as a file in an archive
            is_same = is_same or os.path.samefile(found or "", file)
        if not is_same:
            raise ConfigError(
                f"{what}: the module {name} is {file} here, but the run would import {found}, "
                "because it looks in the working directory first; expected the same file: rename "
                "one of them, or start in another directory"
            )


def _found_by_run(module: str, path: list[str]) -> str | None:
    """Return the file that `import module` would load from the directories `path`, or None."""
    spec, name = None, ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        try:
            spec = PathFinder.find_spec(name, path)
            if spec is None:
                return None
            # A namespace package looks for its parent in sys.modules.
            path = list(spec.submodule_search_locations or ())
        except (AttributeError, ImportError, KeyError):
            return None
    return spec.origin if spec is not None and spec.has_location else None


def _own_name(function: Callable[..., Any]) -> str:
    """Return the MODULE:NAME by which exactly this object can be imported; empty if none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found = sys.modules.get(module) if isinstance(module, str) else None
    if not name or module == "__main__" or getattr(found, "__spec__", None) is None:
        return ""
    try:
        # A wrapper of `functools.wraps`, for example, has the name of the function inside.
        is_same = attrgetter(name)(found) is function
    except AttributeError:  # such as a nested function, whose name has "<locals>"
        is_same = False
    return f"{module}:{name}" if is_same else ""


# Objects that dataclasses compares by identity; cloudpickle would copy them.
_DATACLASS_MARKS = ("MISSING", "KW_ONLY", "_FIELD", "_FIELD_CLASSVAR", "_FIELD_INITVAR")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickle by value, and collect the modules that must be imported to read the pickle."""

    def __init__(self, file: io.BytesIO, *, with_types: bool) -> None:
        super().__init__(file)
        self.modules: set[str] = set()
        self._with_types = with_types

    def reducer_override(self, obj: Any) -> Any:
        for name in _DATACLASS_MARKS:
            if obj is getattr(dataclasses, name):
                return getattr, (dataclasses, name)
        reduced = super().reducer_override(obj)
        # A function or a class with another result is pickled by value.
        if reduced is NotImplemented:
            self.modules.add(_module_of(obj))
        elif self._with_types and isinstance(obj, FunctionType):
            _, slots = reduced[2]
            slots["__annotations__"] = _types_of(obj)
        elif self._with_types and isinstance(obj, type) and _is_record(obj):
            members, _ = reduced[2]  # a copy of the class's own members
            types = _types_of(obj)
            own = members.get("__annotations__", {})
            members["__annotations__"] = {name: types.get(name, own[name]) for name in own}
            if fields := members.get("__dataclass_fields__"):
                fields = members["__dataclass_fields__"] = {n: copy(f) for n, f in fields.items()}
                for name, field in fields.items():
                    field.type = types.get(name, field.type)
        return reduced


def _is_record(kind: type) -> bool:
    """Return whether pydantic reads a class's annotations: a dataclass, TypedDict or NamedTuple."""
    return dataclasses.is_dataclass(kind) or issubclass(kind, dict | tuple)


def _types_of(obj: FunctionType | type) -> dict[str, Any]:
    """Return the annotations of a function or a class, with types instead of names if possible."""
    # What is pickled by value keeps only the names that its code uses. Under
    # `from __future__ import annotations` the names of its annotations would be lost.
    with suppress(Exception):  # an undefined name, or any error of an annotation or a value in it
        types = get_type_hints(obj, include_extras=True)
        cloudpickle.dumps(types)
        return types
    return obj.__annotations__


def _stored(
    function: Callable[..., Any], store: Path, *, what: str, others: Collection[str]
) -> str:
    """Store a function by value in a new module in `store`, and return its MODULE:NAME.

    what, others: as for `name_of`. Raises: ConfigError if the function cannot be pickled.
    """
    name = getattr(function, "__name__", "")
    name = name if name.isidentifier() else "unnamed"
    buffer = io.BytesIO()
    # Only a tool's annotations are read; those of another function might import large libraries.
    pickler = _Pickler(buffer, with_types=what == "tools")
    try:
        pickler.dump(function)
    except Exception as error:  # the values that it refers to may raise any error
        raise ConfigError(
            f"{what}: {name} cannot be stored by value ({type(error).__name__}: {error}); expected "
            "a function that refers only to values that can be pickled; define it in a file and "
            "pass FILE.py:NAME"
        ) from error
    _check_files(sorted(pickler.modules), what=what)
    value = buffer.getvalue()
    digest = hashlib.sha256(value).hexdigest()
    module = f"given_{digest[:16]}"
    used = {each.partition(":")[2] for each in others}
    numbered = chain([name], (f"{name}_{number}" for number in count(2)))
    # The same function twice keeps its name, and is refused.
    name = next(each for each in numbered if f"{module}:{each}" in others or each not in used)
    # Of a function the code, because getsource would show the inner function of a wrapper.
    shown: Any = function if isinstance(function, type) else getattr(function, "__code__", None)
    try:
        source = inspect.getsource(shown)
    except (OSError, TypeError):
        source = "its source is not known\n"
    commented = "".join(f"# {line}".rstrip() + "\n" for line in source.splitlines())
    store.mkdir(parents=True, exist_ok=True)
    (store / f"{module}.py").write_text(
        f'"""{name}, as it was when the run began: by value, SHA-256 {digest}."""\n\n'
        f"{commented}\nfrom base64 import b64decode\n\nimport cloudpickle\n\n"
        f'{name} = cloudpickle.loads(b64decode("{base64.b64encode(value).decode()}"))\n',
        encoding="utf-8",
    )
    return f"{module}:{name}"


_FORMS = "expected a list of dicts, a datasets.Dataset or a pandas DataFrame"


def write_rows(dataset: Iterable[Mapping[str, Any]], directory: Path) -> Path:
    """Write rows to a file `rows` in a directory, which is created, and return the file.

    A `datasets.Dataset` becomes a Parquet file, so that each column keeps its type. Other rows
    become JSON lines.

    Raises: ConfigError if `dataset` is not rows, or if a value is not JSON.
    """
    _check_form(dataset)
    if _is_a(dataset, "datasets.IterableDataset"):
        dataset = _in_memory(dataset)
    if _is_a(dataset, "datasets.Dataset"):
        return _write_parquet(dataset, directory)
    if _is_frame(dataset):
        dataset = _records(dataset)
    left_out: set[str] = set()
    rows = [
        _as_plain(row, f"dataset: row {number}", left_out)
        for number, row in enumerate(dataset, start=1)
    ]
    for name in sorted(left_out):
        _logger.warning("dataset: column %s is left out: it holds bytes", name)
    lines = [
        json.dumps({name: row[name] for name in row if name not in left_out}, ensure_ascii=False)
        for row in rows
    ]
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "rows.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def without_file(text: str, directory: Path) -> str:
    """Put "dataset" into an error's text, in place of the name of the file that `write_rows` wrote.

    The file is removed after the error, so its name would not help the user.
    """
    place = re.escape(os.path.relpath(directory))
    return re.sub(rf"(?:data set )?{place}/rows\.(?:jsonl|parquet)", "dataset", text)


# Words of the command's messages, and what a caller from Python writes. Two things do not change:
# a command in a message, such as `rayloom sft --resume DIR`, and a name like models--acme--model.
_OPTION = r"(?<!train )(?<!serve )(?<!sft )(?<![\w./-])--"
_IN_PYTHON = (
    (rf"with {_OPTION}resume ([^:;,\n]+)$", r'with the argument resume="\1"'),
    (rf"{_OPTION}set (\w+)\.([\w.]+)=([^\s;,`]*\w)", r'\1={"\2": \3}'),
    (rf"{_OPTION}(group)-(reward)\b|{_OPTION}(run)-(dir)\b", r"\1\3_\2\4"),
    (
        rf"{_OPTION}(checkpoint|dataset|model|on|out|resume|reward|samples|tasks|temperature|tools)"
        r"(?![\w-])",
        r"\1",
    ),
    (r"\b(no|or|without|a) CONFIG\b", r"\1 config"),
    # The module in which a function of the caller's is stored.
    (r"\bgiven_[0-9a-f]{16}:", ""),
)


def in_python(text: str) -> str:
    """Put the arguments that a caller gives into a command's message, in place of its options.

    Example: "choose another --run-dir" -> "choose another run_dir"
    """
    for pattern, replacement in _IN_PYTHON:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def _check_form(dataset: Any) -> None:
    """Raise ConfigError if `dataset` cannot be read row by row."""
    got = f"dataset: got {type_of(dataset)}"
    if _is_a(dataset, "datasets.DatasetDict") or _is_a(dataset, "datasets.IterableDatasetDict"):
        splits = ", ".join(map(str, dataset))
        raise ConfigError(
            f"{got} with the splits {splits}, expected one of them; give the split, such as "
            f"data[{next(iter(dataset), 'train')!r}]"
        )
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, dataset))
        raise ConfigError(
            f"{got} with the keys {names}, {_FORMS}; for a dict of columns, give "
            "datasets.Dataset.from_dict(data)"
        )
    if _is_a(dataset, "pandas.Series"):
        raise ConfigError(f'{got}, {_FORMS}; give data.to_frame("prompt") for a column of prompts')
    try:
        iter(dataset)  # a class may have only __getitem__ and __len__, as torch's Subset
    except TypeError:
        raise ConfigError(f"{got}, {_FORMS}; correct it") from None


def _is_a(value: object, name: str) -> bool:
    """Return whether a value's class is `name`, such as pandas.DataFrame, without an import."""
    package, _, kind = name.partition(".")
    found = getattr(sys.modules.get(package), kind, None)
    return isinstance(found, type) and isinstance(value, found)


def _is_frame(value: Any) -> bool:
    """Return whether a value is a DataFrame of pandas, or of a library with the same interface."""
    # Polars, which has `to_dicts`, has another `to_dict`.
    is_named = type(value).__name__ == "DataFrame" and not hasattr(value, "to_dicts")
    return _is_a(value, "pandas.DataFrame") or (is_named and hasattr(value, "to_dict"))


def _in_memory(dataset: Any) -> Any:
    from datasets import Dataset
    from pyarrow import ArrowException

    rows = list(dataset.with_format(None))
    if dataset.features is None:
        # `from_list` would take the columns of the first row only.
        return rows
    try:
        columns = {name: [row.get(name) for row in rows] for name in dataset.features}
        return Dataset.from_dict(columns, features=dataset.features)
    except (ArrowException, TypeError, ValueError) as error:
        raise ConfigError(
            f"dataset: the rows do not have the types of its features ({error}), expected rows of "
            "these types; correct the features, or give list(data)"
        ) from error


def _write_parquet(dataset: Any, directory: Path) -> Path:
    from pyarrow import ArrowException

    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "rows.parquet"
    try:
        dataset.to_parquet(file)
    except ArrowException as error:
        raise ConfigError(
            f"dataset: cannot be written as Parquet ({error}), expected columns that Parquet can "
            "hold; leave the column out by remove_columns, or give data.to_list()"
        ) from error
    return file


def _records(frame: Any) -> Any:
    names = [str(name) for name in frame.columns]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"dataset: the column {', '.join(twice)} occurs twice, expected unique names; "
            "rename one"
        )
    return frame.to_dict("records")


def _as_plain(row: Any, where: str, left_out: set[str]) -> dict[str, Any]:
    """Return a row with JSON values, converted as `read_data_set` converts the rows of files.

    where: the row's name in a ConfigError. left_out: receives the names of columns with bytes.
    """
    # The import takes a second, which only a call with rows needs.
    from actors.environment.data_sets import CHAT, as_json, has_bytes, without_nulls

    try:
        # Some rows are not of the class Mapping: those of sqlite3 and pydantic, for example.
        values = None if isinstance(row, str | bytes | list | tuple) else dict(row)
    except (TypeError, ValueError):
        values = None
    if values is None:
        raise ConfigError(
            f'{where}: got {type_of(row)}, expected a dict, such as {{"prompt": "What is 1 + 1?"}};'
            " give each row as a dict of its columns"
        )
    found: dict[str, Any] = {}
    for column, value in values.items():
        plain = value
        try:
            if not isinstance(column, str | int | float | None):
                raise TypeError(f"the column's name is {type_of(column)}, not a text")
            name = column if isinstance(column, str) else json.dumps(column, allow_nan=False)
            if name in found:
                raise TypeError(f"another column is also named {name}")
            plain = as_json(value)
            if has_bytes(plain):
                left_out.add(name)
            else:
                json.dumps(plain, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RuntimeError) as error:  # the last of a sparse tensor
            is_odd = isinstance(plain, float) and not math.isfinite(plain)
            problem = str(error) or type_of(error)
            got = repr(plain) if is_odd else f"a value that is not JSON ({problem})"
            raise ConfigError(
                f"{where}, column {column}: got {got}, expected texts, finite numbers, dates, "
                "true, false, null, lists, and dicts whose keys are texts; convert the value, or "
                "leave out the row (in pandas by dropna) or the column"
            ) from None
        # pandas reads lists as arrays from Parquet, where all objects have the same keys.
        has_nulls = column in CHAT and hasattr(value, "tolist")
        found[name] = without_nulls(plain) if has_nulls else plain
    return found
