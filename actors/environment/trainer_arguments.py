"""The arguments that TRL's trainers pass to a reward function besides the columns.

They are the trainer's state and two functions that log:

    def score(completions, answer, trainer_state, log_metric, log_extra, **columns):
        right = [float(text == wanted) for text, wanted in zip(completions, answer)]
        log_metric("accuracy", sum(right) / len(right))      # shown as a curve, not rewarded
        log_extra("read as", completions)                    # is kept with each trajectory
        return right if trainer_state.global_step > 100 else [0.5] * len(right)

`call_with_logs` runs in the process of the reward function, which may be a worker. It returns the
function's answer and everything that the function has logged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

TRAINER_STATE = "trainer_state"
LOGS = frozenset({"log_metric", "log_extra"})
TRAINER_ARGUMENTS = LOGS | {TRAINER_STATE}
# Limits on what one call logs. Logs beyond them are dropped, because only people read logs.
MAX_LOGGED, MAX_NAME, MAX_EXTRA_CHARS = 64, 128, 1000
_CONTAINERS = (list, dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The fields of transformers' TrainerState that are known when an answer is scored."""

    global_step: int = 0
    """Number of training steps before the rollout's own step; 0 for the first step."""
    max_steps: int = 0
    """Number of steps of the run (`run.steps`); 0 in an evaluation without a run."""
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name} is not known when answers are scored; expected one of "
            "global_step, max_steps; global_step / max_steps is the progress of the run"
        )


trainer_state: ContextVar[TrainerState | None] = ContextVar("trainer_state", default=None)
"""The state for the rollout being played in the current context; None: the first step's state."""


@dataclass(slots=True, kw_only=True)
class Logs:
    """The metrics and extra columns that one call of a function has logged."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    """The finite numbers that were logged under each name, in the order of logging."""
    extras: dict[str, Any] = field(default_factory=dict)
    """The last value of each column: one text for all answers, or a list with a text for each."""

    def log_metric(self, name: str, value: Any) -> None:
        """Log a number under a name. The number is shown as a curve and not rewarded."""
        number = float(value)
        if math.isfinite(number) and (name in self.metrics or len(self.metrics) < MAX_LOGGED):
            self.metrics.setdefault(str(name)[:MAX_NAME], []).append(number)

    def log_extra(self, column: str, values: Any) -> None:
        """Log a column: a list with a value for each answer, in order, or one value for all."""
        if column not in self.extras and len(self.extras) >= MAX_LOGGED:
            return
        values = values.tolist() if hasattr(values, "tolist") else values
        is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
        found = [_text(value) for value in values] if is_list else _text(values)
        self.extras[str(column)[:MAX_NAME]] = found

    def extras_of(self, index: int, *, num_answers: int) -> dict[str, str]:
        """Return the logged columns of one answer.

        Raises: ValueError if a column's list has another length than the answers.
        """
        found = {}
        for column, values in self.extras.items():
            if not isinstance(values, str) and len(values) != num_answers:
                raise ValueError(
                    f"log_extra: column {column} has {len(values)} values for {num_answers} "
                    "answers, expected one for each"
                )
            found[column] = values if isinstance(values, str) else values[index]
        return found


def call_with_logs(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, logs: Collection[str]
) -> tuple[Any, Logs]:
    """Call a function, and return its answer and its logs.

    Args:
        logs: Which of `log_metric` and `log_extra` the function takes.

    Returns: the function's answer and its logs. If the answer is a coroutine or a generator, the
        logs are complete only after the caller has awaited it or iterated over it.
    """
    found = Logs()
    return function(**arguments, **{name: getattr(found, name) for name in logs}), found


def copy_of(value: Any) -> Any:
    """Return a copy of a list or a dict, which a function may change; other values unchanged.

    The lists and dicts inside are copied too. All other values of a task's data are immutable.
    """
    # Without a call for each number or text, so that a column of many of them takes little time.
    if type(value) is list:
        return [copy_of(each) if type(each) in _CONTAINERS else each for each in value]
    if type(value) is dict:
        pairs = value.items()
        return {key: copy_of(each) if type(each) in _CONTAINERS else each for key, each in pairs}
    return value


def copy_of_each(lists: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the values in the list arguments of a reward function, one copy for each answer.

    A list may contain one object several times, so that its pickled form is small. After this call
    the function can change the value of one answer without changing the others.
    """
    return {
        name: [copy_of(value) for value in values]
        if isinstance(values, list) and len(values) > 1
        else values
        for name, values in lists.items()
    }


def mean_metrics(calls: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return, for each name, the mean of all numbers that the calls have logged under it."""
    values: dict[str, list[float]] = {}
    for metrics in calls:
        for name, numbers in metrics.items():
            values.setdefault(name, []).extend(numbers)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return str(value)[:MAX_EXTRA_CHARS].encode(errors="replace").decode()
