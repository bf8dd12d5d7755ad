"""Compare the training step with one on padded rows and full logits, and bfloat16 with float32.

    python -m benchmarks.train_step_padded

32 trajectories in groups of eight: a prompt of 256 tokens, six turns of 64 sampled and 128 observed
tokens, two threads. Our side is `TrainerRank.train_step` on merged, packed rows with shared
prefixes. The other side is `benchmarks/padded_step.py`, with one padded row for each turn, a few
rows at once, because the logits of all of them would take eight gigabytes. Every side is a separate
process, which makes one step for each command; the sides alternate. Both halves of a ratio compute
in the same type. The benchmark prints one line of JSON. It exits with 1 if the sides do not compute
the same, or if even the upper quartile misses a goal.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment
from benchmarks.pairs import Seconds, interleave, ratios_of, rounds
from benchmarks.side import Side, StepTaken, quiet_environment
from benchmarks.train_inputs import UpdateShape, build_model

# Slow over fast: the goals for the median of the ratios.
GOALS = {"padded_float32 / ours_float32": 8.0, "ours_float32 / ours_bfloat16": 1.7}
# Also reported: rows sorted by length before they are padded, and bfloat16 on both sides.
ALSO = ("sorted_float32 / ours_float32", "padded_bfloat16 / ours_bfloat16")
SLOW_SIDES = ("sorted_float32", "padded_bfloat16")
# Sides in float32 differ a little, because they add the same numbers in another order.
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4


def start_sides(stack: ExitStack, model: str, shape: UpdateShape, options: Any) -> dict[str, Side]:
    """Start and return one process for each data type of our side, and one for the other side."""
    common = [model, shape.to_json(), "--threads", str(options.threads)]
    commands = {
        "ours_float32": ["side_ours", *common, "--budget", str(options.budget)],
        "ours_bfloat16": [
            *("side_ours", *common, "--budget", str(options.budget), "--dtype", "bfloat16"),
        ],
        "padded": ["side_padded", *common, "--rows", str(options.rows)],
    }
    environment = quiet_environment(num_threads=options.threads)
    return {
        name: stack.enter_context(
            Side(
                [sys.executable, "-m", f"benchmarks.{module}", *arguments], environment=environment
            )
        )
        for name, (module, *arguments) in commands.items()
    }


def check_equal(taken: Mapping[str, StepTaken]) -> str | None:
    """Return the first difference between the float32 sides; None if they agree."""
    ours = taken["ours_float32"]
    for name, theirs in taken.items():
        if not name.endswith("float32"):
            continue
        if abs(theirs.loss - ours.loss) > LOSS_TOLERANCE:
            return f"{name}: loss {theirs.loss}, expected {ours.loss}"
        if abs(theirs.grad_norm / ours.grad_norm - 1) > NORM_TOLERANCE:
            return f"{name}: gradient norm {theirs.grad_norm}, expected {ours.grad_norm}"
    return None


def summarise(taken: Mapping[str, Sequence[StepTaken]]) -> dict[str, Any]:
    """Return the ratios with their spread, and the seconds and numbers of every side."""
    seconds = {name: [each.seconds for each in steps] for name, steps in taken.items()}
    ratios = {}
    for name in (*GOALS, *ALSO):
        slow, fast = name.split(" / ")
        if slow in seconds and fast in seconds:
            ratios[name] = ratios_of(seconds[slow], seconds[fast])
    return {
        "ratios": {
            name: {kind: asdict(spread) for kind, spread in found.items()}
            for name, found in ratios.items()
        },
        "missed": [
            f"{name}: {ratios[name]['ratio_cpu'].upper} < {goal}"
            for name, goal in GOALS.items()
            if name in ratios and ratios[name]["ratio_cpu"].upper < goal
        ],
        "seconds": {name: asdict(Seconds.median(each)) for name, each in seconds.items()},
        "losses": {name: steps[0].loss for name, steps in taken.items()},
        "grad_norms": {name: steps[0].grad_norm for name, steps in taken.items()},
    }


def main() -> int:
    """Measure, print the result, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=rounds, default=3, help="steps of each side")
    parser.add_argument("--rows", type=int, default=8, help="padded rows of a micro-batch")
    parser.add_argument("--groups", type=int, default=4, help="groups of eight trajectories")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a packed row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--also", nargs="*", default=(), choices=SLOW_SIDES, help="sides without a goal: slow"
    )
    options = parser.parse_args()
    shape = UpdateShape(groups=options.groups)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        sides = start_sides(stack, build_model(Path(directory) / "model"), shape, options)
        padded = sides["padded"]
        steps: dict[str, Callable[[], StepTaken]] = {
            "padded_float32": partial(padded.step, "padded float32"),
            "ours_float32": sides["ours_float32"].step,
            "ours_bfloat16": sides["ours_bfloat16"].step,
            "sorted_float32": partial(padded.step, "sorted float32"),
            "padded_bfloat16": partial(padded.step, "padded bfloat16"),
        }
        for name in {*SLOW_SIDES} - {*options.also}:
            del steps[name]
        # The first step of each side warms up, and is compared.
        difference = check_equal({name: step() for name, step in steps.items()})
        if difference is not None:
            raise SystemExit(f"benchmark: the sides do not compute the same: {difference}")
        result = {
            "benchmark": "train_step.against_padded_stepwise_rows",
            "shape": asdict(shape),
            "pairs": options.pairs,
            "budget": options.budget,
            "padded_rows_at_once": options.rows,
            **summarise(interleave(steps, num_rounds=options.pairs)),
            **describe_environment("torch", "transformers"),
            "threads": options.threads,
        }
    print(json.dumps(result))
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
