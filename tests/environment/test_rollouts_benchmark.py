"""Tests of the benchmark that sends the requests of played rollouts to vLLM directly."""

from __future__ import annotations

import asyncio

from worlds.builders.trajectory_builders import make_trajectory, make_turn

from benchmarks.raw_engine import Asked, some_at_once
from benchmarks.rollouts import REST, Cost, conversation, cpu_ms_a_turn


async def test_the_engine_gets_a_request_for_each_turn_with_bounded_concurrency() -> None:
    turns = [make_turn([1, 2], [3, 4]), make_turn([1, 9], [7]), make_turn([1, 2, 3, 4, 5], [6, 6])]
    assert conversation(make_trajectory(turns)) == [
        Asked(prompt=[1, 2], num_tokens=2),
        Asked(prompt=[1, 9], num_tokens=1),
        Asked(prompt=[1, 2, 3, 4, 5], num_tokens=2),
    ]
    under_way: set[int] = set()
    most, ended = 0, []

    async def work(number: int) -> None:
        nonlocal most
        under_way.add(number)
        most = max(most, len(under_way))
        # The first takes as long as all others together, and none of them waits for it.
        for _ in range(20 if number == 0 else 2):
            await asyncio.sleep(0)
        under_way.remove(number)
        ended.append(number)

    await some_at_once(range(8), work, limit=2)
    assert (most, ended) == (2, [1, 2, 3, 4, 5, 6, 7, 0])
    costs = [Cost(wall_s=1.0, cpu_s={1: 2.0, 2: 1.0}), Cost(wall_s=1.0, cpu_s={1: 2.0, 3: 0.5})]
    parts = {"engine": {1}, "queue": {9}}
    assert cpu_ms_a_turn(costs, parts, num_turns=1000) == {"engine": 4.0, "queue": 0.0, REST: 1.5}
