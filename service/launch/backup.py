"""Back a run up into a directory, and restore it from there.

A backup is a run directory with an SQLite database, even if the run's own database is in
PostgreSQL. The backup has the state of the database when the backup began, and the checkpoints of
that state; the run may train meanwhile. Invariant: the new directory gets its final name last. An
interrupted command leaves only a directory whose name ends in `.part`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from actors.trainer.checkpoint import CheckpointError, check_files
from service.config.file import ConfigError, load_config
from service.launch.run_dir import RunDir, run_id_of
from service.store.errors import StoreError
from service.store.lineage import Checkpoint
from service.store.moving import copy_run
from service.store.place import DATABASE, StoreOptions, chosen_url, record, shown, sqlite_url
from service.store.read_only import ReadOnlyStore

# Names that an interrupted `backup` or `restore` may have left in a directory. The names of the
# database's files are not listed: they begin with DATABASE.
_NAMES = {
    "checkpoints", "config.yaml", "functions", "journal", "model", "session.key", "sources.json",
    "store.json",
}  # fmt: skip


def back_up(run_dir: RunDir, directory: Path) -> str:
    """Write a backup of a run, which may still train, into a new directory.

    Returns: a sentence for the user on what was copied. Raises: ConfigError.
    """
    with _refused("backup"), _new_directory(directory, command="backup") as part:
        if not run_dir.config_file.is_file() or not run_dir.has_run():
            raise ConfigError(f"backup: got {run_dir.path}, which has no run; name a run directory")
        with run_dir.looked_into() as store:
            copy_run(store, sqlite_url(part))
        backup = RunDir(path=part)
        with backup.looked_into() as store:
            commits = store.checkpoints()
        copied = _copy_checkpoints(run_dir.checkpoints, commits, backup.checkpoints)
        if commits and not copied:
            raise ConfigError(
                f"backup: none of the {len(commits)} checkpoints of {run_dir.path} could be "
                "copied, expected at least one; if the run removed them meanwhile, try again"
            )
        _copy_files(run_dir, backup)
    newest = copied[0] if copied else "none"
    return f"backup of {run_dir.path} in {directory}: {len(copied)} checkpoints, newest {newest}"


def restore(backup: RunDir, run_dir: RunDir, options: StoreOptions) -> str:
    """Make a new run directory from a backup.

    Args: options: where to put the run's database, as for a new run.
    Returns: a sentence for the user on what was restored. Raises: ConfigError.
    """
    with _refused("restore"), _new_directory(run_dir.path, command="restore") as part:
        if not backup.config_file.is_file() or not backup.database_file.is_file():
            raise ConfigError(
                f"restore: got {backup.path}, expected a directory that `rayloom backup` wrote"
            )
        url = chosen_url(run_dir.path, run_id_of(load_config(backup.config_file), run_dir), options)
        is_inside = url == sqlite_url(run_dir.path)
        with closing(ReadOnlyStore(backup.database_file)) as store:
            commits = store.checkpoints()
            restored = RunDir(path=part)
            copied = _copy_checkpoints(backup.checkpoints, commits, restored.checkpoints)
            if commits and not copied:
                raise ConfigError(
                    f"restore: {backup.path} has no checkpoint that can be read; use another backup"
                )
            _copy_files(backup, restored)
            copy_run(store, sqlite_url(part) if is_inside else url)
        if not is_inside:
            record(restored.store_file, url)
    newest = copied[0] if copied else "none"
    return (
        f"restored {run_dir.path} with its database in {shown(url)}: {len(copied)} checkpoints, "
        f"newest {newest}; continue with --resume {run_dir.path}"
    )


def _copy_checkpoints(source: Path, commits: list[Checkpoint], target: Path) -> list[str]:
    """Copy the checkpoints, except missing and damaged ones; return the names of the copies."""
    copied = []
    target.mkdir()
    for commit in commits:
        directory = target / commit.directory
        try:
            shutil.copytree(source / commit.directory, directory)
            check_files(directory)
        except (OSError, CheckpointError) as error:
            shutil.rmtree(directory, ignore_errors=True)
            is_gone = not (source / commit.directory).is_dir()
            if not is_gone and not isinstance(error, CheckpointError):
                raise
        else:
            copied.append(commit.directory)
    return copied


def state_files(run_dir: RunDir) -> dict[str, Path]:
    """Return the small files that a run needs, such as the configuration and the tiny model.

    The keys are the paths in the run's directory. The files of the database, of the checkpoints and
    of the journal are left out.
    """
    files = [run_dir.config_file, run_dir.sources_file, run_dir.secret_file]
    for directory in (run_dir.tiny_model, run_dir.functions):
        files += sorted(directory.rglob("*"))
    return {str(file.relative_to(run_dir.path)): file for file in files if file.is_file()}


def _copy_files(source: RunDir, target: RunDir) -> None:
    for name, file in state_files(source).items():
        copy = target.path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)
    if source.journal.is_dir():
        target.journal.mkdir()
        # Oldest first, because a run that trains may remove the oldest steps meanwhile.
        for file in sorted(source.journal.iterdir()):
            if file.is_file():
                try:
                    shutil.copy2(file, target.journal)
                except FileNotFoundError:
                    continue


@contextmanager
def _new_directory(directory: Path, *, command: str) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `directory` if the `with` block succeeds."""
    if os.path.lexists(directory):
        raise ConfigError(
            f"{command}: {directory} exists, expected a new directory; choose another"
        )
    part = directory.with_name(f"{directory.name}.part")
    names = {each.name for each in part.iterdir()} if part.is_dir() else set()
    if others := [name for name in names - _NAMES if not name.startswith(DATABASE)]:
        raise ConfigError(
            f"{command}: {part} contains {min(others)}, which this command did not write; expected "
            "no such directory, or what an interrupted command left; rename it, or choose another "
            "directory"
        )
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(directory)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextmanager
def _refused(command: str) -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise ConfigError(f"{command}: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise ConfigError(
            f"{command}: {error.filename or 'a file'} cannot be read or written "
            f"({error.strerror or error}); expected readable files, and a writable directory with "
            "enough space; correct it, or choose another directory"
        ) from error
