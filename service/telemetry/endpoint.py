"""Serve all metrics of a run at one HTTP endpoint, to which the run's processes push.

The endpoint outlives the processes. A process pushes two kinds of metrics:
- *Increments*: the increases since the last push of counters and histograms that the database does
  not store. The endpoint adds them up, and keeps the sums after the process dies.
- *Values*: the current values of all other metrics. The endpoint removes them when the process
  stops pushing.

Each push has a number, so that a repeated push counts once. Each process has an epoch, so that the
endpoint ignores the pushes of a replaced process.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import ray
from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.registry import Collector
from ray.exceptions import RayError

from actors.deadline import poll, within
from service.remote_calls import NAMESPACE

# Seconds without a push after which a process's values are removed: long enough for several pushes,
# and for a new supervisor to start on a busy machine.
SILENT_S = 45.0
# The role of the process that pushes the run's own metrics.
SUPERVISOR = "supervisor"
PUSH_EVERY_S = 1.0
PUSH_LIMIT_S = 10.0
PORT_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One message with the metrics of a process."""

    role: str
    """Role, such as "supervisor" or an engine's name; at most one process has it at a time."""
    epoch: int
    """Number of the process among those with this role: a later process has a greater number."""
    number: int
    """Number of this push in its process: 1, 2, and so on."""
    increments: tuple[Metric, ...] = ()
    values: tuple[Metric, ...] = ()
    is_last: bool = False
    """Whether the process ends normally after this push; the endpoint then keeps its values."""


class PushedMetrics(Collector):
    """The metrics that processes have pushed, as a collector of the Prometheus client library.

    Several threads may use it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, **labels: str) -> None:
        """Start without metrics. Args: labels: labels to add to every series."""
        self._clock = clock
        self._labels = labels
        self._lock = threading.Lock()
        self._heard: dict[str, tuple[Push, float]] = {}
        """The newest push of each role, and the time of its arrival."""
        # By family, then by sample's name and labels.
        self._sums: dict[str, tuple[Metric, dict[tuple[str, frozenset[tuple[str, str]]], float]]]
        self._sums = {}

    def push(self, push: Push) -> None:
        """Store a push; ignore a repeated push and a push of a replaced process."""
        with self._lock:
            before, _ = self._heard.get(push.role, (None, 0.0))
            if before and (before.epoch, before.number) >= (push.epoch, push.number):
                return
            self._heard[push.role] = push, self._clock()
            for family in push.increments:
                self._add(family)

    def amend(self, role: str, values: Sequence[Metric]) -> None:
        """Replace some values that a dead process pushed, until the process's successor pushes.

        Example: while a new supervisor starts, the run's phase is shown as "recovering".
        Args: role: the role of the dead process and of its successor. values: the metric families
        with new values.
        """
        names = {family.name for family in values}
        with self._lock:
            if role not in self._heard:
                return
            push, heard_at = self._heard[role]
            kept = [family for family in push.values if family.name not in names]
            # Keep the push's number and age, so that a push of the successor is newer.
            self._heard[role] = replace(push, values=(*kept, *values)), heard_at

    def _add(self, family: Metric) -> None:
        _, sums = self._sums.setdefault(family.name, (family, {}))
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            sums[key] = sums.get(key, 0.0) + sample.value

    def describe(self) -> Iterable[Metric]:
        # Processes declare their families, so none is declared here.
        return ()

    def collect(self) -> Iterable[Metric]:
        shown: dict[str, Metric] = {}
        with self._lock:
            for family, sums in self._sums.values():
                for (name, labels), value in sums.items():
                    self._show(shown, family, name, dict(labels), value)
            for push, heard_at in self._heard.values():
                if push.is_last or self._clock() - heard_at < SILENT_S:
                    for family in push.values:
                        for sample in family.samples:
                            self._show(shown, family, sample.name, sample.labels, sample.value)
        return shown.values()

    def _show(
        self,
        shown: dict[str, Metric],
        family: Metric,
        name: str,
        labels: dict[str, str],
        value: float,
    ) -> None:
        if family.name not in shown:
            shown[family.name] = Metric(family.name, family.documentation, family.type)
        shown[family.name].add_sample(name, {**labels, **self._labels}, value)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...


def _server(registry: CollectorRegistry, *, host: str, port: int) -> WSGIServer:
    """Return a server that answers in Prometheus' text format. Raises: OSError."""
    answer = make_wsgi_app(registry)

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        # In the OpenMetrics format, the library would replace the colon in vLLM's metric names.
        environ.pop("HTTP_ACCEPT", None)
        return answer(environ, start_response)

    server_class = _Server6 if ":" in host else _Server
    return make_server(host, port, application, server_class, _SilentHandler)


class MetricsEndpoint:
    """A Ray actor that serves a run's metrics at /metrics.

    The process that starts the run's supervisors owns this actor.
    """

    def __init__(self, run: str, *, host: str, port: int) -> None:
        self._pushed = PushedMetrics(run=run)
        registry = CollectorRegistry()
        registry.register(self._pushed)

        def serve() -> WSGIServer | None:
            with suppress(OSError):
                return _server(registry, host=host, port=port)
            return None

        # The endpoint before this one may still be ending.
        found = poll(serve, limit_s=PORT_LIMIT_S)
        self._server = found or _server(registry, host=host, port=port)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    async def push(self, push: Push) -> str:
        """Store a push, and return the endpoint's URL."""
        self._pushed.push(push)
        return await self.address()

    async def amend(self, role: str, values: Sequence[Metric]) -> None:
        """Replace some values of a dead process (`PushedMetrics.amend`)."""
        self._pushed.amend(role, values)

    async def address(self) -> str:
        """Return the endpoint's URL."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The metrics of a process at one moment, from which a `Pusher` makes a push."""

    gained: Sequence[Metric] = ()
    """Counters and histograms that count since the process's start; their increases are pushed."""
    values: Sequence[Metric] = ()
    """All other metrics; their current values are pushed."""


class Pusher:
    """A sender of this process's metrics to the run's endpoint."""

    def __init__(
        self,
        send: Callable[[Push], Awaitable[str]],
        *,
        role: str,
        read: Callable[[], Reading],
    ) -> None:
        """Create a pusher, and push nothing yet.

        Args: send: the endpoint's `push`. role: as in `Push`. read: returns the current metrics.
        """
        self._send = send
        self._role = role
        self._epoch = time.time_ns()
        self._number = 0
        self._read = read
        self._sent: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        # A push that may not have arrived; it is sent again under its number.
        self._unanswered: Push | None = None

    async def push(self, *, is_last: bool = False) -> str:
        """Read and push the metrics, and return the endpoint's URL.

        Raises: the errors of `send`; the next call then repeats the push.
        """
        if self._unanswered is not None:
            await self._send_until_answered(self._unanswered)
        self._number += 1
        reading = self._read()
        push = Push(
            role=self._role,
            epoch=self._epoch,
            number=self._number,
            increments=tuple(self._increments(reading.gained)),
            values=tuple(reading.values),
            is_last=is_last,
        )
        return await self._send_until_answered(push)

    async def _send_until_answered(self, push: Push) -> str:
        self._unanswered = push
        address = await self._send(push)
        self._unanswered = None
        return address

    def _increments(self, gained: Iterable[Metric]) -> Iterable[Metric]:
        """Yield the increases since the last push; a new series is yielded even if it is 0."""
        for family in gained:
            grown = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                before = self._sent.get(key)
                if before is None or sample.value != before:
                    self._sent[key] = sample.value
                    grown.add_sample(sample.name, sample.labels, sample.value - (before or 0.0))
            if grown.samples:
                yield grown


def endpoint_name(run_id: str) -> str:
    return f"{run_id}-metrics"


async def push_forever(run_id: str, *, role: str, read: Callable[[], Reading]) -> None:
    """Push this process's metrics to the run's endpoint every second, until cancelled.

    Errors are ignored, so the pushes continue when the run has an endpoint again.
    """
    actor: Any = None

    async def send(push: Push) -> str:
        nonlocal actor
        if actor is None:
            name = endpoint_name(run_id)
            actor = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
        try:
            address: str = await within(PUSH_LIMIT_S, actor.push.remote(push))
        except RayError:
            # Look the actor up again for the next push: the run may have been restarted.
            actor = None
            raise
        return address

    pusher = Pusher(send, role=role, read=read)
    while True:
        # `ray.get_actor` raises ValueError if there is no endpoint.
        with suppress(ValueError, RayError, TimeoutError):
            await pusher.push()
        await asyncio.sleep(PUSH_EVERY_S)
