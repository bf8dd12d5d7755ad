"""The inputs of an update that was not finite, written to a file for a look.

A plain NumPy archive: no pickles, readable without this package. Called by `TrainerRank`.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np

from actors.batch import MicroBatch, Minibatch


def save_skipped(
    minibatch: Minibatch, directory: Path, *, step: int, update: int, rank: int
) -> Path:
    """Write every array of one rank's minibatch; keys are `<micro-batch>/<field>`.

    Returns: `directory/step-000012-update-0-rank-1.npz`.
    Raises: OSError when it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{step:06d}-update-{update}-rank-{rank}.npz"
    arrays = {
        f"{number}/{field.name}": getattr(row, field.name)
        for number, row in enumerate(minibatch.micro_batches)
        for field in fields(MicroBatch)
    }
    np.savez_compressed(path, **arrays)
    return path
