"""A writer of torch checkpoints that computes the digest of each file while writing.

Invariant: a digest is computed from the bytes that the writer passes to the file system, not from
the bytes that the file system has stored.
Called by `sharded_model`, in the thread that writes.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

if TYPE_CHECKING:
    from typing_extensions import Buffer


class DigestingWriter(FileSystemWriter):
    """A writer of one rank's files that computes their digests.

    digests: SHA-256 of each file that this rank has written, by the file's name. seconds: time
    spent on computing the digests.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = self._files = _DigestingFiles()

    @property
    def digests(self) -> dict[str, str]:
        return self._files.digests

    @property
    def seconds(self) -> float:
        return self._files.seconds


class _DigestingFiles(FileSystem):
    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.seconds = 0.0

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            digesting = _DigestingStream(stream)
            yield digesting
        self.digests[Path(path).name] = digesting.digest.hexdigest()
        self.seconds += digesting.seconds

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _DigestingStream(io.RawIOBase):
    """A stream that writes its bytes to another stream and computes their digest."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.digest = sha256()
        self.seconds = 0.0

    def write(self, data: Buffer) -> int:
        began = time.monotonic()
        self.digest.update(data)
        self.seconds += time.monotonic() - began
        return self._raw.write(data)

    def tell(self) -> int:
        return self._raw.tell()

    def fileno(self) -> int:
        return self._raw.fileno()

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()

    def close(self) -> None:
        self._raw.close()
        super().close()
