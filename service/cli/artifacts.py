"""The commands that write files and then end: `export`, `move` and `tasks`.

Each function returns a sentence that describes what it wrote. The functions import the packages
that take seconds to import, so that invalid arguments are refused at once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from actors.environment.builtin.reasoning_gym_env import generate_tasks
from actors.environment.plugins.code_search.from_git import QuestionSource, tasks_of_repository
from actors.environment.registry import UnknownEnvironment, resolve
from actors.environment.tasks import BadTaskFile, GeneratedTasks, write_tasks
from actors.trainer.checkpoint import MANIFEST, CheckpointError, Progress, has_digests
from actors.types import Dtype
from service.cli.outlet import say
from service.config.file import ConfigError, load_config
from service.launch.resume import newest_complete, newest_usable
from service.launch.run_dir import RunDir, check_no_sft, run_id_of
from service.remote_files import RemoteDirectory, RemoteError
from service.store.errors import LeaseHeld, StoreError
from service.store.lineage import Checkpoint
from service.store.moving import move_run
from service.store.place import StoreOptions, chosen_url, shown, sqlite_file
from service.store.read_only import ReadOnlyStore
from service.store.tables import FORMAT


def export_checkpoint(source: Path, directory: Path, *, only_adapter: bool = False) -> str:
    """Write a checkpoint as a Hugging Face model directory, and return a sentence about it.

    source: directory of a checkpoint or of a run. If it is a run, its newest committed checkpoint
    is written. only_adapter: write only the LoRA adapters, in PEFT's format.
    Raises: ConfigError if the export fails.
    """
    checkpoint = checkpoint_of(source, command="export")
    manifest = export_to(checkpoint, directory, command="export", only_adapter=only_adapter)
    unchecked = "" if has_digests(checkpoint) else "; it has no digests, so its bytes are unchecked"
    return (
        f"{checkpoint.name}: step {manifest.step}, policy version {manifest.version}, in "
        f"{directory}{unchecked}"
    )


def export_to_address(source: Path, url: str, *, only_adapter: bool = False) -> str:
    """Write a checkpoint as a model directory at an fsspec address; return a sentence about it.

    The marker of a complete upload is written last. The same command continues an interrupted
    export. source, only_adapter: see `export_checkpoint`. Raises: ConfigError if the export fails.
    """
    checkpoint = checkpoint_of(source, command="export")
    try:
        remote = RemoteDirectory(url)
        if remote.read() is not None:
            raise RemoteError(
                f"{url} has a complete upload, expected a new directory; choose another"
            )
        remote.check_writable()
        with tempfile.TemporaryDirectory(prefix="rayloom-export-") as place:
            directory = Path(place) / "model"
            manifest = export_to(checkpoint, directory, command="export", only_adapter=only_adapter)
            files = {
                str(file.relative_to(directory)): file
                for file in directory.rglob("*")
                if file.is_file()
            }
            note = {"checkpoint": checkpoint.name, "version": manifest.version}
            remote.upload(files, note=note)
    except (RemoteError, OSError) as error:
        raise ConfigError(f"export: {error}") from error
    return f"{checkpoint.name}: step {manifest.step}, policy version {manifest.version}, in {url}"


def export_to(
    checkpoint: Path,
    directory: Path,
    *,
    command: str,
    dtype: Dtype = Dtype.FLOAT32,
    only_adapter: bool = False,
) -> Progress:
    """Write a checkpoint as a Hugging Face model directory; return the checkpoint's manifest.

    command: name of the command for errors. only_adapter: write the checkpoint's adapters in PEFT's
    format. Raises: ConfigError if the export fails.
    """
    import torch

    from actors.trainer import export

    own_model = RunDir(path=checkpoint.parent.parent).tiny_model
    try:
        return export.export_checkpoint(
            checkpoint,
            directory,
            # A run's directory contains its tiny model; the manifest has the path of another model.
            model=str(own_model) if (own_model / "config.json").is_file() else None,
            dtype=getattr(torch, dtype.value),
            only_adapter=only_adapter,
        )
    except (CheckpointError, FileExistsError, OSError) as error:
        raise ConfigError(f"{command}: {str(error).removeprefix('export: ')}") from error


def checkpoint_of(source: Path, *, command: str) -> Path:
    """Return the directory of a checkpoint, or of a run's newest committed checkpoint.

    command: name of the command for errors. Raises: ConfigError if there is no such checkpoint.
    """
    run_dir = RunDir(path=source)
    if not run_dir.database_file.is_file() and not run_dir.store_file.is_file():
        is_broken = run_dir.path.is_dir() and run_dir.path.name.startswith("step-")
        if not is_broken and not (run_dir.path / MANIFEST).is_file():
            raise ConfigError(
                f"{command}: got {source}, which is not a run or checkpoint; expected a "
                "directory with rayloom.db, as `rayloom train` makes it, or one of its checkpoints"
            )
        return run_dir.path
    try:
        with run_dir.looked_into(any_format=True) as store:
            commits, fault = _commits_in_any_format(store)
        if commits is None:
            newest = newest_complete(run_dir.checkpoints)
        else:
            commit = newest_usable(run_dir.checkpoints, commits)
            newest = None if commit is None else run_dir.checkpoints / commit.directory
    except StoreError as error:
        raise ConfigError(
            f"{command}: {error}; or name one of the checkpoints in {run_dir.checkpoints}"
        ) from error
    if commits is None and newest is not None:
        say(
            f"rayloom: the database of {source} {fault}; took {newest.name}, the newest complete "
            "checkpoint, whose step the run may have undone",
            err=True,
        )
    if newest is None:
        raise ConfigError(
            f"{command}: the run in {source} has no committed checkpoint yet; expected at least "
            "one; let it reach run.checkpoint_every steps"
        )
    return newest


def _commits_in_any_format(store: ReadOnlyStore) -> tuple[list[Checkpoint] | None, str]:
    """Return (checkpoints, "") of a run, or (None, reason) if they cannot be read."""
    number = store.format_number()
    try:
        commits = store.checkpoints()
        return (commits, "") if commits or store.newest_term() else (None, "is empty")
    except StoreError:
        if number == FORMAT:
            raise
        return None, (
            f"is in another format than this Rayloom's {FORMAT}, and its table of checkpoints "
            "cannot be read"
        )


def move(run: Path, options: StoreOptions) -> str:
    """Move a run's database to another place, and return a sentence about it.

    The old database can only be read afterwards. The run begins a new term, so that a process that
    owned the run before has no right to write any more.
    Raises: ConfigError if the move is refused, for example because a live process owns the run.
    """
    run_dir = RunDir(path=run)
    check_no_sft(run_dir, what="move")
    if not run_dir.config_file.is_file():
        raise ConfigError(
            f"move: {run} has no {run_dir.config_file.name}, expected a run's directory; correct it"
        )
    try:
        before = run_dir.database_url
        run_id = run_id_of(load_config(run_dir.config_file), run_dir)
        url = chosen_url(run_dir.path, run_id, options)
        if url == before or _is_same_file(url, before):
            raise ConfigError(f"move: the run is in {shown(url)} already; expected another place")
        if not run_dir.has_run():
            raise ConfigError(f"move: there is no run in {shown(before)}, expected one; correct it")
        term = move_run(before, url, run_dir=run_dir.path, store_file=run_dir.store_file)
    except (StoreError, LeaseHeld) as error:
        raise ConfigError(f"move: {error}") from error
    return (
        f"moved from {shown(before)} to {shown(url)} in term {term}; the old database can only be "
        f"read now; continue with --resume {run}"
    )


def _is_same_file(url: str, other: str) -> bool:
    file, other_file = sqlite_file(url), sqlite_file(other)
    return file is not None and other_file is not None and file.resolve() == other_file.resolve()


def write_reasoning_gym(
    family: str, out: Path, *, count: int, seed: int, options: Sequence[str]
) -> str:
    """Write tasks of a reasoning-gym family, and return a sentence about the file.

    Raises: ConfigError if they cannot be made or written.
    """
    try:
        tasks = generate_tasks(family, count, seed=seed, options=dict(map(_option, options)))
        write_tasks(out, tasks)
    except (BadTaskFile, ImportError, ValueError, TypeError, OSError) as error:
        raise ConfigError(f"tasks reasoning-gym: {error}") from error
    return f"{count} tasks of {family} in {out}"


def write_generated(environment: str, out: Path, *, count: int, seed: int) -> str:
    """Write generated tasks of an environment, and return a sentence about the file.

    Raises: ConfigError if they cannot be made or written.
    """
    try:
        resolve(environment, {})
        source = GeneratedTasks(environment, run_seed=seed)
        write_tasks(out, [source.task(index) for index in range(count)])
    except (BadTaskFile, UnknownEnvironment, ValueError, OSError) as error:
        raise ConfigError(f"tasks generate: {error}") from error
    return f"{count} tasks of {environment} in {out}"


def write_code_search(
    repository: Path, out: Path, *, source: QuestionSource, count: int, max_files: int
) -> str:
    """Write two files: tasks that ask about a git repository, and an archive of its files.

    Returns: a sentence for the user that names both files. Raises: ConfigError if a file cannot be
    made or written.
    """
    archive = out.with_name(f"{out.stem}.tar.gz")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tasks = tasks_of_repository(
            repository, archive, source=source, count=count, max_files=max_files
        )
        write_tasks(out, tasks)
    except (BadTaskFile, ValueError, OSError) as error:
        raise ConfigError(f"tasks code-search: {error}") from error
    return (
        f"{len(tasks)} tasks of code_search in {out}, about {archive}; play them with "
        f"tasks.options.root {out.parent}"
    )


def _option(text: str) -> tuple[str, object]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--option {text!r}: expected KEY=VALUE")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(
            f"--option {key}: got {value!r}, expected a YAML value, such as 3, text or [1, 2]"
        ) from None
