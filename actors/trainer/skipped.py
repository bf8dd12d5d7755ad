"""The inputs of an update that was not finite, written to a file for a look.

A plain NumPy archive: no pickles, readable without this package. Called by `TrainerRank`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from actors.batch import MicroBatch, Minibatch

_LOG = logging.getLogger(__name__)
DIRECTORY = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedUpdate:
    """An update of one rank. old, reference: log-probabilities [M] float32, nats, of each
    micro-batch; None where the update needed none, or made them itself.
    """

    step: int
    update: int
    rank: int
    minibatch: Minibatch
    old: Sequence[Tensor] | None = None
    reference: Sequence[Tensor] | None = None


def save_skipped(skipped: SkippedUpdate, directory: Path) -> Path:
    """Write all that the loss was computed from; keys are `<micro-batch>/<field>`.

    Beside the fields of a micro-batch, where there are any: `old_logprobs`, `reference_logprobs`,
    and routing records as `expert_positions` and `expert_indices`.

    Returns: `directory/step-000012-update-0-rank-1.npz`.
    Raises: OSError when it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    name = f"step-{skipped.step:06d}-update-{skipped.update}-rank-{skipped.rank}.npz"
    path = directory / name
    arrays = {
        f"{number}/{name}": array
        for number, row in enumerate(skipped.minibatch.micro_batches)
        for name, array in _arrays(row).items()
    }
    for name, scores in (("old", skipped.old), ("reference", skipped.reference)):
        for number, logprobs in enumerate(scores or ()):
            arrays[f"{number}/{name}_logprobs"] = logprobs.float().cpu().numpy()
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


def report_skip(skipped: SkippedUpdate, root: Path) -> None:
    """Save them under `root/skipped` and say so in the log; a disk that fails is only said."""
    step = skipped.step
    try:
        path = save_skipped(skipped, root / DIRECTORY)
    except OSError as error:
        _LOG.warning("step %d: inputs of a skipped update not saved: %s", step, error)
        return
    _LOG.warning("step %d: update %d is not finite, skipped; %s", step, skipped.update, path)
