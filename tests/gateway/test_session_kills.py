"""Tests with kill -9 of a gateway between any two awaits; clients remember the turns they got.

Each life of the gateway runs in its own event loop, which ends at a random step. What it had not
stored is lost, and the next gateway resumes from the store. Clients send requests without an answer
again under the same id, as replicas of the API do, or as marked retries, as SDKs do. Some clients
are killed too.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from worlds.builders.episode_builders import reply
from worlds.faults.mortal_loop import Killed, MortalLoop
from worlds.parts.gateway_world import SPEC, Gateway, Policy, user

from actors.environment.protocol import Message
from actors.types import Outcome, Trajectory
from service.access.keys import REWARD
from service.config.sections import SessionSettings
from service.intake.session import Finish, StoredSession

NUM_SESSIONS, NUM_KILLS, NUM_ROUNDS = 4, 15, 8
# A gateway is killed before this step of its life at the latest, of some thousands in a play.
MOST_STEPS = 900
SPEC = replace(SPEC, max_turns=1000, shows_tokens=True)


@dataclass
class Agent:
    """A client that survives its gateway and remembers the answers that it got."""

    name: str
    rng: random.Random
    seen: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Sampled token ids of the answers, by turn id."""
    asked: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    """Messages of the requests without an answer, by request id."""
    chats: list[tuple[Message, ...]] = field(default_factory=list)
    """Conversations, each up to its last reply."""
    num_rounds: int = NUM_ROUNDS
    """Number of rounds that the agent still plays."""
    view: StoredSession | None = None
    """The session in the answer to its finish; None before."""

    async def work(self, gateway: Gateway) -> None:
        """Resume the requests without an answer and play to the end of the session."""
        await asyncio.gather(*(self._resume(gateway, name) for name in list(self.asked)))
        while self.num_rounds:
            self.num_rounds -= 1
            # Sometimes a sub-agent sends a request at the same time.
            num_asked = self.rng.choice((1, 1, 2))
            await asyncio.gather(*(self._ask(gateway) for _ in range(num_asked)))
        first, again = await asyncio.gather(self._finish(gateway), self._finish(gateway))
        assert first == again and self.view in (None, first)
        self.view = first

    async def _ask(self, gateway: Gateway) -> None:
        name = self._new_request(self._next())
        if self.rng.random() < 0.3:
            await self._leave(gateway, name)
        else:
            await self._answered(gateway, name)

    def _next(self) -> tuple[Message, ...]:
        """Return the messages of a new conversation, or of a repeated, compacted or longer one."""
        kind = self.rng.random()
        if not self.chats or kind < 0.2:
            return (user(f"{self.name} begins {self.rng.choice('abc')}"),)
        chat = self.rng.choice(self.chats)
        if kind < 0.4:
            return chat[:-1]
        if kind < 0.5:
            return (chat[0], user(f"in short: {len(self.seen)}"))
        return (*chat, user(f"and {len(self.seen)}"))

    def _new_request(self, messages: tuple[Message, ...]) -> str:
        name = f"{self.name} {self.rng.random()}"
        self.asked[name] = messages
        return name

    async def _resume(self, gateway: Gateway, name: str) -> None:
        """Send a request again, unchanged or as a retry, or forget it as a killed client does."""
        kind = self.rng.random()
        if kind < 0.2:
            del self.asked[name]
            self.chats = []
        elif kind < 0.5:
            await self._answered(gateway, self._new_request(self.asked.pop(name)), is_retry=True)
        else:
            await self._answered(gateway, name)

    async def _leave(self, gateway: Gateway, name: str) -> None:
        """Break the connection of a request and retry; the gateway learns of it at any time."""
        messages = self.asked.pop(name)
        gone = asyncio.create_task(gateway.ask(*messages, name=self.name, request_id=name))
        await self._dawdle()
        again = self._answered(gateway, self._new_request(messages), is_retry=True)
        answered = asyncio.create_task(again)
        await self._dawdle()
        await gateway.sessions.abandon(self.name, name)
        await asyncio.gather(gone, answered)

    async def _dawdle(self) -> None:
        for _ in range(self.rng.randrange(60)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.3:
            await asyncio.sleep(0.01)

    async def _answered(self, gateway: Gateway, name: str, *, is_retry: bool = False) -> None:
        messages = self.asked[name]
        got = await gateway.ask(*messages, name=self.name, request_id=name, is_retry=is_retry)
        assert got.sampled_token_ids is not None
        ids = tuple(got.sampled_token_ids.tolist())
        assert self.seen.setdefault(got.turn_id, ids) == ids
        self.chats.append((*messages, got.message))
        del self.asked[name]

    async def _finish(self, gateway: Gateway) -> StoredSession:
        key = gateway.key(REWARD, self.name)
        return await gateway.sessions.finish(self.name, key, Finish(reward=0.5))


@dataclass
class Play:
    """Several sessions, from creation to trajectories, over several lives of the gateway."""

    directory: Path
    rng: random.Random

    def __post_init__(self) -> None:
        names = [f"task-{member}" for member in range(NUM_SESSIONS)]
        self.agents = [Agent(name, random.Random(self.rng.random())) for name in names]
        # Each turn has its own text.
        self.policy = Policy(lambda number: reply(f"{number}<|im_end|>"), before=self._sample)
        self.num_kills = 0
        self._gateway = self._new_gateway()
        self._gateway.create(spec=SPEC, members=NUM_SESSIONS)
        self._gateway.store.close()

    def _new_gateway(self) -> Gateway:
        settings = SessionSettings(hold_s=5.0)
        return Gateway(
            self.directory, policy=self.policy, settings=settings, max_context_tokens=100_000
        )

    async def _sample(self) -> None:
        await asyncio.sleep(self.rng.choice((0, 0, 0.002, 0.01)))

    def play_to_end(self) -> list[Trajectory]:
        lives = []
        try:
            while True:
                dies_at = self.rng.randrange(1, MOST_STEPS) if len(lives) < NUM_KILLS else None
                lives.append(MortalLoop(dies_at=dies_at))
                with suppress(Killed):
                    return lives[-1].run(self._live(attempt=len(lives) - 1))
                self.num_kills += 1
                # A transaction is committed whole or not at all: wait for the one that has begun.
                self._gateway.commits._thread._executor.shutdown()
                self._gateway.store.close()
        finally:
            for life in lives:
                life.bury()
            self._gateway.store.close()

    async def _live(self, *, attempt: int) -> list[Trajectory]:
        self._gateway = gateway = self._new_gateway()
        for agent in self.agents:
            gateway.admit(agent.name, attempt=attempt)
        await asyncio.gather(*(agent.work(gateway) for agent in self.agents))
        return [await gateway.trajectory(agent.name) for agent in self.agents]


@pytest.mark.parametrize("seed", range(14))
def test_a_gateway_killed_at_any_step_loses_no_turn_and_trains_none_twice(
    tmp_path: Path, seed: int
) -> None:
    play = Play(tmp_path, random.Random(seed))
    trajectories = play.play_to_end()
    for agent, trajectory in zip(play.agents, trajectories, strict=True):
        spans = [(sample, turn) for sample in trajectory.samples for turn in sample.turns]
        trained = Counter(tuple(sample.token_ids[turn.tokens].tolist()) for sample, turn in spans)
        assert max(trained.values()) == 1
        lost = {name for name, ids in agent.seen.items() if ids not in trained}
        assert not lost, (lost, trajectory.outcome, trajectory.detail, agent.view)
        assert all(sample.mask[turn.tokens].all() for sample, turn in spans)
        assert trajectory.num_trained == sum(map(len, trained))
        assert agent.view is not None
        assert len(trained) == agent.view.totals.num_turns - agent.view.totals.num_left_out
        assert (trajectory.outcome, trajectory.episode_return) == (Outcome.COMPLETED, 0.5)
