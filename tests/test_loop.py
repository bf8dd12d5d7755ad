"""The loop over fakes of a few lines: what it asks of its parts, in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.environment.tasks import GeneratedTasks
from actors.merge.payloads import PayloadsLost
from actors.merge.report import MergeReport, StepReport
from actors.trainer.statistics import PhaseSeconds, StepStats
from actors.trajectory import Outcome, Task, TrajectorySummary
from actors.trajectory_queue.failures import FailedGroups
from actors.trajectory_queue.groups import GroupRequest
from actors.trajectory_queue.ledger import EvictionReason, LedgerEvent, Settlement
from actors.trajectory_queue.messages import Drained, QueueCut, QueueSettings, StepInput, Vacancy
from actors.trajectory_queue.queue_state import QueueState
from actors.trajectory_queue.window import WindowSettings
from service.failing import FailureLimits, GivenUp
from service.loop import Loop, LoopSettings, Parts
from service.ports import BuiltStep, PartLost, PublishedVersion
from service.records import EvaluationRecord, StepRecord
from service.task_feed import ConfiguredTasks, task_index

NO_TIME = PhaseSeconds(total_s=0.0, prepare_s=0.0, forward_s=0.0, backward_s=0.0, optimizer_s=0.0)

LIMITS = FailureLimits(
    max_groups=4,
    grace_s=0.0,
    min_group_size=2,
    group_size=2,
    engines_limit_s=60.0,
    max_skipped_steps=3,
)
FAILED = FailedGroups(
    num_before=0, num_groups=4, outcomes={Outcome.ENVIRONMENT_ERROR: 8}, task_id="t",
    last_outcome=Outcome.ENVIRONMENT_ERROR, last_detail="reset: boom", environment="guessing",
)  # fmt: skip


def stats(step: int, *, num_skipped: int = 0) -> StepStats:
    return StepStats(
        step=step, trainer_version=step, loss=0.1, grad_norm=1.0, learning_rate=1e-3,
        trained_tokens=4, packed_tokens=8, ratio_mean=1.0, ratio_max=1.0, clip_fraction=0.0,
        effective_sample_fraction=1.0, entropy_mean=1.0, advantage_mean=0.0, policy_age_mean=0.0,
        policy_age_max=0, mismatch=None, num_updates=1, num_empty_updates=0,
        num_skipped_updates=num_skipped, seconds=NO_TIME,
    )  # fmt: skip


def report(step: int, *, scaled_return: float | None = None) -> StepReport:
    merge = MergeReport(
        samples_before=2, samples_after=1, mismatches={}, num_saved_tokens=0, num_masked_tokens=0
    )
    return StepReport(
        step=step, trainer_version=step, num_groups=1, num_zero_variance_groups=0,
        num_trajectories=2, outcomes={}, evictions={}, num_malformed_rewarded=0, merge=merge,
        returns=None, scaled_return_mean=scaled_return, advantages=None, policy_age_max=None,
        policy_age_mean=None, num_turns=2, num_malformed_turns=0, num_inserted_tokens=0,
        num_sampled_tokens=4, num_trained_tokens=4, num_packed_tokens=8, num_micro_batches=1,
        num_fillers=0,
        num_overruled_records=0,
    )  # fmt: skip


async def at_once(version: int) -> None:
    return None


@dataclass
class World:
    """Every part at once, writing down what is asked of it."""

    calls: list[str] = field(default_factory=list)
    tasks_given: dict[int, Task] = field(default_factory=dict)
    num_taken: int = 0
    lose_payloads_at: int | None = None
    lose_trainer_at: int | None = None
    skip_at: int | None = None
    skip_from: int = 10**9
    fail_from: int | None = None
    starve_from: int | None = None
    scaled_returns: Sequence[float | None] = ()
    engines_load: Callable[[int], Awaitable[None]] = at_once
    on_publish: Callable[[int], None] = lambda version: None
    settled: dict[int, list[Settlement]] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
    checkpoints: list[tuple[int, str]] = field(default_factory=list)
    published_versions: list[int] = field(default_factory=list)
    value_shards: list[tuple[str, ...]] = field(default_factory=list)

    def calls_of(self, *kinds: str) -> list[str]:
        return [call for call in self.calls if call.startswith(kinds)]

    async def admissible(self, *, timeout_s: float) -> Sequence[Vacancy]:
        await asyncio.sleep(0)
        number = len(self.tasks_given)
        return [Vacancy(group_number=number, replacement=0)] if number < 3 else []

    async def admit(self, groups: Sequence[GroupRequest]) -> None:
        for group in groups:
            self.tasks_given[group.group_number] = group.task

    async def take_step(self, *, timeout_s: float) -> StepInput | None:
        await asyncio.sleep(0)
        if self.num_taken in (self.fail_from, self.starve_from):
            return None
        step, self.num_taken = self.num_taken, self.num_taken + 1
        return StepInput(step=step, groups=(), blocks=())

    async def settle(self, step: int, settlements: Sequence[Settlement]) -> None:
        self.calls.append(f"settle {step}")
        self.settled[step] = list(settlements)

    async def lost(self, rollout_ids: Sequence[str]) -> None:
        self.calls.append(f"lost {','.join(rollout_ids)}")
        self.num_taken -= 1

    async def published(self, version: int) -> None:
        self.calls.append(f"published {version}")

    async def drain(self) -> Drained:
        failed = FAILED if self.fail_from == self.num_taken else None
        return Drained(events=(), summaries=(), failed_groups=failed)

    async def cut(self) -> QueueCut:
        window = WindowSettings(groups_per_step=1, max_lag=0, window_groups=1)
        state = QueueState(QueueSettings(window=window))
        return QueueCut(snapshot=state.snapshot(), drained=state.drain())

    async def cancel_all(self) -> None:
        self.calls.append("cancel_all")

    def _lose_payloads(self, step: int) -> None:
        if self.lose_payloads_at == step:
            self.lose_payloads_at = None
            raise PayloadsLost(["r1"])

    async def plan(self, step_input: StepInput, *, version: int) -> Sequence[Any]:
        self._lose_payloads(step_input.step)
        self.calls.append(f"plan {step_input.step}")
        return (f"rows {step_input.step}",)

    async def score(self, shards: Sequence[Any]) -> Sequence[Any]:
        return [f"scores of {rows}" for rows in shards]

    async def build(
        self, step_input: StepInput, *, version: int, scores: Sequence[Any] = ()
    ) -> BuiltStep:
        self._lose_payloads(step_input.step)
        self.calls.append(f"build {step_input.step} {' '.join(scores)}".rstrip())
        return BuiltStep(
            step=step_input.step,
            shards=("shard",),
            value_shards=("values",) if scores else (),
            settlements=(
                Settlement(rollout_id="r0"),
                Settlement(rollout_id="r1", reason=EvictionReason.MASKED),
            ),
            report=report(step_input.step, scaled_return=self._scaled_return(step_input.step)),
        )

    def _scaled_return(self, step: int) -> float | None:
        return self.scaled_returns[step] if step < len(self.scaled_returns) else None

    async def step(self, built: BuiltStep) -> StepStats:
        step = self.num_taken - 1
        self.value_shards.append(built.value_shards)
        if self.lose_trainer_at == step:
            raise PartLost("rank 0 is gone")
        self.calls.append(f"train {step}")
        return stats(step, num_skipped=int(step == self.skip_at or step >= self.skip_from))

    async def save(self, *, step: int, version: int) -> str:
        self.calls.append(f"save {step}")
        return f"dir-{step}"

    async def prune(self) -> None:
        self.calls.append("prune")

    async def offer(self, version: int) -> None:
        self.calls.append(f"offer {version}")

    async def wait(self, version: int) -> PublishedVersion:
        await self.engines_load(version)
        self.on_publish(version)
        self.published_versions.append(version)
        return PublishedVersion(version=version, num_engines=1, parity_max=0.0, wall_s=0.0)

    async def num_ready(self) -> int:
        return 1

    async def evaluate(self, tasks: Sequence[Task]) -> list[TrajectorySummary]:
        self.calls.append(f"evaluate {len(tasks)}")
        return []


@dataclass
class Notebook:
    """The recorder."""

    world: World
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def rollouts(self, summaries: Sequence[TrajectorySummary]) -> None: ...
    def events(self, events: Sequence[LedgerEvent]) -> None: ...

    def step(self, record: StepRecord) -> None:
        self.world.calls.append(f"record {record.step}")
        self.world.records.append(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        self.evaluations.append(record)

    def checkpoint(self, *, step: int, version: int, directory: str, cut: QueueCut) -> None:
        self.world.calls.append(f"commit {step}")
        self.world.checkpoints.append((step, directory))


def make_loop(
    world: World,
    *,
    steps: int = 3,
    first_step: int = 1,
    checkpoint: str = "",
    overlaps_publish: bool = False,
    stop_at_reward: float | None = None,
    scores_first: bool = False,
) -> Loop:
    tasks = GeneratedTasks("guessing", run_seed=0)
    world.num_taken = first_step - 1
    parts = Parts(
        queue=world, merge=world, trainer=world, engines=world, environments=world,
        tasks=ConfiguredTasks(tasks, group_size=2), evaluation_tasks=tasks.held_out(2),
        recorder=Notebook(world),
    )  # fmt: skip
    settings = LoopSettings(
        first_step=first_step, steps=steps, checkpoint_every=2, evaluate_every=2, failures=LIMITS,
        checkpoint=checkpoint, overlaps_publish=overlaps_publish, stop_at_reward=stop_at_reward,
        scores_first=scores_first,
    )  # fmt: skip
    return Loop(parts, settings)


async def test_each_step_is_trained_published_and_settled_before_its_version_counts() -> None:
    world = World()
    await make_loop(world).run()
    assert world.published_versions == [1, 2, 3]
    first = world.calls.index("train 0")
    assert world.calls[first : first + 5] == [
        "train 0", "offer 1", "settle 0", "published 1", "record 1",
    ]  # fmt: skip
    assert [record.policy_version for record in world.records] == [1, 2, 3]


@pytest.mark.parametrize("lose_payloads_at", [None, 1])
async def test_where_rewards_need_a_model_the_trainer_is_asked_before_a_step_is_built(
    lose_payloads_at: int | None,
) -> None:
    world = World(lose_payloads_at=lose_payloads_at)
    await make_loop(world, steps=2, scores_first=True).run()
    assert world.calls_of("plan", "build", "train", "lost") == [
        "plan 0", "build 0 scores of rows 0", "train 0",
        *(["lost r1"] if lose_payloads_at else []),
        "plan 1", "build 1 scores of rows 1", "train 1",
    ]  # fmt: skip
    assert world.value_shards == [("values",)] * 2


async def test_with_a_lag_the_next_step_is_trained_while_the_engines_load_this_version() -> None:
    world = World()

    async def load(version: int) -> None:
        while version == 1 and "train 1" not in world.calls:
            await asyncio.sleep(0)

    world.engines_load = load
    await make_loop(world, overlaps_publish=True).run()
    assert world.calls_of("train", "offer", "published")[:6] == [
        "train 0", "offer 1", "train 1", "published 1", "offer 2", "published 2",
    ]  # fmt: skip
    assert [record.step for record in world.records] == [1, 2, 3]


@pytest.mark.parametrize("overlaps_publish", [False, True])
async def test_engines_that_never_load_end_the_loop(overlaps_publish: bool) -> None:
    async def fail(version: int) -> None:
        raise PartLost(f"no engine took version {version}")

    world = World(engines_load=fail, starve_from=1)
    with pytest.raises(PartLost, match="no engine took version 1"):
        await make_loop(world, overlaps_publish=overlaps_publish).run()
    assert world.records == []


async def test_a_checkpoint_is_committed_after_its_files_and_its_step_are_written() -> None:
    world = World()
    await make_loop(world).run()
    assert world.checkpoints == [(2, "dir-2"), (3, "dir-3")]
    at = world.calls.index("save 2")
    assert world.calls[at : at + 4] == ["save 2", "record 2", "commit 2", "prune"]


async def test_nothing_stays_in_flight_at_the_end_and_the_last_commit_says_so() -> None:
    world = World()
    await make_loop(world, steps=2).run()
    end = world.calls.index("cancel_all")
    assert world.calls[end:] == ["cancel_all", "commit 2", "prune"]
    assert world.checkpoints == [(2, "dir-2"), (2, "dir-2")]


@pytest.mark.parametrize("overlaps_publish", [False, True])
async def test_a_run_that_is_solved_is_complete_evaluated_and_holds_nothing(
    overlaps_publish: bool,
) -> None:
    world = World(scaled_returns=(0.5, 1.0, 1.0, 0.9, 0.9, 1.0, 0.0), starve_from=6)
    loop = make_loop(world, steps=100, overlaps_publish=overlaps_publish, stop_at_reward=0.95)
    await loop.run()
    assert loop.is_solved and len(world.records) == 6
    assert world.calls_of("evaluate", "cancel_all")[-2:] == ["evaluate 2", "cancel_all"]
    assert world.checkpoints[-1] == (6, "dir-6")


@pytest.mark.parametrize("unknown", [None, 0.0])
async def test_five_steps_in_a_row_are_needed_and_an_unknown_reward_starts_anew(
    unknown: float | None,
) -> None:
    world = World(scaled_returns=(1.0, 1.0, 1.0, 1.0, unknown, 1.0, 1.0, 1.0, 1.0))
    loop = make_loop(world, steps=9, stop_at_reward=0.95)
    await loop.run()
    assert not loop.is_solved and len(world.records) == 9


async def test_evaluations_come_before_the_first_step_when_due_and_at_the_end() -> None:
    world = World()
    await make_loop(world).run()
    assert world.calls_of("evaluate", "train") == [
        "evaluate 2", "train 0", "train 1", "evaluate 2", "train 2", "evaluate 2",
    ]  # fmt: skip


async def test_lost_payloads_give_the_step_back_and_it_is_taken_again() -> None:
    world = World(lose_payloads_at=1)
    await make_loop(world).run()
    assert world.calls_of("lost", "train") == ["train 0", "lost r1", "train 1", "train 2"]


async def test_a_skipped_update_trains_nothing_and_still_moves_the_version_on() -> None:
    world = World(skip_at=1)
    await make_loop(world).run()
    reasons = {item.rollout_id: item.reason for item in world.settled[1]}
    assert reasons == {"r0": EvictionReason.NONFINITE_STEP, "r1": EvictionReason.MASKED}
    assert world.settled[0][0].reason is None
    assert world.published_versions == [1, 2, 3]
    assert [record.is_skipped for record in world.records] == [False, True, False]


async def test_a_run_of_which_no_update_is_finite_any_more_ends_with_the_reason() -> None:
    world = World(skip_from=1)
    with pytest.raises(GivenUp, match=r"last 3 steps, up to step 4, was finite"):
        await make_loop(world, steps=100).run()
    assert [record.is_skipped for record in world.records] == [False, True, True, True]
    assert world.checkpoints[-1] == (4, "dir-4")


async def test_a_lost_part_ends_the_loop_with_its_name_and_commits_nothing_more() -> None:
    world = World(lose_trainer_at=2)
    with pytest.raises(PartLost, match="rank 0"):
        await make_loop(world).run()
    assert world.checkpoints == [(2, "dir-2")]
    assert "cancel_all" not in world.calls


async def test_a_run_that_gets_nowhere_leaves_its_last_step_durable_and_says_why() -> None:
    world = World(fail_from=1)
    with pytest.raises(GivenUp, match="reset: boom"):
        await make_loop(world, steps=100).run()
    assert world.published_versions == [1]
    assert world.checkpoints == [(1, "dir-1")]
    # What is in flight stays so, to be played when the run is resumed.
    assert "cancel_all" not in world.calls


async def test_a_stop_leaves_a_checkpoint_and_what_is_in_flight_in_flight() -> None:
    world = World()
    loop = make_loop(world, steps=100)

    def stop_at_3(version: int) -> None:
        if version == 3:
            loop.stop()

    world.on_publish = stop_at_3
    await loop.run()
    assert world.published_versions == [1, 2, 3]
    assert world.checkpoints[-1] == (3, "dir-3")
    assert "cancel_all" not in world.calls


async def test_a_resumed_loop_goes_on_behind_its_checkpoint() -> None:
    world = World()
    await make_loop(world, steps=3, first_step=3, checkpoint="dir-2").run()
    assert world.published_versions == [3]
    assert world.calls_of("evaluate", "train") == ["train 2", "evaluate 2"]
    assert world.checkpoints == [(3, "dir-3")]


async def test_a_run_that_is_resumed_when_complete_changes_nothing_but_closes_it() -> None:
    world = World()
    await make_loop(world, steps=3, first_step=4, checkpoint="dir-3").run()
    assert world.published_versions == []
    assert world.checkpoints == [(3, "dir-3")]


def test_a_replacement_plays_a_task_that_no_first_choice_plays() -> None:
    first = {task_index(Vacancy(group_number=k, replacement=0)) for k in range(1000)}
    second = {task_index(Vacancy(group_number=k, replacement=1)) for k in range(1000)}
    assert first == set(range(1000)) and not first & second
