"""Exact-prefix merge: the turns of a trajectory become samples, each sampled token in one of them.

A turn extends a sample when the sample's full ids are an exact prefix of its prompt ids; what lies
between is observation, mask 0. All samples stay open: the longest match wins, the newest among
equals, so that a sub-agent's turns or a compacted history branch off and the main line goes on.

Invariants: the mask counts the sampled tokens with a finite log-probability; mask 0 means
log-probability 0 and version -1; the order of turns is kept; merging the turns of one sample again
gives that sample; turns that each extend the last give one sample. Called by `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.merge.mismatch import Mismatch, describe_mismatch
from actors.trajectory import LogProbs, TokenIds, Trajectory, Turn

# Up to here copying the bytes is quicker than asking where they lie.
_SHORT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row of training data.

    token_ids: [T] int32. mask: [T] uint8, 1 = sampled and fit to be trained. logprobs: [T]
    float32, nats, of the behaviour policy, 0 at mask 0. versions: [T] int32, -1 at mask 0.
    prompt_length: tokens of the first turn's prompt. turns: indices in the trajectory.
    """

    trajectory_id: str
    turns: tuple[int, ...]
    prompt_length: int
    token_ids: TokenIds
    mask: NDArray[np.uint8]
    logprobs: LogProbs
    versions: NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The samples of one trajectory, in the order in which they began.

    mismatches: one for each turn but the first that extended no sample. num_unmerged_tokens: what
    one row a turn would take. num_masked_tokens: sampled, without a finite log-probability.
    """

    samples: tuple[Sample, ...]
    mismatches: tuple[Mismatch, ...]
    num_turns: int
    num_unmerged_tokens: int
    num_masked_tokens: int

    @property
    def num_merged_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def num_trained_tokens(self) -> int:
        return sum(sample.num_trained for sample in self.samples)


def merge_turns(trajectory: Trajectory) -> Merged:
    """Merge a trajectory's turns into samples.

    Args: trajectory: its turns' lengths agree (`find_misalignment` says whether).
    Example: prompts [10,20,30] and [10,20,30,40,50,60,70], actions [40,50] and [80,90] -> one
    sample: prompt [10,20,30], response [40,50,60,70,80,90], mask of the response [1,1,0,0,1,1].
    """
    turns = trajectory.turns
    chains: list[list[int]] = []
    mismatches: list[Mismatch] = []
    for index, turn in enumerate(turns):
        chain = _longest_match(chains, turns, turn.prompt_token_ids)
        if chain is not None:
            chain.append(index)
            continue
        if chains:
            open_samples = [[turns[i] for i in chain] for chain in chains]
            mismatches.append(describe_mismatch(open_samples, turn, index=index))
        chains.append([index])
    samples = tuple(_build(trajectory, chain) for chain in chains)
    num_trained = sum(sample.num_trained for sample in samples)
    return Merged(
        samples=samples,
        mismatches=tuple(mismatches),
        num_turns=len(turns),
        num_unmerged_tokens=sum(t.prompt_token_ids.shape[0] + t.num_sampled for t in turns),
        num_masked_tokens=trajectory.num_sampled - num_trained,
    )


def find_misalignment(trajectory: Trajectory) -> str | None:
    """Say what in a trajectory's turns does not fit together; None when all does.

    A turn needs a prompt, one log-probability for each sampled token, and version spans that
    cover the sampled tokens in order.
    """
    for index, turn in enumerate(trajectory.turns):
        num_sampled = turn.num_sampled
        if turn.prompt_token_ids.shape[0] == 0:
            return f"turn {index}: an empty prompt"
        if turn.logprobs.shape[0] != num_sampled:
            got = turn.logprobs.shape[0]
            return f"turn {index}: {got} log-probabilities for {num_sampled} sampled tokens"
        end = 0
        for span in turn.version_spans:
            if span.start != end or span.end < end:
                return f"turn {index}: a version span from {span.start}, expected {end}"
            end = span.end
        if end != num_sampled:
            return f"turn {index}: version spans cover {end} of {num_sampled} sampled tokens"
    return None


def _longest_match(
    chains: Sequence[list[int]], turns: Sequence[Turn], prompt: TokenIds
) -> list[int] | None:
    best, best_length = None, -1
    for chain in chains:
        last = turns[chain[-1]]
        length = last.prompt_token_ids.shape[0] + last.sampled_token_ids.shape[0]
        if length >= best_length and _extends(prompt, last):
            best, best_length = chain, length
    return best


def _extends(prompt: TokenIds, last: Turn) -> bool:
    """Whether prompt + sampled ids of `last`, that is its sample's full ids, begin `prompt`."""
    num_prompt = last.prompt_token_ids.shape[0]
    num_full = num_prompt + last.sampled_token_ids.shape[0]
    if prompt.shape[0] < num_full:
        return False
    return _is_equal(prompt[num_prompt:num_full], last.sampled_token_ids) and _is_equal(
        prompt[:num_prompt], last.prompt_token_ids
    )


def _is_equal(a: TokenIds, b: TokenIds) -> bool:
    """Whether two sequences of one length are equal; long views of one memory are not compared."""
    if a.shape[0] <= _SHORT_TOKENS:
        return a.tobytes() == b.tobytes()
    if a.ctypes.data == b.ctypes.data and a.strides == b.strides:
        return True
    return bool((a == b).all())


def _build(trajectory: Trajectory, chain: Sequence[int]) -> Sample:
    """A sample is its last turn's full ids; every turn marks its own tokens in them."""
    last = trajectory.turns[chain[-1]]
    token_ids = np.concatenate([last.prompt_token_ids, last.sampled_token_ids])
    mask = np.zeros(token_ids.shape, np.uint8)
    logprobs = np.zeros(token_ids.shape, np.float32)
    versions = np.full(token_ids.shape, -1, np.int32)
    for index in chain:
        turn = trajectory.turns[index]
        start = turn.prompt_token_ids.shape[0]
        end = start + turn.num_sampled
        mask[start:end] = 1
        logprobs[start:end] = turn.logprobs
        for span in turn.version_spans:
            versions[start + span.start : start + span.end] = span.version
    unusable = ~np.isfinite(logprobs)
    if unusable.any():
        mask[unusable] = 0
        logprobs[unusable] = 0
        versions[unusable] = -1
    return Sample(
        trajectory_id=trajectory.trajectory_id,
        turns=tuple(chain),
        prompt_length=trajectory.turns[chain[0]].prompt_token_ids.shape[0],
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
    )
