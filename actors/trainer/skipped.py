"""The inputs of an update that was not finite, written to a file for a look.

A plain NumPy archive: no pickles, readable without this package. Called by `TrainerRank`.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from actors.batch import MicroBatch, Minibatch

_LOG = logging.getLogger(__name__)
DIRECTORY = "skipped"


def save_skipped(
    minibatch: Minibatch, directory: Path, *, step: int, update: int, rank: int
) -> Path:
    """Write every array of one rank's minibatch; keys are `<micro-batch>/<field>`.

    Routing records, where there are any, are `expert_positions` and `expert_indices`.

    Returns: `directory/step-000012-update-0-rank-1.npz`.
    Raises: OSError when it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{step:06d}-update-{update}-rank-{rank}.npz"
    arrays = {
        f"{number}/{name}": array
        for number, row in enumerate(minibatch.micro_batches)
        for name, array in _arrays(row).items()
    }
    np.savez_compressed(path, **arrays)
    return path


def _arrays(row: MicroBatch) -> dict[str, Any]:
    """The arrays by the names that they are saved under."""
    found = {field.name: getattr(row, field.name) for field in fields(MicroBatch)}
    arrays = {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
    if row.experts is not None:
        arrays["expert_positions"] = row.experts.positions
        arrays["expert_indices"] = row.experts.indices
    return arrays


def report_skip(minibatch: Minibatch, root: Path, *, step: int, update: int, rank: int) -> None:
    """Save them under `root/skipped` and say so in the log; a disk that fails is only said."""
    try:
        path = save_skipped(minibatch, root / DIRECTORY, step=step, update=update, rank=rank)
    except OSError as error:
        _LOG.warning("step %d: inputs of a skipped update not saved: %s", step, error)
        return
    _LOG.warning("step %d: update %d is not finite, skipped; %s", step, update, path)
