"""Detect that the mean return of a run has collapsed.

A level is the mean return over LEVEL_STEPS successive steps. The mean return of the newest steps is
compared with the best earlier level. A fall must be large compared with the noise of the run's
history, and with the spread of the returns within a step. So the rewards' scale and offset do not
matter.

The thresholds were chosen on the `tune` runs of `python -m benchmarks.reward_drop`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median

from service.telemetry.records import StepRecord

WINDOWS = (3, 6, 12)
"""Lengths of the windows of newest steps, each of which is compared with the level before it."""
LEVEL_STEPS = 20
"""A level is the mean return of this many successive steps."""
MIN_EARLIER_STEPS = 40
KEPT_STEPS = 200
"""Number of newest steps among which the best level is searched."""
MIN_NOISES = 4.2
"""Smallest fall that counts, in standard deviations of the difference that is compared."""
MIN_SPREADS = 0.33
"""Smallest fall that counts, in standard deviations of a step's returns."""
# Standard deviation of a normal distribution, divided by its median absolute deviation.
_MAD_TO_STD = 1.4826
_CALM_STEPS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardDrop:
    """A collapse of a run's mean return that has not recovered."""

    since: int
    """Estimated first step of the fall."""
    found: int
    """Step at which the fall was found."""
    before: float
    """Mean return at the best level before the fall."""
    now: float
    """Mean return of the newest steps when the fall was found."""

    @property
    def text(self) -> str:
        return (
            f"the mean return has fallen from {self.before:.3g} to {self.now:.3g} "
            f"since step {self.since}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    number: int
    mean: float
    std: float
    error: float
    """Standard error of the mean, if the returns are independent."""
    level: float | None
    """Mean return of this step and the LEVEL_STEPS - 1 steps before; None if fewer steps exist."""


class RewardWatch:
    """A detector of reward drops in a run; call `see` or `add` for each step in order.

    If steps are undone, begin again with a new detector.
    """

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=KEPT_STEPS)
        self._falls: dict[int, deque[float]] = {w: deque(maxlen=KEPT_STEPS) for w in WINDOWS}
        self._drop: RewardDrop | None = None
        self._num_since = 0
        """Number of steps since the last recovery; windows contain only these."""

    @property
    def drop(self) -> RewardDrop | None:
        """The drop that has not recovered; None if the reward has not dropped or has recovered."""
        return self._drop

    def see(self, record: StepRecord) -> None:
        """Add the step of a record (see `add`); ignore the step if its mean return is not known."""
        mean, std = record.value("reward_mean"), record.value("reward_std")
        if mean is not None:
            self.add(record.step, mean=mean, std=std or 0.0, num_returns=record.num_trajectories)

    def add(self, step: int, *, mean: float, std: float, num_returns: int) -> None:
        """Add the next step and update `drop`; ignore the step if mean or std is not finite.

        Args: mean, std: mean and standard deviation of the step's returns.
        """
        if not (math.isfinite(mean) and math.isfinite(std)):
            return
        last = [each.mean for each in list(self._steps)[-(LEVEL_STEPS - 1) :]] + [mean]
        self._steps.append(
            _Step(
                number=step,
                mean=mean,
                std=std,
                error=std / math.sqrt(max(num_returns, 1)),
                level=fmean(last) if len(last) == LEVEL_STEPS else None,
            )
        )
        if self._drop is not None:
            recent = fmean(each.mean for each in list(self._steps)[-WINDOWS[1] :])
            if recent >= (self._drop.before + self._drop.now) / 2:
                self._drop, self._num_since = None, 0
            return
        self._num_since += 1
        steps = list(self._steps)
        noise = _step_noise(steps) if len(steps) > MIN_EARLIER_STEPS else 0.0
        for window in WINDOWS:
            if self._drop is None and window <= self._num_since:
                self._drop = self._compare(steps, window, step_noise=noise)

    def _compare(
        self, steps: Sequence[_Step], window: int, *, step_noise: float
    ) -> RewardDrop | None:
        earlier, recent = steps[:-window], steps[-window:]
        levels = [each.level for each in earlier if each.level is not None]
        if not levels:
            return None
        before, now = max(levels), fmean(each.mean for each in recent)
        fall, falls = before - now, self._falls[window]
        past = list(falls)[:-_CALM_STEPS]
        falls.append(fall)
        if fall <= 0 or len(earlier) < MIN_EARLIER_STEPS:
            return None
        spread = max(*(median(each.std for each in of) for of in (earlier[-LEVEL_STEPS:], recent)))
        # Rounding alone may move the mean of equal returns.
        if fall < max(MIN_SPREADS * spread, 1e-9 * max(abs(before), abs(now))):
            return None
        usual = max(median(past), 0.0) if past else 0.0
        precision = math.sqrt(1 + window / LEVEL_STEPS)
        noise = max(
            _scale_of(past),
            precision * _window_noise(earlier[:-_CALM_STEPS], window),
            precision * step_noise / math.sqrt(window),
        )
        # Fewer earlier steps give a worse estimate of the noise.
        if fall - usual < MIN_NOISES * (1 + LEVEL_STEPS / len(earlier)) * noise:
            return None
        since = _onset(steps, before - fall / 4)
        return RewardDrop(since=since, found=steps[-1].number, before=before, now=now)


def _onset(steps: Sequence[_Step], border: float) -> int:
    """Return the number of the step at which the mean return began to fall below `border`.

    border: a mean return below the level before the fall.
    Example: mean returns [5, 5, 1, 1] of steps 1 to 4, border 4 -> step 3
    """
    # Begin the search before the fall of the level: a level is a mean over several steps, and falls
    # later than the means of single steps.
    above = [i for i, each in enumerate(steps) if each.level is not None and each.level > border]
    begin = above[-1] + 1 - LEVEL_STEPS // 4 if above else 0
    # From the returned step on, the means are below `border` by the largest sum.
    below, most, since = 0.0, -math.inf, steps[-1].number
    for each in reversed(steps[begin:]):
        below += border - each.mean
        if below > most:
            most, since = below, each.number
    return since


def _step_noise(steps: Sequence[_Step]) -> float:
    """Estimate the standard deviation of the newest steps' mean returns, without slow changes."""
    # The differences of neighbouring steps ignore slow changes.
    newest = steps[-3 * LEVEL_STEPS :]
    changes = [abs(b.mean - a.mean) for a, b in pairwise(newest)]
    return max(
        _MAD_TO_STD * median(changes) / math.sqrt(2),
        median(each.error for each in newest),
    )


def _window_noise(steps: Sequence[_Step], window: int) -> float:
    """Return the standard deviation of the mean return of `window` successive steps."""
    # The noise of single steps would be wrong here if the steps are correlated.
    sums = [0.0, *accumulate(each.mean for each in steps)]
    changes = [
        abs(sums[i + window] - 2 * sums[i] + sums[i - window]) / window
        for i in range(window, len(sums) - window)
    ]
    return _MAD_TO_STD * median(changes) / math.sqrt(2) if changes else 0.0


def _scale_of(values: Sequence[float]) -> float:
    """Return the standard deviation, estimated by the median absolute deviation; 0 if empty."""
    if not values:
        return 0.0
    centre = median(values)
    return _MAD_TO_STD * median(abs(value - centre) for value in values)
