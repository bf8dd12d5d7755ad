"""Measure the cost of branches: histories rewritten at every turn, and branches with a KL charge.

    python -m benchmarks.merge_branches

In *stripped*, each prompt is the last one without half of the last turn's sampled tokens (its
reasoning), plus a number of new tokens. So each turn opens a sample; turns are merged by
comparison. In *branches*, a number of turns branch off one prompt, in two trajectories with routing
records; they are merged and made into a step with and without a KL charge. Times are CPU seconds of
one thread, the smallest of three passes. The benchmark prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from actors.algorithm import AlgorithmSettings, KlRewardSettings, RewardSettings
from actors.batch import RowScores
from actors.environment.sample_builder import build_samples
from actors.merge.groups import classify_groups
from actors.merge.settings import StepSettings
from actors.merge.step import build_step
from actors.trainer.settings import TrainerSettings
from actors.trajectory_queue.codec import decode, encode
from actors.types import Trajectory, Turn
from benchmarks.environment import describe_environment
from benchmarks.merge_inputs import Play, Shape, as_trajectory, as_turns, branches, rewritten

PASSES = 3
NEW_TOKENS = (1, 20)


def quietest_s(function: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest pass."""
    times: list[float] = []
    for _ in range(PASSES):
        started = time.process_time()
        function()
        times.append(time.process_time() - started)
    return round(min(times), 4)


def stripped(num_turns: int, new_tokens: int) -> dict[str, float]:
    """Return the times of merging one trajectory.

    Its history grows by a number of tokens each turn.
    """
    thought = max(1, new_tokens // 3)
    shape = Shape(prompt=50, sampled=2 * thought, observed=new_tokens - thought)
    turns = as_turns(rewritten(num_turns, shape, seed=0), number=0)
    trajectory = merged(turns, number=0)
    block = encode([trajectory])
    return {
        "turns": num_turns,
        "new_tokens": new_tokens,
        "samples": len(trajectory.samples),
        "input_tokens": sum(turn.end for turn in trajectory.turns),
        "bytes": block.row_num_bytes(0),
        "merge_s": quietest_s(lambda: merged(turns, number=0)),
        "encode_s": quietest_s(lambda: encode([trajectory])),
        "decode_s": quietest_s(lambda: decode(block, 0)),
    }


def merged(turns: list[Turn], *, number: int) -> Trajectory:
    """Return the trajectory of turns, merged by finding which sample each turn extends."""
    return as_trajectory(build_samples(turns, trajectory_id=f"g-{number}.a0"), number=number)


def branched(num_turns: int) -> dict[str, float]:
    """Return the times of merging two trajectories of branches and making a step of them."""
    plays = [branches(num_turns, Shape(prompt=50, sampled=2), seed=seed) for seed in range(2)]
    recorded = [_recorded(play, i) for i, play in enumerate(plays)]
    group = tuple(merged(turns, number=i) for i, turns in enumerate(recorded))
    plain = StepSettings(
        algorithm=AlgorithmSettings(),
        trainer=TrainerSettings(num_ranks=1),
        max_context_tokens=1024,
        seed=0,
    )
    reward = RewardSettings(kl=KlRewardSettings(coefficient=0.1))
    charged = replace(plain, algorithm=AlgorithmSettings(reward=reward))
    groups = classify_groups([group], plain)
    scored = [
        tuple(
            replace(
                member,
                scores=tuple(
                    RowScores(reference_logprobs=np.full(sample.num_trained, -1, np.float32))
                    for sample in member.samples
                ),
            )
            for member in groups[0]
        )
    ]
    return {
        "turns": num_turns,
        "merge_s": quietest_s(
            lambda: [merged(turns, number=i) for i, turns in enumerate(recorded)]
        ),
        "step_s": quietest_s(lambda: build_step(groups, plain, step=1, trainer_version=1)),
        "step_with_kl_s": quietest_s(
            lambda: build_step(scored, charged, step=1, trainer_version=1)
        ),
    }


def _recorded(play: Play, number: int) -> list[Turn]:
    turns = [
        replace(turn, expert_indices=np.zeros((turn.num_sampled, 1, 2), np.uint8))
        for turn in as_turns(play, number=0)
    ]
    # The returns differ, because otherwise the group would have no signal.
    turns[-1] = replace(turns[-1], reward=float(number), token_rewards=None)
    return turns


def main() -> None:
    """Run the measurements, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, nargs="+", default=[500, 1000, 2000])
    options = parser.parse_args()
    result = {
        "benchmark": "merge_branches",
        "stripped": [stripped(turns, new) for new in NEW_TOKENS for turns in options.turns],
        "branches": [branched(turns) for turns in options.turns],
        "environment": describe_environment("numpy"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
