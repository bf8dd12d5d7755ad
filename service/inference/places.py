"""Where Ray keeps what belongs to one session, and where in it an engine keeps its own files.

vLLM leaves sockets and rendezvous files in the system's temporary directory, more with each kill.
In a directory of the session they are told apart from those of other runs and go with it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import ray

# An AF_UNIX path has at most 107 bytes; vLLM names its sockets by a UUID.
MAX_DIRECTORY_BYTES = 107 - len("/") - 36


def session_directory() -> Path:
    """The directory of the Ray session that this process has joined, on this machine."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name()


def make_engine_directory(parent: Path, name: str) -> Path:
    """Make the directory of one engine's sockets and temporary files in `parent`.

    Where the path would be too long for a socket it lies in the system's temporary directory.
    """
    directory = parent / f"engine-{name}"
    if len(str(directory).encode()) > MAX_DIRECTORY_BYTES:
        return Path(tempfile.mkdtemp(prefix="rayloom-"))
    directory.mkdir(parents=True)
    return directory
