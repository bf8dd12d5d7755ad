"""Tests of the pool of gateways, with small real actors that die and are replaced."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import ray

from actors.deadline import ActorLost
from actors.metrics import Part
from service.run.actor_pool import GatewayPool

pytestmark = [pytest.mark.usefixtures("cluster")]


@ray.remote(num_cpus=0, max_concurrency=10)
class Player:
    def __init__(self, *, is_healthy: bool = True) -> None:
        self.is_healthy = is_healthy

    async def run(self) -> None:
        while self.is_healthy:
            await asyncio.sleep(0.05)

    async def ping(self) -> None:
        return None

    async def stop(self) -> None:
        self.is_healthy = False


class Story:
    """A queue, a recorder and a function that starts actors, which note all calls in one list."""

    def __init__(self, *, are_healthy: bool) -> None:
        self.are_healthy = are_healthy
        self.told: list[str] = []
        self.texts: list[str] = []
        self.num_answering = 0

    def start(self, actor_id: str) -> Any:
        self.told.append(f"start {actor_id}")
        return Player.remote(is_healthy=self.are_healthy)

    async def release_actor(self, actor_id: str) -> int:
        self.told.append(f"release {actor_id}")
        return 7

    def replaced(self, part: Part, text: str) -> None:
        self.told.append(f"replaced {part}")
        self.texts.append(text)

    def answering(self, num_answering: int) -> None:
        self.num_answering = num_answering

    def pool(self) -> GatewayPool:
        return GatewayPool(
            1,
            self.start,
            term=2,
            frozen_after_s=60.0,
            queue=cast(Any, self),
            recorder=cast(Any, self),
            show_answering=self.answering,
        )


async def test_a_dead_gateway_is_released_before_its_successor_starts() -> None:
    story = Story(are_healthy=True)
    pool = story.pool()
    (first,) = pool.actors.values()
    watching = asyncio.create_task(pool.watch())
    async with asyncio.timeout(60.0):
        while story.num_answering < 1:
            await asyncio.sleep(0.02)
        ray.kill(first)
        while not (story.texts and story.num_answering):
            await asyncio.sleep(0.02)
    assert story.told == [
        "start gateway-2-0",
        "release gateway-2-0",
        "start gateway-2-1",
        "replaced gateway",
    ]
    assert "gateway gateway-2-0 died (" in story.texts[0]
    assert "7 rollouts continue from their stored turns with gateway-2-1" in story.texts[0]
    (second,) = pool.actors.values()
    assert second != first
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await pool.stop()
    # Ray ends the actor a moment after the request.
    with pytest.raises(ray.exceptions.RayActorError):
        async with asyncio.timeout(60.0):
            while True:
                await second.ping.remote()
                await asyncio.sleep(0.02)


@pytest.mark.chaos
async def test_actors_that_repeatedly_end_at_once_end_the_term() -> None:
    story = Story(are_healthy=False)
    with pytest.raises(ActorLost, match=r"gateways died 5 times in a row .* it stopped by itself"):
        await story.pool().watch()
    assert story.told.count("replaced gateway") == 4
