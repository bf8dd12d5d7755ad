"""Training of the tiny policy by agents of one kind, and a measure of how much its reward rose."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from worlds.agents.agent_programs import AgentKind, Agents, launching
from worlds.agents.guessing_agent import SessionClient
from worlds.runs.run_driver import START_S, Run, running

KEY = "a key of the proof, long enough"
NUM_STEPS = 24
NUM_GROUPS = 6
GROUP_SIZE = 6
# Agents that play at once. It is small because their processes share the machine with the engine.
NUM_PLAYING = 8
RUN_S = 1500.0
NUM_COMPARED = 5
NUM_ERRORS = 3.0
"""Standard errors by which the reward must rise."""

CONFIG: dict[str, Any] = {
    "run": {"name": "agents", "steps": NUM_STEPS, "checkpoint_every": 100, "evaluate_every": 1000},
    "model": {"tiny": {}, "max_context_tokens": 384},
    "tasks": {"environment": "session", "evaluation_tasks": 0},
    "rollouts": {
        "max_turns": 6,
        "max_tokens_per_turn": 32,
        # An answer that reaches the limit of tokens is trained. If it were masked, a policy that
        # never ends its answers would lose nothing.
        "outcomes": {"truncated_tokens": {"disposition": "train_clamped"}},
    },
    "algorithm": {
        "groups_per_step": NUM_GROUPS,
        "group_size": GROUP_SIZE,
        "max_lag": 0,
        "minibatches": 2,
    },
    "inference": {"enforce_eager": True, "max_num_seqs": 64, "kv_cache_gib": 0.25},
    "trainer": {
        "num_ranks": 1,
        "tokens_per_micro_batch": 4096,
        "warmup_updates": 10,
        "betas": [0.9, 0.99],
        "adam_epsilon": 1e-5,
    },
    "service": {"port": 0},
}


def standard_errors_of_rise(rewards: Sequence[float]) -> float:
    """Return how many standard errors the mean reward rose from the first steps to the last ones.

    The formula is (b - a) / sqrt((s_a^2 + s_b^2) / n), where a and b are the means of the first and
    the last n steps, and s_a^2 and s_b^2 are their sample variances.

    Example: standard_errors_of_rise([0, 1, 0, 1, 0, 9, 10, 11, 10, 11, 10]) -> 28.9
    """
    first, last = rewards[:NUM_COMPARED], rewards[-NUM_COMPARED:]
    variance = (statistics.variance(first) + statistics.variance(last)) / NUM_COMPARED
    rise = statistics.mean(last) - statistics.mean(first)
    return rise / max(variance, 1e-12) ** 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A run's mean reward of each step, and the failures of its agents."""

    rewards: tuple[float, ...]
    num_failed: int
    """Number of agents that ended with an error."""
    failures: tuple[str, ...]
    """The last line that each agent printed which ended with an error."""


def config_file(directory: Path, *, seed: int, learning_rate: float) -> Path:
    tree = {name: dict(keys) for name, keys in CONFIG.items()}
    tree["run"]["seed"] = seed
    tree["model"]["tiny"] = {"seed": seed}
    tree["trainer"]["learning_rate"] = learning_rate
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def train(kind: AgentKind, directory: Path, *, seed: int, learning_rate: float) -> Trained:
    """Train for NUM_STEPS steps on sessions that agents play in `directory`.

    The environment variable RAYLOOM_API_KEY must be KEY.
    """
    config = config_file(directory, seed=seed, learning_rate=learning_rate)
    failures: list[str] = []
    with (
        # The pool is left last: the end of `launching` kills the agents for which its threads wait.
        ThreadPoolExecutor(NUM_PLAYING) as pool,
        launching(kind, directory) as agents,
        running(config, directory / "run", command="serve") as run,
        client_of(run) as client,
    ):
        sessions = SessionClient(client)
        for step in range(NUM_STEPS):
            plays = [
                pool.submit(_play, kind, agents, sessions, session, place, number=number)
                for group in range(NUM_GROUPS)
                for number in [step * NUM_GROUPS + group]
                for session in sessions.create(f"game-{number}", limit_s=START_S)
                for place in [directory / "games" / session["id"]]
            ]
            failures += [line for play in plays if (line := play.result()) is not None]
        run.wait_for_output("the API continues to answer", limit_s=RUN_S)
        run.interrupt()
        assert run.wait(limit_s=RUN_S) == 0, run.log()
        summary = run.summary()
        assert summary["ledger"]["is_balanced"] and summary["ledger"]["in_flight"] == 0
        rewards = tuple(record.value("reward_mean") or 0.0 for record in run.history().steps)
    return Trained(rewards=rewards, num_failed=len(failures), failures=tuple(failures))


def client_of(run: Run) -> httpx.Client:
    address = run.api_address(limit_s=START_S)
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.Client(base_url=address, headers=headers, timeout=START_S)


def _play(
    kind: AgentKind,
    agents: Agents,
    sessions: SessionClient,
    session: dict[str, Any],
    place: Path,
    *,
    number: int,
) -> str | None:
    """Let an agent play one session, and finish the session with its reward.

    Return the last line of an agent that ended with an error, whose reward is 0; None if it ended
    without one.
    """
    place.mkdir(parents=True)
    game = kind.begin(place, number)
    printed, code = agents.play(game, session["env"])
    reward = 0.0 if code else kind.judge(printed, game)
    sessions.finish(session, reward=reward, components={"won": reward}, limit_s=START_S)
    return printed.strip().rpartition("\n")[2] if code else None
