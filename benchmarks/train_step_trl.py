"""Compare the training step with TRL 1.16.0's GRPOTrainer on the same completions.

    python -m benchmarks.train_step_trl --peer-python build/peers/trl/bin/python

Both sides have the same model directory, groups, rewards and token ids. TRL receives them through
its `rollout_func`, with the observed tokens masked. TRL's step is timed from `on_step_begin` to
`on_step_end`, without the time that it takes to make, score and pad completions
(`peers/trl_step.py`). Both objectives are the clip at a ratio of one with the token mean of the
whole update, so losses, gradient norms and entropies must agree. All samples have one length here,
so TRL's rows have no padding. Both sides are measured in float32 and in bfloat16, for which TRL has
`bf16=True`, torch's autocast. The benchmark prints one line of JSON. It exits with 1 if the sides
do not compute the same, or if even the upper quartile misses the goal.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe_environment
from benchmarks.pairs import Seconds, interleave, ratios_of, rounds
from benchmarks.side import Side, StepTaken, quiet_environment
from benchmarks.train_inputs import UpdateShape, build_model, make_trajectories, return_of

PEER_SCRIPT = Path(__file__).parent / "peers" / "trl_step.py"
GOAL = 1.5
DTYPES = ("float32", "bfloat16")
NORM_TOLERANCE, ENTROPY_TOLERANCE, LOSS_TOLERANCE = 1e-3, 1e-4, 1e-5


def write_completions(shape: UpdateShape, path: Path) -> None:
    """Write the merged samples for the peer, which can read them with numpy alone.

    prompts, completions: token ids [N, P] and [N, C]. masks: [N, C], 1 for sampled tokens.
    rewards: [N].
    """
    trajectories = make_trajectories(shape)
    samples = [trajectory.samples[0] for trajectory in trajectories]
    np.savez(
        path,
        prompts=np.stack([each.token_ids[: each.prompt_length] for each in samples]),
        completions=np.stack([each.token_ids[each.prompt_length :] for each in samples]),
        masks=np.stack([each.mask[each.prompt_length :] for each in samples]),
        rewards=np.array([return_of(each) for each in trajectories]),
        group_size=shape.group_size,
    )


def start_sides(
    stack: ExitStack, folder: Path, shape: UpdateShape, options: Any
) -> dict[str, Side]:
    """Start and return a process for each side and data type."""
    model, completions = build_model(folder / "model"), folder / "completions.npz"
    write_completions(shape, completions)
    threads = ["--threads", str(options.threads)]
    sides = {}
    for dtype in DTYPES:
        ours = ["-m", "benchmarks.side_ours", model, shape.to_json(), "--dtype", dtype]
        ours += ["--denominator", "old", "--budget", str(options.budget), *threads]
        peer = [str(PEER_SCRIPT), model, str(completions), "--dtype", dtype]
        peer += ["--rows", str(options.rows), "--output", str(folder / dtype), *threads]
        environment = quiet_environment(num_threads=options.threads)
        for name, command in (
            (f"trl_{dtype}", [options.peer_python, *peer]),
            (f"ours_{dtype}", [sys.executable, *ours]),
        ):
            sides[name] = stack.enter_context(Side(command, environment=environment))
    return sides


def check_equal(ours: StepTaken, theirs: StepTaken) -> str | None:
    """Return the first difference between the float32 sides; None if they agree."""
    assert ours.entropy is not None and theirs.entropy is not None
    if abs(theirs.grad_norm / ours.grad_norm - 1) > NORM_TOLERANCE:
        return f"gradient norm {theirs.grad_norm}, ours {ours.grad_norm}"
    if abs(theirs.entropy - ours.entropy) > ENTROPY_TOLERANCE:
        return f"entropy {theirs.entropy}, ours {ours.entropy}"
    if abs(theirs.loss - ours.loss) > LOSS_TOLERANCE:
        return f"loss {theirs.loss}, ours {ours.loss}"
    return None


def summarise(taken: Mapping[str, Sequence[StepTaken]]) -> dict[str, Any]:
    """Return the ratios of TRL's seconds to ours for each data type, and the ratios below the goal.

    The result also has each side's median seconds, loss, gradient norm and entropy.
    """
    seconds = {name: [each.seconds for each in steps] for name, steps in taken.items()}
    ratios = {
        dtype: ratios_of(seconds[f"trl_{dtype}"], seconds[f"ours_{dtype}"]) for dtype in DTYPES
    }
    return {
        "ratios": {
            dtype: {kind: asdict(spread) for kind, spread in found.items()}
            for dtype, found in ratios.items()
        },
        "missed": [
            f"{dtype}: {found['ratio_cpu'].upper} < {GOAL}"
            for dtype, found in ratios.items()
            if found["ratio_cpu"].upper < GOAL
        ],
        "seconds": {name: asdict(Seconds.median(each)) for name, each in seconds.items()},
        "numbers": {
            name: {
                "loss": steps[0].loss,
                "grad_norm": steps[0].grad_norm,
                "entropy": steps[0].entropy,
            }
            for name, steps in taken.items()
        },
    }


def main() -> int:
    """Measure, print the result, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", required=True, help="Python of the peer's environment")
    parser.add_argument("--pairs", type=rounds, default=3, help="steps of each side")
    parser.add_argument("--rows", type=int, default=8, help="TRL's rows of a micro-batch")
    parser.add_argument("--groups", type=int, default=4, help="groups of eight trajectories")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a packed row")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    shape = UpdateShape(groups=options.groups)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = start_sides(stack, folder, shape, options)
        # The first step of each side warms up, and is compared.
        first = {name: side.step() for name, side in sides.items()}
        difference = check_equal(first["ours_float32"], first["trl_float32"])
        if difference is not None:
            raise SystemExit(f"benchmark: the sides do not compute the same: {difference}")
        steps = {name: side.step for name, side in sides.items()}
        result = {
            "benchmark": "train_step.against_trl",
            "peer": "trl 1.16.0",
            "shape": asdict(shape),
            "pairs": options.pairs,
            "budget": options.budget,
            "peer_rows_at_once": options.rows,
            **summarise(interleave(steps, num_rounds=options.pairs)),
            "goal": GOAL,
            **describe_environment("torch", "transformers"),
            "threads": options.threads,
        }
    print(json.dumps(result))
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
