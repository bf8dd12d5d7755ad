"""Tests of finding environments by name, path or entry point and of checking their options."""

import functools
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from actors.environment.builtin.guessing import GuessingEnvironment, GuessingOptions
from actors.environment.protocol import Action, Message, Observation, Role, StepResult
from actors.environment.registry import (
    BadEnvironmentOptions,
    UnknownEnvironment,
    known_names,
    read_options,
    register,
    resolve,
)
from actors.options import BadOptions, read, user_code
from actors.types import Task

if TYPE_CHECKING:
    from somewhere import Absent

Value = TypeVar("Value")


def test_built_in_environments_are_known_by_name() -> None:
    assert {"guessing", "calculator", "code_search", "reasoning_gym"} <= set(known_names())
    assert isinstance(resolve("guessing", {"high": 9})(), GuessingEnvironment)


def test_the_factory_makes_a_new_environment_at_each_call() -> None:
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
        ("actors.environment.builtin.guessing:NoSuch", "NoSuch.* is installed on every node$"),
        ("no.such:Class", "No module named.*on every node, or no/such.py is below the directory"),
        ("no/such.py:Class", "did you mean no.such:Class.* or no/such.py is below the directory"),
        ("actors.environment.builtin.guessing:HIGHER", "got a str, expected a class"),
        ("actors.environment.builtin.guessing:", "attribute"),
        (":Class", "Empty module name"),
        (":", "Empty module name"),
    ],
)
def test_a_path_to_nothing_usable_is_refused(name: str, message: str) -> None:
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
    """An environment of a user whose options are a dataclass."""

    def __init__(self, options: GuessingOptions) -> None:
        super().__init__(size=options.high)


def test_keyword_arguments_are_options_too() -> None:
    assert isinstance(made := resolve(f"{__name__}:Plain", {"size": 4})(), Plain)
    assert made.size == 4
    with pytest.raises(BadEnvironmentOptions, match=r"unexpected keyword.*expected size"):
        resolve(f"{__name__}:Plain", {"sise": 4})


def test_options_of_a_users_environment_are_read_like_built_in_ones() -> None:
    assert isinstance(made := resolve(f"{__name__}:Described", {"high": 4})(), Described)
    assert made.size == 4
    with pytest.raises(BadEnvironmentOptions, match=r"options\.high: got -1, expected 0 or more"):
        resolve(f"{__name__}:Described", {"high": -1})


@dataclass
class Depth:
    """A dataclass inside of a user's options, neither frozen nor strict."""

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
    def __init__(self, options: "Absent") -> None:
        super().__init__()


@dataclass
class WithObject:
    lock: threading.Lock = field(default_factory=threading.Lock)


class Unreadable(Plain):
    def __init__(self, options: WithObject) -> None:
        super().__init__()


def test_a_users_dataclass_of_options_needs_no_base_class() -> None:
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
        ("Missing", {"low": 2}, "the type Absent of its argument options is not known"),
        ("Unreadable", {}, "WithObject has a field whose values cannot be checked"),
    ],
)
def test_wrong_options_of_a_users_dataclass_are_refused(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(BadEnvironmentOptions, match=re.escape(message)):
        resolve(f"{__name__}:{name}", options)


class Kept(Plain):
    """An environment that keeps its options."""

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options


DEFAULT = UserOptions(low=9)


def by_default(options: UserOptions = DEFAULT) -> "Absent":
    return Kept(options)


def by_keyword(*, options: UserOptions) -> Kept:
    return Kept(options)


def by_position(options: UserOptions, /) -> Kept:
    return Kept(options)


def with_size(options: UserOptions, size: int) -> Kept:
    return Kept(options)


partial = functools.partial(with_size, size=3)


class Factory:
    def __call__(self, options: UserOptions) -> Kept:
        return Kept(options)


instance = Factory()


class OfValues(Kept, Generic[Value]):
    def __init__(self, options: UserOptions) -> None:
        super().__init__(options)


of_numbers = OfValues[int]


class Made(Kept):
    def __new__(cls, options: UserOptions) -> "Made":
        return super().__new__(cls)

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)


class Passing(type):
    def __call__(cls, *given: Any, **named: Any) -> Any:
        return super().__call__(*given, **named)


class WithMetaclass(Kept, metaclass=Passing):
    def __init__(self, options: UserOptions) -> None:
        super().__init__(options)


class Model(BaseModel):
    options: UserOptions

    reset, step, close = Plain.reset, Plain.step, Plain.close


def renamed(make: Callable[..., Kept]) -> Callable[..., Kept]:
    @functools.wraps(make)
    def wrapper(given: Any) -> Kept:
        return make(given)

    return wrapper


@renamed
def wrapped(options: Annotated[UserOptions, "of a game"]) -> Kept:
    return Kept(options)


@pytest.mark.parametrize(
    "name",
    [
        "by_default",
        "by_keyword",
        "by_position",
        "partial",
        "instance",
        "of_numbers",
        "Made",
        "WithMetaclass",
        "Model",
        "wrapped",
    ],
)
def test_options_reach_every_kind_of_factory(name: str) -> None:
    made: Any = resolve(f"{__name__}:{name}", {"low": 2})()
    assert made.options == UserOptions(low=2) == read_options(f"{__name__}:{name}", {"low": 2})


def test_without_options_the_default_of_the_argument_is_used() -> None:
    made: Any = resolve(f"{__name__}:by_default", {})()
    assert made.options is DEFAULT and read_options(f"{__name__}:by_default", {}) is DEFAULT
    assert read_options(f"{__name__}:Optional", {}) is None


class Weights(TypedDict, total=False):
    form: float


class Level(BaseModel):
    model: str = "small"
    is_hard: Annotated[bool, Field(alias="hard")] = False


@dataclass
class Rich:
    high: Annotated[int, Field(alias="max-high")] = 1
    level: Level = field(default_factory=Level)
    weights: Weights = field(default_factory=Weights)
    seen: set[int] = field(default_factory=set)
    pairs: set[tuple[bool, int]] = field(default_factory=set)
    names: dict[int, bool] = field(default_factory=dict)
    start: InitVar[bool] = False
    limit: ClassVar["Absent"] = 3

    def __post_init__(self, start: bool) -> None:
        if self.high == 7:
            raise KeyError("seven")
        assert self.high != 8, "is too high"
        assert self.high != 9, "high: is too high"


def rich(options: Rich) -> Kept:
    return Kept(options)


@dataclass
class Words:
    words: tuple[str, ...] = ()


def either(options: UserOptions | Words) -> Kept:
    return Kept(options)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("rich", {"max-high": 3}, Rich(high=3)),
        ("rich", {"high": 3, "start": True}, Rich(high=3)),
        ("rich", {"level": {"hard": True}}, Rich(level=Level(hard=True))),
        ("rich", {"weights": {"form": 2}}, Rich(weights={"form": 2.0})),
        ("rich", {"pairs": [[True, 3], [False, 2]]}, Rich(pairs={(True, 3), (False, 2)})),
        ("rich", {"names": {"1": True}}, Rich(names={1: True})),
        ("either", {"low": 2}, UserOptions(low=2)),
        ("either", {"words": ["a"]}, Words(words=("a",))),
    ],
)
def test_options_keep_every_value(name: str, options: dict[str, Any], expected: object) -> None:
    made: Any = resolve(f"{__name__}:{name}", options)()
    assert made.options == expected == read_options(f"{__name__}:{name}", options)
    assert user_code(made.options) == []


def of_list(options: list[UserOptions]) -> Kept:
    return Kept(options)


def of_type(options: type[UserOptions]) -> Kept:
    return Kept(options)


def of_any_number(*options: UserOptions) -> Kept:
    return Kept(options)


class Unknown(Kept, Generic[Value]):
    def __init__(self, options: Value) -> None:
        super().__init__(options)


@dataclass
class WithAbsent:
    value: "Absent | None" = None


def with_absent(options: WithAbsent) -> Kept:
    return Kept(options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rich", {"level": {"modell": "a"}}, "options.level.modell: unknown key; did you mean"),
        ("rich", {"weights": {"fom": 2}}, "options.weights.fom: unknown key; did you mean 'form'?"),
        ("rich", {"begin": 2}, "names, start"),
        ("rich", {"level": 3}, "options.level: got 3, expected a map of settings, with keys such"),
        ("rich", {"max-high": True}, "options.max-high: got True, expected a number"),
        ("rich", {"seen": [3, True]}, "options.seen.1: got True, expected a number"),
        ("rich", {"pairs": [[True, True]]}, "options.pairs.0.1: got True, expected a number"),
        ("rich", {"names": {True: True}}, "options.names.1.[key]: got True, expected a number"),
        ("rich", {"high": 7}, "a check of Rich raised KeyError: 'seven' at "),
        ("rich", {"high": 8}, "options: is too high"),
        ("rich", {"high": 9}, "options.high: is too high"),
        ("either", {"lou": 2}, "options.UserOptions.lou: unknown key; did you mean 'low'?"),
        ("of_list", {"low": 2}, "takes options: list["),
        ("of_type", {"low": 2}, "such as options: UserOptions; correct the argument"),
        ("of_any_number", {"low": 2}, "takes *options: "),
        ("Unknown", {"low": 2}, "the type Value of its argument options is not known"),
        ("with_absent", {}, "name 'Absent' is not defined); expected fields of plain types"),
    ],
)
def test_options_that_would_be_misread_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    for reading in (resolve, read_options):
        with pytest.raises(BadEnvironmentOptions, match=re.escape(message)):
            reading(f"{__name__}:{name}", options)


class Grade(IntEnum):
    LOW = 1


class OfModel(BaseModel):
    number: int = 0
    members: list[str] = []
    default: int = 0


@dataclass
class Numbers:
    model: OfModel | None = None
    grade: Grade | None = None
    other_grade: Grade = Grade.LOW
    choice: Literal[1, 2] | None = None
    limit: timedelta | None = None
    either: int | str | None = None
    several: list[int] | list[str] = field(default_factory=list)
    truth: int | bool | None = None
    default: Mapping[str, str] = field(default_factory=lambda: {"type": "int"})


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"model": {"number": True}}, "options.model.number"),
        ({"model": {"default": True}}, "options.model.default"),
        ({"grade": True}, "options.grade"),
        ({"choice": True}, "options.choice"),
        ({"limit": True}, "options.limit"),
        ({"either": True}, "options.either.int"),
    ],
)
def test_no_type_of_numbers_accepts_a_boolean(options: dict[str, Any], place: str) -> None:
    with pytest.raises(BadOptions, match=f"^{place}: got True, expected a number"):
        read(Numbers, options, where="options")
    given = {"truth": True, "grade": 1, "other_grade": 1, "model": {"members": ["a"]}}
    assert read(Numbers, given, where="options").truth is True
    with pytest.raises(BadOptions, match=r"options\.several\.list\[int\]\.0: got 'x'"):
        read(Numbers, {"several": ["x", 1]}, where="options")


def test_a_name_cannot_be_registered_for_two_environments() -> None:
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
