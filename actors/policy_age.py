"""Ages of tokens: the training steps from a token's policy version to the trainer's version.

Versions count publications, not steps. If the weights of a restarted trainer are not bitwise equal
to the published weights, the trainer publishes the step's weights again under the next version
(docs/semantics.md). Both versions belong to one step, and tokens do not age between them.

If a run returns to a checkpoint, the versions after the checkpoint are undone, and their numbers
are used again for other weights. A session's stored turn may have tokens of undone versions. The
versions of these tokens are marked (`UNDONE` is added). The tokens are trained with their recorded
log-probabilities, without a comparison with the trainer's; their age is never negative. The trainer
refuses tokens whose age exceeds a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from actors.batch import Int32s
from actors.types import NO_VERSION, UNDONE, VersionSpan, original_numbers


def policy_ages(sampled: Int32s, trainer_version: int, republished: Sequence[int] = ()) -> Int32s:
    """Return the age of each token: the training steps since the trainer held the token's version.

    age = v - s - |{r in republished: s < r <= v}|; negative if s > v, but 0 if s is undone.

    Args: sampled: [T] int32, versions. trainer_version: v. republished: versions that were
        published for the same step as the version before them, ascending.
    Returns: [T] int32, training steps.
    Example: policy_ages([4, 5, 6], 6, [5]) -> [1, 1, 0]; policy_ages([UNDONE + 9], 6) -> [0]
    """
    numbers = original_numbers(sampled)
    between = sum((numbers < r) & (r <= trainer_version) for r in republished)
    ages: Int32s = (trainer_version - numbers - between).astype(np.int32)
    return ages if numbers is sampled else np.where(sampled >= UNDONE, np.maximum(ages, 0), ages)


def oldest_version(trainer_version: int, max_age: int, republished: Sequence[int] = ()) -> int:
    """Return the oldest version whose age is at most max_age training steps.

    Example: oldest_version(6, 1, [5]) -> 4
    """
    oldest, left = trainer_version, max_age
    while oldest in republished or left > 0:
        left -= oldest not in republished
        oldest -= 1
    return oldest


def newest_kept(sampled: Int32s) -> int:
    """Return the newest version in `sampled` that no recovery has undone; else NO_VERSION."""
    return int(np.where(sampled < UNDONE, sampled, NO_VERSION).max(initial=NO_VERSION))


def undone_after(term: int, first_versions: Mapping[int, int]) -> int | None:
    """Return the version after which all versions of `term` are undone; None for the newest term.

    Each start or recovery of a run begins a new term. The new term continues from a version, and
    undoes all later versions of the earlier terms.

    first_versions: the version from which each term continued, by term.
    Example: undone_after(1, {1: 0, 2: 6, 3: 4}) -> 4, because term 3 continued from version 4
    """
    return min((first for later, first in first_versions.items() if later > term), default=None)


def marked(spans: Iterable[VersionSpan], kept: int | None) -> tuple[VersionSpan, ...]:
    """Return a stored turn's spans with the versions after `kept` marked as undone.

    Args: kept: the result of `undone_after` for the term that stored the turn.
    """
    return tuple(
        replace(span, version=span.version + UNDONE)
        if kept is not None and span.version > kept
        else span
        for span in spans
    )
