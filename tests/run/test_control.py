"""Tests of an operator's control of a run: pauses, returns, evaluations and their reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from worlds.builders.store_builders import committed
from worlds.parts.control_world import World, played

from actors.deadline import ActorLost
from actors.environment.settings import Sampling
from service.api.control import ControlRefused, EvaluationAnswer, OperationAnswer, OperationStatus
from service.run.control import OVER, policies_view
from service.store.lineage import read_history
from service.store.tables import Pausable
from service.telemetry.evaluation import evaluation_record, pass_at_k
from service.telemetry.records import evaluation_line

SAMPLING = Sampling(num_samples=4, temperature=0.7, ks=(1, 4))


async def evaluate(world: World, **changes: Any) -> OperationAnswer:
    values: dict[str, Any] = {"sampling": SAMPLING, "num_tasks": None, "task_ids": ()}
    return await world.control.evaluate(**(values | changes))


async def ended(world: World, operation: OperationAnswer) -> OperationAnswer:
    async with asyncio.timeout(30.0):
        while True:
            found = await world.control.operation(operation.id)
            if found.status is not OperationStatus.RUNNING:
                return found
            await asyncio.sleep(0.005)


async def test_a_pause_outlives_term_and_supervisor_and_ends_with_its_resume(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.begin()
    for reason in ("the disk is full", "said again"):
        view = await world.control.pause(Pausable.TRAINING, reason)
        assert [(each.part, each.reason) for each in view.paused] == [
            (Pausable.TRAINING, "the disk is full")
        ]
        assert view.phase == "paused" and view.in_flight.step == 7
    assert world.recorder.phase_detail == "training (the disk is full)"
    values = world.metrics.values
    assert values.get_sample_value("rayloom_run_paused", {"part": "training"}) == 1.0
    assert values.get_sample_value("rayloom_run_paused", {"part": "admission"}) == 0.0
    await world.control.pause(Pausable.ADMISSION, "")
    # The next term of this supervisor, and the next supervisor.
    await world.begin()
    assert not world.control.pauses.gate(Pausable.TRAINING).is_open
    world = await world.restart()
    assert world.recorder.current_phase == "paused"
    assert world.recorder.phase_detail == "admission, training (the disk is full)"
    assert any("training is still paused" in text for text in world.recorder.notices.since(0))
    for _ in range(2):
        view = await world.control.resume(Pausable.TRAINING)
        assert [each.part for each in view.paused] == [Pausable.ADMISSION]
    await world.control.resume(Pausable.ADMISSION)
    assert world.recorder.current_phase == "training"
    assert world.control.pauses.gate(Pausable.TRAINING).is_open


async def test_a_pause_of_generation_reaches_the_engines_and_refuses_evaluations(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.begin()
    view = await world.control.pause(Pausable.GENERATION, "")
    assert (view.in_flight.engines_held, view.in_flight.engines) == (2, 2)
    with pytest.raises(ControlRefused, match="generation is paused"):
        await evaluate(world)
    view = await world.control.resume(Pausable.GENERATION)
    assert (view.in_flight.engines_held, view.in_flight.engines) == (0, 2)


async def test_the_operation_of_a_requested_checkpoint_reports_its_result(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.begin()
    operation = await world.control.checkpoint()
    assert (await world.control.operation(operation.id)).status is OperationStatus.RUNNING
    world.term.commit.set_result(committed(7, "step-000007-t1"))
    found = await ended(world, operation)
    assert (found.status, found.checkpoint) == (OperationStatus.DONE, "step-000007-t1")
    # The term ends before the checkpoint.
    world.term.commit = asyncio.Future()
    operation = await world.control.checkpoint()
    world.term.commit.set_exception(ActorLost("the term ended before its checkpoint"))
    found = await ended(world, operation)
    assert found.status is OperationStatus.FAILED and "the term ended" in found.detail
    # The run ends before the checkpoint.
    world.term.commit = asyncio.Future()
    operation = await world.control.checkpoint()
    world.control.close("all steps are done")
    assert (await ended(world, operation)).detail == "the run has ended: all steps are done"


async def test_a_run_goes_back_to_a_checkpoint_by_id_and_stays_there_after_a_crash(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.begin()
    ids = [world.commit(step) for step in (2, 4, 6)]
    assert [each.id for each in await world.control.checkpoints()] == ids[::-1]
    operation = await world.control.go_back(ids[1])
    assert world.control.returning.is_set()
    with pytest.raises(ControlRefused, match="is going back to step-000004-t1 already"):
        await world.control.go_back(ids[0])
    lease = await world.begin()
    assert lease.parent is not None and (lease.term, lease.parent.step) == (2, 4)
    found = await ended(world, operation)
    assert found.status is OperationStatus.DONE and "term 2 continues from it" in found.detail
    assert world.recorder.last_step == 4 and not world.control.returning.is_set()
    # The undone checkpoint is listed, but no longer available.
    listed = {each.id: each for each in await world.control.checkpoints()}
    assert [each for each in ids if not listed[each].why_not] == ids[:2]
    with pytest.raises(ControlRefused, match="undone by a return") as refused:
        await world.control.go_back(ids[2])
    assert refused.value.code == "gone"
    # The return is durable before and after the first commit of the new term.
    world = await world.restart()
    assert world.recorder.last_step == 4
    later = world.commit(5)
    world = await world.restart()
    assert world.recorder.last_step == 5
    assert [each.id for each in await world.control.checkpoints() if not each.why_not] == [
        later, ids[1], ids[0],
    ]  # fmt: skip


async def test_a_run_goes_back_to_the_checkpoint_of_a_step_number(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.begin()
    ids = [world.commit(step) for step in (2, 4)]
    await world.control.go_back("2")
    await world.begin()
    again = world.commit(4)
    # Step 4 has two checkpoints, of which one is undone; the other is used.
    assert again != ids[1] and (await world.control.go_back("4")).checkpoint == again
    with pytest.raises(ControlRefused, match="has no checkpoint '3'"):
        await world.control.go_back("3")


async def test_a_run_does_not_go_back_to_a_pruned_or_unreadable_checkpoint(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.begin()
    ids = [world.commit(step) for step in (2, 4)]
    with pytest.raises(ControlRefused, match="has no checkpoint") as refused:
        await world.control.go_back("step-000003-t1")
    assert refused.value.code == "unknown"
    manifest = next((world.place.checkpoints / ids[0]).iterdir())
    manifest.write_text("{")
    with pytest.raises(ControlRefused, match="cannot go back to step-000002-t1") as refused:
        await world.control.go_back(ids[0])
    assert refused.value.code == "gone"
    # If the checkpoint is pruned before the next lease, the newest one is used.
    operation = await world.control.go_back(ids[1])
    world.control._return = world.control._operations[operation.id] = operation.model_copy(
        update={"checkpoint": "gone"}
    )
    lease = await world.begin()
    assert lease.parent is not None and lease.parent.directory == ids[1]
    found = await ended(world, operation)
    assert found.status is OperationStatus.FAILED and "pruned meanwhile" in found.detail


async def test_a_requested_evaluation_samples_each_task_and_is_stored(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.begin()
    operation = await evaluate(world, num_tasks=2)
    with pytest.raises(ControlRefused, match="is running already"):
        await evaluate(world)
    world.term.go_on.set()
    record = (await ended(world, operation)).evaluation
    assert record is not None and (record.num_tasks, record.num_samples) == (2, 4)
    names = ["guessing-held-out-0", "guessing-held-out-1"]
    assert world.term.asked == [(names, SAMPLING, f"step-000000-{operation.id}", 0.25)]
    # Two of four samples pass: pass@4 is certain.
    assert record.pass_at == {1: 0.5, 4: 1.0} and record.reward_mean == 0.5
    second = await evaluate(world, task_ids=("guessing-held-out-2",))
    await ended(world, second)
    stored = read_history(world.store).evaluations
    assert [each.num_tasks for each in stored] == [2, 1]
    assert EvaluationAnswer.model_validate(stored[0]) == record
    assert not any(each.is_scheduled for each in stored)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"num_tasks": 4}, "invalid", "expected at most 3"),
        ({"task_ids": ("other",)}, "invalid", "held-out tasks, such as"),
        ({"sampling": Sampling(num_samples=50_000)}, "invalid", "are 150000 rollouts"),
    ],
)
async def test_an_evaluation_with_invalid_tasks_or_too_many_rollouts_is_refused(
    change: dict[str, object], code: str, words: str, tmp_path: Path
) -> None:
    world = World(tmp_path)
    await world.begin()
    with pytest.raises(ControlRefused, match=words) as refused:
        await evaluate(world, **change)
    assert refused.value.code is code


async def test_an_evaluation_fails_and_is_not_stored_if_its_term_ends(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.begin()
    operation = await evaluate(world)
    world.control.term = None
    world.term.go_on.set()
    assert "its term has ended" in (await ended(world, operation)).detail
    assert world.recorder.evaluations.length == 0


async def test_operations_that_need_training_are_refused_with_the_phase(tmp_path: Path) -> None:
    world = World(tmp_path)
    control = world.control
    with pytest.raises(ControlRefused, match="has no lease yet"):
        await control.pause(Pausable.TRAINING, "")
    await world.begin()
    world.term.is_training = False
    calls: list[Callable[[], object]] = [control.checkpoint, lambda: evaluate(world)]
    for call in calls:
        with pytest.raises(ControlRefused, match="needs its trainer"):
            await call()  # type: ignore[misc]
    world.term.is_training = True
    for phase in OVER:
        world.recorder.phase(phase, "")
        for call in [
            *calls,
            lambda: control.pause(Pausable.TRAINING, ""),
            lambda: control.go_back("a"),
        ]:
            with pytest.raises(ControlRefused, match=f"the run is {phase}"):
                await call()  # type: ignore[misc]
    with pytest.raises(ControlRefused, match="has no operation"):
        await control.operation("op-9")


async def test_policies_list_the_replicas_and_checkpoints_of_each_version(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.begin()
    checkpoint = world.commit(2)
    view = await world.control.policies()
    assert (view.term, view.trained_version, view.published_version) == (1, 3, 3)
    newest, older = view.policies
    assert (newest.version, newest.is_trained, newest.checkpoints) == (3, True, [])
    assert [replica.id for replica in newest.replicas] == ["a"]
    assert (older.version, older.is_trained, older.checkpoints) == (2, False, [checkpoint])
    assert [replica.since for replica in older.replicas] == [None]
    # After a return an engine may hold another term's version of the same number.
    status = await world.engines.status()
    view = policies_view(
        2, status, trained_version=2, republished=(2,), checkpoints={2: ["x"]}, now=1000.0
    )
    assert [each.version for each in view.policies] == [2] and view.published_version is None
    assert view.policies[0].is_republished and view.policies[0].replicas == []
    assert [(each.id, each.since) for each in view.starting] == [("a", 990.0), ("b", None)]
    world.engines.is_lost = True
    assert (await world.control.policies()).policies[0].replicas == []


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    # 1 - C(n - c, k) / C(n, k) of Chen et al., by hand.
    assert pass_at_k(4, 1, k=2) == 0.5
    assert pass_at_k(5, 2, k=3) == pytest.approx(0.9)
    assert pass_at_k(10, 3, k=1) == pytest.approx(0.3)
    assert pass_at_k(10, 0, k=10) == 0.0 and pass_at_k(10, 1, k=10) == 1.0
    # The estimate equals the share among all choices of k of n samples.
    for n, c, k in ((6, 2, 3), (7, 4, 2), (5, 5, 1)):
        choices = list(combinations([True] * c + [False] * (n - c), k))
        share = sum(any(choice) for choice in choices) / len(choices)
        assert pass_at_k(n, c, k=k) == pytest.approx(share)
    # With large numbers, factorials in floats would overflow.
    assert pass_at_k(1000, 10, k=100) == pytest.approx(0.653072285207994)


def test_a_sample_ended_by_an_error_is_excluded_from_pass_at_k() -> None:
    found = [
        *(played("a", reward=float(passed)) for passed in (1, 0, 0, 0)),
        *(played("b", reward=1.0, version=5) for _ in range(2)),
        *(played("b", reward=0.0, num_sampled=0) for _ in range(2)),
    ]
    sampling = Sampling(num_samples=4, temperature=0.6, ks=(1, 4))
    record = evaluation_record(3, found, version=3, sampling=sampling, is_scheduled=False)
    # Task b has two graded samples, which both pass: it is left out of pass@4.
    assert record.pass_at == {1: pytest.approx(0.625), 4: 1.0}
    assert record.reward_mean == 0.5 and record.num_tasks == 2
    assert (record.policy_version, record.last_policy_version) == (3, 5)
    assert evaluation_line(record) == (
        "evaluation  v3  reward 0.50  2 held-out tasks, 4 samples each at temperature 0.6"
        "  pass@1 0.62  pass@4 1.00  2 failed"
    )
