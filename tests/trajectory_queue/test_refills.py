"""Tests of dynamic sampling: another task replaces a group of equal returns, within a bound."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.builders.queue_builders import (
    end,
    evicted,
    fill,
    finalise_all,
    make_settings,
    restart,
    take_all,
)

from actors.outcomes import Disposition, OutcomePolicy, OutcomeRule
from actors.trajectory_queue.groups import Refills
from actors.trajectory_queue.messages import OpenSlot
from actors.trajectory_queue.state import QueueState
from actors.types import Outcome

EQUAL, DIFFERENT = (1.0, 1.0), (1.0, 0.0)


def make_queue(*, refills: int = 2, **fields: object) -> QueueState:
    return QueueState(make_settings(step=1, lag=0, max_variance_refills=refills, **fields))


def play(
    queue: QueueState, rewards: Sequence[float], *, outcome: Outcome = Outcome.COMPLETED
) -> None:
    """Fill the only slot and end its rollouts with these rewards, the last one with the outcome."""
    fill(queue, num_samples=len(rewards))
    assignments = take_all(queue)
    for reward, assignment in zip(rewards, assignments, strict=True):
        is_last = assignment is assignments[-1]
        end(queue, assignment, reward=reward, outcome=outcome if is_last else Outcome.COMPLETED)


def test_a_group_of_equal_returns_is_replaced_under_its_number() -> None:
    queue = make_queue()
    play(queue, EQUAL)
    assert evicted(queue) == {"zero_variance": 2} and queue.stats().ledger.is_balanced
    assert queue.stats().num_replaced_groups == 1 and queue.stats().waiting_bytes == 0
    assert queue.take_step() is None
    assert queue.admissible() == [OpenSlot(group_number=0, replacement=1)]
    play(queue, DIFFERENT)
    assert evicted(queue) == {"zero_variance": 2} and queue.take_step() is not None


def test_a_slot_without_refills_left_keeps_a_group_of_equal_returns() -> None:
    queue = make_queue(refills=2)
    for _ in range(2):
        play(queue, EQUAL)
    play(queue, EQUAL)
    assert evicted(queue) == {"zero_variance": 4}
    taken = queue.take_step()
    assert taken is not None and taken[1][0].group_id == "g000000.2"


def test_without_refills_a_group_of_equal_returns_is_kept() -> None:
    queue = make_queue(refills=0)
    play(queue, EQUAL)
    assert evicted(queue) == {} and queue.take_step() is not None


def test_each_group_number_has_its_own_refills() -> None:
    queue = make_queue(refills=1)
    for step in range(3):
        play(queue, EQUAL)
        play(queue, DIFFERENT)
        taken = queue.take_step()
        assert taken is not None and taken[1][0].group_id == f"g00000{step}.1"
        finalise_all(queue, *taken)
        assert queue.snapshot().variance_refills == {}
        queue.set_loaded_version(step + 1)


def test_a_restart_keeps_the_number_of_used_refills() -> None:
    queue = make_queue(refills=1)
    play(queue, EQUAL)
    later = restart(queue)
    play(later, EQUAL)
    assert later.take_step() is not None and evicted(later) == {"zero_variance": 2}


@pytest.mark.parametrize(
    ("rewards", "outcome", "is_replaced"),
    [
        # The second return is clamped: 0 and min(1, 0).
        ((0.0, 1.0), Outcome.MAX_TURNS, True),
        ((1.0, 1.0), Outcome.MAX_TURNS, False),
        # A graded, masked trajectory is in the baseline.
        ((1.0, 0.5), Outcome.TRUNCATED_TOKENS, False),
        ((0.5, 0.5), Outcome.TRUNCATED_TOKENS, True),
        # A dropped trajectory is not in the baseline, and the others are equal.
        ((1.0, 1.0, 0.0), Outcome.WALL_TIMEOUT, True),
    ],
)
def test_returns_are_compared_after_the_rules_of_outcomes(
    rewards: Sequence[float], outcome: Outcome, is_replaced: bool
) -> None:
    queue = make_queue()
    play(queue, rewards, outcome=outcome)
    assert (evicted(queue).get("zero_variance", 0) > 0) is is_replaced


def test_a_penalty_makes_equal_returns_differ() -> None:
    rule = OutcomeRule(disposition=Disposition.TRAIN_PENALISED, penalty=1.0)
    policy = OutcomePolicy(overrides={Outcome.TRUNCATED_TOKENS: rule})
    queue = make_queue(policies={"game": policy})
    play(queue, EQUAL, outcome=Outcome.TRUNCATED_TOKENS)
    assert evicted(queue) == {} and queue.take_step() is not None


def test_a_group_that_is_too_small_uses_no_refill() -> None:
    queue = make_queue(refills=1)
    play(queue, EQUAL, outcome=Outcome.WALL_TIMEOUT)
    assert evicted(queue) == {"wall_timeout": 1, "group_too_small": 1}
    assert queue.snapshot().variance_refills == {}


def test_a_group_with_a_lost_payload_is_compared_again() -> None:
    queue = make_queue()
    play(queue, DIFFERENT)
    assert queue.take_step() is not None
    assert queue.replay_lost(["g000000.0-0"]) == (1,)
    (again,) = take_all(queue)
    end(queue, again, reward=0.0)
    assert evicted(queue) == {"zero_variance": 2} and queue.stats().ledger.is_balanced


@given(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30))
def test_no_group_number_is_refilled_more_often_than_the_limit(
    limit: int, closed: list[tuple[int, bool]]
) -> None:
    refills = Refills(limit=limit)
    for number, is_equal in closed:
        before = refills.counts().get(number, 0)
        is_claimed = refills.claim(number, EQUAL if is_equal else DIFFERENT)
        assert is_claimed == (is_equal and before < limit)
    assert max(refills.counts().values(), default=0) <= limit
