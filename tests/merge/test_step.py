"""Tests of a step's batch: outcomes, statistics by group, and invariance of the training data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.builders.settings import step_settings
from worlds.builders.trajectory_builders import (
    linear_turns,
    make_trajectory,
    make_turn,
    random_turns,
    replayed,
    whole_turns,
)

from actors.algorithm import Aggregation, Baseline, LossSettings, RewardSettings, Scale
from actors.batch import MicroBatch
from actors.expert_records import ModelShape
from actors.merge.groups import (
    PayloadsLost,
    classify_groups,
    problem_notices,
    read_groups,
)
from actors.merge.step import StepResult, build_step
from actors.trajectory_queue.codec import encode
from actors.trajectory_queue.ledger import EvictionReason
from actors.trajectory_queue.messages import StepInput, StepTrajectory
from actors.types import UNDONE, Outcome, Trajectory, summarize


def make_group(
    number: int,
    rewards: list[float],
    *,
    outcomes: dict[int, Outcome] | None = None,
    version: int = 0,
    num_turns: int = 2,
) -> tuple[Trajectory, ...]:
    trajectories = tuple(
        make_trajectory(
            linear_turns(num_turns, reward=reward, version=version, seed=100 * number + member),
            rollout_id=f"g{number:06d}.0-{member}",
            outcome=(outcomes or {}).get(member, Outcome.COMPLETED),
            best_return=2.0,
        )
        for member, reward in enumerate(rewards)
    )
    return trajectories


def build(
    groups: list[tuple[Trajectory, ...]], *, version: int = 9, **fields: object
) -> StepResult:
    settings = step_settings(**fields)  # type: ignore[arg-type]
    return build_step(classify_groups(groups, settings), settings, step=7, trainer_version=version)


def update_weights(result: StepResult, number: int = 0) -> list[float]:
    """Return the loss weights of one update's trained tokens, over all ranks, ascending."""
    rows = [row for shard in result.shards for row in shard.minibatches[number]]
    return sorted(float(weight) for row in rows for weight in row.loss_weights)


def read_contexts(row: MicroBatch) -> list[tuple[int, ...]]:
    """Return the path of every token of a row, up to and including the token."""
    found: list[tuple[int, ...]] = []
    ends = np.cumsum(row.segment_lengths)
    for end, length, parent in zip(ends, row.segment_lengths, row.segment_parents, strict=True):
        path = () if parent == -1 else found[ends[parent] - 1]
        for token in row.token_ids[end - length : end].tolist():
            path = (*path, token)
            found.append(path)
    return found


def trained_tokens(result: StepResult) -> Counter[tuple[object, ...]]:
    """Count the trained tokens by the input of the loss: context, target and side data."""
    seen: Counter[tuple[object, ...]] = Counter()
    for shard in result.shards:
        for minibatch in shard.minibatches:
            for row in minibatch:
                contexts = read_contexts(row)
                for i, position in enumerate(row.loss_positions):
                    context = contexts[position]
                    side = (row.behaviour_logprobs[i], row.advantages[i], row.sampled_versions[i])
                    seen[(context, int(row.targets[i]), *map(float, side))] += 1
    return seen


def test_each_trajectory_of_a_step_has_one_outcome_and_is_trained_accordingly() -> None:
    outcomes = {2: Outcome.TRUNCATED_TOKENS, 3: Outcome.MAX_TURNS}
    groups = [make_group(0, [1, 0, 0, 1], outcomes=outcomes), make_group(1, [1, 1])]
    result = build(groups)
    reasons = result.outcomes
    assert reasons == {
        "g000000.0-0": None,
        "g000000.0-1": None,
        "g000000.0-2": EvictionReason.MASKED,
        "g000000.0-3": None,
        "g000001.0-0": EvictionReason.ZERO_VARIANCE,
        "g000001.0-1": EvictionReason.ZERO_VARIANCE,
    }
    report = result.report
    assert report.evictions == {EvictionReason.MASKED: 1, EvictionReason.ZERO_VARIANCE: 2}
    assert report.num_trained_tokens == 3 * 12 and report.num_sampled_tokens == 6 * 12
    assert report.num_zero_variance_groups == 1 and report.num_groups == 2
    # 36 trained tokens, and the 24 of the group without a signal.
    assert update_weights(result) == [np.float32(1 / 60)] * 36
    # Returns 1, 0, 0, min(1, 0): mean 1/4, deviation 1/2, over trajectories of any length.
    advantages = {round(float(a), 4) for *_, a, _ in trained_tokens(result)}
    assert advantages == {1.5, -0.5}


def test_a_game_without_turns_left_reports_its_reward_and_trains_on_the_capped_one() -> None:
    result = build([make_group(0, [0, 1], outcomes={1: Outcome.MAX_TURNS})])
    # min(1, 0) = 0 equals the other's return: the group has no signal.
    assert set(result.outcomes.values()) == {EvictionReason.ZERO_VARIANCE}
    assert result.report.statistics["reward_mean"] == 0.5
    assert result.report.statistics["reward_max"] == 1.0


def test_the_report_counts_the_trajectories_and_tokens_of_the_step() -> None:
    retokenised = make_trajectory(
        [
            make_turn([1, 2], [3, 4, 5, 6, 7]),
            make_turn([1, 2, 99, 5, 6, 7, 8], [9], reward=0.5, is_malformed=True),
        ],
        rollout_id="g000000.0-4",
        outcome=Outcome.MALFORMED_TOOL_CALL,
        num_inserted_tokens=2,
    )
    group = make_group(0, [1, 0], version=3)
    group = (*group, retokenised)
    report = build([group], version=5, num_ranks=2).report
    assert (report.step, report.trainer_version) == (7, 5)
    assert report.merge.samples_before == 6 and report.merge.samples_after == 4
    assert report.merge.branches == {"retokenised": 1}
    assert report.merge.num_saved_tokens == 2 * 15
    known = report.statistics
    assert known["reward_max"] == 1.0 and known["reward_mean"] == pytest.approx(0.5)
    assert known["scaled_reward_mean"] == pytest.approx(0.25)
    assert (known["policy_age_max"], report.num_malformed_turns, report.num_turns) == (5, 1, 6)
    assert known["policy_age_mean"] == pytest.approx((24 * 2 + 6 * 5) / 30)
    assert report.num_inserted_tokens == 2 and report.num_malformed_rewarded == 1
    assert report.outcomes == {Outcome.COMPLETED: 2, Outcome.MALFORMED_TOOL_CALL: 1}


def test_reward_components_are_means_over_the_graded_trajectories_that_have_them() -> None:
    def played(member: int, *components: dict[str, float], **fields: Any) -> Trajectory:
        turns = [
            make_turn([1, 2, *range(10, 10 + 2 * at)], [10 + 2 * at, 11 + 2 * at], **score)
            for at, each in enumerate(components)
            for score in ({"reward": 0.5 + member, "reward_components": each},)
        ]
        return make_trajectory(turns, rollout_id=f"g000000.0-{member}", **fields)

    group = (
        played(0, {"form": 1.0}, {"form": 0.5, "correct": 1.0}),
        played(1, {"form": 0.0}),
        # A reward that could not be computed does not count as a grade.
        played(2, {"form": 100.0}, outcome=Outcome.REWARD_ERROR),
    )
    assert build([group]).report.reward_components == {"correct": 1.0, "form": 0.75}
    # A group without a signal is not trained, but counts as played.
    assert build([group[1:2]]).report.reward_components == {"form": 0.0}


def test_reward_components_are_bounded_in_number_and_length() -> None:
    named = {f"{number:03d}" + "x" * 100: float(number) for number in range(40)}
    turn = make_turn([1, 2], [3], reward=1.0, reward_components=named)
    report = build([(make_trajectory([turn]),)]).report
    assert list(report.reward_components) == [f"{number:03d}" + "x" * 61 for number in range(32)]
    assert report.reward_components["031" + "x" * 61] == 31.0


def test_groups_without_a_signal_weaken_the_update() -> None:
    differing = make_group(0, [1, 0])
    alone = build([differing])
    among = build([differing, make_group(1, [1, 1]), make_group(2, [0, 0])])
    assert trained_tokens(among) == trained_tokens(alone)
    assert update_weights(alone) == [np.float32(1 / 24)] * 24
    assert update_weights(among) == [np.float32(1 / 72)] * 24


def test_groups_without_a_signal_are_trained_if_the_loss_has_a_term_for_them() -> None:
    groups = [make_group(0, [1, 0]), make_group(1, [1, 1], outcomes={1: Outcome.TRUNCATED_TOKENS})]
    result = build(groups, loss=LossSettings(entropy_coefficient=0.1))
    assert list(result.outcomes.values()) == [None, None, None, EvictionReason.MASKED]
    assert result.report.num_zero_variance_groups == 1
    assert sorted({float(advantage) for *_, advantage, _ in trained_tokens(result)})[1] == 0.0
    assert update_weights(result) == [np.float32(1 / 36)] * 36


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [
        ("token_mean", 1 / 48),
        ("trajectory_mean", 1 / (4 * 12)),
        ("prompt_mean", 1 / (2 * 24)),
        ("constant", 1 / (4 * 100)),
    ],
)
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_every_aggregation_counts_groups_without_a_signal(
    aggregation: Aggregation, weight: float, num_minibatches: int
) -> None:
    # Two trajectories of 12 tokens are trained, two have no signal; half of each in each update.
    groups = [make_group(0, [1, 0]), make_group(1, [1, 1])]
    result = build(
        groups,
        loss=LossSettings(aggregation=aggregation, constant_tokens=100),
        minibatches=num_minibatches,
    )
    # With two updates, each has half of the prompts, trajectories and tokens.
    expected = weight * num_minibatches
    for number in range(num_minibatches):
        weights = update_weights(result, number)
        assert len(weights) == 24 // num_minibatches
        assert weights == pytest.approx([expected] * len(weights), rel=1e-6)


def test_a_step_with_nothing_to_train_is_padding_and_has_no_policy_age() -> None:
    result = build([make_group(0, [1, 1])], num_ranks=2)
    for shard in result.shards:
        (minibatch,) = shard.minibatches
        assert [row.num_trained for row in minibatch] == [0]
    unknown = {"policy_age_max", "policy_age_mean", "trajectory_advantage_mean"}
    assert not unknown & result.report.statistics.keys()
    assert result.report.num_padding_rows == 2


def test_advantages_depend_on_the_group_and_not_on_the_order() -> None:
    a, b = make_group(0, [1, 0, 0]), make_group(1, [5, 9])
    assert trained_tokens(build([a, b])) == trained_tokens(build([b, a]))
    alone = trained_tokens(build([a])) + trained_tokens(build([b]))
    assert trained_tokens(build([a, b])) == alone


def test_misaligned_trajectories_are_left_out_and_the_others_are_trained() -> None:
    group = make_group(0, [1, 0, 1])
    broken = replayed(group[2], [make_turn([1], [2, 500])])
    groups = [(*group[:2], broken)]
    result = build(groups, shape=ModelShape(vocab_size=500))
    assert list(result.outcomes.values()) == [None, None, EvictionReason.TOKEN_MISALIGNED]


def test_records_of_another_mixture_exclude_only_their_trajectory() -> None:
    group = make_group(0, [1, 0, 1])
    routed = replace(make_turn([1], [2, 3]), expert_indices=np.zeros((1, 2, 2), np.uint8))
    foreign = replayed(group[2], [routed])
    groups = [(*group[:2], foreign)]
    result = build(groups, shape=ModelShape(vocab_size=100_000))
    assert list(result.outcomes.values()) == [
        None,
        None,
        EvictionReason.TOKEN_MISALIGNED,
    ]


@pytest.mark.parametrize("prompt, sampled", [([1, 500], [2, 3]), ([1], [2, 500])])
def test_ids_outside_the_vocabulary_exclude_only_their_trajectory(
    prompt: list[int], sampled: list[int]
) -> None:
    group = make_group(0, [1, 0, 1])
    foreign = replayed(group[2], [make_turn(prompt, sampled)])
    groups = [(*group[:2], foreign)]
    reasons = [
        list(build(groups, shape=ModelShape(vocab_size=vocab_size)).outcomes.values())
        for vocab_size in (500, 501)
    ]
    assert reasons == [[None, None, EvictionReason.TOKEN_MISALIGNED], [None] * 3]


def with_rewards(rewards: list[float]) -> list[tuple[Trajectory, ...]]:
    return [make_group(0, rewards)]


@pytest.mark.parametrize("reward", [float("nan"), 1e10, -1e200])
def test_a_reward_out_of_range_excludes_only_its_trajectory_and_is_reported(reward: float) -> None:
    result = build(with_rewards([reward, 0, 1]))
    assert list(result.outcomes.values()) == [EvictionReason.REWARD_ERROR, None, None]
    known = result.report.statistics
    assert {"reward_mean", "scaled_reward_mean"} <= known.keys()
    if reward != reward:
        assert (known["reward_mean"], known["scaled_reward_mean"]) == (0.5, 0.25)
    (notice,) = problem_notices(result.members, step=8)
    assert notice.startswith("step 8: trajectory g000000.0-0.a0 left out as reward_error: ")
    assert notice.endswith("check the environment's rewards, or set algorithm.reward.clip")


def test_a_return_of_any_size_is_accepted_if_it_is_clipped() -> None:
    reward = RewardSettings(clip=(-1.0, 1.0))
    result = build(with_rewards([1e30, 0, 1]), scale=Scale.NONE, reward=reward)
    assert [member.baseline_return for member in result.members] == [1.0, 0.0, 1.0]
    assert problem_notices(result.members, step=1) == ()


def test_three_misaligned_trajectories_are_named_and_further_ones_counted() -> None:
    group = make_group(0, [1, 0, 1, 0, 1, 0])
    broken = make_turn([1], [2, 500])
    members = tuple(replayed(each, [broken]) for each in group[:5])
    groups = [(*members, group[5])]
    result = build(groups, shape=ModelShape(vocab_size=500))
    notices = problem_notices(result.members, step=2)
    assert [notice.split(":")[0] for notice in notices] == ["step 2"] * 4
    assert "g000000.0-2.a0 left out as token_misaligned: sample 0: 1 token ids" in notices[2]
    assert "use the policy's own tokenizer" in notices[2]
    assert notices[3] == "step 2: 2 more; see `rayloom inspect`"


def test_tokens_of_undone_versions_are_trained_but_not_in_the_policy_age() -> None:
    (won, lost), other = make_group(0, [1, 0], version=UNDONE + 3), make_group(1, [1, 0], version=1)
    result = build([(won, lost), other], version=2)
    rows = [r for shard in result.shards for m in shard.minibatches for r in m]
    recorded = [s.logprobs[s.mask == 1] for t in (won, lost, *other) for s in t.samples]
    trained = np.concatenate([row.behaviour_logprobs for row in rows])
    assert sorted(trained.tolist()) == sorted(np.concatenate(recorded).tolist())
    statistics = result.report.statistics
    assert (statistics["policy_age_max"], statistics["policy_age_mean"]) == (1.0, 0.5)
    # A client sees the version's published number.
    assert won.versions == (3, 3)
    summary = summarize(won, num_bytes=0)
    assert (summary.oldest_version, summary.newest_version) == (3, 3)


def test_tokens_of_a_version_newer_than_the_trainers_are_refused() -> None:
    groups = [make_group(0, [1, 0], version=3)]
    build(groups, version=3)
    words = r"trajectory g000000\.0-0\.a0 was sampled by version 3, expected at most 2"
    with pytest.raises(ValueError, match=words):
        build(groups, version=2)


def test_two_trajectories_of_one_rollout_are_refused() -> None:
    group = make_group(0, [1, 0])
    twice = (*group, group[0])
    with pytest.raises(ValueError, match=r"rollout g000000\.0-0 has 2 trajectories in one step"):
        build([twice])


def test_without_a_baseline_equal_returns_are_a_signal() -> None:
    result = build(with_rewards([1, 1]), baseline=Baseline.NONE, scale=Scale.NONE)
    assert result.report.num_zero_variance_groups == 0


def test_with_scale_mean_a_group_with_a_negative_return_is_left_out_and_counted() -> None:
    groups = [make_group(0, [1, -1]), make_group(1, [1, 0]), make_group(2, [0, 0])]
    result = build(groups, scale=Scale.MEAN)
    negative, equal = EvictionReason.NEGATIVE_RETURN, EvictionReason.ZERO_VARIANCE
    assert list(result.outcomes.values()) == [negative, negative, None, None, equal, equal]
    report = result.report
    assert (report.num_negative_return_groups, report.num_zero_variance_groups) == (1, 1)
    assert report.evictions == {negative: 2, equal: 2}
    # (1 - 1/2) / (1/2); the groups that are left out still count in the weights.
    assert {a for *_, a, _ in trained_tokens(result)} == {1.0, -1.0}
    assert update_weights(result) == [np.float32(1 / 72)] * 24


def test_a_group_with_a_negative_return_is_trained_if_the_loss_has_a_term_for_it() -> None:
    loss = LossSettings(entropy_coefficient=0.1)
    result = build([make_group(0, [1, -1])], scale=Scale.MEAN, loss=loss)
    assert list(result.outcomes.values()) == [None, None]
    assert result.report.num_negative_return_groups == 1
    assert {a for *_, a, _ in trained_tokens(result)} == {0.0}


def test_tokens_are_scored_at_the_temperature_of_their_environment() -> None:
    own, other = make_group(0, [0, 1]), make_group(1, [1, 0])
    other = tuple(replace(each, environment="other") for each in other)
    result = build([own, other], temperatures={"game": 0.7}, tokens_per_micro_batch=4096)
    row = result.shards[0].minibatches[0][0]
    of_trajectory = dict(zip(row.trajectory_index.tolist(), row.temperatures.tolist(), strict=True))
    assert sorted(of_trajectory.values()) == pytest.approx([0.7, 0.7, 1.0, 1.0])
    of_token = [of_trajectory[number] for number in row.trajectory_index.tolist()]
    assert row.temperatures.tolist() == of_token


def random_group(number: int, seed: int) -> tuple[Trajectory, ...]:
    rng = np.random.default_rng([number, seed])
    trajectories = tuple(
        make_trajectory(random_turns(rng, max_turns=5), rollout_id=f"g{number:06d}.0-{member}")
        for member in range(4)
    )
    return trajectories


@settings(max_examples=50)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.integers(8, 64),
    st.integers(1, 3),
    st.sampled_from([Baseline.MEAN, Baseline.LEAVE_ONE_OUT, Baseline.NONE]),
)
def test_ranks_rows_and_updates_do_not_change_what_is_trained(
    seed: int, num_ranks: int, budget: int, num_minibatches: int, baseline: Baseline
) -> None:
    groups = [random_group(number, seed) for number in range(3)]
    scale = Scale.NONE if baseline is Baseline.NONE else Scale.STD
    one = build(groups, baseline=baseline, scale=scale)
    split = build(
        groups,
        baseline=baseline,
        scale=scale,
        num_ranks=num_ranks,
        tokens_per_micro_batch=budget,
        minibatches=num_minibatches,
    )
    assert trained_tokens(split) == trained_tokens(one)
    assert split.outcomes == one.outcomes
    total = one.report.num_trained_tokens
    num_idle = round(1 / update_weights(one)[0]) - total if total else 0
    for number, update in enumerate(
        zip(*(shard.minibatches for shard in split.shards), strict=True)
    ):
        assert len({len(part) for part in update}) == 1
        trained = sum(row.num_trained for part in update for row in part)
        expected = trained + (num_idle * trained / total if total else 0)
        assert update_weights(split, number) == [np.float32(1 / max(1, expected))] * trained
    trained = list(one.outcomes.values()).count(None)
    assert (trained == 0) == (one.report.num_trained_tokens == 0)


def unmerged(trajectory: Trajectory) -> list[Trajectory]:
    """Return each turn as a separate trajectory that has the whole return."""
    total = trajectory.episode_return
    return [
        replayed(
            replace(trajectory, rollout_id=f"{trajectory.rollout_id}.{index}"),
            [replace(turn, reward=total)],
        )
        for index, turn in enumerate(whole_turns(trajectory))
    ]


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_merging_does_not_change_what_is_trained(seed: int) -> None:
    group = random_group(0, seed)
    # Without baseline and scale the advantage is the return, whatever the group.
    plain = {"baseline": Baseline.NONE, "scale": Scale.NONE}
    pieces = tuple(piece for t in group for piece in unmerged(t))
    merged = build([group], **plain)
    apart = build([pieces], **plain)
    assert trained_tokens(merged) == trained_tokens(apart)
    assert update_weights(merged) == update_weights(apart)


def test_a_step_is_read_from_its_blocks_and_lost_rollouts_are_named() -> None:
    group = make_group(0, [1, 0, 1])
    blocks = [encode(group[:2]), encode(group[2:])]
    members = tuple(
        StepTrajectory(rollout_id=t.rollout_id, block=block, row=row)
        for t, block, row in zip(group, (0, 0, 1), (0, 1, 0), strict=True)
    )
    step_input = StepInput(step=0, groups=(members,), blocks=("first", "second"))
    assert trained_tokens(build(read_groups(step_input, blocks))) == trained_tokens(build([group]))
    with pytest.raises(PayloadsLost, match="1 rollouts") as caught:
        read_groups(step_input, [blocks[0], None])
    assert caught.value.rollout_ids == ("g000000.0-2",)
