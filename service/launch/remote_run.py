"""Upload a run's checkpoints to `run.checkpoint_url`, and restore a run from there.

The address has one directory for each uploaded checkpoint, called a copy (`service.remote_files`).
A copy has all that a run needs to continue: the checkpoint, the database at the time of the upload,
and the run's small files. A run never replaces or removes a copy of another run, or of another
process that has continued the run elsewhere. A copy is removed only after the newest checkpoint is
complete at the address.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.trainer.checkpoint import MANIFEST, check_files
from service.config.file import ConfigError
from service.config.tree import Config
from service.launch.backup import restore, state_files
from service.launch.resume import chosen_commits
from service.launch.run_dir import RunDir
from service.remote_files import Marker, RemoteDirectory, RemoteError, measured
from service.store.errors import StoreError
from service.store.lineage import Checkpoint, lease_digests
from service.store.moving import copy_run
from service.store.place import DATABASE, StoreOptions, sqlite_url
from service.store.read_only import ReadOnlyStore

# A copy has the name of its checkpoint's directory, which begins with this text.
_PREFIX = "step-"


class NotThisRun(RemoteError):
    """Raised if the address has checkpoints that another run has uploaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """The result of the upload of one checkpoint."""

    commit: Checkpoint
    num_bytes: int
    """Number of sent bytes; files that are already at the address are not sent again."""


def upload_next(
    run_dir: RunDir,
    url: str,
    *,
    keep: int,
    keep_best: int,
    begin: Callable[[str], None] = lambda directory: None,
) -> Upload | None:
    """Upload the newest checkpoint that the address lacks, and remove copies that are not kept.

    Args: keep, keep_best: which checkpoints to keep, as for `resume.kept_commits`. begin: called
        with the checkpoint's name before its files are read.
    Returns: the upload; None if the address has all checkpoints that are kept.
    Raises: RemoteError; NotThisRun; StoreError; CheckpointError; OSError for a local file.
    """
    remote = RemoteDirectory(url)
    with run_dir.looked_into() as store:
        leases = lease_digests(store)
        # No collapse is passed, because the database has only the milestones that the run keeps.
        kept = chosen_commits(store, keep=keep, keep_best=keep_best)
    copies = _copies(remote)
    _check_own(remote, copies, leases)
    uploaded = None
    if missing := [commit for commit in kept if not _is_copied(run_dir, commit, copies)]:
        uploaded = _upload(run_dir, remote, missing[0], begin=begin)
    newest = kept[0].directory if kept else ""
    if newest in copies or (uploaded is not None and uploaded.commit.directory == newest):
        names = {commit.directory for commit in kept}
        for name in _candidates(remote):
            if name not in names:
                remote.child(name).remove()
    return uploaded


def check_address(config: Config, run_dir: RunDir | None = None) -> None:
    """Check that a run may upload its checkpoints to `run.checkpoint_url`, if that is set.

    Args: run_dir: directory of the run that resumes; None for a new run. Raises: ConfigError.
    """
    if (url := config.run.checkpoint_url) is None:
        return
    leases: Mapping[int, str] = {}
    try:
        if url.startswith("memory:"):
            raise RemoteError(
                f"got {url}, which is lost when the process ends; expected an address of lasting "
                "storage, such as s3:// or file://"
            )
        if run_dir is not None:
            with run_dir.looked_into(may_be_older=True) as store:
                leases = lease_digests(store)
        remote = RemoteDirectory(url)
        copies = _copies(remote)
        _check_own(remote, copies, leases)
        if not copies and (unknown := _unknown(remote, leases)):
            # The directory could be a checkpoint of another run, which an upload would remove.
            raise RemoteError(
                f"{url} has {unknown}, which this run has not written, but no complete copy; "
                "expected an address that only this run uses; choose another one, or delete the "
                "rest of an interrupted upload"
            )
        remote.check_writable()
    except (RemoteError, StoreError) as error:
        raise ConfigError(f"run.checkpoint_url: {error}") from error


def fetch_missing(config: Config, run_dir: RunDir, *, tell: Callable[[str], None]) -> None:
    """Restore the run from `run.checkpoint_url` if its directory is missing or empty.

    Do nothing if the setting is not given. Args: tell: called with a sentence on what is done.
    Raises: ConfigError.
    """
    url = config.run.checkpoint_url
    if url is None or (run_dir.path.exists() and any(run_dir.path.iterdir())):
        return
    tell(f"rayloom: {run_dir.path} has no run; reading its copy at {url}")
    tell(f"rayloom: {fetch_run(url, run_dir, StoreOptions(), tell=tell)}")


def fetch_run(
    url: str, run_dir: RunDir, options: StoreOptions, *, tell: Callable[[str], None]
) -> str:
    """Restore a run from the newest usable copy of a checkpoint at an address.

    Args: url: the `run.checkpoint_url` of the run, or the address of one copy in it. run_dir: the
        directory to create; it may exist if it is empty. options: where to put the run's database,
        as for a new run. tell: called with a sentence for each copy that cannot be used.
    Returns: a sentence for the user on what was restored. Raises: ConfigError.
    """
    try:
        remote = RemoteDirectory(url)
        with _local_copy(remote, run_dir, tell=tell) as backup:
            if run_dir.path.is_dir() and not any(run_dir.path.iterdir()):
                run_dir.path.rmdir()
            return restore(backup, run_dir, options)
    except RemoteError as error:
        raise ConfigError(f"restore: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"restore: {error.filename or run_dir.path} cannot be written "
            f"({error.strerror or error}); expected a writable directory with enough space"
        ) from error


@contextmanager
def _local_copy(
    remote: RemoteDirectory, run_dir: RunDir, *, tell: Callable[[str], None]
) -> Iterator[RunDir]:
    """Download the newest undamaged copy, and yield the temporary directory that has it."""
    copies = [remote] if remote.read() is not None else _newest_first(remote)
    if not copies:
        raise RemoteError(
            f"{remote.url} has no complete copy of a checkpoint, expected at least one; correct "
            "the address, or start a new run"
        )
    run_dir.path.parent.mkdir(parents=True, exist_ok=True)
    # Download to the disk of the run's directory, which must have the space anyway.
    with tempfile.TemporaryDirectory(
        prefix=f".{run_dir.path.name}-", dir=run_dir.path.parent
    ) as place:
        for number, copy in enumerate(copies, start=1):
            directory = Path(place) / str(number)
            try:
                copy.download(directory)
            except RemoteError as error:
                if number == len(copies):
                    raise
                tell(f"{error}; trying an older copy")
                shutil.rmtree(directory, ignore_errors=True)
            else:
                yield RunDir(path=directory)
                return


def _candidates(remote: RemoteDirectory) -> Iterator[str]:
    """Return the names of the copies at the address, complete or not."""
    return (name for name in remote.children() if name.startswith(_PREFIX))


def _copies(remote: RemoteDirectory) -> dict[str, Marker]:
    markers = {name: remote.child(name).read() for name in _candidates(remote)}
    return {name: marker for name, marker in markers.items() if marker is not None}


def _newest_first(remote: RemoteDirectory) -> list[RemoteDirectory]:
    copies = _copies(remote)
    names = sorted(copies, key=lambda name: int(copies[name].note["commit"]), reverse=True)
    return [remote.child(name) for name in names]


def _check_own(
    remote: RemoteDirectory, copies: Mapping[str, Marker], leases: Mapping[int, str]
) -> None:
    """Raise NotThisRun if a copy at the address was made by another run.

    Another process that has continued this run elsewhere counts as another run.
    copies: the marker of each copy, by the copy's name. leases: this run's `lease_digests`.
    """
    for name, marker in copies.items():
        if not _is_own(marker, leases):
            note = marker.note
            raise NotThisRun(
                f"{remote.url} has the checkpoint {name} of term {note.get('term')} of the run "
                f"{note.get('run')}, which this run has not written: another run uses the "
                "address, or another process has continued this run elsewhere; expected one "
                "address for each run: choose another run.checkpoint_url, or continue that run "
                "by `rayloom restore`"
            )


def _unknown(remote: RemoteDirectory, leases: Mapping[int, str]) -> str | None:
    """Return the name of a checkpoint in `remote` that this run did not upload, or None.

    Call this only if every upload in `remote` is unfinished. leases: this run's `lease_digests`.
    """
    for name in _candidates(remote):
        unfinished = remote.child(name).read_unfinished()
        if unfinished is None or not _is_own(unfinished, leases):
            return name
    return None


def _is_own(marker: Marker, leases: Mapping[int, str]) -> bool:
    lease = marker.note.get("lease")
    return lease is not None and leases.get(marker.note.get("term", 0)) == lease


def _is_copied(run_dir: RunDir, commit: Checkpoint, copies: Mapping[str, Marker]) -> bool:
    """Return whether a checkpoint has a copy, or has no files on this machine to upload."""
    manifest = run_dir.checkpoints / commit.directory / MANIFEST
    if not manifest.is_file():
        # It was lost on this machine, or its copy was not downloaded.
        return True
    copy = copies.get(commit.directory)
    name = str(manifest.relative_to(run_dir.path))
    return copy is not None and copy.files.get(name) == measured(manifest)


def _upload(
    run_dir: RunDir,
    remote: RemoteDirectory,
    commit: Checkpoint,
    *,
    begin: Callable[[str], None],
) -> Upload:
    begin(commit.directory)
    checkpoint = run_dir.checkpoints / commit.directory
    # Files that the local disk has damaged must not be copied.
    check_files(checkpoint)
    files = state_files(run_dir)
    for file in sorted(checkpoint.rglob("*")):
        if file.is_file():
            files[str(file.relative_to(run_dir.path))] = file
    with tempfile.TemporaryDirectory(prefix="rayloom-upload-") as place:
        database = Path(place) / DATABASE
        with run_dir.looked_into() as store:
            copy_run(store, sqlite_url(Path(place)))
        with closing(ReadOnlyStore(sqlite_url(Path(place)))) as copied:
            leases = lease_digests(copied)
        term = max(leases)
        note = {
            "run": run_dir.path.name,
            "commit": commit.id,
            "step": commit.step,
            "term": term,
            "lease": leases[term],
        }
        num_bytes = remote.child(commit.directory).upload({**files, DATABASE: database}, note=note)
    return Upload(commit=commit, num_bytes=num_bytes)
