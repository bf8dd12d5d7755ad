"""Measure the power and the time of `rayloom explain`.

It measures how many of ten corrupted trajectories among a thousand the command ranks first.

    PYTHONPATH=.:tests python -m benchmarks.explain_power

For each scale and seed, the tiny model gives first replies of the guessing game in 63 groups of 16.
Ten of them are corrupted in three ways (a return of -100; random tokens with a return of 3; a lost
game with log-probabilities 3 nats too low). A run's own parts merge, journal and train the
trajectories, which are then explained. The benchmark prints one JSON line: for each order, the
number of corrupted trajectories among the first ten, and the ranks of all corrupted ones; and the
CPU seconds of one thread for a trajectory and for the training step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import get_args

from worlds.runs.explained_run import config_of, played_run, poisoned, sampled_groups

from benchmarks.environment import describe_environment
from service.cli.explain import Order, ranked
from service.explain.recompute import explain_step, find_source

GROUPS, MEMBERS, SPOILT = 63, 16, 10


def measure(directory: Path, *, scale: str, seed: int) -> dict[str, object]:
    with played_run(directory, config_of(algorithm={"scale": scale})) as run:
        groups = sampled_groups(run.model, num_groups=GROUPS, group_size=MEMBERS, seed=seed)
        groups, spoilt = poisoned(groups, run.model, count=SPOILT)
        began = time.process_time()
        run.step(groups)
        train_s = time.process_time() - began
    began = time.process_time()
    found = explain_step(find_source(directory, 1))
    seconds = time.process_time() - began
    result: dict[str, object] = {
        "scale": scale,
        "seed": seed,
        "trajectories": len(found.trajectories),
        "norm_error": found.grad_norm / run.grad_norm - 1,
        "cpu_s_per_trajectory": round(seconds / len(found.trajectories), 4),
        "train_cpu_s": round(train_s, 2),
    }
    for order in get_args(Order):
        names = [e.first.trajectory_id for e in ranked(found.trajectories, order)]
        ranks = sorted(names.index(name) + 1 for name in spoilt)
        result[order] = {"hits": sum(rank <= SPOILT for rank in ranks), "ranks": ranks}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for scale in ("std", "none"):
            for seed in range(1, options.seeds + 1):
                place = Path(scratch) / f"{scale}-{seed}"
                found.append(measure(place, scale=scale, seed=seed))
    print(json.dumps({**describe_environment("torch", "transformers"), "runs": found}))


if __name__ == "__main__":
    main()
