"""The reason why a turn extended no sample, guessed from token ids.

Ids show the position where two histories part, not the cause. The prompt is compared with the
sample that shares most with it, as if one span had changed: the last few tokens of the sample are
searched for in the prompt after the divergence. From the position where they are found, sample and
prompt are alike again, and the tokens between are the change. The change

- is not followed by a match, is a plain deletion after the first prompt (a stripped thought, a
  rolled-back or compacted history), or covers several `regions`: history_rewritten
- is within the first prompt, which holds the system text and tool schemas: tools_changed
- is only an insertion, or is in an observation: template
- is in sampled tokens, which were encoded differently: retokenised

A rewritten text that keeps its end looks like a re-tokenised one, and two small changes in one turn
look like a rewritten history: read the counts as a hint where to look, not as a proof. Called by
the sample builder.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.types import BranchReason, TokenIds, TurnSpan

# Histories count as alike again if this many of the sample's last tokens are found; in short turns
# fewer, down to SHORTEST_ANCHOR_TOKENS.
ANCHOR_TOKENS = 4
SHORTEST_ANCHOR_TOKENS = 2


def branch_reason(
    sample: TokenIds, prompt: TokenIds, *, regions: NDArray[np.int32], position: int
) -> BranchReason:
    """Return the reason, derived from the one span of `sample` that `prompt` changed.

    Args: sample: [T] int32. regions: [T] int32, 0 in the first prompt, then 1, 2, ... by turn (odd:
    sampled, even: observation). position: index of the first token that differs, below T.

    Example: a sample with the action 11 12 13 14, a prompt with 11 99 14 instead: retokenised
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
    """Number the regions up to the last turn's end, [T] int32: the first prompt is 0, each action
    is odd, each observation is even.
    """
    borders = [0, *(each for turn in turns for each in (turn.start, turn.end))]
    lengths = np.diff(borders)
    return np.repeat(np.arange(lengths.shape[0], dtype=np.int32), lengths)


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Count the ids that two sequences have in common from the start."""
    length = min(a.shape[0], b.shape[0])
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _end_of_change(sample: TokenIds, prompt: TokenIds, position: int) -> int | None:
    """Return the end in `prompt` of the sample's last tokens, searched from `position`.

    Returns: None if they are absent.
    """
    longest = min(ANCHOR_TOKENS, sample.shape[0] - position - 1)
    for width in range(longest, min(longest, SHORTEST_ANCHOR_TOKENS) - 1, -1):
        end = _find(prompt, sample[sample.shape[0] - width :], start=position)
        if end is not None:
            return end
    return None


def _find(ids: TokenIds, pattern: TokenIds, *, start: int) -> int | None:
    """Return the end in `ids` of the first `pattern` at or after `start`; None if it is absent."""
    width = pattern.shape[0]
    if ids.shape[0] - start < max(width, 1):
        return None
    if width == 0:
        # Only the sample's last token differs: no token after it can match, one token was replaced.
        return start + 1
    text, wanted = ids.tobytes(), pattern.tobytes()
    at = text.find(wanted, start * ids.itemsize)
    while at >= 0 and at % ids.itemsize:
        # The bytes may also match across the border of two ids.
        at = text.find(wanted, at + 1)
    return at // ids.itemsize + width if at >= 0 else None
