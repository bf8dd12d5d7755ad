"""Measure the latency of /healthz while 512 sessions with histories of 60,000 tokens are played.

    $ python -m benchmarks.session_load

One process has the API's routes in uvicorn, as in a replica of the API, and the gateway's actor on
a local Ray. An answer of 128 tokens is scripted in place of the engine and takes as long as an
engine may take (--answer-s). Each client keeps its connection and sends the whole conversation with
each turn; the clients begin one after another. At the same time /healthz is requested twenty times
a second. No request may fail. Serve's own proxy is not included. The benchmark prints one line of
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import uvicorn

from benchmarks.environment import describe_environment
from benchmarks.http_connection import HttpConnection
from benchmarks.line_process import LineProcess
from benchmarks.serve_router import free_port
from benchmarks.session_world import NAME, history, scripted_world
from service.access.keys import AGENT, session_key
from service.intake.session import session_id

NUM_TOKENS = 128
PING_EVERY_S = 0.05


class Client:
    """The client of one session; it keeps its body as bytes, because 512 histories must be sent
    quickly.
    """

    def __init__(self, port: int, member: int, num_tokens: int) -> None:
        name = session_id(NAME, member)
        self._port, self._path = port, f"/sessions/{name}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {session_key('', name, AGENT)}"}
        text = json.dumps({"model": "any", "messages": history(num_tokens)})
        self._body = text.removesuffix("]}").encode()
        self.seconds: list[float] = []

    async def play(self, *, begins_s: float, ends_at: float) -> None:
        await asyncio.sleep(begins_s)
        async with HttpConnection(self._port) as connection:
            while (asked_at := time.perf_counter()) < ends_at:
                status, answer = await connection.post(
                    self._path, self._body + b"]}", self._headers
                )
                if status != 200:
                    raise SystemExit(f"benchmark: status {status}: {answer[:500]!r}")
                self.seconds.append(time.perf_counter() - asked_at)
                said = json.loads(answer)["choices"][0]["message"]["content"]
                more = [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": "lower"},
                ]
                self._body += f", {json.dumps(more)[1:-1]}".encode()


async def measure(
    port: int, *, num_sessions: int, num_tokens: int, seconds: float
) -> dict[str, float]:
    clients = [Client(port, member, num_tokens) for member in range(num_sessions)]
    # The first turn renders the history; agents do not send all of them at once.
    ramp_s = num_sessions * 0.1
    started = time.perf_counter()
    ends_at = started + ramp_s + seconds
    playing = [
        asyncio.create_task(client.play(begins_s=0.1 * place, ends_at=ends_at))
        for place, client in enumerate(clients)
    ]
    pings: list[float] = []
    async with HttpConnection(port) as connection:
        while (asked_at := time.perf_counter()) < ends_at:
            status, _ = await connection.get("/healthz")
            assert status == 200
            if asked_at > started + ramp_s:
                pings.append(time.perf_counter() - asked_at)
            await asyncio.sleep(PING_EVERY_S)
    await asyncio.gather(*playing)
    pings.sort()
    turns = [each for client in clients for each in client.seconds]
    return {
        "healthz_median_ms": round(1e3 * statistics.median(pings), 1),
        "healthz_p99_ms": round(1e3 * pings[int(0.99 * (len(pings) - 1))], 1),
        "healthz_max_ms": round(1e3 * pings[-1], 1),
        "turns": len(turns),
        "turn_median_s": round(statistics.median(turns), 2),
        "turn_max_s": round(max(turns), 2),
    }


def serve_side(port: int, num_sessions: int, answer_s: float) -> None:
    """Run the child: routes and gateway, until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with (
        closing(answers),
        tempfile.TemporaryDirectory() as directory,
        scripted_world(
            Path(directory), num_sessions=num_sessions, num_tokens=NUM_TOKENS, delay_s=answer_s
        ) as here,
    ):
        server = uvicorn.Server(uvicorn.Config(here.app, port=port, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        print("ready", file=answers, flush=True)
        for _ in sys.stdin:
            print(here.gateway_cpu_s(), time.process_time(), file=answers, flush=True)
        server.should_exit = True
        thread.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=60_000, help="of each history")
    parser.add_argument("--seconds", type=float, default=300, help="once all have begun")
    parser.add_argument("--answer-s", type=float, default=15, help="of the scripted engine")
    parser.add_argument("--side-port", type=int, help="used by itself")
    asked = parser.parse_args()
    if asked.side_port is not None:
        serve_side(asked.side_port, asked.sessions, asked.answer_s)
        return
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.session_load", "--side-port", str(port)]
    command += ["--sessions", str(asked.sessions), "--answer-s", str(asked.answer_s)]
    with LineProcess(command, environment={}) as side:
        found = asyncio.run(
            measure(
                port, num_sessions=asked.sessions, num_tokens=asked.tokens, seconds=asked.seconds
            )
        )
        gateway_s, api_s = map(float, side.ask("cpu").split())
    found["gateway_ms_a_turn"] = round(1e3 * gateway_s / found["turns"], 2)
    found["api_ms_a_turn"] = round(1e3 * api_s / found["turns"], 2)
    print(json.dumps({**found, **describe_environment("ray", "uvicorn")}))


if __name__ == "__main__":
    main()
