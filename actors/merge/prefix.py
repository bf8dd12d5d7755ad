"""Exact-prefix merge: the turns of a trajectory become samples, each sampled token in one of them.

A turn extends a sample when the sample's full ids are an exact prefix of its prompt ids; what lies
between is observation, mask 0. All samples stay open: the longest match wins, the newest among
equals, so that a sub-agent's turns or a compacted history branch off and the main line goes on.
Which turn extends which is known (`Trajectory.lineage`) or found here; the cost is linear in the
merged tokens where it is known, and in the turns' own tokens where each has to be compared
(`open_samples` has the exception).

Invariants: the mask counts the sampled tokens with a finite log-probability; mask 0 means
log-probability 0 and version -1; the order of turns is kept; merging the turns of one sample again
gives that sample; turns that each extend the last give one sample. Called by `step`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import numpy as np
from numpy.typing import NDArray

from actors.expert_records import ExpertRecords
from actors.lineage import Mismatch
from actors.merge.buffer import TrajectoryBuffer, fill
from actors.merge.misalignment import find_misalignment, lineage_fault
from actors.merge.sample import Merged, Sample
from actors.merge.side_data import (
    UNRECORDED_VERSION,
    SideData,
    place_experts,
    place_floats,
    place_token_rewards,
    place_versions,
    zeros_between,
)
from actors.types import LogProbs, TokenIds, Trajectory, Turn

__all__ = [
    "ExpertRecords",
    "Merged",
    "Played",
    "Sample",
    "SideData",
    "find_misalignment",
    "merge_all",
    "merge_played",
    "merge_turns",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A trajectory whose turns were appended as they were played.

    side: of the buffer's turns, in their order. Once merged, the buffer takes no more turns.
    """

    trajectory_id: str
    buffer: TrajectoryBuffer
    side: SideData


@dataclass(slots=True)
class _Draft:
    """A trajectory before its columns are made. chains, ids, lengths: of each sample its turns, its
    ids, and the tokens of its stretches: prompt, sampled, observed, ... side: sample by sample.
    """

    trajectory_id: str
    mismatches: tuple[Mismatch, ...]
    chains: list[tuple[int, ...]]
    ids: list[TokenIds]
    lengths: list[list[int]]
    side: SideData


def merge_turns(trajectory: Trajectory) -> Merged:
    """Merge a trajectory's turns into samples: `merge_all` of one.

    Example: prompts [10,20,30] and [10,20,30,40,50,60,70], actions [40,50] and [80,90] -> one
    sample: prompt [10,20,30], response [40,50,60,70,80,90], mask of the response [1,1,0,0,1,1].
    """
    return merge_all([trajectory])[0]


def merge_all(trajectories: Sequence[Trajectory]) -> list[Merged]:
    """Merge each trajectory's turns into samples, each trajectory by itself.

    The columns of all samples are made at once, and a sample's are views of them: for short
    trajectories that is what costs.

    Args: trajectories: with their lineage, nothing is compared; without it, each prompt is, once.
    Raises: ValueError, naming the trajectory and the remedy, when lengths do not fit together
    (`find_misalignment` says whether) or a lineage is of other turns.
    """
    drafts: list[_Draft] = []
    for trajectory in trajectories:
        try:
            drafts.append(_draft(trajectory))
        except ValueError as error:
            reason = find_misalignment(trajectory) or str(error)
            raise ValueError(f"merge: trajectory {trajectory.trajectory_id}: {reason}") from error
    try:
        return _finish(drafts)
    except ValueError as error:
        for trajectory in trajectories:
            if (fault := find_misalignment(trajectory)) is not None:
                name = trajectory.trajectory_id
                raise ValueError(f"merge: trajectory {name}: {fault}") from error
        raise


def merge_played(played: Sequence[Played]) -> list[Merged]:
    """Merge what buffers hold: the ids of their samples are taken as they lie, without a copy.

    Raises: ValueError, naming the trajectory, when the side data does not fit the turns.
    """
    drafts: list[_Draft] = []
    for each in played:
        try:
            drafts.append(_draft_of(each.buffer, each.side, trajectory_id=each.trajectory_id))
        except ValueError as error:
            raise ValueError(f"merge: trajectory {each.trajectory_id}: {error}") from error
    return _finish(drafts)


def _draft(trajectory: Trajectory) -> _Draft:
    turns, lineage = trajectory.turns, trajectory.lineage
    side = SideData.of(turns)
    if lineage is None:
        return _draft_of(fill(turns), side, trajectory_id=trajectory.trajectory_id)
    fault = lineage_fault(lineage, num_turns=len(turns))
    if fault is not None:
        raise ValueError(fault)
    chains = [sample.turns for sample in lineage.samples]
    return _Draft(
        trajectory.trajectory_id,
        lineage.mismatches,
        chains,
        [_whole_ids(turns[of_sample[-1]]) for of_sample in chains],
        [_lengths(turns, of_sample) for of_sample in chains],
        side if len(chains) == 1 else side.pick([*chain.from_iterable(chains)]),
    )


def _draft_of(buffer: TrajectoryBuffer, side: SideData, *, trajectory_id: str) -> _Draft:
    chains = buffer.chains()
    is_one = len(chains) == 1
    if len(side.logprobs) != buffer.num_turns:
        raise ValueError(
            f"records of {len(side.logprobs)} turns for {buffer.num_turns}; give one for each"
        )
    return _Draft(
        trajectory_id,
        () if is_one else buffer.lineage().mismatches,
        chains,
        [buffer.token_ids(sample) for sample in range(len(chains))],
        [buffer.lengths(sample) for sample in range(len(chains))],
        side if is_one else side.pick([*chain.from_iterable(chains)]),
    )


@dataclass(frozen=True, slots=True)
class _Columns:
    """All samples of all drafts, one behind the other; see `Sample` for the fields."""

    mask: NDArray[np.uint8]
    logprobs: LogProbs
    versions: NDArray[np.int32]
    token_rewards: NDArray[np.float32] | None
    # Whether a sampled token is not trained, for want of a log-probability.
    has_masked: bool


def _columns(drafts: Sequence[_Draft]) -> _Columns:
    of_samples = [*chain.from_iterable([draft.lengths for draft in drafts])]
    lengths = [*chain.from_iterable(of_samples)]
    side = SideData.joined([draft.side for draft in drafts])
    if not all([of_sample[0] for of_sample in of_samples]):
        raise ValueError("a turn with an empty prompt; send the ids that the engine was given")
    if list(map(len, side.logprobs)) != lengths[1::2]:
        raise ValueError(_unequal(drafts, side, lengths[1::2]))
    zeros = zeros_between(lengths)
    logprobs = place_floats(side.logprobs, zeros)
    versions = place_versions(side.version_spans, lengths)
    if logprobs.shape != versions.shape:
        raise ValueError(
            "log-probabilities that are not all float32; convert them where they come in"
        )
    mask = (versions != UNRECORDED_VERSION).view(np.uint8)
    # A sum of squares is finite only if each of them is; where it is not, there may be doubt.
    has_masked = not math.isfinite(np.dot(logprobs, logprobs))
    if has_masked:
        usable = np.isfinite(logprobs)
        mask = mask * usable
        logprobs = np.where(usable, logprobs, np.float32(0))
        versions = np.where(usable, versions, np.int32(UNRECORDED_VERSION))
    rewards = place_token_rewards(side, lengths, zeros)
    return _Columns(mask, logprobs, versions, rewards, has_masked)


def _unequal(drafts: Sequence[_Draft], side: SideData, counts: Sequence[int]) -> str:
    """Which turn has not as many log-probabilities as sampled tokens."""
    turns = chain.from_iterable([of_sample for draft in drafts for of_sample in draft.chains])
    turn, recorded, count = next(
        (turn, len(logprobs), count)
        for turn, logprobs, count in zip(turns, side.logprobs, counts, strict=True)
        if len(logprobs) != count
    )
    return (
        f"turn {turn}: {recorded} log-probabilities for {count} sampled tokens; have the engine "
        "give one for each (logprobs=0)"
    )


def _finish(drafts: Sequence[_Draft]) -> list[Merged]:
    try:
        return _cut(drafts, _columns(drafts))
    except ValueError:
        for draft in drafts:
            try:
                _columns([draft])
            except ValueError as error:
                raise ValueError(f"merge: trajectory {draft.trajectory_id}: {error}") from error
        raise


def _cut(drafts: Sequence[_Draft], columns: _Columns) -> list[Merged]:
    merged: list[Merged] = []
    start = 0
    for draft in drafts:
        samples: list[Sample] = []
        num_turns = num_unmerged = num_masked = 0
        for turns, ids, lengths in zip(draft.chains, draft.ids, draft.lengths, strict=True):
            end = start + len(ids)
            experts = _experts(draft.side, num_turns, lengths)
            sample = _sample(draft, turns, ids, lengths[0], columns, slice(start, end), experts)
            samples.append(sample)
            num_turns += len(turns)
            # A row for each turn would end where the turn ends.
            num_unmerged += sum(islice(accumulate(lengths), 1, None, 2))
            if columns.has_masked:
                num_masked += sum(lengths[1::2]) - sample.num_trained
            start = end
        merged.append(
            Merged(
                samples=tuple(samples),
                mismatches=draft.mismatches,
                num_turns=num_turns,
                num_unmerged_tokens=num_unmerged,
                num_masked_tokens=num_masked,
            )
        )
    return merged


def _sample(
    draft: _Draft,
    turns: tuple[int, ...],
    ids: TokenIds,
    prompt_length: int,
    columns: _Columns,
    place: slice,
    experts: ExpertRecords | None,
) -> Sample:
    rewards = columns.token_rewards
    has_rewards = draft.side.token_rewards is not None
    return Sample(
        trajectory_id=draft.trajectory_id,
        turns=turns,
        prompt_length=prompt_length,
        token_ids=ids,
        mask=columns.mask[place],
        logprobs=columns.logprobs[place],
        versions=columns.versions[place],
        token_rewards=rewards[place] if rewards is not None and has_rewards else None,
        experts=experts,
    )


def _experts(side: SideData, first: int, lengths: Sequence[int]) -> ExpertRecords | None:
    """Of the sample whose turns stand in `side` from `first` on."""
    if side.expert_indices is None:
        return None
    return place_experts(side.expert_indices[first : first + len(lengths) // 2], lengths)


def _whole_ids(last: Turn) -> TokenIds:
    """A sample's ids: its last turn has them all."""
    return np.concatenate([last.prompt_token_ids, last.sampled_token_ids])


def _lengths(turns: Sequence[Turn], of_sample: Sequence[int]) -> list[int]:
    """The tokens of a sample's stretches: prompt, sampled, observed, sampled, ..."""
    lengths: list[int] = []
    end = 0
    for index in of_sample:
        num_prompt, num_sampled = len(turns[index].prompt_token_ids), turns[index].num_sampled
        lengths += (num_prompt - end, num_sampled)
        end = num_prompt + num_sampled
    if min(lengths) < 0:
        raise ValueError("a lineage by which a prompt is shorter than what it extends")
    return lengths
