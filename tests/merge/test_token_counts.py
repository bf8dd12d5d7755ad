"""Tests that each sampled token is counted once: as trained, or by the cause that excluded it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.builders.queue_builders import end, fill, make_settings, take_all
from worlds.builders.settings import step_settings
from worlds.builders.trajectory_builders import (
    make_trajectory,
    make_turn,
    random_turns,
)

from actors.merge.actor import BuiltStep
from actors.merge.groups import classify_groups
from actors.merge.step import StepResult, build_step
from actors.outcomes import Disposition, OutcomePolicy, OutcomeRule
from actors.trajectory_queue.ledger import (
    EvictionReason,
    TokenCause,
    TokenCounts,
)
from actors.trajectory_queue.state import QueueState
from actors.types import LeftOutReason, Outcome, Trajectory

PLAYED = [Outcome.COMPLETED] * 4 + [
    Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_CONTEXT, Outcome.MAX_TURNS, Outcome.WALL_TIMEOUT,
    Outcome.REWARD_ERROR, Outcome.MALFORMED_TOOL_CALL,
]  # fmt: skip
LEFT_OUT = st.dictionaries(st.sampled_from(list(LeftOutReason)), st.integers(1, 9), max_size=2)


def build(
    groups: list[tuple[Trajectory, ...]], policy: OutcomePolicy, **algorithm: object
) -> StepResult:
    names = {each.environment for group in groups for each in group}
    chosen = step_settings(policies=dict.fromkeys(names, policy), **algorithm)  # type: ignore[arg-type]
    return build_step(classify_groups(groups, chosen), chosen, step=1, trainer_version=9)


def count_in_a_loop(result: StepResult) -> tuple[int, dict[TokenCause, int]]:
    """Count the trained and untrained tokens one by one, in a plain loop."""
    trained, untrained = 0, Counter[TokenCause]()
    for member in result.members:
        trajectory = member.trajectory
        for sample in trajectory.samples:
            for turn in sample.turns:
                for is_fit in sample.mask[turn.tokens].tolist():
                    if member.reason is None and is_fit:
                        trained += 1
                    elif member.reason is None:
                        untrained[EvictionReason.TOKEN_MISALIGNED] += 1
                    elif member.reason is EvictionReason.MASKED:
                        untrained[EvictionReason(trajectory.outcome.value)] += 1
                    else:
                        untrained[member.reason] += 1
        for left_out, count in trajectory.left_out_tokens.items():
            untrained[left_out] += count
    return trained, dict(untrained)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_the_counts_of_a_step_equal_those_of_a_plain_loop(data: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept = [Disposition.TRAIN, Disposition.TRAIN_CLAMPED, Disposition.SCORE, Disposition.MASK]
    rules = {
        outcome: OutcomeRule(disposition=data.draw(st.sampled_from(kept)))
        for outcome in (Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_CONTEXT, Outcome.MAX_TURNS)
    }
    groups = [
        tuple(
            replace(
                make_trajectory(
                    random_turns(rng, max_turns=3),
                    rollout_id=f"g{group:06d}.0-{member}",
                    outcome=data.draw(st.sampled_from(PLAYED)),
                ),
                left_out_tokens=data.draw(LEFT_OUT),
            )
            for member in range(data.draw(st.integers(1, 4)))
        )
        for group in range(data.draw(st.integers(1, 3)))
    ]
    result = build(groups, OutcomePolicy(overrides=rules))
    tokens = result.report.tokens
    assert (tokens.trained, dict(tokens.untrained)) == count_in_a_loop(result)
    assert tokens.trained == result.report.num_trained_tokens
    left_out = sum(sum(each.left_out_tokens.values()) for group in groups for each in group)
    assert tokens.sampled == result.report.num_sampled_tokens + left_out


def test_the_cause_of_a_member_takes_precedence_over_that_of_its_group() -> None:
    def answer(member: int, num_tokens: int, outcome: Outcome) -> Trajectory:
        turn = make_turn([1], list(range(num_tokens)), reward=1.0)
        return make_trajectory([turn], rollout_id=f"g000000.0-{member}", outcome=outcome)

    cut = replace(answer(1, 5, Outcome.TRUNCATED_TOKENS), was_rewarded=False)
    result = build([(answer(0, 3, Outcome.COMPLETED), cut)], OutcomePolicy(), min_group_size=2)
    assert result.report.tokens == TokenCounts(
        untrained={EvictionReason.GROUP_TOO_SMALL: 3, EvictionReason.TRUNCATED_TOKENS: 5}
    )


def test_a_report_adds_dropped_tokens_and_none_is_trained_if_all_updates_are_skipped() -> None:
    dropped = TokenCounts(untrained={EvictionReason.GROUP_TOO_SMALL: 7})
    turns = [[make_turn([1], [2, 3], reward=float(number))] for number in range(2)]
    groups = [tuple(make_trajectory(t, rollout_id=f"g000000.0-{n}") for n, t in enumerate(turns))]
    result = build(groups, OutcomePolicy())
    built = BuiltStep(step=1, shards=(), outcomes=result.outcomes, report=result.report)
    told = {
        is_skipped: built.report_after(is_all_skipped=is_skipped, dropped=dropped).tokens
        for is_skipped in (False, True)
    }
    assert told[False] == TokenCounts(trained=4, untrained=dropped.untrained)
    assert told[True] == TokenCounts(
        untrained={EvictionReason.NONFINITE_STEP: 4, EvictionReason.GROUP_TOO_SMALL: 7}
    )


def one_step(queue: QueueState) -> TokenCounts:
    """Finalise the next step with everything trained; return the tokens dropped before."""
    taken = queue.take_step()
    assert taken is not None
    step, groups = taken
    finished = [rollout for group in groups for rollout in group.finished()]
    return queue.finalise(step, {r.rollout_id: None for r in finished})


def test_tokens_that_the_queue_drops_are_counted_once_with_the_next_step() -> None:
    queue = QueueState(make_settings(step=1, window=1, lag=0, max_variance_refills=1))
    fill(queue)
    first, second = take_all(queue)
    end(queue, first, num_sampled=3)
    end(queue, second, outcome=Outcome.AGENT_ERROR, num_sampled=4)
    (again,) = take_all(queue)
    # Masked, with the same return: the group is replaced.
    end(queue, again, outcome=Outcome.TRUNCATED_TOKENS, num_sampled=5)
    for reward in (1.0, 0.0):
        fill(queue)
        for number, assignment in enumerate(take_all(queue)):
            end(queue, assignment, reward=reward + number, num_sampled=6)
        if reward:
            assert one_step(queue) == TokenCounts(
                untrained={
                    EvictionReason.AGENT_ERROR: 4,
                    EvictionReason.ZERO_VARIANCE: 3,
                    EvictionReason.TRUNCATED_TOKENS: 5,
                }
            )
            queue.set_loaded_version(1)
    assert one_step(queue) == TokenCounts()


def test_a_result_after_the_early_close_of_its_group_is_counted_once() -> None:
    queue = QueueState(make_settings(step=1, window=1, lag=0))
    fill(queue, num_samples=3, enough=2)
    *early, late = take_all(queue)
    for number, assignment in enumerate(early):
        assert end(queue, assignment, reward=float(number))
    assert [end(queue, late, num_sampled=9) for _ in range(2)] == [False, False]
    # The result is put twice, because the response to the first call was lost.
    assert not end(queue, early[0], num_sampled=2)
    assert one_step(queue) == TokenCounts(untrained={EvictionReason.CANCELLED: 9})


def test_the_tokens_of_a_lost_payload_are_counted_with_the_repeated_step() -> None:
    queue = QueueState(make_settings(step=1, window=1, lag=0))
    fill(queue)
    for reward, assignment in enumerate(take_all(queue)):
        end(queue, assignment, reward=float(reward), num_sampled=3)
    taken = queue.take_step()
    assert taken is not None
    lost = taken[1][0].finished()[0]
    assert queue.replay_lost([lost.rollout_id]) == (1,)
    (again,) = take_all(queue)
    end(queue, again, reward=float(again.rollout_id != lost.rollout_id), num_sampled=4)
    assert one_step(queue) == TokenCounts(untrained={EvictionReason.INFRASTRUCTURE_ERROR: 3})
