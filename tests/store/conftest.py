"""Fixtures with a store on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from worlds.builders.store_builders import OpenStore
from worlds.servers.postgresql_server import PASSWORD, PostgresqlServer

from service.store.place import schema_name
from service.store.run_store import RunStore


@pytest.fixture(params=["sqlite", "postgresql"])
def place_of(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], str]:
    """Return a function that returns the URL of the store of a directory."""
    server: PostgresqlServer | None = None
    if request.param == "postgresql":
        server = request.getfixturevalue("postgresql_server")
        monkeypatch.setenv("PGPASSWORD", PASSWORD)

    def find(directory: Path) -> str:
        if server is not None:
            return server.store_url(schema_name(str(directory)))
        return f"sqlite:///{directory / 'run.db'}"

    return find


@pytest.fixture
def opened(place_of: Callable[[Path], str]) -> Iterator[OpenStore]:
    """Return a function that opens the store of a directory; the fixture closes all of them."""
    stores: list[RunStore] = []

    def open_one(directory: Path) -> RunStore:
        stores.append(RunStore(place_of(directory), patience_s=5.0))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()
