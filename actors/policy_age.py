"""How many training steps a policy version is behind another one.

Versions count publications. A trainer that came back with other bits publishes the weights of a
step once more under the next version (docs/semantics.md): the two versions are of one step, and no
token gets older by it. Called by the merge actor (reports, journal) and the trainer (its bound).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.batch import Int32s


def policy_ages(sampled: Int32s, trainer_version: int, republished: Sequence[int] = ()) -> Int32s:
    """Tell how many training steps ago each token's policy was the trainer's.

    age = v - s - |{r in republished: s < r <= v}|; negative where s > v.

    Args: sampled: [T] int32, versions. trainer_version: v. republished: versions that were
    published for the same step as the version before them, ascending.
    Returns: [T] int32, training steps.
    Example: policy_ages([4, 5, 6], 6, [5]) -> [1, 1, 0]
    """
    between = sum((sampled < r) & (r <= trainer_version) for r in republished)
    ages: Int32s = (trainer_version - sampled - between).astype(np.int32)
    return ages


def oldest_version(trainer_version: int, max_age: int, republished: Sequence[int] = ()) -> int:
    """The oldest version whose age is at most max_age training steps.

    Example: oldest_version(6, 1, [5]) -> 4
    """
    oldest, left = trainer_version, max_age
    while oldest in republished or left > 0:
        left -= oldest not in republished
        oldest -= 1
    return oldest
