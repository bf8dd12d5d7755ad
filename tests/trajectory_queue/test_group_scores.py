"""Tests of groups that are scored together before they close."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worlds.builders.queue_builders import (
    GAME,
    cut,
    end,
    evicted,
    fill,
    make_settings,
    restart,
    take,
    take_all,
)
from worlds.builders.trajectory_builders import make_summary

from actors.outcomes import Disposition, OutcomePolicy, OutcomeRule
from actors.trajectory_queue.groups import BlockRow, Group
from actors.trajectory_queue.state import QueueState
from actors.types import Outcome


def scoring_queue(**fields: Any) -> QueueState:
    return QueueState(make_settings(step=1, lag=0, window=1, scores_groups={*GAME}, **fields))


def put_scores(
    queue: QueueState, group: Group, *, actor: str = "a", outcome: Outcome = Outcome.COMPLETED
) -> bool:
    """Put the group's usable members with returns 1, 2, …; return whether they were accepted."""
    scored = [
        (
            make_summary(
                each.rollout_id, attempt=each.attempt, outcome=outcome, reward=float(number)
            ),
            BlockRow(block=object(), row=0, num_bytes=100),
        )
        for number, each in enumerate(group.usable(), start=1)
    ]
    return queue.put_group(actor, group.group_id, scored)


def played(queue: QueueState, *, num_samples: int = 3, enough: int | None = None) -> None:
    fill(queue, num_samples=num_samples, enough=enough)
    for assignment in take_all(queue):
        end(queue, assignment)


def test_a_group_closes_once_it_is_scored() -> None:
    queue = scoring_queue()
    fill(queue, num_samples=2)
    first, second = take_all(queue)
    end(queue, first)
    assert queue.take_group("a", environments=GAME) is None
    end(queue, second)
    assert queue.take_step() is None
    assert queue.take_group("a", environments=("other",)) is None
    group = queue.take_group("a", environments=GAME)
    assert group is not None and queue.take_group("b", environments=GAME) is None
    assert not cut(queue)[1].summaries
    assert put_scores(queue, group)
    taken = queue.take_step()
    assert taken is not None
    assert taken[1][0].baseline_returns() == [1.0, 2.0]
    assert [each.episode_return for each in cut(queue)[1].summaries] == [1.0, 2.0]
    assert not put_scores(queue, group)
    assert queue.stats().num_refused == 1


def test_only_the_members_of_the_baseline_are_scored() -> None:
    masked = OutcomePolicy(
        overrides={Outcome.TRUNCATED_TOKENS: OutcomeRule(disposition=Disposition.MASK)}
    )
    queue = scoring_queue(policies={GAME[0]: masked})
    fill(queue, num_samples=4)
    ends = [Outcome.COMPLETED, Outcome.TRUNCATED_TOKENS, Outcome.WALL_TIMEOUT, Outcome.COMPLETED]
    for assignment, outcome in zip(take_all(queue), ends, strict=True):
        summary = make_summary(assignment.rollout_id, outcome=outcome)
        is_graded = outcome is Outcome.COMPLETED
        row = BlockRow(block=object(), row=0, num_bytes=100)
        queue.put("a", replace(summary, is_graded=is_graded), row)
    group = queue.take_group("a", environments=GAME)
    assert group is not None
    assert [each.rollout_id[-1] for each in group.usable()] == ["0", "3"]
    assert put_scores(queue, group)
    assert queue.take_step() is not None
    told = [each.outcome for each in cut(queue)[1].summaries]
    assert sorted(told) == sorted(ends)


def test_a_group_with_enough_usable_members_is_scored_without_the_rest() -> None:
    queue = scoring_queue()
    fill(queue, num_samples=3, enough=2)
    for assignment in take(queue, 2):
        end(queue, assignment)
    group = queue.take_group("a", environments=GAME)
    assert group is not None and len(group.usable()) == 2
    assert evicted(queue) == {"cancelled": 1}


def test_a_failed_score_evicts_the_group_as_reward_errors() -> None:
    queue = scoring_queue()
    played(queue)
    group = queue.take_group("a", environments=GAME)
    assert group is not None
    assert put_scores(queue, group, outcome=Outcome.REWARD_ERROR)
    assert evicted(queue) == {"reward_error": 3}
    assert queue.take_step() is None and len(queue.admissible()) == 1
    failed = queue.drain().failed_groups
    assert failed is not None and failed.main_outcome is Outcome.REWARD_ERROR


def test_a_group_too_small_is_not_scored() -> None:
    queue = scoring_queue()
    fill(queue, num_samples=2)
    first, second = take_all(queue)
    end(queue, first)
    end(queue, second, outcome=Outcome.WALL_TIMEOUT)
    assert queue.take_group("a", environments=GAME) is None
    assert evicted(queue) == {"wall_timeout": 1, "group_too_small": 1}
    assert len(queue.drain().summaries) == 2


def test_a_group_whose_scorer_died_is_scored_by_another_actor() -> None:
    queue = scoring_queue()
    played(queue)
    first = queue.take_group("a", environments=GAME)
    assert first is not None
    queue.release_actor("a")
    again = queue.take_group("b", environments=GAME)
    assert again is first
    assert not put_scores(queue, first, actor="a")
    assert put_scores(queue, first, actor="b")
    assert queue.take_step() is not None


def test_after_a_restart_a_group_is_played_and_scored_again() -> None:
    queue = scoring_queue()
    played(queue)
    assert queue.take_group("a", environments=GAME) is not None
    queue = restart(queue)
    assert queue.take_group("a", environments=GAME) is None
    for assignment in take_all(queue):
        end(queue, assignment)
    assert queue.take_group("a", environments=GAME) is not None


def test_a_scored_group_with_a_lost_payload_is_played_again_completely() -> None:
    queue = scoring_queue()
    played(queue)
    group = queue.take_group("a", environments=GAME)
    assert group is not None and put_scores(queue, group)
    assert queue.take_step() is not None
    queue.replay_lost([next(iter(group.rollouts))])
    again = take_all(queue)
    assert len(again) == 3
    for assignment in again:
        end(queue, assignment)
    group = queue.take_group("a", environments=GAME)
    assert group is not None and put_scores(queue, group)
    taken = queue.take_step()
    assert taken is not None and taken[1][0].baseline_returns() == [1.0, 2.0, 3.0]


def test_lost_payloads_are_played_again_and_cancelled_groups_are_not_scored() -> None:
    queue = scoring_queue()
    played(queue)
    group = queue.take_group("a", environments=GAME)
    assert group is not None and queue.lose_group("a", group.group_id)
    for assignment in take_all(queue):
        end(queue, assignment)
    group = queue.take_group("a", environments=GAME)
    assert group is not None and queue.cancel_group(group.group_id)
    assert not put_scores(queue, group)
    assert queue.stats().ledger.is_balanced
