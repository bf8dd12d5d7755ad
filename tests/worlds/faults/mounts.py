"""File systems that a test mounts; they need root and a kernel that supports them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from worlds.checks.missing_tools import skip_or_fail

_READ_ONLY, _REMOUNT, _DETACH = 1, 32, 2
# The mount belongs to another user. The kernel then reports its type without asking the daemon,
# which does not exist.
_FUSE_OPTIONS = "fd={},rootmode=40000,user_id=12345,group_id=12345"


@contextlib.contextmanager
def fuse_mount(directory: Path) -> Iterator[None]:
    """Mount a FUSE file system without a daemon on an existing directory."""
    _need_root("/dev/fuse")
    device = os.open("/dev/fuse", os.O_RDWR)
    try:
        with _mounted(directory, kind="fuse", options=_FUSE_OPTIONS.format(device)):
            yield
    finally:
        os.close(device)


@contextlib.contextmanager
def small_disk(directory: Path, *, kib: int) -> Iterator[None]:
    """Mount a file system of this size on an existing directory."""
    _need_root("/proc/self/mounts")
    with _mounted(directory, kind="tmpfs", options=f"size={kib}k"):
        yield


def make_read_only(directory: Path) -> None:
    """Make a small disk read-only; no file on it may be open for writing."""
    libc = ctypes.CDLL(None, use_errno=True)
    where = os.fsencode(directory)
    if libc.mount(b"test", where, b"tmpfs", _REMOUNT | _READ_ONLY, None) != 0:
        skip_or_fail(f"cannot be made read-only: {os.strerror(ctypes.get_errno())}")


def fill(file: Path) -> None:
    """Write until the disk is full."""
    with file.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"\0" * 4096)
        except OSError as error:
            assert error.errno == errno.ENOSPC


@contextlib.contextmanager
def _mounted(directory: Path, *, kind: str, options: str) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    where = os.fsencode(directory)
    if libc.mount(b"test", where, kind.encode(), 0, options.encode()) != 0:
        # Even root may be forbidden to mount in a container.
        skip_or_fail(f"{kind} cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(where, _DETACH)


def _need_root(device: str) -> None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or not os.path.exists(device):
        skip_or_fail(f"mounting needs Linux, root and {device}")
