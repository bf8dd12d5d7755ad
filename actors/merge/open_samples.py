"""The open samples of one trajectory as a tree of their tokens: where does a prompt belong?

A prompt is walked down the tree once, however many samples are open, so that each of its tokens is
compared about once; a comparison is one `memcmp`, and looks for the place only where it fails. The
tree stores no token: a node is a stretch [start, end) of the sample that first went there. It is
brought up to date when a prompt is placed, so that samples that only grow cost nothing.
Called by `buffer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.trajectory import TokenIds

ID_BYTES = 4
# Where two stretches differ, the place is looked for in blocks of this many tokens.
_BLOCK_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a prompt belongs. extends: the sample whose ids begin it, None: none does. nearest: the
    newest of the samples that share most with it. shared: how many ids they share.
    """

    extends: int | None
    nearest: int
    shared: int


class _Node:
    """Tokens [start, end) of sample `owner`. ends: samples that end here. newest: that came by."""

    __slots__ = ("children", "end", "ends", "newest", "owner", "start")

    def __init__(self, owner: int, start: int, end: int) -> None:
        self.owner = owner
        self.start = start
        self.end = end
        self.newest = owner
        self.children: dict[int, _Node] = {}
        self.ends: list[int] = []


class OpenSamples:
    """The ids of each open sample, appended to in amortised constant time a token.

    pieces: of each sample, the stretches of int32 ids that it was grown by, each in one piece of
    memory: append to it. They are joined to the sample's bytes when those are asked for: a join of
    many costs a fraction of copying each into its place.
    """

    __slots__ = ("_at", "_grown", "_ids", "_lengths", "_root", "_walked", "pieces")

    def __init__(self) -> None:
        self._ids: list[bytearray] = []
        self.pieces: list[list[Any]] = []
        self._lengths: list[list[int]] = []
        self._root = _Node(-1, 0, 0)
        self._at: list[_Node] = []
        self._walked: list[int] = []
        self._grown: set[int] = set()

    @property
    def num_samples(self) -> int:
        return len(self._ids)

    def open(self) -> int:
        """Begin an empty sample; its number."""
        number = len(self._ids)
        self._ids.append(bytearray())
        self.pieces.append([])
        self._lengths.append([])
        self._at.append(self._root)
        self._walked.append(0)
        self._root.ends.append(number)
        self._root.newest = number
        return number

    def lengths(self, sample: int) -> list[int]:
        """Tokens of each stretch, in order."""
        self._joined(sample)
        return self._lengths[sample]

    def length(self, sample: int) -> int:
        """Tokens of a sample."""
        return len(self._joined(sample)) // ID_BYTES

    def view(self, sample: int) -> TokenIds:
        """A sample's ids, [T] int32; while such a view lives, the sample cannot grow."""
        return np.frombuffer(self._joined(sample), np.int32)

    def grow_if_begun(self, sample: int, prompt: TokenIds, sampled: TokenIds) -> bool:
        """Append what a prompt has beyond the sample's ids, and the reply, if they begin it."""
        ids = self._joined(sample)
        num_ids, text = len(ids) // ID_BYTES, prompt.data
        # As long as the sample, or it would be enough that the sample begins with the prompt.
        if len(prompt) < num_ids or not ids.startswith(text[:num_ids]):
            return False
        ids += text[num_ids:]
        ids += sampled.data
        self._lengths[sample] += (len(prompt) - num_ids, len(sampled))
        self._grown.add(sample)
        return True

    def place(self, prompt: TokenIds) -> Place:
        """Walk a prompt, [P] int32 in one piece, down the tree of one or more samples.

        The longest sample that begins it wins, the newest among equals.
        """
        self._catch_up()
        node, depth, length = self._root, 0, prompt.shape[0]
        extends = max(node.ends, default=None)
        while depth < length:
            child = node.children.get(prompt.item(depth))
            if child is None:
                break
            node = child
            depth += self._common(prompt, depth, node)
            if depth < node.end:
                break
            extends = max(node.ends, default=extends)
        return Place(extends=extends, nearest=node.newest, shared=depth)

    def _joined(self, sample: int) -> bytearray:
        """A sample's bytes, with all that it was grown by. Raises: ValueError, ids not int32."""
        ids, pieces = self._ids[sample], self.pieces[sample]
        if pieces:
            lengths, joined = list(map(len, pieces)), b"".join(pieces)
            if len(joined) != ID_BYTES * sum(lengths):
                kinds = sorted({str(piece.dtype) for piece in pieces})
                raise ValueError(
                    f"sample {sample}: ids of {kinds}, expected int32; convert them where they "
                    "come in"
                )
            ids += joined
            self._lengths[sample] += lengths
            pieces.clear()
            self._grown.add(sample)
        return ids

    def _catch_up(self) -> None:
        for sample, pieces in enumerate(self.pieces):
            if pieces:
                self._joined(sample)
        for sample in sorted(self._grown):
            self._insert(sample)
        self._grown.clear()

    def _insert(self, sample: int) -> None:
        """Lead a sample that grew further down the tree, from where it ended."""
        node, depth, length = self._at[sample], self._walked[sample], self.length(sample)
        if depth == length:
            return
        node.ends.remove(sample)
        if node.owner == sample and not node.children and not node.ends:
            node.end = length
        else:
            ids = self.view(sample)
            while depth < length:
                child = node.children.get(ids.item(depth))
                if child is None:
                    child = node.children[ids.item(depth)] = _Node(sample, depth, length)
                    depth = length
                else:
                    depth += self._common(ids, depth, child)
                    if depth < child.end:
                        child = self._split(node, child, depth)
                    child.newest = max(child.newest, sample)
                node = child
        node.ends.append(sample)
        self._at[sample], self._walked[sample] = node, length

    def _split(self, parent: _Node, child: _Node, depth: int) -> _Node:
        """Put a node between two that ends at `depth`."""
        upper = _Node(child.owner, child.start, depth)
        upper.newest = child.newest
        parent.children[self._id(child.owner, child.start)] = upper
        child.start = depth
        upper.children[self._id(child.owner, depth)] = child
        return upper

    def _id(self, sample: int, position: int) -> int:
        return self.view(sample).item(position)

    def _common(self, ids: TokenIds, depth: int, node: _Node) -> int:
        """How many of ids[depth:] and the node's stretch, which starts there, are equal."""
        text = self._ids[node.owner]
        end = min(ids.shape[0], node.end)
        if text.startswith(ids[depth:end].data, depth * ID_BYTES):
            return end - depth
        stretch = np.frombuffer(text, np.int32)
        for at in range(depth, end, _BLOCK_TOKENS):
            until = min(at + _BLOCK_TOKENS, end)
            differs = ids[at:until] != stretch[at:until]
            first = int(differs.argmax())
            if differs[first]:
                return at + first - depth
        return end - depth
