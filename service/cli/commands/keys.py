"""The commands `keys create`, `keys list` and `keys revoke`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.access.keys import KeyLimits, Scope
from service.config.file import ConfigError

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

    The command also works while the run is running. The default of each limit is that of
    service.key_limits.
    """
    from service.cli.keys import create

    limits = KeyLimits(
        requests_per_s=requests_per_s,
        max_waiting_tasks=max_waiting_tasks,
        max_open_sessions=max_open_sessions,
        turns_per_minute=turns_per_minute,
    )
    # Print nothing but the key, so that other programs can read it.
    place, name = _run_and_name(run_and_name, run)
    typer.echo(create(place, name=name, scope=scope, tenant=tenant, limits=limits))


@app.command("list")
def keys_list(
    target: Annotated[Path | None, typer.Argument(metavar="RUN", help="a run's directory")] = None,
    run: RunOption = None,
) -> None:
    """List the names and limits of a run's keys, including revoked keys."""
    from service.cli.keys import listing

    if (place := target or run) is None or (target and run):
        raise ConfigError("keys list: expected one run's directory; name one")
    typer.echo(listing(place))


@app.command("revoke")
def keys_revoke(run_and_name: RunAndName, run: RunOption = None) -> None:
    """Revoke a key permanently, and the keys of the sessions that it created.

    A running service refuses these keys after at most three seconds.
    """
    from service.cli.keys import revoke

    place, name = _run_and_name(run_and_name, run)
    typer.echo(revoke(place, name=name))


def _run_and_name(words: list[str], run: Path | None) -> tuple[Path, str]:
    """Return the run's directory and the key's name.

    words: the arguments of the command. run: the value of --run. Raises: ConfigError if these are
    not exactly a directory and a name.
    """
    given = [*([str(run)] if run else []), *words]
    if len(given) != 2:
        raise ConfigError(
            f"keys: got {' '.join(given)}, expected a run's directory and the name of a key, such "
            "as `rayloom keys create runs/NAME ci`"
        )
    return Path(given[0]), given[1]
