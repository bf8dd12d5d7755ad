"""Where an engine's sockets lie: with its session, unless their paths would not fit."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest

from service.inference.places import MAX_DIRECTORY_BYTES, make_engine_directory


@pytest.mark.parametrize("room", [0, 1, 40], ids=["just-fits", "one-short", "far-too-long"])
def test_a_socket_fits_whatever_the_length_of_the_session_directory(room: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        length = MAX_DIRECTORY_BYTES - len("/engine-abcdefgh") + room
        parent = Path(top) / ("p" * (length - len(top) - 1))
        parent.mkdir()
        directory = make_engine_directory(parent, "abcdefgh")
        try:
            assert (directory.parent == parent) == (room == 0)
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(directory / str(uuid4())))
            (entry,) = directory.iterdir()
            entry.unlink()
        finally:
            directory.rmdir()
