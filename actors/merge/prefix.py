"""Exact-prefix merge: the turns of a trajectory become samples, each sampled token in one of them.

A turn extends a sample when the sample's full ids are an exact prefix of its prompt ids; what lies
between is observation, mask 0. All samples stay open: the longest match wins, the newest among
equals, so that a sub-agent's turns or a compacted history branch off and the main line goes on.
Which turn extends which is known (`Trajectory.lineage`) or found here; the cost is linear in the
merged tokens where it is known, and in the turns' own tokens where each has to be compared.

Invariants: the mask counts the sampled tokens with a finite log-probability; mask 0 means
log-probability 0 and version -1; the order of turns is kept; merging the turns of one sample again
gives that sample; turns that each extend the last give one sample. Called by `step`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from actors.lineage import Mismatch, SampleLineage
from actors.merge.buffer import TrajectoryBuffer, fill
from actors.merge.misalignment import find_misalignment
from actors.merge.sample import ExpertRecords, Merged, Sample
from actors.merge.side_data import (
    UNRECORDED_VERSION,
    SideData,
    place_experts,
    place_floats,
    place_token_rewards,
    place_versions,
    zeros_between,
)
from actors.trajectory import LogProbs, TokenIds, Trajectory, Turn

__all__ = [
    "ExpertRecords",
    "Merged",
    "Sample",
    "SideData",
    "find_misalignment",
    "merge_buffer",
    "merge_turns",
]


# The turns of a sample, its ids, and the lengths of its stretches: prompt, sampled, observed, ...
_Part: TypeAlias = tuple[tuple[int, ...], TokenIds, list[int]]


def merge_turns(trajectory: Trajectory) -> Merged:
    """Merge a trajectory's turns into samples.

    Args: trajectory: with its lineage, nothing is compared; without it, each prompt is, once.
    Raises: ValueError, naming the trajectory and the remedy, when lengths do not fit together
    (`find_misalignment` says whether) or the lineage is of other turns.
    Example: prompts [10,20,30] and [10,20,30,40,50,60,70], actions [40,50] and [80,90] -> one
    sample: prompt [10,20,30], response [40,50,60,70,80,90], mask of the response [1,1,0,0,1,1].
    """
    turns, lineage = trajectory.turns, trajectory.lineage
    side = SideData.of(turns)
    try:
        if lineage is None:
            return merge_buffer(fill(turns), side, trajectory_id=trajectory.trajectory_id)
        if lineage.num_turns != len(turns):
            raise ValueError(
                f"a lineage of {lineage.num_turns} turns for {len(turns)}; leave it out where "
                "turns are changed"
            )
        parts = [_part(turns, of_sample) for of_sample in lineage.samples]
        return _merge(parts, side, lineage.mismatches, trajectory_id=trajectory.trajectory_id)
    except ValueError as error:
        reason = find_misalignment(trajectory) or str(error)
        raise ValueError(f"merge: trajectory {trajectory.trajectory_id}: {reason}") from error


def merge_buffer(buffer: TrajectoryBuffer, side: SideData, *, trajectory_id: str) -> Merged:
    """Merge what a buffer holds: the ids of its samples are taken as they lie, without a copy.

    Args: side: of the buffer's turns, in their order. While the samples live, the buffer takes no
    more turns. Raises: ValueError when the side data does not fit the turns.
    """
    if len(side.logprobs) != buffer.num_turns:
        raise ValueError(
            f"records of {len(side.logprobs)} turns for {buffer.num_turns}; give one for each"
        )
    parts = [
        (turns, buffer.token_ids(sample), buffer.lengths(sample))
        for sample, turns in enumerate(buffer.chains())
    ]
    mismatches = () if len(parts) == 1 else buffer.lineage().mismatches
    return _merge(parts, side, mismatches, trajectory_id=trajectory_id)


def _merge(
    parts: Sequence[_Part],
    side: SideData,
    mismatches: tuple[Mismatch, ...],
    *,
    trajectory_id: str,
) -> Merged:
    samples: list[Sample] = []
    num_sampled = num_trained = num_unmerged = 0
    for turns, token_ids, lengths in parts:
        own = side if len(parts) == 1 else side.pick(turns)
        sample = _build(turns, token_ids, lengths, own, trajectory_id=trajectory_id)
        samples.append(sample)
        num_trained += sample.num_trained
        num_sampled += sum(lengths[1::2])
        # A row for each turn would end where the turn ends.
        num_unmerged += sum(list(accumulate(lengths))[1::2])
    return Merged(
        samples=tuple(samples),
        mismatches=mismatches,
        num_turns=len(side.logprobs),
        num_unmerged_tokens=num_unmerged,
        num_masked_tokens=num_sampled - num_trained,
    )


def _build(
    turns: tuple[int, ...],
    token_ids: TokenIds,
    lengths: list[int],
    side: SideData,
    *,
    trajectory_id: str,
) -> Sample:
    """side: of the sample's turns."""
    counts = lengths[1::2]
    if list(map(len, side.logprobs)) != counts:
        raise ValueError(_misfit(turns, side.logprobs, counts))
    zeros = zeros_between(lengths)
    logprobs = place_floats(side.logprobs, zeros)
    versions = place_versions(side.version_spans, lengths)
    mask = (versions != UNRECORDED_VERSION).view(np.uint8)
    if not len(token_ids) == len(logprobs) == len(mask):
        raise ValueError(
            f"{len(token_ids)} ids, {len(logprobs)} log-probabilities and {len(mask)} versions in "
            "one sample; give log-probabilities as float32"
        )
    # A sum of squares is finite only if each of them is; where it is not, there may be doubt.
    if not math.isfinite(np.dot(logprobs, logprobs)):
        usable = np.isfinite(logprobs)
        mask = mask * usable
        logprobs = np.where(usable, logprobs, np.float32(0))
        versions = np.where(usable, versions, np.int32(UNRECORDED_VERSION))
    return Sample(
        trajectory_id=trajectory_id,
        turns=turns,
        prompt_length=lengths[0],
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        token_rewards=place_token_rewards(side, lengths, zeros),
        experts=place_experts(side, lengths),
    )


def _part(turns: Sequence[Turn], of_sample: SampleLineage) -> _Part:
    """A sample's part; its last turn has all of its ids."""
    lengths: list[int] = []
    end = 0
    for index in of_sample.turns:
        num_prompt, num_sampled = len(turns[index].prompt_token_ids), turns[index].num_sampled
        lengths += (num_prompt - end, num_sampled)
        end = num_prompt + num_sampled
    last = turns[of_sample.turns[-1]]
    if min(lengths) < 0:
        raise ValueError("a lineage by which a prompt is shorter than what it extends")
    ids = np.concatenate([last.prompt_token_ids, last.sampled_token_ids])
    return of_sample.turns, ids, lengths


def _misfit(turns: Sequence[int], logprobs: Sequence[LogProbs], counts: Sequence[int]) -> str:
    index = next(i for i, count in enumerate(counts) if len(logprobs[i]) != count)
    return (
        f"turn {turns[index]}: {len(logprobs[index])} log-probabilities for {counts[index]} "
        "sampled tokens; have the engine give one for each (logprobs=0)"
    )
