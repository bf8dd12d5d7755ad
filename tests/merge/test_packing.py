"""Tests of packing: every trained token once, equally many rows per rank, right positions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.builders.trajectory_builders import ids, make_trajectory, make_turn

from actors.batch import MicroBatch, padding_row
from actors.merge.packing import (
    BALANCED,
    WeightedSample,
    assign_rows,
    pack_minibatch,
    pack_row,
    split_trajectories,
)
from actors.merge.prefix_sharing import measure
from actors.trainer.attention.forest import trace_segments
from actors.types import Sample


def make_sample(
    prompt: list[int], sampled: list[int], *, version: int = 0, member: int = 0
) -> Sample:
    turn = make_turn(prompt, sampled, version=version)
    return make_trajectory([turn], rollout_id=f"g000000.0-{member}").samples[0]


def weigh(sample: Sample, advantage: float = 1.0, loss_weight: float = 0.25) -> WeightedSample:
    return WeightedSample(sample=sample, advantage=advantage, loss_weight=loss_weight)


@st.composite
def weighted_strategy(draw: st.DrawFn) -> list[WeightedSample]:
    """Draw samples of a few trajectories and prompts; each sampled id occurs once."""
    weighted, next_id = [], 100
    for _ in range(draw(st.integers(0, 12))):
        prompt = [draw(st.integers(0, 2))] * draw(st.integers(1, 9))
        sampled = list(range(next_id, next_id + draw(st.integers(1, 9))))
        next_id += len(sampled)
        sample = make_sample(
            prompt, sampled, version=draw(st.integers(0, 3)), member=draw(st.integers(0, 9))
        )
        advantage = draw(st.sampled_from([-1.0, 0.5]))
        weighted.append(weigh(sample, advantage, draw(st.sampled_from([0.125, 2.0]))))
    return weighted


def check_row(row: MicroBatch) -> None:
    """Check that each target follows its loss position, in its segment or as a child's first."""
    segments = trace_segments(row.segment_lengths, row.segment_parents)
    assert segments.num_tokens == row.num_tokens
    np.testing.assert_array_equal(row.position_ids, segments.token_positions())
    segment = np.searchsorted(segments.ends, row.loss_positions, "right")
    firsts = row.token_ids[segments.starts]
    for position, target, own in zip(row.loss_positions, row.targets, segment, strict=True):
        is_last = position == segments.ends[own] - 1
        following = row.token_ids[position + 1 : position + 2]
        assert target in (firsts[row.segment_parents == own] if is_last else following)
    assert row.token_ids.dtype == row.position_ids.dtype == row.loss_positions.dtype == np.int32
    assert row.sampled_versions.dtype == row.trajectory_index.dtype == np.int32
    assert row.behaviour_logprobs.dtype == row.advantages.dtype == np.float32
    assert row.loss_weights.dtype == np.float32
    assert sorted(set(row.trajectory_index)) == list(range(len(set(row.trajectory_index))))


@given(weighted_strategy(), st.integers(1, 4), st.integers(5, 40), st.booleans())
def test_every_trained_token_is_in_exactly_one_row_with_its_own_side_data(
    weighted: list[WeightedSample], num_ranks: int, budget: int, share_prefixes: bool
) -> None:
    shares = pack_minibatch(
        weighted,
        num_ranks=num_ranks,
        budget=budget,
        attention_tokens=64,
        share_prefixes=share_prefixes,
    )
    assert len(shares) == num_ranks
    assert len({len(share) for share in shares}) == 1
    rows = [row for share in shares for row in share]
    found = Counter(int(token) for row in rows for token in row.targets)
    expected = {int(t): w for w in weighted for t in w.sample.token_ids[w.sample.mask == 1]}
    assert found == Counter(expected.keys())
    homes: dict[str, set[tuple[int, int]]] = {}
    for number, row in enumerate(rows):
        check_row(row)
        assert row.num_tokens <= budget or len(set(row.trajectory_index)) == 1
        assert share_prefixes or (row.segment_parents == -1).all()
        for index, token in enumerate(row.targets):
            owner = expected[int(token)]
            assert row.advantages[index] == np.float32(owner.advantage)
            assert row.loss_weights[index] == np.float32(owner.loss_weight)
            assert row.sampled_versions[index] == owner.sample.versions.max()
            home = (number, int(row.trajectory_index[index]))
            homes.setdefault(owner.sample.trajectory_id, set()).add(home)
    # Each trajectory has one row, and a number in it that no other trajectory has.
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(set(), *homes.values())) == len(homes)


def test_the_logits_before_a_trained_token_predict_it() -> None:
    sample = make_trajectory([make_turn([1, 2], [3]), make_turn([1, 2, 3, 4], [5])]).samples[0]
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
    parts = [make_sample([1], [2 * n, 2 * n + 1], member=n % 2) for n in (2, 3, 4)]
    row = pack_row([weigh(part) for part in parts])
    assert row.trajectory_index.tolist() == [0, 0, 1, 1, 0, 0]
    shares = pack_minibatch(
        [weigh(part) for part in parts], num_ranks=2, budget=5, attention_tokens=64
    )
    assert [share[0].num_trained for share in shares] == [4, 2]


def test_a_row_without_samples_is_padding() -> None:
    row = pack_row([])
    assert (row.num_tokens, row.num_trained) == (1, 0) and row.experts is None


def test_the_tokens_of_a_sample_may_differ_in_advantage() -> None:
    sample = make_sample([1], [2, 3])
    weighted = WeightedSample(sample=sample, advantage=np.array([0.5, -1.0]), loss_weight=1.0)
    assert pack_row([weighted]).advantages.tolist() == [0.5, -1.0]


def test_a_shared_prompt_is_stored_once_and_its_last_token_predicts_every_answer() -> None:
    first, second = make_sample([1, 2], [3, 4]), make_sample([1, 2], [5], member=1)
    row = pack_row([weigh(first), weigh(second, -2.0)])
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert row.segment_lengths.tolist() == [2, 2, 1] and row.segment_parents.tolist() == [-1, 0, 0]
    assert row.loss_positions.tolist() == [1, 2, 1]
    assert row.targets.tolist() == [3, 4, 5]
    assert row.advantages.tolist() == [1, 1, -2]


def assign_lengths(lengths: list[int], *, num_ranks: int, budget: int) -> list[list[list[int]]]:
    """Assign trajectories of one sample each that share no prefix."""
    samples = [[np.full(length, number, np.int32)] for number, length in enumerate(lengths)]
    return assign_rows(
        samples, num_ranks=num_ranks, budget=budget, attention_tokens=10**9, share_prefixes=True
    )


def test_a_sample_longer_than_the_budget_gets_a_row_of_its_own() -> None:
    assigned = assign_lengths([50, 3, 4], num_ranks=1, budget=10)
    assert sorted(map(sorted, assigned[0])) == [[], [], [], [], [0], [1, 2]]


def test_ranks_are_balanced_in_cost() -> None:
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    assigned = assign_lengths(lengths, num_ranks=2, budget=20)
    loads = [sum(lengths[i] for row in rank for i in row) for rank in assigned]
    assert loads == [18, 18]


def test_the_cost_of_attention_is_per_sample_and_not_per_trajectory() -> None:
    long, short = [np.zeros(8, np.int32)], [np.zeros(4, np.int32), np.ones(4, np.int32)]
    costs = [measure(each, attention_tokens=8, share_prefixes=True).cost for each in (long, short)]
    assert costs == [8 + 64 / 8, 2 * (4 + 16 / 8)]


def random_groups(
    seed: int, *, num_groups: int, members: int, prompt: int, system: int = 0
) -> list[list[np.ndarray]]:
    """Return shuffled trajectories in groups that share a prompt of about `prompt` tokens."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, 50, system)
    trajectories = []
    for _ in range(num_groups):
        shared = np.concatenate([begin, rng.integers(0, 50, int(rng.integers(1, 2 * prompt)))])
        for _ in range(members):
            answer = rng.integers(0, 50, 1 + int(rng.lognormal(4.5, 0.8)))
            trajectories.append([ids(np.concatenate([shared, answer]))])
    order = rng.permutation(len(trajectories))
    return [trajectories[index] for index in order]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("num_groups", "members", "prompt", "system"),
    [(256, 1, 100, 0), (32, 8, 400, 0), (12, 32, 400, 0), (40, 8, 60, 90), (24, 12, 300, 0)],
)
def test_the_costs_of_eight_ranks_differ_by_at_most_five_percent(
    seed: int, num_groups: int, members: int, prompt: int, system: int
) -> None:
    trajectories = random_groups(
        seed, num_groups=num_groups, members=members, prompt=prompt, system=system
    )
    assigned = assign_rows(
        trajectories, num_ranks=8, budget=4096, attention_tokens=8192, share_prefixes=True
    )
    found = [index for rank in assigned for row in rank for index in row]
    assert sorted(found) == list(range(len(trajectories)))
    assert len({len(rank) for rank in assigned}) == 1
    costs = []
    for rank in assigned:
        sizes = [
            measure(
                [ids for index in row for ids in trajectories[index]],
                attention_tokens=8192,
                share_prefixes=True,
            )
            for row in rank
        ]
        assert all(size.num_tokens <= 4096 for size in sizes)
        costs.append(sum(size.cost for size in sizes))
    assert max(costs) <= BALANCED * np.mean(costs)


def test_groups_stay_together_if_budget_and_balance_allow() -> None:
    trajectories = random_groups(1, num_groups=24, members=8, prompt=600, system=30)
    samples = [ids for trajectory in trajectories for ids in trajectory]

    def num_packed(num_ranks: int) -> int:
        assigned = assign_rows(
            trajectories,
            num_ranks=num_ranks,
            budget=8192,
            attention_tokens=8192,
            share_prefixes=True,
        )
        return sum(
            measure([samples[i] for i in row], attention_tokens=1, share_prefixes=True).num_tokens
            for rank in assigned
            for row in rank
        )

    fewest = measure(samples, attention_tokens=1, share_prefixes=True).num_tokens
    flat = measure(samples, attention_tokens=1, share_prefixes=False).num_tokens
    assert flat > 3 * fewest
    # A row has room for a few groups, so that only the common system prompt is repeated.
    assert num_packed(1) < 1.02 * fewest
    assert num_packed(4) < 1.2 * fewest


def test_a_rank_with_nothing_to_do_gets_padding() -> None:
    weighted = [weigh(make_sample([1], [2]))]
    busy, padded = pack_minibatch(weighted, num_ranks=2, budget=8, attention_tokens=64)
    assert busy[0].num_trained == 1 and padded[0].num_trained == 0
    check_row(padding_row())
    for share in pack_minibatch([], num_ranks=2, budget=8, attention_tokens=64):
        assert [row.num_trained for row in share] == [0]


@given(st.lists(st.sampled_from("abc"), max_size=20), st.integers(1, 5), st.integers(0, 5))
def test_trajectories_are_divided_evenly_and_deterministically_by_seed(
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
