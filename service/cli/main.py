"""The command line: train, serve, model, tasks, export, inspect; each has a module of its own."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from actors.limits import MAX_SEED
from service.cli.display.outlet import escape_unencodable, say
from service.config.file import ConfigError, describe_config, load_config
from service.config.tree import Config
from service.launch.signals import EXIT_INTERRUPTED, stop_signals

app = typer.Typer(
    help="Train language-model agents by reinforcement learning, on a laptop or a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Build models.", no_args_is_help=True)
tasks_app = typer.Typer(help="Make task files.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(tasks_app, name="tasks")

EXIT_REFUSED = 2

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="such as run.steps=10")
]


ModelOption = Annotated[
    str | None, typer.Option(help="directory or hub name, in place of the configuration's")
]
AddressOption = Annotated[
    str | None, typer.Option(help="join this Ray cluster instead of starting a local one")
]
RunDirOption = Annotated[
    str | None, typer.Option(metavar="DIRECTORY", help="default: runs/NAME-TIME")
]
ResumeOption = Annotated[
    str | None, typer.Option(metavar="RUN_DIR", help="go on from its newest checkpoint")
]
TakeOverOption = Annotated[
    bool, typer.Option("--take-over", help="resume a run although another process holds it")
]


@app.command()
def train(
    config: ConfigPath,
    model: ModelOption = None,
    address: AddressOption = None,
    run_dir: RunDirOption = None,
    resume: ResumeOption = None,
    take_over: TakeOverOption = False,
    overrides: Overrides = None,
) -> None:
    """Train by CONFIG until its last step, and write a report."""
    places = _Places(address=address, run_dir=run_dir, resume=resume, takes_over=take_over)
    _start(config, _with_model(overrides or [], model), places, is_service=False)


@app.command()
def serve(
    config: ConfigPath,
    model: ModelOption = None,
    address: AddressOption = None,
    run_dir: RunDirOption = None,
    resume: ResumeOption = None,
    take_over: TakeOverOption = False,
    overrides: Overrides = None,
) -> None:
    """Train by CONFIG on the tasks that clients submit over HTTP.

    Beyond loopback a key is needed: set RAYLOOM_API_KEY.
    """
    places = _Places(address=address, run_dir=run_dir, resume=resume, takes_over=take_over)
    _start(config, _with_model(overrides or [], model), places, is_service=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Where a run runs and writes, as the command line gave it."""

    address: str | None
    run_dir: str | None
    resume: str | None
    takes_over: bool


def _start(config: Path, overrides: list[str], places: _Places, *, is_service: bool) -> NoReturn:
    with stop_signals() as signals:
        try:
            settings = load_config(config, overrides)
            run_dir = _place("--run-dir", places.run_dir)
            resume = _place("--resume", places.resume)
            if places.takes_over and resume is None:
                raise ConfigError("--take-over: got no --resume, expected the run to take; name it")
            from service.cli.serve import checked_service

            api = None
            if is_service:
                settings, api = checked_service(settings, is_local=places.address is None)
            _check_places(settings, run_dir, resume, is_local=places.address is None)
            # Seconds of imports, which a Ctrl-C may meet too; what can be refused is by now.
            from service.cli.train import TrainRequest, run_training

            request = TrainRequest(
                config=settings,
                address=places.address,
                run_dir=run_dir,
                resume=resume,
                takes_over=places.takes_over,
                api=api,
            )
            code = run_training(request, signals)
        except KeyboardInterrupt:
            say("rayloom: interrupted before the run began", err=True)
            code = EXIT_INTERRUPTED
    raise typer.Exit(code)


def _check_places(
    config: Config, new_run: Path | None, resumed: Path | None, *, is_local: bool
) -> None:
    """What a look at this machine and its files tells. Raises: ConfigError."""
    from service.config.preflight import (
        check_machine,
        check_metrics_address,
        check_model_sources,
    )
    from service.launch.run_dir import RunDir, check_new, check_resumable, prepared_directory

    if resumed is not None:
        # A run whose steps are all done needs nothing else of the machine.
        check_metrics_address(config)
        check_resumable(RunDir(path=resumed), config)
        return
    check_machine(config, is_local=is_local)
    if new_run is not None:
        check_new(RunDir(path=new_run))
        with prepared_directory(RunDir(path=new_run)):
            # It can be made; a refusal that comes later leaves nothing behind.
            pass
    check_model_sources(config)


def _with_model(overrides: list[str], model: str | None) -> list[str]:
    """Lay --model over the configuration; quoted, because a name may look like a number."""
    if model is None:
        return overrides
    return [*overrides, f"model.path={json.dumps(model)}", "model.tiny=null"]


def _place(option: str, path: str | None, *, what: str = "a directory") -> Path | None:
    if path is None:
        return None
    if not path.strip():
        raise ConfigError(f"{option}: got an empty text, expected {what}; name one")
    return Path(path)


@app.command()
def check(config: ConfigPath, overrides: Overrides = None) -> None:
    """Read CONFIG, check it, and print every setting, defaults filled in, with its meaning."""
    typer.echo(describe_config(load_config(config, overrides or ())))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="a run directory, or one of its checkpoints")],
    directory: Annotated[Path, typer.Argument(help="where to write; must not exist")],
) -> None:
    """Write a checkpoint as a Hugging Face model directory."""
    from service.cli.export import export_checkpoint

    typer.echo(export_checkpoint(source, directory))


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="a run directory, a journal file, or an id")],
    run: Annotated[
        str | None, typer.Option(metavar="RUN_DIR", help="of the id; default: the newest")
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="write one trajectory as a page")
    ] = None,
    audit: Annotated[bool, typer.Option(help="check every invariant, name offenders")] = False,
    step: Annotated[int | None, typer.Option(min=1, help="only of this training step")] = None,
    outcome: Annotated[str | None, typer.Option(help="only with this outcome")] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="lines at most, 50 where not said; 0: all")
    ] = None,
) -> None:
    """Show TARGET: a run's trajectories, or one of them token by token.

    --audit ends with 0 where nothing is wrong, 1 with offenders, 2 where it cannot read.
    """
    from service.cli.inspect import run_inspect
    from service.cli.inspect_options import InspectRequest

    request = InspectRequest(
        target=target,
        run=_place("--run", run),
        html=_place("--html", html, what="a file"),
        audit=audit,
        step=step,
        outcome=outcome,
        limit=limit,
    )
    raise typer.Exit(run_inspect(request))


@model_app.command("tiny")
def model_tiny(
    directory: Annotated[Path, typer.Argument(help="where to write")],
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED)] = 0,
    untied: Annotated[bool, typer.Option(help="an output head of its own")] = False,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="format warm-up; 0: random weights")
    ] = None,
) -> None:
    """Build a Qwen3-architecture model of about a million parameters with its own tokenizer."""
    from service.cli.model import build_tiny

    typer.echo(build_tiny(directory, seed=seed, tied=not untied, warmup_steps=warmup_steps))


@tasks_app.command("reasoning-gym")
def tasks_reasoning_gym(
    family: Annotated[str, typer.Argument(help="such as chain_sum")],
    out: Annotated[Path, typer.Argument(help="a .jsonl or .parquet file")],
    count: Annotated[int, typer.Option(min=1)] = 1000,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED)] = 0,
    options: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="of the family")
    ] = None,
) -> None:
    """Write COUNT tasks of a reasoning-gym family."""
    from service.cli.tasks import write_reasoning_gym

    typer.echo(write_reasoning_gym(family, out, count=count, seed=seed, options=options or []))


@tasks_app.command("generate")
def tasks_generate(
    environment: Annotated[str, typer.Argument(help="such as guessing")],
    out: Annotated[Path, typer.Argument(help="a .jsonl or .parquet file")],
    count: Annotated[int, typer.Option(min=1)] = 1000,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED)] = 0,
) -> None:
    """Write COUNT tasks of an environment that makes a game from a seed alone."""
    from service.cli.tasks import write_generated

    typer.echo(write_generated(environment, out, count=count, seed=seed))


def main() -> None:
    """Run the command line; a refused configuration exits with 2 and its sentence."""
    # A user's own environment lies where the command is started, which a console script leaves out.
    sys.path.insert(0, os.getcwd())
    # Read when these packages are first imported, which the commands do.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for stream in (sys.stdout, sys.stderr):
        escape_unencodable(stream)
    try:
        app()
    except ConfigError as error:
        say(f"rayloom: {error}", err=True)
        sys.exit(EXIT_REFUSED)


if __name__ == "__main__":
    main()
