"""The open samples of one trajectory as a tree of their tokens: where does a prompt belong?

A prompt is compared with the newest sample that begins as it does, whole: one `memcmp`, and a
search by halves for the place only where it fails. Where the two part, the walk goes on with the
newest sample of the next branch, so that a token is read some few times, however many samples are
open. What grows with their number is a climb over the prompt's ancestors, which reads no token.
The tree stores none: a node is a stretch [start, end) of the sample that first went there. It is
brought up to date when a prompt is placed, so that samples that only grow cost nothing. Called by
`buffer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.types import TokenIds

ID_BYTES = 4
# A place where two stretches differ is narrowed down to this many tokens by halves.
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

    __slots__ = ("children", "end", "ends", "newest", "owner", "parent", "start")

    def __init__(self, owner: int, start: int, end: int, *, parent: _Node | None) -> None:
        self.owner = owner
        self.start = start
        self.end = end
        self.parent = parent
        self.newest = owner
        self.children: dict[int, _Node] = {}
        self.ends: list[int] = []


class OpenSamples:
    """The ids of each open sample, appended to in amortised constant time a token.

    pieces: of each sample, the stretches of int32 ids that it was grown by, each in one piece of
    memory. They are joined to the sample's bytes when those are asked for: a join of many costs a
    fraction of copying each into its place. grown: the sample that each turn went to. To let a
    sample grow by a turn, append to both.
    """

    __slots__ = ("_at", "_ids", "_lengths", "_num_walked", "_root", "_walked", "grown", "pieces")

    def __init__(self) -> None:
        self._ids: list[bytearray] = []
        self.pieces: list[list[Any]] = []
        self.grown: list[int] = []
        self._lengths: list[list[int]] = []
        self._root = _Node(-1, 0, 0, parent=None)
        # Of each sample, the node that it ends at in the tree, and its length there.
        self._at: list[_Node] = []
        self._walked: list[int] = []
        # How many of `grown` the tree knows.
        self._num_walked = 0

    def open(self, prompt: TokenIds, sampled: TokenIds, *, at: Place | None = None) -> int:
        """Begin a sample with a turn; its number. at: where the prompt was placed."""
        number = len(self._ids)
        self._ids.append(bytearray())
        self.pieces.append([prompt, sampled])
        self.grown.append(number)
        self._lengths.append([])
        node = self._root if at is None else self._node_to(at.nearest, at.shared)
        node.ends.append(number)
        self._at.append(node)
        self._walked.append(node.end)
        above: _Node | None = node
        while above is not None:
            above.newest = number
            above = above.parent
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
        self.grown.append(sample)
        return True

    def place(self, prompt: TokenIds) -> Place:
        """Walk a prompt, [P] int32 in one piece, down the tree of one or more samples.

        The longest sample that begins it wins, the newest among equals. A step goes as far as the
        newest sample of a branch goes with the prompt.
        """
        self._catch_up()
        node, depth, length = self._root, 0, prompt.shape[0]
        while depth == node.end and depth < length:
            child = node.children.get(prompt.item(depth))
            if child is None:
                break
            end = min(length, self._walked[child.newest])
            depth = self._parting(prompt, depth, end, child.newest)
            node = self._holder(child.newest, depth)
        ended = node if depth == node.end else node.parent
        while ended is not None and not ended.ends:
            ended = ended.parent
        extends = None if ended is None else max(ended.ends)
        return Place(extends=extends, nearest=node.newest, shared=depth)

    def _joined(self, sample: int) -> bytearray:
        """A sample's bytes, with all that it was grown by. Raises: ValueError, ids not int32."""
        ids, pieces = self._ids[sample], self.pieces[sample]
        if pieces:
            lengths, joined = list(map(len, pieces)), bytearray().join(pieces)
            if len(joined) != ID_BYTES * sum(lengths):
                kinds = sorted({str(piece.dtype) for piece in pieces})
                raise ValueError(
                    f"sample {sample}: ids of {kinds}, expected int32; convert them where they "
                    "come in"
                )
            if ids:
                ids += joined
            else:
                self._ids[sample] = ids = joined
            self._lengths[sample] += lengths
            pieces.clear()
        return ids

    def _catch_up(self) -> None:
        for sample in {*self.grown[self._num_walked :]}:
            self._insert(sample)
        self._num_walked = len(self.grown)

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
                    child = _Node(sample, depth, length, parent=node)
                    node.children[ids.item(depth)] = child
                    depth = length
                else:
                    depth = self._parting(ids, depth, min(length, child.end), child.owner)
                    if depth < child.end:
                        child = self._split(node, child, depth)
                    child.newest = max(child.newest, sample)
                node = child
        node.ends.append(sample)
        self._at[sample], self._walked[sample] = node, length

    def _holder(self, sample: int, depth: int) -> _Node:
        """The node that holds a sample's first `depth` tokens, and of those no fewer."""
        node = self._at[sample]
        while node.parent is not None and node.start >= depth:
            node = node.parent
        return node

    def _node_to(self, sample: int, depth: int) -> _Node:
        """The node that ends after a sample's first `depth` tokens."""
        node = self._holder(sample, depth)
        if node.parent is None or node.end == depth:
            return node
        return self._split(node.parent, node, depth)

    def _split(self, parent: _Node, child: _Node, depth: int) -> _Node:
        """Put a node between two that ends at `depth`."""
        upper = _Node(child.owner, child.start, depth, parent=parent)
        upper.newest = child.newest
        parent.children[self._id(child.owner, child.start)] = upper
        child.start = depth
        child.parent = upper
        upper.children[self._id(child.owner, depth)] = child
        return upper

    def _id(self, sample: int, position: int) -> int:
        return self.view(sample).item(position)

    def _parting(self, ids: TokenIds, start: int, end: int, sample: int) -> int:
        """The first place in [start, end) where ids and a sample's differ; end: there is none."""
        text = self._ids[sample]
        if text.startswith(ids[start:end].data, start * ID_BYTES):
            return end
        while end - start > _BLOCK_TOKENS:
            middle = (start + end) // 2
            if text.startswith(ids[start:middle].data, start * ID_BYTES):
                start = middle
            else:
                end = middle
        differs = ids[start:end] != np.frombuffer(text, np.int32)[start:end]
        return start + int(differs.argmax())
