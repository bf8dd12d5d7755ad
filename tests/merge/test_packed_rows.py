"""Tests that packed rows fulfil the trainer's preconditions, whatever the samples are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.builders.trajectory_builders import ids
from worlds.checks.packed_rows import check_packed

from actors.batch import MicroBatch, padding_row
from actors.expert_records import ExpertRecords, MixtureShape
from actors.merge.packing import WeightedSample, pack_minibatch, pack_row
from actors.types import FinishReason, Sample, TurnSpan

VOCABULARY = 4
MIXTURE = MixtureShape(num_layers=2, num_experts=4, num_chosen=2)

# Packing reads the columns of a sample, not its turns.
SPAN = TurnSpan(index=0, start=1, end=2, finish_reason=FinishReason.STOP)


def make_sample(
    rng: np.random.Generator, token_ids: list[int], *, number: int, has_records: bool
) -> WeightedSample:
    length = len(token_ids)
    mask = (rng.random(length) < 0.6).astype(np.uint8)
    mask[0] = 0
    positions = np.flatnonzero(rng.random(length) < 0.5).astype(np.int32)
    chosen = rng.permuted(np.tile(np.arange(4), (len(positions), 2, 1)), axis=-1)[..., :2]
    records = ExpertRecords(positions=positions, indices=chosen.astype(np.uint8))
    sample = Sample(
        trajectory_id=f"g000000.0-{number}.a0",
        turns=(SPAN,),
        token_ids=ids(token_ids),
        logprobs=rng.normal(-1, 0.1, length).astype(np.float32) * mask,
        versions=np.where(mask, 3, -1).astype(np.int32),
        experts=records if has_records and len(positions) else None,
    )
    return WeightedSample(sample=sample, advantage=float(rng.normal()), loss_weight=rng.random())


@given(
    seed=st.integers(0, 10_000),
    num_samples=st.integers(1, 12),
    num_ranks=st.integers(1, 3),
    budget=st.integers(5, 40),
    share_prefixes=st.booleans(),
    has_records=st.booleans(),
)
def test_every_packed_row_fulfils_the_preconditions_of_the_trainer(
    seed: int,
    num_samples: int,
    num_ranks: int,
    budget: int,
    share_prefixes: bool,
    has_records: bool,
) -> None:
    # With few ids, samples happen to share prefixes, contain each other or be equal.
    rng = np.random.default_rng(seed)
    samples = [
        make_sample(
            rng,
            rng.integers(0, VOCABULARY, int(rng.integers(1, 12))).tolist(),
            number=int(rng.integers(0, 5)),
            has_records=has_records,
        )
        for _ in range(num_samples)
    ]
    shares = pack_minibatch(
        samples,
        num_ranks=num_ranks,
        budget=budget,
        attention_tokens=64,
        share_prefixes=share_prefixes,
    )
    assert len({len(share) for share in shares}) == 1
    rows = [row for share in shares for row in share]
    for row in rows:
        check_packed(row, vocab_size=VOCABULARY, mixture=MIXTURE)
    assert sum(row.num_trained for row in rows) == sum(each.sample.num_trained for each in samples)


def two_answers() -> MicroBatch:
    """Return the row 1 2 | 3 4 | 5 6: a prompt and two answers whose tokens are all trained."""
    samples = [
        Sample(
            trajectory_id=f"g000000.0-{number}.a0",
            turns=(SPAN,),
            token_ids=ids([1, 2, *answer]),
            logprobs=np.zeros(4, np.float32),
            versions=np.array([-1, -1, 0, 0], np.int32),
        )
        for number, answer in enumerate([[3, 4], [5, 6]])
    ]
    return pack_row([WeightedSample(sample=s, advantage=1.0, loss_weight=0.25) for s in samples])


def with_records(positions: list[int], indices: np.ndarray) -> dict[str, ExpertRecords]:
    return {"experts": ExpertRecords(positions=ids(positions), indices=indices)}


RECORDS = np.array([[[0, 1], [2, 3]], [[3, 0], [1, 2]]], np.uint8)


def test_a_prompt_with_two_answers_is_a_valid_row() -> None:
    row = two_answers()
    assert row.loss_positions.tolist() == [1, 2, 1, 4] and row.targets.tolist() == [3, 4, 5, 6]
    check_packed(row, vocab_size=7)
    check_packed(replace(row, **with_records([0, 5], RECORDS)), vocab_size=7, mixture=MIXTURE)
    check_packed(padding_row(), vocab_size=7)


@pytest.mark.parametrize(
    "fields",
    [
        {"segment_parents": ids([-1, 0, 2])},
        {"segment_lengths": ids([2, 2, 1])},
        {"segment_lengths": ids([2, 4, 0])},
        {"position_ids": ids([0, 1, 2, 3, 4, 5])},
        # 4 follows 3, but no child of the prompt begins with it.
        {"targets": ids([4, 4, 5, 6])},
        # The last token of the first answer has no successor, although 5 is next in the row.
        {"loss_positions": ids([1, 3, 1, 4]), "targets": ids([3, 5, 5, 6])},
        {"loss_positions": ids([1, 2, 1, 5])},
        {"token_ids": ids([1, 2, 3, 4, 5, 7])},
        {"targets": ids([3, 4, 5, 7])},
        {"advantages": np.zeros(3, np.float32)},
        {"loss_weights": np.array([1, 1, 1, np.nan], np.float32)},
        {"loss_weights": np.array([1, 1, 1, -0.5], np.float32)},
        {"trajectory_index": ids([0, 0, 1, 4])},
        with_records([0, 5], RECORDS[:, :1]),
        with_records([0, 5, 6], RECORDS),
        with_records([], RECORDS[:0]),
        with_records([5, 0], RECORDS),
        with_records([0, 6], RECORDS),
        with_records([0, 5], np.where(RECORDS == 3, 4, RECORDS)),
        with_records([0, 5], np.where(RECORDS == 3, 2, RECORDS)),
    ],
)
def test_a_broken_row_fails_the_check(fields: dict[str, np.ndarray]) -> None:
    with pytest.raises(AssertionError):
        check_packed(replace(two_answers(), **fields), vocab_size=7, mixture=MIXTURE)
