"""Two ways into a buffer, one result; side data follows its tokens; each token is read once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.trajectory_builders import ids, linear_turns, make_trajectory, make_turn, random_turns

from actors.lineage import Lineage, MismatchKind, SampleLineage
from actors.merge.buffer import TrajectoryBuffer, fill
from actors.merge.prefix import Merged, Played, SideData, merge_all, merge_played, merge_turns
from actors.trajectory_queue.columns import decode, encode
from actors.types import Turn, VersionSpan

seeds = st.integers(0, 2**32 - 1)


def turns_of(seed: int, *, max_turns: int = 8) -> list[Turn]:
    """Random turns, some of them with rewards by token and with routing records."""
    rng = np.random.default_rng(seed)
    turns = random_turns(rng, max_turns=max_turns)
    for index, turn in enumerate(turns):
        if rng.random() < 0.5:
            rewards = rng.choice([0.0, 0.5, 1.0], turn.num_sampled).astype(np.float32)
            turn = replace(turn, token_rewards=rewards, reward=float(rewards.sum()))
        if rng.random() < 0.5:
            shape = (rng.integers(0, turn.num_sampled + 1), 2, 3)
            turn = replace(turn, expert_indices=rng.integers(0, 9, shape).astype(np.int16))
        turns[index] = turn
    return turns


def obvious_samples(turns: list[Turn]) -> list[list[int]]:
    """The rule word for word: the longest exact prefix, the newest among equals."""
    chains: list[list[int]] = []
    for index, turn in enumerate(turns):
        prompt = turn.prompt_token_ids.tolist()
        fits = [
            (len(full), number)
            for number, chain in enumerate(chains)
            for full in [
                turns[chain[-1]].prompt_token_ids.tolist()
                + turns[chain[-1]].sampled_token_ids.tolist()
            ]
            if prompt[: len(full)] == full
        ]
        if fits:
            chains[max(fits)[1]].append(index)
        else:
            chains.append([index])
    return chains


def appended(turns: list[Turn]) -> TrajectoryBuffer:
    """A turn loop's way: what continues a sample is appended, the rest is looked for."""
    buffer = TrajectoryBuffer()
    sample_of = {i: n for n, chain in enumerate(obvious_samples(turns)) for i in chain}
    begun: set[int] = set()
    for index, turn in enumerate(turns):
        sample = sample_of[index]
        if sample in begun:
            observed = turn.prompt_token_ids[buffer.length(sample) :].copy()
            buffer.extend(sample, observed, turn.sampled_token_ids)
        else:
            begun.add(buffer.add(turn.prompt_token_ids, turn.sampled_token_ids))
    return buffer


def assert_same(a: Merged, b: Merged) -> None:
    assert (a.mismatches, a.num_turns) == (b.mismatches, b.num_turns)
    assert a.num_unmerged_tokens == b.num_unmerged_tokens
    assert a.num_masked_tokens == b.num_masked_tokens
    for one, other in zip(a.samples, b.samples, strict=True):
        assert (one.turns, one.prompt_length) == (other.turns, other.prompt_length)
        for name in ("token_ids", "mask", "logprobs", "versions", "token_rewards"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert (one.experts is None) == (other.experts is None)
        if one.experts is not None and other.experts is not None:
            np.testing.assert_array_equal(one.experts.positions, other.experts.positions)
            np.testing.assert_array_equal(one.experts.indices, other.experts.indices)


@given(seeds)
def test_the_tree_finds_what_comparing_everything_with_everything_finds(seed: int) -> None:
    turns = turns_of(seed, max_turns=12)
    assert [list(sample.turns) for sample in fill(turns).lineage().samples] == obvious_samples(
        turns
    )


@given(seeds)
def test_appending_deltas_gives_what_comparing_whole_prompts_gives(seed: int) -> None:
    turns = turns_of(seed)
    trajectory = make_trajectory(turns)
    played = Played(
        trajectory_id=trajectory.trajectory_id, buffer=appended(turns), side=SideData.of(turns)
    )
    assert_same(merge_played([played])[0], merge_turns(trajectory))


@given(seeds)
def test_a_lineage_that_is_known_gives_what_is_found_without_it(seed: int) -> None:
    trajectory = make_trajectory(turns_of(seed))
    queued = decode(encode([trajectory]), 0)
    assert queued.lineage == fill(trajectory.turns).lineage()
    assert_same(merge_turns(queued), merge_turns(trajectory))
    assert_same(merge_turns(replace(queued, lineage=None)), merge_turns(trajectory))


@given(seeds, seeds)
def test_trajectories_merged_together_are_merged_each_by_itself(first: int, second: int) -> None:
    trajectories = [make_trajectory(turns_of(seed)) for seed in (first, second)]
    for together, trajectory in zip(merge_all(trajectories), trajectories, strict=True):
        assert_same(together, merge_turns(trajectory))


@given(seeds)
def test_side_data_lies_on_the_token_that_it_was_recorded_with(seed: int) -> None:
    turns = turns_of(seed)
    merged = merge_turns(make_trajectory(turns))
    has_rewards = any(turn.token_rewards is not None for turn in turns)
    num_records = 0
    for sample in merged.samples:
        experts = {}
        if sample.experts is not None:
            records = zip(sample.experts.positions.tolist(), sample.experts.indices, strict=True)
            experts = dict(records)
            num_records += len(experts)
        for index in sample.turns:
            turn = turns[index]
            start = len(turn.prompt_token_ids)
            for offset in range(0 if turn.expert_indices is None else len(turn.expert_indices)):
                assert turn.expert_indices is not None
                np.testing.assert_array_equal(experts[start + offset], turn.expert_indices[offset])
            if sample.token_rewards is not None:
                own = sample.token_rewards[start : start + turn.num_sampled]
                assert own.sum() == (turn.reward if turn.num_sampled else 0)
        assert (sample.token_rewards is not None) == has_rewards
    assert num_records == sum(len(t.expert_indices) for t in turns if t.expert_indices is not None)


def test_rewards_by_token_and_routing_follow_their_tokens() -> None:
    experts = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    merged = merge_turns(
        make_trajectory(
            [
                make_turn([1, 2], [3, 4], reward=1.0),
                make_turn(
                    [1, 2, 3, 4, 5],
                    [6, 7, 8],
                    reward=0.75,
                    token_rewards=np.array([0, 0.25, 0.5], np.float32),
                    expert_indices=experts,
                ),
            ]
        )
    )
    (sample,) = merged.samples
    assert sample.token_rewards is not None and sample.experts is not None
    assert sample.token_rewards.tolist() == [0, 0, 0, 1, 0, 0, 0.25, 0.5]
    # The last sampled token was never read by the engine: it has no record.
    assert sample.experts.positions.tolist() == [5, 6]
    np.testing.assert_array_equal(sample.experts.indices, experts)


def test_what_nobody_recorded_is_absent() -> None:
    sample = merge_turns(make_trajectory(linear_turns(2))).samples[0]
    assert sample.token_rewards is None and sample.experts is None


def test_a_break_at_the_source_keeps_the_reason_that_the_source_gives() -> None:
    buffer = TrajectoryBuffer()
    buffer.add(ids([1, 2]), ids([3]))
    buffer.extend(0, ids([4]), ids([5]))
    assert buffer.add(ids([1, 2, 9]), ids([7]), kind=MismatchKind.TEMPLATE) == 1
    assert buffer.add(ids([1, 2, 3, 4, 5, 6]), ids([8]), kind=MismatchKind.TEMPLATE) == 0
    assert buffer.lineage() == Lineage(
        samples=(
            SampleLineage(turns=(0, 1, 3)),
            SampleLineage(turns=(2,), parent=0, shared=2, kind=MismatchKind.TEMPLATE),
        )
    )


def test_a_conversation_of_its_own_has_no_parent_and_a_kind() -> None:
    buffer = fill([make_turn([1, 2], [3]), make_turn([7, 8], [9])])
    assert buffer.lineage().samples[1] == SampleLineage(
        turns=(1,), kind=MismatchKind.HISTORY_REWRITTEN
    )


def thoughts_stripped(num_turns: int) -> list[Turn]:
    """Each prompt lacks the thought (20 tokens) of the reply before it: no turn extends another."""
    rng = np.random.default_rng(0)
    history = rng.integers(5, 5000, 50).tolist()
    turns = []
    for _ in range(num_turns):
        thought, answer, observed = (rng.integers(5, 5000, n).tolist() for n in (20, 10, 30))
        turns.append(make_turn(history, thought + answer))
        history = history + answer + observed
    return turns


def test_histories_that_are_rewritten_every_turn_take_bytes_linear_in_the_turns() -> None:
    sizes = {}
    for num_turns in (20, 40, 80):
        trajectory = make_trajectory(thoughts_stripped(num_turns))
        columns = encode([trajectory])
        assert len(merge_turns(trajectory).samples) == num_turns
        # A turn adds its thought and answer, and answer and observation of the turn before.
        assert columns.token_ids.shape[0] == 50 + 30 + (num_turns - 1) * 70
        sizes[num_turns] = columns.row_num_bytes(0)
    assert sizes[80] - sizes[40] == 2 * (sizes[40] - sizes[20])


def test_a_main_line_that_goes_on_after_others_is_decoded_as_views() -> None:
    main, aside = linear_turns(4, seed=1), linear_turns(4, seed=2)
    woven = [turn for pair in zip(main, aside, strict=True) for turn in pair]
    columns = encode([make_trajectory(woven)])
    for turn in decode(columns, 0).turns:
        assert np.shares_memory(turn.prompt_token_ids, columns.token_ids)


def test_a_prompt_is_told_from_a_sample_that_begins_with_it() -> None:
    # Equal as far as the prompt goes is not enough: the sample is longer.
    lineage = fill([make_turn([1, 2], [3, 4]), make_turn([1, 2, 3], [4])]).lineage()
    assert [sample.turns for sample in lineage.samples] == [(0,), (1,)]


def test_versions_of_a_turn_without_tokens_beside_one_with_two_spans_stay_in_place() -> None:
    spans = (VersionSpan(version=1, start=0, end=1), VersionSpan(version=2, start=1, end=2))
    turns = [make_turn([1], []), replace(make_turn([1, 2], [3, 4]), version_spans=spans)]
    assert merge_turns(make_trajectory(turns)).samples[0].versions.tolist() == [-1, -1, 1, 2]


BAD = make_turn([1, 2], [3, 4])


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (replace(BAD, logprobs=BAD.logprobs[:1]), "turn 0: 1 log-probabilities for 2 sampled"),
        (make_turn([], [3, 4]), "turn 0: an empty prompt; send the ids"),
        (
            replace(BAD, version_spans=(VersionSpan(version=1, start=1, end=2),)),
            "turn 0: a version span from 1, expected 0; order the spans by token",
        ),
        (replace(BAD, version_spans=()), "turn 0: version spans cover 0 of 2 sampled tokens"),
        (replace(BAD, token_rewards=np.zeros(3, np.float32)), "for 2 sampled tokens"),
    ],
)
def test_turns_that_cannot_be_merged_are_refused_by_the_name_of_their_trajectory(
    turn: Turn, words: str
) -> None:
    bad = make_trajectory([turn], rollout_id="g000003.0-7")
    with pytest.raises(ValueError, match=r"trajectory g000003\.0-7\.a0: .*") as raised:
        merge_all([make_trajectory(linear_turns(2)), bad])
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (VersionSpan(version=1, start=1, end=2),),
        (VersionSpan(version=1, start=0, end=1),),
        # They meet, and end where they should, but one of them runs backwards.
        (VersionSpan(version=1, start=0, end=5), VersionSpan(version=2, start=5, end=2)),
    ],
)
def test_spans_that_do_not_cover_a_played_turn_are_refused_by_name(
    spans: tuple[VersionSpan, ...],
) -> None:
    side = SideData.of([replace(BAD, version_spans=spans)])
    played = Played(trajectory_id="r.a0", buffer=fill([BAD]), side=side)
    expected = r"trajectory r\.a0: version spans that do not cover 2 sampled tokens in order"
    with pytest.raises(ValueError, match=expected):
        merge_played([played])


def test_a_span_too_many_in_one_turn_does_not_stand_for_one_that_is_missing() -> None:
    twice = (VersionSpan(version=0, start=0, end=2), VersionSpan(version=9, start=0, end=2))
    turns = [
        replace(make_turn([1], [2, 3]), version_spans=twice),
        replace(make_turn([1, 2, 3], [4, 5]), version_spans=()),
    ]
    with pytest.raises(ValueError, match="turn 0: a version span from 0, expected 2"):
        merge_turns(make_trajectory(turns))
    played = Played(trajectory_id="r.a0", buffer=fill(turns), side=SideData.of(turns))
    with pytest.raises(ValueError, match="version spans that do not cover 2"):
        merge_played([played])


def test_a_lineage_of_other_turns_is_refused() -> None:
    trajectory = decode(encode([make_trajectory(linear_turns(3))]), 0)
    fewer = replace(trajectory, turns=trajectory.turns[:2])
    with pytest.raises(ValueError, match="a lineage of 3 turns for 2"):
        merge_turns(fewer)
    with pytest.raises(ValueError, match="a lineage of 3 turns for 2"):
        encode([fewer])


def test_side_data_of_fewer_turns_than_the_buffer_holds_is_refused() -> None:
    turns = linear_turns(3)
    played = Played(trajectory_id="r.a0", buffer=fill(turns), side=SideData.of(turns[:2]))
    with pytest.raises(ValueError, match=r"trajectory r\.a0: records of 2 turns for 3"):
        merge_played([played])


def test_a_trajectory_without_turns_has_no_samples() -> None:
    (merged,) = merge_all([make_trajectory([])])
    assert merged.samples == () and merged.num_turns == 0
    assert merge_all([]) == []
