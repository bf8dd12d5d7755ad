"""What a step decided on one trajectory, and what of it went into the batch; a plain value.

`step` hands these out beside the batch, so that the journal can keep both. Nothing is copied: the
samples are those that were packed.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.batch import Float32s
from actors.merge.dispositions import Verdict
from actors.merge.prefix import Merged
from actors.trajectory import Trajectory


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
