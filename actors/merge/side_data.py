"""What was recorded with each turn beside its ids, and how it lands on a sample's positions.

A sample is stretches in turn: the first prompt, sampled, observed, sampled, ..., sampled; `lengths`
are their tokens, [2 K] for K turns, of one sample or of many, one behind the other. What turns
recorded is joined as bytes, with zeros between: a join costs a fraction of numpy's concatenation of
many small arrays. Called by `prefix`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_not
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.expert_records import ExpertIndices, ExpertRecords
from actors.types import LogProbs, Turn, VersionSpan

UNRECORDED_VERSION = -1


@dataclass(slots=True, kw_only=True)
class SideData:
    """Lists by turn, of a trajectory or, picked, of a sample.

    logprobs: [A] float32 a turn, nats. version_spans: contiguous, covering [0, A). rewards: the
    turns' own; needed with token_rewards only. token_rewards: [A] float32 or None a turn; None when
    no turn recorded any. expert_indices: [R, L, K] or None a turn; None when no turn recorded any.
    """

    logprobs: Sequence[LogProbs]
    version_spans: Sequence[Sequence[VersionSpan]]
    rewards: Sequence[float] = ()
    token_rewards: Sequence[NDArray[np.float32] | None] | None = None
    expert_indices: Sequence[ExpertIndices | None] | None = None

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> SideData:
        """The side data of turns."""
        rewards = [turn.token_rewards for turn in turns]
        has_rewards = _has_any(rewards)
        routed = [turn for turn in turns if turn.expert_indices is not None]
        return cls(
            logprobs=[turn.logprobs for turn in turns],
            version_spans=[turn.version_spans for turn in turns],
            rewards=[turn.reward for turn in turns] if has_rewards else (),
            token_rewards=rewards if has_rewards else None,
            expert_indices=[turn.expert_indices for turn in turns] if routed else None,
        )

    def pick(self, turns: Sequence[int]) -> SideData:
        """The side data of some turns, in their order."""
        rewards, experts = self.token_rewards, self.expert_indices
        return SideData(
            logprobs=[self.logprobs[turn] for turn in turns],
            version_spans=[self.version_spans[turn] for turn in turns],
            rewards=[self.rewards[turn] for turn in turns] if self.rewards else (),
            token_rewards=None if rewards is None else [rewards[turn] for turn in turns],
            expert_indices=None if experts is None else [experts[turn] for turn in turns],
        )

    @classmethod
    def joined(cls, sides: Sequence[SideData]) -> SideData:
        """One behind the other; without the expert indices. Where one recorded no token rewards,
        each of its turns did not.
        """
        has_rewards = _has_any([side.token_rewards for side in sides])
        rewards: list[NDArray[np.float32] | None] = []
        returns: list[float] = []
        for side in sides if has_rewards else ():
            missing = [None] * len(side.logprobs)
            rewards += missing if side.token_rewards is None else side.token_rewards
            returns += side.rewards or [0.0] * len(side.logprobs)
        return cls(
            logprobs=list(chain.from_iterable([side.logprobs for side in sides])),
            version_spans=list(chain.from_iterable([side.version_spans for side in sides])),
            rewards=returns,
            token_rewards=rewards if has_rewards else None,
        )


def zeros_between(lengths: Sequence[int]) -> list[memoryview]:
    """[K] of bytes: four zero bytes for each token of the prompt and of each observation."""
    gaps = lengths[::2]
    # Views of the longest cost less than memory of their own for each.
    zeros = memoryview(bytes(4 * max(gaps, default=0)))
    return [zeros[: 4 * length] for length in gaps]


def place_floats(recorded: Sequence[NDArray[np.float32]], zeros: Sequence[memoryview]) -> LogProbs:
    """[T] float32: what each turn recorded for its sampled tokens, 0 elsewhere.

    Example: recorded [-1, -2] and [-3], zeros for 3 and 2 tokens -> [0, 0, 0, -1, -2, 0, 0, -3]
    """
    pieces: list[Any] = [None] * (2 * len(zeros))
    pieces[::2] = zeros
    pieces[1::2] = recorded
    return np.frombuffer(b"".join(pieces), np.float32)


def place_versions(
    spans: Sequence[Sequence[VersionSpan]], lengths: Sequence[int]
) -> NDArray[np.int32]:
    """[T] int32: the policy version that sampled each token, -1 where none did.

    Raises: ValueError for spans that do not cover a turn's sampled tokens, and for a version that
    is none.
    """
    whole = _whole_spans(spans, lengths[1::2])
    if whole is not None:
        return _repeated(whole, lengths)
    sizes: list[int] = []
    flat: list[VersionSpan] = []
    for of_turn, gap, count in zip(spans, lengths[::2], lengths[1::2], strict=True):
        ends = [0, *[span.end for span in of_turn]]
        starts = [span.start for span in of_turn]
        if starts != ends[:-1] or ends[-1] != count or ends != sorted(ends):
            raise ValueError(
                f"version spans that do not cover {count} sampled tokens in order; record the "
                "policy version of each"
            )
        first, *others = of_turn or [VersionSpan(version=0, start=0, end=0)]
        flat.append(first)
        sizes += (gap, first.end)
        for span in others:
            flat.append(span)
            sizes += (0, span.end - span.start)
    return _repeated(flat, sizes)


def _whole_spans(
    spans: Sequence[Sequence[VersionSpan]], counts: Sequence[int]
) -> list[VersionSpan] | None:
    """The one span of each turn, which is how it mostly is; None where it is otherwise."""
    try:
        whole = [span for (span,) in spans]
    except ValueError:
        return None
    is_whole = [span.end for span in whole] == counts and not any([span.start for span in whole])
    return whole if is_whole else None


def _repeated(spans: Sequence[VersionSpan], lengths: Sequence[int]) -> NDArray[np.int32]:
    """[T] int32: the version of each span, and -1 over the gap before it.

    Many small integers come out of a list quickest through an `array` of an unsigned type, which
    also refuses the negative ones.
    Args: lengths: [2 S] of gap and span in turn.
    """
    try:
        known = np.frombuffer(array("I", [span.version for span in spans]), np.int32)
    except OverflowError:
        known = np.array([-1], np.int32)
    if known.size and known.min() < 0:
        found = [span.version for span in spans]
        raise ValueError(
            f"policy versions from {min(found)} to {max(found)}, expected 0 to 2^31 - 1; "
            "record the version that sampled each token"
        )
    versions = np.full(len(lengths), UNRECORDED_VERSION, np.int32)
    versions[1::2] = known
    return np.repeat(versions, np.frombuffer(array("Q", lengths), np.int64))


def place_token_rewards(
    side: SideData, lengths: Sequence[int], zeros: Sequence[memoryview]
) -> NDArray[np.float32] | None:
    """[T] float32; None when no turn recorded any.

    A turn without a record has its reward on its last sampled token.
    Example: lengths [2, 2, 1, 2], rewards by token None and [.5, .5], reward of turn 0: 1
    -> [0, 0, 0, 1, 0, .5, .5]
    """
    if side.token_rewards is None:
        return None
    recorded = [each for each in side.token_rewards if each is not None]
    if not recorded:
        return None
    if list(map(len, recorded)) == lengths[1::2]:
        return place_floats(recorded, zeros)
    filled: list[NDArray[np.float32]] = []
    columns = zip(side.token_rewards, side.rewards, lengths[1::2], strict=True)
    for of_turn, reward, count in columns:
        if of_turn is None:
            of_turn = np.zeros(count, np.float32)
            of_turn[-1:] = reward
        if len(of_turn) != count:
            raise ValueError(f"{len(of_turn)} token rewards for {count} sampled tokens")
        filled.append(of_turn)
    return place_floats(filled, zeros)


def place_experts(
    recorded: Sequence[ExpertIndices | None], lengths: Sequence[int]
) -> ExpertRecords | None:
    """The recorded routing of one sample's tokens, each at its own place; None when there is none.

    Example: lengths [2, 2, 1, 2], one record of turn 0 and two of turn 1 -> positions [2, 5, 6]
    """
    starts = np.cumsum(lengths)[::2].tolist()
    places = [
        (np.arange(start, start + len(each), dtype=np.int32), each)
        for start, each in zip(starts, recorded, strict=True)
        if each is not None and len(each)
    ]
    if not places:
        return None
    return ExpertRecords(
        positions=np.concatenate([positions for positions, _ in places]),
        indices=np.concatenate([each for _, each in places]),
    )


def _has_any(recorded: Sequence[object]) -> bool:
    return any(map(is_not, recorded, repeat(None)))
