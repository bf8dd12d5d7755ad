"""Packing: every trained token once, equal rows a rank, positions and targets right."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trajectory_builders import make_trajectory, make_turn

from actors.batch import MicroBatch
from actors.merge.packing import (
    WeightedSample,
    filler,
    pack_minibatch,
    pack_row,
    place_trajectories,
    split_trajectories,
)
from actors.merge.prefix import Sample, merge_turns


def make_sample(
    prompt: list[int], sampled: list[int], *, version: int = 0, rollout_id: str = "g000000.0-0"
) -> Sample:
    turn = make_turn(prompt, sampled, version=version)
    return merge_turns(make_trajectory([turn], rollout_id=rollout_id)).samples[0]


def weigh(sample: Sample, advantage: float = 1.0, loss_weight: float = 0.25) -> WeightedSample:
    return WeightedSample(sample=sample, advantage=advantage, loss_weight=loss_weight)


@st.composite
def weighted_strategy(draw: st.DrawFn) -> list[WeightedSample]:
    """Samples whose token ids are all different, so that each can be found again.

    Of up to three samples a trajectory.
    """
    weighted, next_id = [], 0
    for _ in range(draw(st.integers(0, 12))):
        num_prompt, num_sampled = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        tokens = list(range(next_id, next_id + num_prompt + num_sampled))
        next_id += len(tokens)
        sample = make_sample(
            tokens[:num_prompt],
            tokens[num_prompt:],
            version=draw(st.integers(0, 3)),
            rollout_id=f"g000000.0-{draw(st.integers(0, 5))}",
        )
        advantage = draw(st.sampled_from([-1.0, 0.5]))
        weighted.append(weigh(sample, advantage, draw(st.sampled_from([0.125, 2.0]))))
    return weighted


def check_row(row: MicroBatch) -> None:
    assert int(row.sample_lengths.sum()) == row.num_tokens
    starts = np.cumsum(row.sample_lengths) - row.sample_lengths
    positions = [np.arange(length) for length in row.sample_lengths]
    np.testing.assert_array_equal(row.position_ids, np.concatenate(positions))
    assert (row.token_ids[row.loss_positions + 1] == row.targets).all()
    assert not np.isin(row.loss_positions + 1, starts).any()
    assert row.token_ids.dtype == row.position_ids.dtype == row.loss_positions.dtype == np.int32
    assert row.sampled_versions.dtype == row.trajectory_index.dtype == np.int32
    assert row.behaviour_logprobs.dtype == row.advantages.dtype == np.float32
    assert row.loss_weights.dtype == np.float32
    assert sorted(set(row.trajectory_index)) == list(range(len(set(row.trajectory_index))))


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
    homes: dict[str, set[tuple[int, int]]] = {}
    for number, row in enumerate(rows):
        check_row(row)
        assert row.num_tokens <= budget or len(set(row.trajectory_index)) == 1
        for index, token in enumerate(row.targets):
            owner = expected[int(token)]
            assert row.advantages[index] == np.float32(owner.advantage)
            assert row.loss_weights[index] == np.float32(owner.loss_weight)
            assert row.sampled_versions[index] == owner.sample.versions.max()
            home = (number, int(row.trajectory_index[index]))
            homes.setdefault(owner.sample.trajectory_id, set()).add(home)
    # Each trajectory has one row and one number in it, and shares it with no other.
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(set(), *homes.values())) == len(homes)


def test_the_logits_before_a_trained_token_predict_it() -> None:
    sample = merge_turns(
        make_trajectory([make_turn([1, 2], [3]), make_turn([1, 2, 3, 4], [5])])
    ).samples[0]
    other = make_sample([6], [7, 8])
    row = pack_row([weigh(sample), weigh(other, -2.0, 0.5)])
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert row.loss_positions.tolist() == [1, 3, 5, 6]
    assert row.targets.tolist() == [3, 5, 7, 8]
    assert row.advantages.tolist() == [1, 1, -2, -2]
    assert row.loss_weights.tolist() == [0.25, 0.25, 0.5, 0.5]
    assert row.trajectory_index.tolist() == [0, 0, 0, 0]


def test_all_samples_of_a_trajectory_share_one_row_and_one_number() -> None:
    parts = [make_sample([1], [2, 3], rollout_id=f"g000000.0-{number}") for number in (0, 1, 0)]
    row = pack_row([weigh(part) for part in parts])
    assert row.trajectory_index.tolist() == [0, 0, 1, 1, 0, 0]
    shares = pack_minibatch(
        [weigh(part) for part in parts], num_ranks=2, budget=3, attention_tokens=64
    )
    assert [share.micro_batches[0].num_trained for share in shares] == [4, 2]


@pytest.mark.parametrize(("advantage", "weight"), [(math.nan, 1.0), (1.0, math.inf)])
def test_a_number_that_is_not_finite_is_refused_with_the_trajectory_named(
    advantage: float, weight: float
) -> None:
    bad = weigh(make_sample([1], [2], rollout_id="g000000.0-7"), advantage, weight)
    with pytest.raises(
        ValueError, match=r"trajectory g000000\.0-7\.a0 has advantage .* expected finite"
    ):
        pack_minibatch([bad], num_ranks=1, budget=8, attention_tokens=64)


def test_a_trajectory_longer_than_the_budget_gets_a_row_of_its_own() -> None:
    placed = place_trajectories([[25, 25], [3], [4]], num_ranks=1, budget=10, attention_tokens=64)
    assert sorted(map(sorted, placed[0])) == [[], [], [], [], [0], [1, 2]]


def test_ranks_are_balanced_in_cost() -> None:
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    placed = place_trajectories(
        [[length] for length in lengths], num_ranks=2, budget=20, attention_tokens=10**9
    )
    loads = [sum(lengths[i] for row in rank for i in row) for rank in placed]
    assert loads == [18, 18]


def test_attention_costs_by_sample_and_not_by_trajectory() -> None:
    # Costs 16, 12 and 16: the two short samples attend to less than one of their length.
    lengths = [[8], [4, 4], [8]]
    placed = place_trajectories(lengths, num_ranks=2, budget=16, attention_tokens=8)
    assert sorted(sorted(i for row in rank for i in row) for rank in placed) == [[0], [1, 2]]


def test_a_rank_with_nothing_to_do_gets_fillers() -> None:
    weighted = [weigh(make_sample([1], [2]))]
    busy, idle = pack_minibatch(weighted, num_ranks=2, budget=8, attention_tokens=64)
    assert busy.micro_batches[0].num_trained == 1 and idle.micro_batches[0].num_trained == 0
    check_row(filler())
    for share in pack_minibatch([], num_ranks=2, budget=8, attention_tokens=64):
        assert [row.num_trained for row in share.micro_batches] == [0]


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
