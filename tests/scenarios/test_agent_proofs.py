"""Tests of unmodified agents of several frameworks, with which the tiny policy is trained.

Each training takes minutes, so that these are proofs: `make proof PART=training`.
"""

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

# The largest share of a run's agents that may fail: an agent whose session has reached a limit ends
# with an error.
MOST_FAILED = 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("learns", [True, False], ids=["trained", "control"])
def test_policy_learns_with_an_unmodified_agent_of_a_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int, learns: bool
) -> None:
    monkeypatch.setenv("RAYLOOM_API_KEY", KEY)
    learning_rate = KINDS[kind].learning_rate if learns else 0.0
    trained = train(KINDS[kind], tmp_path, seed=seed, learning_rate=learning_rate)
    rise = standard_errors_of_rise(trained.rewards)
    shown = ", ".join(f"{reward:.2f}" for reward in trained.rewards)
    print(f"{kind}, seed {seed}: {shown}; {rise:.1f} standard errors; {trained.num_failed} failed")
    assert len(trained.rewards) == NUM_STEPS
    assert (rise >= NUM_ERRORS) == learns, shown
    num_agents = NUM_STEPS * NUM_GROUPS * GROUP_SIZE
    assert trained.num_failed <= MOST_FAILED * num_agents, trained.failures
