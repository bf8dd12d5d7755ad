"""Recognise directories of tiny models that were built before, and copy them.

This module imports neither torch nor transformers, so a start that only copies a model needs
neither of them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from actors.environment.builtin import calculator, guessing

WARMUP_STEPS = 60
MARKER = "tiny_model.json"
# The weights depend on the settings, on these packages and on the sources of the build.
_PACKAGES = ("torch", "transformers", "tokenizers")


def build_name(*, seed: int, tie_word_embeddings: bool, warmup_steps: int) -> str:
    """Return the name under which a tiny model with these settings is cached.

    The name changes with the source code of the build and the versions of the packages that the
    build uses, so that no outdated model is used.
    """
    digest = hashlib.sha256(repr((seed, tie_word_embeddings, warmup_steps)).encode())
    digest.update(repr([(package, version(package)) for package in _PACKAGES]).encode())
    texts = [Path(inspect.getfile(module)) for module in (calculator, guessing)]
    for file in [*sorted(Path(__file__).parent.glob("*.py")), *texts]:
        digest.update(file.read_bytes())
    return f"tiny-{digest.hexdigest()[:16]}"


def read_marker(directory: Path) -> dict[str, Any] | None:
    """Return the content of the marker file by which a directory is recognised as a tiny model.

    Returns: the settings and the report that the build stored; None if the directory is missing or
        empty.
    Raises: FileExistsError if the directory holds anything but a tiny model.
    """
    if not directory.exists():
        return None
    if directory.is_dir() and not any(directory.iterdir()):
        return None
    marker = directory / MARKER
    if not marker.is_file():
        raise FileExistsError(
            f"tiny model: {directory} exists and is not a tiny model (it has no {MARKER}); "
            "name another directory or remove it"
        )
    try:
        found: dict[str, Any] = {**json.loads(marker.read_text())}
    except (ValueError, TypeError) as error:
        raise FileExistsError(
            f"tiny model: {marker} cannot be read ({error}); remove {directory}, and it is built "
            "again"
        ) from error
    return found


def copy_built(source: Path, directory: Path) -> bool:
    """Copy a built model. The directory appears complete or not at all.

    Returns: whether the directory held this model already.
    Raises: FileExistsError if the directory holds anything but a tiny model; OSError.
    """
    built = read_marker(source)
    assert built is not None, "the source has been built"
    if read_marker(directory) == built:
        return True
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as name:
        shutil.copytree(source, Path(name) / "new")
        put_in_place(Path(name) / "new", directory, scratch=Path(name))
    return False


def put_in_place(made: Path, directory: Path, *, scratch: Path) -> None:
    """Rename `made` to `directory`, after moving an existing `directory` into `scratch`."""
    if directory.exists():
        directory.rename(scratch / "old")
    made.rename(directory)
