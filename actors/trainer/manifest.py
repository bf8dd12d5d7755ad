"""Which directories are whole checkpoints, what each says of itself, and who may write beside them.

Invariants: a directory with a manifest is whole, anything else is not a checkpoint; once an epoch
has claimed the place, an older one writes and deletes nothing there. No torch: the command line and
the supervisor look here before anything that trains is imported.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "manifest.json"
FORMAT = 1
TEMPORARY = ".tmp-"
_CLAIM = ".epoch"


class CheckpointError(Exception):
    """A checkpoint is missing, incomplete, broken, of another model, or of a run replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a checkpoint says about itself.

    step: training steps done. version: the policy version of the weights. epoch: of the run's
    lease. num_updates: optimiser updates applied. num_ranks: that wrote it; any number may read.
    model: the base model, for its configuration and tokenizer. extra_json: the caller's own state.
    critic_updates: applied to the critic that is in it; None: there is none.
    """

    step: int
    version: int
    epoch: int
    num_updates: int
    num_ranks: int
    model: str
    extra_json: str = "{}"
    critic_updates: int | None = None

    @property
    def directory_name(self) -> str:
        return f"step-{self.step:06d}-e{self.epoch}"


def read_manifest(path: Path) -> Progress:
    """Read a checkpoint's manifest.

    Raises: CheckpointError when there is none or it is not ours.
    """
    try:
        fields = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError as error:
        if not path.is_dir():
            raise CheckpointError(
                f"checkpoint {path} is not there; restore it, or use an older one"
            ) from error
        raise CheckpointError(
            f"checkpoint {path}: got no {MANIFEST}, expected one in a finished checkpoint; it was "
            "interrupted while being written, use an older one"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path}: its {MANIFEST} cannot be read ({error}); use another one"
        ) from error
    found = fields.pop("format", None) if isinstance(fields, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"checkpoint {path}: got manifest format {found}, expected {FORMAT}; it was written by "
            "another version"
        )
    try:
        return Progress(**fields)
    except TypeError as error:
        raise CheckpointError(
            f"checkpoint {path}: its {MANIFEST} lacks or adds fields ({error}); use another one"
        ) from error


def list_checkpoints(root: Path) -> list[Path]:
    """List the whole checkpoints under a directory, oldest first: by epoch, then step.

    A newer epoch outranks a later step: it went on from a checkpoint that was committed, and what
    the older epoch wrote beyond that belongs to no surviving lineage.
    """
    found: list[tuple[int, int, Path]] = []
    for manifest in root.glob(f"step-*/{MANIFEST}"):
        try:
            progress = read_manifest(manifest.parent)
        except CheckpointError:
            continue
        found.append((progress.epoch, progress.step, manifest.parent))
    return [path for _, _, path in sorted(found)]


def newest_checkpoint(root: Path) -> Path | None:
    """Return the newest whole checkpoint, or None."""
    found = list_checkpoints(root)
    return found[-1] if found else None


def claim(root: Path, epoch: int) -> None:
    """Take the checkpoint directory for an epoch; whoever is older can no longer save.

    What a save that was cut short left there is removed.
    Raises: CheckpointError when a newer epoch has it.
    """
    hold(root, epoch)
    for leftover in root.glob(f"{TEMPORARY}step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def hold(root: Path, epoch: int) -> None:
    """Write the epoch's name on the place. Raises: CheckpointError when a newer epoch has it."""
    root.mkdir(parents=True, exist_ok=True)
    place = root / _CLAIM
    newest = int(place.read_text()) if place.exists() else epoch
    if newest > epoch:
        raise CheckpointError(
            f"checkpoint {root}: got epoch {epoch}, expected at least {newest}; this run was "
            "replaced by a newer one and must stop"
        )
    aside = root / f"{TEMPORARY}{_CLAIM}-{epoch}"
    aside.write_text(str(epoch))
    aside.replace(place)


def write_manifest(directory: Path, progress: Progress) -> None:
    """What makes a directory a checkpoint: it is on the disk when this returns."""
    with (directory / MANIFEST).open("w") as file:
        json.dump({"format": FORMAT, **asdict(progress)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
