"""Frameworks' agents, unchanged, train the tiny policy, in minutes: `make proof PART=training`."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds.agents.agent_programs import KINDS
from worlds.agents.agent_training import (
    GROUP_SIZE,
    KEY,
    NUM_ERRORS,
    NUM_GROUPS,
    NUM_STEPS,
    standard_errors_of_rise,
    train,
)

pytestmark = [pytest.mark.proof, pytest.mark.training, pytest.mark.timeout(3600)]

# Of the agents of a run: a session that has reached a limit ends its agent with an error.
MOST_FAILED = 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("learns", [True, False], ids=["trained", "control"])
def test_the_policy_learns_from_a_framework_that_knows_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int, learns: bool
) -> None:
    monkeypatch.setenv("RAYLOOM_API_KEY", KEY)
    learning_rate = KINDS[kind].learning_rate if learns else 0.0
    trained = train(KINDS[kind], tmp_path, seed=seed, learning_rate=learning_rate)
    rise = standard_errors_of_rise(trained.rewards)
    told = ", ".join(f"{reward:.2f}" for reward in trained.rewards)
    print(f"{kind}, seed {seed}: {told}; {rise:.1f} standard errors; {trained.num_failed} failed")
    assert len(trained.rewards) == NUM_STEPS
    assert (rise >= NUM_ERRORS) == learns, told
    num_agents = NUM_STEPS * NUM_GROUPS * GROUP_SIZE
    assert trained.num_failed <= MOST_FAILED * num_agents, trained.failures
