"""Tests of named keys: their rights, their limits, and their revocation."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner
from worlds.parts.tenant_routes import (
    HELLO,
    KEYS,
    ROLLOUTS,
    SESSIONS,
    bearer,
    made_by,
    walked,
    with_ids,
)
from worlds.parts.tenant_world import FIRST_KEY, TenantRun, client_of, new_key, tenants

from service.access.keys import Rates
from service.api.bodies import ASKS_HEADER
from service.api.callers import FRESH_S, is_for_clients
from service.api.guards import OPEN_PATHS, has_own_keys
from service.api.problems import RunUnavailable
from service.cli.main import app as command_line
from service.config.file import ConfigError
from service.store.place import sqlite_url
from service.store.run_store import RunStore


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[TenantRun]:
    async with tenants(tmp_path) as run:
        yield run


def test_a_token_bucket_fills_at_its_rate_up_to_its_burst() -> None:
    clock = [0.0]
    rates = Rates(now=lambda: clock[0])
    assert [rates.take("a", per_s=0.5, burst=2) for _ in range(3)] == [0, 0, 2]
    assert rates.take("b", per_s=0.5, burst=2) == 0
    clock[0] = 1.0
    assert rates.take("a", per_s=0.5, burst=2) == 1
    clock[0] = 100.0
    assert [rates.take("a", per_s=0.5, burst=2) for _ in range(3)] == [0, 0, 2]


async def test_a_key_is_shown_once_and_stored_nowhere(
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
async def test_an_invalid_key_request_is_refused(
    run: TenantRun, body: dict[str, Any], words: str
) -> None:
    async with client_of(run.app(), FIRST_KEY) as admin:
        answer = await admin.post(KEYS, json=body)
    assert answer.status_code == 422 and words in answer.json()["detail"], answer.text


async def test_a_clients_key_has_no_admin_rights(run: TenantRun) -> None:
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


async def test_a_client_may_read_common_routes_but_no_operators_routes(
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


async def test_a_key_is_valid_at_once_and_revoked_within_seconds_everywhere(run: TenantRun) -> None:
    """Check this for two replicas of the API, which cache keys, and for the gateway."""
    one, two = run.app(), run.app()
    looking = asyncio.create_task(run.port.sessions.watch())
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
        # A name is not used again, and the keys of the sessions it created are revoked too.
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
        for headers in ({}, {ASKS_HEADER: ""}, {ASKS_HEADER: "GET"}):
            held = await client.get(f"{ROLLOUTS}/x", headers=headers)
            assert is_held(held, "too-many-requests", "requests_per_s")
    async with client_of(app, few) as client:
        large = await client.post(ROLLOUTS, json=tasks("a", "b", "c"))
        assert large.status_code == 413 and "max_waiting_tasks" in large.json()["detail"]
        assert (await client.post(ROLLOUTS, json=tasks("a", "b"))).status_code == 202
        assert is_held(
            await client.post(ROLLOUTS, json=tasks("a", "b", "c")), "quota", "max_waiting_tasks"
        )
        # Known tasks do not count again.
        assert (await client.post(ROLLOUTS, json=tasks("a", "b"))).status_code == 202
    # Another key still has room, and admitted tasks no longer count as waiting.
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
        # Give the gateway the keys now, before it reads them itself.
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
        # Sampling without a session counts too.
        late = await client.post("/api/v1/generate", json={"token_ids": [1]})
        assert late.status_code == 429 and "turns_per_minute" in late.json()["detail"]


async def test_guessed_keys_cost_the_supervisor_only_a_few_reads(run: TenantRun) -> None:
    app = run.app()
    key = await new_key(app, "owner")
    async with client_of(app) as client:
        assert (await client.get(f"{ROLLOUTS}/x", headers=bearer(key))).status_code == 404
        before = run.num_key_reads
        guesses = [client.get("/docs", headers=bearer(f"rk_{each}")) for each in range(40)]
        assert {answer.status_code for answer in await asyncio.gather(*guesses)} == {401}
    assert run.num_key_reads - before <= 3


async def test_known_keys_stay_valid_while_the_run_does_not_answer(run: TenantRun) -> None:
    app = run.app()
    key = await new_key(app, "owner")
    async with client_of(app) as known, client_of(run.app()) as fresh:
        assert (await known.get("/docs", headers=bearer(key))).status_code == 200
        run.is_gone, run.silent_s = True, 30.0
        # The API asks again whether a key was revoked, but not for as long as the run is silent.
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


async def test_a_run_without_keys_is_open_until_the_first_key_exists(run: TenantRun) -> None:
    """Keep the run closed even after its last key was revoked."""
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


async def test_headers_are_limited_in_number_and_size(run: TenantRun) -> None:
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
