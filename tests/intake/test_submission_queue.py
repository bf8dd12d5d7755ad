"""Tests of submitted tasks from acceptance to training, also over restarts of the run."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import msgpack
from sqlalchemy import text
from worlds.parts.submission_service import GROUPS_PER_STEP, Service, request

from actors.types import Outcome, Task
from service.access.keys import NO_LIMITS, KeyLimits
from service.config.sections import ServiceSettings
from service.intake.submission import RolloutRequest, Status, SubmitReply
from service.store.errors import LeaseLost
from service.store.lineage import read_events
from service.store.submissions import offer_of


@pytest.fixture
async def service(tmp_path: Path) -> Service:
    return await Service(tmp_path).begin()


async def submit(service: Service, *names: str) -> None:
    reply = await service.submissions.submit([request(name) for name in names])
    assert reply.new_ids == set(names)


async def test_a_submission_is_queued_played_and_trained(service: Service) -> None:
    await submit(service, "a", "b", "c")
    view = await service.submissions.view("c")
    assert view is not None and (view.position, view.num_ahead, view.status) == (
        3,
        2,
        Status.QUEUED,
    )
    assert {item.result for item in view.rollouts} == {None} and len(view.rollouts) == 2
    assert await service.admit() == ["a", "b", "c"]
    assert await service.status("a") == "running"
    service.play()
    assert await service.status("a") == "finished"
    await service.train()
    view = await service.submissions.view("a")
    assert view is not None and view.status is Status.TRAINED
    assert [(item.status, item.step) for item in view.rollouts] == [(Status.TRAINED, 1)] * 2
    assert view.rollouts[0].result is not None and view.rollouts[0].result.policy_versions == (0, 0)
    assert await service.status("c") == "finished"


async def test_a_repeated_task_creates_nothing_and_a_changed_one_refuses_its_request(
    service: Service,
) -> None:
    await submit(service, "a")
    again = await service.submissions.submit([request("a"), request("b")])
    assert again.new_ids == {"b"} and [each.place for each in again.places] == [1, 2]
    refused = await service.submissions.submit([request("a", seed=2), request("new")])
    assert refused.conflicts == ("a",) and refused.places == ()
    assert await service.submissions.view("new") is None
    assert (
        await (await service.restart()).submissions.submit([request("a", seed=2)])
    ).conflicts == ("a",)


async def test_a_full_backlog_accepts_all_or_nothing_and_names_a_time_to_retry(
    tmp_path: Path,
) -> None:
    service = await Service(tmp_path, settings=ServiceSettings(max_waiting_tasks=3)).begin()
    await submit(service, "a", "b")
    service.submissions.note_step_seconds(10.0)
    reply = await service.submissions.submit([request("c"), request("d")])
    assert "2 tasks wait already" in reply.refusal and reply.retry_after_s == 10
    assert await service.submissions.view("c") is None
    # Known tasks need no room.
    assert (await service.submissions.submit([request("a"), request("c")])).new_ids == {"c"}


async def test_nothing_is_accepted_before_the_run_has_started(tmp_path: Path) -> None:
    reply = await Service(tmp_path).submissions.submit([request("a")])
    assert "not begun" in reply.refusal and reply.retry_after_s is None


async def test_the_owner_of_an_older_lease_accepts_and_binds_nothing(tmp_path: Path) -> None:
    old = await Service(tmp_path).begin()
    await submit(old, "a")
    await Service(tmp_path).begin()
    with pytest.raises(LeaseLost):
        await old.submissions.submit([request("b")])
    with pytest.raises(LeaseLost):
        await old.admit()
    assert await (await Service(tmp_path).begin()).submissions.view("b") is None


async def test_uncommitted_tasks_of_a_killed_process_are_played_again(
    service: Service,
) -> None:
    await submit(service, "a", "b", "c", "d")
    assert await service.admit() == ["a", "b", "c", "d"]
    service.play()
    await service.train()
    await service.commit()
    await service.train()
    assert await service.status("c") == "trained"
    later = await service.restart()
    assert [await later.status(name) for name in "abcd"] == [
        "trained",
        "trained",
        "running",
        "running",
    ]
    kept = await later.submissions.view("a")
    assert kept is not None and all(item.result for item in kept.rollouts)
    lost = await later.submissions.view("c")
    assert lost is not None and not any(item.result for item in lost.rollouts)
    assert await later.admit() == []
    assert later.play() == 4
    await later.train()
    assert await later.status("d") == "trained"


async def test_tasks_that_were_bound_but_not_admitted_are_queued_again(service: Service) -> None:
    await submit(service, "a", "b")
    # The restarted process resumes from this checkpoint and reads the bindings made after it.
    await service.commit()
    await service.submissions.fill(service.queue.admissible())
    later = await service.restart()
    assert await later.status("a") == "queued"
    assert await later.admit() == ["a", "b"]


async def test_a_failed_group_is_evicted_and_the_next_task_is_admitted(
    service: Service,
) -> None:
    await submit(service, "a", "b")
    await service.admit()
    service.play(outcome=Outcome.WALL_TIMEOUT)
    view = await service.submissions.view("a")
    assert view is not None and view.status is Status.EVICTED
    assert {item.reason for item in view.rollouts} == {"wall_timeout"}
    await submit(service, "c")
    assert await service.admit() == ["c"]


async def test_a_task_with_a_repeated_attempt_is_still_running(service: Service) -> None:
    await submit(service, "a")
    await service.admit()
    assert service.play(outcome=Outcome.ENVIRONMENT_ERROR) == 2
    assert await service.status("a") == "running"
    assert service.play() == 2
    assert await service.status("a") == "finished"


async def test_a_task_can_be_cancelled_until_a_step_has_taken_it(service: Service) -> None:
    await submit(service, "a", "b", "c", "d", "e")
    assert await service.cancel("e") == "cancelled"
    assert await service.admit() == ["a", "b", "c", "d"]
    assert await service.cancel("a") == await service.cancel("a") == "cancelled"
    assert service.play() == 6
    # The cancelled group leaves room for another one, and the next steps continue without it.
    await submit(service, "f")
    assert await service.admit() == ["f"]
    service.play()
    await service.train()
    assert await service.cancel("b") == "trained"
    assert await service.cancel("unknown") is None


async def test_a_task_that_a_step_has_taken_is_not_shown_as_cancelled(service: Service) -> None:
    await submit(service, "a", "b")
    await service.admit()
    service.play()
    service.take()
    assert await service.cancel("a") == "finished"
    assert await (await service.restart()).status("a") != "cancelled"


async def test_two_concurrent_cancellations_both_succeed(service: Service) -> None:
    await submit(service, "a", "b")
    await service.admit()

    async def evict(group_id: str) -> bool:
        await asyncio.sleep(0)
        return service.queue.cancel_group(group_id)

    views = await asyncio.gather(*(service.submissions.cancel("a", evict=evict) for _ in range(2)))
    assert [view.status for view in views if view] == [Status.CANCELLED] * 2


async def test_a_cancellation_without_a_queue_is_applied_by_the_next_term(service: Service) -> None:
    await submit(service, "a", "b", "c")
    await service.admit()
    await service.commit()
    assert await cancel_without_a_queue(service, "a") is Status.CANCELLED
    later = await service.restart()
    assert await later.status("a") == "cancelled"
    assert later.play() == 4


async def test_a_cancelled_task_that_was_trained_anyway_is_shown_as_trained(
    service: Service,
) -> None:
    await submit(service, "a", "b")
    await service.admit()
    service.play()
    assert await cancel_without_a_queue(service, "a") is Status.CANCELLED
    await service.train()
    await service.commit()
    assert await service.status("a") == await (await service.restart()).status("a") == "trained"


async def cancel_without_a_queue(service: Service, name: str) -> Status | None:
    async def is_gone(group_id: str) -> bool:
        return True

    view = await service.submissions.cancel(name, evict=is_gone)
    return None if view is None else view.status


async def test_ended_tasks_leave_memory_but_can_still_be_queried(service: Service) -> None:
    await submit(service, "a", "b", "c")
    await service.admit()
    service.play()
    await service.train()
    before = await service.submissions.view("a")
    await service.commit()
    await service.prune()
    assert "a" not in service.submissions._table and "c" in service.submissions._table
    assert num_rows(service, "bindings") == 1 and num_rows(service, "results") == 2
    assert num_rows(service, "submissions WHERE request IS NOT NULL") == 1
    for restarts in (False, True):
        service = await service.restart() if restarts else service
        assert await service.submissions.view("a") == before
        again = await service.submissions.submit([request("a"), request("d")])
        assert again.new_ids <= {"d"} and before is not None
        assert (again.places[0].place, again.places[0].status) == (1, before.status)
        assert (await service.submissions.submit([request("a", seed=2)])).conflicts == ("a",)
        assert await service.cancel("a") == "trained"


async def test_tasks_that_an_older_checkpoint_does_not_contain_can_be_played_again(
    service: Service,
) -> None:
    await submit(service, "a", "b")
    await service.commit()
    await service.admit()
    service.play()
    await service.train()
    await service.commit()
    await service.prune(keep=2)
    later = await service.restart(passed_over={"step-1"})
    # The groups were admitted after the older checkpoint, so their tasks are queued again.
    assert [await later.status(name) for name in "ab"] == ["queued", "queued"]
    assert await later.admit() == ["a", "b"]


async def test_cancelled_tasks_do_not_grow_the_database(
    tmp_path: Path,
) -> None:
    service = await Service(tmp_path, settings=ServiceSettings(keep_ended_tasks=5)).begin()
    for number in range(40):
        task = Task(
            task_id=f"t{number}", environment="guessing", seed=1, data={"text": "x" * 500_000}
        )
        offered = RolloutRequest.of(task, asked_samples=2, default_samples=2)
        assert (await service.submissions.submit([offered])).new_ids == {f"t{number}"}
        assert await service.cancel(f"t{number}") == "cancelled"
    assert service.submissions._table._entries == {} and num_rows(service, "submissions") == 5
    # The database reuses the pages of a removed task.
    assert (tmp_path / "run.db").stat().st_size < 4_000_000
    assert await service.submissions.view("t0") is None
    assert await service.status("t39") == "cancelled"


def num_rows(service: Service, table: str) -> int:
    query = text(f"SELECT count(*) FROM {table}")
    return service.store.read(lambda connection: connection.scalar(query)) or 0


async def test_two_concurrent_submissions_of_one_task_get_the_same_place(service: Service) -> None:
    first, second = await asyncio.gather(
        *(service.submissions.submit([request("a")]) for _ in range(2))
    )
    assert {first.new_ids, second.new_ids} == {frozenset({"a"}), frozenset()}
    assert first.places[0].place == second.places[0].place == 1


async def test_a_task_cancelled_after_the_checkpoint_stays_cancelled(service: Service) -> None:
    await submit(service, "a", "b", "c")
    await service.admit()
    await service.commit()
    assert await service.cancel("a") == "cancelled"
    later = await service.restart()
    assert await later.status("a") == "cancelled"
    assert later.play() == 4
    assert later.submissions.groups_to_cancel == []


async def test_a_task_can_be_cancelled_between_its_binding_and_its_admission(
    service: Service,
) -> None:
    await submit(service, "a", "b")
    requests = await service.submissions.fill(service.queue.admissible())
    is_asked = asyncio.Event()

    async def evict(group_id: str) -> bool:
        is_asked.set()
        return service.queue.cancel_group(group_id)

    cancelling = asyncio.create_task(service.submissions.cancel("a", evict=evict))
    await is_asked.wait()
    service.queue.admit(requests)
    service.drain()
    view = await cancelling
    assert view is not None and view.status is Status.CANCELLED
    assert service.play() == 2
    assert await (await service.restart()).status("a") == "cancelled"


async def test_evicted_tasks_leave_memory_without_a_step_and_stay_evicted(
    service: Service,
) -> None:
    await submit(service, "a", "b", "c", "d")
    await service.admit()
    service.play()
    for _ in range(2):
        await service.train()
        await service.commit()
    names = []
    for number in range(60):
        names.append(f"t{number}")
        await submit(service, names[-1])
        assert await service.admit() == [names[-1]]
        service.play(outcome=Outcome.WALL_TIMEOUT)
        if number % 5 == 4:
            assert service.recorder.num_evicted == 10
            await service.commit()
            # Keep the checkpoint of step 1 too, so that the run can return to it.
            await service.prune(keep=2)
            assert service.recorder.num_evicted == 0
            assert service.submissions._table._entries.keys() == {"c", "d"}
            assert num_rows(service, "submissions WHERE request IS NOT NULL") == 2
            assert num_rows(service, "results") == 4
    for passed_over in ({"step-2"}, set[str]()):
        later = await service.restart(passed_over=passed_over)
        assert {await later.status(name) for name in names} == {"evicted"}
        assert later.submissions.backlog.waiting == 0
        assert later.play() == (4 if passed_over else 0)


async def test_an_evicted_task_that_an_older_checkpoint_contains_is_kept(
    service: Service,
) -> None:
    await submit(service, "a", "b", "c")
    await service.admit()
    await service.commit()
    service.play()
    await service.train()
    await submit(service, "d")
    await service.admit()
    assert await service.cancel("c") == "cancelled"
    service.play(outcome=Outcome.WALL_TIMEOUT)
    await service.commit()
    await service.prune(keep=2)
    assert service.submissions._table._entries.keys() == {"a", "b", "c"}
    later = await service.restart(passed_over={"step-1"})
    assert [await later.status(name) for name in "abcd"] == [
        "running", "running", "cancelled", "evicted",
    ]  # fmt: skip
    assert later.play() == 4


async def test_an_evicted_task_that_a_checkpoint_between_others_contains_is_kept(
    service: Service,
) -> None:
    await submit(service, "a", "b", "c", "d")
    await service.admit()
    service.play()
    await service.train()
    await service.commit()
    await submit(service, "e", "f")
    await service.admit()
    await service.train()
    await service.commit()
    service.play(outcome=Outcome.WALL_TIMEOUT)
    await submit(service, "g", "h")
    await service.admit()
    service.play()
    await service.train()
    await service.commit()
    await service.prune(keep=3)
    later = await service.restart(passed_over={"step-3"})
    assert [await later.status(name) for name in "abcdef"] == ["trained"] * 4 + ["running"] * 2
    assert later.play() == 4


ACTIONS = st.lists(
    st.sampled_from(
        ["submit", "admit", "play", "fail", "take", "train", "commit", "cancel", "kill", "prune"]
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
async def test_no_task_is_lost_or_trained_twice_in_random_sequences_of_actions(
    tmp_path_factory: pytest.TempPathFactory, actions: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("service")
    service = await Service(directory, settings=ServiceSettings(max_waiting_tasks=6)).begin()
    accepted: list[str] = []
    cancelled: set[str] = set()
    for action in actions:
        match action:
            case "submit":
                name = f"t{len(accepted)}"
                if (await service.submissions.submit([request(name)])).new_ids:
                    accepted.append(name)
            case "admit" if service.submissions.backlog.waiting:
                await service.admit()
            case "play":
                service.play()
            case "fail":
                service.play(outcome=Outcome.WALL_TIMEOUT)
            case "take":
                service.take()
            case "train":
                await service.train()
            case "commit":
                await service.commit()
            case "cancel" if accepted:
                name = accepted[len(accepted) // 2]
                if await service.cancel(name) == "cancelled":
                    cancelled.add(name)
            case "kill":
                service = await service.restart()
            case "prune" if service.store.checkpoints():
                await service.prune()
    await check(service, accepted)
    # A task whose cancellation was confirmed is never trained.
    statuses = {name: await service.status(name) for name in accepted}
    assert {name for name, status in statuses.items() if status == "cancelled"} == cancelled


async def check(service: Service, accepted: list[str]) -> None:
    """Check that each accepted task ends, and that no task is trained under two groups."""
    for _ in range(len(accepted) + 2):
        if service.submissions.backlog.waiting:
            await service.admit()
        service.play()
        await service.train()
    views = [await service.submissions.view(name) for name in accepted]
    assert all(view is not None for view in views)
    statuses = Counter(view.status for view in views if view)
    assert statuses[Status.QUEUED] == statuses[Status.RUNNING] == 0
    # The remaining finished tasks are too few for a step.
    assert statuses[Status.FINISHED] < GROUPS_PER_STEP
    shown = sum(item.status is Status.TRAINED for view in views if view for item in view.rollouts)
    await service.commit()
    events = [item for item in read_events(service.store) if item.kind == "trained"]
    assert len({item.rollout_id for item in events}) == len(events) == shown


async def test_requests_of_one_batch_are_answered_as_if_in_sequence(
    tmp_path: Path,
) -> None:
    service = await Service(tmp_path, settings=ServiceSettings(max_waiting_tasks=4)).begin()
    of_two = KeyLimits(max_waiting_tasks=2)

    def offer(names: str, *, seed: int = 1, key: str = "", limits: KeyLimits = of_two) -> bytes:
        tasks = [request(name, seed=seed) for name in names]
        return msgpack.encode(offer_of(tasks, key=key, limits=limits))

    offers = [
        offer("a", key="k"),
        offer("bc"),
        offer("a"),
        offer("a", seed=2),
        offer("d"),
        offer("e", key="k"),
        offer("xyz", limits=NO_LIMITS),
    ]
    first, over_quota, again, changed, fits, reused, full = [
        msgpack.decode(each, type=SubmitReply)
        for each in await service.submissions.submit_packed(offers)
        if isinstance(each, bytes)
    ]
    assert (first.new_ids, again.new_ids, fits.new_ids) == ({"a"}, frozenset(), {"d"})
    assert again.places == (replace(first.places[0], is_new=False),)
    assert (first.places[0].place, fits.places[0].ahead) == (1, 1)
    assert over_quota.is_quota and changed.conflicts == ("a",) and reused.is_key_taken
    assert full.refusal and full.retry_after_s
    # The database has exactly the accepted tasks, so a new process finds only those.
    service = await service.restart()
    assert [await service.submissions.view(name) is None for name in "abcdexyz"] == [
        name not in "ad" for name in "abcdexyz"
    ]


async def test_a_failed_commit_is_reported_to_all_requests_in_it(service: Service) -> None:
    await Service(service.directory).begin()
    offers = [msgpack.encode(offer_of([request(name)], key="", limits=NO_LIMITS)) for name in "abc"]
    found = await service.submissions.submit_packed(offers)
    assert [type(each) for each in found] == [LeaseLost] * 3


def test_the_digest_of_a_task_equals_that_stored_by_older_runs() -> None:
    """Check the digest of the JSON that was sent, with sorted names."""
    data = {"b": [1, 2.5], "a": {"ü": None}}
    sent = RolloutRequest.of(
        Task(task_id="acme~ä-1", environment="guessing", seed=7, data=data),
        asked_samples=None,
        default_samples=4,
        min_usable_samples=3,
        batch="night",
    )
    assert sent.digest == "37381d846e3244a0ab809be393a96e56b35606305ef496344b3e5d61128c7bfc"
    assert sent.num_bytes == 137


async def test_feeds_of_tenants_that_submit_together_are_ordered_and_numbered(
    service: Service,
) -> None:
    rounds = (("a~1", "b~1", "3"), ("b~4", "a~5", "b~6"))
    for names in rounds:
        await asyncio.gather(*(service.submissions.submit([request(name)]) for name in names))
    by_tenant = {}
    for sees in (None, "a", "b", "c"):
        page = await service.submissions.feed(after=0, limit=9, sees=sees)
        by_tenant[sees] = [(entry.number, entry.task) for entry in page.entries]
    assert by_tenant == {
        None: list(enumerate(("a~1", "b~1", "3", "b~4", "a~5", "b~6"), start=1)),
        "a": [(1, "a~1"), (2, "a~5")],
        "b": [(1, "b~1"), (2, "b~4"), (3, "b~6")],
        "c": [],
    }
