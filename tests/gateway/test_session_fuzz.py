"""Tests of the session routes of the real application with requests that no client should send.

Each answer must be one that the route documents, in its form, and the session must work
afterwards.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.parts.gateway_world import Gateway, Policy
from worlds.parts.session_app import Reader, SessionRun

from service.access.keys import AGENT, REWARD, session_key
from service.config.sections import SessionSettings

NUM_REQUESTS = 1500
TOOL = {"type": "object", "properties": {"x": {"type": "string"}}}
CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "any",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 8,
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "so",
                "tool_calls": [
                    {
                        "id": "a",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"x": "1"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "2"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "add", "description": "d", "parameters": TOOL},
            }
        ],
        "tool_choice": "auto",
    },
    "/v1/messages": {
        "model": "any",
        "max_tokens": 8,
        "stream": True,
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "a", "name": "add", "input": {"x": "1"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": "2"}],
            },
        ],
        "tools": [{"name": "add", "description": "d", "input_schema": TOOL}],
    },
    "/v1/responses": {
        "model": "any",
        "stream": True,
        "instructions": "be brief",
        "max_output_tokens": 8,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"x": "1"}'},
            {"type": "function_call_output", "call_id": "a", "output": "2"},
        ],
        "tools": [{"type": "function", "name": "add", "description": "d", "parameters": TOOL}],
    },
}
NATIVE: dict[str, dict[str, Any]] = {
    "": {"id": "other", "task": {"x": 1}, "num_sessions": 2, "limits": {"max_turns": 3}},
    "/finish": {"reward": 0.5, "components": {"a": 1.0}, "turn_rewards": {"0": 1.0}},
    "/reward": {"reward": 0.5, "components": {}, "turn_rewards": {}},
}
STATED = {200, 201, 400, 401, 403, 404, 405, 409, 410, 413, 415, 422}
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 1e308, 0.5, "", " ", "a", "\x00", "\ud800",
    "é\u2028\U0001f600", "<|im_end|>", "x" * 5000, [], {}, [[]], {"": {}}, [None], {"type": "text"},
    {"type": "image_url", "image_url": {"url": "http://localhost"}}, "user", "assistant", "system",
    "tool", "function", "{", "[1]", '{"x": NaN}', "NaN", "../../x", "task-0.0", "resp_task-0.0",
]  # fmt: skip
NAMES = [
    "task-0", "task-1", "nobody-0", "task-0%2F..%2Ftask-1", "..%2F..%2Fapi", "%2e%2e", "task-0%00",
    "%F0%9F%98%80", "%FF", "t" * 4000, "task-0%0d%0aX: y", "task-0;x", "task-0.0", " ", "%20", "*",
]  # fmt: skip
HEADERS = {
    "authorization": ["", "Bearer", "Basic x", "Bearer rl.agent.task-0.x", "é", "Bearer é"],
    "x-api-key": ["", "x", "rl.reward.task-0.1", "rl.agent.nobody-0.x", "é" * 3000],
    "x-rayloom-session": ["", "task-1", "../task-0", "é"],
    "x-rayloom-auxiliary": ["", "1", "maybe", "é"],
    "x-stainless-retry-count": ["", "0", "1", "-1", "x", "9" * 30, "1.5"],
    "idempotency-key": ["", "k", "k" * 4000, "é"],
    "content-type": ["", "text/plain", "application/json; charset=utf-16", "multipart/form-data"],
    "content-encoding": ["gzip", "identity", "br"],
    "host": ["", "example.org", "[::1", "localhost:99999999"],
    "content-length": ["-1", "x", "9" * 30],
}  # fmt: skip


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a tree with each of its keys or indices."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


def mutated(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        found = list(places(body))
        if not found:
            return body
        holder, key = rng.choice(found)
        match rng.randrange(5):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(["n", "stop", "x\x00", "é", "previous_response_id"])] = holder[
                    key
                ]
            case 1:
                holder.insert(key, copy.deepcopy(holder[key]))
            case 2:
                other, place = rng.choice(found)
                holder[key] = copy.deepcopy(other[place])
            case _:
                holder[key] = copy.deepcopy(rng.choice(ODD))
    return body


def corrupted(content: bytes, rng: random.Random) -> bytes:
    """Return a body with corrupted bytes."""
    place = rng.randrange(len(content))
    return rng.choice(
        (
            content[:place],
            content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :],
            content + b"}",
            b"\xff\xfe" + content,
            b"[" * 5000,
            b'{"messages":' + b'{"a":' * 3000,
            b"",
            b"null",
            b"NaN",
            b"\xef\xbb\xbf" + content,
        )
    )


def request_of(rng: random.Random) -> httpx.Request:
    name = "task-0" if rng.random() < 0.7 else rng.choice(NAMES)
    headers = {"content-type": "application/json"}
    method = "POST"
    if rng.random() < 0.7:
        path, body = rng.choice(list(CHATS.items()))
        is_bound = rng.random() < 0.8
        url = f"/sessions/{name}{path}" if is_bound else path
        headers["authorization"] = f"Bearer {session_key('', 'task-0', AGENT)}"
    else:
        path, body = rng.choice(list(NATIVE.items()))
        # These requests are for another session than those above.
        other = "task-1" if name == "task-0" else name
        url = f"/api/v1/sessions/{other}{path}" if path else "/api/v1/sessions"
        headers["authorization"] = f"Bearer {session_key('', 'task-1', REWARD)}"
        method = "PUT" if path == "/reward" else "POST"
    content = json.dumps(mutated(body, rng), allow_nan=True).encode()
    if rng.random() < 0.15:
        content = corrupted(content, rng)
    if rng.random() < 0.2:
        header = rng.choice(list(HEADERS))
        headers[header] = rng.choice(HEADERS[header])
    if rng.random() < 0.03:
        method = rng.choice(("GET", "DELETE", "PATCH", "HEAD", "OPTIONS"))
        url = url.replace("/api/v1/sessions/task-1", "/api/v1/sessions/nobody-0")
    return httpx.Request(
        method,
        f"http://localhost{url}",
        content=content,
        headers=[(key.encode(), value.encode("latin-1")) for key, value in headers.items()],
    )


def check(answer: httpx.Response) -> str:
    """Check an answer and return its kind: the status, "stream", or "late" for a late error."""
    request = answer.request
    assert answer.status_code in STATED | {421}, (request.url, request.content[:500], answer.text)
    if answer.status_code >= 400 and request.method != "HEAD":
        tree = answer.json()
        is_problem = answer.headers["content-type"] == "application/problem+json"
        error = tree if is_problem else tree["error"]
        assert error["detail"] if is_problem else error["message"] and error["type"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("\n\n")
        # On a busy machine an error may come after the first heartbeat.
        is_late = '"error":{' in answer.text
        assert not is_late or answer.text.startswith((": keep-alive", "event: ping"))
        return "late" if is_late else "stream"
    return str(answer.status_code)


async def start_run(directory: Path, policy: Policy | None = None) -> SessionRun:
    gateway = Gateway(
        directory,
        policy=policy or Policy(),
        settings=SessionSettings(hold_s=60.0, max_body_mib=1),
        max_context_tokens=20_000,
    )
    return SessionRun(await gateway.opened())


@pytest.mark.parametrize("seed", range(2))
async def test_any_request_gets_an_answer_that_its_route_documents(
    tmp_path: Path, seed: int
) -> None:
    run = await start_run(tmp_path)
    run.gateway.admit("task-1")
    rng, counts = random.Random(seed), Counter[str]()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=run.app(), raise_app_exceptions=True),
        base_url="http://localhost",
    ) as client:
        for _ in range(NUM_REQUESTS // 2):
            counts[check(await client.send(request_of(rng)))] += 1
    # Some requests were accepted, and some were refused for each kind of reason.
    assert {"stream", "200", "400", "401", "404", "415", "422"} <= set(counts), counts
    view = await run.port.view("task-0")
    assert view is not None and view.totals.num_turns == len(run.gateway.policy.requests)
    await run.gateway.finish(1.0)
    assert (await run.gateway.trajectory()).episode_return == 1.0


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_slow_or_lost_readers_do_not_delay_others(tmp_path: Path) -> None:
    """Check that turns whose reader is gone are not trained; a slow reader delays only itself."""
    gate = asyncio.Event()
    run = await start_run(tmp_path, Policy(before=gate.wait))
    app = run.app()
    headers = {"authorization": f"Bearer {session_key('', 'task-0', AGENT)}"}

    def post(reader: Reader, text: str, *, stream: bool) -> asyncio.Task[bytes]:
        body = {"model": "any", "messages": [{"role": "user", "content": text}], "stream": stream}
        path = "/sessions/task-0/v1/chat/completions"
        return asyncio.create_task(reader.post(path, json.dumps(body).encode(), headers))

    gone = [Reader(app) for _ in range(3)]
    asked = [post(reader, f"gone {n}", stream=n > 0) for n, reader in enumerate(gone)]
    await until(lambda: len(run.gateway.policy.requests) == 3)
    gone[0].left.set()
    gone[1].left.set()
    # The stream of the third reader has begun with a heartbeat.
    await until(lambda: gone[2].parts)
    gone[2].left.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*asked)
    gate.set()
    slow = Reader(app)
    slow.may_read.clear()
    reading = post(slow, "slow", stream=True)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost"
    ) as client:
        assert (await client.get("/healthz")).status_code == 200
    quick = Reader(app)
    assert b"chat.completion" in await post(quick, "quick", stream=False)
    vanished = Reader(app)
    vanished.may_read.clear()
    broken = post(vanished, "vanished", stream=True)
    await until(lambda: run.gateway.sessions.in_memory()[0].tree.num_turns == 6)
    vanished.left.set()
    async with asyncio.timeout(60):
        await broken
    slow.may_read.set()
    assert (await reading).endswith(b"data: [DONE]\n\n")
    await until(lambda: not run.port.abandoned)
    view = await run.gateway.finish(1.0)
    assert (view.totals.num_turns, view.totals.num_left_out) == (6, 4)
