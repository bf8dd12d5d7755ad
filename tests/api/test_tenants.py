"""Tests of tenants: on no route does a key see or change objects of another tenant."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.builders.queue_builders import take_all
from worlds.parts.tenant_routes import (
    BODIES,
    FEED,
    HELLO,
    ROLLOUTS,
    SESSIONS,
    UPLOADS,
    VERSIONS,
    bearer,
    made_by,
    walked,
    with_ids,
)
from worlds.parts.tenant_world import FIRST_KEY, TenantRun, client_of, new_key, tenants
from worlds.parts.upload_world import item

from actors.types import UPLOADED, Outcome
from service.intake.listing import FeedEntry, FeedKind
from service.store.feed import prune_feed, tell_all

# These routes create an object even if another tenant has one of that name.
CREATIONS = [("POST", ROLLOUTS), ("POST", SESSIONS), ("POST", UPLOADS)]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[TenantRun]:
    async with tenants(tmp_path) as run:
        yield run


async def test_another_tenants_key_sees_and_changes_nothing_on_any_route(run: TenantRun) -> None:
    app = run.app()
    owner_key, other_key = await new_key(app, "owner"), await new_key(app, "other")
    async with client_of(app, owner_key) as owner, client_of(app, other_key) as other:
        session = (await made_by(owner, run))["sessions"][0]["id"]
        chat = f"/sessions/{session}/v1/chat/completions"
        agent = (await owner.post(SESSIONS, json={"id": "owners-group"})).json()["sessions"][0]
        assert (
            await owner.post(chat, json=HELLO, headers=bearer(agent["agent_key"]))
        ).status_code == 200
        mine = {
            "task": "owners-task",
            "group": "owners-group",
            "session": session,
            "upload": "owners-upload",
        }
        nobodys = {name: each.replace("owners", "nobodys") for name, each in mine.items()}
        shown = [
            f"{ROLLOUTS}/owners-task",
            f"{ROLLOUTS}/owners-group",
            f"{SESSIONS}/{session}",
            f"{UPLOADS}/owners-upload",
            FEED,
        ]
        before = [(await owner.get(path)).json() for path in shown]

        async def ask(method: str, path: str, ids: dict[str, str]) -> tuple[int, str]:
            """Return an answer's status, and its text with every id replaced by ID."""
            kind = path.removeprefix("/sessions/{name}")
            assert method in ("GET", "DELETE") or kind in BODIES, f"what is sent to {path}?"
            taken = {ROLLOUTS: ids["task"], UPLOADS: ids["upload"]}.get(path, ids["group"])
            answer = await other.request(
                method,
                with_ids(path, **ids),
                content=json.dumps(BODIES.get(kind)).replace("ID", taken),
                headers={
                    "x-rayloom-session": ids["session"],
                    "content-type": "application/json",
                },
            )
            text = re.sub(r'("place"|"ahead"|"waiting"): ?\d+', "", answer.text)
            for each in sorted(ids.values(), key=len, reverse=True):
                text = text.replace(each, "ID")
            # The policy of these tests puts the number of its turns into its first token.
            text = re.sub(r'"token_ids":\[\d+', "", text)
            return answer.status_code, re.sub(r"[0-9a-f]{64}", "MARK", text)

        def whole(ids: dict[str, str]) -> dict[str, str]:
            return {name: f"owner~{each}" for name, each in ids.items()}

        for theirs, none in ((mine, nobodys), (whole(mine), whole(nobodys))):
            for method, path in walked(app):
                if (method, path) in CREATIONS:
                    continue
                found = await ask(method, path, theirs)
                # Another tenant's object and an object that does not exist get the same answer.
                assert found == await ask(method, path, none), (method, path)
                assert "owners" not in found[1], (method, path, found)
        told = await other.get(FEED)
        assert told.json() == {"entries": [], "next": 0}
        for method, path in CREATIONS:
            found = await ask(method, path, mine)
            assert found[0] in (200, 201, 202), (method, path, found)
            assert found == await ask(method, path, nobodys), (method, path)
        assert [(await owner.get(path)).json() for path in shown] == before
        assert run.stops == []
        names = {each["task"] for each in (await other.get(FEED)).json()["entries"]}
        assert names == {"owners-task", "nobodys-task", "owners-group", "nobodys-group"}
        # The first admin sees all.
        async with client_of(app, FIRST_KEY) as admin:
            for path, was in zip(shown[:4], before, strict=False):
                start, _, name = path.rpartition("/")
                seen = (await admin.get(f"{start}/owner~{name}")).json()
                assert {**seen, "id": 0, "group": 0} == {**was, "id": 0, "group": 0}, path


async def test_each_tenants_feed_is_numbered_separately(run: TenantRun) -> None:
    app = run.app()
    keys = [await new_key(app, name) for name in ("owner", "other")]

    def tasks(*ids: str) -> dict[str, Any]:
        return {"environment": "guessing", "tasks": [{"id": each, "seed": 1} for each in ids]}

    async def told(client: httpx.AsyncClient, after: int = 0) -> list[tuple[Any, ...]]:
        answer = (await client.get(FEED, params={"after": after})).json()
        found = [(each["number"], each["kind"], each["task"]) for each in answer["entries"]]
        assert answer["next"] == (found[-1][0] if found else after)
        return found

    async with client_of(app, keys[0]) as owner, client_of(app, keys[1]) as other:
        await other.post(ROLLOUTS, json=tasks("t", "u", "v"))
        await owner.post(ROLLOUTS, json=tasks("t"))
        await other.post(f"{ROLLOUTS}/u/cancel")
        await owner.post(ROLLOUTS, json=tasks("w"))
        assert await told(owner) == [(1, "accepted", "t"), (2, "accepted", "w")]
        assert await told(owner, 1) == [(2, "accepted", "w")]
        assert await told(owner, 2) == []
        events = await owner.get("/api/v1/events", headers={"last-event-id": "1"})
        assert "id: 2\n" in events.text and '"w"' in events.text and '"t"' not in events.text
        waiting = asyncio.create_task(
            owner.get(FEED, params={"after": 2}, headers={"prefer": "wait=20"})
        )
        await other.post(f"{ROLLOUTS}/v/cancel")
        assert not (await asyncio.wait({waiting}, timeout=0.5))[0]
        await owner.post(f"{ROLLOUTS}/w/cancel")
        assert [each["number"] for each in (await waiting).json()["entries"]] == [3]
        async with client_of(app, FIRST_KEY) as admin:
            found = await told(admin)
            assert [number for number, _, _ in found] == list(range(1, 9))
            assert {name for _, _, name in found} == {
                "other~t", "other~u", "other~v", "owner~t", "owner~w",
            }  # fmt: skip
        # After pruning, each tenant's feed keeps its own numbers, which continue.
        store = run.service.store
        store.write_of_no_term(partial(prune_feed, keep=1))
        for client, cut, kept in ((owner, 1, 2), (other, 4, 5)):
            gone = await client.get(FEED, params={"after": cut})
            assert gone.status_code == 410 and f"after={kept}," in gone.json()["detail"]
            await told(client, kept)
        # An entry for all tenants is in each feed, with its numbers, and once in the run's feed.
        entry = FeedEntry(at=1.0, kind=FeedKind.WENT_BACK, step=0, void_after=7)
        store.write_of_no_term(partial(tell_all, entry=entry))
        async with client_of(app, FIRST_KEY) as admin:
            for client, after, number, void in (
                (owner, 3, 4, 2),
                (other, 5, 6, 5),
                (admin, 8, 9, 7),
            ):
                (back,) = (await client.get(FEED, params={"after": after})).json()["entries"]
                assert (back["number"], back["void_after"]) == (number, void)


async def test_an_upload_is_seen_and_deleted_only_by_its_tenant(run: TenantRun) -> None:
    app = run.app()
    keys = [await new_key(app, name) for name in ("owner", "other")]
    few = await new_key(app, "few", tenant="owner", limits={"max_waiting_tasks": 1})

    def body(*names: str, group: str, close: bool = False) -> dict[str, Any]:
        found = [item(name, group=group, sample={"versions": VERSIONS}) for name in names]
        groups = [{"id": group, "close": True}] if close else []
        return {**BODIES[UPLOADS], "trajectories": found, "groups": groups}

    async with client_of(app, keys[0]) as owner, client_of(app, keys[1]) as other:
        for client in (owner, other):
            assert (await client.get("/api/v1/policy")).status_code == 200
            sampled = await client.post("/api/v1/generate", json={"token_ids": [1, 2]})
            assert sampled.status_code == 200, sampled.text
            sent = await client.post(UPLOADS, json=body("a", group="g"))
            assert sent.json()["accepted"] == ["a"] and sent.json()["groups"][0]["id"] == "g"
        assert (await other.get(f"{UPLOADS}/a")).json()["group"] == "g"
        assert (await other.delete(f"{UPLOADS}/groups/g")).json()["id"] == "g"
        assert (await other.get(f"{UPLOADS}/a")).status_code == 404
        assert (await owner.get(f"{UPLOADS}/a")).json()["id"] == "a"
        # A complete group becomes a task of the tenant and counts for the key that completed it.
        sent = await owner.post(UPLOADS, json=body("b", group="g", close=True))
        assert sent.json()["groups"][0]["is_submitted"] is True
        assert (await owner.get(f"{ROLLOUTS}/g")).json()["id"] == "g"
        assert (await other.get(f"{ROLLOUTS}/g")).status_code == 404
        assert [each["task"] for each in (await owner.get(FEED)).json()["entries"]] == ["g"]
    assert [each.tenant for each in run.port.policy.requests] == ["owner", "other"]
    async with client_of(app, few) as client:
        assert (await client.post(UPLOADS, json=body("c", "d", group="h", close=True))).is_success
        held = await client.post(UPLOADS, json=body("e", "f", group="i", close=True))
        assert held.status_code == 429 and held.json()["code"] == "quota"
    assert len(await run.service.admit()) == 2
    played = [
        await run.uploads.play(each)
        for each in take_all(run.service.queue, environments=(UPLOADED,))
    ]
    assert {each.task_id for each in played} == {"owner~g", "owner~h"}
    assert {each.outcome for each in played} == {Outcome.COMPLETED}


async def test_an_id_is_taken_only_within_its_tenant(run: TenantRun) -> None:
    """Check that a tenant's answers do not depend on the ids of another tenant."""
    app = run.app()
    keys = [await new_key(app, name) for name in ("owner", "other")]
    async with client_of(app, keys[0]) as owner, client_of(app, keys[1]) as other:
        body = {"environment": "guessing", "tasks": [{"id": "t", "seed": 1}]}
        assert (await owner.post(ROLLOUTS, json=body)).json()["accepted"] == 1
        assert (await owner.post(ROLLOUTS, json=body)).json()["accepted"] == 0
        changed = {"environment": "guessing", "tasks": [{"id": "t", "seed": 2}]}
        assert (await owner.post(ROLLOUTS, json=changed)).status_code == 409
        named = {"idempotency-key": "k"}
        foreign = await other.post(ROLLOUTS, json=changed, headers=named)
        assert foreign.status_code == 202 and foreign.headers["location"] == f"{ROLLOUTS}/t"
        assert foreign.json()["rollouts"][0]["id"] == "t" and foreign.json()["accepted"] == 1
        assert (await owner.post(ROLLOUTS, json=body, headers=named)).status_code == 202
        assert (await other.post(f"{ROLLOUTS}/t/cancel")).json()["id"] == "t"
        statuses = [(await each.get(f"{ROLLOUTS}/t")).json()["status"] for each in (owner, other)]
        assert statuses == ["queued", "cancelled"]
        assert (await other.get(f"{ROLLOUTS}/owner~t")).status_code == 404
        assert (await other.get(f"{ROLLOUTS}/other~t")).json()["id"] == "t"
        marked = {"environment": "guessing", "tasks": [{"id": "owner~u"}]}
        assert (await other.post(ROLLOUTS, json=marked)).status_code == 422
    second = await new_key(app, "boss", scope="admin", tenant="owner")
    async with client_of(app, FIRST_KEY) as admin, client_of(app, second) as boss:
        assert (await admin.post(ROLLOUTS, json=body)).json()["accepted"] == 1
        listed = (await admin.get(ROLLOUTS)).json()["rollouts"]
        assert [each["id"] for each in listed] == ["owner~t", "other~t", "t"]
        listed = (await boss.get(ROLLOUTS)).json()["rollouts"]
        assert [each["id"] for each in listed] == ["t", "other~t", "~t"]
        for client in (admin, boss):
            for each in (await client.get(ROLLOUTS)).json()["rollouts"]:
                assert (await client.get(f"{ROLLOUTS}/{each['id']}")).json()["id"] == each["id"]


async def test_lists_contain_only_objects_of_the_callers_tenant(run: TenantRun) -> None:
    app = run.app()
    keys = {name: await new_key(app, name) for name in ("owner", "other")}
    second = await new_key(app, "second", tenant="owner")

    async def listed(key: str) -> tuple[list[str], list[str]]:
        async with client_of(app, key) as client:
            # Both tenants have a batch of this name.
            rollouts = (await client.get(ROLLOUTS, params={"limit": 2, "batch": "b"})).json()
            sessions = (await client.get(SESSIONS, params={"limit": 2})).json()
        return [each["id"] for each in rollouts["rollouts"]], [
            each["id"] for each in sessions["sessions"]
        ]

    for name, key in keys.items():
        async with client_of(app, key) as client:
            body = {"environment": "guessing", "tasks": [{"id": f"{name}-t", "seed": 1}]}
            assert (await client.post(ROLLOUTS, json={**body, "batch": "b"})).status_code == 202
            created = await client.post(SESSIONS, json={"id": f"{name}-g", "batch": "b"})
            assert created.status_code == 201
    for name, key in keys.items():
        expected = ([f"{name}-t", f"{name}-g"], [f"{name}-g-0", f"{name}-g-1"])
        assert await listed(key) == expected
    assert await listed(second) == await listed(keys["owner"])
    async with client_of(app, keys["other"]) as other:
        foreign = await other.get(SESSIONS, params={"group": "owner-g"})
        assert foreign.json() == {"sessions": [], "next": None}
    async with client_of(app, FIRST_KEY) as admin:
        assert len((await admin.get(ROLLOUTS)).json()["rollouts"]) == 4
        assert len((await admin.get(SESSIONS)).json()["sessions"]) == 4
    # An ended task is still seen only by its tenant.
    async with client_of(app, keys["owner"]) as owner:
        assert (await owner.post(f"{ROLLOUTS}/owner-t/cancel")).status_code == 200
    await run.service.commit()
    assert "owner-t" in (await listed(keys["owner"]))[0]
    assert (await listed(keys["other"]))[0] == ["other-t", "other-g"]


async def test_a_group_is_joined_and_closed_only_by_its_tenant(run: TenantRun) -> None:
    app = run.app()
    keys = [await new_key(app, name) for name in ("owner", "other")]
    async with client_of(app, keys[0]) as owner, client_of(app, keys[1]) as other:
        body = {"id": "g", "session": "a"}
        first = await owner.post(SESSIONS, json=body)
        assert first.status_code == 201 and first.json()["sessions"][0]["id"] == "g-0"
        assert (await owner.post(SESSIONS, json=body)).json()["sessions"] == first.json()[
            "sessions"
        ]
        foreign, unknown = [
            await other.post(f"{SESSIONS}/{group}/close") for group in ("g", "nobodys")
        ]
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.text.replace("nobodys", "g") == unknown.text.replace("nobodys", "g")
        assert await run.port.claim("owner~g", "c", "other") is None
        # Another tenant's group of this name is a different group.
        theirs = await other.post(SESSIONS, json={"id": "g"})
        assert theirs.status_code == 201 and len(theirs.json()["sessions"]) == 2
        joined = await owner.post(SESSIONS, json={"id": "g", "session": "b"})
        assert joined.json()["sessions"][0]["id"] == "g-1"
        assert (await owner.post(f"{SESSIONS}/g/close")).json() == {"given_up": 0}


async def test_an_idempotency_key_counts_only_within_its_tenant(run: TenantRun) -> None:
    app = run.app()
    keys = [await new_key(app, name) for name in ("owner", "other")]
    named = {"Idempotency-Key": "first"}

    def tasks(name: str) -> dict[str, Any]:
        return {"environment": "guessing", "tasks": [{"id": name, "seed": 1}]}

    async with client_of(app, keys[0]) as owner, client_of(app, keys[1]) as other:
        assert (await owner.post(ROLLOUTS, json=tasks("a"), headers=named)).status_code == 202
        reused = await owner.post(ROLLOUTS, json=tasks("b"), headers=named)
        assert (reused.status_code, reused.json()["code"]) == (422, "idempotency-key-reused")
        assert (await other.post(ROLLOUTS, json=tasks("b"), headers=named)).status_code == 202


async def test_a_clients_key_may_reward_sessions_of_its_tenant(run: TenantRun) -> None:
    app = run.app()
    keys = {name: await new_key(app, name) for name in ("owner", "other")}
    second = await new_key(app, "second", tenant="owner")
    async with client_of(app, keys["owner"]) as owner:
        session = (await made_by(owner, run))["sessions"][0]
        chat, finish = f"/sessions/{session['id']}", f"{SESSIONS}/{session['id']}/finish"
        agent = bearer(session["agent_key"])
        assert (
            await owner.post(f"{chat}/v1/chat/completions", json=HELLO, headers=agent)
        ).status_code == 200
        assert [each.tenant for each in run.port.policy.requests] == ["owner"]
        body = {"reward": 0.5}
        for key, status in ((session["agent_key"], 403), (keys["other"], 404), ("x" * 600, 404)):
            answer = await owner.post(finish, json=body, headers=bearer(key))
            assert answer.status_code == status, answer.text
        whole = f"owner~{session['id']}"
        admins = f"{SESSIONS}/{whole}/finish"
        for url, key, name in (
            (finish, second, session["id"]),
            (finish, keys["owner"], session["id"]),
            (finish, session["reward_key"], session["id"]),
            (admins, session["reward_key"], session["id"]),
            (admins, FIRST_KEY, whole),
        ):
            answer = await owner.post(url, json=body, headers=bearer(key))
            assert answer.status_code == 200, answer.text
            assert (answer.json()["reward"], answer.json()["id"]) == (0.5, name)
