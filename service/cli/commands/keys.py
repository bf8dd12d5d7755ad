"""The commands `keys create`, `keys list` and `keys revoke`.

They manage the named keys in a run's database, whether or not the run is running.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from service.access.keys import (
    MAX_KEYS,
    KeyLimits,
    NamedKey,
    Scope,
    check_key,
    digest_of,
    new_key,
)
from service.cli.outlet import EXIT_CUT_OFF, is_output_lost, put, say
from service.config.file import ConfigError
from service.store.controls import add_key, read_keys, revoke_key
from service.store.errors import StoreError
from service.store.run_store import RunStore

PATIENCE_S = 10.0

app = typer.Typer(help="Create, list and revoke keys of a run's API.", no_args_is_help=True)
RunOption = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN_DIR", help="a run's directory, instead of the argument RUN"),
]
RunAndName = Annotated[
    list[str], typer.Argument(metavar="RUN NAME", help="a run's directory, and the key's name")
]


@app.command("create")
def keys_create(
    run_and_name: RunAndName,
    run: RunOption = None,
    tenant: Annotated[
        str, typer.Option(help="tenant whose tasks and sessions a client with this key sees")
    ] = "",
    scope: Annotated[
        Scope, typer.Option(help="an admin may do everything, for every tenant")
    ] = Scope.CLIENT,
    requests_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="maximum number of requests in a second")
    ] = None,
    max_waiting_tasks: Annotated[
        int | None, typer.Option(min=1, help="maximum number of tasks that wait")
    ] = None,
    max_open_sessions: Annotated[
        int | None, typer.Option(min=1, help="maximum number of open sessions")
    ] = None,
    turns_per_minute: Annotated[
        float | None, typer.Option(min=0.001, help="maximum number of turns in a minute")
    ] = None,
) -> None:
    """Create a key for the API of a run, and print it; it cannot be printed again.

    The command also works while the run is running. A limit that is not given is taken from
    service.key_limits.
    """
    place, name = _run_and_name(run_and_name, run)
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
        limits=KeyLimits(
            requests_per_s=requests_per_s,
            max_waiting_tasks=max_waiting_tasks,
            max_open_sessions=max_open_sessions,
            turns_per_minute=turns_per_minute,
        ),
        created_at=time.time(),
    )
    with _opened(place) as store:
        if not add_key(store, key):
            raise ConfigError(
                f"keys create: the name {name!r} is or was taken, or the run has its maximum "
                f"of {MAX_KEYS:,} keys; choose another name, or use an existing key"
            )
    # Print nothing but the key, so that other programs can read it. The run has only its digest.
    put(raw)
    if is_output_lost():
        say(
            f"keys create: the key {name!r} was created, but could not be printed; revoke it with "
            f"`rayloom keys revoke {place} {name}`, and create one with another name",
            err=True,
        )
        raise typer.Exit(EXIT_CUT_OFF)


@app.command("list")
def keys_list(
    target: Annotated[Path | None, typer.Argument(metavar="RUN", help="a run's directory")] = None,
    run: RunOption = None,
) -> None:
    """List the names and limits of a run's keys, including revoked keys."""
    if (place := target or run) is None or (target and run):
        raise ConfigError("keys list: expected one run's directory; name one")
    put(listing(place))


@app.command("revoke")
def keys_revoke(run_and_name: RunAndName, run: RunOption = None) -> None:
    """Revoke a key permanently, and the keys of the sessions that it created.

    A running service refuses these keys after at most three seconds.
    """
    place, name = _run_and_name(run_and_name, run)
    with _opened(place) as store:
        key = revoke_key(store, name)
    if key is None:
        raise ConfigError(
            f"keys revoke: the run has no key with the name {name!r}; see `rayloom keys list`"
        )
    put(_line(key))


def _run_and_name(words: list[str], run: Path | None) -> tuple[Path, str]:
    given = [*([str(run)] if run else []), *words]
    if len(given) != 2:
        raise ConfigError(
            f"keys: got {' '.join(given)}, expected a run's directory and the name of a key, such "
            "as `rayloom keys create runs/NAME ci`"
        )
    return Path(given[0]), given[1]


def listing(run: Path) -> str:
    """Return a line for each key. Raises: ConfigError if the run's database cannot be opened."""
    with _opened(run) as store:
        keys = read_keys(store)
    return "\n".join(_line(key) for key in keys) or "the run has no named keys"


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
    """Open a run's database for the `with` block. If its format is older, migrate it first.

    Raises: ConfigError if it cannot be opened, or if it needs migration while the run is running.
    """
    from service.launch.run_dir import RunDir

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
