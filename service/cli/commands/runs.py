"""The commands for an existing run: `rescore`, `export`, `move`, `backup` and others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from service.cli.commands.configuration import (
    GroupRewards,
    Overrides,
    Rewards,
    Temperature,
    converted,
    own_config,
    path_option,
    use_functions,
    with_model,
)
from service.cli.outlet import Stages, put, say
from service.config.file import ConfigError, load_config, path_text, why_missing
from service.config.tree import Config
from service.launch.signals import EXIT_INTERRUPTED, stop_signals
from service.store.place import StoreOptions

app = typer.Typer()
TargetUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="PostgreSQL database to write to; for a URL with a password, set the variable "
        "RAYLOOM_DATABASE_URL instead",
    ),
]
TargetDirectory = Annotated[
    str | None,
    typer.Option(
        metavar="DIRECTORY", help="directory on a local disk for a SQLite database to write to"
    ),
]


@app.command()
def rescore(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run's directory")],
    reward: Rewards = None,
    group_reward: GroupRewards = None,
    limit: Annotated[
        int,
        typer.Option(
            min=0, help="number of trajectories to show, the largest changes first; 0: all"
        ),
    ] = 10,
) -> None:
    """Score the trajectories of a run's journal again, and show the old and new rewards.

    The run is not changed. Exit codes: 0 if trajectories were scored, 1 if none could be scored, 2
    if the command was refused.
    """
    from service.cli.rescore import run_rescore

    use_functions(run)
    raise typer.Exit(
        run_rescore(run, rewards=reward or [], group_rewards=group_reward or [], limit=limit)
    )


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="a run directory, or one of its checkpoints")],
    directory: Annotated[
        str,
        typer.Argument(help="new directory for the model, or an address such as s3://bucket/model"),
    ],
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter", metavar="", help="write only the LoRA adapters, in PEFT's format"
        ),
    ] = False,
) -> None:
    """Write a checkpoint as a Hugging Face model directory; LoRA adapters are merged into it."""
    from service.cli.artifacts import export_checkpoint, export_to_address
    from service.remote_files import is_url

    if is_url(directory):
        put(export_to_address(source, directory, only_adapter=adapter))
    else:
        put(export_checkpoint(source, Path(directory), only_adapter=adapter))


@app.command()
def move(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run's directory")],
    database_url: TargetUrl = None,
    state_dir: TargetDirectory = None,
) -> None:
    """Move the database of a run that has ended to PostgreSQL or SQLite.

    The old database can then only be read. If the command is killed, run it again.
    """
    place = path_option("--state-dir", state_dir)
    from service.cli.artifacts import move as move_run

    put(move_run(run, StoreOptions(state_dir=place, database_url=database_url)))


@app.command()
def backup(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run's directory")],
    directory: Annotated[Path, typer.Argument(help="directory for the backup; must not exist")],
) -> None:
    """Back up a run, which may be running: its database, checkpoints, model and journal."""
    from service.launch.backup import back_up
    from service.launch.run_dir import RunDir

    put(back_up(RunDir(path=run), directory.absolute()))


@app.command()
def restore(
    backup: Annotated[
        str,
        typer.Argument(
            metavar="BACKUP", help="directory of a backup, or the run.checkpoint_url of a run"
        ),
    ],
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", help="directory of the restored run; must not exist"),
    ],
    database_url: TargetUrl = None,
    state_dir: TargetDirectory = None,
) -> None:
    """Make a run directory from a backup, or from a run's copies at its checkpoint_url.

    Continue the run with `rayloom train --resume RUN_DIR` or `rayloom serve --resume RUN_DIR`.
    """
    place = path_option("--state-dir", state_dir)
    from service.launch.backup import restore as restore_run
    from service.launch.run_dir import RunDir
    from service.remote_files import is_url

    options, run_dir = StoreOptions(state_dir=place, database_url=database_url), RunDir(path=run)
    if is_url(backup):
        from service.launch.remote_run import fetch_run

        put(fetch_run(backup, run_dir, options, tell=partial(say, err=True)))
    else:
        put(restore_run(RunDir(path=Path(backup)), run_dir, options))


@app.command()
def evaluate(
    source: Annotated[
        Path, typer.Argument(metavar="CONFIG|RUN_DIR", help="a YAML file, or a run's directory")
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|DIR",
            help="checkpoint that plays; default: the run's newest, or the model of CONFIG",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="a directory, GGUF file or hub name; plays instead of a checkpoint"),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            "--on", metavar="NAME", help="a set in evaluation.sets; default: the held-out tasks"
        ),
    ] = "",
    samples: Annotated[
        int | None, typer.Option(min=1, help="number of rollouts of each task")
    ] = None,
    temperature: Temperature = None,
    tasks: Annotated[
        int | None,
        typer.Option(min=1, help="number of tasks to play, beginning with the first; default: all"),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="file for the rollouts and their tokens; default: evaluate-….jsonl"
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Play the held-out tasks with a checkpoint or a model; print avg@n, pass@k and majority@n.

    Exit codes: 0 if all tasks were played, 1 if rollouts are missing or none was scored, 2 if the
    command was refused.
    """
    # Standard output has only the result, for other programs.
    stages = Stages(f"reading {source}", tell=partial(say, err=True))
    with stop_signals() as signals:
        try:
            if checkpoint is not None and model is not None:
                raise ConfigError(
                    f"--model {model}: got --checkpoint {checkpoint} too, expected one of them; "
                    "leave one out"
                )
            source = Path(path_text(source, what="evaluate"))
            if not source.exists():
                raise ConfigError(
                    f"evaluate: {source} {why_missing(source)}, expected a run's directory or a "
                    "YAML file; correct the path"
                )
            run = source if source.is_dir() else None
            use_functions(run)
            file = source if run is None else own_config(run, option="")
            given = with_model(overrides or [], model)
            # Only with --on: without the options below, the configuration may be invalid.
            section = _evaluation_section(load_config(file, given), on) if on else "evaluation"
            for key, value in (("samples", samples), ("temperature", temperature)):
                if value is not None:
                    given.append(f"{section}.{key}={value}")
            config = converted(load_config(file, given))
            stages.next("loading packages")
            from service.cli.evaluate import run_evaluate

            code = run_evaluate(
                config,
                signals,
                stages,
                run=run,
                checkpoint=checkpoint,
                uses_model=model is not None,
                set_name=on,
                num_tasks=tasks,
                out=path_option("--out", out, what="a file"),
            )
        except KeyboardInterrupt:
            say("rayloom: interrupted before the evaluation began", err=True)
            code = EXIT_INTERRUPTED
    raise typer.Exit(code)


def _evaluation_section(config: Config, name: str) -> str:
    """Return the key of an evaluation set's section. name: empty for the run's held-out tasks."""
    sections = {"": "evaluation"}
    sections |= {name: f"evaluation.sets.{name}" for name in config.evaluation.sets}
    sections |= {name: f"mixture.{name}.evaluation" for name in config.mixture}
    if (section := sections.get(name)) is None:
        named = ", ".join(each for each in sections if each)
        raise ConfigError(
            f"--on {name}: there is no such set, expected one of evaluation.sets, or a part of "
            f"the mixture: {named or 'there is none'}"
        )
    return section


@app.command()
def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="a run directory, a journal file, or the id of a trajectory"
        ),
    ],
    trajectory: Annotated[
        str | None, typer.Argument(metavar="ID", help="id of a trajectory of RUN")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN_DIR",
            help="run of the trajectory whose id is given instead of RUN; default: the newest run",
        ),
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="write the trajectory as an HTML page")
    ] = None,
    audit: Annotated[
        bool,
        typer.Option(metavar="", help="check every invariant of the journal, and list violations"),
    ] = False,
    hacking: Annotated[
        bool, typer.Option(metavar="", help="search for patterns of reward hacking")
    ] = False,
    shadow: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="second verifier for --hacking")
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="show only this training step")] = None,
    outcome: Annotated[str | None, typer.Option(help="show only this outcome")] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="maximum number of lines; default: 50; 0: all")
    ] = None,
) -> None:
    """Show the list of a run's trajectories, or the trajectory ID token by token.

    Exit codes of --audit and --hacking: 0 if they find nothing, 1 if they find something, 2 if the
    run cannot be read.
    """
    from service.cli.inspect import InspectRequest, run_inspect

    if trajectory is not None and run is not None:
        raise ConfigError(
            f"inspect: got the run {target} and --run {run}, expected one; leave --run out"
        )
    request = InspectRequest(
        target=target if trajectory is None else trajectory,
        run=path_option("--run", run if trajectory is None else target),
        html=path_option("--html", html, what="a file"),
        audit=audit,
        hacking=hacking,
        shadow=shadow,
        step=step,
        outcome=outcome,
        limit=limit,
    )
    raise typer.Exit(run_inspect(request))


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run's directory")],
    step: Annotated[int, typer.Option(min=1, help="the training step")],
    top: Annotated[
        int | None,
        typer.Option(min=1, help="number of trajectories to show; default: 10, all with --json"),
    ] = None,
    by: Annotated[
        Literal["own", "norm", "share"],
        typer.Option(
            help="order by the part of the gradient's norm that does not depend on other "
            "trajectories (own), by the whole norm, or by the share of the update"
        ),
    ] = "own",
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            metavar="",
            help="before this, train again all steps between the checkpoint and this step",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="print a JSON document")
    ] = False,
) -> None:
    """Show how much each trajectory and group contributed to the update of a step.

    The gradients are computed again, from the journal and the newest checkpoint before the step.
    """
    from service.cli.explain import run_explain

    run_explain(run, step, by=by, top=top, replays=replay, is_json=as_json)
