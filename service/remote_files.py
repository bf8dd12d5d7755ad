"""Read and write directories at fsspec addresses, such as s3://bucket/run.

A directory is complete if it has the object `complete.json`, which names every other file with its
size and SHA-256. Invariants: this marker is written last and removed first. An interrupted upload
continues with the missing files. Downloaded bytes are compared with the marker. Each file system's
package finds its credentials in its own usual places.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import split_protocol, url_to_fs

MARKER = "complete.json"
# Object that lists the files of an unfinished upload that are already at the address.
_PROGRESS = "uploading.json"
_FORMAT = 1
_READ_BYTES = 2**22
# Extra of Rayloom, by protocol, that installs the package that fsspec needs.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
# Protocols of this machine's own files, whose addresses have no host.
_LOCAL = ("file", "local")


class RemoteError(Exception):
    """Raised if an address cannot be opened, read or written.

    Also raised if a file there has another size or digest than `complete.json` lists.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """The content of `complete.json`: the files of a remote directory, and a note by the writer."""

    files: Mapping[str, tuple[int, str]]
    """Size in bytes and SHA-256 of each file, by its path in the directory."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """Information that the writer adds about the directory, such as the step of a checkpoint."""

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def is_url(text: str) -> bool:
    """Return whether a string is an fsspec address, not a local path or a hub name."""
    return "://" in text


class RemoteDirectory:
    """A directory at an fsspec address. Every method may raise RemoteError."""

    def __init__(self, url: str) -> None:
        """Open an address, without reading or writing there."""
        self.url = url.rstrip("/")
        protocol, path = split_protocol(url)
        if protocol is None or not path.strip("/"):
            raise RemoteError(
                f"got the address {url}, expected one such as s3://bucket/directory; correct it"
            )
        if protocol in _LOCAL and not path.startswith("/"):
            raise RemoteError(
                f"got the address {url}, whose path is relative; expected an absolute one: "
                f"{protocol}://{_absolute(path)}"
            )
        if protocol in _EXTRAS and path.startswith("/"):
            raise RemoteError(
                f"got the address {url}, which names no bucket; expected {protocol}://BUCKET/"
                f"DIRECTORY, such as {protocol}://{path.strip('/')}"
            )
        # Use no caches, because other processes write to the same address.
        options = {"skip_instance_cache": True, "use_listings_cache": False}
        try:
            self._files, root = url_to_fs(self.url, **options)
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            remedy = f"pip install 'rayloom[{extra}]'" if extra else "install that package"
            raise RemoteError(f"{self.url} needs a package ({error}): {remedy}") from error
        except ValueError as error:
            raise RemoteError(
                f"{self.url}: {error}; expected a protocol that fsspec knows, such as s3, gs, file"
            ) from error
        except Exception as error:
            # The package of a protocol may connect at once, or need more than an address.
            raise RemoteError(
                f"{self.url} cannot be opened ({_summary(error)}); expected a server that can be "
                "reached, and a protocol that needs no more than an address; install what "
                f"{protocol} needs, correct the address, or use another protocol, such as s3"
            ) from error
        self._root = str(root).rstrip("/")

    def child(self, name: str) -> RemoteDirectory:
        return RemoteDirectory(f"{self.url}/{name}")

    def children(self) -> list[str]:
        """Return the sorted names of the subdirectories, complete or not."""
        with self._translated("listed"):
            try:
                found = self._files.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
        return sorted(
            PurePosixPath(each["name"]).name for each in found if each["type"] == "directory"
        )

    def read(self) -> Marker | None:
        """Return the content of `complete.json`; None if the directory is not complete."""
        return self._read(MARKER)

    def read_unfinished(self) -> Marker | None:
        """Return what an unfinished upload has recorded: the files sent so far, and its note.

        Return None if no upload is unfinished.
        """
        return self._read(_PROGRESS)

    def upload(self, files: Mapping[str, Path], *, note: Mapping[str, Any]) -> int:
        """Make this directory contain exactly these files; return the number of bytes sent.

        files: the local file for each path in the directory. note: information that is stored in
        `complete.json` with the list of files.
        Raises: OSError if a local file cannot be read.
        """
        wanted = {name: measured(path) for name, path in sorted(files.items())}
        before = self._read(MARKER)
        if before is not None and dict(before.files) == wanted and dict(before.note) == dict(note):
            return 0
        done = before or self._read(_PROGRESS) or Marker(files={})
        there = {name: entry for name, entry in done.files.items() if wanted.get(name) == entry}
        self._write(_PROGRESS, Marker(files=there, note=note))
        # Delete the marker first, then the files that change or are not wanted.
        self._delete(MARKER, *(done.files.keys() - there.keys()))
        num_sent = 0
        for name, (size, digest) in wanted.items():
            if name in there and self._size_of(name) == size:
                continue
            there.pop(name, None)
            with self._translated("written"):
                self._make_parent(name)
                self._files.put_file(str(files[name]), self._path(name))
            num_sent += size
            there[name] = (size, digest)
            self._write(_PROGRESS, Marker(files=there, note=note))
        self._write(MARKER, Marker(files=wanted, note=note))
        self._delete(_PROGRESS)
        return num_sent

    def download(self, directory: Path) -> Marker:
        """Download all files into a local directory, and return the content of `complete.json`.

        The size and digest of each file are compared with those in `complete.json`.
        Raises: OSError if a local file cannot be written.
        """
        marker = self.read()
        if marker is None:
            raise RemoteError(
                f"{self.url} has no {MARKER}, expected a complete upload; correct the address, or "
                "wait until the upload has ended"
            )
        for name, expected in marker.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._translated("read"):
                self._files.get_file(self._path(name), str(path))
            if (found := measured(path)) != expected:
                raise RemoteError(
                    f"{self.url}/{name}: got {found[0]} bytes with sha256 {found[1][:12]}…, "
                    f"expected {expected[0]} with {expected[1][:12]}…; something has changed the "
                    "object: use an older upload"
                )
        return marker

    def listing(self) -> dict[str, str]:
        """Return a fingerprint of each file, by the file's path in the directory.

        The directory may be incomplete. A fingerprint is the file's size and, if the file system
        lists one, an entity tag, an MD5 digest or a time. Example: {"config.json": "512 9b2c"}
        """
        with self._translated("listed"):
            found = self._files.find(self._root, detail=True)
        texts = {}
        for path, info in found.items():
            tag = next(
                (info[key] for key in ("ETag", "md5Hash", "mtime", "created") if key in info), ""
            )
            texts[str(path).removeprefix(f"{self._root}/")] = f"{info['size']} {tag}"
        return texts

    def copy(self, directory: Path, names: Iterable[str]) -> None:
        """Download the files `names` into a local directory, and check only their sizes.

        Raises: OSError if a local file cannot be written.
        """
        for name in names:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._translated("read"):
                self._files.get_file(self._path(name), str(path))
            if path.stat().st_size != self._size_of(name):
                raise RemoteError(f"{self.url}/{name} changed while it was read; try again")

    def remove(self) -> None:
        """Remove `complete.json`, and then the whole directory."""
        self._delete(MARKER)
        with self._translated("removed"), suppress(FileNotFoundError):
            self._files.rm(self._root, recursive=True)

    def check_writable(self) -> None:
        """Check that a file can be written, read and removed at the address."""
        name, content = ".rayloom-check", b"rayloom"
        with self._translated("written"):
            self._make_parent(name)
            self._files.pipe_file(self._path(name), content)
        with self._translated("read"):
            found = self._files.cat_file(self._path(name))
        if found != content:
            raise RemoteError(
                f"{self.url} does not return the bytes that were written; use another address"
            )
        self._delete(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_parent(self, name: str) -> None:
        # Skip this for an object store: it has no directories, and the call might make a bucket.
        if not self._files.async_impl:
            parent = self._path(name).rpartition("/")[0]
            self._files.makedirs(parent, exist_ok=True)

    def _size_of(self, name: str) -> int | None:
        with self._translated("read"):
            try:
                return int(self._files.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def _read(self, name: str) -> Marker | None:
        with self._translated("read"):
            try:
                content = self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None
        try:
            fields = json.loads(content)
            if fields["format"] != _FORMAT:
                raise RemoteError(
                    f"{self.url}/{name}: got format {fields['format']}, expected {_FORMAT}; "
                    "another version of Rayloom wrote it: use that one"
                )
            files = {each: (int(size), str(sha)) for each, (size, sha) in fields["files"].items()}
            note = dict(fields["note"])
        except (ValueError, TypeError, KeyError, AttributeError):
            # A file system that is no object store may have a part of an interrupted write.
            return None
        for each in files:
            path = PurePosixPath(each)
            if path.is_absolute() or ".." in path.parts:
                raise RemoteError(
                    f"{self.url}/{name} names the path {each}, expected a relative one; something "
                    "has changed the object: use an older upload"
                )
        return Marker(files=files, note=note)

    def _write(self, name: str, marker: Marker) -> None:
        content = {"format": _FORMAT, "files": dict(marker.files), "note": dict(marker.note)}
        with self._translated("written"):
            self._make_parent(name)
            self._files.pipe_file(self._path(name), json.dumps(content, indent=1).encode())

    def _delete(self, *names: str) -> None:
        for name in names:
            with self._translated("removed"), suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Each file system raises the errors of its own packages.
            raise RemoteError(
                f"{self.url} cannot be {what} ({_summary(error)}); expected a bucket or directory "
                "that exists, and credentials that may list, read, write and delete there; correct "
                "the address or the credentials"
            ) from error


def _summary(error: Exception) -> str:
    first_line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first_line[:200]}"


def _absolute(path: str) -> str:
    """Return an absolute path to suggest to a user who wrote a file URL with a relative path.

    Examples: localhost/a -> /a; data/a -> /data/a
    """
    first, _, rest = path.partition("/")
    if first == "localhost":
        return f"/{rest}"
    if first in (".", ".."):
        return os.path.abspath(path)
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        # The user is not known.
        return "/DIRECTORY"
    return expanded if expanded.startswith("/") else f"/{path}"


def measured(file: Path) -> tuple[int, str]:
    """Return the size and the SHA-256 of a local file. Raises: OSError."""
    digest, size = sha256(), 0
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()
