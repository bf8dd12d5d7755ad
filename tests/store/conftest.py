"""A store of either kind, for tests of what both promise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds.postgresql_server import PASSWORD, PostgresqlServer
from worlds.store_builders import OpenStore

from service.store.place import schema_name
from service.store.run_store import RunStore


@pytest.fixture(params=["sqlite", "postgresql"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenStore]:
    """Opens a store; the same one for the same directory. All are closed at the end."""
    stores: list[RunStore] = []
    server: PostgresqlServer | None = None
    if request.param == "postgresql":
        server = request.getfixturevalue("postgresql_server")
        monkeypatch.setenv("PGPASSWORD", PASSWORD)

    def open_one(directory: Path) -> RunStore:
        place = f"sqlite:///{directory / 'run.db'}"
        if server is not None:
            place = server.store_url(schema_name(str(directory)))
        stores.append(RunStore(place, patience_s=5.0))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()
