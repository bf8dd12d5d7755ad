"""Tests of expert records in packed rows: each is once at the position of its token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from worlds.builders.settings import step_settings
from worlds.builders.trajectory_builders import make_trajectory, make_turn

from actors.batch import MicroBatch, padding_row
from actors.expert_records import ExpertRecords
from actors.merge.groups import classify_groups
from actors.merge.packing import (
    WeightedSample,
    pack_minibatch,
    pack_row,
    pack_values,
)
from actors.merge.scoring import plan_scores
from actors.merge.step import build_step
from actors.trajectory_queue.codec import decode, encode
from actors.types import NO_VERSION, Sample, Trajectory

Prefix = tuple[int, ...]


def weigh(sample: Sample) -> WeightedSample:
    return WeightedSample(sample=sample, advantage=1.0, loss_weight=0.5)


def recorded(experts: list[list[list[int]]]) -> np.ndarray:
    return np.array(experts, np.uint8)


def records_of(row: MicroBatch) -> dict[int, list[list[int]]]:
    assert row.experts is not None
    assert row.experts.positions.dtype == np.int32
    positions = row.experts.positions.tolist()
    return dict(zip(positions, row.experts.indices.tolist(), strict=True))


def random_samples(seed: int) -> list[Sample]:
    """Return samples, some without records, in which prefixes and records are often equal."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(rng.integers(1, 7)):
        length = int(rng.integers(1, 9))
        token_ids = rng.integers(0, 2, length).astype(np.int32)
        positions = np.flatnonzero(rng.random(length) < 0.5).astype(np.int32)
        chosen = rng.permuted(np.tile(np.arange(3), (len(positions), 2, 1)), axis=-1)[..., :2]
        dtype = rng.choice([np.uint8, np.int16])
        records = ExpertRecords(positions=positions, indices=chosen.astype(dtype))
        samples.append(
            Sample(
                trajectory_id=f"g000000.0-{number % 3}.a0",
                turns=(),
                token_ids=token_ids,
                logprobs=np.zeros(length, np.float32),
                versions=np.where(np.arange(length) > 0, 0, NO_VERSION).astype(np.int32),
                experts=records if len(positions) else None,
            )
        )
    return samples


def records_by_prefix(samples: list[Sample]) -> tuple[dict[Prefix, list[list[int]]], int]:
    """Return the first record for each prefix of ids, and the number of records that differ."""
    known: dict[Prefix, list[list[int]]] = {}
    num_overruled = 0
    for sample in samples:
        if sample.experts is None:
            continue
        pairs = zip(sample.experts.positions, sample.experts.indices.tolist(), strict=True)
        for position, experts in pairs:
            counting = known.setdefault(tuple(sample.token_ids[: position + 1].tolist()), experts)
            same = all(set(a) == set(b) for a, b in zip(counting, experts, strict=True))
            num_overruled += not same
    return known, num_overruled


def paths_of(row: MicroBatch) -> list[Prefix]:
    """Return, for each position of a row, the ids from the root to it."""
    paths: list[Prefix] = []
    ends = np.cumsum(row.segment_lengths)
    for end, length, parent in zip(ends, row.segment_lengths, row.segment_parents, strict=True):
        path = () if parent < 0 else paths[ends[parent] - 1]
        for token in row.token_ids[end - length : end].tolist():
            path = (*path, token)
            paths.append(path)
    return paths


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_every_position_has_the_first_record_of_its_path_and_no_other_has_one(
    seed: int, share_prefixes: bool
) -> None:
    samples = random_samples(seed)
    row = pack_row([weigh(sample) for sample in samples], share_prefixes=share_prefixes)
    known, num_overruled = records_by_prefix(samples)
    assert row.num_overruled_records == num_overruled
    expected = {at: known[path] for at, path in enumerate(paths_of(row)) if path in known}
    assert (records_of(row) if row.experts is not None else {}) == expected
    assert row.experts is None or row.experts.positions.tolist() == sorted(expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(4, 30))
def test_no_record_of_a_trained_token_is_lost_on_the_way_to_the_ranks(
    seed: int, num_ranks: int, budget: int
) -> None:
    samples = random_samples(seed)
    shares = pack_minibatch(
        [weigh(sample) for sample in samples],
        num_ranks=num_ranks,
        budget=budget,
        attention_tokens=64,
    )
    found = {
        paths_of(row)[position]
        for share in shares
        for row in share
        if row.experts is not None
        for position in row.experts.positions
    }
    assert found == records_by_prefix(samples)[0].keys()


def test_a_record_is_at_the_position_of_the_token_that_was_processed() -> None:
    a, b, c = [[0, 1]], [[2, 3]], [[4, 5]]
    # Two tokens were sampled per turn; the engine processed only the first of them.
    turns = [
        make_turn([1, 2], [3, 4], expert_indices=recorded([a])),
        make_turn([1, 2, 3, 4, 5], [6, 7], expert_indices=recorded([b])),
    ]
    other = make_turn([1, 2], [8, 9], expert_indices=recorded([c]))
    samples = [
        make_trajectory(part, rollout_id=f"g000000.0-{number}").samples[0]
        for number, part in enumerate([turns, [other]])
    ]
    tree = pack_row([weigh(sample) for sample in samples])
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert records_of(tree) == {2: a, 5: b, 7: c}
    flat = pack_row([weigh(sample) for sample in samples], share_prefixes=False)
    assert records_of(flat) == {2: a, 5: b, 9: c}


def test_records_of_sampled_tokens_are_also_replayed_as_context_in_another_sample() -> None:
    first = make_turn([1], [2, 3], expert_indices=recorded([[[0, 1]]]))
    second = make_turn([1, 2, 4], [5, 6], expert_indices=recorded([[[2, 0]]]))
    samples = make_trajectory([first, second]).samples
    assert len(samples) == 2 and samples[1].experts is not None
    assert samples[1].experts.positions.tolist() == [3]
    flat = pack_row([weigh(sample) for sample in samples], share_prefixes=False)
    assert flat.token_ids.tolist() == [1, 2, 3, 1, 2, 4, 5, 6]
    assert records_of(flat) == {1: [[0, 1]], 4: [[0, 1]], 6: [[2, 0]]}
    assert flat.num_overruled_records == 0


def test_if_records_at_a_shared_position_differ_the_first_counts() -> None:
    weighted = []
    for member, experts in enumerate([[[0, 1]], [[1, 0]], [[0, 2]]]):
        turn = make_turn([1], [2, 3 + member], expert_indices=recorded([experts]))
        trajectory = make_trajectory([turn], rollout_id=f"g000000.0-{member}")
        weighted.append(weigh(trajectory.samples[0]))
    row = pack_row(weighted)
    assert records_of(row) == {1: [[0, 1]]}
    # The second record has the same experts in another order and is not overruled.
    assert row.num_overruled_records == 1


def test_rows_without_records_have_no_experts() -> None:
    sample = make_trajectory([make_turn([1], [2])]).samples[0]
    assert pack_row([weigh(sample)]).experts is None
    assert padding_row().experts is None


def make_group() -> tuple[Trajectory, ...]:
    trajectories = []
    for member, experts in enumerate(([[0, 1]], [[0, 2]])):
        turn = make_turn([1], [2, 3], reward=float(member), expert_indices=recorded([experts]))
        trajectories.append(make_trajectory([turn], rollout_id=f"g000000.0-{member}"))
    return tuple(trajectories)


def test_the_report_of_a_step_counts_overruled_records() -> None:
    settings = step_settings()
    group = make_group()
    # Encode and decode the group, as the queue does.
    block = encode(group)
    decoded = tuple(decode(block, number) for number in range(len(group)))
    merged = classify_groups([decoded], settings)
    result = build_step(merged, settings, step=0, trainer_version=0)
    (row,) = result.shards[0].minibatches[0]
    assert records_of(row) == {1: [[0, 1]]}
    assert result.report.num_overruled_records == 1


def test_rows_for_a_reference_or_a_critic_have_no_records() -> None:
    settings = step_settings()
    merged = classify_groups([make_group()], settings)
    plan = plan_scores(merged, settings, step=0, trainer_version=0)
    rows = [row for shard in plan for row in shard.minibatches[0]]
    sample = make_group()[0].samples[0]
    two = np.zeros(2, np.float32)
    valued = replace(weigh(sample), old_values=two, value_targets=two)
    (value_rows,) = pack_values([valued], num_ranks=1, budget=64)
    rows += [each.row for each in value_rows]
    assert sum(row.num_trained for row in rows) == 6
    assert all(row.experts is None for row in rows)


def test_without_experts_returns_a_sample_without_records_unchanged() -> None:
    sample = make_group()[0].samples[0]
    assert sample.experts is not None
    plain = sample.without_experts()
    assert plain.experts is None and plain.without_experts() is plain
