"""Tests of the API's limits for all keys, and of the code that no body can reach."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from worlds.parts.tenant_world import FIRST_KEY, SETTINGS, TenantRun, client_of, tenants

REPOSITORY = Path(__file__).parents[2]
# All packages that read what clients send, before it becomes a task or a turn.
BORDER = ("service/api", "service/access", "service/gateway", "service/intake")
# Modules that could run, unpack, start or fetch something that a body names.
FORBIDDEN = {
    "pickle", "cloudpickle", "dill", "marshal", "shelve", "importlib", "runpy", "subprocess",
    "urllib", "http", "httpx", "requests", "aiohttp", "zlib", "gzip", "zipfile", "tarfile",
}  # fmt: skip
SESSIONS = "/api/v1/sessions"


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[TenantRun]:
    async with tenants(tmp_path) as run:
        yield run


async def test_only_conversations_may_be_large(run: TenantRun) -> None:
    """Allow large bodies only for agents' requests, which contain a whole history."""
    most = SETTINGS.service.max_body_kib << 10
    large = {"model": "any", "messages": [{"role": "user", "content": "x" * most}]}
    async with client_of(run.app(), FIRST_KEY) as client:
        small = (f"{SESSIONS}/a-0/finish", f"{SESSIONS}/a-0/close", "/api/v1/rollouts")
        for path in small:
            answer = await client.post(path, json=large)
            assert answer.status_code == 413 and answer.json()["code"] == "body-too-large", path
        reward = await client.put(f"{SESSIONS}/a-0/reward", json=large)
        assert reward.status_code == 413
        for path in ("/v1/chat/completions", "/sessions/a-0/v1/chat/completions"):
            assert (await client.post(path, json=large)).status_code == 404


async def test_the_components_of_a_reward_are_limited(run: TenantRun) -> None:
    async with client_of(run.app(), FIRST_KEY) as client:
        for components in ({str(each): 0.0 for each in range(65)}, {"x" * 129: 0.0}, {"": 0.0}):
            body = {"reward": 1.0, "components": components}
            answer = await client.post(f"{SESSIONS}/a-0/finish", json=body)
            assert answer.status_code == 422 and "components" in answer.json()["detail"]


async def test_the_sessions_of_a_group_are_limited(run: TenantRun) -> None:
    """Refuse a group with too many sessions before deriving their keys."""
    async with client_of(run.app(), FIRST_KEY) as client:
        for number in (1, SETTINGS.service.max_samples_per_task + 1, 10**12):
            answer = await client.post(SESSIONS, json={"id": "a", "num_sessions": number})
            assert answer.status_code == 422 and answer.json()["code"] == "num-samples", number


async def test_the_depth_of_a_conversation_is_limited(run: TenantRun) -> None:
    deep: Any = "x"
    for _ in range(80):
        deep = [deep]
    async with client_of(run.app(), "rl.agent.any-0.mark") as client:
        body = {"model": "any", "messages": [{"role": "user", "content": deep}]}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "64" in answer.json()["error"]["message"]
        # This body is small enough to be read before the gateway knows the key.
        text = '{"messages": ' + "[" * 60_000
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/chat/completions", content=text, headers=headers)
        assert answer.status_code == 400


async def test_an_environment_is_a_registered_name_and_cannot_be_imported(run: TenantRun) -> None:
    async with client_of(run.app(), FIRST_KEY) as client:
        for name in ("os:system", "../guessing", "http://example.org/e.py", "subprocess.Popen"):
            body = {"environment": name, "tasks": [{"id": "a"}]}
            answer = await client.post("/api/v1/rollouts", json=body)
            assert answer.status_code == 422 and answer.json()["code"] == "unknown-environment"


async def test_a_huge_number_is_refused_at_once(run: TenantRun) -> None:
    """Refuse a request with a huge number with 422, before doing any work for it."""
    vast = int("9" * 400)
    bodies: list[dict[str, Any]] = [
        {"num_sessions": 10**30},
        {"num_sessions": 4, "min_usable_sessions": vast},
        {"limits": {"max_turns": vast}},
        {"limits": {"ttl_seconds": vast}},
        {"sampling": {"top_k": vast}},
        {"sampling": {"temperature": vast}},
    ]
    async with client_of(run.app(), FIRST_KEY) as client:
        for body in bodies:
            async with asyncio.timeout(5):
                answer = await client.post(SESSIONS, json={"id": "vast", **body})
            assert answer.status_code == 422 and len(answer.content) < 2000, (body, answer.text)
        for given in (
            {"reward": 1e10},
            {"turn_rewards": {"0": -1e10}},
            {"turn_rewards": {"0": 0.5, "+0": 0.25}},
            {"turn_rewards": {"0": 0.5, " 0 ": 0.25}},
            {"components": {"a": 1e10}},
        ):
            for send, path in ((client.post, "finish"), (client.put, "reward")):
                answer = await send(f"{SESSIONS}/a-0/{path}", json={"reward": 1.0, **given})
                assert answer.status_code == 422, (path, given)


async def test_numbers_in_addresses_and_headers_may_only_have_digits(run: TenantRun) -> None:
    """Refuse forms like +1 and 1.0: pydantic would accept them, the OpenAPI document does not."""
    async with client_of(run.app(), FIRST_KEY) as client:
        for text in ("+1", "1.0", "+0.0", " 1", "1_0", "-1", "\u0661"):
            for path in ("feed?after", "events?after", "rollouts?limit", "rollouts?cursor"):
                answer = await client.get(f"/api/v1/{path}={quote(text)}")
                assert answer.status_code == 422, (path, text)
        for text in ("+1", "1.0", "-1"):
            answer = await client.get("/api/v1/events", headers={"Last-Event-ID": text})
            assert answer.status_code == 422, text
        assert (await client.get("/api/v1/rollouts?limit=1&cursor=0")).status_code == 200


async def test_ids_are_plain(run: TenantRun) -> None:
    """Refuse ids with slashes, path traversal or Unicode, in a body and in a path."""
    async with client_of(run.app(), FIRST_KEY) as client:
        for name in ("../etc", "a/b", "..", "ä", "a\x00b", "a b", "", "x" * 200):
            tasks = {"environment": "guessing", "tasks": [{"id": name}]}
            assert (await client.post("/api/v1/rollouts", json=tasks)).status_code == 422
            assert (await client.post(SESSIONS, json={"id": name})).status_code == 422
        for path in ("%2e%2e", "a%2Fb", "%C3%A4", "a%00b", "..%2f..%2fetc%2fpasswd"):
            for route in (f"{SESSIONS}/{path}", f"/api/v1/rollouts/{path}"):
                assert (await client.get(route)).status_code in (404, 422), route


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield f"call of {node.func.id}"


def test_request_code_does_not_unpickle_import_by_name_start_processes_or_fetch() -> None:
    calls = {f"call of {name}" for name in ("eval", "exec", "__import__", "compile", "open")}
    offenders = [
        f"{path.relative_to(REPOSITORY)}: {found}"
        for folder in BORDER
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        for found in imports_of(path)
        if found.partition(".")[0] in FORBIDDEN or found in calls
    ]
    # The module `http` provides the names of status codes.
    assert offenders == ["service/api/problems.py: http"]


async def test_no_body_has_a_field_for_an_address_or_a_path(run: TenantRun) -> None:
    schemas = run.app().openapi()["components"]["schemas"]
    bodies = {name: schema for name, schema in schemas.items() if name.endswith("Body")}
    assert {"SubmitBody", "SessionsBody", "FinishBody", "KeyBody"} <= bodies.keys()
    names = {f"{body}.{name}" for body, schema in bodies.items() for name in schema["properties"]}
    assert not [name for name in names if re.search(r"url|uri|path|class|module|callback", name)]
    assert all(schema["additionalProperties"] is False for schema in bodies.values())
