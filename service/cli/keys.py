"""`rayloom keys`: manage the named keys in a run's database, whether or not the run is running."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

from service.access.keys import (
    MAX_KEYS,
    KeyLimits,
    NamedKey,
    Scope,
    check_key,
    digest_of,
    new_key,
)
from service.config.file import ConfigError
from service.launch.run_dir import RunDir
from service.store.controls import add_key, read_keys, revoke_key
from service.store.errors import StoreError
from service.store.run_store import RunStore

PATIENCE_S = 10.0


def create(run: Path, *, name: str, scope: Scope, tenant: str, limits: KeyLimits) -> str:
    """Create a key, and return the key; the run stores only the key's digest.

    Raises: ConfigError if the name is taken, or the run has too many keys.
    """
    try:
        check_key(name, scope, tenant)
    except ValueError as error:
        raise ConfigError(f"keys create: {error}") from error
    raw = new_key()
    key = NamedKey(
        name=name,
        digest=digest_of(raw),
        scope=scope,
        tenant=tenant,
        limits=limits,
        created_at=time.time(),
    )
    with _opened(run) as store:
        if not add_key(store, key):
            raise ConfigError(
                f"keys create: the name {name!r} is or was taken, or the run has its maximum "
                f"of {MAX_KEYS:,} keys; choose another name, or use an existing key"
            )
    return raw


def listing(run: Path) -> str:
    """Return a line for each key. Raises: ConfigError if the run's database cannot be opened."""
    with _opened(run) as store:
        keys = read_keys(store)
    return "\n".join(_line(key) for key in keys) or "the run has no named keys"


def revoke(run: Path, *, name: str) -> str:
    """Revoke a key, and return its line in `listing`.

    Raises: ConfigError if the key does not exist.
    """
    with _opened(run) as store:
        key = revoke_key(store, name)
    if key is None:
        raise ConfigError(
            f"keys revoke: the run has no key with the name {name!r}; see `rayloom keys list`"
        )
    return _line(key)


def _line(key: NamedKey) -> str:
    values = {each.name: getattr(key.limits, each.name) for each in fields(key.limits)}
    limits = [f"{name}={value:g}" for name, value in values.items() if value is not None]
    state = "in force" if key.revoked_at is None else f"revoked {_day(key.revoked_at)}"
    words = [key.name, key.scope.value, key.tenant or "-", f"created {_day(key.created_at)}", state]
    return "  ".join([*words, *limits])


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")


@contextmanager
def _opened(run: Path) -> Iterator[RunStore]:
    """Open a run's database in the block; update an older format if no process holds the run.

    Raises: ConfigError if there is no run, or the database cannot be opened.
    """
    run_dir = RunDir(path=run)
    try:
        if not run_dir.has_run():
            raise ConfigError(
                f"--run {run}: has no run, expected the directory of a run that was started; name "
                "it"
            )
        store = RunStore(run_dir.database_url, patience_s=PATIENCE_S, may_be_older=True)
        try:
            if store.is_older():
                store.move_forward()
            yield store
        finally:
            store.close()
    except StoreError as error:
        raise ConfigError(f"--run {run}: {error}") from error
