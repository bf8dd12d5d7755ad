"""Pack the rows that a reference or a critic scores, and read the scores.

These rows are separate from the training rows, because the trained samples are not known yet. Every
sample whose trajectory is in its group's baseline is in exactly one row. Each rank gets the same
number of rows. The layout depends only on the groups and the settings, so `read_scores` computes it
again. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from actors.batch import Float32s, RankShard, RowScores
from actors.merge.groups import GroupMembers
from actors.merge.packing import WeightedSample, deal_rows, pack_row, unrouted
from actors.merge.settings import StepSettings
from actors.types import Sample


def plan_scores(
    groups: Sequence[GroupMembers], settings: StepSettings, *, step: int, trainer_version: int
) -> tuple[RankShard, ...]:
    """Pack the samples of all trajectories that are in their group's baseline.

    Returns: for each rank, the shard to score.
    """
    weighted, dealt = score_rows(groups, settings)
    return tuple(
        RankShard(
            step=step,
            trainer_version=trainer_version,
            minibatches=(
                # Share no prefixes, because each sample needs a value for every token of its own.
                tuple(pack_row([weighted[i] for i in row], share_prefixes=False) for row in rows),
            ),
        )
        for rows in dealt
    )


def score_rows(
    groups: Sequence[GroupMembers], settings: StepSettings
) -> tuple[list[WeightedSample], list[list[list[int]]]]:
    """Return the samples to be scored, and their division into rows for the ranks.

    rows[rank][row] lists the indices of the row's samples; an empty list is a padding row.
    Example: samples a, b, c on two ranks: [[[1]], [[2, 0]]] -> rank 0: b; rank 1: c and a
    """
    weighted = [
        unrouted(sample, temperature=settings.temperature_of(member.trajectory))
        for group in groups
        for member in group
        if member.baseline_return is not None
        for sample in member.samples
    ]
    dealt = deal_rows(
        [each.sample.num_tokens for each in weighted],
        num_ranks=settings.trainer.num_ranks,
        budget=settings.trainer.tokens_per_micro_batch,
    )
    return weighted, dealt


def read_scores(
    groups: Sequence[GroupMembers], settings: StepSettings, answers: Sequence[Sequence[RowScores]]
) -> tuple[GroupMembers, ...]:
    """Return the members with the scores of their samples.

    Args: groups, settings: as for `plan_scores`. answers: for each rank, the scores of each row of
    its shard; the scores of padding rows are ignored.
    Raises: ValueError, naming a trajectory of the row, if a row has too few or too many scores, or
    a score that is not finite.
    """
    weighted, dealt = score_rows(groups, settings)
    samples = [each.sample for each in weighted]
    scores = [RowScores()] * len(samples)
    for rows, of_rank in zip(dealt, answers, strict=True):
        for row, answer in zip(rows, of_rank, strict=True):
            for index, own in zip(row, _split(answer, [samples[i] for i in row]), strict=True):
                scores[index] = own
    rest = iter(scores)
    return tuple(
        tuple(
            member
            if member.baseline_return is None
            else replace(member, scores=tuple(next(rest) for _ in member.samples))
            for member in group
        )
        for group in groups
    )


def _split(answer: RowScores, samples: Sequence[Sample]) -> list[RowScores]:
    if not samples:
        return []
    name = samples[0].trajectory_id
    trained = [sample.num_trained for sample in samples]
    tokens = [sample.num_tokens for sample in samples]
    logprobs = _parts(
        answer.reference_logprobs, trained, f"log-probabilities for the row of trajectory {name}"
    )
    values = _parts(answer.values, tokens, f"values for the row of trajectory {name}")
    return [
        RowScores(reference_logprobs=own_logprobs, values=own_values)
        for own_logprobs, own_values in zip(logprobs, values, strict=True)
    ]


def _parts(
    scores: Float32s | None, lengths: Sequence[int], subject: str
) -> Sequence[Float32s | None]:
    if scores is None:
        return [None] * len(lengths)
    if scores.shape != (sum(lengths),):
        raise ValueError(
            f"scoring: got {subject} of shape {scores.shape}, expected ({sum(lengths)},); score "
            "the rows in the order of their shard"
        )
    if not np.isfinite(scores).all():
        raise ValueError(
            f"scoring: got {subject} that are not finite, expected finite numbers; look at the "
            "last updates of the model that computed them"
        )
    return np.split(scores, np.cumsum(lengths)[:-1])
