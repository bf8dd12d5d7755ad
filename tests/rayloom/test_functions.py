"""Tests that a run calls exactly the functions and classes given to `rayloom.train`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import field, make_dataclass
from functools import partial, update_wrapper, wraps
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from worlds.runs.run_driver import ROOT

import rayloom
from actors.environment.function_tools import read_function
from rayloom.given import name_of
from service.launch.run_dir import RunDir

SCORE = """\
class Scale:
    factor = 10.0

    @classmethod
    def scaled(cls, completion):
        return cls.factor

    @staticmethod
    def plain(completion):
        return 7.0


def score(completion, scale=1.0):
    return scale
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module of a user that the run can import too."""
    (tmp_path / "own_score.py").write_text(SCORE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_score", raising=False)
    return importlib.import_module("own_score")


@pytest.fixture
def as_found_by_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    store = RunDir(path=tmp_path / "run").functions
    store.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(store))

    def found(given: Any, *, what: str = "reward") -> Any:
        module, _, name = name_of(given, store, what=what).partition(":")
        return getattr(importlib.import_module(module), name)

    return found


@pytest.mark.parametrize("what", ["reward", "group-reward", "tools"])
def test_a_wrapper_with_the_name_of_its_inner_function_is_called(
    own: ModuleType, as_found_by_a_run: Callable[..., Any], what: str
) -> None:
    @wraps(own.score)
    def half(completion: str) -> float:
        return 0.5 * float(own.score(completion))

    scaled = update_wrapper(partial(own.score, scale=0.1), own.score)
    assert half.__module__ == scaled.__module__ == "own_score"
    assert as_found_by_a_run(half, what=what)("4") == 0.5
    assert as_found_by_a_run(scaled, what=what)("4") == 0.1


def test_the_given_object_is_called_even_if_its_module_replaced_it(
    own: ModuleType, as_found_by_a_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, kind = own.score, own.Scale
    monkeypatch.setattr(own, "score", lambda completion: 99.0)
    monkeypatch.setattr(own, "Scale", type("Scale", (), {"factor": 99.0}))
    assert as_found_by_a_run(before)("4") == 1.0
    assert as_found_by_a_run(kind, what="tools").factor == 10.0


def test_a_bound_method_of_a_class_is_called_with_its_class(
    own: ModuleType, as_found_by_a_run: Callable[..., Any], tmp_path: Path
) -> None:
    class Twice(own.Scale):  # type: ignore[misc, name-defined]
        factor = 20.0

    assert as_found_by_a_run(Twice.scaled)("4") == 20.0
    assert name_of(own.Scale.plain, tmp_path, what="reward") == "own_score:Scale.plain"


class Place(BaseModel):
    city: str


def test_the_types_of_tools_that_are_stored_by_value_can_be_read(
    as_found_by_a_run: Callable[..., Any],
) -> None:
    # This module's annotations are texts, as in a script with the same import.
    def weather(
        where: Place, unit: Literal["c", "f"], days: Annotated[int, Field(le=9)] = 1
    ) -> str:
        """Look up the weather."""
        return unit

    class Here:
        """A class whose name is not in the module."""

    def unknown(where: Here) -> str:
        """Have a type that cannot be found in the caller either."""
        return ""

    def score(completion: str) -> Place:
        return Place(city=completion)

    read = read_function(as_found_by_a_run(weather, what="tools"), where="tool")
    assert read.arguments.model_validate({"where": {"city": "Rome"}, "unit": "c"})
    shown = read.schema.parameters["properties"]
    assert shown["unit"] == {"type": "string", "enum": ["c", "f"]}
    assert shown["days"] == {"type": "integer", "default": 1, "maximum": 9}
    assert as_found_by_a_run(unknown, what="tools").__annotations__["where"] == "Here"
    # No one reads the types of another function, and they might import large libraries.
    assert as_found_by_a_run(score).__annotations__["return"] == "Place"


def test_a_tool_stored_by_value_may_take_a_dataclass(
    as_found_by_a_run: Callable[..., Any],
) -> None:
    query_type = make_dataclass("Query", [("text", str), ("most", int, field(default=3))])
    query_type.__module__ = "__main__"

    def find(query: Any) -> str:
        """Search."""
        return str(query.text)

    find.__annotations__["query"] = query_type
    read = read_function(as_found_by_a_run(find, what="tools"), where="tool")
    arguments = read.arguments.model_validate({"query": {"text": "a"}})
    assert arguments.model_dump(by_alias=True) == {"query": {"text": "a", "most": 3}}


# The script of a user, whose annotations are texts.
SCRIPT = """\
from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from typing_extensions import NotRequired, TypedDict

from rayloom.given import name_of


@dataclass
class Place:
    kind: Literal["town", "city"] = "town"


@dataclass
class Query:
    place: Place | None = None


class Options(TypedDict):
    most: NotRequired[int]


class Range(NamedTuple):
    begin: Place


def find(query: Query, options: Options, range: Range) -> str:
    \"\"\"Search.\"\"\"
    return f"{query.place.kind} {options} {range.begin.kind}"


if __name__ == "__main__":
    print(name_of(find, Path(sys.argv[1]), what="tools"))
    assert Query.__annotations__["place"] == "Place | None"
    assert Query.__dataclass_fields__["place"].type == "Place | None"
"""


def test_a_tool_of_a_script_may_take_classes_whose_annotations_are_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    module, _, name = done.stdout.strip().partition(":")
    monkeypatch.syspath_prepend(str(tmp_path))
    tool = read_function(getattr(importlib.import_module(module), name), where="tool")
    read = tool.read(
        {"query": {"place": {"kind": "city"}}, "options": {}, "range": [{"kind": "town"}]}
    )
    assert tool.function(**read) == "city {} town"


def test_a_stored_wrapper_is_shown_by_its_own_source(own: ModuleType, tmp_path: Path) -> None:
    @wraps(own.score)
    def half(completion: str) -> float:
        return 0.5

    module, _, _ = name_of(half, tmp_path, what="reward").partition(":")
    assert "# def half" in (tmp_path / f"{module}.py").read_text().replace("#     ", "# ")


def test_a_module_is_refused_if_the_working_directory_has_another_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib, here = tmp_path / "lib", tmp_path / "here"
    for place, number in ((lib, 1.0), (here, 2.0)):
        (place / "given_pack").mkdir(parents=True)
        (place / "given_pack" / "__init__.py").touch()
        text = f"def score(completion):\n    return {number}\n"
        (place / "given_pack" / "inner.py").write_text(text)
        (place / "given_lib.py").write_text(text)
    (lib / "uses_lib.py").write_text("from given_lib import score as inner\ndef score(c): ...\n")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(lib))
    flat, deep = importlib.import_module("given_lib"), importlib.import_module("given_pack.inner")
    given = {
        "by name": flat.score,
        "in a package": deep.score,
        "in a pickle": partial(flat.score),
        "a global of a pickle": lambda completion: flat.score(completion),
        "imported by its module": importlib.import_module("uses_lib").score,
    }
    for case, function in given.items():
        with pytest.raises(rayloom.ConfigError, match=r"lib/given_\S+ here, .* import \S+here/"):
            name_of(function, tmp_path / "store", what="reward")
            pytest.fail(case)

    # A string that equals the name of a module is not a use of the module.
    def scored(completion: str, given_lib: str = "given_lib") -> float:
        return {"given_lib": 1.0}[given_lib]

    assert name_of(scored, tmp_path / "store", what="reward").endswith(":scored")
    # Another path of the same file is accepted.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given_lib.py").hardlink_to(lib / "given_lib.py")
    assert name_of(flat.score, tmp_path / "store", what="reward") == "given_lib:score"
    (tmp_path / "given_lib.py").unlink()
    # Without the other files, the same functions are accepted.
    for function in given.values():
        assert name_of(function, tmp_path / "store", what="reward")


def test_modules_and_classes_that_cannot_be_found_are_not_checked(
    own: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "odd" / "deep" / "inner.py"
    file.parent.mkdir(parents=True)
    file.write_text("def score(completion): ...\n")
    spec = importlib.util.spec_from_file_location("odd.deep.inner", file)
    assert spec is not None and spec.loader is not None
    inner = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "odd.deep.inner", inner)
    spec.loader.exec_module(inner)
    assert name_of(inner.score, tmp_path, what="reward") == "odd.deep.inner:score"

    odd = type("Odd", (), {"__module__": ["no", "text"]})
    monkeypatch.setattr(own, "Odd", odd, raising=False)
    assert name_of(own.score, tmp_path, what="reward") == "own_score:score"
