"""Reward functions: plain functions of a user's that score an answer.

    def score(completion, answer, **columns):            # one answer
        return float(completion.strip() == answer)

    def score(completions, answer, **columns):           # as TRL's trainers call it, with lists
        return [float(text.strip() == right) for text, right in zip(completions, answer)]

Either may be a coroutine. The columns of the data set come by their names, those alone that the
function names unless it takes `**columns`; so does `prompt` (`prompts`), as it stands in the data.
Called by `actors.environment.builtin.single_turn`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from actors.environment.protocol import RewardError
from actors.limits import MAX_REWARD

# What TRL's trainers give a function besides, and nobody has here.
_TRAINERS = frozenset({"completion_ids", "trainer_state", "log_extra", "log_metric"})
# As HTTP has them.
MAX_PARTS, MAX_NAME = 64, 128


class BadRewardFunction(ValueError):
    """There is no such function, or nothing that one can be called as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one function says of one answer."""

    value: float
    parts: Mapping[str, float]
    """By name; empty where it gave a plain number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A function, and how it wants to be called."""

    name: str
    function: Callable[..., Any]
    weight: float
    takes_lists: bool
    """As TRL calls it: `completions`, and a list for each column."""
    named: frozenset[str] | None
    """The arguments that it names; None: it takes all."""
    required: frozenset[str]
    """Those without a default, which have to be columns."""

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises: ValueError where the data have not what it needs."""
        if missing := sorted(self.required - columns.keys()):
            raise ValueError(
                f"reward function {self.name} needs {', '.join(missing)}, got the columns "
                f"{', '.join(sorted(columns)) or 'none'}; map them in tasks.columns, or give the "
                "argument a default"
            )

    async def score(self, completion: str, columns: Mapping[str, Any]) -> Score | None:
        """Score one answer; None: it has nothing to say of it (TRL's None).

        Raises: RewardError for what is no score, and whatever the function raises.
        """
        if not self.takes_lists:
            found = await self._call({**columns, "completion": completion})
            return None if found is None else self._read(found)
        prompt = columns["prompt"]
        answer = completion if isinstance(prompt, str) else _as_conversation(completion)
        lists = {name: [value] for name, value in columns.items() if name != "prompt"}
        found = await self._call({**lists, "prompts": [prompt], "completions": [answer]})
        if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != 1:
            raise RewardError(
                f"reward function {self.name} gave {_told(found)} for a list of one answer, "
                "expected a list of one number"
            )
        return None if found[0] is None else self._read(found[0])

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        wanted = {
            name: value
            for name, value in arguments.items()
            if self.named is None or name in self.named
        }
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**wanted)
        # It may take long, and other episodes share the event loop.
        found = await asyncio.to_thread(self.function, **wanted)
        return await found if inspect.isawaitable(found) else found

    def _read(self, found: object) -> Score:
        parts = found if isinstance(found, Mapping) else {"": found}
        numbers = {}
        for name, value in parts.items():
            number = value.item() if hasattr(value, "item") else value
            if not isinstance(number, Real) or not abs(float(number)) <= MAX_REWARD:
                raise RewardError(
                    f"reward function {self.name} gave {_told(found)}, expected a number, or "
                    f"numbers by their names, none beyond {MAX_REWARD:g}"
                )
            numbers[str(name)[:MAX_NAME]] = float(number)
        if not 0 < len(numbers) <= MAX_PARTS:
            raise RewardError(
                f"reward function {self.name} gave {len(numbers)} named numbers, expected 1 to "
                f"{MAX_PARTS}"
            )
        is_plain = not isinstance(found, Mapping)
        return Score(value=sum(numbers.values()), parts={} if is_plain else numbers)


def load_functions(asked: str | Sequence[str] | Mapping[str, float]) -> tuple[RewardFunction, ...]:
    """Find functions by their names.

    Args: asked: "my.py:score" or "package.module:score"; several of them; or each with its weight.
    Raises: BadRewardFunction.
    """
    names = names_of(asked)
    if len(set(names)) < len(names):
        raise BadRewardFunction(f"reward: got {', '.join(names)}, expected each function once")
    weights = asked if isinstance(asked, Mapping) else dict.fromkeys(names, 1.0)
    if not weights:
        raise BadRewardFunction("reward: got no function, expected one such as my.py:score")
    functions = tuple(_load(text, weight) for text, weight in weights.items())
    names = [each.name for each in functions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadRewardFunction(
            f"reward: {', '.join(sorted(twice))} is the name of two functions, expected names that "
            "tell their numbers apart; rename one"
        )
    return functions


def names_of(asked: str | Sequence[str] | Mapping[str, float]) -> list[str]:
    """Of the functions that `load_functions` is asked for."""
    return [asked] if isinstance(asked, str) else list(asked)


def module_of(text: str) -> str:
    """The module of a function's name. Raises: BadRewardFunction.

    Example: rewards/my.py:score -> rewards.my
    """
    place, colon, name = text.partition(":")
    if place.endswith(".py"):
        place = place.removesuffix(".py").removeprefix("./").replace("/", ".")
    if not colon or not name or not place or place.startswith("."):
        raise BadRewardFunction(
            f"reward: got {text!r}, expected FILE.py:FUNCTION below the directory that the command "
            "is started in, or package.module:FUNCTION"
        )
    return place


@lru_cache(maxsize=64, typed=True)
def _load(text: str, weight: object) -> RewardFunction:
    """Once for the process: an environment is made for each episode."""
    if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
        raise BadRewardFunction(f"reward: the weight of {text} is {weight!r}, expected a number")
    place, _, name = text.partition(":")
    try:
        module = importlib.import_module(module_of(text))
        _check_file(module, place)
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise BadRewardFunction(
            f"reward: {text}: {error}; expected a function of a module that can be imported from "
            "where the command is started"
        ) from error
    return _read_signature(text, name, found, float(weight))


def _check_file(module: ModuleType, place: str) -> None:
    """A file's name may be that of another module, which is imported then.

    Raises: BadRewardFunction.
    """
    if not place.endswith(".py") or not (file := Path(place)).is_file():
        return
    found = getattr(module, "__file__", None)
    if found is None or not file.samefile(found):
        raise BadRewardFunction(
            f"reward: {place} is not what Python imports by its name ({found or 'a built-in'} is); "
            "rename the file"
        )


def _read_signature(text: str, name: str, found: Any, weight: float) -> RewardFunction:
    if not callable(found):
        raise BadRewardFunction(
            f"reward: {text} is a {type(found).__name__}, expected a function; name one"
        )
    parameters = inspect.signature(found).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = {
        name: each.default is each.empty
        for name, each in parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    answers = named.keys() & {"completion", "completions"}
    if len(answers) != 1 and not (takes_all and not answers):
        raise BadRewardFunction(
            f"reward: {text} takes ({', '.join(parameters)}), expected an argument completion, or "
            "completions as TRL has it"
        )
    required = {name for name, is_needed in named.items() if is_needed}
    if unknown := sorted(required & _TRAINERS):
        raise BadRewardFunction(
            f"reward: {text} needs {', '.join(unknown)}, which a trainer alone has; expected "
            "arguments that are columns; give them a default"
        )
    prompt = "prompts" if "completions" in answers else "prompt"
    return RewardFunction(
        name=name,
        function=found,
        weight=weight,
        takes_lists="completions" in answers,
        named=None if takes_all else frozenset(named),
        required=frozenset(required - answers - {prompt}),
    )


def _as_conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _told(found: object) -> str:
    return f"{found!r:.80}" if isinstance(found, Real | str) else f"a {type(found).__name__}"
