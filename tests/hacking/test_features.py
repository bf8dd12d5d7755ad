"""Tests of the features of a step's trajectories, with values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from worlds.builders.journal_builders import group_of, random_group, step_of, through_a_file
from worlds.builders.trajectory_builders import make_trajectory, make_turn

from actors.journal.files import JournalStep, TrajectoryEntry
from actors.types import FinishReason, Outcome, Trajectory
from service.hacking import features
from service.hacking.features import StepFeatures, step_features

STOP = 1


def of(*trajectories: Trajectory, step: int = 1) -> StepFeatures:
    (found,) = step_features(journal_of(trajectories, step=step))
    return found


def journal_of(trajectories: tuple[Trajectory, ...], *, step: int = 1) -> JournalStep:
    entries = tuple(
        TrajectoryEntry(trajectory=each, reason=None, baseline_return=0.0, advantages=())
        for each in trajectories
    )
    return JournalStep(
        step=step,
        term=1,
        trainer_version=0,
        max_policy_age=0,
        group_rule=None,
        num_packed_trained=0,
        entries=entries,
    )


def said(
    sampled: list[int], *, prompt: list[int] | None = None, rollout_id: str = "g000000.0-0",
    answer: str | None = None, **fields: object,
) -> Trajectory:  # fmt: skip
    turn = make_turn(prompt or [7, 8, 9], sampled, **fields)  # type: ignore[arg-type]
    return make_trajectory([turn], rollout_id=rollout_id, answer=answer)


def test_a_text_that_each_turn_contains_once_is_not_repeated() -> None:
    turns = [make_turn([7] * (40 * n + 1), list(range(10, 50))) for n in range(3)]
    assert of(make_trajectory(turns)).repeated.tolist() == [0]


def test_repeated_runs_of_tokens_are_counted_in_long_texts() -> None:
    # Forty equal tokens have 37 equal runs of four; forty different tokens have 37 different ones.
    found = of(said([5] * 40), said(list(range(10, 50))), said([5] * 15)).repeated
    assert found.tolist() == pytest.approx([1 - 1 / 37, 0, 0])
    # Ten tokens that occur four times have ten different runs among 37.
    assert of(said(list(range(10, 20)) * 4)).repeated[0] == pytest.approx(1 - 10 / 37)


def test_tokens_are_copied_if_their_run_is_in_the_prompt() -> None:
    prompt = list(range(25, 50))
    whole = said([*range(30, 45), STOP], prompt=prompt)
    # Twelve of eighteen tokens are copied. A run of five is too short to count.
    half = said([*range(26, 38), 99, *range(40, 45)], prompt=prompt)
    own = said(list(range(100, 120)), prompt=prompt)
    short = said(list(range(30, 37)), prompt=prompt)
    # This is only a small part of a long prompt, which does not count as copied.
    part = said([*range(30, 45), STOP], prompt=list(range(10, 100)))
    found = of(whole, half, own, short, part).copied.tolist()
    assert found == pytest.approx([15 / 16, 12 / 18, 0, 0, 0])


def test_answers_are_compared_without_case_and_spaces_or_by_their_last_tokens() -> None:
    texts = [said([5, STOP], answer=text) for text in ("Yes  no", "yes no", "no")]
    bare = [said([5, STOP]), said([5, STOP]), said([6, STOP])]
    first, second, third, *others = of(*texts, *bare).answer.tolist()
    assert first == second != third
    assert others[0] == others[1] != others[2]


def test_an_empty_last_turn_counts_as_malformed() -> None:
    cut_off = replace(make_turn([7], [5]), finish_reason=FinishReason.LENGTH)
    trajectories = (
        said([STOP], reward=0.5),
        said([5, STOP]),
        said([5, STOP], is_malformed=True),
        make_trajectory([cut_off]),
    )
    found = of(*trajectories)
    assert found.is_malformed.tolist() == [True, False, True, False]
    assert found.last_reward.tolist() == [0.5, 0, 0, 0]
    assert of(said([STOP]), said([STOP])).is_malformed.all()


def test_an_answer_of_one_token_that_a_stop_string_ended_is_not_empty() -> None:
    found = of(said([5]), said([6]), said([4, 5, STOP]))
    assert not found.is_malformed.any()


def test_components_are_summed_over_turns_and_nan_if_missing() -> None:
    turns = [
        make_turn([7], [5], reward_components={"form": 0.5}),
        make_turn([7, 5, 8], [5], reward_components={"form": 0.25, "hit": 1.0}),
    ]
    found = of(make_trajectory(turns), said([5], rollout_id="g000000.0-1")).components
    assert found["form"][0] == 0.75 and found["hit"][0] == 1.0
    assert np.isnan([found["form"][1], found["hit"][1]]).all()


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        # Only gaps count, because no size is that of most groups.
        ({0: [0, 1, 4], 1: [1]}, 3),
        # Most groups have four members, so the last two of the third group are missing too.
        ({0: [0, 1, 2, 3], 1: [0, 3], 2: [0, 1]}, 4),
        ({0: [0, 1, 2, 3], 1: [0, 1], 2: [0, 1, 2, 3], 3: [0, 1]}, 0),
    ],
)
def test_missing_members_follow_from_gaps_and_the_usual_group_size(
    members: dict[int, list[int]], expected: int
) -> None:
    names = [f"g{group:06d}.0-{member}" for group, found in members.items() for member in found]
    assert of(*(said([5], rollout_id=name) for name in names)).num_missing == expected


def test_returns_are_divided_by_the_best_and_environments_are_separate() -> None:
    first = replace(said([5], reward=1.0), best_return=2.0)
    second = replace(said([5], reward=1.0, rollout_id="g000001.0-0"), environment="other")
    found = step_features(journal_of((first, second)))
    assert [part.environment for part in found] == ["game", "other"]
    assert [part.reward.tolist() for part in found] == [[0.5], [1.0]]


def test_a_large_step_is_sampled_by_whole_groups_reproducibly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(features, "MAX_TRAJECTORIES", 10)
    trajectories = tuple(each for group in range(5) for each in group_of(group, [0, 1, 0, 1]))
    found = of(*trajectories)
    groups = {name.partition("-")[0] for name in found.ids}
    assert found.num_trajectories == 8 and len(groups) == 2
    assert set(of(*trajectories[::-1]).ids) == set(found.ids)


@pytest.mark.parametrize("seed", range(5))
def test_features_exist_for_every_kind_of_step(seed: int) -> None:
    """Check random steps with empty turns, branches, malformed turns and no log-probabilities."""
    step = through_a_file(step_of([random_group(n, seed) for n in range(4)], number=10))
    (found,) = step_features(step)
    assert found.ids == tuple(entry.trajectory.trajectory_id for entry in step.entries)
    for column in (found.repeated, found.copied):
        assert ((column >= 0) & (column <= 1)).all()
    assert found.num_tokens.sum() == sum(e.trajectory.num_sampled for e in step.entries)


def test_a_rollout_without_a_turn_has_a_row() -> None:
    nothing = make_trajectory([], outcome=Outcome.TRUNCATED_CONTEXT)
    found = of(nothing, said([5], rollout_id="g000000.0-1"))
    assert found.num_turns.tolist() == [0, 1] and not found.is_malformed[0]
    assert found.is_graded.tolist() == [False, True]
