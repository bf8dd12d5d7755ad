"""The commands for a service or a cluster that runs: `submit`, `stop` and `nodes`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from service.api.settings import KEY_VARIABLE
from service.cli.commands.configuration import path_option
from service.cli.outlet import put, warn
from service.config.file import ConfigError

app = typer.Typer()
# Largest grace of `stop` in seconds: 31 days.
MAX_GRACE_S = 2_678_400


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="tasks, as .jsonl or .parquet")],
    url: Annotated[
        str, typer.Option(help="address of the service, with the run's prefix")
    ] = "http://127.0.0.1:8000",
    key: Annotated[
        str | None,
        typer.Option(envvar=KEY_VARIABLE, show_envvar=True, help="a key of the service"),
    ] = None,
    results: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="file for the results of the tasks; default: FILE.results"
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="name of a batch, by which these tasks can be listed")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="number of rollouts of each task; default: the run's")
    ] = None,
    tasks_per_request: Annotated[
        int, typer.Option(min=1, max=10_000, help="number of tasks in one request")
    ] = 64,
    wait: Annotated[bool, typer.Option(metavar="", help="wait until all tasks have ended")] = True,
) -> None:
    """Submit the tasks of FILE to a service, and wait until they have ended.

    If the command is interrupted, start it again: no task is submitted twice. Exit codes: 0 if all
    tasks have ended (or were accepted, with --no-wait), 1 if the service does not answer, 2 if the
    service refuses a task.
    """
    from service.cli.submit import submit_file
    from service.client import Client

    try:
        client = Client(url, key=key, tell=warn)
    except ValueError as error:
        raise ConfigError(f"--url: {error}") from error
    results_file = path_option("--results", results, what="a file") or Path(f"{file}.results")
    with client:
        code = submit_file(
            file,
            client,
            results_file=results_file,
            batch=batch,
            num_samples=samples,
            tasks_per_request=tasks_per_request,
            waits=wait,
        )
    raise typer.Exit(code)


@app.command()
def stop(
    target: Annotated[
        str | None, typer.Argument(metavar="RUN", help="a run's directory, or its name")
    ] = None,
    address: Annotated[str, typer.Option(help="address of the Ray cluster")] = "auto",
    run: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="name of a run, instead of RUN; default: all runs"),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=MAX_GRACE_S,
            help="abandon the current step if it is not trained after this time; default: wait for "
            "the step",
        ),
    ] = None,
) -> None:
    """Stop the runs of a cluster after their current step, and wait until they have ended.

    Each run writes a checkpoint, from which --resume continues it. The rollouts of an abandoned
    step are then played again.
    """
    if target is not None and run is not None:
        raise ConfigError(f"stop: got {target} and --run {run}, expected one run; leave one out")
    from service.cli.stop import stop_runs

    raise typer.Exit(stop_runs(address=address, name=target or run, grace_s=grace))


@app.command()
def nodes(
    host: Annotated[
        str, typer.Argument(help="address of the head, as the other machines reach it")
    ],
    port: Annotated[int, typer.Option(min=1024, max=65535, help="port of the head")] = 6379,
) -> None:
    """Print the commands that start a Ray cluster on several machines, with its token."""

    put(cluster_commands(host, port=port))


_TOKEN_LIMIT_S = 60.0


# Ray 2.59 and later use token authentication if the head finds a token in `~/.ray`, where every
# local run leaves one; the head then rejects a worker without `RAY_AUTH_MODE=token` and the same
# token.
def cluster_commands(host: str, *, port: int) -> str:
    """Return the commands that start Ray on all machines.

    The commands contain Ray's authentication token, which Ray creates now if there is none.
    host: the address at which other machines reach the head. port: the head's port.
    Raises: ConfigError if Ray provides no token.
    """
    ray = Path(sys.executable).with_name("ray")
    made = subprocess.run(
        [ray, "get-auth-token", "--generate"],
        capture_output=True, text=True, timeout=_TOKEN_LIMIT_S, check=False,
    )  # fmt: skip
    token = made.stdout.strip()
    if made.returncode or not token or len(token.split()) != 1:
        raise ConfigError(
            f"nodes: got no token of `{ray} get-auth-token --generate` ({made.stderr.strip()}); "
            "expected one in ~/.ray/auth_token; correct the file or its permissions"
        )
    activate = f"source {shlex.quote(str(ray.with_name('activate')))}"
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"""\
# On the head, {host}:
{activate}
export RAY_AUTH_MODE=token
ray start --head --node-ip-address={host} --port={port} --include-dashboard=false

# On each other machine, where the same version of Rayloom is in the same directory. The token is a
# secret, and replaces the one that this user has there:
{activate}
export RAY_AUTH_MODE=token
mkdir -p ~/.ray && (umask 077 && printf %s {token} > ~/.ray/auth_token)
ray start --address={address}

# On one of them, to train:
{activate}
rayloom train CONFIG --address {address}

# On each, at the end:
ray stop"""
