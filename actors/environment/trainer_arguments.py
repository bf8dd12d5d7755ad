"""What TRL's trainers give a reward function beside the columns: state, and two ways to log.

    def score(completions, answer, trainer_state, log_metric, log_extra, **columns):
        right = [float(text == wanted) for text, wanted in zip(completions, answer)]
        log_metric("accuracy", sum(right) / len(right))      # a curve of its own, not rewarded
        log_extra("read as", completions)                    # kept beside each trajectory
        return right if trainer_state.global_step > 100 else [0.5] * len(right)

`call_with_logs` runs where the function runs, which may be another process: what was logged comes
back with its answer. Called by `actors.environment.reward_functions`.
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
# Of one call. What is beyond is left out, for it is only looked at.
MAX_LOGGED, MAX_NAME, MAX_EXTRA_CHARS = 64, 128, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What is known of transformers' TrainerState where an answer is scored."""

    global_step: int = 0
    """Steps that are done when the rollout's own step is trained: 0 for those of the first."""
    max_steps: int = 0
    """`run.steps`; 0 in an evaluation without a run."""
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name} is not known where answers are scored; expected one of "
            "global_step, max_steps; global_step / max_steps is how far the run is"
        )


trainer_state: ContextVar[TrainerState | None] = ContextVar("trainer_state", default=None)
"""Of the rollout that is played where an environment's methods run; None: of the first step."""


@dataclass(slots=True, kw_only=True)
class Logs:
    """What one call of a function has logged."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    """The finite numbers of each name, in the order of the calls."""
    extras: dict[str, Any] = field(default_factory=dict)
    """By column, what was given last: a text, or a list of texts for a list."""

    def log_metric(self, name: str, value: Any) -> None:
        """Keep a number, which gets a curve and is not rewarded."""
        number = float(value)
        if math.isfinite(number) and (name in self.metrics or len(self.metrics) < MAX_LOGGED):
            self.metrics.setdefault(str(name)[:MAX_NAME], []).append(number)

    def log_extra(self, column: str, values: Any) -> None:
        """Keep a column: a value for each answer, in their order."""
        if column not in self.extras and len(self.extras) >= MAX_LOGGED:
            return
        values = values.tolist() if hasattr(values, "tolist") else values
        is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
        found = [_text(value) for value in values] if is_list else _text(values)
        self.extras[str(column)[:MAX_NAME]] = found

    def extras_of(self, index: int, *, num_answers: int) -> dict[str, str]:
        """Return the columns of one answer. Raises: ValueError for a list of another length."""
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
    """Call a function with those of `log_metric` and `log_extra` that it takes.

    Returns: what it gave, which the caller awaits or iterates over before it reads the logs.
    """
    found = Logs()
    return function(**arguments, **{name: getattr(found, name) for name in logs}), found


def mean_metrics(calls: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the mean of the numbers that several calls have logged, by name."""
    values: dict[str, list[float]] = {}
    for metrics in calls:
        for name, numbers in metrics.items():
            values.setdefault(name, []).extend(numbers)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return str(value)[:MAX_EXTRA_CHARS].encode(errors="replace").decode()
