"""The statistics of a step, combined from partial results of micro-batches, ranks and updates.

Partial results can be combined in any order: sums are added, maxima compared. So all tokens count
equally, in whichever micro-batch, rank or update they are. Every rank gets the same numbers,
because each combines the same gathered rows in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.statistics import STATISTICS, Reduction, Statistic, only_known

Part = Literal["sum", "squares", "count", "max", "negated_min"]
"""A way to reduce the values of some tokens to a partial result.

negated_min: the maximum of the negated values, so that minima can be combined like maxima.
"""
_PARTS: Mapping[Reduction, tuple[Part, ...]] = {
    "mean": ("sum", "count"),
    "share": ("sum", "count"),
    "effective_size": ("sum", "squares", "count"),
    "update_sum": ("sum",),
    "max": ("max",),
    "min": ("negated_min",),
    # The rank computes these statistics itself.
    "update": (),
}
_COMPARED = ("max", "negated_min")
_OF_LOSS = tuple(statistic for statistic in STATISTICS if statistic.source == "policy_loss")
_NEEDED = dict.fromkeys((each.values, part) for each in _OF_LOSS for part in _PARTS[each.reduction])
# Counts besides the statistics: trained tokens, tokens of packed rows, and losses that are not
# finite.
_COUNTS: tuple[tuple[str, Part], ...] = (
    ("num_trained", "sum"),
    ("num_packed", "sum"),
    ("num_nonfinite", "sum"),
)

# The places of an update's row: (name of the values, partial result). Partial results that are
# added come first.
ADDED = (*(key for key in _NEEDED if key[1] not in _COMPARED), *_COUNTS)
COMPARED = tuple(key for key in _NEEDED if key[1] in _COMPARED)
_PLACES = {key: place for place, key in enumerate((*ADDED, *COMPARED))}


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStats:
    """The statistics of a critic's update, over all ranks."""

    statistics: Mapping[str, float]
    """The known statistics by name; the critic's values are those from before the update."""
    num_tokens: int
    is_skipped: bool
    """Whether the update was not applied, because its loss or gradient was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """The statistics of a training step, over all ranks."""

    step: int
    trainer_version: int
    statistics: Mapping[str, float]
    """The known statistics of the loss and the critic by name, over finite updates: a skipped
    update counts only in num_skipped_updates."""
    learning_rate: float
    """The learning rate of the last update."""
    trained_tokens: int
    """Number of trained tokens; a token counts once in each epoch."""
    packed_tokens: int
    """Number of tokens of the packed rows; a token counts once in each epoch."""
    num_updates: int
    num_empty_updates: int
    """Number of updates without a trained token, which changed no weights."""
    num_skipped_updates: int
    """Number of updates that were not applied, because their loss or gradient was not finite."""

    @property
    def is_skipped(self) -> bool:
        """Whether any update of the step was skipped because it was not finite."""
        return self.num_skipped_updates > 0

    @property
    def is_all_skipped(self) -> bool:
        """Whether every update of the step was skipped."""
        return self.is_skipped and self.num_skipped_updates == self.num_updates


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTotals:
    """The totals of one update, over all ranks."""

    row: tuple[float, ...]
    """The partial results in the order of ADDED, then COMPARED. If no token has a value, a result
    in ADDED is 0, and one in COMPARED is -inf."""
    grad_norm: float
    learning_rate: float

    def part(self, values: str, part: Part = "sum") -> float:
        return self.row[_PLACES[values, part]]

    @property
    def is_empty(self) -> bool:
        return self.part("num_trained") == 0

    @property
    def is_skipped(self) -> bool:
        """Whether a loss or the gradient is not finite."""
        return not math.isfinite(self.grad_norm) or self.part("num_nonfinite") > 0


def summarize_step(
    updates: Sequence[UpdateTotals],
    *,
    step: int,
    trainer_version: int,
    critic: CriticStats | None = None,
) -> StepStats:
    """Combine a step's updates. critic: the statistics of the critic's update; None without a
    critic.
    """
    finite = [update for update in updates if not update.is_skipped]
    applied = [update for update in finite if not update.is_empty]
    found: dict[str, float | None] = dict(critic.statistics) if critic else {}
    if applied:
        found |= {each.name: _reduce(each, finite) for each in _OF_LOSS}
        found["grad_norm"] = sum(update.grad_norm for update in applied) / len(applied)
    return StepStats(
        step=step,
        trainer_version=trainer_version,
        statistics=only_known(found),
        learning_rate=updates[-1].learning_rate if updates else 0.0,
        trained_tokens=int(sum(update.part("num_trained") for update in finite)),
        packed_tokens=int(sum(update.part("num_packed") for update in finite)),
        num_updates=len(updates),
        num_empty_updates=len(finite) - len(applied),
        num_skipped_updates=len(updates) - len(finite),
    )


def _reduce(statistic: Statistic, updates: Sequence[UpdateTotals]) -> float | None:
    """Compute a statistic over the updates; None if no token has a value."""

    def total(part: Part) -> float:
        return sum(update.part(statistic.values, part) for update in updates)

    def largest(part: Part) -> float | None:
        found = max(update.part(statistic.values, part) for update in updates)
        return None if found == -math.inf else found

    match statistic.reduction:
        case "mean" | "share":
            count = total("count")
            return total("sum") / count if count else None
        case "effective_size":
            if not total("count"):
                return None
            whole = total("count") * total("squares")
            # The squares of values near 0 may all round to 0.
            return total("sum") ** 2 / whole if whole else 0.0
        case "update_sum":
            return total("sum") / len(updates)
        case "max":
            return largest("max")
        case "min":
            negated = largest("negated_min")
            return None if negated is None else -negated
        case _:
            return None
