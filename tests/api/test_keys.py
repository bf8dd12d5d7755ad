"""Named keys: who may ask for what, what another tenant is shown, and how much one may ask for."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from typer.testing import CliRunner
from worlds.builders.queue_builders import take_all
from worlds.parts.tenant_world import FIRST_KEY, TenantRun, client_of, new_key, tenants
from worlds.parts.upload_world import FACTS, item

from actors.types import UPLOADED, Outcome
from service.access.rates import Rates
from service.api.callers import FRESH_S, is_for_clients
from service.api.guards import OPEN_PATHS, has_own_keys
from service.api.problems import RunUnavailable
from service.cli.main import app as command_line
from service.config.file import ConfigError
from service.intake.feed import FeedEntry, FeedKind
from service.store.feed import prune_feed, tell_all
from service.store.place import sqlite_url
from service.store.run_store import RunStore

ROLLOUTS, SESSIONS, KEYS = "/api/v1/rollouts", "/api/v1/sessions", "/api/v1/keys"
UPLOADS, FEED = "/api/v1/trajectories", "/api/v1/feed"
VERSIONS = [{"version": 3, "start": 2, "end": 6}]
HELLO = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
# What is sent to each route that takes a body; one that is not here fails the walk.
BODIES: dict[str, dict[str, Any]] = {
    ROLLOUTS: {"environment": "guessing", "tasks": [{"id": "ID", "seed": 1}]},
    f"{ROLLOUTS}/{{rollout_id}}/cancel": {},
    SESSIONS: {"id": "ID"},
    f"{SESSIONS}/{{group}}/close": {},
    f"{SESSIONS}/{{name}}/finish": {"reward": 1.0},
    f"{SESSIONS}/{{name}}/reward": {"reward": 1.0},
    "/v1/chat/completions": HELLO,
    "/v1/messages": {**HELLO, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": HELLO["messages"]},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/{rest:path}": {},
    "/v1/responses": {"model": "any", "input": "hi"},
    "/api/v1/stop": {},
    KEYS: {"name": "mine", "tenant": "mine"},
    "/api/v1/control/{part}/pause": {"reason": ""},
    "/api/v1/control/{part}/resume": {},
    "/api/v1/checkpoints": {},
    "/api/v1/checkpoints/{checkpoint}/return": {},
    "/api/v1/evaluations": {},
    UPLOADS: {
        "tokenizer_fingerprint": FACTS.tokenizer_fingerprint,
        "trajectories": [item("ID", group="ID", sample={"versions": VERSIONS})],
    },
    "/api/v1/generate": {"token_ids": [1, 2]},
}
# These make something, whatever another tenant has of that name.
CREATIONS = [("POST", ROLLOUTS), ("POST", SESSIONS), ("POST", UPLOADS)]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[TenantRun]:
    async with tenants(tmp_path) as run:
        yield run


async def made_by(client: httpx.AsyncClient, run: TenantRun) -> dict[str, Any]:
    """A task and a group of sessions, admitted, and a trajectory of a group that is not complete;
    the answer with the sessions."""
    tasks = {"environment": "guessing", "tasks": [{"id": "owners-task", "seed": 1}]}
    assert (await client.post(ROLLOUTS, json=tasks)).status_code == 202
    created = await client.post(SESSIONS, json={"id": "owners-group"})
    assert created.status_code == 201, created.text
    await run.port.admit()
    text = json.dumps(BODIES[UPLOADS]).replace("ID", "owners-upload")
    uploaded = await client.post(UPLOADS, json=json.loads(text))
    assert uploaded.json()["accepted"] == ["owners-upload"], uploaded.text
    answer: dict[str, Any] = created.json()
    return answer


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_bucket_fills_at_its_rate_and_holds_its_burst() -> None:
    clock = [0.0]
    rates = Rates(now=lambda: clock[0])
    assert [rates.take("a", per_s=0.5, burst=2) for _ in range(3)] == [0, 0, 2]
    assert rates.take("b", per_s=0.5, burst=2) == 0
    clock[0] = 1.0
    assert rates.take("a", per_s=0.5, burst=2) == 1
    clock[0] = 100.0
    assert [rates.take("a", per_s=0.5, burst=2) for _ in range(3)] == [0, 0, 2]


def walked(app: FastAPI) -> list[tuple[str, str]]:
    """Every method and path of the application."""
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    return sorted({(method, route.path) for route in routes for method in route.methods})


def with_ids(path: str, *, task: str, group: str, session: str, upload: str = "u") -> str:
    """A route's path, for what has these ids."""
    by_name = {"rollout_id": task, "group": group, "name": session}
    if path.startswith(UPLOADS):
        by_name = {"group": upload, "name": upload}
    by_name |= {"part": "training", "checkpoint": "step-000001-t1", "operation": "op-1"}
    by_name["environment_id"] = "guessing"
    return re.sub(r"\{(\w+)\}", lambda found: by_name[found[1]], path)


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
            """The answer, as if every id were ID."""
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
            # The policy of these tests counts its turns.
            text = re.sub(r'"token_ids":\[\d+', "", text)
            return answer.status_code, re.sub(r"[0-9a-f]{64}", "MARK", text)

        def whole(ids: dict[str, str]) -> dict[str, str]:
            return {name: f"owner~{each}" for name, each in ids.items()}

        for theirs, none in ((mine, nobodys), (whole(mine), whole(nobodys))):
            for method, path in walked(app):
                if (method, path) in CREATIONS:
                    continue
                found = await ask(method, path, theirs)
                # What others have is told as what is not there.
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


async def test_a_tenants_feed_counts_for_itself_alone(run: TenantRun) -> None:
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
        # What is cut is cut for each by its own numbers, which go on.
        store = run.service.store
        store.write_of_no_term(partial(prune_feed, keep=1))
        for client, cut, kept in ((owner, 1, 2), (other, 4, 5)):
            gone = await client.get(FEED, params={"after": cut})
            assert gone.status_code == 410 and f"after={kept}," in gone.json()["detail"]
            await told(client, kept)
        # What is told to all stands in each feed, in its numbers, and in the run's own once.
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


async def test_a_client_uploads_what_its_tenant_alone_sees_and_drops(run: TenantRun) -> None:
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
        # What is complete is a task of the tenant's, and counts for the key that completes it.
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


async def test_an_id_is_taken_within_its_tenant_alone(run: TenantRun) -> None:
    """What one tenant's requests are answered is the same whatever another has."""
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


async def test_a_key_is_shown_once_and_nothing_keeps_it(
    run: TenantRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    app = run.app()
    key = await new_key(app, "owner")
    async with client_of(app, FIRST_KEY) as admin, client_of(app, key) as owner:
        listed = await admin.get(KEYS)
        again = await admin.post(KEYS, json={"name": "owner", "tenant": "x"})
        assert again.status_code == 409
        refused = await owner.get(KEYS)
        assert refused.status_code == 403
        created = await owner.post(SESSIONS, json={"id": "g"})
        assert created.headers["cache-control"] == "no-store"
        wrong = await owner.get(f"{ROLLOUTS}/x", headers=bearer(key + "x"))
        assert wrong.status_code == 401
    (entry,) = listed.json()["keys"]
    assert entry["name"] == "owner" and entry["revoked_at"] is None and "digest" not in entry
    run.service.store.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("run.db*"))
    texts = [caplog.text, listed.text, again.text, refused.text, created.text, wrong.text]
    assert key.encode() not in stored and not any(key in text for text in texts)
    session_keys = [each[name] for each in created.json()["sessions"] for name in
                    ("agent_key", "reward_key")]  # fmt: skip
    assert not any(each.encode() in stored for each in session_keys)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"name": "a"}, "needs a tenant"),
        ({"name": "a/b", "tenant": "t"}, "name"),
        ({"name": "a", "tenant": "no spaces"}, "tenant"),
        ({"name": "a", "tenant": "t", "scope": "root"}, "scope"),
        ({"name": "a", "tenant": "t", "limits": {"requests_per_s": 0}}, "requests_per_s"),
        ({"name": "a", "tenant": "t", "limits": {"anything": 1}}, "anything"),
    ],
)
async def test_a_key_that_cannot_be_is_refused(
    run: TenantRun, body: dict[str, Any], words: str
) -> None:
    async with client_of(run.app(), FIRST_KEY) as admin:
        answer = await admin.post(KEYS, json=body)
    assert answer.status_code == 422 and words in answer.json()["detail"], answer.text


async def test_a_clients_key_is_no_admins(run: TenantRun) -> None:
    app = run.app()
    client_key, admin_key = await new_key(app, "c"), await new_key(app, "a", scope="admin")
    async with client_of(app) as client:
        for method, path in (("POST", "/api/v1/stop"), ("GET", KEYS), ("GET", "/api/v1/new")):
            body = {} if method == "POST" else None
            refused = await client.request(method, path, json=body, headers=bearer(client_key))
            assert refused.status_code == 403 and refused.json()["code"] == "admin-only"
            allowed = await client.request(method, path, json=body, headers=bearer(admin_key))
            assert allowed.status_code != 403
            none = await client.request(method, path, json=body)
            assert none.status_code == 401
    assert run.stops == [None]
    (noted,) = run.noted
    assert (noted.caller, noted.call, noted.status) == ("a", "POST /api/v1/stop", 202)


async def test_a_client_reads_what_is_the_same_for_all_and_nothing_of_operators(
    run: TenantRun,
) -> None:
    app = run.app()
    key = await new_key(app, "c")
    async with client_of(app, key) as client:
        for path in ("environments", "environments/guessing"):
            assert (await client.get(f"/api/v1/{path}")).status_code == 200
        for method, path in walked(app):
            if is_for_clients(path) or has_own_keys(path) or path in OPEN_PATHS:
                continue
            url = with_ids(path, task="t", group="g", session="g-0")
            answer = await client.request(method, url, json={})
            assert (answer.status_code, answer.json()["code"]) == (403, "admin-only"), path
    for path in ("run", "journal", "rollouts/t/trajectory", "sessions/g/more", "feed/x"):
        assert not is_for_clients(f"/api/v1/{path}")


async def test_lists_are_of_the_callers_tenant(run: TenantRun) -> None:
    app = run.app()
    keys = {name: await new_key(app, name) for name in ("owner", "other")}
    second = await new_key(app, "second", tenant="owner")

    async def listed(key: str) -> tuple[list[str], list[str]]:
        async with client_of(app, key) as client:
            # Both tenants' batches have this name.
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
    # What is over is still its tenant's alone.
    async with client_of(app, keys["owner"]) as owner:
        assert (await owner.post(f"{ROLLOUTS}/owner-t/cancel")).status_code == 200
    await run.service.commit()
    assert "owner-t" in (await listed(keys["owner"]))[0]
    assert (await listed(keys["other"]))[0] == ["other-t", "other-g"]


async def test_groups_are_joined_and_closed_by_their_tenant_alone(run: TenantRun) -> None:
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
        # Another's group of this name is another group.
        theirs = await other.post(SESSIONS, json={"id": "g"})
        assert theirs.status_code == 201 and len(theirs.json()["sessions"]) == 2
        joined = await owner.post(SESSIONS, json={"id": "g", "session": "b"})
        assert joined.json()["sessions"][0]["id"] == "g-1"
        assert (await owner.post(f"{SESSIONS}/g/close")).json() == {"given_up": 0}


async def test_an_idempotency_key_is_its_tenants_own(run: TenantRun) -> None:
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


async def test_a_key_is_good_at_once_and_revoked_within_seconds_everywhere(run: TenantRun) -> None:
    """Two replicas, of which each has known keys for a while, and the gateway."""
    one, two = run.app(), run.app()
    looking = asyncio.create_task(run.port.sessions.look_forever())
    first = await new_key(one, "first")
    async with client_of(one) as at_one, client_of(two) as at_two:
        for client in (at_one, at_two):
            assert (await client.get(f"{ROLLOUTS}/x", headers=bearer(first))).status_code == 404
        key = await new_key(one, "owner")
        for client in (at_two, at_one):
            assert (await client.get(f"{ROLLOUTS}/x", headers=bearer(key))).status_code == 404
        async with client_of(two, key) as owner:
            session = (await made_by(owner, run))["sessions"][0]
        chat = f"/sessions/{session['id']}/v1/chat/completions"
        agent = bearer(session["agent_key"])
        assert (await at_two.post(chat, json=HELLO, headers=agent)).status_code == 200
        revoked = await at_one.delete(f"{KEYS}/owner", headers=bearer(FIRST_KEY))
        assert revoked.json()["revoked_at"] is not None
        again = await at_two.delete(f"{KEYS}/owner", headers=bearer(FIRST_KEY))
        assert again.json() == revoked.json()
        await asyncio.sleep(FRESH_S + 0.1)
        for client in (at_one, at_two):
            assert (await client.get(f"{ROLLOUTS}/x", headers=bearer(key))).status_code == 401
            assert (await client.get(f"{ROLLOUTS}/x", headers=bearer(first))).status_code == 404
        # A name is given once, and the keys of what it created went with it.
        taken = await at_one.post(
            KEYS, json={"name": "owner", "tenant": "owner"}, headers=bearer(FIRST_KEY)
        )
        assert taken.status_code == 409
        late = await at_two.post(chat, json=HELLO, headers=agent)
        assert late.status_code == 401 and "revoked" in late.json()["error"]["message"]
        finish = f"{SESSIONS}/{session['id']}/finish"
        reward = bearer(session["reward_key"])
        assert (await at_two.post(finish, json={"reward": 1}, headers=reward)).status_code == 401
        assert (
            await at_two.delete(f"{SESSIONS}/owner~{session['id']}", headers=bearer(FIRST_KEY))
        ).json()["status"] == "discarded"
    looking.cancel()


async def test_a_clients_key_rewards_its_tenants_sessions(run: TenantRun) -> None:
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


async def test_a_key_has_its_own_limits(run: TenantRun) -> None:
    app = run.app()

    def tasks(*ids: str) -> dict[str, Any]:
        return {"environment": "guessing", "tasks": [{"id": each, "seed": 1} for each in ids]}

    def is_held(answer: httpx.Response, code: str, limit: str) -> bool:
        body = answer.json()
        assert answer.status_code == 429 and 1 <= int(answer.headers["retry-after"]) <= 60
        return body["code"] == code and limit in body["detail"]

    slow = await new_key(app, "slow", limits={"requests_per_s": 0.2})
    few = await new_key(app, "few", limits={"max_waiting_tasks": 2})
    open_one = await new_key(app, "open", limits={"max_open_sessions": 2, "turns_per_minute": 1})
    async with client_of(app, slow) as client:
        assert (await client.get(f"{ROLLOUTS}/x")).status_code == 404
        assert is_held(await client.get(f"{ROLLOUTS}/x"), "too-many-requests", "requests_per_s")
    async with client_of(app, few) as client:
        large = await client.post(ROLLOUTS, json=tasks("a", "b", "c"))
        assert large.status_code == 413 and "max_waiting_tasks" in large.json()["detail"]
        assert (await client.post(ROLLOUTS, json=tasks("a", "b"))).status_code == 202
        assert is_held(
            await client.post(ROLLOUTS, json=tasks("a", "b", "c")), "quota", "max_waiting_tasks"
        )
        # What is known already is no more.
        assert (await client.post(ROLLOUTS, json=tasks("a", "b"))).status_code == 202
    # Another key has room; what is admitted waits no more.
    async with client_of(app, FIRST_KEY) as admin:
        assert (await admin.post(ROLLOUTS, json=tasks("c", "d", "e"))).status_code == 202
    await run.port.admit()
    async with client_of(app, few) as client:
        assert (await client.post(ROLLOUTS, json=tasks("f"))).status_code == 202
    async with client_of(app, open_one) as client:
        assert (await client.post(SESSIONS, json={"id": "g"})).status_code == 201
        assert is_held(await client.post(SESSIONS, json={"id": "h"}), "quota", "max_open_sessions")
        assert (await client.post(f"{ROLLOUTS}/g/cancel")).status_code == 200
        assert (await client.post(SESSIONS, json={"id": "h"})).status_code == 201
        # Behind the limits of the gateway's own reading of the keys.
        run.port.sessions._keys.update(await run.keys())
        while len(run.port.playing) < 2:
            await run.port.admit()
            run.service.play()
            await run.service.train()
        session = (await client.post(SESSIONS, json={"id": "h"})).json()["sessions"][0]
        chat, agent = f"/sessions/{session['id']}/v1/chat/completions", session["agent_key"]
        assert (await client.post(chat, json=HELLO, headers=bearer(agent))).status_code == 200
        late = await client.post(chat, json=HELLO, headers=bearer(agent))
        assert late.status_code == 429 and 1 <= int(late.headers["retry-after"]) <= 60
        assert "turns_per_minute" in late.json()["error"]["message"]
        # What is sampled without a session counts too.
        late = await client.post("/api/v1/generate", json={"token_ids": [1]})
        assert late.status_code == 429 and "turns_per_minute" in late.json()["detail"]


async def test_guesses_cost_the_supervisor_no_more_than_a_few_readings(run: TenantRun) -> None:
    app = run.app()
    key = await new_key(app, "owner")
    async with client_of(app) as client:
        assert (await client.get(f"{ROLLOUTS}/x", headers=bearer(key))).status_code == 404
        before = run.num_key_reads
        guesses = [client.get("/docs", headers=bearer(f"rk_{each}")) for each in range(40)]
        assert {answer.status_code for answer in await asyncio.gather(*guesses)} == {401}
    assert run.num_key_reads - before <= 3


async def test_a_run_that_does_not_answer_leaves_the_keys_that_were_known(run: TenantRun) -> None:
    app = run.app()
    key = await new_key(app, "owner")
    async with client_of(app) as known, client_of(run.app()) as fresh:
        assert (await known.get("/docs", headers=bearer(key))).status_code == 200
        run.is_gone, run.silent_s = True, 30.0
        # A key that may have been revoked is waited for; not for as long as the run is silent.
        app.state.callers._read_at -= FRESH_S
        began = time.monotonic()
        asked = [known.get("/docs", headers=bearer(key)) for _ in range(5)]
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert time.monotonic() - began < 5.0
        run.silent_s = 0.0
        assert (await fresh.get("/docs", headers=bearer(key))).status_code == 503
        assert (await fresh.get("/docs", headers=bearer(FIRST_KEY))).status_code == 200
    with pytest.raises(RunUnavailable):
        await run.keys()


async def test_a_run_without_keys_is_open_until_it_has_one(run: TenantRun) -> None:
    """Also when that one is revoked: the last revocation opens nothing."""
    app = run.app(first_digest=None)
    async with client_of(app) as client:
        assert (await client.get("/docs", headers=bearer("anything"))).status_code == 200
        created = await client.post(KEYS, json={"name": "a", "scope": "admin"})
        assert created.status_code == 201
        key = bearer(created.json()["key"])
        assert (await client.get(KEYS, headers=key)).status_code == 200
        assert (await client.get(KEYS)).status_code == 401
        assert (await client.delete(f"{KEYS}/a", headers=key)).status_code == 200
    async with client_of(run.app(first_digest=None)) as client:
        assert (await client.get(KEYS)).status_code == 401


async def test_headers_have_a_number_and_a_size(run: TenantRun) -> None:
    async with client_of(run.app(), FIRST_KEY) as client:
        for headers in ({f"x-{each}": "1" for each in range(101)}, {"x-long": "x" * 33_000}):
            answer = await client.get("/healthz", headers=headers)
            assert answer.status_code == 431 and answer.json()["code"] == "headers-too-large"
        long = await client.get(f"{ROLLOUTS}/x", headers=bearer("x" * 600))
        assert long.status_code == 401 and len(long.text) < 1000


def test_the_command_line_creates_lists_and_revokes(tmp_path: Path) -> None:
    RunStore(sqlite_url(tmp_path)).close()
    runner = CliRunner()

    def say(word: str, *words: str) -> str:
        result = runner.invoke(command_line, ["keys", word, str(tmp_path), *words])
        if isinstance(result.exception, ConfigError):
            return str(result.exception)
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    key = say("create", "ci", "--tenant", "team-a", "--requests-per-s", "5")
    assert re.fullmatch(r"rk_[\w-]{43}", key)
    listed = say("list")
    assert "ci  client  team-a" in listed and "in force  requests_per_s=5" in listed
    assert "name" in say("create", "ci", "--tenant", "team-a")
    assert "needs a tenant" in say("create", "other")
    assert "revoked" in say("revoke", "ci") and "revoked" in say("list")
    assert "no key with the name" in say("revoke", "nobody")
    assert key not in listed and key.encode() not in (tmp_path / "rayloom.db").read_bytes()
    older = runner.invoke(command_line, ["keys", "create", "cd", "--run", str(tmp_path)])
    assert "needs a tenant" in str(older.exception)
    for words in (["list", str(tmp_path / "nothing")], ["list"], ["revoke", "ci"]):
        refused = runner.invoke(command_line, ["keys", *words])
        assert isinstance(refused.exception, ConfigError)
