"""Submissions from acceptance to training, with restarts: none lost, none trained twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds.intake_desk import GROUPS_PER_STEP, Desk, wanted

from actors.types import Outcome
from service.intake.submission import Status
from service.store.lineage import read_history
from service.store.run_store import LeaseLost


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path).begin()


def submit(desk: Desk, *names: str) -> None:
    reply = desk.intake.submit([wanted(name) for name in names])
    assert reply.new_ids == set(names)


async def test_a_submission_stands_in_line_is_played_and_trained(desk: Desk) -> None:
    submit(desk, "a", "b", "c")
    view = desk.intake.view("c")
    assert view is not None and (view.place, view.num_ahead, view.status) == (3, 2, Status.QUEUED)
    assert view.reward is None and len(view.rollouts) == 2
    assert await desk.admit() == ["a", "b", "c"]
    assert desk.status("a") == "running"
    desk.play()
    assert desk.status("a") == "finished"
    desk.train()
    view = desk.intake.view("a")
    assert view is not None and view.status is Status.TRAINED and view.reward is not None
    assert [(item.status, item.step) for item in view.rollouts] == [(Status.TRAINED, 1)] * 2
    assert view.rollouts[0].result is not None and view.rollouts[0].result.oldest_version == 0
    assert desk.status("c") == "finished"


def test_the_same_content_is_accepted_once_and_another_is_refused_whole(desk: Desk) -> None:
    submit(desk, "a")
    again = desk.intake.submit([wanted("a"), wanted("b")])
    assert again.new_ids == {"b"} and [view.place for view in again.views] == [1, 2]
    refused = desk.intake.submit([wanted("a", seed=2), wanted("new")])
    assert refused.conflicts == ("a",) and refused.views == ()
    assert desk.intake.view("new") is None
    assert desk.restart().intake.submit([wanted("a", seed=2)]).conflicts == ("a",)


def test_a_full_line_takes_all_or_nothing_and_says_when_to_come_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path, capacity=3).begin()
    submit(desk, "a", "b")
    desk.intake.note_step_seconds(10.0)
    reply = desk.intake.submit([wanted("c"), wanted("d")])
    assert "2 tasks wait already" in reply.refusal and reply.retry_after_s == 10
    assert desk.intake.view("c") is None
    # What is known needs no room.
    assert desk.intake.submit([wanted("a"), wanted("c")]).new_ids == {"c"}


def test_nothing_is_taken_in_before_the_run_has_begun(tmp_path: Path) -> None:
    reply = Desk(tmp_path).intake.submit([wanted("a")])
    assert "not begun" in reply.refusal and reply.retry_after_s is None


async def test_a_holder_of_an_older_lease_accepts_and_binds_nothing(tmp_path: Path) -> None:
    old = Desk(tmp_path).begin()
    submit(old, "a")
    Desk(tmp_path).begin()
    with pytest.raises(LeaseLost):
        old.intake.submit([wanted("b")])
    with pytest.raises(LeaseLost):
        await old.admit()
    assert Desk(tmp_path).begin().intake.view("b") is None


async def test_what_a_killed_process_played_and_had_not_committed_is_played_again(
    desk: Desk,
) -> None:
    submit(desk, "a", "b", "c", "d")
    assert await desk.admit() == ["a", "b", "c", "d"]
    desk.play()
    desk.train()
    desk.commit()
    desk.train()
    assert desk.status("c") == "trained"
    later = desk.restart()
    assert [later.status(name) for name in "abcd"] == ["trained", "trained", "running", "running"]
    kept = later.intake.view("a")
    assert kept is not None and kept.reward is not None
    lost = later.intake.view("c")
    assert lost is not None and lost.reward is None
    assert await later.admit() == []
    assert later.play() == 4
    later.train()
    assert later.status("d") == "trained"


async def test_what_was_bound_and_never_admitted_stands_in_line_again(desk: Desk) -> None:
    submit(desk, "a", "b")
    # The restarted process goes on from here, and so reads what this one has bound.
    desk.commit()
    await desk.intake.fill(desk.queue.admissible())
    later = desk.restart()
    assert later.status("a") == "queued"
    assert await later.admit() == ["a", "b"]


async def test_a_failed_group_is_told_as_evicted_and_its_number_given_to_the_next(
    desk: Desk,
) -> None:
    submit(desk, "a", "b")
    await desk.admit()
    desk.play(outcome=Outcome.WALL_TIMEOUT)
    view = desk.intake.view("a")
    assert view is not None and view.status is Status.EVICTED
    assert {item.reason for item in view.rollouts} == {"wall_timeout"}
    submit(desk, "c")
    assert await desk.admit() == ["c"]


async def test_an_attempt_that_is_repeated_is_still_running(desk: Desk) -> None:
    submit(desk, "a")
    await desk.admit()
    assert desk.play(outcome=Outcome.ENVIRONMENT_ERROR) == 2
    assert desk.status("a") == "running"
    assert desk.play() == 2
    assert desk.status("a") == "finished"


async def test_cancelling_takes_back_what_no_step_has_taken(desk: Desk) -> None:
    submit(desk, "a", "b", "c", "d", "e")
    assert await desk.cancel("e") == "cancelled"
    assert await desk.admit() == ["a", "b", "c", "d"]
    assert await desk.cancel("a") == await desk.cancel("a") == "cancelled"
    assert desk.play() == 6
    # Its number is free again, and the next steps go on without it.
    submit(desk, "f")
    assert await desk.admit() == ["f"]
    desk.play()
    desk.train()
    assert await desk.cancel("b") == "trained"
    assert await desk.cancel("unknown") is None


async def test_what_a_step_has_taken_is_not_called_cancelled(desk: Desk) -> None:
    submit(desk, "a", "b")
    await desk.admit()
    desk.play()
    desk.take()
    assert await desk.cancel("a") == "finished"
    assert desk.restart().status("a") != "cancelled"


async def test_two_who_cancel_at_once_are_both_told_so(desk: Desk) -> None:
    submit(desk, "a", "b")
    await desk.admit()

    async def evict(group_id: str) -> bool:
        await asyncio.sleep(0)
        return desk.queue.cancel_group(group_id)

    views = await asyncio.gather(*(desk.intake.cancel("a", evict=evict) for _ in range(2)))
    assert [view.status for view in views if view] == [Status.CANCELLED] * 2


async def test_a_queue_that_is_gone_is_told_of_it_by_the_next_epoch(desk: Desk) -> None:
    submit(desk, "a", "b", "c")
    await desk.admit()
    desk.commit()
    assert await cancel_without_a_queue(desk, "a") is Status.CANCELLED
    later = desk.restart()
    assert later.status("a") == "cancelled"
    assert later.play() == 4


async def test_a_task_that_was_trained_all_the_same_is_told_as_trained(desk: Desk) -> None:
    submit(desk, "a", "b")
    await desk.admit()
    desk.play()
    assert await cancel_without_a_queue(desk, "a") is Status.CANCELLED
    desk.train()
    desk.commit()
    assert desk.status("a") == desk.restart().status("a") == "trained"


async def cancel_without_a_queue(desk: Desk, name: str) -> Status | None:
    async def is_gone(group_id: str) -> bool:
        return True

    view = await desk.intake.cancel(name, evict=is_gone)
    return None if view is None else view.status


async def test_what_was_cancelled_after_the_checkpoint_stays_cancelled(desk: Desk) -> None:
    submit(desk, "a", "b", "c")
    await desk.admit()
    desk.commit()
    assert await desk.cancel("a") == "cancelled"
    later = desk.restart()
    assert later.status("a") == "cancelled"
    assert later.play() == 4
    assert later.intake.groups_to_cancel == []


ACTIONS = st.lists(
    st.sampled_from(
        ["submit", "admit", "play", "fail", "take", "train", "commit", "cancel", "kill"]
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
async def test_whatever_happens_none_is_lost_and_none_is_trained_twice(
    tmp_path_factory: pytest.TempPathFactory, actions: list[str]
) -> None:
    desk = Desk(tmp_path_factory.mktemp("desk"), capacity=6).begin()
    accepted: list[str] = []
    cancelled: set[str] = set()
    for action in actions:
        match action:
            case "submit":
                name = f"t{len(accepted)}"
                if desk.intake.submit([wanted(name)]).new_ids:
                    accepted.append(name)
            case "admit" if desk.intake.line.waiting:
                await desk.admit()
            case "play":
                desk.play()
            case "fail":
                desk.play(outcome=Outcome.WALL_TIMEOUT)
            case "take":
                desk.take()
            case "train":
                desk.train()
            case "commit":
                desk.commit()
            case "cancel" if accepted:
                name = accepted[len(accepted) // 2]
                if await desk.cancel(name) == "cancelled":
                    cancelled.add(name)
            case "kill":
                desk = desk.restart()
    await check(desk, accepted)
    # What was answered as cancelled is never trained, whatever came after.
    assert {name for name in accepted if desk.status(name) == "cancelled"} == cancelled


async def check(desk: Desk, accepted: list[str]) -> None:
    """Each accepted task comes to an end, and no task is trained under two groups."""
    for _ in range(len(accepted) + 2):
        if desk.intake.line.waiting:
            await desk.admit()
        desk.play()
        desk.train()
    views = [desk.intake.view(name) for name in accepted]
    assert all(view is not None for view in views)
    statuses = Counter(view.status for view in views if view)
    assert statuses[Status.QUEUED] == statuses[Status.RUNNING] == 0
    # What is left over makes no whole step.
    assert statuses[Status.FINISHED] < GROUPS_PER_STEP
    shown = sum(item.status is Status.TRAINED for view in views if view for item in view.rollouts)
    desk.commit()
    events = [item for item in read_history(desk.store).events if item.kind == "trained"]
    assert len({item.rollout_id for item in events}) == len(events) == shown
