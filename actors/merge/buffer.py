"""A trajectory's tokens as it is played: what turns share with earlier ones is kept once.

Two ways in. `extend` takes a turn as the difference from the sample that it goes on from, as a turn
loop knows it: nothing is compared. `add` takes a turn with its whole prompt, as a foreign producer
sends it, and finds the sample that it extends: the longest whose ids begin the prompt, the newest
among equals; a prompt that extends none opens a new sample. Both give the same samples, and every
turn is in exactly one. What else is recorded with a turn stays with the caller, by the turn's
number. Called by the turn loop, by `prefix` and by the trajectory queue's columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.lineage import Lineage, MismatchKind, SampleLineage
from actors.merge.mismatch import classify
from actors.merge.open_samples import OpenSamples, Place
from actors.trajectory import TokenIds, Turn

_IDS = np.dtype(np.int32)
_NO_IDS = np.empty(0, np.int32)


class TrajectoryBuffer:
    """The open samples of one trajectory.

    starts: of each turn, where its sampled tokens begin in its sample, that is the length of its
    prompt. counts: of each turn, how many it sampled. chains: the turns of each sample, in order.
    They are there to be read; `extend` and `add` write.

    Example: add([1, 2], [3]) -> sample 0; extend(0, [4], [5]) -> turn 1 of it, whose prompt is
    [1, 2, 3, 4]; add([1, 9], [7]) -> sample 1, which shares 1 token with sample 0.
    """

    __slots__ = ("_grow", "_open", "_origins", "chains", "counts", "starts")

    def __init__(self) -> None:
        self.chains: list[list[int]] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self._open = OpenSamples()
        self._grow = self._open.grow
        self._origins: list[tuple[int | None, int, MismatchKind | None]] = []

    @property
    def num_turns(self) -> int:
        return len(self.starts)

    def extend(self, sample: int, observed: TokenIds, sampled: TokenIds) -> None:
        """Append a turn to a sample: what its prompt has beyond the sample's ids, and the reply.

        Args: observed: [O] int32. sampled: [A] int32; each in one piece.
        Raises: ValueError when the ids are not int32; IndexError when there is no such sample.
        """
        if observed.dtype != _IDS or sampled.dtype != _IDS:
            raise ValueError(
                f"turn {self.num_turns}: ids of {observed.dtype} and {sampled.dtype}, expected "
                "int32; convert them where they come in"
            )
        self.chains[sample].append(len(self.starts))
        count = len(sampled)
        self.starts.append(self._grow(sample, observed, sampled) - count)
        self.counts.append(count)

    def add(self, prompt: TokenIds, sampled: TokenIds, *, kind: MismatchKind | None = None) -> int:
        """Append a turn by its whole prompt, to the sample that it extends or to a new one.

        Args: prompt: [P] int32. sampled: [A] int32. kind: why the prompt may extend none, where the
        producer knows; None: the ids tell, as well as they can.
        Returns: the sample's number. Raises: ValueError when the ids are not int32.
        """
        prompt, sampled = np.ascontiguousarray(prompt), np.ascontiguousarray(sampled)
        if prompt.dtype != _IDS:
            raise ValueError(
                f"turn {self.num_turns}: a prompt of {prompt.dtype}, expected int32; convert it "
                "where it comes in"
            )
        place = self._open.place(prompt)
        if place.extends is None:
            sample = self._branch(place, prompt, kind)
            self.extend(sample, prompt, sampled)
        else:
            sample = place.extends
            self.extend(sample, prompt[self._open.length(sample) :], sampled)
        return sample

    def length(self, sample: int) -> int:
        """How many tokens a sample has."""
        return self._open.length(sample)

    def token_ids(self, sample: int) -> TokenIds:
        """A sample's ids, [T] int32, as a view; while it lives, the sample cannot grow."""
        return self._open.view(sample)

    def lineage(self) -> Lineage:
        """Which turns each sample holds, and where it branched off."""
        return Lineage(
            samples=tuple(
                SampleLineage(turns=tuple(chain), parent=parent, shared=shared, kind=kind)
                for chain, (parent, shared, kind) in zip(self.chains, self._origins, strict=True)
            )
        )

    def prompts_and_replies(self) -> list[tuple[TokenIds, TokenIds]]:
        """The prompt and the sampled ids of each turn, as views: no token is copied."""
        found: list[tuple[TokenIds, TokenIds]] = [(_NO_IDS, _NO_IDS)] * self.num_turns
        for sample, chain in enumerate(self.chains):
            ids = self.token_ids(sample)
            for turn in chain:
                start = self.starts[turn]
                found[turn] = ids[:start], ids[start : start + self.counts[turn]]
        return found

    def _branch(self, place: Place, prompt: TokenIds, kind: MismatchKind | None) -> int:
        """Open a sample for a prompt that extends none."""
        parent, shared = (place.nearest, place.shared) if place.shared else (None, 0)
        if place.nearest is None:
            kind = None
        elif kind is None:
            kind = classify(
                self._open.view(place.nearest),
                prompt,
                regions=self._regions(place.nearest),
                position=place.shared,
            )
        self.chains.append([])
        self._origins.append((parent, shared, kind))
        return self._open.open()

    def _regions(self, sample: int) -> NDArray[np.int32]:
        """[T] int32: the first prompt is 0, each action odd, each observation even."""
        borders = [0]
        for turn in self.chains[sample]:
            borders += (self.starts[turn], self.starts[turn] + self.counts[turn])
        return np.repeat(np.arange(len(borders) - 1, dtype=np.int32), np.diff(borders))


def fill(turns: Sequence[Turn]) -> TrajectoryBuffer:
    """Add turns by their whole prompts. Raises: ValueError when ids are not int32."""
    buffer = TrajectoryBuffer()
    for turn in turns:
        buffer.add(turn.prompt_token_ids, turn.sampled_token_ids)
    return buffer
