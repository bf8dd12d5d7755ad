"""The newest and the earlier steps of one environment as columns, and their comparison. Pure.

A pattern is a mark on some trajectories. Its share in the newest steps is compared with its share
in the earlier steps, and the reward of marked trajectories with the reward of others in their
group. Called by `patterns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from service.hacking.features import Bools, Floats, Ints, StepFeatures

# Number of newest steps: fewer are noisy, more find patterns later.
RECENT_STEPS = 5
# Smallest number of earlier steps from which the usual values are known.
MIN_EARLIER_STEPS = 8
# Older steps are dropped, so that slow changes become usual.
EARLIER_STEPS = 100
# Smallest number of trajectories in the newest steps for a share.
MIN_TRAJECTORIES = 40
# Smallest number of groups with both kinds of members for a gain.
MIN_MIXED_GROUPS = 4
# A newer value that is this number of spreads from the earlier ones is new. At four, the chance is
# about 1 in 30,000 for a normal spread, over hundreds of steps and ten patterns.
NUM_SPREADS = 4.0
# Factor from the median deviation to the standard deviation, for a normal spread.
MAD_TO_SD = 1.4826


class Window:
    """N trajectories of the newest steps and of the steps before them."""

    def __init__(self, steps: Sequence[StepFeatures]) -> None:
        """Make a window. steps: steps of one environment, in order."""
        self.steps = tuple(steps)

    @property
    def is_enough(self) -> bool:
        return (
            len(self.steps) >= RECENT_STEPS + MIN_EARLIER_STEPS
            and int(self.is_recent.sum()) >= MIN_TRAJECTORIES
        )

    @cached_property
    def place(self) -> Ints:
        """[N], index in `steps` of each trajectory's step."""
        counts = [each.num_trajectories for each in self.steps]
        return np.repeat(np.arange(len(self.steps)), counts)

    @cached_property
    def is_recent(self) -> Bools:
        return self.place >= len(self.steps) - RECENT_STEPS

    @cached_property
    def reward(self) -> Floats:
        return self.floats("reward")

    @cached_property
    def is_graded(self) -> Bools:
        return np.concatenate([each.is_graded for each in self.steps])

    @cached_property
    def num_missing(self) -> Ints:
        """[number of steps], number of failed rollouts."""
        return np.array([each.num_missing for each in self.steps])

    @cached_property
    def num_rollouts(self) -> Ints:
        """[number of steps], number of rollouts including failed ones."""
        return np.array([each.num_trajectories for each in self.steps]) + self.num_missing

    @cached_property
    def group(self) -> Ints:
        """[N], codes of the groups; groups of different steps have different codes."""
        return np.concatenate([each.group for each in self.steps]) ^ (self.place << 40)

    def floats(self, name: str) -> Floats:
        return np.concatenate([getattr(each, name) for each in self.steps]).astype(np.float64)

    def ints(self, name: str) -> Ints:
        return np.concatenate([getattr(each, name) for each in self.steps])

    def component(self, name: str) -> Floats:
        return np.concatenate(
            [
                each.components.get(name, np.full(each.num_trajectories, np.nan))
                for each in self.steps
            ]
        )

    @cached_property
    def component_names(self) -> tuple[str, ...]:
        return tuple(sorted({name for each in self.steps for name in each.components}))

    @cached_property
    def scale(self) -> float:
        """The range of returns from the 5th to the 95th percentile, but at least half of the whole
        range.
        """
        known = self.reward[self.is_graded]
        if not known.size:
            return 0.0
        low, high = np.percentile(known, (5, 95))
        return float(max(high - low, (known.max() - known.min()) / 2))

    @cached_property
    def step_numbers(self) -> Ints:
        return np.array([each.step for each in self.steps])

    def means(self, values: Floats, among: Bools) -> Floats:
        """Return the mean of each step over selected trajectories, [number of steps].

        NaN for a step without selected trajectories.
        """
        counts = np.bincount(self.place[among], minlength=len(self.steps))
        sums = np.bincount(self.place[among], weights=values[among], minlength=len(self.steps))
        with np.errstate(invalid="ignore"):
            return sums / counts

    def recent_mean(self, values: Floats, among: Bools) -> float:
        """Return the mean over the newest steps; NaN if there are no values."""
        chosen = values[among & self.is_recent]
        return float(chosen.mean()) if chosen.size else float("nan")

    def gains(self, mark: Bools) -> Floats | None:
        """Return the reward that marked trajectories of the newest steps earn beyond unmarked ones.

        One mean for each group that has both; None if there are too few such groups.
        """
        among = self.is_recent & self.is_graded
        marked, groups, rewards = mark[among], self.group[among], self.reward[among]
        _, codes = np.unique(groups, return_inverse=True)
        size = int(codes.max(initial=-1)) + 1
        counts = [np.bincount(codes[m], minlength=size) for m in (marked, ~marked)]
        sums = [
            np.bincount(codes[m], weights=rewards[m], minlength=size) for m in (marked, ~marked)
        ]
        is_mixed = (counts[0] > 0) & (counts[1] > 0)
        if int(is_mixed.sum()) < MIN_MIXED_GROUPS:
            return None
        marked_mean, unmarked_mean = (
            each_sum[is_mixed] / count[is_mixed]
            for each_sum, count in zip(sums, counts, strict=True)
        )
        return marked_mean - unmarked_mean

    def onset(self, values: Floats, *, before: float, now: float) -> int:
        """Return the first step from which all values are nearer to `now` than to `before`.

        values: [number of steps]. One step may be an exception.
        """
        is_new = (values - before) / (now - before) >= 0.5
        first = len(values) - 1
        exceptions = 0
        for number in range(len(values) - 1, -1, -1):
            if is_new[number]:
                first, exceptions = number, 0
                continue
            exceptions += 1
            if exceptions > 1 and number < len(values) - RECENT_STEPS:
                break
        return int(self.step_numbers[first])


def noise(values: Floats) -> float:
    """Return the robust spread of earlier steps' values about their trend; NaNs are ignored.

    It is computed from differences of neighbours, whose variance is twice that of one value.
    """
    steps = np.diff(values[~np.isnan(values)])
    return MAD_TO_SD * float(np.median(np.abs(steps))) / 2**0.5 if steps.size else float("nan")


def usual(values: Floats) -> tuple[float, float]:
    """Return the median and the robust spread of earlier steps' values; NaNs are ignored."""
    known = values[~np.isnan(values)]
    if not known.size:
        return float("nan"), float("nan")
    median = float(np.median(known))
    return median, MAD_TO_SD * float(np.median(np.abs(known - median)))
