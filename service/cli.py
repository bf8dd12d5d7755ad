"""The command line: train, model, tasks, export. Each command's work lives in its own module."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from service.config.file import ConfigError, dump_config, load_config
from service.config.tree import MAX_SEED
from service.display.outlet import say
from service.stop_signals import EXIT_INTERRUPTED, stop_signals

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


@app.command()
def train(
    config: ConfigPath,
    model: Annotated[
        str | None, typer.Option(help="directory or hub name, in place of the configuration's")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="join this Ray cluster instead of starting a local one")
    ] = None,
    run_dir: Annotated[
        str | None, typer.Option(metavar="DIRECTORY", help="default: runs/NAME-TIME")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN_DIR", help="go on from its newest checkpoint")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train by CONFIG until its last step, and write a report."""
    with stop_signals() as signals:
        try:
            settings = load_config(config, _with_model(overrides or [], model))
            places = (_place("--run-dir", run_dir), _place("--resume", resume))
            # Seconds of imports, which a Ctrl-C may meet too.
            from service.commands.train import TrainRequest, run_training

            request = TrainRequest(
                config=settings, address=address, run_dir=places[0], resume=places[1]
            )
            code = run_training(request, signals)
        except KeyboardInterrupt:
            say("rayloom: interrupted before the run began", err=True)
            code = EXIT_INTERRUPTED
    raise typer.Exit(code)


def _with_model(overrides: list[str], model: str | None) -> list[str]:
    """Lay --model over the configuration; quoted, because a name may look like a number."""
    if model is None:
        return overrides
    return [*overrides, f"model.path={json.dumps(model)}", "model.tiny=null"]


def _place(option: str, directory: str | None) -> Path | None:
    if directory is None:
        return None
    if not directory.strip():
        raise ConfigError(f"{option}: got an empty text, expected a directory; name one")
    return Path(directory)


@app.command()
def check(config: ConfigPath, overrides: Overrides = None) -> None:
    """Read CONFIG, check it, and print it with every default filled in."""
    typer.echo(dump_config(load_config(config, overrides or ())), nl=False)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="a run directory, or one of its checkpoints")],
    directory: Annotated[Path, typer.Argument(help="where to write; must not exist")],
) -> None:
    """Write a checkpoint as a Hugging Face model directory."""
    from service.commands.export import export_checkpoint

    typer.echo(export_checkpoint(source, directory))


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
    from service.commands.model import build_tiny

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
    from service.commands.tasks import write_reasoning_gym

    typer.echo(write_reasoning_gym(family, out, count=count, seed=seed, options=options or []))


@tasks_app.command("generate")
def tasks_generate(
    environment: Annotated[str, typer.Argument(help="such as guessing")],
    out: Annotated[Path, typer.Argument(help="a .jsonl or .parquet file")],
    count: Annotated[int, typer.Option(min=1)] = 1000,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED)] = 0,
) -> None:
    """Write COUNT tasks of an environment that makes a game from a seed alone."""
    from service.commands.tasks import write_generated

    typer.echo(write_generated(environment, out, count=count, seed=seed))


def main() -> None:
    """Run the command line; a refused configuration exits with 2 and its sentence."""
    # A user's own environment lies where the command is started, which a console script leaves out.
    sys.path.insert(0, os.getcwd())
    # Read when these packages are first imported, which the commands do.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except ConfigError as error:
        typer.echo(f"rayloom: {error}", err=True)
        sys.exit(EXIT_REFUSED)


if __name__ == "__main__":
    main()
