"""Tests of a run without progress: failed groups, steps without updates, constant rewards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds.builders.queue_builders import end, fill, make_settings, take_all
from worlds.builders.trajectory_builders import make_summary
from worlds.parts.loop_world import report

from actors.algorithm import AlgorithmSettings
from actors.deadline import ActorLost
from actors.environment.settings import RolloutSettings
from actors.outcomes import Disposition, OutcomePolicy, OutcomeRule
from actors.trainer.settings import TrainerSettings
from actors.trajectory_queue.groups import BlockRow, FailedGroups
from actors.trajectory_queue.ledger import EvictionReason, TokenCause, TokenCounts
from actors.trajectory_queue.state import QueueState
from actors.types import LeftOutReason, Outcome, RolloutAssignment
from service.config.sections import ModelSettings
from service.config.tree import Config
from service.inference.settings import InferenceSettings
from service.run.health import OTHER_REMEDY, FailureWatch, RunFailed

CONFIG = Config(
    model=ModelSettings(),
    rollouts=RolloutSettings(max_failed_groups=4, failed_groups_grace_s=30.0),
    algorithm=AlgorithmSettings(group_size=8),
    trainer=TrainerSettings(max_skipped_steps=3),
    inference=InferenceSettings(start_deadline_s=600.0),
)


def fail(queue: QueueState, assignment: RolloutAssignment, outcome: Outcome, detail: str) -> None:
    summary = replace(
        make_summary(assignment.rollout_id, attempt=assignment.attempt, outcome=outcome),
        detail=detail,
    )
    assert queue.put("a", summary, BlockRow(block=object(), row=0, num_bytes=1))


def fail_round(queue: QueueState, *, outcome: Outcome, detail: str = "") -> None:
    """Fill every slot, and end each rollout and its retries with the outcome."""
    fill(queue)
    while taken := take_all(queue):
        for assignment in taken:
            fail(queue, assignment, outcome, detail)


def failed_groups(queue: QueueState) -> FailedGroups | None:
    return queue.drain().failed_groups


def test_failed_groups_are_counted_with_their_attempts_and_last_error() -> None:
    queue = QueueState(make_settings(step=2, lag=0, window=1))
    assert failed_groups(queue) is None
    fail_round(queue, outcome=Outcome.ENVIRONMENT_ERROR, detail="reset: OSError: no server")
    failed = failed_groups(queue)
    # Two groups of two rollouts, with three attempts each.
    assert failed is not None and failed.num_groups == 2
    assert failed.outcomes == {Outcome.ENVIRONMENT_ERROR: 12}
    assert failed.last_detail == "reset: OSError: no server"
    fail_round(queue, outcome=Outcome.WALL_TIMEOUT, detail="environment reset: no answer")
    failed = failed_groups(queue)
    assert failed is not None and failed.num_groups == 4
    assert failed.last_outcome is Outcome.WALL_TIMEOUT
    assert failed.main_outcome is Outcome.ENVIRONMENT_ERROR
    assert queue.stats().ledger.is_balanced and queue.stats().ledger.in_flight == 0


def test_a_usable_group_resets_the_count_of_failed_groups() -> None:
    queue = QueueState(make_settings(step=1, lag=0, window=1))
    fail_round(queue, outcome=Outcome.WALL_TIMEOUT)
    first = failed_groups(queue)
    fill(queue)
    for assignment in take_all(queue):
        end(queue, assignment)
    assert failed_groups(queue) is None
    queue.set_loaded_version(1)
    fail_round(queue, outcome=Outcome.WALL_TIMEOUT)
    second = failed_groups(queue)
    assert first is not None and second is not None
    assert (first.num_usable_before, second.num_usable_before, second.num_groups) == (0, 1, 1)


def test_answers_that_are_always_cut_off_count_as_failures() -> None:
    queue = QueueState(make_settings(step=1, lag=0, window=1))
    fill(queue)
    for assignment in take_all(queue):
        summary = make_summary(
            assignment.rollout_id, attempt=assignment.attempt, outcome=Outcome.TRUNCATED_TOKENS
        )
        ungraded = replace(summary, is_graded=False, detail="the turn was cut off")
        queue.put("a", ungraded, BlockRow(block=object(), row=0, num_bytes=1))
    failed = failed_groups(queue)
    assert failed is not None and failed.outcomes == {Outcome.TRUNCATED_TOKENS: 2}


def test_a_rule_that_trains_a_failure_makes_it_usable() -> None:
    rule = OutcomeRule(disposition=Disposition.TRAIN)
    policy = OutcomePolicy(overrides={Outcome.WALL_TIMEOUT: rule})
    queue = QueueState(make_settings(step=1, lag=0, window=1, policies={"game": policy}))
    fail_round(queue, outcome=Outcome.WALL_TIMEOUT)
    assert failed_groups(queue) is None


def test_dead_environment_actors_are_failures_too() -> None:
    queue = QueueState(make_settings(step=1, lag=0, window=1))
    fill(queue)
    for number in range(3):
        take_all(queue, actor=f"a{number}")
        queue.release_actor(f"a{number}")
    failed = failed_groups(queue)
    assert failed is not None and failed.last_detail == "its environment actor died"
    assert failed.outcomes == {Outcome.INFRASTRUCTURE_ERROR: 6}


# The following tests are of `FailureWatch`, which the loop calls.


def row(num_groups: int, *, num_usable_before: int = 0, **fields: object) -> FailedGroups:
    known: dict[str, object] = {
        "outcomes": {Outcome.ENVIRONMENT_ERROR: 3 * num_groups, Outcome.WALL_TIMEOUT: 1},
        "last_outcome": Outcome.ENVIRONMENT_ERROR,
        "last_detail": "reset: OSError: no server",
        "task_id": "guessing-7",
        "environment": "guessing",
    }
    return FailedGroups(
        num_usable_before=num_usable_before, num_groups=num_groups, **{**known, **fields}
    )  # type: ignore[arg-type]


def test_enough_failed_groups_for_long_enough_end_the_run_with_details() -> None:
    watch = FailureWatch(CONFIG)
    watch.check_groups(row(2), num_engines_ready=1, now=100.0)
    watch.check_groups(row(9), num_engines_ready=1, now=129.0)
    with pytest.raises(RunFailed) as told:
        watch.check_groups(row(9), num_engines_ready=1, now=130.0)
    for words in (
        "the last 9 groups in a row",
        "2 of 8",
        "27 environment_error, 1 wall_timeout",
        "'guessing-7'",
        "reset: OSError: no server",
        "fix the environment",
        "rollouts.max_failed_groups",
    ):
        assert words in str(told.value)


def test_few_failed_groups_do_not_end_the_run() -> None:
    watch = FailureWatch(CONFIG)
    for now in range(0, 10_000, 100):
        watch.check_groups(row(3), num_engines_ready=1, now=float(now))
    with pytest.raises(RunFailed):
        watch.check_groups(row(4), num_engines_ready=1, now=10_000.0)


def test_a_usable_group_between_two_checks_resets_count_and_clock() -> None:
    watch = FailureWatch(CONFIG)
    watch.check_groups(row(3), num_engines_ready=1, now=0.0)
    watch.check_groups(row(5, num_usable_before=1), num_engines_ready=1, now=40.0)
    watch.check_groups(None, num_engines_ready=1, now=45.0)
    watch.check_groups(row(5, num_usable_before=2), num_engines_ready=1, now=50.0)
    with pytest.raises(RunFailed):
        watch.check_groups(row(5, num_usable_before=2), num_engines_ready=1, now=80.0)


def test_failures_while_no_engine_is_ready_do_not_count() -> None:
    watch = FailureWatch(CONFIG)
    watch.check_groups(row(50), num_engines_ready=0, now=0.0)
    watch.check_groups(row(500), num_engines_ready=0, now=500.0)
    watch.check_groups(row(502), num_engines_ready=1, now=540.0)
    watch.check_groups(row(503), num_engines_ready=1, now=800.0)
    with pytest.raises(RunFailed, match="the last 4 groups"):
        watch.check_groups(row(504), num_engines_ready=1, now=801.0)


def test_engines_that_are_missing_for_too_long_count_as_lost() -> None:
    watch = FailureWatch(CONFIG)
    watch.check_groups(row(1), num_engines_ready=0, now=0.0)
    watch.check_groups(row(9), num_engines_ready=0, now=600.0)
    with pytest.raises(ActorLost, match=r"no engine has been ready for 601 s.*start_deadline_s"):
        watch.check_groups(row(9), num_engines_ready=0, now=601.0)


@pytest.mark.parametrize(
    ("outcome", "remedy"),
    [
        (Outcome.TRUNCATED_TOKENS, "max_tokens_per_turn"),
        (Outcome.WALL_TIMEOUT, "turn_deadline_s"),
        (Outcome.CANCELLED, "rollouts.outcomes"),
    ],
)
def test_the_remedy_is_that_of_the_most_frequent_failure(outcome: Outcome, remedy: str) -> None:
    at_once = replace(CONFIG.rollouts, failed_groups_grace_s=0.0)
    watch = FailureWatch(replace(CONFIG, rollouts=at_once))
    counts = {Outcome.REWARD_ERROR: 2, outcome: 5}
    with pytest.raises(RunFailed, match=remedy):
        watch.check_groups(row(4, outcomes=counts), num_engines_ready=1, now=0.0)


def test_steps_in_a_row_without_a_finite_update_end_the_run() -> None:
    watch = FailureWatch(CONFIG)
    for step, was_trained in enumerate([False, False, True, False, False], start=1):
        watch.check_step(step, was_trained=was_trained)
    with pytest.raises(RunFailed, match="last 3 steps, up to step 6, was finite") as told:
        watch.check_step(6, was_trained=False)
    for words in ("checkpoints/skipped", "trainer.learning_rate", "trainer.max_skipped_steps"):
        assert words in str(told.value)


def test_steps_in_a_row_without_mergeable_trajectories_end_the_run() -> None:
    watch = FailureWatch(CONFIG)

    def look(step: int, num_misaligned: int, *, num_trajectories: int = 4) -> None:
        found = {EvictionReason.TOKEN_MISALIGNED: num_misaligned, EvictionReason.MASKED: 1}
        told = replace(report(step), num_trajectories=num_trajectories, evictions=found)
        watch.check_merge(step, told, notices=["g1.a0: turn 0: expert records", "g2.a0: also"])

    for step, num_misaligned in enumerate([4, 4, 3, 4, 4], start=1):
        look(step, num_misaligned)
    with pytest.raises(RunFailed, match=r"last 3 steps, up to step 6, .*token_mis") as told:
        look(6, 4)
    for words in ("g1.a0: turn 0: expert records", "trainer.max_skipped_steps"):
        assert words in str(told.value)
    other = FailureWatch(CONFIG)
    for step in range(1, 6):
        other.check_merge(step, replace(report(step), num_trajectories=0), notices=[])


def test_a_constant_reward_is_reported_once_after_three_steps() -> None:
    watch = FailureWatch(CONFIG)
    constant = replace(report(1), num_groups=2, num_zero_variance_groups=2)
    some = replace(constant, num_zero_variance_groups=1)
    steps = [constant, constant, some, constant, constant, constant, constant]
    notices = [watch.constant_reward(step, each) for step, each in enumerate(steps, start=1)]
    assert [step for step, notice in enumerate(notices, start=1) if notice] == [6]
    assert "nothing is learnt" in str(notices[5])


def notices_of(shares: list[tuple[int, dict[TokenCause, int]]]) -> dict[int, str]:
    """Return the notices by step of a watch that receives these trained and untrained tokens."""
    watch = FailureWatch(CONFIG)
    found = {}
    for step, (trained, untrained) in enumerate(shares, start=1):
        tokens = TokenCounts(trained=trained, untrained=untrained)
        notice = watch.untrained_tokens(step, replace(report(step), tokens=tokens))
        found |= {step: notice} if notice else {}
    return found


def test_a_low_share_of_trained_tokens_is_reported_once_with_cause_and_remedy() -> None:
    cut, alone = EvictionReason.TRUNCATED_TOKENS, EvictionReason.GROUP_TOO_SMALL
    low: tuple[int, dict[TokenCause, int]] = (31, {cut: 58, alone: 11})
    high: tuple[int, dict[TokenCause, int]] = (100, {})
    assert notices_of([low] * 4) == {}
    found = notices_of([low] * 12)
    assert list(found) == [5]
    text = found[5]
    assert text.startswith("step 5: 31 % of the tokens sampled for the last 5 steps were trained; ")
    for words in ("58 % were not because of truncated_tokens, 11 % group_too_small; ", "score"):
        assert words in text
    assert list(notices_of([low] * 5 + [high] * 5 + [low] * 5)) == [5, 14]
    assert notices_of([(50, {cut: 50})] * 6) == notices_of([(0, {})] * 6) == {}


@pytest.mark.parametrize("cause", [*EvictionReason, *LeftOutReason])
def test_every_cause_has_a_remedy(cause: TokenCause) -> None:
    (notice,) = notices_of([(1, {cause: 9})] * 5).values()
    is_plain = cause in (EvictionReason.MASKED, EvictionReason.MAX_TURNS)
    is_plain = is_plain or cause is EvictionReason.MALFORMED_TOOL_CALL
    assert (OTHER_REMEDY in notice) == is_plain
