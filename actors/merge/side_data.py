"""What was recorded with each turn beside its ids, and how it lands on a sample's positions.

Bytes are joined: that costs a fraction of numpy's concatenation of many small arrays, and what lies
between two turns needs no array. Each function takes one sample: `pieces` are its turns' places,
(turn, start, end), ascending, and end where the sample ends. Called by `prefix`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.merge.sample import ExpertRecords
from actors.trajectory import ExpertIndices, LogProbs, Turn, VersionSpan

Pieces = Sequence[tuple[int, int, int]]
_UNRECORDED_VERSION = (-1).to_bytes(4, sys.byteorder, signed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideData:
    """Lists by turn.

    logprobs: [A] float32 a turn, nats. version_spans: contiguous, covering [0, A). rewards: the
    turns' own. token_rewards: [A] float32 or None a turn; None when no turn recorded any.
    expert_indices: [R, L, K] or None a turn; None when no turn recorded any.
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
        experts = [turn.expert_indices for turn in turns]
        has_rewards = any(each is not None for each in rewards)
        return cls(
            logprobs=[turn.logprobs for turn in turns],
            version_spans=[turn.version_spans for turn in turns],
            rewards=[turn.reward for turn in turns] if has_rewards else (),
            token_rewards=rewards if has_rewards else None,
            expert_indices=experts if any(each is not None for each in experts) else None,
        )


def join_logprobs(pieces: Pieces, side: SideData) -> LogProbs:
    """[T] float32, nats: 0 where nothing was sampled; what was recorded, finite or not."""
    joined: list[bytes | memoryview] = []
    at = 0
    for turn, start, end in pieces:
        joined += (bytes(4 * (start - at)), side.logprobs[turn].data)
        at = end
    return np.frombuffer(b"".join(joined), np.float32)


def join_mask(pieces: Pieces) -> NDArray[np.uint8]:
    """[T] uint8: 1 where a token was sampled."""
    joined: list[bytes] = []
    at = 0
    for _, start, end in pieces:
        joined += (bytes(start - at), b"\1" * (end - start))
        at = end
    return np.frombuffer(b"".join(joined), np.uint8)


def join_versions(pieces: Pieces, side: SideData) -> NDArray[np.int32]:
    """[T] int32: -1 where nothing was sampled."""
    joined: list[bytes] = []
    at = 0
    for turn, start, end in pieces:
        joined.append(_UNRECORDED_VERSION * (start - at))
        for span in side.version_spans[turn]:
            version = span.version.to_bytes(4, sys.byteorder, signed=True)
            joined.append(version * (span.end - span.start))
        at = end
    return np.frombuffer(b"".join(joined), np.int32)


def join_token_rewards(pieces: Pieces, side: SideData) -> NDArray[np.float32] | None:
    """[T] float32; None when no turn of the sample recorded any.

    A turn without a record has its reward on its last sampled token.
    Example: pieces (0, 2, 4), (1, 5, 7), rewards by token None and [.5, .5], reward of turn 0: 1
    -> [0, 0, 0, 1, 0, .5, .5]
    """
    recorded = side.token_rewards
    if recorded is None or all(recorded[turn] is None for turn, _, _ in pieces):
        return None
    found = np.zeros(pieces[-1][2], np.float32)
    for turn, start, end in pieces:
        of_turn = recorded[turn]
        if of_turn is not None:
            found[start:end] = of_turn
        elif end > start:
            found[end - 1] = side.rewards[turn]
    return found


def join_experts(pieces: Pieces, side: SideData) -> ExpertRecords | None:
    """The recorded routing of the sample's tokens; None when there is none.

    Example: pieces (0, 2, 4), (1, 5, 7), 1 record of turn 0, 2 of turn 1 -> positions [2, 5, 6]
    """
    if side.expert_indices is None:
        return None
    found = [(start, side.expert_indices[turn]) for turn, start, _ in pieces]
    recorded = [(start, each) for start, each in found if each is not None and len(each)]
    if not recorded:
        return None
    return ExpertRecords(
        positions=np.concatenate(
            [np.arange(start, start + len(each), dtype=np.int32) for start, each in recorded]
        ),
        indices=np.concatenate([each for _, each in recorded]),
    )
