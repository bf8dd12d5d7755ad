"""Locate the repository of a task: a directory or an archive below a root; unpack an archive once.

Invariant: a repository that a task names is below the root, after links are resolved. Each process
unpacks archives into its own scratch directory. The process locks this directory, and removes it at
its end. Later processes remove the unlocked directories that killed processes have left. If the
unpacked repositories are larger than KEPT_REPOSITORIES times the limit of one, the least recently
used are removed, except those that an episode still uses.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from actors.environment.plugins.code_search.servers import (
    NoAnswer,
    kill,
    read_line,
    signal_group,
    start_program,
)
from actors.environment.plugins.code_search.unpack import SUFFIXES

_PREFIX = "rayloom-code-search-"
_LOCK = "lock"
KEPT_REPOSITORIES = 8
# A directory has no lock while it is made, or if its process died at that moment.
_LOCKLESS_S = 3600.0


class BadRepository(ValueError):
    """Raised if a task's repository cannot be used; the text says what was expected."""


@dataclass(slots=True, kw_only=True)
class _Unpacked:
    """The directory of an archive that is unpacked or being unpacked."""

    directory: Future[str] = field(default_factory=Future)
    num_bytes: int = 0
    num_users: int = 0


_ArchiveKey = tuple[str, int, int, int]


class Repositories:
    """The repositories below one directory; several threads may call the methods."""

    def __init__(
        self, root: str, *, max_bytes: int, max_entries: int, unpack_limit_s: float
    ) -> None:
        """`max_bytes` and `max_entries` limit each archive."""
        self._root = root
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self._unpack_limit_s = unpack_limit_s
        self._lock = threading.Lock()
        self._programs: set[subprocess.Popen[bytes]] = set()
        # In order of use; the most recent is last.
        self._unpacked: OrderedDict[_ArchiveKey, _Unpacked] = OrderedDict()

    def locate(self, name: str) -> str:
        """Return a repository's directory. If it is an archive, block until it is unpacked.

        The directory is kept until `release`. Raises: BadRepository, ServerFailed.
        """
        path = self._path(name)
        if path.is_dir():
            return str(path)
        if not path.is_file() or not str(path).endswith(SUFFIXES):
            raise BadRepository(
                f"repository {name!r}: not found in {self._root}; expected a directory, or an "
                f"archive whose name ends in {', '.join(SUFFIXES)}"
            )
        status = path.stat()
        # A replaced archive has another key, so that it is unpacked again.
        key = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        with self._lock:
            is_mine = key not in self._unpacked
            place = self._unpacked.setdefault(key, _Unpacked())
            place.num_users += 1
            self._unpacked.move_to_end(key)
        if is_mine:
            try:
                directory, place.num_bytes = self._unpack(path, name)
            except BaseException as error:
                with self._lock:
                    # Allow another attempt: this one may have lacked space or time.
                    del self._unpacked[key]
                place.directory.set_exception(error)
                raise
            place.directory.set_result(directory)
            self._make_room()
        return place.directory.result()

    def release(self, directory: str) -> None:
        """Release a directory that `locate` returned, so that it may be removed."""
        with self._lock:
            for place in self._unpacked.values():
                if place.directory.done() and place.directory.result() == directory:
                    place.num_users -= 1

    def stop(self) -> None:
        """Abort all unpacking."""
        with self._lock:
            for program in self._programs:
                signal_group(program)

    def _make_room(self) -> None:
        most = KEPT_REPOSITORIES * self._max_bytes
        removed = []
        with self._lock:
            held = sum(place.num_bytes for place in self._unpacked.values())
            for key, place in list(self._unpacked.items()):
                if held <= most:
                    break
                if not place.num_users:
                    del self._unpacked[key]
                    removed.append(place.directory.result())
                    held -= place.num_bytes
        for directory in removed:
            shutil.rmtree(directory, ignore_errors=True)

    def _path(self, name: str) -> Path:
        root = Path(self._root).expanduser().resolve()
        if not root.is_dir():
            raise BadRepository(
                f"tasks.options.root: {root} is not a directory; expected the directory of the "
                "tasks' repositories, on every node that plays"
            )
        parts = name.split("/")
        if not name or name.startswith("/") or ".." in parts or "\0" in name:
            raise BadRepository(
                f"repository {name!r}: expected a path relative to the root that the run's "
                "configuration gives, without .."
            )
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise BadRepository(f"repository {name!r}: a link leads outside of {root}")
        return path

    def _unpack(self, path: Path, name: str) -> tuple[str, int]:
        """Unpack an archive; return its directory, and the number of bytes in it."""
        directory = tempfile.mkdtemp(dir=scratch())
        limits = str(self._max_bytes), str(self._max_entries)
        program = start_program("code_search.unpack", (str(path), directory, *limits))
        with self._lock:
            self._programs.add(program)
        try:
            found = read_line(program, limit_s=self._unpack_limit_s)
        except NoAnswer as error:
            found = {"refused": f"unpacking it failed: {error}"}
        finally:
            with self._lock:
                self._programs.discard(program)
            kill(program)
        problem = found.get("refused") or found.get("failure")
        if problem is not None:
            shutil.rmtree(directory, ignore_errors=True)
            raise BadRepository(f"repository {name!r}: the archive is refused: {problem}")
        return directory, found["bytes"]


_scratch: tuple[str, int, int] | None = None
_scratch_lock = threading.Lock()


def scratch() -> str:
    """Return this process's directory for unpacked archives; make it in the first call."""
    global _scratch
    with _scratch_lock:
        # A forked child has its parent's memory, but no right to its directory.
        if _scratch is None or _scratch[2] != os.getpid() or not os.path.isdir(_scratch[0]):
            _sweep(tempfile.gettempdir())
            _scratch = (*_make_scratch(), os.getpid())
            atexit.register(_remove, _scratch[0], os.getpid())
        return _scratch[0]


def _make_scratch() -> tuple[str, int]:
    while True:
        directory = tempfile.mkdtemp(prefix=_PREFIX)
        lock = os.open(os.path.join(directory, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed the directory before it was locked.
            if os.path.exists(os.path.join(directory, _LOCK)):
                return directory, lock
        os.close(lock)


def _sweep(where: str) -> None:
    """Remove the scratch directories that ended processes have left."""
    for entry in os.scandir(where):
        if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        with suppress(OSError):
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                _sweep_one(entry.path)


def _sweep_one(directory: str) -> None:
    try:
        lock = os.open(os.path.join(directory, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - os.stat(directory).st_mtime > _LOCKLESS_S:
            shutil.rmtree(directory, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


def _remove(directory: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)
