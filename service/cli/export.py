"""`rayloom export`: a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path

from actors.trainer.checkpoint import MANIFEST, CheckpointError, read_manifest
from service.config.file import ConfigError
from service.launch.resume import newest_usable
from service.launch.run_dir import RunDir
from service.store.run_store import RunStore, StoreError


def export_checkpoint(source: Path, directory: Path) -> str:
    """Export a checkpoint, or a run's newest committed one; returns a sentence.

    Raises: ConfigError.
    """
    checkpoint = _checkpoint_of(source)
    # Seconds of imports; where there is no checkpoint, that is said without them.
    from actors.trainer import export

    try:
        export.export_checkpoint(checkpoint, directory, model=_own_model(checkpoint))
        manifest = read_manifest(checkpoint)
    except (CheckpointError, FileExistsError, OSError) as error:
        raise ConfigError(f"export: {error}") from error
    return (
        f"{checkpoint.name}: step {manifest.step}, policy version {manifest.version}, in "
        f"{directory}"
    )


def _checkpoint_of(source: Path) -> Path:
    run_dir = RunDir(path=source)
    if not run_dir.database_file.is_file():
        is_broken = run_dir.path.is_dir() and run_dir.path.name.startswith("step-")
        if not is_broken and not (run_dir.path / MANIFEST).is_file():
            raise ConfigError(
                f"export: got {source}, but no run or checkpoint lies there; expected a directory "
                "with rayloom.db, as `rayloom train` makes it, or one of its checkpoints"
            )
        return run_dir.path
    try:
        store = RunStore(run_dir.database_url)
        try:
            newest = newest_usable(run_dir.checkpoints, store.commits())
        finally:
            store.close()
    except StoreError as error:
        raise ConfigError(f"export: {error}") from error
    if newest is None:
        raise ConfigError(
            f"export: the run in {source} has no committed checkpoint yet; expected at least one; "
            "let it reach run.checkpoint_every steps"
        )
    return run_dir.checkpoints / newest.directory


def _own_model(checkpoint: Path) -> str | None:
    """The tiny model of the checkpoint's run, which moves with it; None: what its manifest says."""
    model = RunDir(path=checkpoint.parent.parent).tiny_model
    return str(model) if (model / "config.json").is_file() else None
