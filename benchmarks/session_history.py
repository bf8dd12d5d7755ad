"""Measure the processor time of a session's turn against the length of its history.

    $ python -m benchmarks.session_history

There is one session for each length. Its first request contains a history of this number of tokens,
in messages of 250 tokens. The session then continues turn by turn, each time with the whole
conversation, as agents do. Answers of 128 tokens are scripted in place of the engine. The benchmark
measures the processor time of the routes' and of the gateway's process, for each turn except the
first. It prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment
from benchmarks.pairs import rounds
from benchmarks.session_world import World, history, post, scripted_world

LENGTHS = (1_000, 8_000, 32_000, 60_000)
NUM_TOKENS = 128


class Conversation:
    """The conversation of one session, including the answers so far."""

    def __init__(self, world: World, member: int, num_tokens: int) -> None:
        self._world, self._member = world, member
        self._messages = history(num_tokens)

    async def turn(self) -> dict[str, float]:
        """Play a turn and return its milliseconds."""
        body = json.dumps({"model": "any", "messages": self._messages}).encode()
        before, began = self._world.gateway_cpu_s(), time.process_time()
        started = time.perf_counter()
        status, answer = await post(self._world.app, self._member, body)
        wall_s = time.perf_counter() - started
        ingress_s = time.process_time() - began
        gateway_s = self._world.gateway_cpu_s() - before
        if status != 200:
            raise SystemExit(f"benchmark: status {status}: {answer[:500]!r}")
        said = json.loads(answer)["choices"][0]["message"]["content"]
        self._messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "lower"},
        ]
        return {"api_ms": 1e3 * ingress_s, "gateway_ms": 1e3 * gateway_s, "wall_ms": 1e3 * wall_s}


async def measure(world: World, *, num_turns: int) -> dict[str, dict[str, float]]:
    sessions = {length: Conversation(world, place, length) for place, length in enumerate(LENGTHS)}
    for each in sessions.values():
        # The first turn renders the whole history; after two turns the paths of store and loop are
        # warm.
        for _ in range(3):
            await each.turn()
    found: dict[int, list[dict[str, float]]] = {length: [] for length in sessions}
    for _ in range(num_turns):
        for length, each in sessions.items():
            found[length].append(await each.turn())
    # The mean, because the kernel counts a process's time in steps of 0.01 s.
    return {
        str(length): {
            "api_ms": round(statistics.median(turn["api_ms"] for turn in turns), 2),
            "gateway_ms": round(statistics.mean(turn["gateway_ms"] for turn in turns), 2),
            "wall_ms": round(statistics.median(turn["wall_ms"] for turn in turns), 2),
        }
        for length, turns in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=rounds, default=40, help="of each session")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        scripted_world(Path(directory), num_sessions=8, num_tokens=NUM_TOKENS, delay_s=0.0) as here,
    ):
        found: dict[str, Any] = asyncio.run(measure(here, num_turns=asked.turns))
    first, last = (sum(found[str(n)][k] for k in ("api_ms", "gateway_ms")) for n in (1_000, 60_000))
    print(json.dumps({**found, "ratio": round(last / first, 2), **describe_environment("ray")}))


if __name__ == "__main__":
    main()
