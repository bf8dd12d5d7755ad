"""Compare two training steps of the same samples, one with shared prefixes and one without them.

    python -m benchmarks.train_step

Both sides are the trainer's own step (one rank, FSDP2, AdamW) on merged, packed rows of the same
samples: groups of eight whose prompt is four times as long as an answer. The benchmark prints one
line of JSON with the environment, and the ratio of seconds with its quartiles over alternating
pairs. It exits with 1 if even the upper quartile misses the goal.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from actors.merge.packing import WeightedSample
from actors.trainer.rank import TrainerRank
from actors.types import Dtype
from benchmarks.environment import describe_environment
from benchmarks.pairs import Seconds, interleave, ratios_of, rounds, time_once
from benchmarks.side import restart_quietly
from benchmarks.side_ours import make_shard, num_tokens_of, start_rank, train
from benchmarks.train_inputs import UpdateShape, build_model, make_trajectories, weigh

GOAL = 2.0


def measure(
    rank: TrainerRank, weighted: Sequence[WeightedSample], *, budget: int, num_pairs: int
) -> dict[str, object]:
    """Return the comparison of the rows without sharing with the rows with sharing."""
    shards = {
        "merged": make_shard(weighted, budget=budget, share_prefixes=False),
        "tree": make_shard(weighted, budget=budget),
    }
    # The first steps also warm up.
    stats = {name: train(rank, shard) for name, shard in shards.items()}
    gc.freeze()
    seconds = interleave(
        {
            "merged": lambda: time_once(lambda: train(rank, shards["merged"])),
            "tree": lambda: time_once(lambda: train(rank, shards["tree"])),
        },
        num_rounds=num_pairs,
    )
    num_tokens = {name: num_tokens_of(shard) for name, shard in shards.items()}
    ratios = ratios_of(seconds["merged"], seconds["tree"])
    return {
        **{name: asdict(spread) for name, spread in ratios.items()},
        "ratio_tokens": round(num_tokens["merged"] / num_tokens["tree"], 3),
        "seconds": {name: asdict(Seconds.median(each)) for name, each in seconds.items()},
        "num_tokens": num_tokens,
        "losses": {name: each.statistics["loss"] for name, each in stats.items()},
        "grad_norms": {name: each.statistics["grad_norm"] for name, each in stats.items()},
        "num_pairs": num_pairs,
        "goal": GOAL,
        "is_reached": ratios["ratio_cpu"].upper >= GOAL,
    }


def main() -> int:
    """Measure, print the result, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a group's prompt")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a packed row")
    parser.add_argument("--dtype", type=Dtype, default=Dtype.FLOAT32)
    parser.add_argument("--pairs", type=rounds, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    restart_quietly("benchmarks.train_step", num_threads=options.threads)
    shape = UpdateShape(prompt=options.prompt, turns=1, sampled=options.answer, observed=0)
    with tempfile.TemporaryDirectory() as directory:
        rank = start_rank(
            build_model(Path(directory) / "model"),
            Path(directory),
            num_threads=options.threads,
            dtype=options.dtype,
        )
        weighted = weigh(make_trajectories(shape))
        measured = measure(rank, weighted, budget=options.budget, num_pairs=options.pairs)
        rank.close()
    result = {
        "benchmark": "train_step.tree_against_merged",
        "shape": asdict(shape),
        "dtype": options.dtype.value,
        "budget": options.budget,
        **measured,
        "threads_per_rank": options.threads,
        **describe_environment("torch"),
    }
    print(json.dumps(result))
    return 0 if measured["is_reached"] else 1


if __name__ == "__main__":
    sys.exit(main())
