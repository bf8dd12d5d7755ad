"""Rows for a model to score before the rewards are shaped, and its answers back to the samples.

Asked for only when the settings need a reference's log-probabilities or a critic's values. Rows are
packed apart from the training rows, because what is trained is not known yet; every sample whose
trajectory is in its group's baseline is in exactly one row, and each rank gets equally many rows.
Pure; called by the merge actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.batch import Float32s, Minibatch, RankShard
from actors.merge.candidates import SampleScores, Scores
from actors.merge.groups import ClassifiedGroup
from actors.merge.packing import WeightedSample, filler, pack_row
from actors.merge.rows import deal_rows
from actors.merge.settings import StepSettings
from actors.row_scores import RowScores
from actors.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePlan:
    """shards: what each rank scores. samples: [ranks][rows], the samples of each row in order."""

    shards: tuple[RankShard, ...]
    samples: tuple[tuple[tuple[Sample, ...], ...], ...]


def plan_scores(
    groups: Sequence[ClassifiedGroup], settings: StepSettings, *, step: int, trainer_version: int
) -> ScorePlan:
    """Lay out all samples that a baseline needs scores of, over ranks and rows."""
    samples = [
        sample
        for group in groups
        for member in group.members
        if member.verdict.baseline_return is not None
        for sample in member.trajectory.samples
    ]
    dealt = deal_rows(
        [sample.num_tokens for sample in samples],
        num_ranks=settings.num_ranks,
        budget=settings.tokens_per_micro_batch,
    )
    rows = tuple(tuple(tuple(samples[i] for i in row) for row in of_rank) for of_rank in dealt)
    return ScorePlan(
        shards=tuple(
            RankShard(
                step=step, trainer_version=trainer_version, minibatches=(_minibatch(of_rank),)
            )
            for of_rank in rows
        ),
        samples=rows,
    )


def read_scores(plan: ScorePlan, answers: Sequence[Sequence[RowScores]]) -> Scores:
    """Give each sample its part of the rows' scores.

    Args: answers: of each rank, for each row of its shard, fillers' answers ignored.
    Returns: by trajectory id, the scores of its samples in the order in which these began.
    Raises: ValueError, naming a trajectory of the row, when an answer does not fit its row.
    """
    found: dict[str, dict[int, SampleScores]] = {}
    for rows, of_rank in zip(plan.samples, answers, strict=True):
        for samples, answer in zip(rows, of_rank, strict=True):
            token_at = target_at = 0
            if samples:
                _check_answer(samples, answer)
            for sample in samples:
                scores = SampleScores(
                    reference_logprobs=_spread(answer.reference_logprobs, sample, target_at),
                    values=_part(answer.values, token_at, sample.num_tokens),
                )
                # A sample's first turn tells the samples of a trajectory apart, and their order.
                found.setdefault(sample.trajectory_id, {})[sample.turns[0].index] = scores
                token_at += sample.num_tokens
                target_at += sample.num_trained
    return {name: tuple(by[turn] for turn in sorted(by)) for name, by in found.items()}


def _minibatch(rows: Sequence[Sequence[Sample]]) -> Minibatch:
    packed = [
        pack_row(
            # Reference and critic route by themselves.
            [
                WeightedSample(sample=sample.without_experts(), advantage=0.0, loss_weight=0.0)
                for sample in row
            ],
            # Values are of every token: each sample has its own.
            share_prefixes=False,
        )
        if row
        else filler()
        for row in rows
    ]
    return Minibatch(micro_batches=tuple(packed))


def _check_answer(samples: Sequence[Sample], answer: RowScores) -> None:
    expected = {
        "reference_logprobs": sum(sample.num_trained for sample in samples),
        "values": sum(sample.num_tokens for sample in samples),
    }
    for name, number in expected.items():
        scores: Float32s | None = getattr(answer, name)
        if scores is not None and scores.shape != (number,):
            raise ValueError(
                f"scoring: the row of trajectory {samples[0].trajectory_id} has {name} of shape "
                f"{scores.shape}, expected ({number},); score the rows in the order of their shard"
            )


def _part(scores: Float32s | None, start: int, length: int) -> Float32s | None:
    return None if scores is None else scores[start : start + length]


def _spread(scores: Float32s | None, sample: Sample, start: int) -> Float32s | None:
    """From the trained tokens alone to [T], 0 elsewhere."""
    if scores is None:
        return None
    spread = np.zeros(sample.num_tokens, np.float32)
    spread[sample.mask == 1] = scores[start : start + sample.num_trained]
    return spread
