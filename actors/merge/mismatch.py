"""Why a turn extended no sample: the first divergence and its kind, as well as ids can tell.

Ids say where histories part, not why. The nearest sample (longest common prefix d with the prompt)
is compared with the prompt as one changed stretch: its last few tokens after d are looked for in
the prompt; where they come back, the two are alike again, and what lies between is what changed.

- comes back nowhere, is a plain deletion (a stripped thought, a rolled-back or compacted history),
  or spans several regions: history_rewritten
- all within the first prompt, where system text and tool schemas stand: tools_changed
- something was only inserted, or the stretch lies in an observation: template
- the stretch lies in sampled tokens, which came back as others: retokenised

A rewritten text that keeps its end looks like a re-tokenised one, and two small changes in one
turn look like a rewritten history: read the counts as a hint where to look, not as a proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from actors.trajectory import TokenIds, Turn
from actors.trajectory_queue.columns import common_prefix

# As many tokens have to come back for two histories to count as alike again, and in short turns
# as few.
ANCHOR_TOKENS = 4
SHORTEST_ANCHOR_TOKENS = 2


class MismatchKind(StrEnum):
    """What changed between a sample and the prompt that should have extended it."""

    RETOKENISED = "retokenised"
    TEMPLATE = "template"
    HISTORY_REWRITTEN = "history_rewritten"
    TOOLS_CHANGED = "tools_changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """turn: index of the turn that began a sample. position: first divergence, in tokens from the
    start of its prompt, from the sample that it shares most with.
    """

    turn: int
    position: int
    kind: MismatchKind


def describe_mismatch(
    open_samples: Sequence[Sequence[Turn]], turn: Turn, *, index: int
) -> Mismatch:
    """Find the nearest of the open samples (each its turns in order) and classify the divergence.

    Raises: ValueError when there is no open sample.
    """
    prompt = turn.prompt_token_ids
    full = [_full_ids(turns[-1]) for turns in open_samples]
    shared = [common_prefix(prompt, ids) for ids in full]
    nearest = max(range(len(full)), key=lambda i: (shared[i], i))
    kind = classify(
        full[nearest], prompt, regions=_regions(open_samples[nearest]), position=shared[nearest]
    )
    return Mismatch(turn=index, position=shared[nearest], kind=kind)


def classify(
    sample: TokenIds, prompt: TokenIds, *, regions: NDArray[np.int32], position: int
) -> MismatchKind:
    """Classify by the one stretch of `sample` that `prompt` changed.

    Args: sample: [T] int32. regions: [T] int32, 0 in the first prompt, then 1, 2, ... by turn
    (odd: sampled, even: observation). position: where the two part, below T.
    """
    end = _end_of_change(sample, prompt, position)
    if end is None:
        return MismatchKind.HISTORY_REWRITTEN
    num_alike = common_prefix(sample[position:][::-1], prompt[position:end][::-1])
    changed = regions[position : sample.shape[0] - num_alike]
    num_new = end - num_alike - position
    if changed.size and num_new == 0:
        is_head = bool((changed == 0).all())
        return MismatchKind.TOOLS_CHANGED if is_head else MismatchKind.HISTORY_REWRITTEN
    if changed.size == 0:
        is_head = position < regions.shape[0] and regions[position] == 0
        return MismatchKind.TOOLS_CHANGED if is_head else MismatchKind.TEMPLATE
    if changed[0] != changed[-1]:
        return MismatchKind.HISTORY_REWRITTEN
    if changed[0] == 0:
        return MismatchKind.TOOLS_CHANGED
    return MismatchKind.RETOKENISED if changed[0] % 2 else MismatchKind.TEMPLATE


def _full_ids(turn: Turn) -> TokenIds:
    return np.concatenate([turn.prompt_token_ids, turn.sampled_token_ids])


def _regions(turns: Sequence[Turn]) -> NDArray[np.int32]:
    """[T] int32: the first prompt is 0, each action odd, each observation even."""
    regions = np.zeros(turns[-1].prompt_token_ids.shape[0] + turns[-1].num_sampled, np.int32)
    for number, turn in enumerate(turns):
        start = turn.prompt_token_ids.shape[0]
        regions[start:] = 2 * number + 1
        regions[start + turn.num_sampled :] = 2 * number + 2
    return regions


def _end_of_change(sample: TokenIds, prompt: TokenIds, position: int) -> int | None:
    """Where in `prompt` the sample's last tokens after `position` end; None: not there."""
    longest = min(ANCHOR_TOKENS, sample.shape[0] - position - 1)
    for width in range(longest, min(longest, SHORTEST_ANCHOR_TOKENS) - 1, -1):
        end = _find(prompt, sample[sample.shape[0] - width :], start=position)
        if end is not None:
            return end
    return None


def _find(ids: TokenIds, pattern: TokenIds, *, start: int) -> int | None:
    """Where the first `pattern` from `start` on ends in `ids`; None when it is not there."""
    width = pattern.shape[0]
    if ids.shape[0] - start < max(width, 1):
        return None
    if width == 0:
        # Only the sample's last token differs: nothing can come back, one token was replaced.
        return start + 1
    windows = np.lib.stride_tricks.sliding_window_view(ids[start:], width)
    hits = np.flatnonzero((windows == pattern).all(axis=1))
    return start + int(hits[0]) + width if hits.size else None
