"""Measure what the audit for reward hacking costs for a step.

The audit reads the step's journal file, describes the step, and compares it with the hundred steps
before.

    PYTHONPATH=.:tests python -m benchmarks.hacking_cost --trajectories 1000 --turns 1 --tokens 8000
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from worlds.builders.journal_builders import step_of
from worlds.builders.trajectory_builders import make_trajectory, make_turn

from actors.journal.files import write_file
from actors.types import Trajectory
from service.hacking.features import StepFeatures, step_features
from service.hacking.patterns import KEPT_STEPS, Detector
from service.inspect.reader import load_step

GROUP_SIZE = 8
NUM_OBSERVED = 64
_Result = TypeVar("_Result")


def played(rng: np.random.Generator, group: int, turns: int, tokens: int) -> Iterator[Trajectory]:
    """Yield the trajectories of a group.

    group: number of the group. turns: number of turns of each trajectory.

    tokens: sampled tokens of each turn, after NUM_OBSERVED other tokens.
    """
    for member in range(GROUP_SIZE):
        prompt: list[int] = []
        made = []
        for number in range(turns):
            prompt += rng.integers(0, 50_000, NUM_OBSERVED).tolist()
            sampled = rng.integers(0, 50_000, tokens).tolist()
            reward = float(rng.random() < 0.5) if number == turns - 1 else 0.0
            made.append(make_turn(list(prompt), sampled, reward=reward))
            prompt += sampled
        yield make_trajectory(made, rollout_id=f"g{group:06d}.0-{member}")


def timed(call: Callable[[], _Result], times: list[float]) -> _Result:
    begun = time.perf_counter()
    result = call()
    times.append(1000 * (time.perf_counter() - begun))
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    groups = [
        tuple(played(rng, number, asked.turns, asked.tokens))
        for number in range(asked.trajectories // GROUP_SIZE)
    ]
    read_ms: list[float] = []
    features_ms: list[float] = []
    compared_ms: list[float] = []
    parts: tuple[StepFeatures, ...] = ()
    with tempfile.TemporaryDirectory() as directory:
        path = write_file(Path(directory), step_of(groups))
        num_bytes = path.stat().st_size
        for _ in range(asked.repeats):
            step = timed(partial(load_step, path), read_ms)
            parts = timed(partial(step_features, step), features_ms)
    detector = Detector()
    for number in range(KEPT_STEPS + asked.repeats):
        numbered = tuple(replace(part, step=number) for part in parts)
        timed(partial(detector.see, numbered), compared_ms)
    print(
        json.dumps(
            {
                "trajectories": sum(map(len, groups)),
                "sampled_tokens": sum(each.num_sampled for group in groups for each in group),
                "looked_at": parts[0].num_trajectories,
                "file_mb": num_bytes / 1e6,
                "read_ms": statistics.median(read_ms),
                "features_ms": statistics.median(features_ms),
                "detector_ms": statistics.median(compared_ms[-asked.repeats :]),
            }
        )
    )


if __name__ == "__main__":
    main()
