"""Which directories are whole checkpoints, what each one records, and which run may write them.

A checkpoint is the directory `step-000012-t2`: shards of weights and optimiser, and
`manifest.json`, written last. Invariants: a directory with a manifest is whole, anything else is
not a checkpoint; once a term has claimed the parent directory, an older term writes and deletes
nothing there. Imports no torch: the command line and the supervisor read this before anything that
trains is imported. `sharded_model` writes and reads the shards.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "manifest.json"
FORMAT = 2
_TEMPORARY = ".tmp-"
CLAIM = ".term"


class CheckpointError(Exception):
    """A checkpoint is missing, incomplete, broken, of another model, or of a run replaced."""


class CheckpointNotWritten(CheckpointError):
    """The file system did not take it; it may later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a checkpoint's manifest records."""

    step: int
    """Training steps done."""
    version: int
    """The policy version of the weights."""
    term: int
    """Of the run's lease."""
    num_updates: int
    """Optimiser updates applied to the policy."""
    num_ranks: int
    """How many wrote it; any number may read it."""
    model: str
    """The base model, for its configuration and tokenizer."""
    critic_updates: int | None = None
    """Optimiser updates applied to the critic that is in it; None: there is none."""

    @property
    def directory_name(self) -> str:
        return f"step-{self.step:06d}-t{self.term}"


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
            f"checkpoint {path}: got manifest format {found}, expected {FORMAT}; it was written "
            "by another version"
        )
    try:
        return Progress(**fields)
    except TypeError as error:
        raise CheckpointError(
            f"checkpoint {path}: its {MANIFEST} lacks or adds fields ({error}); use another one"
        ) from error


def claim(root: Path, term: int) -> None:
    """Take the checkpoint directory for a term; an older term can no longer save.

    What an interrupted save left there is removed.

    Raises: CheckpointError when a newer term has it.
    """
    _claim(root, term)
    for leftover in root.glob(f"{_TEMPORARY}step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def temporary_path(root: Path, progress: Progress) -> Path:
    """Where a checkpoint is written until it is whole."""
    return root / f"{_TEMPORARY}{progress.directory_name}"


def begin(root: Path, progress: Progress) -> None:
    """Make the directory that the ranks write their shards into. Raises: as `claim`."""
    claim(root, progress.term)
    temporary_path(root, progress).mkdir()


def finish(root: Path, progress: Progress) -> None:
    """Turn the written shards into a checkpoint that is on the disk when this returns.

    Raises: as `claim`.
    """
    _claim(root, progress.term)
    aside, final = temporary_path(root, progress), root / progress.directory_name
    with (aside / MANIFEST).open("w") as file:
        json.dump({"format": FORMAT, **asdict(progress)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        # Its manifest first, so that a half-deleted one does not count.
        (final / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(final)
    aside.rename(final)
    # The rename itself must survive a power cut.
    descriptor = os.open(root, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _claim(root: Path, term: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    path = root / CLAIM
    # A file without a number was left by a power cut, before its content was on the disk.
    try:
        newest = int(path.read_text() or term) if path.exists() else term
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {root}: its file {CLAIM} holds no number, expected the newest term's; "
            "remove that file where no other process trains this run"
        ) from error
    if newest > term:
        raise CheckpointError(
            f"checkpoint {root}: got term {term}, expected at least {newest}; this run was "
            "replaced by a newer one and must stop"
        )
    aside = root / f"{_TEMPORARY}{CLAIM}-{term}"
    with aside.open("w") as file:
        file.write(str(term))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
