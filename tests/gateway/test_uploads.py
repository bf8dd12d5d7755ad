"""Tests of uploaded trajectories: accepted or refused one by one, stored, and delivered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.checks.same import assert_same_samples
from worlds.parts.upload_world import (
    HTTP,
    SETTINGS,
    URL,
    UploadWorld,
    as_item,
    item,
    played,
    problem,
    renamed,
)

from actors.trainer.tiny.tokenizer import build_tokenizer
from actors.types import UNDONE, Outcome
from service.config.sections import ServiceSettings
from service.gateway.sessions import Gateway


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[UploadWorld]:
    yield await UploadWorld(tmp_path).begin()


async def test_stale_known_and_conflicting_items_are_answered_one_by_one(
    world: UploadWorld,
) -> None:
    world.service.step = 5
    fresh = {"versions": [{"version": 5, "start": 2, "end": 6}]}
    old = {"versions": [{"version": 2, "start": 2, "end": 3}, {"version": 5, "start": 3, "end": 6}]}
    unheard = {"versions": [{"version": 7, "start": 2, "end": 6}]}
    first = await world.send(item("a", sample=fresh))
    assert first.json()["accepted"] == ["a"]
    answer = await world.send(
        item("b", sample=fresh),
        item("a", sample=fresh),
        item("b", sample=fresh),
        item("a", sample=fresh, reward=0.0),
        item("a", sample=fresh, group="other"),
        item("c", sample=old),
        item("d", sample=unheard),
    )
    assert answer.status_code == 200
    body = answer.json()
    assert (body["accepted"], body["duplicates"]) == (["b"], ["a", "b"])
    assert [(each["id"], each["code"]) for each in body["rejected"]] == [
        ("a", "id-conflict"),
        ("a", "id-conflict"),
        ("c", "stale-policy"),
        ("d", "unknown-version"),
    ]
    assert body["groups"] == [{"id": "g", "uploaded": 2, "members": None, "is_submitted": False}]
    # An item that was accepted before it became stale is still a duplicate.
    world.service.step = 9
    assert (await world.send(item("a", sample=fresh))).json()["duplicates"] == ["a"]


async def test_a_group_is_submitted_once_it_is_complete(world: UploadWorld) -> None:
    open_one = await world.send(item("a"), groups=[{"id": "g", "members": 2}])
    assert open_one.json()["groups"][0] == {
        "id": "g", "uploaded": 1, "members": 2, "is_submitted": False
    }  # fmt: skip
    assert world.service.submissions.backlog.waiting == 0
    other = await world.send(groups=[{"id": "g", "members": 3}])
    problem(other, 409, "conflict")
    whole = await world.send(item("b"))
    assert whole.json()["groups"][0]["is_submitted"]
    assert world.service.submissions.backlog.waiting == 1
    late = (await world.send(item("c"), item("b"))).json()
    assert [each["code"] for each in late["rejected"]] == ["group-closed"]
    assert late["duplicates"] == ["b"] and world.service.submissions.backlog.waiting == 1
    problem(await world.client.delete(f"{URL}/groups/g"), 409, "group-closed")
    found = (await world.client.get(f"{URL}/b")).json()
    assert (found["group"], found["member"], found["is_submitted"]) == ("g", 1, True)


async def test_a_group_can_be_closed_early_or_dropped(world: UploadWorld) -> None:
    close = [{"id": "g", "close": True}]
    small = await world.send(item("a"), groups=close)
    # A single trajectory has no baseline.
    assert not small.json()["groups"][0]["is_submitted"]
    closed = await world.send(item("b"), groups=close)
    assert closed.json()["groups"][0] == {
        "id": "g", "uploaded": 2, "members": 2, "is_submitted": True
    }  # fmt: skip
    again = await world.send(groups=close)
    assert again.json()["groups"] == closed.json()["groups"]
    await world.send(item("x", group="h", metadata={"why": "ü"}))
    assert (await world.client.get(f"{URL}/x")).json()["metadata"] == {"why": "ü"}
    assert (await world.client.delete(f"{URL}/groups/h")).status_code == 200
    problem(await world.client.delete(f"{URL}/groups/h"), 404, "unknown-group")
    assert (await world.send(item("x", group="h", reward=0.0))).json()["accepted"] == ["x"]


async def test_a_group_has_a_maximum_size_and_a_unique_id(world: UploadWorld) -> None:
    items = [item(f"t-{number}") for number in range(5)]
    full = (await world.send(*items)).json()
    assert [(each["id"], each["code"]) for each in full["rejected"]] == [("t-4", "group-full")]
    task = {"environment": "guessing", "tasks": [{"id": "task"}]}
    assert (await world.client.post("/api/v1/rollouts", json=task)).status_code == 202
    taken = (await world.send(item("u", group="task"))).json()
    assert [each["code"] for each in taken["rejected"]] == ["group-conflict"]


async def test_waiting_uploads_are_bounded_and_a_repeated_request_succeeds_later(
    tmp_path: Path,
) -> None:
    tight = replace(HTTP, service=replace(HTTP.service, max_waiting_tasks=1, max_waiting_mib=1))
    world = await UploadWorld(tmp_path, http=tight).begin()
    close = [{"id": "g", "close": True}, {"id": "h", "close": True}]
    items = [item("a"), item("b"), item("c", group="h"), item("d", group="h")]
    problem(await world.send(*items, groups=close), 413, "batch-too-large")
    assert (await world.send(groups=close[:1])).status_code == 200
    full = await world.send(*items[2:], groups=close[1:])
    assert problem(full, 429, "queue-full") and full.headers["retry-after"]
    await world.service.admit()
    after = (await world.send(*items[2:], groups=close[1:])).json()
    assert after["duplicates"] == ["c", "d"] and after["groups"][0]["is_submitted"]
    await world.service.admit()
    large = item("big", group="i", metadata={}, detail="", sample={
        "token_ids": [1] * 400, "mask": [0] + [1] * 399, "logprobs": [0] + [-1] * 399,
        "versions": [{"version": 0, "start": 1, "end": 400}],
    })  # fmt: skip
    large["samples"] = [
        {**large["samples"][0], "token_ids": [1 + number] * 400} for number in range(250)
    ]
    assert (await world.send(large)).status_code == 200
    full = await world.send({**large, "id": "bigger"})
    assert full.headers["retry-after"] and problem(full, 429, "too-many-requests")


async def test_an_uploaded_group_is_delivered_unchanged(world: UploadWorld) -> None:
    trajectories = [played(seed=number, reward=float(number)) for number in range(2)]
    answer = await world.send(
        *(as_item(each, f"t-{number}", packed=True) for number, each in enumerate(trajectories)),
        packed=True,
        groups=[{"id": "g", "members": 2}],
    )
    assert answer.json()["accepted"] == ["t-0", "t-1"]
    delivered = await world.deliver(await world.admitted())
    for got, sent in zip(delivered, trajectories, strict=True):
        assert got.outcome is Outcome.COMPLETED and got.environment == "uploaded"
        assert_same_samples(renamed(got), renamed(sent))
        assert {sample.trajectory_id for sample in got.samples} == {got.trajectory_id}
    view = (await world.client.get("/api/v1/rollouts/g")).json()
    assert view["status"] == "finished"
    assert [sample["reward"] for sample in view["samples"]] == [0.0, 1.0]
    assert [sample["turns"] for sample in view["samples"]] == [3, 3]


async def test_a_cut_off_trajectory_is_delivered_as_graded_if_it_has_a_reward(
    world: UploadWorld,
) -> None:
    sent = [
        item(name, outcome="truncated_tokens", reward=reward)
        for name, reward in (("a", 0.0), ("b", 1.0), ("c", None))
    ]
    answer = await world.send(*sent, groups=[{"id": "g", "members": 3}])
    assert answer.status_code == 200, answer.text
    delivered = await world.deliver(await world.admitted())
    assert [each.is_graded for each in delivered] == [True, True, False]


async def test_an_upload_is_delivered_again_after_any_kill(world: UploadWorld) -> None:
    """Check kills before the admission, before the delivery, and after it without a checkpoint."""
    sent = played(seed=7)
    items = [as_item(sent, "a"), as_item(sent, "b")]
    await world.send(items[0], groups=[{"id": "g", "members": 2}])
    world = await world.restart()
    assert (await world.send(items[0])).json()["duplicates"] == ["a"]
    assert (await world.send(items[1])).json()["groups"][0]["is_submitted"]
    world = await world.restart()
    assert len(await world.admitted()) == 2
    world = await world.restart()
    first = await world.deliver(await world.admitted())
    world = await world.restart()
    again = await world.deliver(await world.admitted())
    for got in (*first, *again):
        assert_same_samples(renamed(got), renamed(sent))


async def test_a_group_whose_submission_was_lost_is_submitted_by_the_same_request(
    world: UploadWorld,
) -> None:
    """Check a run that stops after it stored the upload and before it submitted the group."""
    body = item("a"), item("b")
    world.service.submissions.close("the run stops")
    problem(await world.send(*body, groups=[{"id": "g", "members": 2}]), 503, "not-available")
    world = await world.restart()
    again = (await world.send(*body, groups=[{"id": "g", "members": 2}])).json()
    assert again["duplicates"] == ["a", "b"] and again["groups"][0]["is_submitted"]
    assert len(await world.admitted()) == 2


async def test_a_trajectory_that_became_too_old_is_delivered_as_stale(world: UploadWorld) -> None:
    await world.send(item("a"), item("b"), groups=[{"id": "g", "members": 2}])
    assignments = await world.admitted()
    late = [replace(each, group_number=4) for each in assignments]
    for assignment in late:
        got = await world.uploads.play(assignment)
        assert (got.outcome, got.detail) == (
            Outcome.STALE,
            "sampled by version 0, expected at least 1",
        )


async def test_versions_published_without_a_step_count_in_what_is_stale(
    world: UploadWorld,
) -> None:
    """Check group 4, which needs the weights of step 1: they have version 2."""
    world.service.step, world.uploads.republished = 1, (1,)
    for number in (1, 2):
        await world.send(item(f"{number}", sample={
            "versions": [{"version": number, "start": 2, "end": 6}]
        }))  # fmt: skip
    await world.send(groups=[{"id": "g", "close": True}])
    late = [replace(each, group_number=4) for each in await world.admitted()]
    old, new = [await world.uploads.play(assignment) for assignment in late]
    assert (old.outcome, old.detail) == (
        Outcome.STALE, "sampled by version 1, expected at least 2"
    )  # fmt: skip
    assert new.outcome is Outcome.COMPLETED


async def test_an_upload_may_be_older_by_the_versions_published_without_a_step(
    world: UploadWorld,
) -> None:
    world.service.step = 3
    assert [each["code"] for each in (await world.send(item("a"))).json()["rejected"]] == [
        "stale-policy"
    ]
    world.uploads.republished = (2,)
    assert (await world.send(item("a"))).json()["accepted"] == ["a"]
    assert (await world.client.get("/api/v1/policy")).json()["oldest_version"] == 0


async def test_the_gateway_starts_with_the_versions_without_a_step_and_takes_later_ones(
    world: UploadWorld, tmp_path: Path
) -> None:
    build_tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    gateway = Gateway(
        replace(SETTINGS, republished=(1,)),
        actor_id="gateway",
        tokenizer_path=str(tmp_path / "tokenizer"),
        make_policy=lambda: world.policy,
        queue=None,
        database_url=f"sqlite:///{world.service.directory / 'run.db'}",
        run_id="run",
        term=world.service.store.newest_term(),
    )
    assert (await gateway.ask("uploads", "policy_facts")).republished == (1,)
    await gateway.set_republished((1, 4))
    assert (await gateway.ask("uploads", "policy_facts")).republished == (1, 4)
    await gateway.stop()


async def test_versions_that_a_recovery_has_undone_are_marked(world: UploadWorld) -> None:
    for number in range(2):
        await world.send(item(f"{number}", sample={
            "versions": [{"version": number, "start": 2, "end": 6}]
        }))  # fmt: skip
    await world.send(groups=[{"id": "g", "close": True}])
    world = await world.restart()
    kept, undone = await world.deliver(await world.admitted())
    assert kept.samples[0].versions.max() == 0
    assert undone.samples[0].versions.max() == UNDONE + 1 and undone.versions == (1, 1)


async def test_the_ids_of_a_cancelled_group_stay_known(world: UploadWorld) -> None:
    await world.send(item("a"), item("b"), groups=[{"id": "g", "members": 2}])
    assignments = await world.admitted()
    answer = await world.client.post("/api/v1/rollouts/g/cancel")
    assert answer.json()["status"] == "cancelled"
    (got, _) = [await world.uploads.play(each) for each in assignments]
    assert got.outcome is Outcome.INFRASTRUCTURE_ERROR and not got.samples
    assert (await world.send(item("a"))).json()["duplicates"] == ["a"]
    assert (await world.client.get(f"{URL}/a")).json()["group"] == "g"


async def test_the_ids_of_old_ended_groups_are_forgotten(tmp_path: Path) -> None:
    short = replace(HTTP, service=ServiceSettings(max_samples_per_task=4, keep_ended_tasks=1))
    world = await UploadWorld(tmp_path, http=short).begin()
    for number in range(3):
        name = f"g-{number}"
        await world.send(
            *(item(f"{name}-{letter}", group=name) for letter in "ab"),
            groups=[{"id": name, "members": 2}],
        )
        assert (await world.client.post(f"/api/v1/rollouts/{name}/cancel")).status_code == 200
    known = [(await world.client.get(f"{URL}/g-{number}-a")).status_code for number in range(3)]
    assert known == [404, 404, 200]
    assert (await world.send(item("g-0-a", group="g-0"))).json()["accepted"] == ["g-0-a"]
