"""Reward functions: a user's plain functions that score an answer.

    def score(completion, answer, **columns):            # one answer
        return float(completion.strip() == answer)

    def score(completions, answer, **columns):           # as TRL's trainers call it, with lists
        return [float(text.strip() == right) for text, right in zip(completions, answer)]

Both kinds may be coroutines. A function gets the columns of the data set that it names; with
`**columns` it gets all. An argument `columns` gets the whole row as a mapping. `prompt` (`prompts`)
is the task's prompt, as the data have it. With tools, `messages` is the conversation after the
prompt. `environment` (`environments`) is the object whose methods are the tools.
`trainer_arguments` describes `trainer_state`, `log_metric` and `log_extra`.

These arguments hide columns of the same names; the argument `columns` has the hidden columns too.
One exception, as in TRL: a function that takes lists gets a column `messages` as `messages`.

A group function (`load_group_functions`) takes lists too, and scores a whole group in one call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np

from actors.environment import workers
from actors.environment.fork_server import WorkerLost, preload
from actors.environment.protocol import RewardError
from actors.environment.settings import rollout_settings
from actors.environment.trainer_arguments import (
    LOGS,
    TRAINER_ARGUMENTS,
    TRAINER_STATE,
    Logs,
    TrainerState,
    call_with_logs,
    copy_of,
    copy_of_each,
    trainer_state,
)
from actors.environment.user_names import (
    HIDES,
    BadName,
    arguments_of,
    bound_name,
    find,
    hides_arguments,
    remedy_of_missing,
    renaming,
)
from actors.limits import MAX_REWARD
from actors.user_code import CallFailed, CallTimedOut, in_thread, type_of

# Arguments that only TRL's trainers can give.
_NOT_HERE = frozenset({"completion_ids"})
# Arguments from the episode besides the columns; in a function with lists the first is
# `environments`.
EXTRAS = frozenset({"environment", "messages"})
# The HTTP API has the same limits.
MAX_PARTS, MAX_NAME = 64, 128


class BadRewardFunction(ValueError):
    """Raised if a function does not exist, or cannot be called as a reward function."""


class NoScore(RewardError):
    """Raised if a function returns a value that is not a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One function's score of one answer."""

    value: float | None
    """The reward; None if the function does not score this answer (as None in TRL)."""
    parts: Mapping[str, float]
    """Named numbers; empty if the function returned a plain number."""
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The numbers that the call logged by `log_metric`, by name. A call of a group function logs
    them for its whole group."""
    extras: Mapping[str, str] = field(default_factory=dict)
    """The texts that the call logged for this answer by `log_extra`, by column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A user's reward function, and how to call it."""

    name: str
    function: Callable[..., Any]
    weight: float
    takes_lists: bool
    """Whether the function takes lists as in TRL: `completions`, and a list for each column."""
    named: frozenset[str] | None
    """The names of the function's arguments; None if it takes every column."""
    required: frozenset[str]
    """The function's arguments without a default; the data must have a column for each."""
    takes_row: bool
    """Whether the function has an argument `columns`, which gets the whole row."""
    target: str = ""
    """The name by which another process finds the function, such as my.py:score; empty if there is
    none."""
    instance: Any = None
    """For a method of an instance that a worker keeps: the instance (a `workers.Held`). None for
    any other function."""
    of_trainer: frozenset[str] = frozenset()
    """The names in TRAINER_ARGUMENTS that are arguments of the function."""
    bound: str = ""
    """Name of the first argument of a method, such as self. No column can be given by that name.
    Empty for a plain function."""

    def check(self, columns: Mapping[str, Any], *, extras: frozenset[str] = frozenset()) -> None:
        """Check that a task's data have every argument that the function needs.

        Args:
            extras: Names of the arguments that are available besides the columns, such as EXTRAS.

        Raises: ValueError if an argument without a default is missing.
        """
        given = columns.keys() | extras
        # A function with lists gets the column `prompt` as `prompts` only.
        if missing := sorted(self.required - (given - {"prompt"} if self.takes_lists else given)):
            lists = self.takes_lists
            remedy = remedy_of_missing(missing, columns, takes_lists=lists, of_tools=EXTRAS)
            raise ValueError(
                f"reward function {self.name} needs {', '.join(missing)}, got the columns "
                f"{', '.join(sorted(columns)) or 'none'}; {remedy}"
            )

    async def score(
        self,
        completion: str,
        columns: Mapping[str, Any],
        *,
        extras: Mapping[str, Any] | None = None,
    ) -> Score:
        """Return the score of one answer.

        Args:
            extras: Values of the arguments in EXTRAS, by name.

        Raises: RewardError if the function's answer is not a score; any exception that the function
            raises.
        """
        taken = {n: v for n, v in (extras or {}).items() if self.takes_lists or self._takes(n)}
        ours, columns = self._own(taken), self._own(columns)
        if not self.takes_lists:
            arguments = {**columns, **ours, **self._row(columns), "completion": completion}
            found, logs = await self._call(arguments)
            return self._read(found, logs)
        conversation = ours.get("messages", _as_conversation(completion))
        of_row = {**ours, **columns, **self._row(columns)}
        lists = {name: [value] for name, value in of_row.items() if name != "prompt"}
        if "environment" in ours:
            lists["environments"] = [ours["environment"]]
        return (await self._score_lists([completion], [conversation], lists, columns["prompt"]))[0]

    async def score_group(
        self, completions: Sequence[str], columns: Mapping[str, Any]
    ) -> list[Score]:
        """Call the function once for all answers of a group, and return a score for each answer.

        A column becomes a list that repeats the column's value for each answer. The function can
        take the list under the column's name, or under this name with an s (as in `verifiers`).
        Example: for two answers, the column task="a" becomes task=["a", "a"] and tasks=["a", "a"].

        Raises: the same exceptions as `score`.
        """
        count, columns = len(completions), self._own(columns)
        of_row = {name: value for name, value in columns.items() if name != "prompt"}
        lists = {f"{name}s": [value] * count for name, value in of_row.items()}
        lists |= {name: [value] * count for name, value in of_row.items()} | self._row(columns)
        conversations = [_as_conversation(each) for each in completions]
        return await self._score_lists(completions, conversations, lists, columns["prompt"])

    async def _score_lists(
        self,
        completions: Sequence[str],
        conversations: Sequence[Any],
        lists: Mapping[str, Any],
        prompt: Any,
    ) -> list[Score]:
        count = len(completions)
        answers = completions if isinstance(prompt, str) else conversations
        arguments = {**lists, "prompts": [prompt] * count, "completions": list(answers)}
        found, logs = await self._call(arguments)
        if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != count:
            what = "one answer" if count == 1 else f"{count} answers"
            one = "one number" if count == 1 else "one number each"
            raise NoScore(
                f"reward function {self.name} gave {_format(found)} for a list of {what}, "
                f"expected a list of {one}"
            )
        return [
            self._read(each, logs, index=index, count=count) for index, each in enumerate(found)
        ]

    def _takes(self, name: str) -> bool:
        return name != self.bound if self.named is None else name in self.named

    def _own(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments, copied if the call runs in this process and may change them."""
        if self.instance is not None or workers.is_contained(self.target):
            return arguments
        return {name: copy_of(value) for name, value in arguments.items()}

    def _row(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {"columns": dict(columns)} if self.takes_row else {}

    async def _call(self, arguments: Mapping[str, Any]) -> tuple[Any, Logs]:
        # A function with lists gets them in `**columns` too, as from TRL.
        takes_all = self.named is None and self.takes_lists
        ours = TRAINER_ARGUMENTS if takes_all else TRAINER_ARGUMENTS & self.of_trainer
        state = trainer_state.get() or TrainerState()
        given = {**arguments, **dict.fromkeys(ours & {TRAINER_STATE}, state)}
        wanted = {
            name: value
            for name, value in given.items()
            if name not in ours & LOGS and self._takes(name)
        }

        if self.instance is not None or workers.is_contained(self.target):
            return await self._call_in_worker(wanted, ours & LOGS)

        def call() -> tuple[Any, Logs]:
            own = copy_of_each(wanted) if self.takes_lists else wanted
            found, logs = call_with_logs(self.function, own, logs=ours & LOGS)
            return found if inspect.isawaitable(found) else _values(found, self.takes_lists), logs

        if inspect.iscoroutinefunction(self.function):
            found, logs = call()
        else:
            # The function may block, and other episodes share the event loop.
            found, logs = await in_thread(call)
        if inspect.isawaitable(found):
            found = _values(await found, self.takes_lists)
        return found, logs

    async def _call_in_worker(
        self, arguments: Mapping[str, Any], logs: Collection[str]
    ) -> tuple[Any, Logs]:
        """Call the function in a worker process and return its answer and its logs.

        Raises: RewardError if the call exceeds `reward_limit_s` or ends the worker; CallFailed if
        the function raises; WorkerLost if the worker with the function's instance has ended.
        """
        held = next((each for each in _flat(self.instance, *arguments.values())), None)
        place = workers.pool() if held is None else held.home
        limit_s = rollout_settings.get().reward_limit_s
        given = {"target": self.target, "instance": self.instance, "arguments": arguments}
        given |= {"logs": logs, "takes_lists": self.takes_lists}
        try:
            return await place.call(
                f"{__name__}:_answer_of", given, limit_s=limit_s, about=self.target
            )
        except CallTimedOut as error:
            raise RewardError(
                f"{self.name} did not answer within {limit_s:g} s and was ended"
            ) from error
        except CallFailed as error:
            if isinstance(error.error, WorkerLost):
                raise RewardError(f"{self.name}: {error.error}") from error
            raise

    def _read(self, found: object, logs: Logs, *, index: int = 0, count: int = 1) -> Score:
        """Return the Score of answer `index`. Raises: RewardError if `found` is not a score."""
        value, parts = self._value_of(found)
        try:
            extras = logs.extras_of(index, num_answers=count)
        except ValueError as error:
            raise RewardError(f"reward function {self.name}: {error}") from error
        return Score(value=value, parts=parts, metrics=logs.metrics, extras=extras)

    def _value_of(self, found: object) -> tuple[float | None, dict[str, float]]:
        """Return the reward, and the named numbers that the function returned.

        The reward is the number named `score` (verl's form), or else the sum of all numbers.
        Raises: RewardError if the value is not a score.
        """
        if not isinstance(found, Mapping):
            return None if found is None else self._number(found), {}
        is_verl = "score" in found
        parts: dict[str, float] = {}
        for key, value in found.items():
            # The other values that verl's graders report may be text.
            if is_verl and key != "score" and not _is_number(value):
                continue
            name = str(key)[:MAX_NAME]
            if name in parts or not name.strip() or not name.isprintable():
                raise NoScore(
                    f"reward function {self.name} named a number {name[:40]!r}, expected printable "
                    f"names that differ in their first {MAX_NAME} characters; rename it"
                )
            parts[name] = self._number(value, f" as {name}")
        if not 0 < len(parts) <= MAX_PARTS:
            raise NoScore(
                f"reward function {self.name} gave {len(parts)} named numbers, expected 1 to "
                f"{MAX_PARTS}"
            )
        return parts["score"] if is_verl else sum(parts.values()), parts

    def _number(self, value: Any, place: str = "") -> float:
        """Return the value as a float. place: the value's name in an error. Raises: RewardError."""
        if not _is_number(value):
            raise NoScore(
                f"reward function {self.name} gave {_format(value)}{place}, expected a number "
                f"from {-MAX_REWARD:g} to {MAX_REWARD:g}, or a dict from names to such numbers"
            )
        return float(_plain(value))


def _values(found: Any, takes_lists: bool) -> Any:
    """Return the result of a reward function, as a list if the function takes lists."""
    if not takes_lists:
        return found
    # As in TRL, anything with an order is accepted: arrays, tensors, series and generators.
    if hasattr(found, "tolist"):
        found = found.tolist()
    is_list = isinstance(found, Iterable) and not isinstance(found, str | bytes | Mapping | Set)
    return list(found) if is_list else found


def _answer_of(
    target: str,
    instance: Any,
    arguments: Mapping[str, Any],
    logs: Collection[str],
    takes_lists: bool,
) -> tuple[Any, Logs] | Coroutine[Any, Any, tuple[Any, Logs]]:
    """Call a reward function, or an instance's method, in a worker; return answer and logs."""
    function = _found(target) if instance is None else getattr(instance, target.rpartition(".")[2])
    given = copy_of_each(arguments) if takes_lists else arguments
    found, logged = call_with_logs(function, given, logs=logs)
    if inspect.isawaitable(found):
        return _awaited(found, logged, takes_lists)
    # Only plain numbers, which the calling process can read without the user's packages.
    return _sendable(_values(found, takes_lists)), logged


async def _awaited(found: Awaitable[Any], logged: Logs, takes_lists: bool) -> tuple[Any, Logs]:
    return _sendable(_values(await found, takes_lists)), logged


@lru_cache(maxsize=64)
def _found(target: str) -> Callable[..., Any]:
    function: Callable[..., Any] = find(target, what="reward")
    return function


def _sendable(found: Any) -> Any:
    if isinstance(found, Mapping):
        return {name: _sendable(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_sendable(value) for value in found]
    plain = _plain(found)
    is_known = isinstance(plain, Real | Decimal | str | None)
    return plain if is_known and not (plain is None and found is not None) else _Kind(_kind(found))


class _Kind(str):
    """The name of a value's type, returned by a worker if the value is not a score."""

    __slots__ = ()


def _flat(*values: Any) -> Iterator[workers.Held]:
    for value in values:
        if isinstance(value, workers.Held):
            yield value
        elif isinstance(value, list):
            yield from (each for each in value if isinstance(each, workers.Held))


def _plain(value: Any) -> Any:
    """Return an array's or a tensor's only element as Python's own number."""
    try:
        # A masked number is missing, but its `item` is a number.
        return value.item() if hasattr(value, "item") and not np.ma.is_masked(value) else value
    except (TypeError, ValueError, RuntimeError):
        # It has several elements.
        return None


def _is_number(value: Any) -> bool:
    number = _plain(value)
    if not isinstance(number, Real | Decimal):
        return False
    try:
        return abs(float(number)) <= MAX_REWARD
    except (OverflowError, ValueError):
        # The value is an integer too large for a float, or a signalling NaN.
        return False


def load_functions(asked: str | Sequence[str] | Mapping[str, float]) -> tuple[RewardFunction, ...]:
    """Return the functions of these names.

    Args: asked: "my.py:score" or "package.module:score"; several names, or names with weights.
    Raises: BadRewardFunction if a function cannot be used.
    """
    names = [asked] if isinstance(asked, str) else list(asked)
    if len(set(names)) < len(names):
        raise BadRewardFunction(f"reward: got {', '.join(names)}, expected each function once")
    weights = asked if isinstance(asked, Mapping) else dict.fromkeys(names, 1.0)
    if not weights:
        raise BadRewardFunction("reward: got no function, expected one such as my.py:score")
    functions = tuple(_load(text, weight) for text, weight in weights.items())
    names = [each.name for each in functions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadRewardFunction(
            f"reward: {', '.join(sorted(twice))} is the name of two functions, expected a "
            "different name for each; rename one"
        )
    return functions


@lru_cache(maxsize=64, typed=True)
def _load(text: str, weight: object) -> RewardFunction:
    """Load a reward function. The result is cached, because each episode calls `_load`."""
    if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
        raise BadRewardFunction(f"reward: the weight of {text} is {weight!r}, expected a number")
    try:
        found = find(text, what="reward")
    except BadName as error:
        raise BadRewardFunction(str(error)) from error
    function = _read_signature(text, text.partition(":")[2], found, float(weight))
    preload(text)
    preload(f"{__name__}:_answer_of")
    return function


def _read_signature(text: str, name: str, found: Any, weight: float) -> RewardFunction:
    if isinstance(found, type):
        raise BadRewardFunction(
            f"reward: {text} is a class, expected a function or an instance with __call__; assign "
            "an instance to a name in the module, and use that name"
        )
    if not callable(found):
        raise BadRewardFunction(f"reward: {text} is {_kind(found)}, expected a function; name one")
    function = replace(_as_called(name, found, weight=weight), target=text)
    called = found if inspect.isroutine(found) else getattr(found, "__call__", found)  # noqa: B004
    is_stream = inspect.isasyncgenfunction(called)
    if is_stream or (inspect.isgeneratorfunction(called) and not function.takes_lists):
        wanted = "a list" if function.takes_lists else "a number"
        raise BadRewardFunction(
            f"reward: {text} yields its values, expected it to return {wanted}; write return "
            "instead of yield"
        )
    named = arguments_of(found)
    answers = named.keys() & {"completion", "completions"}
    reads_other = function.named is None or named.keys() & {*EXTRAS, "environments", "columns"}
    if len(answers) == 2:
        raise BadRewardFunction(
            f"reward: {text} takes both completion and completions, expected completion for one "
            "answer, or completions for lists; remove the other, and read a column of that name "
            "from an argument columns"
        )
    if not answers and not reads_other:
        raise BadRewardFunction(
            f"reward: {text} takes {inspect.signature(found)}, expected an argument completion "
            "that can be passed by name, or completions as in TRL"
        )
    if nameless := [
        name
        for name, each in inspect.signature(found).parameters.items()
        if each.kind is each.POSITIONAL_ONLY and each.default is each.empty
    ]:
        raise BadRewardFunction(
            f"reward: {text} takes {', '.join(nameless)} only by position, expected arguments that "
            "can be given by their names; remove the / after them, or give them defaults"
        )
    if function.takes_lists and "prompt" in function.required:
        remedy = renaming(["prompt"], takes_lists=True)
        raise BadRewardFunction(f"reward: {text} needs prompt, which it is not given; {remedy}")
    if unknown := sorted(function.required & _NOT_HERE):
        raise BadRewardFunction(
            f"reward: {text} needs {', '.join(unknown)}, which only a trainer has; expected "
            "arguments that are columns; give them a default"
        )
    return function


def load_group_functions(
    asked: str | Sequence[str] | Mapping[str, float],
) -> tuple[RewardFunction, ...]:
    """Load group functions: each scores all answers of a group in one call.

    asked: as for `load_functions`.
    Raises: BadRewardFunction, also if a function takes no lists or needs an argument of EXTRAS.
    """
    try:
        functions = load_functions(asked)
    except BadRewardFunction as error:
        raise BadRewardFunction(f"group_{error}") from error
    for each in functions:
        if hides_arguments(each.function):
            raise BadRewardFunction(
                f"group_reward: {each.name}: {HIDES}; expected an argument completions"
            )
        if not each.takes_lists:
            raise BadRewardFunction(
                f"group_reward: {each.name} scores one answer, expected a function with lists, "
                f"such as def {each.name}(completions, answer, **columns)"
            )
        if missing := sorted(each.required & EXTRAS):
            raise BadRewardFunction(
                f"group_reward: {each.name} needs {', '.join(missing)}, which only functions of "
                "one answer are given; expected completions and columns; rename the argument or "
                "the column, read it from `columns`, or give the argument a default"
            )
    return functions


def method_as_reward(
    name: str, method: Callable[..., Any], *, target: str = "", instance: Any = None
) -> RewardFunction:
    """Return a reward function that calls an environment's method, such as TRL's `get_reward`.

    The method may take any arguments that a reward function may take, or none.

    Args:
        target: Name of the method for a worker: "module:Class.method"; empty without a worker.
        instance: Reference to the environment's instance in a worker; None without a worker.
    """
    return replace(_as_called(name, method, weight=1.0), target=target, instance=instance)


def _as_called(name: str, function: Callable[..., Any], *, weight: float) -> RewardFunction:
    named = arguments_of(function)
    parameters = inspect.signature(function).parameters.values()
    takes_lists = bool(named.keys() & {"completions", "environments"})
    own = {"prompts", "completions"} if takes_lists else {"prompt", "completion"}
    needed = {argument for argument, is_needed in named.items() if is_needed}
    needed -= {*own, "columns", *TRAINER_ARGUMENTS}
    return RewardFunction(
        name=name,
        function=function,
        weight=weight,
        takes_lists=takes_lists,
        named=None
        if any(each.kind is each.VAR_KEYWORD for each in parameters)
        else frozenset(named),
        required=frozenset("environment" if each == "environments" else each for each in needed),
        takes_row="columns" in named,
        of_trainer=TRAINER_ARGUMENTS.intersection(named),
        bound=bound_name(function),
    )


def _as_conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _format(found: object) -> str:
    if isinstance(found, _Kind):
        return found
    is_short = found is None or isinstance(found, Real | Decimal | str)
    return f"{found!r:.80}" if is_short else _kind(found)


def _kind(found: object) -> str:
    return f"a list of {len(found)}" if isinstance(found, list) else type_of(found)
