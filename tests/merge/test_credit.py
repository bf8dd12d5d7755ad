"""Tests of credit in a whole step: the advantage of each token, however turns form samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.builders.settings import step_settings
from worlds.builders.trajectory_builders import (
    ids,
    linear_turns,
    make_trajectory,
    make_turn,
    replayed,
    whole_turns,
)

from actors.algorithm import (
    Baseline,
    CriticSettings,
    KlRewardSettings,
    LossSettings,
    RewardSettings,
    Scale,
    StateCreditSettings,
    Truncation,
)
from actors.batch import RowScores
from actors.expert_records import ModelShape
from actors.merge.groups import GroupMembers, charge_kl, classify_groups
from actors.merge.step import StepResult, build_step
from actors.outcomes import Disposition, OutcomePolicy, OutcomeRule
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Outcome, Trajectory

# By trajectory id, the scores of its samples in their order.
Scores = dict[str, tuple[RowScores, ...]]
KL_IN_REWARD = KlRewardSettings(estimator="k1", coefficient=0.5)
KL = RewardSettings(kl=KL_IN_REWARD)
TRAIN_TRUNCATED = {
    "game": OutcomePolicy(
        overrides={Outcome.TRUNCATED_TOKENS: OutcomeRule(disposition=Disposition.TRAIN)}
    )
}


def play(
    member: int, rewards: list[float], *, number: int = 0, outcome: Outcome = Outcome.COMPLETED
) -> Trajectory:
    """Return a trajectory with one turn per reward; each token has its own log-probability."""
    turns = linear_turns(len(rewards), seed=100 * number + member)
    rewarded = [replace(turn, reward=reward) for turn, reward in zip(turns, rewards, strict=True)]
    return make_trajectory(rewarded, rollout_id=f"g{number:06d}.0-{member}", outcome=outcome)


def group_of(*trajectories: Trajectory) -> tuple[Trajectory, ...]:
    return trajectories


def cut(trajectory: Trajectory, pieces: list[int]) -> Trajectory:
    """Return the trajectory with its turns divided into samples: turn t is in that of pieces[t]."""
    turns = [
        replace(turn, prompt_token_ids=np.concatenate([ids([1000 + piece]), turn.prompt_token_ids]))
        for turn, piece in zip(whole_turns(trajectory), pieces, strict=True)
    ]
    return replayed(trajectory, turns)


def scored(*groups: tuple[Trajectory, ...]) -> Scores:
    """Return scores that depend only on a token, not on the sample that contains it."""
    return {
        trajectory.trajectory_id: tuple(
            RowScores(
                reference_logprobs=sample.logprobs[sample.mask == 1] * 2,
                values=np.append(sample.logprobs[1:], np.float32(0.8)) / 2,
            )
            for sample in trajectory.samples
        )
        for group in groups
        for trajectory in group
    }


def build(
    *groups: tuple[Trajectory, ...], scores: Scores | None = None, **fields: Any
) -> StepResult:
    found = scored(*groups) if scores is None else scores
    settings = step_settings(**fields)
    merged = with_scores(classify_groups(groups, settings), found)
    return build_step(merged, settings, step=0, trainer_version=0)


def with_scores(groups: tuple[GroupMembers, ...], scores: Scores) -> list[GroupMembers]:
    return [
        tuple(replace(m, scores=scores.get(m.trajectory.trajectory_id, ())) for m in group)
        for group in groups
    ]


def advantages(result: StepResult) -> dict[float, float]:
    """Return each token's advantage by its behaviour log-probability, which is unique."""
    rows = [r for s in result.shards for part in s.minibatches for r in part]
    return {
        float(logprob): float(advantage)
        for row in rows
        for logprob, advantage in zip(row.behaviour_logprobs, row.advantages, strict=True)
    }


def weights(result: StepResult) -> dict[float, float]:
    """Return each token's loss weight by its behaviour log-probability, which is unique."""
    rows = [r for s in result.shards for part in s.minibatches for r in part]
    return {
        float(logprob): float(weight)
        for row in rows
        for logprob, weight in zip(row.behaviour_logprobs, row.loss_weights, strict=True)
    }


def turn_advantages_of(result: StepResult, trajectory: Trajectory) -> list[float]:
    """Return the advantage of each turn, after checking that its tokens share one."""
    found = advantages(result)
    by_turn = [{found[float(x)] for x in turn.logprobs} for turn in whole_turns(trajectory)]
    assert all(len(values) == 1 for values in by_turn)
    return [values.pop() for values in by_turn]


ways = st.sampled_from(
    [
        {},
        {"baseline": Baseline.LEAVE_ONE_OUT, "scale": Scale.NONE},
        {"baseline": Baseline.NONE, "scale": Scale.NONE},
        {"normalise_advantages": True, "scale": Scale.NONE},
        {"turn_discount": 0.5},
        {"turn_discount": 0.9, "normalise_advantages": True},
        {"turn_discount": 0.5, "reward": KL},
        {"reward": KL, "normalise_advantages": True},
        {"reward": KL, "baseline": Baseline.NONE, "scale": Scale.NONE},
        {"reward": RewardSettings(clip=(-0.5, 1.0))},
    ]
)
rewards_strategy = st.lists(
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=4),
    min_size=2,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(ways, rewards_strategy, st.data())
def test_dividing_turns_into_samples_differently_changes_no_advantage(
    way: dict[str, Any], rewards: list[list[float]], data: st.DataObject
) -> None:
    whole = group_of(*(play(member, each) for member, each in enumerate(rewards)))
    pieces = st.integers(0, 2)
    apart = group_of(
        *(
            cut(t, data.draw(st.lists(pieces, min_size=len(t.turns), max_size=len(t.turns))))
            for t in whole
        )
    )
    other = group_of(play(0, [1.0, 0.0], number=1), play(1, [0.0], number=1))
    before, after = build(whole, other, **way), build(apart, other, **way)
    assert before.outcomes == after.outcomes
    expected, found = advantages(before), advantages(after)
    assert expected.keys() == found.keys()
    np.testing.assert_allclose(
        list(found.values()), [expected[key] for key in found], rtol=1e-5, atol=1e-6
    )
    assert weights(before) == weights(after)


def test_credit_by_turn_reaches_the_tokens_of_each_turn() -> None:
    # R = [[.5, 1], [0, 0]] at discount .5; the means of the turns are .25 and .5.
    first, second = play(0, [0.0, 1.0]), play(1, [0.0, 0.0])
    result = build(group_of(first, second), turn_discount=0.5, scale=Scale.NONE)
    assert turn_advantages_of(result, first) == [0.25, 0.5] and turn_advantages_of(
        result, second
    ) == [-0.25, -0.5]


def test_credit_by_state_is_added_for_turns_with_equal_observations() -> None:
    first = play(0, [0.0, 1.0])
    # The same tokens with other log-probabilities, by which `advantages` finds them.
    turns = [
        replace(turn, reward=0.0, logprobs=turn.logprobs - np.float32(0.125))
        for turn in linear_turns(2, seed=0)
    ]
    second = make_trajectory(turns, rollout_id="g000000.0-1")
    credit = StateCreditSettings(weight=2.0, discount=0.5)
    result = build(group_of(first, second), state_credit=credit, scale=Scale.NONE)
    # By trajectory 0.5; by state 0.25 at the first observation and 0.5 at the second.
    assert turn_advantages_of(result, first) == pytest.approx([1.0, 1.5])
    assert turn_advantages_of(result, second) == pytest.approx([-1.0, -1.5])
    # The observations of the other trajectory differ, so that nothing is added.
    alone = build(group_of(first, play(1, [0.0, 0.0])), state_credit=credit, scale=Scale.NONE)
    assert turn_advantages_of(alone, first) == pytest.approx([0.5, 0.5])


def test_turns_with_the_same_state_key_are_compared_whatever_their_observations() -> None:
    keys = {0: ["s", "t"], 1: ["t", "s"], 2: [None, "s"]}
    rewards = {0: [0.0, 1.0], 1: [3.0, 0.0], 2: [0.0, 0.0]}
    members = []
    for member, values in rewards.items():
        turns = [
            replace(turn, reward=reward, state_key=key)
            for turn, reward, key in zip(
                linear_turns(2, seed=member), values, keys[member], strict=True
            )
        ]
        members.append(make_trajectory(turns, rollout_id=f"g000000.0-{member}"))
    credit = StateCreditSettings(weight=2.0, discount=0.5)
    result = build(group_of(*members), state_credit=credit, scale=Scale.NONE)
    # By trajectory: 1, 3 and 0 without their mean 4/3.
    # R = [[.5, 1], [3, 0], [0, 0]]; s has .5, 0, 0 (mean 1/6), t has 1 and 3 (mean 2).
    assert turn_advantages_of(result, members[0]) == pytest.approx(
        [-1 / 3 + 2 * (1 / 2 - 1 / 6), -1 / 3 + 2 * (1 - 2)]
    )
    assert turn_advantages_of(result, members[1]) == pytest.approx(
        [5 / 3 + 2 * (3 - 2), 5 / 3 - 2 / 6]
    )
    # A turn without a key has its observation as its state, and no other turn has that one.
    assert turn_advantages_of(result, members[2]) == pytest.approx([-4 / 3, -4 / 3 - 2 / 6])


def test_equal_returns_are_a_signal_if_their_turns_met_the_same_observations() -> None:
    turns = [replace(turn, reward=1.0 - k) for k, turn in enumerate(linear_turns(2, seed=0))]
    group = group_of(play(0, [0.0, 1.0]), make_trajectory(turns, rollout_id="g000000.0-1"))
    assert build(group, state_credit=None).report.num_zero_variance_groups == 1
    credit = StateCreditSettings(discount=0.5)
    assert build(group, state_credit=credit).report.num_zero_variance_groups == 0


def test_equal_returns_from_different_turns_are_a_signal_only_for_credit_by_turn() -> None:
    group = group_of(play(0, [1.0, 0.0]), play(1, [0.0, 1.0]))
    assert build(group).report.num_zero_variance_groups == 1
    assert build(group, turn_discount=0.5).report.num_zero_variance_groups == 0


def test_the_kl_penalty_lowers_advantages_and_the_reported_reward() -> None:
    group = group_of(play(0, [1.0]), play(1, [0.0]))
    first, second = group
    # k1 with log p_ref = 2 log p: each token adds beta log p, a negative number.
    returns = [
        t.episode_return + 0.5 * float(whole_turns(t)[0].logprobs.sum()) for t in (first, second)
    ]
    result = build(group, reward=KL, scale=Scale.NONE)
    expected = (returns[0] - returns[1]) / 2
    assert turn_advantages_of(result, first) == pytest.approx([expected], rel=1e-5)
    assert result.report.statistics["reward_mean"] == pytest.approx(sum(returns) / 2, rel=1e-5)


def test_the_kl_of_tokens_is_charged_in_the_order_of_play_across_branches() -> None:
    nan = float("nan")
    trajectory = make_trajectory(
        [
            make_turn([1], [2, 3], logprobs=[-1, -2]),
            make_turn([7], [8, 8, 8], logprobs=[-3, nan, -5]),
            make_turn([1, 2, 3, 4], [5], logprobs=[-6]),
            make_turn([7, 8, 8, 8], [], logprobs=[]),
            make_turn([1, 9], [6, 6], logprobs=[-7, -8]),
        ]
    )
    group = group_of(trajectory)
    ((member,),) = with_scores(classify_groups([group], step_settings()), scored(group))
    turns = [[turn.index for turn in sample.turns] for sample in member.samples]
    assert turns == [[0, 2], [1, 3], [4]]
    found = charge_kl(member, KL_IN_REWARD)
    assert found.kl_rewards is not None
    assert found.kl_rewards.tolist() == [-0.5, -1, -1.5, -2.5, -3, -3.5, -4]
    assert found.baseline_return == -16


def test_without_a_baseline_a_token_is_charged_its_own_and_all_later_kl() -> None:
    trajectory = make_trajectory(
        [
            make_turn([1], [2, 3], logprobs=[-1, -2]),
            make_turn([7], [8], logprobs=[-3], reward=20.0),
            make_turn([1, 2, 3, 4], [5], logprobs=[-4]),
        ]
    )
    # k1 with log p_ref = 2 log p and beta .5: -.5, -1, -1.5, -2 in the order of play.
    way = {"reward": KL, "baseline": Baseline.NONE, "scale": Scale.NONE}
    found = advantages(build(group_of(trajectory), **way))
    assert found == {-1: 15.0, -2: 15.5, -3: 16.5, -4: 18.0}


def critic(**fields: Any) -> dict[str, Any]:
    return {"baseline": Baseline.CRITIC, "scale": Scale.NONE, "critic": CriticSettings(**fields)}


def test_a_critic_credits_each_token_and_skips_observations() -> None:
    trajectory = make_trajectory(
        [
            make_turn([1, 2], [3, 4], logprobs=[-0.1, -0.2], reward=0.5),
            make_turn([1, 2, 3, 4, 9, 9], [5], logprobs=[-0.3], reward=1.0),
        ]
    )
    # Values by position: the states before 3, 4 and 5 are those of tokens 1, 2 and 5.
    values = np.array([9, 0.1, 0.2, 9, 9, 0.3, 0.8], np.float32)
    scores = {trajectory.trajectory_id: (RowScores(values=values),)}
    result = build(group_of(trajectory), scores=scores, **critic(decay=0.5))
    # Errors: .2 - .1 = .1; .5 + .3 - .2 = .6; 1 - .3 = .7; sums from the end at decay .5.
    expected = {-0.1: 0.575, -0.2: 0.95, -0.3: 0.7}
    found = advantages(result)
    for logprob, value in expected.items():
        assert found[float(np.float32(logprob))] == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("first_logprob", "clip", "expected"),
    [
        # Errors: .25 + .2 - .1 = .35; .25 + .3 - .2 = .35; 1 - .3 = .7.
        (-0.1, None, {-0.1: 0.7, -0.2: 0.7, -0.3: 0.7}),
        # The clip lowers the return of 1.5 at the last turn: .5 - .3 = .2.
        (-0.1, (-1.0, 1.0), {-0.1: 0.575, -0.2: 0.45, -0.3: 0.2}),
        # The reward of an untrained token goes to the next trained one: .5 + .3 - .2 = .6.
        (np.nan, None, {-0.2: 0.95, -0.3: 0.7}),
    ],
)
def test_a_reward_for_a_token_is_credited_at_that_token(
    first_logprob: float, clip: tuple[float, float] | None, expected: dict[float, float]
) -> None:
    halves = np.array([0.25, 0.25], np.float32)
    first = make_turn([1, 2], [3, 4], logprobs=[first_logprob, -0.2], reward=0.5)
    trajectory = make_trajectory(
        [
            replace(first, token_rewards=halves),
            make_turn([1, 2, 3, 4, 9, 9], [5], logprobs=[-0.3], reward=1.0),
        ]
    )
    values = np.array([9, 0.1, 0.2, 9, 9, 0.3, 0.8], np.float32)
    scores = {trajectory.trajectory_id: (RowScores(values=values),)}
    reward = RewardSettings(clip=clip)
    result = build(group_of(trajectory), scores=scores, reward=reward, **critic(decay=0.5))
    found = advantages(result)
    assert len(found) == len(expected)
    for logprob, value in expected.items():
        assert found[float(np.float32(logprob))] == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("truncation", "expected"), [("bootstrap", 0.7), ("terminal", -0.1)])
def test_a_truncated_trajectory_bootstraps_from_the_value_at_its_end(
    truncation: Truncation, expected: float
) -> None:
    trajectory = make_trajectory([make_turn([1], [2])], outcome=Outcome.TRUNCATED_TOKENS)
    scores = {trajectory.trajectory_id: (RowScores(values=np.array([0.1, 0.8], np.float32)),)}
    result = build(
        group_of(trajectory),
        scores=scores,
        policies=TRAIN_TRUNCATED,
        **critic(truncation=truncation),
    )
    assert list(advantages(result).values()) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        # V(s_T) = .8 is the value after the observation that follows the last action.
        (Outcome.TRUNCATED_CONTEXT, [0.3, 0.2, 0.1]),
        (Outcome.COMPLETED, [-0.5, -0.6, -0.7]),
    ],
)
def test_the_final_state_includes_the_last_observation_if_the_sample_has_one(
    outcome: Outcome, expected: list[float]
) -> None:
    turn = make_turn([1], [2, 3, 4], logprobs=[-0.1, -0.2, -0.3])
    trajectory = make_trajectory([turn], outcome=outcome)
    policies = {
        "game": OutcomePolicy(overrides={outcome: OutcomeRule(disposition=Disposition.TRAIN)})
    }
    settings = step_settings(policies=policies, **critic())
    ((member,),) = classify_groups([group_of(trajectory)], settings)
    (sample,) = member.samples
    observed = replace(
        sample,
        token_ids=np.append(sample.token_ids, ids([8, 9])),
        logprobs=np.append(sample.logprobs, np.zeros(2, np.float32)),
        versions=np.append(sample.versions, ids([-1, -1])),
    )
    values = np.array([0.5, 0.6, 0.7, 9, 9, 0.8], np.float32)
    kept = replace(
        member,
        trajectory=replace(trajectory, samples=(observed,)),
        scores=(RowScores(values=values),),
    )
    result = build_step([(kept,)], settings, step=0, trainer_version=0)
    assert result.report.merge.num_saved_tokens == 0
    found = advantages(result)
    wanted = dict(zip([-0.1, -0.2, -0.3], expected, strict=True))
    assert len(found) == 3
    for logprob, advantage in wanted.items():
        assert found[float(np.float32(logprob))] == pytest.approx(advantage, abs=1e-6)


def test_equal_returns_are_a_signal_to_a_critic() -> None:
    group = group_of(play(0, [1.0]), play(1, [1.0]))
    assert build(group, **critic()).report.num_zero_variance_groups == 0


def group_of_one() -> tuple[Trajectory, ...]:
    """Return a group of one trajectory."""
    return group_of(play(0, [1.0], number=2))


def test_a_group_whose_baseline_shrank_below_the_minimum_is_not_trained() -> None:
    first, second, third = (play(member, [float(member)]) for member in range(3))
    broken = replayed(third, [make_turn([1], [2, 500])])
    group = group_of(first, second, broken)
    shape = ModelShape(vocab_size=500)
    assert list(build(group, scores={}, min_group_size=2, shape=shape).outcomes.values()) == [
        None,
        None,
        EvictionReason.TOKEN_MISALIGNED,
    ]
    result = build(group, scores={}, min_group_size=3, shape=shape)
    too_small = EvictionReason.GROUP_TOO_SMALL
    assert list(result.outcomes.values()) == [
        too_small,
        too_small,
        EvictionReason.TOKEN_MISALIGNED,
    ]
    assert result.report.num_trained_tokens == 0
    # Unlike a solved group, a group that is too small does not lower the weights of the others.
    other = group_of(play(0, [1.0], number=1), play(1, [0.0], number=1))
    alone, among = (
        build(*gs, scores={}, min_group_size=2) for gs in ([other], [other, group_of_one()])
    )
    assert weights(alone) == weights(among)


def test_groups_without_a_signal_do_not_change_normalised_advantages() -> None:
    differing = group_of(play(0, [1.0]), play(1, [0.0]))
    solved = group_of(play(0, [1.0], number=1), play(1, [1.0], number=1))
    alone = build(differing, normalise_advantages=True, scale=Scale.NONE)
    among = build(differing, solved, normalise_advantages=True, scale=Scale.NONE)
    assert advantages(alone) == advantages(among)
    assert set(advantages(alone).values()) == {
        np.float32(0.5 / 0.500001),
        np.float32(-0.5 / 0.500001),
    }


def test_groups_trained_without_a_signal_keep_advantage_zero_when_normalised() -> None:
    differing = group_of(play(0, [1.0, 0.0]), play(1, [0.0]))
    solved = group_of(play(0, [1.0], number=1), play(1, [1.0], number=1))
    way = {
        "normalise_advantages": True,
        "scale": Scale.NONE,
        "loss": LossSettings(entropy_coefficient=0.1),
    }
    found = advantages(build(differing, solved, **way))
    assert {found[float(x)] for t in solved for x in whole_turns(t)[0].logprobs} == {0.0}
    alone = advantages(build(differing, **way))
    assert {key: found[key] for key in alone} == alone


@pytest.mark.parametrize(
    "fields",
    [
        {"reward": KL},
        critic(),
    ],
)
def test_missing_scores_are_refused_with_the_trajectory_named(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"g000000\.0-0\.a0 has scores of 0 of its 1 samples, exp"):
        build(group_of(play(0, [1.0]), play(1, [0.0])), scores={}, **fields)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        # In the order of play, values .1 .2 .3 .4: errors .1, .5 + .1, .1, 1 - .4.
        (Outcome.COMPLETED, {-0.1: 0.5, -0.2: 0.8, -0.3: 0.4, -0.4: 0.6}),
        # Cut off: the end of the main branch has value .8, and the last error is 1 + .8 - .4.
        (Outcome.TRUNCATED_TOKENS, {-0.1: 0.6, -0.2: 1.0, -0.3: 0.8, -0.4: 1.4}),
    ],
)
def test_a_critic_reads_values_per_branch_and_credits_in_the_order_of_play(
    outcome: Outcome, expected: dict[float, float]
) -> None:
    trajectory = make_trajectory(
        [
            make_turn([1, 2], [3, 4], logprobs=[-0.1, -0.2], reward=0.5),
            make_turn([7], [5], logprobs=[-0.3]),
            make_turn([1, 2, 3, 4, 9], [6], logprobs=[-0.4], reward=1.0),
        ],
        outcome=outcome,
    )
    main = np.array([9, 0.1, 0.2, 9, 0.4, 0.8], np.float32)
    aside = np.array([0.3, 9], np.float32)
    scores = {trajectory.trajectory_id: tuple(RowScores(values=v) for v in (main, aside))}
    result = build(
        group_of(trajectory), scores=scores, policies=TRAIN_TRUNCATED, **critic(decay=0.5)
    )
    found = advantages(result)
    assert len(found) == 4
    old_values = {-0.1: 0.1, -0.2: 0.2, -0.3: 0.3, -0.4: 0.4}
    rows = [row for shard in result.shards for row in shard.value_rows or ()]
    by_logprob = {
        round(float(logprob), 1): (old, target)
        for row in rows
        for logprob, old, target in zip(
            row.row.behaviour_logprobs, row.old_values, row.value_targets, strict=True
        )
    }
    for logprob, value in old_values.items():
        assert found[float(np.float32(logprob))] == pytest.approx(expected[logprob], abs=1e-6)
        wanted = (value, value + expected[logprob])
        assert by_logprob[logprob] == pytest.approx(wanted, abs=1e-6)
