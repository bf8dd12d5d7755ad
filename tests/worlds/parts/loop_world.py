"""Fakes of the loop's parts, which answer at once and record their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from actors.algorithm import AlgorithmSettings, Baseline
from actors.deadline import ActorLost
from actors.environment.evaluation import EvaluationSet
from actors.environment.settings import RolloutSettings, Sampling
from actors.environment.tasks import GeneratedTasks
from actors.merge.actor import BuiltStep
from actors.merge.groups import PayloadsLost
from actors.merge.report import EnvironmentReport, GroupReturns, MergeReport, StepReport
from actors.trainer.agreement import StepAbandoned
from actors.trainer.settings import TrainerSettings
from actors.trainer.statistics import StepStats
from actors.trajectory_queue.groups import FailedGroups, GroupRequest
from actors.trajectory_queue.ledger import EvictionReason, RolloutOutcomes, TokenCounts
from actors.trajectory_queue.messages import OpenSlot, QueueSnapshot, StepInput
from actors.types import Dtype, Outcome, Task, TrajectorySummary
from actors.weights.logprob_check import LogprobCheck, compare
from service.config.sections import ModelSettings, RunSettings
from service.config.tree import Config
from service.inference.settings import InferenceSettings
from service.run.health import WeightsMoved
from service.run.loop import Loop
from service.run.loop_parts import LoopParts
from service.run.pauses import Pauses
from service.run.task_feed import ConfiguredTasks, Curriculum
from service.store.lineage import Checkpoint
from service.telemetry.records import EvaluationRecord, StepRecord
from worlds.builders.store_builders import committed

FAILED = FailedGroups(
    num_usable_before=0, num_groups=4, outcomes={Outcome.ENVIRONMENT_ERROR: 8}, task_id="t",
    last_outcome=Outcome.ENVIRONMENT_ERROR, last_detail="reset: boom", environment="guessing",
)  # fmt: skip


def stats(step: int, *, num_skipped: int = 0) -> StepStats:
    return StepStats(
        step=step, trainer_version=step, learning_rate=1e-3, trained_tokens=4, packed_tokens=8,
        statistics={"loss": 0.1, "grad_norm": 1.0, "entropy_mean": 1.0, "ratio_max": 1.0},
        num_updates=1, num_empty_updates=0, num_skipped_updates=num_skipped,
    )  # fmt: skip


def report(step: int, *, scaled_return: float | None = None) -> StepReport:
    merge = MergeReport(
        samples_before=2, samples_after=1, branches={}, num_saved_tokens=0, num_masked_tokens=0
    )
    return StepReport(
        step=step, trainer_version=step, num_groups=1, num_zero_variance_groups=0,
        num_trajectories=2, outcomes={}, evictions={}, num_malformed_rewarded=0, merge=merge,
        statistics={} if scaled_return is None else {"scaled_reward_mean": scaled_return},
        num_turns=2, num_malformed_turns=0, num_inserted_tokens=0,
        num_sampled_tokens=4, num_trained_tokens=4, num_packed_tokens=8, num_micro_batches=1,
        num_padding_rows=0,
        num_overruled_records=0, tokens=TokenCounts(trained=4),
    )  # fmt: skip


async def at_once(version: int) -> None:
    return None


@dataclass
class World:
    """A fake of every handle that the loop calls, which records the calls."""

    calls: list[str] = field(default_factory=list)
    tasks_given: dict[int, Task] = field(default_factory=dict)
    num_taken: int = 0
    lose_payloads_at: int | None = None
    lose_trainer_at: int | None = None
    move_weights_at: int | None = None
    lose_save_at: int | None = None
    version: int = 0
    republished: tuple[int, ...] = ()
    checkpoint_is_written: Callable[[int], Awaitable[None]] = at_once
    skip_at: int | None = None
    skip_from: int = 10**9
    misalign_from: int = 10**9
    unequal_from: int = 10**9
    """The first version that the engines score differently from the trainer."""
    fail_from: int | None = None
    starve_from: int | None = None
    scaled_returns: Sequence[float | None] = ()
    environments: Mapping[str, EnvironmentReport] = field(default_factory=dict)
    """The environments in the report of the first step."""
    engines_load: Callable[[int], Awaitable[None]] = at_once
    slow_at: tuple[str, int] | None = None
    """One of "build", "train" and "evaluate", and the step in which it never ends by itself."""
    on_slow: Callable[[], None] = lambda: None
    on_publish: Callable[[int], None] = lambda version: None
    finalised: dict[int, RolloutOutcomes] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
    checkpoints: list[tuple[int, str]] = field(default_factory=list)
    published_versions: list[int] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    evaluation_files: list[str] = field(default_factory=list)
    returns: tuple[GroupReturns, ...] = ()
    curricula: list[Mapping[str, tuple[float, ...]] | None] = field(default_factory=list)
    saving: int = 0
    num_evicted: int = 0
    on_starve: Callable[[], None] = lambda: None
    _abandoned: asyncio.Event = field(default_factory=asyncio.Event)

    def calls_of(self, *kinds: str) -> list[str]:
        return [call for call in self.calls if call.startswith(kinds)]

    async def admissible(self, timeout_s: float) -> Sequence[OpenSlot]:
        await asyncio.sleep(0)
        number = len(self.tasks_given)
        return [OpenSlot(group_number=number, replacement=0)] if number < 3 else []

    async def admit(self, groups: Sequence[GroupRequest]) -> None:
        for group in groups:
            self.tasks_given[group.group_number] = group.task

    async def take_step(self, timeout_s: float) -> StepInput | None:
        await asyncio.sleep(0)
        if self.num_taken in (self.fail_from, self.starve_from):
            self.on_starve()
            return None
        self.num_taken += 1
        return StepInput(step=self.num_taken, groups=(), blocks=())

    async def finalise(self, step: int, outcomes: RolloutOutcomes) -> TokenCounts:
        self.calls.append(f"finalise {step}")
        self.finalised[step] = outcomes
        return TokenCounts(untrained={EvictionReason.GROUP_TOO_SMALL: 5})

    async def replay_lost(self, rollout_ids: Sequence[str]) -> None:
        self.calls.append(f"replay_lost {','.join(rollout_ids)}")
        self.num_taken -= 1

    async def set_loaded_version(self, version: int) -> None:
        self.calls.append(f"loaded {version}")

    @property
    def failed_groups(self) -> FailedGroups | None:
        return FAILED if self.fail_from == self.num_taken else None

    async def cut(self) -> QueueSnapshot:
        self.calls.append("cut")
        return QueueSnapshot()

    async def cancel_all(self) -> None:
        self.calls.append("cancel_all")

    def _lose_payloads(self, step: int) -> None:
        if self.lose_payloads_at == step:
            self.lose_payloads_at = None
            raise PayloadsLost(["r1"])

    async def plan(self, step_input: StepInput, version: int) -> Sequence[Any]:
        self._lose_payloads(step_input.step)
        self.calls.append(f"plan {step_input.step}")
        return (f"rows {step_input.step}",)

    async def score(self, shards: Sequence[Any]) -> Sequence[Any]:
        return [f"scores of {rows}" for rows in shards]

    async def build(
        self,
        step_input: StepInput,
        version: int,
        scores: Sequence[Any],
        republished: Sequence[int],
    ) -> BuiltStep:
        self._lose_payloads(step_input.step)
        self.calls.append(f"build {step_input.step} {' '.join(scores)}".rstrip())
        await self._take_time("build", step_input.step)
        told = report(step_input.step, scaled_return=self._scaled_return(step_input.step))
        if step_input.step == 1:
            told = replace(told, environments=self.environments)
        if step_input.step >= self.misalign_from:
            told = replace(told, evictions={EvictionReason.TOKEN_MISALIGNED: told.num_trajectories})
        return BuiltStep(
            step=step_input.step,
            shards=("shard",),
            outcomes={"r0": None, "r1": EvictionReason.MASKED},
            report=told,
            returns=self.returns,
            notices=("r0.a0: turn 0: an empty prompt",) if told.evictions else (),
        )

    def _scaled_return(self, step: int) -> float | None:
        return self.scaled_returns[step - 1] if step <= len(self.scaled_returns) else None

    async def step(self, shards: Sequence[Any], *, num_bytes: int) -> StepStats:
        step = self.num_taken
        if self.move_weights_at == step:
            self.move_weights_at = None
            self.version += 1
            self.republished = (*self.republished, self.version)
            raise WeightsMoved(self.version)
        if self.lose_trainer_at == step:
            raise ActorLost("rank 0 is gone")
        await self._take_time("train", step)
        self.calls.append(f"train {step}")
        self.version += 1
        return stats(step, num_skipped=int(step == self.skip_at or step >= self.skip_from))

    async def abandon(self) -> None:
        self.calls.append("abandon")
        self._abandoned.set()

    async def _take_time(self, stage: str, step: int) -> None:
        if self.slow_at == (stage, step):
            self.on_slow()
            await self._abandoned.wait()
            raise StepAbandoned("as asked")

    async def begin_save(self, step: int, *, term: int) -> None:
        self.calls.append(f"save {step}")
        self.saving = step

    async def finish_save(self) -> Path | None:
        step = self.saving
        await self.checkpoint_is_written(step)
        if step == self.lose_save_at:
            self.lose_save_at = None
            return None
        return Path(f"dir-{step}")

    async def committed(self, step: int, path: Path) -> None:
        self.calls.append(f"committed {step}")

    async def prune(self) -> None:
        self.calls.append("prune")

    async def publish(self, version: int) -> None:
        self.calls.append(f"publish {version}")

    async def wait_until_loaded(self, version: int) -> LogprobCheck | None:
        await self.engines_load(version)
        self.on_publish(version)
        self.published_versions.append(version)
        if version < self.unequal_from:
            return None
        own = np.zeros(4, np.float32)
        return LogprobCheck(
            num_tokens=255, dtype=Dtype.FLOAT32, comparisons=(compare("t", own, own + 0.5),)
        )

    async def num_ready(self) -> int:
        return 1

    async def evaluate(
        self, tasks: Sequence[Task], sampling: Sampling, *, file: str
    ) -> list[TrajectorySummary]:
        self.calls.append(f"evaluate {len(tasks)}")
        self.evaluation_files.append(file)
        await self._take_time("evaluate", self.num_taken)
        return []


@dataclass
class Notebook:
    """A recorder that keeps its calls in the world."""

    world: World

    @property
    def num_evicted(self) -> int:
        return self.world.num_evicted

    def notice(self, text: str) -> None:
        self.world.notices.append(text)

    async def step(self, record: StepRecord) -> None:
        self.world.calls.append(f"record {record.step}")
        self.world.records.append(record)

    async def evaluation(self, record: EvaluationRecord) -> None:
        self.world.evaluations.append(record)

    async def checkpoint_written(self, path: Path, *, seconds: float) -> None:
        self.world.calls.append(f"written {path.name}")

    def checkpoint_failed(self) -> None:
        self.world.calls.append("checkpoint failed")

    async def checkpoint(
        self,
        *,
        step: int,
        version: int,
        directory: str,
        snapshot: QueueSnapshot,
        curriculum: Mapping[str, tuple[float, ...]] | None = None,
    ) -> Checkpoint:
        self.world.calls.append(f"commit {step}")
        self.world.curricula.append(curriculum)
        self.world.checkpoints.append((step, directory))
        self.world.num_evicted = 0
        return replace(committed(step, directory), policy_version=version)


OWN_SET = (
    EvaluationSet(
        name="", tasks=GeneratedTasks("guessing", run_seed=0).held_out(2), sampling=Sampling()
    ),
)


def make_loop(
    world: World,
    *,
    steps: int = 3,
    parent: Checkpoint | None = None,
    max_lag: int = 0,
    stop_at_reward: float | None = None,
    scores_first: bool = False,
    parts: Mapping[str, Any] = {},
    has_clients: bool = False,
    commit_after_s: float = 60.0,
    pauses: Pauses | None = None,
    evaluation_sets: Sequence[EvaluationSet] = (),
    curriculum: Curriculum | None = None,
) -> Loop:
    """Make a loop over the world's fakes. parts: replace the world, by the names of `LoopParts`."""
    tasks = GeneratedTasks("guessing", run_seed=0)
    world.num_taken = world.version = 0 if parent is None else parent.step
    fakes: dict[str, Any] = dict.fromkeys(
        ("queue", "merge", "trainer", "publisher", "environments"), world
    )
    fakes |= parts
    own = LoopParts(
        **fakes,
        recorder=Notebook(world),
        tasks=ConfiguredTasks(tasks, group_size=2),
        evaluation_sets=evaluation_sets or OWN_SET,
        prune_checkpoints=world.prune,
        pauses=pauses or Pauses(),
        curriculum=curriculum,
        term=1,
        config=Config(
            model=ModelSettings(),
            run=RunSettings(
                steps=steps, checkpoint_every=2, evaluate_every=2, stop_at_reward=stop_at_reward
            ),
            algorithm=AlgorithmSettings(
                group_size=2,
                max_lag=max_lag,
                baseline=Baseline.CRITIC if scores_first else Baseline.MEAN,
            ),
            rollouts=RolloutSettings(max_failed_groups=4, failed_groups_grace_s=0.0),
            trainer=TrainerSettings(max_skipped_steps=3),
            inference=InferenceSettings(start_deadline_s=60.0),
        ),
        parent=parent,
        has_clients=has_clients,
        commit_after_s=commit_after_s,
    )
    return Loop(own)
