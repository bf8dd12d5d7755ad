"""Guess from token ids why a turn began a new sample instead of extending one.

The turn's prompt is compared with the sample that has the longest common prefix with it. The guess
assumes that the prompt has other tokens in place of one span of the sample, which begins at the
first token that differs. The reason is

- tools_changed, if the span is in the first prompt, which has system text and tool schemas
- retokenised, if the span is in sampled tokens: the same text was encoded differently
- template, if the span is in an observation, or if the prompt only has additional tokens
- history_rewritten, in three cases: tokens after the first prompt were deleted and not replaced (a
  stripped thought), the span is in more than one region (`regions`), or the span's end is not
  found in the prompt

The reasons are hints, not proofs: a rewritten text that keeps its end looks like a re-tokenised
text, and two small changes in one turn look like a rewritten history.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.types import BranchReason, TokenIds, TurnSpan

# Histories count as equal again if this number of the sample's last tokens is found; in short turns
# fewer are enough, down to SHORTEST_ANCHOR_TOKENS.
ANCHOR_TOKENS = 4
SHORTEST_ANCHOR_TOKENS = 2


def branch_reason(
    sample: TokenIds, prompt: TokenIds, *, regions: NDArray[np.int32], position: int
) -> BranchReason:
    """Return the reason why `prompt` does not extend `sample`.

    Args: sample: [T] int32. regions: [T] int32, the result of `regions` for the sample's turns.
    position: index of the first token that differs, below T.

    Example: the reason is retokenised if the sample has the action 11 12 13 14, and the prompt has
    11 99 14 in its place.
    """
    end = _end_of_change(sample, prompt, position)
    if end is None:
        return BranchReason.HISTORY_REWRITTEN
    num_alike = common_prefix(sample[position:][::-1], prompt[position:end][::-1])
    changed = regions[position : sample.shape[0] - num_alike]
    num_new = end - num_alike - position
    if changed.size and num_new == 0:
        is_head = bool((changed == 0).all())
        return BranchReason.TOOLS_CHANGED if is_head else BranchReason.HISTORY_REWRITTEN
    if changed.size == 0:
        is_head = position < regions.shape[0] and regions[position] == 0
        return BranchReason.TOOLS_CHANGED if is_head else BranchReason.TEMPLATE
    if changed[0] != changed[-1]:
        return BranchReason.HISTORY_REWRITTEN
    if changed[0] == 0:
        return BranchReason.TOOLS_CHANGED
    return BranchReason.RETOKENISED if changed[0] % 2 else BranchReason.TEMPLATE


def regions(turns: Sequence[TurnSpan]) -> NDArray[np.int32]:
    """Number the regions of a sample, and return the region of each token: [T] int32.

    A region is the first prompt (number 0), an action (an odd number) or an observation (an even
    number). The last region is the action of the last turn.
    """
    borders = [0, *(each for turn in turns for each in (turn.start, turn.end))]
    lengths = np.diff(borders)
    return np.repeat(np.arange(lengths.shape[0], dtype=np.int32), lengths)


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Return the number of ids that two sequences have in common from the start."""
    length = min(a.shape[0], b.shape[0])
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _end_of_change(sample: TokenIds, prompt: TokenIds, position: int) -> int | None:
    """Return the index in the prompt after the sample's last tokens; None if they are not found.

    The prompt repeats the sample with a change at `position`, and then has new tokens.
    Example: sample 1 2 3 4 5 6 7, prompt 1 9 4 5 6 7 8, position 1 -> 6
    """
    longest = min(ANCHOR_TOKENS, sample.shape[0] - position - 1)
    for width in range(longest, min(longest, SHORTEST_ANCHOR_TOKENS) - 1, -1):
        end = _find(prompt, sample[sample.shape[0] - width :], start=position)
        if end is not None:
            return end
    return None


def _find(ids: TokenIds, pattern: TokenIds, *, start: int) -> int | None:
    """Return the index after the first match of `pattern` in `ids` from `start` on, or None."""
    width = pattern.shape[0]
    if ids.shape[0] - start < max(width, 1):
        return None
    if width == 0:
        # Only the sample's last token differs, so no later token can match: one token was replaced.
        return start + 1
    text, wanted = ids.tobytes(), pattern.tobytes()
    at = text.find(wanted, start * ids.itemsize)
    while at >= 0 and at % ids.itemsize:
        # The bytes may also match across the border of two ids.
        at = text.find(wanted, at + 1)
    return at // ids.itemsize + width if at >= 0 else None
