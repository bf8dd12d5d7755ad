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

from collections.abc import Sequence

import numpy as np

from actors.lineage import Lineage
from actors.merge.buffer import TrajectoryBuffer, fill
from actors.merge.misalignment import find_misalignment
from actors.merge.sample import ExpertRecords, Merged, Sample
from actors.merge.side_data import (
    Pieces,
    SideData,
    join_experts,
    join_logprobs,
    join_mask,
    join_token_rewards,
    join_versions,
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
        places = [(len(turn.prompt_token_ids), turn.num_sampled) for turn in turns]
        ids = [_full_ids(turns[sample.turns[-1]]) for sample in lineage.samples]
        return _merge(lineage, ids, places, side, trajectory_id=trajectory.trajectory_id)
    except ValueError as error:
        reason = find_misalignment(trajectory) or str(error)
        raise ValueError(f"merge: trajectory {trajectory.trajectory_id}: {reason}") from error


def merge_buffer(buffer: TrajectoryBuffer, side: SideData, *, trajectory_id: str) -> Merged:
    """Merge what a buffer holds: the ids of its samples are taken as they lie, without a copy.

    Args: side: of the buffer's turns, in their order. While the samples live, the buffer takes no
    more turns. Raises: ValueError when the side data does not fit the turns.
    """
    lineage = buffer.lineage()
    ids = [buffer.token_ids(sample) for sample in range(len(lineage.samples))]
    places = list(zip(buffer.starts, buffer.counts, strict=True))
    return _merge(lineage, ids, places, side, trajectory_id=trajectory_id)


def _merge(
    lineage: Lineage,
    ids: Sequence[TokenIds],
    places: Sequence[tuple[int, int]],
    side: SideData,
    *,
    trajectory_id: str,
) -> Merged:
    """places: of each turn, where its sampled tokens start, and how many they are."""
    counts = [count for _, count in places]
    recorded = list(map(len, side.logprobs))
    if recorded != counts:
        raise ValueError(_misfit(recorded, counts))
    samples = tuple(
        _build(
            of_sample.turns,
            token_ids,
            [(turn, places[turn][0], sum(places[turn])) for turn in of_sample.turns],
            side,
            trajectory_id=trajectory_id,
        )
        for of_sample, token_ids in zip(lineage.samples, ids, strict=True)
    )
    num_sampled = sum(counts)
    return Merged(
        samples=samples,
        mismatches=lineage.mismatches,
        num_turns=len(places),
        num_unmerged_tokens=sum(start for start, _ in places) + num_sampled,
        num_masked_tokens=num_sampled - sum(sample.num_trained for sample in samples),
    )


def _build(
    turns: tuple[int, ...],
    token_ids: TokenIds,
    pieces: Pieces,
    side: SideData,
    *,
    trajectory_id: str,
) -> Sample:
    mask = join_mask(pieces)
    logprobs = join_logprobs(pieces, side)
    versions = join_versions(pieces, side)
    if not len(token_ids) == len(mask) == len(logprobs) == len(versions):
        raise ValueError(
            f"turns {turns[0]} to {turns[-1]}: {len(token_ids)} ids, {len(logprobs)} "
            f"log-probabilities (observations included), {len(versions)} policy versions"
        )
    if not _is_all_finite(logprobs):
        usable = np.isfinite(logprobs)
        mask = mask * usable
        logprobs = np.where(usable, logprobs, np.float32(0))
        versions = np.where(usable, versions, np.int32(-1))
    return Sample(
        trajectory_id=trajectory_id,
        turns=turns,
        prompt_length=pieces[0][1],
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        token_rewards=join_token_rewards(pieces, side),
        experts=join_experts(pieces, side),
    )


def _is_all_finite(logprobs: LogProbs) -> bool:
    """False where in doubt: a sum of squares is finite only if each of them is."""
    return bool(np.isfinite(np.dot(logprobs, logprobs)))


def _full_ids(turn: Turn) -> TokenIds:
    return np.concatenate([turn.prompt_token_ids, turn.sampled_token_ids])


def _misfit(recorded: Sequence[int], counts: Sequence[int]) -> str:
    if len(recorded) != len(counts):
        return f"records of {len(recorded)} turns for {len(counts)} turns; give one for each"
    turn = next(i for i, pair in enumerate(zip(recorded, counts, strict=True)) if len({*pair}) > 1)
    return (
        f"turn {turn}: {recorded[turn]} log-probabilities for {counts[turn]} sampled tokens; have "
        "the engine give one for each (logprobs=0)"
    )
