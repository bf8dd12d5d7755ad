"""Test of agents that use only the providers' clients with a service whose gateway is killed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from worlds.agents.guessing_agent import SessionClient
from worlds.runs.run_checks import check_lineage
from worlds.runs.run_driver import START_S, STEP_S, Run, running, small_config
from worlds.servers.ports import free_port

pytestmark = [pytest.mark.scenario, pytest.mark.chaos, pytest.mark.timeout(600)]

KEY = "a key of the scenario, long enough"
SPOKEN = (["chat"], ["messages"], ["responses"], ["chat", "messages", "responses"])
OVER = {"trained", "evicted", "cancelled"}


@contextmanager
def client_of(run: Run) -> Iterator[httpx.Client]:
    address = run.api_address(limit_s=START_S)
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=address, headers=headers, timeout=START_S) as client:
        deadline = time.monotonic() + START_S
        while not is_alive(client):
            assert time.monotonic() < deadline, f"nothing answers at {address}"
            time.sleep(0.2)
        yield client


def is_alive(client: httpx.Client) -> bool:
    """Return whether the API answers: HAProxy opens its port a moment after Serve says so."""
    try:
        return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def wait_until_over(client: httpx.Client, name: str, *, limit_s: float) -> dict[str, object]:
    deadline = time.monotonic() + limit_s
    while True:
        answer = client.get(f"/api/v1/rollouts/{name}")
        if answer.status_code == 200 and answer.json()["status"] in OVER:
            found: dict[str, object] = answer.json()
            return found
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.3)


def test_agents_with_only_a_url_are_trained_although_the_gateway_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: str
) -> None:
    """Use HAProxy, while the other scenarios use Serve's own proxy."""
    monkeypatch.setenv("RAYLOOM_API_KEY", KEY)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    for name in ("METRICS", "STATS"):
        monkeypatch.setenv(f"RAY_SERVE_HAPROXY_{name}_PORT", str(free_port()))
    config = small_config(
        tmp_path,
        small_model,
        run={"steps": 400, "evaluate_every": 1000, "checkpoint_every": 1},
        trainer={"num_ranks": 1},
        algorithm={"groups_per_step": 2, "group_size": 4},
        service={"port": 0},
    )
    with (
        running(config, tmp_path / "run", command="serve") as run,
        client_of(run) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        sessions = SessionClient(client)

        def group(name: str, number: int) -> list[float]:
            made = sessions.create(name, limit_s=START_S, num_sessions=4)
            games = [
                pool.submit(
                    sessions.play,
                    each,
                    number=number,
                    limit_s=START_S,
                    speaks=speaks,
                    streams=bool(index % 2),
                )
                for index, (each, speaks) in enumerate(zip(made, SPOKEN, strict=True))
            ]
            return [game.result() for game in games]

        for step in range(2):
            if step == 1:
                # In the middle of the games.
                threading.Timer(0.5, run.kill_part, ["ray::Gateway"]).start()
            rewards = [group(f"step-{step}-{index}", number=3 + index) for index in range(2)]
            for index, found in enumerate(rewards):
                view = wait_until_over(client, f"step-{step}-{index}", limit_s=2 * STEP_S)
                samples = view["samples"]
                assert isinstance(samples, list)
                assert [sample["reward"] for sample in samples] == found
                assert {sample["outcome"] for sample in samples} <= {
                    "completed",
                    "truncated_tokens",
                }
        check_refusals(client)
        train_uploads(client)
    check_lineage(run.events())


def train_uploads(client: httpx.Client) -> None:
    """Sample the groups of a step by token ids, and upload them as msgpack and as JSON."""
    policy = client.get("/api/v1/policy").json()
    prompt = list(range(5, 15))
    for group in range(2):
        items = []
        for member in range(4):
            body = {"token_ids": prompt, "max_tokens": 8}
            answer = client.post("/api/v1/generate", json=body)
            assert answer.status_code == 200, answer.text
            turn = answer.json()
            start = len(prompt)
            items.append(
                {
                    "id": f"upload-{group}-{member}",
                    "group": f"upload-{group}",
                    "reward": float(member % 2),
                    "samples": [
                        {
                            "token_ids": [*prompt, *turn["token_ids"]],
                            "logprobs": [*[0.0] * start, *turn["logprobs"]],
                            "turns": [{"start": start, "end": start + len(turn["token_ids"])}],
                            "versions": [
                                {**span, "start": start + span["start"], "end": start + span["end"]}
                                for span in turn["version_spans"]
                            ],
                        }
                    ],
                }
            )
        upload = {
            "tokenizer_fingerprint": policy["tokenizer_fingerprint"],
            "trajectories": items,
            "groups": [{"id": f"upload-{group}", "members": 4}],
        }
        packed = {"content-type": "application/msgpack"}
        raw = msgspec.msgpack.encode(upload)
        answer = (
            client.post("/api/v1/trajectories", content=raw, headers=packed)
            if group
            else client.post("/api/v1/trajectories", json=upload)
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["groups"][0]["is_submitted"], answer.text
    for group in range(2):
        view = wait_until_over(client, f"upload-{group}", limit_s=2 * STEP_S)
        samples = view["samples"]
        assert view["status"] == "trained" and isinstance(samples, list), view
        assert [sample["reward"] for sample in samples] == [0.0, 1.0, 0.0, 1.0]


def check_refusals(client: httpx.Client) -> None:
    answer = client.get("/api/v1/sessions/step-0-0-1")
    assert answer.status_code == 200 and answer.json()["status"] == "finished", answer.text
    assert client.get("/api/v1/sessions/nobody-0").status_code == 404
    late = client.post(
        "/sessions/step-0-0-1/v1/chat/completions",
        json={"model": "any", "messages": [{"role": "user", "content": "hi"}]},
    )
    # The client's own key does not open a session.
    assert late.status_code == 404 and late.json()["error"]["code"] == "unknown_session", late.text


SLOW_PROXY = """
import ray
from service.serve.ingress import check_listens, start_serve

ray.init(address="local", num_cpus=1, include_dashboard=False)
start_serve(host="127.0.0.1", port={port})
check_listens(host="127.0.0.1", port={port})
"""


def test_serve_starts_although_its_first_proxy_is_not_ready_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Give the proxy less time than HAProxy needs, so that Serve kills it and starts another."""
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "0.3")
    script = SLOW_PROXY.format(port=free_port())
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=START_S
    )
    assert ended.returncode == 0, ended.stderr
