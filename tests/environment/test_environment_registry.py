"""Environments by name, by path and by entry point, with their options checked at once."""

from pathlib import Path

import pytest

from actors.environment.builtin.guessing import GuessingEnvironment
from actors.environment.registry import (
    BadEnvironmentOptions,
    UnknownEnvironment,
    known_names,
    register,
    resolve,
)


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
        ({"hihg": 9}, "expected low, high, max_guesses"),
        ({"low": 9}, "expected 0 <= low <= high"),
        ({"low": "one"}, "not supported"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(BadEnvironmentOptions, match=message):
        resolve("guessing", options)


def test_a_name_is_given_once() -> None:
    register("test_registry_game", GuessingEnvironment)
    register("test_registry_game", GuessingEnvironment)
    assert isinstance(resolve("test_registry_game", {})(), GuessingEnvironment)
    with pytest.raises(ValueError, match="registered already"):
        register("guessing", lambda: GuessingEnvironment())
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
