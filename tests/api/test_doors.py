"""Tests of the checks before a body is read: its key is known, and memory and time are bounded."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from worlds.parts.gateway_world import NAME, Gateway
from worlds.parts.session_app import SessionRun

from actors.metrics import ApiMetrics
from service.access.keys import AGENT, REWARD, session_key
from service.api import door
from service.api.app import CountedRequests
from service.api.bodies import ASKS_HEADER, LARGE_BYTES, BodyRoom
from service.api.door import Door, limit_heads
from service.config.file import ConfigError
from service.launch.run_dir import RunDir, check_new, session_secret

CHAT = f"/sessions/{NAME}/v1/chat/completions"
JSON = {"content-type": "application/json"}
OWN, OTHERS = session_key("", NAME, AGENT), session_key("", "other-0", AGENT)
MADE_UP = f"rl.agent.{NAME}.{'0' * 64}"


class NotToBeRead:
    """A request body that must not be read. Counts the attempts to read it."""

    num_reads = 0

    async def __call__(self) -> Message:
        self.num_reads += 1
        return {"type": "http.request", "body": b"x", "more_body": True}


async def ask(
    app: ASGIApp, method: str, path: str, headers: Mapping[str, str], receive: Receive
) -> tuple[int, dict[str, str], bytes]:
    """Call an application as a server would. Returns: status, headers, and the body."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    all_headers = {"host": "localhost", **headers}
    raw = [(name.encode(), value.encode()) for name, value in all_headers.items()]
    scope: Scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "headers": raw, "query_string": b"", "root_path": "", "scheme": "http",
        "server": ("localhost", 80), "client": ("127.0.0.1", 9), "http_version": "1.1",
        "asgi": {"version": "3.0"}, "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], answered, b"".join(each.get("body", b"") for each in sent[1:])


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    found = await Gateway(tmp_path).opened()
    yield found
    found.sessions.close()
    found.store.close()


@pytest.mark.parametrize("length", [{"content-length": str(47 << 20)}, {"transfer-encoding": "x"}])
@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("POST", CHAT, "", 401),
        ("POST", CHAT, "a client's key, long enough", 404),
        ("POST", CHAT, OTHERS, 404),
        ("POST", CHAT, MADE_UP, 404),
        ("POST", CHAT, f"rl.agent.{NAME}." + "0" * 600, 404),
        ("POST", "/v1/messages", "", 401),
        ("POST", "/v1/responses", MADE_UP, 404),
        ("POST", "/v1/whatever", "", 401),
        ("POST", f"/api/v1/sessions/{NAME}/finish", "", 401),
        ("PUT", f"/api/v1/sessions/{NAME}/reward", MADE_UP, 404),
    ],
)
async def test_no_byte_of_a_body_is_read_before_its_key_is_known(
    gateway: Gateway, method: str, path: str, key: str, status: int, length: dict[str, str]
) -> None:
    headers = {**JSON, **length, **({"authorization": f"Bearer {key}"} if key else {})}
    body = NotToBeRead()
    found, answered, text = await ask(SessionRun(gateway).app(), method, path, headers, body)
    assert (found, answered["connection"], body.num_reads) == (status, "close", 0)
    # The error has the form of the route's dialect, or is a problem document.
    answer = json.loads(text)
    assert answer.get("status", status) == status and ("error" in answer or "code" in answer)


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", f"/sessions/{NAME}/v1/models"])
async def test_a_route_without_a_key_accepts_no_body(gateway: Gateway, path: str) -> None:
    headers, body = {"content-length": str(1 << 20)}, NotToBeRead()
    status, answered, _ = await ask(SessionRun(gateway).app(), "GET", path, headers, body)
    assert (status, answered["connection"], body.num_reads) == (413, "close", 0)


async def test_a_key_of_the_session_may_send_a_large_body(gateway: Gateway) -> None:
    app = SessionRun(gateway).app()
    content = json.dumps({"model": "m", "n": 3, "messages": [], "user": "x" * LARGE_BYTES}).encode()
    for key, status in ((OWN, 400), (session_key("", NAME, REWARD), 400)):
        parts = iter([content[:9], content[9:]])

        async def receive(parts: Any = parts) -> Message:
            return {"type": "http.request", "body": next(parts), "more_body": True}

        async def whole(parts: Any = parts) -> Message:
            message = await receive(parts)
            return {**message, "more_body": not message["body"].endswith(b"}")}

        headers = {**JSON, "content-length": str(len(content)), "x-api-key": key}
        assert (await ask(app, "POST", CHAT, headers, whole))[0] == status


@pytest.mark.parametrize("content", [b"", b"\n", b"\x00" * 43, b"\xff" * 43, b"short"])
def test_a_damaged_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    run_dir = RunDir(path=tmp_path / "run")
    session_secret(run_dir)
    run_dir.secret_file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"session\.key is damaged: got"):
        session_secret(run_dir)


async def test_an_agent_cannot_compute_the_key_that_rewards_it(
    gateway: Gateway, tmp_path: Path
) -> None:
    """Check this for an agent that knows its session's name, its own key and the source code."""
    run_dir = RunDir(path=tmp_path / "new" / "run")
    secret = session_secret(run_dir)
    assert stat.S_IMODE(run_dir.secret_file.stat().st_mode) == 0o600
    assert session_secret(run_dir) == secret and len(secret) > 40
    assert session_secret(RunDir(path=tmp_path / "another")) != secret
    # The files of an interrupted start do not prevent the next start.
    check_new(run_dir)
    app = SessionRun(gateway, session_secret=secret).app()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        first, second = [await client.post("/api/v1/sessions", json={"id": "a"}) for _ in range(2)]
        assert (first.status_code, second.status_code) == (201, 200)
        assert first.json()["sessions"] == second.json()["sessions"]
        made = first.json()["sessions"][0]
        finish = f"/api/v1/sessions/{made['id']}/finish"
        for key, status in (
            (session_key("", made["id"], REWARD), 404),
            (session_key(made["agent_key"], made["id"], REWARD), 404),
            (made["agent_key"], 403),
            (made["reward_key"], 200),
        ):
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post(finish, json={"reward": 1.0}, headers=headers)
            assert answer.status_code == status, answer.text


async def test_bodies_wait_for_room_in_their_order() -> None:
    room, taken = BodyRoom(100), []

    async def take(name: str, num_bytes: int) -> None:
        assert await room.take(num_bytes, limit_s=30.0)
        taken.append(name)

    await take("a", 60)
    waiting = [asyncio.create_task(take("b", 60)), asyncio.create_task(take("c", 10))]
    await asyncio.sleep(0)
    assert not await room.take(10, limit_s=0.05)
    assert taken == ["a"]
    room.give_back(60)
    await asyncio.gather(*waiting)
    assert taken == ["a", "b", "c"] and room.num_bytes == 70
    room.give_back(70)
    # A body larger than the whole room is admitted if no other body is being read.
    assert await room.take(101, limit_s=1.0) and not await room.take(1, limit_s=0.05)


# A freed block between two used ones stays with the process until the allocator is trimmed.
HOLDING = """
import asyncio, psutil
from service.api.bodies import BodyRoom

def held(): return psutil.Process().memory_info().rss >> 20

async def main():
    room = BodyRoom()
    await room.take(64 << 20, limit_s=1.0)
    blocks = [bytes(1000) for _ in range(200_000)]
    kept, full = blocks[::50], held()
    del blocks
    before = full - held()
    room.give_back(64 << 20)
    for _ in range(300):
        await asyncio.sleep(0.1)
        if full - held() > 100:
            break
    print(before, full - held())

asyncio.run(main())
"""


def test_memory_of_large_bodies_is_returned_to_the_system() -> None:
    found = subprocess.run(
        [sys.executable, "-c", HOLDING], capture_output=True, text=True, check=True, timeout=60
    )
    before, after = map(int, found.stdout.split())
    assert before < 50 and after > 100


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an application with uvicorn on a free port of loopback and yield its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="off")
    )
    work = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await work


class Reads:
    """An application that is not Rayloom's: it reads every body and records the methods."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.methods.append(scope["method"])
        size = 0
        while (message := await receive()).get("more_body", False):
            size += len(message["body"])
        size += len(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(size).encode()})


async def test_the_door_asks_the_application_before_it_reads_a_large_body(gateway: Gateway) -> None:
    metrics = ApiMetrics()
    room = BodyRoom()
    inside = Door(CountedRequests(SessionRun(gateway).app(), metrics=metrics), room=room)
    content = json.dumps({"model": "m", "n": 3, "user": "x" * (8 << 20)}).encode()
    async with (
        listening(inside) as place,
        httpx.AsyncClient(base_url=f"http://{place}", headers=JSON, timeout=60) as client,
    ):
        for key, status in (("", 401), (MADE_UP, 404), (OWN, 400)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            # The client receives the reason, although it is still sending.
            answer = await client.post(CHAT, content=content, headers=headers)
            assert answer.status_code == status and "error" in answer.json()
            assert (answer.headers.get("connection") == "close") == (status != 400)
        assert room.num_bytes == 0
    # Each request is counted once, with its own method.
    samples = [each for metric in metrics.requests.collect() for each in metric.samples]
    counted = {
        (each.labels["method"], each.labels["status"]): each.value
        for each in samples
        if each.name.endswith("_total")
    }
    assert counted == {("POST", "401"): 1, ("POST", "404"): 1, ("POST", "400"): 1}


async def test_the_door_leaves_other_applications_unchanged() -> None:
    app = Reads()
    async with (
        listening(Door(app)) as place,
        httpx.AsyncClient(base_url=f"http://{place}", timeout=60) as client,
    ):
        assert (await client.post("/", content=b"x")).text == "1"
        assert (await client.put("/", content=b"x" * LARGE_BYTES * 2)).text == str(LARGE_BYTES * 2)
        for path in ("/-/routes", "/-/ROUTES/"):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/-/healthz")).status_code == 200
    # The door uses OPTIONS to ask about a large body, because it changes nothing.
    assert app.methods == ["POST", "OPTIONS", "PUT", "GET"]


async def test_a_client_that_sends_the_doors_question_learns_only_if_its_key_is_valid(
    gateway: Gateway,
) -> None:
    app = SessionRun(gateway).app()
    headers = {ASKS_HEADER: "POST", "content-length": str(1 << 20)}
    for key, status in (("", 401), (MADE_UP, 404), (OWN, 204)):
        found, answered, text = await ask(
            app, "OPTIONS", CHAT, {**headers, "x-api-key": key}, NotToBeRead()
        )
        assert found == status and answered[ASKS_HEADER] == "answered"
        assert bool(text) == (status != 204)


@pytest.fixture
def short_heads(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return `limit_heads`, and undo its change of uvicorn's protocol after the test."""
    from uvicorn.protocols.http import auto

    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)
    return limit_heads


async def test_connections_without_complete_headers_are_closed(
    short_heads: Callable[[float], None],
) -> None:
    short_heads(1.5)
    async with listening(Reads()) as place:
        host, _, port = place.partition(":")
        heads = (b"", b"POST / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        whole = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        slow = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
        for (_, writer), sent in zip(opened, (*heads, whole, slow), strict=True):
            writer.write(sent)
        silent, half, answered, sending = (reader for reader, _ in opened)
        assert b" 200 " in await answered.readline()
        async with asyncio.timeout(30):
            assert await silent.read() == b"" and await half.read() == b""
        # A slow body has its own limit (`guards`); the headers of this request are complete.
        opened[3][1].write(b"xx")
        assert b" 200 " in await sending.readline()
        for _, writer in opened:
            writer.close()


def test_the_middlewares_limit_headers_in_each_process_that_opens_a_server(
    short_heads: Callable[[float], None],
) -> None:
    [found] = door.middlewares()
    assert found.cls is Door
    config = uvicorn.Config(Reads(), log_config=None)
    config.load()
    assert config.http_protocol_class.head_limit_s == door.HEAD_LIMIT_S  # type: ignore
