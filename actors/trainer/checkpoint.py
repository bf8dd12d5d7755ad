"""Directories and manifests of checkpoints, and a claim that lets only the newest term write them.

A checkpoint is a directory such as `step-000012-t2`, written at step 12 by term 2; each start or
recovery of a run begins a new term. `sharded_model` writes and reads the shards of weights and
optimiser. `manifest.json` is written last, with a digest of every other file and of itself.

Invariants:
- Only a directory with a manifest is a checkpoint, and every checkpoint is complete.
- Weights are read only after `check_files` has compared the bytes with their digests.
- After a term has claimed the parent directory, older terms write and delete nothing in it.
- This module does not import torch, because the command line and the supervisor use it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 3
"""Number of the manifest format that may lack digests; older versions and other programs write this
format.
"""
# `finish` writes this format, always with digests; if the digests are missing, the manifest has
# been changed.
_DIGESTED_FORMAT = 4
_READ_FORMATS = (2, FORMAT, _DIGESTED_FORMAT)
_DIGEST_FIELDS = ("digests", "digest_s")
_READ_BYTES = 2**22
_NAME = re.compile(r"step-\d+-t\d+")
_TEMPORARY = ".tmp-"
CLAIM = ".term"


class CheckpointError(Exception):
    """A checkpoint is missing, incomplete, broken, of another model or claimed by a newer term."""


class CheckpointNotWritten(CheckpointError):
    """The file system refused a write; a later attempt may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The shape of a checkpoint's adapters, and the base model for which they were trained."""

    rank: int
    alpha: float
    layers: tuple[str, ...]
    """The names that the layers with adapters have in transformers' model."""
    base: str
    """Digest of the base model's parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The content of a checkpoint's manifest."""

    step: int
    """Number of training steps done."""
    version: int
    """The policy version of the weights."""
    term: int
    """The run's term that wrote the checkpoint."""
    num_updates: int
    """Number of optimiser updates applied to the policy."""
    num_ranks: int
    """Number of ranks that wrote the checkpoint; any number of ranks can read it."""
    model: str
    """Directory or hub name of the base model, which has the configuration and the tokenizer."""
    critic_updates: int | None = None
    """Number of optimiser updates applied to the critic; None if the checkpoint has no critic."""
    chat_template: str | None = None
    """The run's chat template: Jinja text, or the word "none" for raw prompts. None means the base
    model's own template."""
    lora: Adapter | None = None
    """The adapters, if the base model is frozen; None if the checkpoint has whole weights."""

    @property
    def directory_name(self) -> str:
        return f"step-{self.step:06d}-t{self.term}"


def read_manifest(path: Path) -> Progress:
    """Read a checkpoint's manifest.

    Raises: CheckpointError if it is missing, of an unknown format, or changed since it was written.
    """
    return _read(path)[0]


def has_digests(path: Path) -> bool:
    """Return whether a checkpoint has digests of its files.

    Older versions of Rayloom and other programs write checkpoints without digests.

    Raises: CheckpointError, as `read_manifest`.
    """
    return bool(_read(path)[1])


def check_files(
    path: Path,
    *,
    part: int = 0,
    num_parts: int = 1,
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Read a checkpoint's files and compare them with their digests, if it has digests.

    Args: part, num_parts: check only part number `part` of num_parts, so that several processes can
        divide the files. on_read: called with the number of bytes after each read.
    Raises: CheckpointError if a file has changed or cannot be read, or as `read_manifest`.
    """
    for name, written in sorted(_read(path)[1].items())[part::num_parts]:
        try:
            found = _digest_of(path / name, on_read)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {path}: {name} cannot be read ({error.strerror or error}), expected "
                "the file that was written; use an older one"
            ) from error
        if found != written:
            raise CheckpointError(
                f"checkpoint {path}: got other bytes in {name} than were written (sha256 "
                f"{found[:12]}…, expected {written[:12]}…); the disk or a copy has changed them: "
                "use an older one"
            )


def check_adapter(path: Path, stored: Adapter | None, own: Adapter | None) -> None:
    """Raise CheckpointError if a checkpoint's adapters differ from `own` in shape or base model.

    Args: stored: the checkpoint's adapters; None if it has whole weights. own: the adapters of the
    trainer or the export; None if whole weights are trained.
    """
    if stored == own:
        return
    if stored is None or own is None:
        got, expected = ("adapters", "whole weights")[:: 1 if own is None else -1]
        raise CheckpointError(
            f"checkpoint {path}: got {got}, expected {expected}; trainer.lora cannot be added or "
            "removed in a run: start a new run, with this one's export as its model"
        )
    for name in ("rank", "alpha", "layers"):
        if (got := getattr(stored, name)) != (expected := getattr(own, name)):
            raise CheckpointError(
                f"checkpoint {path}: got adapters with {name} {_shortened(got)}, expected "
                f"{_shortened(expected)}; resume with the run's own trainer.lora"
            )
    raise CheckpointError(
        f"checkpoint {path}: its adapters were trained on another base model (digest "
        f"{stored.base[:12]}…, expected {own.base[:12]}…); use the model that the run started from"
    )


def _shortened(value: Any) -> str:
    return f"of {len(value)} layers" if isinstance(value, tuple) else f"{value:g}"


def _read(path: Path) -> tuple[Progress, Mapping[str, str]]:
    try:
        fields = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError as error:
        if not path.is_dir():
            raise CheckpointError(
                f"checkpoint {path} does not exist; restore it, or use an older one"
            ) from error
        raise CheckpointError(
            f"checkpoint {path}: got no {MANIFEST}, expected one in a finished checkpoint; it was "
            "interrupted while it was written; use an older one"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path}: its {MANIFEST} cannot be read ({error}); use another one"
        ) from error
    found = fields.get("format") if isinstance(fields, dict) else None
    if found not in _READ_FORMATS:
        raise CheckpointError(
            f"checkpoint {path}: got manifest format {found}, expected {_READ_FORMATS[0]} to "
            f"{_READ_FORMATS[-1]}; it was written by another version"
        )
    is_digested = found == _DIGESTED_FORMAT or bool({"sha256", *_DIGEST_FIELDS} & fields.keys())
    written = fields.pop("sha256", None)
    is_whole = written == _digest_of_fields(fields) and "digests" in fields
    if is_digested and not is_whole:
        raise CheckpointError(
            f"checkpoint {path}: its {MANIFEST} has changed since it was written, on the disk or "
            "in a copy; use an older one"
        )
    digests = fields.get("digests", {})
    for name in ("format", *_DIGEST_FIELDS):
        fields.pop(name, None)
    try:
        if (lora := fields.get("lora")) is not None:
            fields["lora"] = Adapter(**{**lora, "layers": tuple(lora["layers"])})
        progress = Progress(**fields)
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {path}: its {MANIFEST} lacks or adds fields ({error}); use another one"
        ) from error
    _check_progress(path, progress)
    return progress, digests


def _check_progress(path: Path, progress: Progress) -> None:
    for name in ("step", "version", "term", "num_updates", "num_ranks"):
        value = getattr(progress, name)
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"checkpoint {path}: its {MANIFEST} has {name} {value!r}, expected a whole number "
                "of at least 0; use another one"
            )
    if _NAME.fullmatch(path.name) and path.name != progress.directory_name:
        raise CheckpointError(
            f"checkpoint {path}: its {MANIFEST} is from {progress.directory_name}, expected the "
            f"manifest of {path.name}; use an older one, or restore this one"
        )


def _digest_of(file: Path, on_read: Callable[[int], None]) -> str:
    digest = sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
            on_read(len(block))
    return digest.hexdigest()


def _digest_of_fields(fields: Mapping[str, Any]) -> str:
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def claim(root: Path, term: int) -> None:
    """Claim the directory of all checkpoints for a term of the run; older terms can no longer save.

    The files of interrupted saves are removed.

    Raises: CheckpointError if a newer term has claimed the directory.
    """
    _claim(root, term)
    for leftover in root.glob(f"{_TEMPORARY}step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def temporary_path(root: Path, progress: Progress) -> Path:
    """Return the directory in which a checkpoint is written until it is complete."""
    return root / f"{_TEMPORARY}{progress.directory_name}"


def begin(root: Path, progress: Progress) -> None:
    """Create the directory into which the ranks write their shards. Raises: CheckpointError."""
    claim(root, progress.term)
    temporary_path(root, progress).mkdir()


def finish(root: Path, progress: Progress, *, digests: Mapping[str, str], digest_s: float) -> None:
    """Turn the written shards into a checkpoint, which is on the disk when this returns.

    digests: SHA-256 of each file that the ranks have written, by the file's name. digest_s: seconds
    that the slowest rank took to compute its digests; only for information.
    Raises: CheckpointError if a newer term has claimed the directory.
    """
    _claim(root, progress.term)
    aside, final = temporary_path(root, progress), root / progress.directory_name
    fields = {"format": _DIGESTED_FORMAT, **asdict(progress), "digests": dict(digests)}
    fields["digest_s"] = round(digest_s, 3)
    with (aside / MANIFEST).open("w") as file:
        json.dump({**fields, "sha256": _digest_of_fields(fields)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        # Delete the manifest first, so that a half-deleted directory is not a checkpoint.
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
    # The file has no number if the power failed before its content was on the disk.
    try:
        newest = int(path.read_text() or term) if path.exists() else term
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {root}: its file {CLAIM} holds no number, expected the newest term's; "
            "remove that file if no other process trains this run"
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
