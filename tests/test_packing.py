"""Packing: every trained token once, equal rows a rank, positions and targets right."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from trajectory_builders import make_trajectory, make_turn

from actors.batch import MicroBatch
from actors.merge.packing import (
    WeightedSample,
    filler,
    pack_minibatch,
    pack_row,
    place_samples,
    split_trajectories,
)
from actors.merge.prefix import Sample, merge_turns


def make_sample(prompt: list[int], sampled: list[int], *, version: int = 0) -> Sample:
    return merge_turns(make_trajectory([make_turn(prompt, sampled, version=version)])).samples[0]


@st.composite
def weighted_strategy(draw: st.DrawFn) -> list[WeightedSample]:
    """Samples whose token ids are all different, so that each can be found again."""
    weighted, next_id = [], 0
    for _ in range(draw(st.integers(0, 12))):
        num_prompt, num_sampled = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        tokens = list(range(next_id, next_id + num_prompt + num_sampled))
        next_id += len(tokens)
        sample = make_sample(
            tokens[:num_prompt], tokens[num_prompt:], version=draw(st.integers(0, 3))
        )
        weighted.append(WeightedSample(sample=sample, advantage=draw(st.sampled_from([-1.0, 0.5]))))
    return weighted


def check_row(row: MicroBatch) -> None:
    assert int(row.sample_lengths.sum()) == row.num_tokens
    starts = np.cumsum(row.sample_lengths) - row.sample_lengths
    positions = [np.arange(length) for length in row.sample_lengths]
    np.testing.assert_array_equal(row.position_ids, np.concatenate(positions))
    assert (row.token_ids[row.loss_positions + 1] == row.targets).all()
    assert not np.isin(row.loss_positions + 1, starts).any()
    assert row.token_ids.dtype == row.position_ids.dtype == row.loss_positions.dtype == np.int32
    assert row.behaviour_logprobs.dtype == row.advantages.dtype == np.float32


@given(weighted_strategy(), st.integers(1, 4), st.integers(5, 40))
def test_every_trained_token_is_in_exactly_one_row_with_its_own_side_data(
    weighted: list[WeightedSample], num_ranks: int, budget: int
) -> None:
    shares = pack_minibatch(weighted, num_ranks=num_ranks, budget=budget, attention_tokens=64)
    assert len(shares) == num_ranks
    assert len({len(share.micro_batches) for share in shares}) == 1
    rows = [row for share in shares for row in share.micro_batches]
    found = Counter(int(token) for row in rows for token in row.targets)
    expected = {int(t): w for w in weighted for t in w.sample.token_ids[w.sample.mask == 1]}
    assert found == Counter(expected.keys())
    assert {share.denominator for share in shares} == {max(1, len(expected))}
    for row in rows:
        check_row(row)
        assert row.num_tokens <= budget or row.sample_lengths.shape[0] == 1
        for token, advantage, version in zip(
            row.targets, row.advantages, row.sampled_versions, strict=True
        ):
            owner = expected[int(token)]
            assert advantage == np.float32(owner.advantage)
            assert version == owner.sample.versions.max()


def test_the_logits_before_a_trained_token_predict_it() -> None:
    sample = merge_turns(
        make_trajectory([make_turn([1, 2], [3]), make_turn([1, 2, 3, 4], [5])])
    ).samples[0]
    other = make_sample([6], [7, 8])
    row = pack_row(
        [WeightedSample(sample=sample, advantage=1.0), WeightedSample(sample=other, advantage=-2.0)]
    )
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert row.loss_positions.tolist() == [1, 3, 5, 6]
    assert row.targets.tolist() == [3, 5, 7, 8]
    assert row.advantages.tolist() == [1, 1, -2, -2]


def test_a_sample_longer_than_the_budget_gets_a_row_of_its_own() -> None:
    placed = place_samples([50, 3, 4], num_ranks=1, budget=10, attention_tokens=64)
    assert sorted(map(sorted, placed[0])) == [[], [], [], [], [0], [1, 2]]


def test_ranks_are_balanced_in_cost() -> None:
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    placed = place_samples(lengths, num_ranks=2, budget=20, attention_tokens=10**9)
    loads = [sum(lengths[i] for row in rank for i in row) for rank in placed]
    assert loads == [18, 18]


def test_a_rank_with_nothing_to_do_gets_fillers() -> None:
    weighted = [WeightedSample(sample=make_sample([1], [2]), advantage=1.0)]
    busy, idle = pack_minibatch(weighted, num_ranks=2, budget=8, attention_tokens=64)
    assert busy.micro_batches[0].num_trained == 1 and idle.micro_batches[0].num_trained == 0
    assert idle.denominator == 1
    check_row(filler())
    for share in pack_minibatch([], num_ranks=2, budget=8, attention_tokens=64):
        assert [row.num_trained for row in share.micro_batches] == [0] and share.denominator == 1


@given(st.lists(st.sampled_from("abc"), max_size=20), st.integers(1, 5), st.integers(0, 5))
def test_trajectories_are_dealt_evenly_and_the_same_way_for_the_same_seed(
    group_ids: list[str], num_minibatches: int, seed: int
) -> None:
    def split() -> list[list[int]]:
        return split_trajectories(group_ids, num_minibatches=num_minibatches, seed=seed, step=3)

    parts = split()
    assert parts == split()
    assert sorted(i for part in parts for i in part) == list(range(len(group_ids)))
    assert len(parts) == max(1, min(num_minibatches, len(group_ids)))
    for group_id in "abc":
        counts = [sum(group_ids[i] == group_id for i in part) for part in parts]
        assert max(counts) - min(counts) <= 1
