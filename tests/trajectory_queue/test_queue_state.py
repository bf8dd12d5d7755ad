"""Tests of the queue's state: bounds, retries, lost payloads, restarts, and single counting."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from worlds.builders.queue_builders import (
    GAME,
    end,
    evicted,
    fill,
    finalise_all,
    make_settings,
    restart,
    take,
    take_all,
)
from worlds.builders.trajectory_builders import make_summary, make_task

from actors.limits import MIB
from actors.trajectory_queue.groups import BlockRow, GroupRequest
from actors.trajectory_queue.ledger import LedgerEventKind
from actors.trajectory_queue.messages import OpenSlot
from actors.trajectory_queue.state import QueueState
from actors.types import SESSION, Outcome


def test_retries_are_handed_out_first_and_then_the_oldest_group() -> None:
    queue = QueueState(make_settings(step=1, lag=2))
    assert fill(queue) == [0, 1, 2]
    first, second, third = take(queue, 3)
    assert [x.rollout_id for x in (first, second, third)] == [
        "g000000.0-0",
        "g000000.0-1",
        "g000001.0-0",
    ]
    assert end(queue, third, outcome=Outcome.ENVIRONMENT_ERROR)
    retried = take(queue, 1)[0]
    assert retried.trajectory_id == "g000001.0-0.a1"
    assert queue.stats().num_retries == 1


def test_a_step_is_taken_finalised_and_balances() -> None:
    queue = QueueState(make_settings())
    fill(queue)
    for assignment in take_all(queue):
        assert queue.stats().ledger.is_balanced
        end(queue, assignment)
    taken = queue.take_step()
    assert taken is not None and taken[0] == 1
    assert [group.number for group in taken[1]] == [0, 1]
    assert finalise_all(queue, *taken) == [f"g00000{g}.0-{m}" for g in (0, 1) for m in (0, 1)]
    stats = queue.stats()
    assert stats.ledger.trained == 4 and stats.ledger.in_flight == 4 and stats.num_waiting == 4
    kinds = Counter(event.kind for event in queue.drain().events)
    assert kinds == {LedgerEventKind.ADMITTED: 8, LedgerEventKind.TRAINED: 4}


def test_a_rollout_is_evicted_with_its_reason_after_the_last_retry() -> None:
    queue = QueueState(make_settings(step=1, lag=0))
    fill(queue, num_samples=3)
    for attempt in range(3):
        doomed = take(queue, 1)[0]
        assert (doomed.rollout_id, doomed.attempt) == ("g000000.0-0", attempt)
        end(queue, doomed, outcome=Outcome.ENVIRONMENT_ERROR)
    assert evicted(queue) == {"environment_error": 1}
    for assignment in take_all(queue):
        end(queue, assignment)
    taken = queue.take_step()
    assert taken is not None and len(taken[1][0].finished()) == 2


def test_a_group_that_is_too_small_is_evicted_and_its_number_gets_another_task() -> None:
    queue = QueueState(make_settings(step=1, lag=0))
    fill(queue, num_samples=2)
    survivor, dropped = take_all(queue)
    end(queue, survivor)
    end(queue, dropped, outcome=Outcome.WALL_TIMEOUT)
    assert evicted(queue) == {"group_too_small": 1, "wall_timeout": 1}
    assert queue.stats().ledger.is_balanced and queue.stats().num_replaced_groups == 1
    assert queue.admissible() == [OpenSlot(group_number=0, replacement=1)]
    assert fill(queue) == [0]
    assert [x.rollout_id for x in take_all(queue)] == ["g000000.1-0", "g000000.1-1"]


def test_an_ungraded_truncated_trajectory_is_not_a_usable_member() -> None:
    queue = QueueState(make_settings(step=1, lag=0))
    fill(queue, num_samples=2)
    first, second = take_all(queue)
    end(queue, first)
    cut_off = make_summary(second.rollout_id, outcome=Outcome.TRUNCATED_TOKENS)
    payload = BlockRow(block=object(), row=0, num_bytes=1)
    assert queue.put("a", replace(cut_off, is_graded=False), payload)
    assert evicted(queue) == {"group_too_small": 2}


def test_a_group_closes_early_when_enough_are_usable_and_cancels_the_rest() -> None:
    queue = QueueState(make_settings(step=1, lag=0))
    fill(queue, num_samples=4, enough=2)
    one, two, three = take(queue, 3)
    end(queue, one)
    end(queue, two)
    assert evicted(queue) == {"cancelled": 2}
    assert queue.take_step() is not None
    assert not end(queue, three)
    assert queue.stats().num_refused == 1


def test_late_results_and_results_of_other_actors_are_refused() -> None:
    queue = QueueState(make_settings(step=1, lag=0))
    fill(queue)
    first, second = take_all(queue, actor="dead")
    assert queue.release_actor("dead") == 2
    again = take_all(queue, actor="b")
    assert [x.attempt for x in again] == [1, 1]
    assert not end(queue, first, actor="dead")
    assert not end(queue, again[0], actor="someone else")
    assert end(queue, again[0], actor="b")
    assert not end(queue, again[0], actor="b")
    assert not end(queue, second, actor="b")
    stats = queue.stats()
    assert stats.num_refused == 4 and stats.num_waiting == 1 and stats.num_handed_out == 1
    assert stats.ledger.is_balanced


def test_the_bounds_stop_new_groups_but_not_the_step_that_is_collected() -> None:
    queue = QueueState(make_settings(step=2, lag=3, max_items=1))
    fill(queue)
    step = take_all(queue)
    assert {x.group_number for x in step} == {0, 1}
    for assignment in step:
        end(queue, assignment, num_bytes=10)
    assert take_all(queue) == [] and queue.holds_back(GAME)
    taken = queue.take_step()
    assert taken is not None and not queue.holds_back(GAME)
    assert {x.group_number for x in take_all(queue)} == {2, 3}


def test_an_actor_gets_only_rollouts_of_its_environments_within_common_bounds() -> None:
    queue = QueueState(make_settings(step=2, lag=2, max_items=6))
    both = ("game", SESSION)
    fill(queue, environments=both)  # Sessions are the groups of odd numbers.
    assert take_all(queue, environments=()) == take_all(queue, environments=("other",)) == []
    sessions = take(queue, 3, actor="gateway", environments=(SESSION,))
    assert [x.group_number for x in sessions] == [1, 1, 3]
    assert [x.group_number for x in take(queue, 2)] == [0, 0]
    assert [x.rollout_id for x in take(queue, 1, environments=both)] == ["g000002.0-0"]
    # At the bound, neither environment gets rollouts of a later step; only the bound is the reason.
    assert take_all(queue, environments=both) == []
    assert queue.holds_back(GAME) and queue.holds_back((SESSION,)) and queue.holds_back(both)
    assert not queue.holds_back(("other",)) and not queue.holds_back(())
    # A failed attempt of the step that is collected is still handed out to an actor that plays it.
    assert end(queue, sessions[0], actor="gateway", outcome=Outcome.ENVIRONMENT_ERROR)
    take(queue, 1, environments=GAME)
    assert take_all(queue) == [] and queue.holds_back(GAME)
    assert not queue.holds_back((SESSION,))
    again = take_all(queue, actor="gateway", environments=(SESSION,))
    assert [x.trajectory_id for x in again] == ["g000001.0-0.a1"]


def test_rollouts_of_two_environments_have_the_order_of_one() -> None:
    mixed, single = QueueState(make_settings(lag=3)), QueueState(make_settings(lag=3))
    both = ("game", SESSION)
    fill(mixed, environments=both)
    fill(single)
    for queue in (mixed, single):
        failed = take(queue, 5, environments=both)[3]
        assert end(queue, failed, outcome=Outcome.ENVIRONMENT_ERROR)
    in_order = [x.trajectory_id for x in take_all(single)]
    assert [x.trajectory_id for x in take_all(mixed, environments=both)] == in_order


def test_a_durable_rollout_is_handed_out_again_without_a_failed_attempt() -> None:
    """Check that losing its actor or payload costs no attempt, because the store has the turns."""
    shape = make_settings(step=1, lag=0, window=1, durable=frozenset({SESSION}))
    queue = QueueState(shape)
    fill(queue, num_samples=3, enough=2, environments=(SESSION,))
    sessions = (SESSION,)
    for number in range(9):
        held = take(queue, 2, actor=f"gateway {number}", environments=sessions)
        assert {x.attempt for x in held} == {number}
        lose = queue.give_back if number % 2 else queue.release_actor
        assert lose(f"gateway {number}") == 2
        assert not end(queue, held[0], actor=f"gateway {number}")
    assert queue.stats().num_retries == 0 and queue.drain().failed_groups is None
    held = take(queue, 2, actor="last", environments=sessions)
    assert [end(queue, x, actor="last") for x in held] == [True, True]
    taken = queue.take_step()
    assert taken is not None
    for _ in range(4):
        # One payload is lost; the group keeps the other and waits for the lost one.
        assert queue.replay_lost([held[0].rollout_id]) == (1,)
        assert queue.take_step() is None
        (again,) = take_all(queue, actor="last", environments=sessions)
        assert again.rollout_id == held[0].rollout_id
        assert end(queue, again, actor="last")
        assert queue.take_step() is not None
    assert again.attempt == 13
    assert {each.num_failures for each in queue.snapshot().groups[0].rollouts} == {0}
    # The third session was cancelled when the group had enough members.
    assert evicted(queue) == {"cancelled": 1}


def test_the_age_is_that_of_the_oldest_waiting_trajectory() -> None:
    queue = QueueState(make_settings(step=1, lag=3, window=1))
    fill(queue)
    assert queue.stats(now=9.0).oldest_s is None
    first = take(queue, 4)
    for assignment, arrived_at in zip(first, (3.0, 2.0, 5.0, 7.0), strict=True):
        end(queue, assignment, arrived_at=arrived_at)
    assert queue.stats(now=9.0).oldest_s == 7.0
    assert queue.take_step() is not None
    assert queue.stats(now=9.0).oldest_s == 4.0


def test_waiting_bytes_stop_new_groups_until_a_step_takes_them() -> None:
    queue = QueueState(make_settings(step=1, lag=3, window=1, max_mib=250))
    fill(queue)
    first = take(queue, 4)
    for assignment in first[1:]:
        end(queue, assignment, num_bytes=100 * MIB)
    assert queue.stats().waiting_bytes == 300 * MIB
    assert take_all(queue) == []
    end(queue, first[0], num_bytes=100 * MIB)
    assert queue.take_step() is not None
    assert queue.stats().waiting_bytes == 200 * MIB
    assert len(take_all(queue)) == 4


def test_a_block_counts_with_its_whole_size_while_any_of_its_rows_waits() -> None:
    queue = QueueState(make_settings(step=1, lag=3, window=1))
    fill(queue)
    block = object()
    for row, assignment in enumerate(take(queue, 8)):
        summary = make_summary(assignment.rollout_id, attempt=assignment.attempt, num_bytes=1)
        assert queue.put("a", summary, BlockRow(block=block, row=row, num_bytes=64))
    assert queue.stats().num_waiting == 8 and queue.stats().waiting_bytes == 64
    for _ in range(3):
        assert queue.take_step() is not None
    assert queue.stats().num_waiting == 2 and queue.stats().waiting_bytes == 64
    assert queue.take_step() is not None
    assert queue.stats().waiting_bytes == 0


def test_lost_payloads_roll_back_their_step_and_all_later_ones() -> None:
    queue = QueueState(make_settings(step=1, lag=3, window=1))
    fill(queue)
    for assignment in take_all(queue):
        end(queue, assignment)
    steps = [queue.take_step() for _ in range(3)]
    assert all(steps)
    finalise_all(queue, *steps[0])  # type: ignore[misc]
    assert queue.replay_lost(["g000001.0-1", "g000000.0-0", "nobody"]) == (2, 3)
    assert queue.take_step() is None
    again = take_all(queue)
    assert [(x.rollout_id, x.attempt) for x in again] == [("g000001.0-1", 1)]
    end(queue, again[0])
    taken = [queue.take_step() for _ in range(3)]
    assert [t and (t[0], t[1][0].number) for t in taken] == [(2, 1), (3, 2), (4, 3)]
    with pytest.raises(ValueError, match="step 1 is not taken"):
        queue.finalise(1, {})


def test_a_list_of_outcomes_without_all_rollouts_is_refused() -> None:
    queue = QueueState(make_settings(step=1, lag=0))
    fill(queue)
    for assignment in take_all(queue):
        end(queue, assignment)
    taken = queue.take_step()
    assert taken is not None
    one = "g000000.0-0"
    for wrong in ([one], [one, "g000009.0-0"]):
        with pytest.raises(ValueError, match="expected one outcome for each rollout"):
            queue.finalise(1, dict.fromkeys(wrong))
    assert queue.stats().ledger.trained == 0
    finalise_all(queue, *taken)


def test_groups_without_a_slot_or_with_too_few_samples_are_refused() -> None:
    queue = QueueState(make_settings(step=1, lag=0))
    with pytest.raises(ValueError, match="group 5 is not free for a task"):
        queue.admit([GroupRequest(group_number=5, task=make_task(5), num_samples=2)])
    with pytest.raises(ValueError, match="1 usable samples"):
        queue.admit([GroupRequest(group_number=0, task=make_task(0), num_samples=1)])
    assert queue.stats().ledger.admitted == 0 and len(queue.admissible()) == 1


def test_cancel_all_ends_the_run_without_open_rollouts() -> None:
    queue = QueueState(make_settings())
    fill(queue)
    for assignment in take_all(queue)[:5]:
        end(queue, assignment)
    assert queue.take_step() is not None
    assert queue.cancel_all() == 8
    stats = queue.stats()
    assert stats.ledger.in_flight == 0 and evicted(queue) == {"cancelled": 8}
    assert queue.admissible() == [] and take_all(queue) == [] and queue.take_step() is None
    with pytest.raises(ValueError, match="after cancel_all"):
        queue.finalise(1, {})
    # A later run uses the same group numbers, but new group ids.
    later = restart(queue)
    assert fill(later)[0] == 0
    assert take_all(later)[0].rollout_id == "g000000.1-0"


def test_a_restart_repeats_unfinalised_rollouts_and_keeps_their_failure_counts() -> None:
    queue = QueueState(make_settings(step=1, lag=2, window=1))
    fill(queue, num_samples=3)
    for assignment in take_all(queue):
        is_first = assignment.rollout_id == "g000001.0-0"
        end(queue, assignment, outcome=Outcome.AGENT_ERROR if is_first else Outcome.COMPLETED)
    first = queue.take_step()
    assert first is not None
    finalise_all(queue, *first)
    assert queue.take_step() is None  # group 1 waits for its retry
    queue.set_loaded_version(1)
    later = restart(queue)
    counts = later.stats().ledger
    assert (counts.admitted, counts.trained, counts.in_flight) == (9, 3, 6)
    again = take_all(later)
    assert {(x.rollout_id, x.attempt) for x in again} == {
        (f"g00000{group}.0-{member}", 1) for group in (1, 2) for member in (0, 1, 2)
    }
    assert again[0].task == make_task(1)
    doomed = next(x for x in again if x.rollout_id == "g000001.0-0")
    end(later, doomed, outcome=Outcome.AGENT_ERROR)
    assert evicted(later) == {"agent_error": 1}


@pytest.mark.parametrize("outcome", [Outcome.WALL_TIMEOUT, Outcome.INFRASTRUCTURE_ERROR])
def test_a_rollout_that_times_out_while_turns_are_held_is_played_again(outcome: Outcome) -> None:
    queue = QueueState(make_settings(step=1, lag=0))
    fill(queue)
    first, second = take_all(queue)
    queue.hold(True)
    # While turns are held no rollouts are handed out, whatever the outcome.
    for _ in range(5):
        assert end(queue, first, outcome=outcome)
        assert take_all(queue) == []
        queue.hold(False)
        [first] = take_all(queue)
        queue.hold(True)
    queue.hold(False)
    # A rollout that ends by itself, during the hold or later, counts with its own outcome.
    assert end(queue, second) and end(queue, first)
    assert first.attempt == 5 and queue.stats().ledger.in_flight == 2
    assert [each.attempt for each in queue.drain().summaries] == [0, 5]
    taken = queue.take_step()
    assert taken is not None
    finalise_all(queue, *taken)
    # After the hold, a timeout counts as a failure again.
    queue.set_loaded_version(1)
    fill(queue)
    for assignment in take_all(queue):
        assert end(queue, assignment, outcome=Outcome.WALL_TIMEOUT)
    assert queue.stats().num_replaced_groups == 1 and queue.stats().ledger.is_balanced


def test_a_durable_session_that_times_out_while_turns_are_held_has_ended() -> None:
    settings = replace(make_settings(step=1, lag=0), durable=frozenset(GAME))
    queue = QueueState(settings)
    fill(queue)
    taken = take_all(queue)
    queue.hold(True)
    for assignment in taken:
        assert end(queue, assignment, outcome=Outcome.WALL_TIMEOUT)
    assert queue.stats().num_replaced_groups == 1
