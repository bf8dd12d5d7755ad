"""What a step decided on one trajectory, and what of it went into the batch; a plain value.

`step` hands these out beside the batch, so that the journal can keep both. Nothing is copied: the
samples are those that were packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.batch import Float32s
from actors.merge.dispositions import Verdict
from actors.merge.prefix import Merged
from actors.types import Trajectory

# Of one step; what is wrong with one trajectory is mostly wrong with many.
MAX_NOTICES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTrajectory:
    """merged: None for turns that do not fit together.

    advantages: for each of merged.samples [M] float32, of its trained tokens in order; empty for a
    trajectory that is not in the loss.
    """

    trajectory: Trajectory
    merged: Merged | None
    verdict: Verdict
    advantages: tuple[Float32s, ...] = ()


def problem_notices(judged: Sequence[JudgedTrajectory], *, step: int) -> tuple[str, ...]:
    """A sentence for each trajectory that was left out for what is wrong with it, three at most."""
    found = [each for each in judged if each.verdict.problem and each.verdict.reason is not None]
    notices = [
        f"step {step}: trajectory {each.trajectory.trajectory_id} left out as "
        f"{each.verdict.reason}: {each.verdict.problem}"
        for each in found[:MAX_NOTICES]
    ]
    if len(found) > MAX_NOTICES:
        notices.append(f"step {step}: {len(found) - MAX_NOTICES} more like it; `rayloom inspect`")
    return tuple(notices)
