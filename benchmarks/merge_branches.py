"""What branches cost: histories rewritten at every turn, and branches with KL in the reward.

    python -m benchmarks.merge_branches

*Stripped*: each prompt is the last one and so many new tokens, half of what the last turn sampled
(its thought) left out, so that each turn opens a sample; merged by comparison. *Branches*: so many
turns off one prompt, in two trajectories with routing records, merged and made into a step with and
without a KL charge. CPU seconds of one thread, the quietest of three passes. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from actors.algorithm import AlgorithmSettings
from actors.batch import RowScores
from actors.merge.groups import TrajectoryGroup, merge_groups
from actors.merge.prefix import merge_turns
from actors.merge.settings import StepSettings
from actors.merge.shaping import KlRewardSettings, RewardSettings
from actors.merge.step import build_step
from actors.trainer.settings import TrainerSettings
from actors.types import Trajectory
from benchmarks.environment import describe_environment
from benchmarks.merge_inputs import Play, Shape, as_trajectory, branches, rewritten

PASSES = 3
NEW_TOKENS = (1, 20)


def quietest_s(function: Callable[[], object]) -> float:
    """CPU seconds of the quietest pass."""
    times: list[float] = []
    for _ in range(PASSES):
        started = time.process_time()
        function()
        times.append(time.process_time() - started)
    return round(min(times), 4)


def stripped(num_turns: int, new_tokens: int) -> dict[str, float]:
    """Merge one trajectory whose history grows by so many tokens a turn."""
    thought = max(1, new_tokens // 3)
    shape = Shape(prompt=50, sampled=2 * thought, observed=new_tokens - thought)
    trajectory = as_trajectory(rewritten(num_turns, shape, seed=0), number=0)
    merged = merge_turns(trajectory)
    return {
        "turns": num_turns,
        "new_tokens": new_tokens,
        "samples": len(merged.samples),
        "input_tokens": merged.num_unmerged_tokens,
        "merge_s": quietest_s(lambda: merge_turns(trajectory)),
    }


def branched(num_turns: int) -> dict[str, float]:
    """Merge two trajectories of branches, and make a step of them."""
    plays = [branches(num_turns, Shape(prompt=50, sampled=2), seed=seed) for seed in range(2)]
    group = TrajectoryGroup(
        group_id="g", trajectories=tuple(_recorded(play, i) for i, play in enumerate(plays))
    )
    plain = StepSettings(
        algorithm=AlgorithmSettings(),
        trainer=TrainerSettings(num_ranks=1),
        max_context_tokens=1024,
        seed=0,
    )
    reward = RewardSettings(kl=KlRewardSettings(coefficient=0.1))
    charged = replace(plain, algorithm=AlgorithmSettings(reward=reward))
    merged = merge_groups([group], plain)
    scored = [
        tuple(
            replace(
                member,
                scores=tuple(
                    RowScores(reference_logprobs=np.full(sample.num_trained, -1, np.float32))
                    for sample in member.samples
                ),
            )
            for member in merged[0]
        )
    ]
    return {
        "turns": num_turns,
        "merge_s": quietest_s(lambda: merge_groups([group], plain)),
        "step_s": quietest_s(lambda: build_step(merged, plain, step=1, trainer_version=1)),
        "step_with_kl_s": quietest_s(
            lambda: build_step(scored, charged, step=1, trainer_version=1)
        ),
    }


def _recorded(play: Play, number: int) -> Trajectory:
    trajectory = as_trajectory(play, number=number)
    turns = [
        replace(turn, expert_indices=np.zeros((turn.num_sampled, 1, 2), np.uint8))
        for turn in trajectory.turns
    ]
    # Returns that differ, or the group would have no signal.
    turns[-1] = replace(turns[-1], reward=float(number), token_rewards=None)
    return replace(trajectory, turns=tuple(turns))


def main() -> None:
    """Run and print one JSON line."""
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
