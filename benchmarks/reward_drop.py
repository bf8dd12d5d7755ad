"""Count the false alarms and the misses of the detector of reward collapses.

    python -m benchmarks.reward_drop [tune|judge] [--every]

In synthetic runs, each step has a batch of returns (right or wrong, or normally distributed) about
a mean that follows a curve; the difficulty changes from step to step. Half of the runs collapse. A
collapse counts as found if it is reported within 20 steps of its middle: the step at which half of
the fall has happened. The script also counts the collapses after which the run still keeps a
checkpoint from before the first step of the fall, for several values of `run.checkpoint_every` and
`run.keep_checkpoints`. The thresholds were chosen on `tune`; the runs of `judge` have other seeds,
curves, scales, noises and falls.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from service.store.retention import milestones
from service.telemetry.reward_drop import RewardDrop, RewardWatch

LIMIT_STEPS = 20
# Sizes of falls in standard deviations of a step's returns.
SMALL, LARGE = 0.3, 0.6
NUM_RUNS = 150
CHECKPOINTS = ((20, 2), (5, 2), (1, 1), (10, 3), (50, 2))
Curve = Callable[[float], float]
"""A function from the finished share of a run to the level of the returns, both from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The values from which a set draws the properties of its synthetic runs."""

    curves: dict[str, Curve]
    scales: dict[str, tuple[float, float, bool]]
    """Factor and offset of a return, and whether a return is only the best or the worst one."""
    samples: tuple[int, ...]
    difficulty: tuple[float, ...]
    """Standard deviation of the level that a step's tasks cause, as a share of the range."""
    persistence: tuple[float, ...]
    """Correlation of the difficulties of two successive steps."""
    lengths: tuple[int, ...]
    dips: tuple[float, ...]
    """Depth of a dip of 15 steps in a run without a collapse, as a share of the level."""
    falls: tuple[tuple[int, float], ...]
    """Number of steps of a collapse, and the share of the level that remains after it."""
    first_seed: int


SETS = {
    "tune": Family(
        curves={
            "flat": lambda t: 0.7,
            "high": lambda t: 0.85,
            "middle": lambda t: 0.5,
            "ramp": lambda t: 0.2 + 0.6 * t,
            "S": lambda t: 0.1 + 0.8 / (1 + math.exp(-12 * (t - 0.5))),
            "saturating": lambda t: 0.1 + 0.8 * (1 - math.exp(-4 * t)),
            "steps up": lambda t: 0.25 + 0.2 * min(int(4 * t), 3),
            "low": lambda t: 0.1,
        },
        scales={
            "0 or 1": (1.0, 0.0, True),
            "-1 or 1": (2.0, -1.0, True),
            "-10 or 0": (10.0, -10.0, True),
            "-5 to 5": (10.0, -5.0, False),
            "0 to 100": (100.0, 0.0, False),
        },
        samples=(16, 32, 64, 128, 256, 512),
        difficulty=(0.0, 0.02, 0.05),
        persistence=(0.0, 0.3, 0.5, 0.7),
        lengths=(120, 300, 500, 900),
        dips=(0.0, 0.0, 0.08),
        falls=((1, 0.0), (1, 0.3), (1, 0.7), (5, 0.5), (10, 0.3), (25, 0.0), (30, 0.2), (80, 0.3)),
        first_seed=0,
    ),
    "judge": Family(
        curves={
            "high": lambda t: 0.9,
            "flat": lambda t: 0.6,
            "low": lambda t: 0.12,
            "square root": lambda t: 0.1 + 0.7 * math.sqrt(t),
            "rise and plateau": lambda t: 0.3 + 0.5 * min(3 * t, 1.0),
            "two rises": lambda t: 0.2 + 0.3 * min(4 * t, 1) + 0.3 * min(max(4 * t - 2, 0), 1),
        },
        scales={
            "0 or 1": (1.0, 0.0, True),
            "-3 or 2": (5.0, -3.0, True),
            "0 to 10": (10.0, 0.0, False),
            "-50 to -20": (30.0, -50.0, False),
        },
        samples=(24, 96, 384),
        difficulty=(0.0, 0.015, 0.04),
        persistence=(0.0, 0.4, 0.6),
        lengths=(100, 250, 700),
        dips=(0.0, 0.0, 0.06),
        falls=((1, 0.1), (1, 0.5), (3, 0.4), (8, 0.6), (20, 0.2), (30, 0.0), (60, 0.4)),
        first_seed=1_000_000,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticHistory:
    """The statistics of a run's steps."""

    name: str
    means: np.ndarray
    stds: np.ndarray
    num_samples: int
    onset: int | None
    """The first step of the collapse; None for a run without one."""
    middle: int | None
    """The step at which half of the fall has happened; None for a run without a collapse."""

    @property
    def size(self) -> float:
        """The size of the collapse, in standard deviations of a step's returns before the fall."""
        assert self.onset is not None
        before = slice(self.onset - 1 - LIMIT_STEPS, self.onset - 1)
        fall = self.means[before].mean() - self.means[-LIMIT_STEPS:].mean()
        return float(fall / self.stds[before].mean())


def history_of(family: Family, number: int, *, is_honest: bool) -> SyntheticHistory:
    seed = family.first_seed + 2 * number + is_honest
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    curve_name = draw.choice(list(family.curves))
    scale_name = draw.choice(list(family.scales))
    samples, length = draw.choice(family.samples), draw.choice(family.lengths)
    sigma, rho = draw.choice(family.difficulty), draw.choice(family.persistence)
    dip, (fall_steps, left) = draw.choice(family.dips), draw.choice(family.falls)
    after = 2 * LIMIT_STEPS + fall_steps
    steps = length + (0 if is_honest else after)
    level = np.array([family.curves[curve_name](min(i / length, 1.0)) for i in range(steps)])
    onset = None
    if is_honest:
        dip_at = draw.randrange(length // 2, length)
        level[dip_at : dip_at + 15] *= 1 - dip
    else:
        onset = length
        done = np.clip((np.arange(steps) - onset + 1) / fall_steps, 0.0, 1.0)
        level *= 1 - (1 - left) * done
    difficulty, factor = 0.0, math.sqrt(1 - rho**2)
    means, stds = [], []
    offset_scale, offset, is_binary = family.scales[scale_name]
    for each in level:
        difficulty = rho * difficulty + factor * rng.normal(0.0, sigma)
        share = float(np.clip(each + difficulty, 0.0, 1.0))
        drawn = (
            (rng.random(samples) < share).astype(float)
            if is_binary
            else share + rng.normal(0.0, 0.25, samples)
        )
        returns = offset + offset_scale * drawn
        means.append(float(returns.mean()))
        stds.append(float(returns.std()))
    shape = "honest" if is_honest else f"{fall_steps} steps to {left:g}"
    return SyntheticHistory(
        name=f"{shape}: {curve_name}, {scale_name}, {samples} samples, difficulty {sigma:g} "
        f"(correlation {rho:g}), {length} steps, dip {dip if is_honest else 0:g}",
        means=np.array(means),
        stds=np.array(stds),
        num_samples=samples,
        onset=None if onset is None else onset + 1,
        middle=None if onset is None else onset + 1 + (fall_steps - 1) // 2,
    )


def drops_of(history: SyntheticHistory) -> Iterator[RewardDrop | None]:
    watch = RewardWatch()
    for i, (mean, std) in enumerate(zip(history.means, history.stds, strict=True), 1):
        watch.add(i, mean=float(mean), std=float(std), num_returns=history.num_samples)
        yield watch.drop


def has_good_checkpoint(
    drops: Sequence[RewardDrop | None], onset: int, *, every: int, keep: int
) -> bool:
    """Return whether a checkpoint from before `onset` is still kept after the last step."""
    there: list[int] = []
    for step, drop in enumerate(drops, 1):
        if step % every == 0:
            there = [step, *there]
            kept = milestones(there, collapsed_since=drop.since if drop else None)
            there = [each for i, each in enumerate(there) if i < keep or each in kept]
    return any(step < onset for step in there)


def main() -> None:
    name = next((each for each in sys.argv[1:] if not each.startswith("-")), "judge")
    family = SETS[name]
    false, missed, delays, sizes = [], [], [], []
    kept = dict.fromkeys(CHECKPOINTS, 0)
    for number in range(NUM_RUNS):
        honest = history_of(family, number, is_honest=True)
        if found := next((each for each in drops_of(honest) if each), None):
            false.append(f"{honest.name}: {found.text}")
        fallen = history_of(family, number, is_honest=False)
        assert fallen.onset is not None and fallen.middle is not None
        drops = list(drops_of(fallen))
        if found := next((each for each in drops[: fallen.onset - 1] if each), None):
            false.append(f"before its fall, {fallen.name}: {found.text}")
        at = next((i for i, each in enumerate(drops, 1) if each and i >= fallen.onset), None)
        sizes.append(fallen.size)
        if at is None or at > fallen.middle + LIMIT_STEPS:
            missed.append((fallen.size, f"{fallen.name}, found {at} (fall at {fallen.onset})"))
            continue
        delays.append(at - fallen.middle)
        for every, keep in kept:
            kept[every, keep] += has_good_checkpoint(drops, fallen.onset, every=every, keep=keep)
    show(name, false=false, missed=missed, sizes=sizes, delays=delays)
    for (every, keep), count in kept.items():
        print(
            f"a checkpoint from before the fall is kept (every {every} steps, {keep} newest): "
            f"{count} of {len(delays)}"
        )
    if "--every" in sys.argv:
        print("\n".join(f"  false alarm: {text}" for text in false))
        print("\n".join(f"  missed, of size {size:.2f}: {text}" for size, text in missed))


def show(
    name: str,
    *,
    false: Sequence[str],
    missed: Sequence[tuple[float, str]],
    sizes: Sequence[float],
    delays: Sequence[int],
) -> None:
    """Print the error rates.

    missed: sizes and descriptions of the falls that were not found in time.
    """
    print(f"{name}: {NUM_RUNS} honest runs and {NUM_RUNS} collapses")
    print(f"false alarms: {len(false)} in {2 * NUM_RUNS} histories without a collapse")
    print(f"missed: {len(missed)} of {NUM_RUNS} collapses")
    for least, most in pairwise((-math.inf, SMALL, LARGE, math.inf)):
        num = sum(least <= size < most for size in sizes)
        num_missed = sum(least <= size < most for size, _ in missed)
        print(f"  falls of {least:g} to {most:g} standard deviations: {num_missed} of {num}")
    print(
        f"steps from the middle of the fall to the report: median {median(delays):g}, "
        f"largest {max(delays)}"
    )


if __name__ == "__main__":
    main()
