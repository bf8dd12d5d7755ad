"""`rayloom export`: a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path

from actors.trainer import export
from actors.trainer.checkpoint import CheckpointError, read_manifest
from service.config.file import ConfigError
from service.run_dir import RunDir
from service.store.run_store import RunStore


def export_checkpoint(source: Path, directory: Path) -> str:
    """Export a checkpoint, or a run's newest committed one; returns a sentence.

    Raises: ConfigError.
    """
    checkpoint = _checkpoint_of(source)
    try:
        export.export_checkpoint(checkpoint, directory)
        manifest = read_manifest(checkpoint)
    except (CheckpointError, FileExistsError, OSError) as error:
        raise ConfigError(f"export: {error}") from error
    return f"step {manifest.step}, policy version {manifest.version}, in {directory}"


def _checkpoint_of(source: Path) -> Path:
    run_dir = RunDir(path=source)
    if not run_dir.database_file.is_file():
        return source
    store = RunStore(run_dir.database_url)
    try:
        newest = store.newest_directories(1)
    finally:
        store.close()
    if not newest:
        raise ConfigError(
            f"export: the run in {source} has no committed checkpoint yet; expected at least one; "
            "let it reach run.checkpoint_every steps"
        )
    return Path(newest[0])
