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
from actors.types import TokenIds, Turn

_IDS = np.dtype(np.int32)


class TrajectoryBuffer:
    """The open samples of one trajectory. sample_of: the sample of each turn; to be read only.

    Example: add([1, 2], [3]) -> sample 0; extend(0, [4], [5]) -> turn 1 of it, whose prompt is
    [1, 2, 3, 4]; add([1, 9], [7]) -> sample 1, which shares 1 token with sample 0.
    """

    __slots__ = ("_open", "_origins", "_pieces", "sample_of")

    def __init__(self) -> None:
        self._open = OpenSamples()
        self._pieces = self._open.pieces
        self.sample_of = self._open.grown
        self._origins: list[tuple[int | None, int, MismatchKind | None]] = []

    @property
    def num_turns(self) -> int:
        return len(self.sample_of)

    @property
    def num_samples(self) -> int:
        return len(self._origins)

    def extend(self, sample: int, observed: TokenIds, sampled: TokenIds) -> None:
        """Append a turn to a sample: what its prompt has beyond the sample's ids, and the reply.

        The arrays are held, not copied, until the ids are asked for.

        Args: observed: [O] int32. sampled: [A] int32; each in one piece of memory.
        Raises: IndexError when there is no such sample.
        """
        pieces = self._pieces[sample]
        pieces.append(observed)
        pieces.append(sampled)
        self.sample_of.append(sample)

    def add(self, prompt: TokenIds, sampled: TokenIds, *, kind: MismatchKind | None = None) -> int:
        """Append a turn by its whole prompt, to the sample that it extends or to a new one.

        Args: prompt: [P] int32. sampled: [A] int32. kind: why the prompt may extend none, where the
        producer knows; None: the ids tell, as well as they can.
        Returns: the sample's number. Raises: ValueError when ids are not int32.
        """
        if prompt.dtype != _IDS or sampled.dtype != _IDS:
            raise ValueError(
                f"turn {self.num_turns}: ids of {prompt.dtype} and {sampled.dtype}, expected "
                "int32; convert them where they come in"
            )
        if not (prompt.data.contiguous and sampled.data.contiguous):
            prompt, sampled = np.ascontiguousarray(prompt), np.ascontiguousarray(sampled)
        # Only with one open sample is the first that fits the longest.
        if self.num_samples == 1 and self._open.grow_if_begun(0, prompt, sampled):
            return 0
        if not self.num_samples:
            self._origins.append((None, 0, None))
            return self._open.open(prompt, sampled)
        place = self._open.place(prompt)
        sample = place.extends
        if sample is None:
            self._origins.append(self._origin(place, prompt, kind))
            return self._open.open(prompt, sampled, at=place)
        self.extend(sample, prompt[self._open.length(sample) :], sampled)
        return sample

    def length(self, sample: int) -> int:
        """How many tokens a sample has."""
        return self._open.length(sample)

    def token_ids(self, sample: int) -> TokenIds:
        """A sample's ids, [T] int32, as a view; while it lives, the sample cannot grow."""
        return self._open.view(sample)

    def lengths(self, sample: int) -> list[int]:
        """Tokens of a sample's stretches in order: its first prompt, then sampled, observed, ..."""
        return self._open.lengths(sample)

    def chains(self) -> list[tuple[int, ...]]:
        """The turns of each sample, in order."""
        if self.num_samples == 1:
            return [tuple(range(self.num_turns))]
        chains: list[list[int]] = [[] for _ in self._origins]
        for turn, sample in enumerate(self.sample_of):
            chains[sample].append(turn)
        return [tuple(chain) for chain in chains]

    def lineage(self) -> Lineage:
        """Which turns each sample holds, and where it branched off."""
        return Lineage(
            samples=tuple(
                SampleLineage(turns=chain, parent=parent, shared=shared, kind=kind)
                for chain, (parent, shared, kind) in zip(self.chains(), self._origins, strict=True)
            )
        )

    def prompts_and_replies(self) -> list[tuple[TokenIds, TokenIds]]:
        """The prompt and the sampled ids of each turn, as views: no token is copied."""
        ids = [self.token_ids(sample) for sample in range(self.num_samples)]
        ends = [np.cumsum(self.lengths(sample)).tolist() for sample in range(self.num_samples)]
        taken = [0] * self.num_samples
        found: list[tuple[TokenIds, TokenIds]] = []
        for sample in self.sample_of:
            start, end = ends[sample][taken[sample] : taken[sample] + 2]
            taken[sample] += 2
            found.append((ids[sample][:start], ids[sample][start:end]))
        return found

    def _origin(
        self, place: Place, prompt: TokenIds, kind: MismatchKind | None
    ) -> tuple[int | None, int, MismatchKind | None]:
        """Parent, shared tokens and kind of a sample that a prompt opens."""
        if kind is None:
            kind = classify(
                self._open.view(place.nearest),
                prompt,
                regions=self._regions(place.nearest),
                position=place.shared,
            )
        return place.nearest if place.shared else None, place.shared, kind

    def _regions(self, sample: int) -> NDArray[np.int32]:
        """[T] int32: the first prompt is 0, each action odd, each observation even."""
        lengths = self.lengths(sample)
        return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def fill(turns: Sequence[Turn]) -> TrajectoryBuffer:
    """Add turns by their whole prompts. Raises: ValueError when ids are not int32."""
    buffer = TrajectoryBuffer()
    for turn in turns:
        buffer.add(turn.prompt_token_ids, turn.sampled_token_ids)
    return buffer
