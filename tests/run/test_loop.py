"""Tests of the calls that the loop makes to its parts, and of their order; the parts are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from worlds.builders.store_builders import committed
from worlds.parts.loop_world import OWN_SET, World, make_loop

from actors.deadline import ActorLost, within
from actors.environment.evaluation import EvaluationSet
from actors.environment.settings import CurriculumSettings, Sampling
from actors.environment.tasks import FileTasks, GeneratedTasks
from actors.merge.report import EnvironmentReport, GroupReturns
from actors.trajectory_queue.ledger import EvictionReason
from actors.trajectory_queue.messages import OpenSlot
from actors.types import Task
from service.run.health import RunFailed
from service.run.pauses import Gate, Pauses
from service.run.task_feed import Curriculum, task_index
from service.store.controls import PauseAnswer
from service.store.tables import Pausable


async def test_each_step_is_trained_published_and_finalised_before_its_version_counts() -> None:
    world = World()

    async def load(version: int) -> None:
        world.calls.append(f"load {version}")

    world.engines_load = load
    await make_loop(world).run()
    assert world.published_versions == [1, 2, 3]
    first = world.calls.index("train 1")
    assert world.calls[first : first + 6] == [
        "train 1", "publish 1", "finalise 1", "load 1", "loaded 1", "record 1",
    ]  # fmt: skip
    assert [record.policy_version for record in world.records] == [1, 2, 3]


@pytest.mark.parametrize("lose_payloads_at", [None, 2])
async def test_the_trainer_scores_before_a_step_is_built_if_rewards_need_a_model(
    lose_payloads_at: int | None,
) -> None:
    world = World(lose_payloads_at=lose_payloads_at)
    await make_loop(world, steps=2, scores_first=True).run()
    assert world.calls_of("plan", "build", "train", "replay_lost") == [
        "plan 1", "build 1 scores of rows 1", "train 1",
        *(["replay_lost r1"] if lose_payloads_at else []),
        "plan 2", "build 2 scores of rows 2", "train 2",
    ]  # fmt: skip


async def test_with_a_lag_the_next_step_is_trained_while_the_engines_load_this_version() -> None:
    world = World()

    async def load(version: int) -> None:
        while version == 1 and "train 2" not in world.calls:
            await asyncio.sleep(0)

    world.engines_load = load
    await make_loop(world, max_lag=1).run()
    assert world.calls_of("train", "publish", "loaded")[:6] == [
        "train 1", "publish 1", "train 2", "loaded 1", "publish 2", "loaded 2",
    ]  # fmt: skip
    assert [record.step for record in world.records] == [1, 2, 3]


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_engines_that_never_load_end_the_loop(max_lag: int) -> None:
    async def fail(version: int) -> None:
        raise ActorLost(f"no engine took version {version}")

    world = World(engines_load=fail, starve_from=1)
    with pytest.raises(ActorLost, match="no engine took version 1"):
        await make_loop(world, max_lag=max_lag).run()
    assert world.records == []


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_moved_weights_are_published_before_the_step_without_moving_the_window(
    max_lag: int,
) -> None:
    world = World(move_weights_at=2)
    await make_loop(world, steps=3, max_lag=max_lag).run()
    assert world.published_versions == [1, 2, 3, 4]
    assert world.calls_of("train", "publish", "loaded") == [
        "train 1", "publish 1", "loaded 1", "publish 2", "train 2", "publish 3", "loaded 2",
        "train 3", "publish 4", "loaded 3",
    ]  # fmt: skip
    assert [(r.step, r.policy_version) for r in world.records] == [(1, 1), (2, 3), (3, 4)]


async def test_at_the_end_all_rollouts_are_cancelled_before_the_last_commit() -> None:
    world = World()
    await make_loop(world, steps=2).run()
    end = world.calls.index("cancel_all")
    assert world.calls_of("cancel_all", "commit 2")[-2:] == ["cancel_all", "commit 2"]
    assert world.calls[end + 1] == "cut"
    assert world.checkpoints == [(2, "dir-2"), (2, "dir-2")]


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_a_solved_run_ends_evaluated_and_with_all_rollouts_cancelled(
    max_lag: int,
) -> None:
    world = World(scaled_returns=(0.5, 1.0, 1.0, 0.9, 0.9, 1.0, 0.0), starve_from=6)
    loop = make_loop(world, steps=100, max_lag=max_lag, stop_at_reward=0.95)
    await loop.run()
    assert loop.is_solved and len(world.records) == 6
    assert world.calls_of("evaluate", "cancel_all")[-2:] == ["evaluate 2", "cancel_all"]
    assert world.checkpoints[-1] == (6, "dir-6")


@pytest.mark.parametrize("unknown", [None, 0.0])
async def test_a_run_is_solved_after_five_good_steps_in_a_row(
    unknown: float | None,
) -> None:
    world = World(scaled_returns=(1.0, 1.0, 1.0, 1.0, unknown, 1.0, 1.0, 1.0, 1.0))
    loop = make_loop(world, steps=9, stop_at_reward=0.95)
    await loop.run()
    assert not loop.is_solved and len(world.records) == 9


@pytest.mark.parametrize(("known", "is_solved"), [([1.0, 1.0], True), ([1.0, None], False)])
async def test_a_mixture_in_which_a_best_return_is_unknown_is_not_solved(
    known: list[float | None], is_solved: bool
) -> None:
    parts = {
        str(number): EnvironmentReport(
            num_trajectories=1, outcomes={}, num_sampled_tokens=1, num_turns=1, reward_mean=7.0,
            scaled_reward_mean=scaled,
        )
        for number, scaled in enumerate(known)
    }  # fmt: skip
    loop = make_loop(
        World(scaled_returns=(1.0,) * 6, environments=parts), steps=6, stop_at_reward=0.95
    )
    await loop.run()
    assert loop.is_solved is is_solved


async def test_evaluations_are_run_at_the_start_when_due_and_at_the_end() -> None:
    world = World()
    await make_loop(world).run()
    assert world.calls_of("evaluate", "train") == [
        "evaluate 2", "train 1", "train 2", "evaluate 2", "train 3", "evaluate 2",
    ]  # fmt: skip


async def test_each_set_is_evaluated_with_its_own_sampling_and_recorded_under_its_name() -> None:
    world = World()
    hard = EvaluationSet(
        name="hard",
        tasks=GeneratedTasks("guessing", run_seed=0).held_out(3),
        sampling=Sampling(num_samples=4, temperature=0.5, ks=(1, 2, 4)),
    )
    loop = make_loop(world, steps=1, evaluation_sets=(*OWN_SET, hard))
    await loop.run()
    assert world.calls_of("evaluate") == ["evaluate 2", "evaluate 3"] * 2
    found = [(each.step, each.name, each.num_samples) for each in world.evaluations]
    assert found == [(0, "", 1), (0, "hard", 4), (1, "", 1), (1, "hard", 4)]
    assert world.evaluation_files == [
        f"step-00000{step}-term-0001{name}" for step in (0, 1) for name in ("", "-hard")
    ]


async def test_the_parts_of_a_mixture_are_recorded_separately_and_together() -> None:
    world = World()
    tasks = GeneratedTasks("guessing", run_seed=0).held_out(5)
    greedy, sampled = Sampling(), Sampling(num_samples=4, temperature=0.5, ks=(1, 2, 4))
    parts = [
        EvaluationSet(name=name, tasks=tasks[first:end], sampling=sampling, is_part=True)
        for name, first, end, sampling in (("a", 0, 2, greedy), ("b", 2, 5, sampled))
    ]
    await make_loop(world, steps=1, evaluation_sets=parts).run()
    last = [each for each in world.evaluations if each.step == 1]
    assert [(each.name, each.num_samples) for each in last] == [("a", 1), ("b", 4), ("", 1)]
    assert [each.is_charted for each in last] == [False, False, True]
    assert world.calls_of("evaluate") == ["evaluate 2", "evaluate 3"] * 2


async def test_a_curriculum_receives_each_step_and_is_stored_with_the_checkpoint() -> None:
    world = World(returns=(GroupReturns(task_id="t", environment="x", returns=(1.0, 0.0)),))
    tasks = FileTasks([Task(task_id="t", environment="x", seed=0)], run_seed=0)
    curriculum = Curriculum(CurriculumSettings(resting_share=0.1, window=2), tasks)
    await make_loop(world, steps=3, curriculum=curriculum).run()
    assert world.curricula[-1] == {"t": (0.5, 0.5)} and curriculum.results == world.curricula[-1]


async def test_a_step_whose_payloads_are_lost_is_taken_again() -> None:
    world = World(lose_payloads_at=2)
    await make_loop(world).run()
    assert world.calls_of("replay_lost", "train") == [
        "train 1",
        "replay_lost r1",
        "train 2",
        "train 3",
    ]


async def test_a_skipped_update_trains_nothing_and_still_increments_the_version() -> None:
    world = World(skip_at=2)
    await make_loop(world).run()
    reasons = world.finalised[2]
    assert reasons == {"r0": EvictionReason.NONFINITE_STEP, "r1": EvictionReason.MASKED}
    assert world.finalised[1]["r0"] is None
    assert world.published_versions == [1, 2, 3]
    assert [record.is_skipped for record in world.records] == [False, True, False]


@pytest.mark.parametrize("has_clients", [False, True])
async def test_a_run_without_finite_updates_ends_with_the_reason(
    has_clients: bool,
) -> None:
    world = World(skip_from=2)
    with pytest.raises(RunFailed, match=r"last 3 steps, up to step 4, was finite"):
        await make_loop(world, steps=100, has_clients=has_clients).run()
    assert [record.is_skipped for record in world.records] == [False, True, True, True]
    assert world.checkpoints[-1] == (4, "dir-4")


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_engines_whose_scores_differ_three_times_in_a_row_end_the_run(
    max_lag: int,
) -> None:
    world = World(unequal_from=2)
    with pytest.raises(RunFailed, match=r"after 3 publications in a row; step 4: trainer and eng"):
        await make_loop(world, steps=100, max_lag=max_lag).run()
    assert [record.step for record in world.records] == [1, 2, 3, 4]
    # Each of the steps has a notice, and the last step is committed.
    assert [notice[:6] for notice in world.notices] == ["step 2", "step 3", "step 4"]
    assert world.checkpoints[-1] == (4, "dir-4")
    assert world.records[0].value("logprob_check_max") is None
    assert world.records[1].value("logprob_check_ratio") == 5000


async def test_a_run_without_mergeable_trajectories_ends_with_the_reason() -> None:
    world = World(misalign_from=2)
    with pytest.raises(RunFailed, match=r"last 3 steps, up to step 4, .* an empty prompt;"):
        await make_loop(world, steps=100).run()
    assert world.checkpoints[-1] == (4, "dir-4")


async def test_a_lost_part_ends_the_loop_with_its_name_and_commits_nothing_more() -> None:
    world = World(lose_trainer_at=3)
    with pytest.raises(ActorLost, match="rank 0"):
        await make_loop(world).run()
    assert world.checkpoints == [(2, "dir-2")]
    assert "cancel_all" not in world.calls


async def test_a_run_without_progress_commits_its_last_step_and_gives_the_reason() -> None:
    world = World(fail_from=1)
    with pytest.raises(RunFailed, match="reset: boom"):
        await make_loop(world, steps=100).run()
    assert world.published_versions == [1]
    assert world.checkpoints == [(1, "dir-1")]
    # The open rollouts are not cancelled; they are played when the run is resumed.
    assert "cancel_all" not in world.calls


async def test_a_stop_commits_a_checkpoint_and_does_not_cancel_open_rollouts() -> None:
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


@pytest.mark.parametrize("stage", ["build", "train"])
async def test_a_step_that_exceeds_the_grace_is_abandoned_and_the_previous_one_committed(
    stage: str,
) -> None:
    world = World(slow_at=(stage, 4))
    loop = make_loop(world, steps=100)
    world.on_slow = lambda: loop.stop(grace_s=0.05)
    await within(10.0, loop.run())
    assert world.published_versions == [1, 2, 3]
    assert world.checkpoints == [(2, "dir-2"), (3, "dir-3")]
    assert "abandon" in world.calls and "train 4" not in world.calls and 4 not in world.finalised
    assert "cancel_all" not in world.calls


async def test_a_step_that_is_trained_within_the_grace_is_finished_and_committed() -> None:
    world = World()
    loop = make_loop(world, steps=100)
    world.on_publish = lambda version: loop.stop(grace_s=60.0) if version == 3 else None
    await within(10.0, loop.run())
    assert world.published_versions == [1, 2, 3]
    assert world.checkpoints[-1] == (3, "dir-3")
    assert "abandon" not in world.calls


async def test_an_evaluation_that_exceeds_the_grace_does_not_lose_its_step() -> None:
    world = World(slow_at=("evaluate", 2))
    loop = make_loop(world, steps=100)
    world.on_slow = lambda: loop.stop(grace_s=0.05)
    await within(10.0, loop.run())
    assert [record.step for record in world.records] == [1, 2]
    assert world.checkpoints == [(2, "dir-2")]


async def test_a_term_resumed_before_the_first_step_does_not_evaluate_again() -> None:
    world = World()
    await make_loop(world, steps=1, parent=committed(0)).run()
    assert world.calls_of("evaluate", "train") == ["train 1", "evaluate 2"]


async def test_a_resumed_loop_continues_after_its_checkpoint() -> None:
    world = World()
    await make_loop(world, steps=3, parent=committed(2)).run()
    assert world.published_versions == [3]
    assert world.calls_of("evaluate", "train") == ["train 3", "evaluate 2"]
    assert world.checkpoints == [(3, "dir-3")]


async def test_a_complete_run_that_is_resumed_is_only_closed() -> None:
    world = World()
    await make_loop(world, steps=3, parent=committed(3, "dir-3")).run()
    assert world.published_versions == []
    assert world.checkpoints == [(3, "dir-3")]


def test_a_replacement_has_a_task_that_is_the_first_choice_of_no_group() -> None:
    first = {task_index(OpenSlot(group_number=k, replacement=0)) for k in range(1000)}
    second = {task_index(OpenSlot(group_number=k, replacement=1)) for k in range(1000)}
    assert first == set(range(1000)) and not first & second


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0)


def paused(*parts: Pausable) -> Pauses:
    pauses = Pauses()
    pauses.restore([PauseAnswer(part=part, since=0.0, reason="") for part in parts])
    return pauses


async def test_while_admission_is_paused_only_admitted_groups_are_trained() -> None:
    world, pauses = World(), paused(Pausable.ADMISSION)
    loop = make_loop(world, pauses=pauses)
    await loop.run()
    assert world.tasks_given == {} and world.published_versions == [1, 2, 3]
    # When the pause ends during the run, groups are admitted again.
    world = World(starve_from=0)
    loop = make_loop(world, pauses=pauses)
    running = asyncio.create_task(loop.run())
    await asyncio.sleep(0)
    pauses.remove(Pausable.ADMISSION)
    await until(lambda: len(world.tasks_given) == 3)
    loop.stop()
    await running


async def test_a_pause_waits_for_the_current_admission() -> None:
    gate = Gate()
    with gate.passing() as is_open:
        assert is_open
        gate.shut()
        waiting = asyncio.create_task(gate.until_passed())
        await asyncio.sleep(0)
        assert not waiting.done()
    await within(1.0, waiting)
    with gate.passing() as is_open:
        assert not is_open
    gate.open()
    await within(1.0, gate.until_open())


async def test_a_pause_of_training_finishes_the_current_step_and_takes_no_other() -> None:
    world, pauses = World(), Pauses()
    loop = make_loop(world, pauses=pauses)

    def pause(version: int) -> None:
        if version == 1:
            assert loop.step_in_hand == 1
            pauses.add(PauseAnswer(part=Pausable.TRAINING, since=0.0, reason="look at it"))

    world.on_publish = pause
    running = asyncio.create_task(loop.run())
    await until(lambda: "record 1" in world.calls)
    await asyncio.sleep(0.02)
    assert world.num_taken == 1 and loop.step_in_hand is None
    # During the pause a checkpoint can be requested twice and is written once.
    saves = await within(3.0, asyncio.gather(loop.checkpoint(), loop.checkpoint()))
    assert {(each.step, each.directory) for each in saves} == {(1, "dir-1")}
    assert world.calls_of("save", "commit ") == ["save 1", "commit 1"]
    pauses.remove(Pausable.TRAINING)
    await running
    assert world.published_versions == [1, 2, 3]
    # The time of the pause does not count as waiting for rollouts.
    assert world.records[1].stages.collect < 0.02


async def test_a_run_can_be_stopped_while_training_is_paused() -> None:
    world = World()
    loop = make_loop(world, pauses=paused(Pausable.TRAINING))
    running = asyncio.create_task(loop.run())
    await asyncio.sleep(0)
    loop.stop()
    await within(5.0, running)
    assert world.num_taken == 0


async def test_while_generation_is_paused_no_evaluation_is_run() -> None:
    world = World()
    await make_loop(world, pauses=paused(Pausable.GENERATION)).run()
    assert world.published_versions == [1, 2, 3] and world.calls_of("evaluate") == []
