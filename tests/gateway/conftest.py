"""A server with scripted replies in all dialects, shared by the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds.parts.dialect_server import DialectServer, speaking


@pytest.fixture(scope="session")
def dialect_server() -> Iterator[DialectServer]:
    with speaking() as server:
        yield server
