"""The program that unpacks a repository's archive: `unpack.py ARCHIVE DIRECTORY BYTES ENTRIES`.

Invariant: the program makes regular files and directories below DIRECTORY, and writes nowhere else.
Names are checked before anything is written. The whole archive is refused if an entry leads
outside, occurs twice or exceeds a limit. Limits apply to the unpacked bytes, not to the declared
ones. Links, devices and git's own directory are left out. The output is one line of JSON: `files`,
`left_out` and `bytes`, or `refused`. The program is confined like the tools (`sandbox`), except
that it may write. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO

from actors.environment.plugins.code_search.sandbox import NotConfined, confine
from actors.environment.plugins.code_search.tree import HIDDEN, MAX_DEPTH, MAX_PATH_CHARS

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")
MEMORY_BYTES = 768 * 2**20
CPU_S = 120
_CHUNK_BYTES = 2**18
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Refused(Exception):
    """Raised if an archive must not be unpacked; the text says why."""


_Entry = tuple[str, IO[bytes] | None]
"""The name of an entry, and its content; the content is None for a directory."""


def unpack(archive: str, directory: str, *, max_bytes: int, max_entries: int) -> dict[str, int]:
    """Unpack an archive into an empty directory.

    Args:
        max_bytes: Maximum size of all files together, unpacked.
        max_entries: Maximum number of files, directories and other entries.

    Returns: the number of `files`, of entries that were `left_out`, and of unpacked `bytes`.
    Raises: Refused, OSError.
    """
    target = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    counts = {"files": 0, "left_out": 0, "bytes": 0}
    try:
        with open(archive, "rb") as file:
            made = _of_zip(file) if archive.endswith(".zip") else _of_tar(archive, file, max_bytes)
            for number, entry in enumerate(made, start=1):
                if number > max_entries:
                    raise Refused(f"it holds more than {max_entries} entries")
                if entry is None:
                    counts["left_out"] += 1
                    continue
                name, content = entry
                parts = _parts(name)
                if HIDDEN & set(parts):
                    counts["left_out"] += 1
                    continue
                if content is None:
                    os.close(_directory(target, parts))
                    continue
                counts["bytes"] += _write(target, parts, content, max_bytes - counts["bytes"])
                counts["files"] += 1
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        # zipfile raises RuntimeError for an entry with a password.
        raise Refused(f"it cannot be read ({type(error).__name__}: {error})") from error
    except NotImplementedError as error:
        raise Refused(f"its compression is not supported ({error})") from error
    except (MemoryError, UnicodeError, OverflowError, ValueError) as error:
        raise Refused(f"it cannot be read ({type(error).__name__})") from error
    finally:
        os.close(target)
    return counts


def _of_tar(archive: str, file: IO[bytes], max_bytes: int) -> Iterator[_Entry | None]:
    """Yield each entry, or None for an entry that is neither a file nor a directory."""
    mode = "r|" if archive.endswith(".tar") else "r|gz"
    num_declared = 0
    with tarfile.open(fileobj=file, mode=mode) as tar:  # type: ignore[call-overload]
        for member in tar:
            # An entry that is left out must also be decompressed, to reach the next entry.
            num_declared += max(0, member.size)
            if num_declared > max_bytes:
                raise Refused(f"it holds more than {max_bytes} bytes")
            if member.isdir():
                yield member.name, None
            elif member.isreg() and not member.issparse():
                yield member.name, tar.extractfile(member)
            else:
                yield None
            # tarfile would keep every member in memory, although none is used again.
            tar.members = []


def _of_zip(file: IO[bytes]) -> Iterator[_Entry | None]:
    """Yield each entry, or None for an entry that is neither a file nor a directory."""
    with zipfile.ZipFile(file) as packed:
        for info in packed.infolist():
            # The top four bits hold the type of the file if the archive was made on Unix.
            kind = info.external_attr >> 28
            if info.is_dir():
                yield info.filename, None
            elif kind in (0, 8):
                with packed.open(info) as content:
                    yield info.filename, content
            else:
                yield None


def _parts(name: str) -> tuple[str, ...]:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    is_outside = name.startswith("/") or ".." in parts or "\0" in name or "\\" in name
    if is_outside or len(name) > MAX_PATH_CHARS or len(parts) > MAX_DEPTH:
        raise Refused(f"it holds an entry under the name {name[:100]!r}, which leads outside it")
    return parts


def _directory(target: int, parts: tuple[str, ...]) -> int:
    """Open a directory below `target`; make it if needed. The caller closes the descriptor."""
    current = os.dup(target)
    for part in parts:
        try:
            os.mkdir(part, 0o700, dir_fd=current)
        except FileExistsError:
            pass
        try:
            below = os.open(
                part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current
            )
        except NotADirectoryError:
            raise Refused(
                f"it holds {'/'.join(parts)[:100]!r} as a file and as a directory"
            ) from None
        finally:
            os.close(current)
        current = below
    return current


def _write(target: int, parts: tuple[str, ...], content: IO[bytes], room: int) -> int:
    """Write a file; return its size in bytes. Raises: Refused if the size exceeds `room`."""
    if not parts:
        raise Refused("it holds a file without a name")
    directory = _directory(target, parts[:-1])
    try:
        file = os.open(parts[-1], _MAKE, 0o600, dir_fd=directory)
    except (FileExistsError, IsADirectoryError):
        raise Refused(f"it holds {'/'.join(parts)[:100]!r} twice") from None
    finally:
        os.close(directory)
    num_bytes = 0
    try:
        while chunk := content.read(_CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > room:
                raise Refused("it unpacks to more bytes than max_repository_mib allows")
            while chunk:
                chunk = chunk[os.write(file, chunk) :]
    finally:
        os.close(file)
    return num_bytes


def main(archive: str, directory: str, max_bytes: str, max_entries: str) -> None:
    """Confine this process, unpack the archive, and print the result as one line of JSON."""
    limits = {"max_bytes": int(max_bytes), "max_entries": int(max_entries)}
    try:
        confine(memory_bytes=MEMORY_BYTES, cpu_s=CPU_S, file_bytes=limits["max_bytes"])
        counts = unpack(archive, directory, **limits)
        found: dict[str, object] = dict(counts)
    except Refused as error:
        found = {"refused": str(error)}
    except (NotConfined, OSError) as error:
        found = {"failure": f"{type(error).__name__}: {error}"}
    os.write(1, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
