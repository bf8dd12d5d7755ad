"""Environments by name, by path and by entry point, with their options checked at once."""

import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from actors.environment.builtin.guessing import GuessingEnvironment, GuessingOptions
from actors.environment.protocol import Action, Message, Observation, Role, StepResult
from actors.environment.registry import (
    BadEnvironmentOptions,
    UnknownEnvironment,
    known_names,
    register,
    resolve,
)
from actors.types import Task


def test_built_in_environments_are_known_by_name() -> None:
    assert {"guessing", "calculator", "code_search", "reasoning_gym"} <= set(known_names())
    assert isinstance(resolve("guessing", {"high": 9})(), GuessingEnvironment)


def test_each_call_of_what_resolve_gives_makes_a_fresh_environment() -> None:
    make = resolve("guessing", {})
    assert make() is not make()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UnknownEnvironment, match="got 'chess', expected one of calculator, code_search, guess"
    ):
        resolve("chess", {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("actors.environment.builtin.guessing:NoSuch", "NoSuch"),
        ("no.such.module:Class", "No module named"),
        ("actors.environment.builtin.guessing:HIGHER", "got a str, expected a class"),
        ("actors.environment.builtin.guessing:", "attribute"),
        (":Class", "Empty module name"),
        (":", "Empty module name"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(name: str, message: str) -> None:
    with pytest.raises(UnknownEnvironment, match=message):
        resolve(name, {})


def test_a_path_to_a_class_is_an_environment() -> None:
    found = resolve("actors.environment.builtin.guessing:GuessingEnvironment", {"low": 2})()
    assert isinstance(found, GuessingEnvironment)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hihg": 9}, "options.hihg: unknown key; did you mean 'high'?"),
        ({"size": 9}, "options.size: unknown key; expected one of low, high, max_guesses"),
        ({"low": 9}, "options.low: got 9, expected at most high, which is 7"),
        ({"low": "one"}, "options.low: got 'one', expected a whole number"),
        ({"low": True}, "options.low: got True, expected a number"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(BadEnvironmentOptions, match=re.escape(message)):
        resolve("guessing", options)


class Plain:
    """An environment whose options are keyword arguments."""

    def __init__(self, *, size: int = 3) -> None:
        self.size = size

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=(Message(role=Role.USER, content=str(self.size)),))

    async def step(self, action: Action) -> StepResult:
        return StepResult(terminated=True)

    async def close(self) -> None:
        return None


class Described(Plain):
    """An environment of a user with a dataclass of options."""

    def __init__(self, options: GuessingOptions) -> None:
        super().__init__(size=options.high)


def test_keyword_arguments_are_options_too() -> None:
    assert isinstance(made := resolve(f"{__name__}:Plain", {"size": 4})(), Plain)
    assert made.size == 4
    with pytest.raises(BadEnvironmentOptions, match=r"unexpected keyword.*expected size"):
        resolve(f"{__name__}:Plain", {"sise": 4})


def test_a_users_own_options_are_read_like_those_of_the_built_in_ones() -> None:
    assert isinstance(made := resolve(f"{__name__}:Described", {"high": 4})(), Described)
    assert made.size == 4
    with pytest.raises(BadEnvironmentOptions, match=r"options\.high: got -1, expected 0 or more"):
        resolve(f"{__name__}:Described", {"high": -1})


@dataclass
class Depth:
    """Options inside of options, as a user writes them: neither frozen nor strict."""

    levels: int = 1


@dataclass
class UserOptions:
    low: int = 1
    sizes: list[int] = field(default_factory=lambda: [3])
    depth: Depth = field(default_factory=Depth)
    by_name: dict[str, Depth] = field(default_factory=dict)
    derived: int = field(default=3, init=False)
    limit: ClassVar[int] = 9
    name = "no field"


class Loose(Plain):
    def __init__(self, options: UserOptions) -> None:
        super().__init__(size=options.low + options.depth.levels)


class Optional(Plain):
    def __init__(self, options: UserOptions | None = None) -> None:
        super().__init__(size=7 if options is None else options.low)


class Beside(Plain):
    def __init__(self, options: UserOptions | None = None, **others: object) -> None:
        super().__init__()


class OtherName(Plain):
    def __init__(self, given: UserOptions | None = None) -> None:
        super().__init__()


class Missing(Plain):
    def __init__(self, options: "Absent") -> None:  # type: ignore[name-defined]  # noqa: F821
        super().__init__()


@dataclass
class WithObject:
    lock: threading.Lock = field(default_factory=threading.Lock)


class Unreadable(Plain):
    def __init__(self, options: WithObject) -> None:
        super().__init__()


def test_a_users_own_dataclass_needs_no_configuration_of_ours() -> None:
    given = {"low": 2, "sizes": [1], "depth": {"levels": 4}, "by_name": {"a": {"levels": 2}}}
    made = [
        resolve(f"{__name__}:{name}", options)()
        for name, options in (("Loose", given), ("Optional", given), ("Optional", {}))
    ]
    assert [each.size for each in made if isinstance(each, Plain)] == [6, 2, 7]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Loose", {"loww": 2}, "options.loww: unknown key; did you mean 'low'?"),
        ("Optional", {"loww": 2}, "options.loww: unknown key; did you mean 'low'?"),
        ("Loose", {"depth": {"level": 2}}, "options.depth.level: unknown key; did you mean"),
        ("Loose", {"by_name": {"a": {"x": 2}}}, "options.by_name.a.x: unknown key; expected one"),
        ("Loose", {"derived": 2}, "options.derived: unknown key; expected one of low, sizes"),
        ("Loose", {"limit": 2}, "options.limit: unknown key"),
        ("Loose", {"name": "a"}, "options.name: unknown key"),
        ("Loose", {"low": "two"}, "options.low: got 'two', expected a whole number"),
        ("Loose", {"sizes": [True]}, "options.sizes.0: got True, expected a number"),
        ("Loose", {"depth": 3}, "options.depth: got 3, expected a map of settings"),
        ("Beside", {"loww": 2}, "takes options: UserOptions and others, expected a dataclass"),
        ("OtherName", {"given": {"low": 2}}, "its argument given is a UserOptions"),
        ("Missing", {"low": 2}, "name 'Absent' is not defined"),
        ("Unreadable", {}, "WithObject has a field whose values cannot be checked"),
    ],
)
def test_options_of_a_users_own_dataclass_are_never_dropped(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(BadEnvironmentOptions, match=re.escape(message)):
        resolve(f"{__name__}:{name}", options)


def test_a_name_is_given_once() -> None:
    register("test_registry_game", GuessingEnvironment)
    register("test_registry_game", GuessingEnvironment)
    assert isinstance(resolve("test_registry_game", {})(), GuessingEnvironment)
    with pytest.raises(ValueError, match="registered already"):
        register("guessing", lambda: GuessingEnvironment(GuessingOptions()))
    for bad in ("", "a:b"):
        with pytest.raises(ValueError, match="without a colon"):
            register(bad, GuessingEnvironment)


def test_an_installed_package_adds_environments_by_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "somegame-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somegame\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rayloom.environments]\n"
        "somegame = actors.environment.builtin.guessing:GuessingEnvironment\n"
        "broken = no.such.module:Class\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "somegame" in known_names()
    assert isinstance(resolve("somegame", {})(), GuessingEnvironment)
    with pytest.raises(UnknownEnvironment, match="No module named"):
        resolve("broken", {})
