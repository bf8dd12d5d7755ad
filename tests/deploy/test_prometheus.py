"""Tests of the metrics with a real Prometheus and the committed configuration."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily
from worlds.builders.queue_builders import queue_stats
from worlds.builders.record_builders import evaluation_record, lost_calls, step_record
from worlds.builders.store_builders import commit
from worlds.builders.trajectory_builders import make_summary
from worlds.checks.metric_expectations import differences, of_newest, of_steps
from worlds.checks.metric_names import NOT_OF_THE_DEMO
from worlds.servers.ports import free_port
from worlds.servers.prometheus_server import CONFIG, scraping, series
from worlds.servers.promtool import promtool

from actors.metrics import ApiMetrics, GatewayMetrics, Metrics
from actors.outcomes import OutcomePolicy
from actors.trajectory_queue.ledger import EvictionReason, Ledger, TokenCounts
from actors.types import Outcome
from deploy.dashboards.grafana import load_dashboards
from service.backlog.queue import SubmissionQueue
from service.config.sections import ServiceSettings
from service.run.recorder import RunRecorder
from service.store.run_store import RunStore
from service.telemetry.endpoint import MetricsEndpoint, Pusher, Reading
from service.worker_thread import WorkerThread

LIMIT_S = 60.0


def test_the_configuration_for_a_laptop_is_valid() -> None:
    done = promtool("check", "config", str(CONFIG))
    assert done.returncode == 0, done.stderr


def pusher_of(metrics: Metrics, endpoint: MetricsEndpoint) -> Pusher:
    """Return a pusher like that of a supervisor."""

    def read() -> Reading:
        gained, values = metrics.read()
        return Reading(gained=gained, values=values)

    return Pusher(endpoint.push, role="supervisor", read=read)


def service_recorder(store: RunStore, metrics: Metrics) -> RunRecorder:
    """Return the recorder of a run whose tasks come from clients."""
    thread = WorkerThread("store")
    submissions = SubmissionQueue(
        store,
        thread=thread,
        settings=ServiceSettings(max_waiting_tasks=64),
        groups_per_step=1,
        policy=OutcomePolicy(),
    )
    return RunRecorder(store, metrics, thread=thread, num_steps=9, submissions=submissions)


async def record(recorder: RunRecorder, ledger: Ledger, step: int) -> None:
    """Record a step of two rollouts, one of which is trained."""
    for member in range(2):
        rollout_id = f"g{step:06d}.0-{member}"
        ledger.admit(rollout_id)
        recorder.rollouts([make_summary(rollout_id, reward=0.5)])
    ledger.train(f"g{step:06d}.0-0", step=step)
    ledger.evict(f"g{step:06d}.0-1", EvictionReason.MASKED, step=step)
    recorder.events(ledger.drain())
    await recorder.step(step_record(step, policy_age_max=step % 3))
    recorder.queue(queue_stats(ledger.counts()))
    recorder.engines(1, num_expected=1, versions={"engine": step})
    calls = lost_calls("my.py:score", count=step)
    recorder.user_calls.heard("environment-1-0", [calls], resident_bytes=100 * 2**20)


async def answer_a_request(endpoint: MetricsEndpoint) -> None:
    """Push the metrics of a replica of the API that has just started."""
    api = ApiMetrics()
    api.requests.labels(route="/readyz", method="GET", status=200).inc()
    api.seconds.labels(route="/readyz").observe(0.01)
    pusher = Pusher(
        endpoint.push, role="api", read=lambda: Reading(gained=list(api.gained.collect()))
    )
    await pusher.push()


async def answer_as_an_engine(endpoint: MetricsEndpoint) -> None:
    """Push the metrics of an engine: one metric of vLLM."""
    running = GaugeMetricFamily("vllm:num_requests_running", "Requests.", labels=["replica"])
    running.add_metric(["a"], 1.0)
    await Pusher(endpoint.push, role="engine", read=lambda: Reading(values=[running])).push()


async def answer_as_a_gateway(endpoint: MetricsEndpoint) -> None:
    """Push the metrics of a gateway, with a value for each metric."""
    gateway = GatewayMetrics()
    gateway.open.set(2)
    gateway.ended.labels(outcome=Outcome.COMPLETED.value).inc()
    gateway.turns.labels(use="trained").inc(3)
    gateway.refused.labels(code="session_closed").inc()
    gateway.seconds.observe(0.5)
    gateway.commit_seconds.observe(0.005)
    reading = Reading(gained=list(gateway.gained.collect()), values=tuple(gateway.values.collect()))
    await Pusher(endpoint.push, role="gateway", read=lambda: reading).push()


async def lint(endpoint: MetricsEndpoint) -> str:
    """Return promtool's findings about the text of a scrape; empty if it found nothing.

    Metrics of vLLM are left out, because promtool objects to the colon in their names. The names
    are kept so that vLLM's dashboards work.
    """
    url = await endpoint.address()
    reply = await asyncio.to_thread(urllib.request.urlopen, url, timeout=LIMIT_S)
    text = reply.read().decode()
    assert "# TYPE rayloom_run_phase gauge" in text and "# TYPE vllm:" in text
    ours = [line for line in text.splitlines(keepends=True) if "vllm:" not in line]
    done = promtool("check", "metrics", stdin="".join(ours))
    return done.stdout + done.stderr


@pytest.mark.chaos
async def test_the_counters_of_a_resumed_run_continue(tmp_path: Path) -> None:
    """Let a process end after step 3 and another one continue from step 1."""
    store, ledger, port = RunStore(f"sqlite:///{tmp_path / 'run.db'}"), Ledger(), free_port()
    done = series("rayloom_train_steps_total")
    started = time.time()
    endpoint = MetricsEndpoint("test", host="127.0.0.1", port=port)
    with scraping(f"127.0.0.1:{port}", tmp_path / "prometheus", run="test") as prometheus:
        first = Metrics()
        recorder, pusher = service_recorder(store, first), pusher_of(first, endpoint)
        await recorder.begin_term(store.acquire_lease(owner="first"))
        await recorder.evaluation(evaluation_record(0))
        await record(recorder, ledger, 1)
        commit(store, term=1, step=1, last_event_seq=3)
        snapshot = ledger.snapshot(waiting=TokenCounts())
        await pusher.push()
        await answer_a_request(endpoint)
        await answer_as_a_gateway(endpoint)
        prometheus.wait_for(done, at_least=1, limit_s=LIMIT_S)
        await record(recorder, ledger, 2)
        await record(recorder, ledger, 3)
        await pusher.push()
        await answer_a_request(endpoint)
        await answer_as_a_gateway(endpoint)
        prometheus.wait_for(done, at_least=3, limit_s=LIMIT_S)

        second, ledger = Metrics(), Ledger(snapshot=snapshot)
        recorder, pusher = service_recorder(store, second), pusher_of(second, endpoint)
        await recorder.begin_term(store.acquire_lease(owner="second"))
        await record(recorder, ledger, 2)
        await pusher.push()
        prometheus.wait_for(done, at_least=4, limit_s=LIMIT_S)
        seen = prometheus.newest()
        resets = 'resets(rayloom_train_steps_total{run="test"}[10m])'
        assert set(prometheus.draw(resets, since=started)) == {0}

        assert seen[series("rayloom_train_newest_step")] == 2
        records = [step_record(step, policy_age_max=step % 3) for step in (1, 2, 3, 2)]
        assert not differences(seen, {**of_steps(records), **of_newest(records[-1])})
        assert seen[series("rayloom_ledger_events_total", kind="trained")] == 4
        assert seen[series("rayloom_ledger_trained_rollouts")] == 2
        assert prometheus.runs() == ["test"]
        # Counts that are not in stored rows include those of the first process.
        counted = sum(
            count for (name, _), count in seen.items() if name == "rayloom_rollouts_total"
        )
        assert counted == 8

        await answer_as_an_engine(endpoint)
        assert await lint(endpoint) == ""

        # Two more scrapes enclose the last values, so that panels show them on their grid.
        prometheus.wait_for_scrapes(2, limit_s=LIMIT_S)
        # test_metrics_scenarios.py checks the other panels.
        panels = [
            panel
            for dashboard in load_dashboards()
            for title, section in dashboard.sections.items()
            for panel in section
            if title in NOT_OF_THE_DEMO
            or "mfu" in panel.statistics.values()
            or panel.title == "Age of the oldest waiting trajectory"
        ]
        assert len(panels) > 4
        for query in (query for panel in panels for query in panel.series.values()):
            assert prometheus.draw(query, since=started), query
