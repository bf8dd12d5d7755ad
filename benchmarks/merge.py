"""Compare a run's path from recorded turns to rows with SkyRL 0.3.0's merge_stepwise_output.

    python -m benchmarks.merge --peer-python build/peers/skyrl/bin/python

Both sides make rows of the same trajectories in one run, alternately (ours, theirs, ours, ...),
each from its own form of input: Rayloom from turns with int32 arrays, SkyRL from lists of ints that
share their objects, as its own generator makes them. In *run*, the turns of a turn loop, each of
which is known to continue the last one, pass through the sample builder and the codec, and are
decoded again. *Comparison* is the same, but turns do not say which sample they extend, so prompts
are compared. *Obvious* applies the merge rule with loops over Python's lists, without the codec.
Times are CPU seconds of one thread. The benchmark prints one JSON line, and exits with 1 if the
upper quartile of a ratio misses its goal.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from worlds.checks.prefix_merge import merge_turns

from actors.environment.sample_builder import SampleBuilder, build_samples
from actors.trajectory_queue.codec import decode, encode
from actors.types import Sample, Turn
from benchmarks.environment import describe_environment
from benchmarks.line_process import LineProcess
from benchmarks.merge_inputs import (
    Play,
    Shape,
    as_trajectory,
    as_turns,
    linear,
    rewritten,
    with_sub_agent,
    write_for_peer,
)

# Trajectories at each number of turns: a group, or fewer if the longest would take too long.
BATCHES = {4: 8, 16: 8, 64: 8, 200: 3}
# One measurement of either side is the quietest of three windows of equal length, because other
# processes displace its data from the caches.
WINDOWS = 3
WINDOW_S = 0.03
GOALS = {"run": 8.0}
GOAL_TURNS = (16, 64, 200)
# For both sides: one thread, and freed memory is kept, as in a process that continues to work;
# otherwise each pass would pay the kernel for the same pages again.
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}
PEER_SCRIPT = Path(__file__).parent / "peers" / "skyrl_merge.py"


class Peer(LineProcess):
    """The process that runs SkyRL's merge."""

    def __init__(self, python: str) -> None:
        super().__init__(
            [python, str(PEER_SCRIPT)],
            environment=QUIET,
            remedy=f"; make its environment with `make bench-merge`, or run {PEER_SCRIPT} with its "
            "Python",
        )

    def seconds(self, passes: int) -> float:
        """Return the peer's CPU seconds for one pass, measured over a number of passes."""
        return float(self.ask(f"time {passes}"))


def as_a_run_does(plays: Sequence[Sequence[Turn]]) -> list[Sample]:
    """Return samples made as in a run: each turn says which sample it extends.

    The samples are encoded and decoded.
    """
    trajectories = []
    for number, turns in enumerate(plays):
        builder = SampleBuilder(str(number))
        for turn in turns:
            builder.append(turn)
        trajectories.append(as_trajectory(builder.samples(), number=number))
    block = encode(trajectories)
    return [sample for row in range(block.num_rows) for sample in decode(block, row).samples]


def by_comparison(plays: Sequence[Sequence[Turn]]) -> list[Sample]:
    """Return samples made by finding the sample that each turn extends.

    The samples are encoded and decoded.
    """
    block = encode(
        [
            as_trajectory(build_samples(turns, trajectory_id=str(number)), number=number)
            for number, turns in enumerate(plays)
        ]
    )
    return [sample for row in range(block.num_rows) for sample in decode(block, row).samples]


def by_the_rule(plays: Sequence[Sequence[Turn]]) -> list[Sample]:
    """Return samples made with the plain loops of the merge rule, without the codec."""
    return [sample for turns in plays for sample in merge_turns(turns)]


def cpu_seconds(function: Callable[[], object]) -> float:
    """Return the CPU seconds of one pass: the mean over the fastest of WINDOWS windows.

    A window has as many passes as fit into WINDOW_S, at least one.
    """

    def window(passes: int) -> float:
        started = time.process_time()
        for _ in range(passes):
            function()
        return (time.process_time() - started) / passes

    return quietest(window)


def quietest(window: Callable[[int], float]) -> float:
    """Return the seconds of one pass in the fastest of WINDOWS windows.

    window: function that makes a number of passes, and returns the seconds of one pass.
    """
    passes = max(1, round(WINDOW_S / window(1)))
    return min(window(passes) for _ in range(WINDOWS))


def quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {"median": round(middle, 2), "q1": round(low, 2), "q3": round(high, 2)}


def measure(
    num_turns: int, shape: Shape, peer: Peer, folder: Path, *, pairs: int
) -> dict[str, Any]:
    """Return times and ratios for trajectories of a number of turns."""
    number = BATCHES[num_turns]
    plays = [linear(num_turns, shape, seed=seed) for seed in range(number)]
    recorded = [as_turns(play, number=i) for i, play in enumerate(plays)]
    ways: dict[str, Callable[[], object]] = {
        "run": lambda: as_a_run_does(recorded),
        "comparison": lambda: by_comparison(recorded),
    }
    path = folder / "plays.npz"
    write_for_peer(plays, path)
    peer.ask(f"load {path} 1")
    samples = as_a_run_does(recorded)
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {name: [] for name in (*ways, "peer")}
    for _ in range(pairs):
        for name, way in ways.items():
            times[name].append(cpu_seconds(way) / number)
        times["peer"].append(float(peer.ask("time 1")) / number)
    peer.ask(f"load {path} 0")
    own_ints = quietest(peer.seconds) / number
    obvious = cpu_seconds(lambda: by_the_rule(recorded[:1]))
    return {
        "turns": num_turns,
        "merged_tokens": samples[0].num_tokens,
        "input_tokens": sum(turn.end for turn in samples[0].turns),
        "us": {name: quartiles([t * 1e6 for t in each]) for name, each in times.items()},
        "us_peer_own_ints": round(own_ints * 1e6, 1),
        "us_obvious": round(obvious * 1e6, 1),
        "ratio": {
            name: quartiles([b / a for a, b in zip(times[name], times["peer"], strict=True)])
            for name in ways
        },
        "is_equal": is_equal(plays, peer, folder),
    }


def is_equal(plays: Sequence[Play], peer: Peer, folder: Path) -> bool:
    """Return whether both sides give the same rows of the same trajectories, in the same order.

    Prompt, response, mask, log-probabilities and the reward of each token are compared.
    """
    recorded = [as_turns(play, number=i) for i, play in enumerate(plays)]
    write_for_peer(list(plays), folder / "plays.npz")
    peer.ask(f"load {folder / 'plays.npz'} 1")
    peer.ask(f"save {folder / 'merged.npz'}")
    theirs = np.load(folder / "merged.npz")
    ours = [(i, sample) for i, turns in enumerate(recorded) for sample in by_comparison([turns])]
    rows = [(i, s.prompt_length, s.num_tokens - s.prompt_length) for i, s in ours]
    if rows != [tuple(row) for row in theirs["rows"].tolist()]:
        return False
    columns: dict[str, list[NDArray[Any]]] = {
        "prompt_token_ids": [s.token_ids[: s.prompt_length] for _, s in ours],
        "response_ids": [s.token_ids[s.prompt_length :] for _, s in ours],
        "loss_masks": [s.mask[s.prompt_length :] for _, s in ours],
        "rollout_logprobs": [s.logprobs[s.prompt_length :] for _, s in ours],
        "rewards": [
            s.token_rewards[s.prompt_length :] for _, s in ours if s.token_rewards is not None
        ],
    }
    return all(np.array_equal(np.concatenate(each), theirs[name]) for name, each in columns.items())


def compare_shapes(peer: Peer, folder: Path, shape: Shape) -> dict[str, Any]:
    """Return the comparison of both sides' rows of trajectories that branch.

    Rewritten histories give equal rows. If a conversation continues after a turn of another one,
    SkyRL gives more rows than Rayloom, because SkyRL keeps only one sample open.
    """
    stripped = [rewritten(8, shape, seed=seed) for seed in range(2)]
    woven = [with_sub_agent(8, shape, seed=seed) for seed in range(2)]
    equal = is_equal(stripped, peer, folder)
    is_equal(woven, peer, folder)
    return {
        "rewritten_is_equal": equal,
        "sub_agent_rows_peer": len(np.load(folder / "merged.npz")["rows"]) // 2,
        "sub_agent_rows": len(by_comparison([as_turns(woven[0], number=0)])),
    }


def share_one_core() -> None:
    """Keep this process, and the peer that it will start, on one core if the system allows it.

    The two processes alternate, and two cores of one machine are seldom equally fast.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def slope(rows: Sequence[dict[str, Any]], way: str, tokens: str) -> float:
    """Return x such that seconds grow as tokens ** x, fitted to the rows of 16 turns or more."""
    chosen = [row for row in rows if row["turns"] in GOAL_TURNS]
    counts = [row[tokens] for row in chosen]
    medians = [row["us"][way]["median"] for row in chosen]
    return round(float(np.polyfit(np.log(counts), np.log(medians), 1)[0]), 2)


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the goals that are missed even by the upper quartile of the pairs."""
    return [
        f"{name} at {row['turns']} turns: {row['ratio'][name]['q3']} < {goal}"
        for row in rows
        if row["turns"] in GOAL_TURNS
        for name, goal in GOALS.items()
        if row["ratio"][name]["q3"] < goal
    ]


def main() -> int:
    """Measure, print one JSON line, report the missed goals, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", required=True, help="Python of the peer's environment")
    parser.add_argument("--turns", type=int, nargs="+", default=list(BATCHES), choices=BATCHES)
    parser.add_argument("--pairs", type=int, default=9, help="measurements of each side")
    parser.add_argument(
        "--shape",
        type=int,
        nargs=3,
        default=(512, 100, 200),
        metavar=("PROMPT", "SAMPLED", "OBSERVED"),
        help="tokens of the first prompt, and of each turn's reply and observation",
    )
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in QUIET.items()):
        # The allocator and the BLAS read these variables when a process starts.
        command = [sys.executable, "-m", "benchmarks.merge", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **QUIET})
    share_one_core()
    prompt, sampled, observed = options.shape
    shape = Shape(prompt=prompt, sampled=sampled, observed=observed)
    with tempfile.TemporaryDirectory() as folder, Peer(options.peer_python) as peer:
        rows = [
            measure(turns, shape, peer, Path(folder), pairs=options.pairs)
            for turns in options.turns
        ]
        result = {
            "benchmark": "merge",
            "peer": "skyrl 0.3.0",
            "pairs": options.pairs,
            "shape": {"prompt": shape.prompt, "sampled": shape.sampled, "observed": shape.observed},
            "rows": rows,
            "branching": compare_shapes(peer, Path(folder), shape),
            "missed": missed(rows),
            "environment": describe_environment("numpy"),
        }
    if len({*options.turns} & {*GOAL_TURNS}) > 1:
        result["slope"] = {
            "run_over_merged_tokens": slope(rows, "run", "merged_tokens"),
            "comparison_over_input_tokens": slope(rows, "comparison", "input_tokens"),
            "comparison_over_merged_tokens": slope(rows, "comparison", "merged_tokens"),
            "peer_over_merged_tokens": slope(rows, "peer", "merged_tokens"),
        }
    print(json.dumps(result))
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
