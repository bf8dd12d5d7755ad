"""The commands that start or continue a training: `train`, `serve` and `sft`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from service.api.settings import checked_service
from service.cli.commands.configuration import (
    AnswerOption,
    CallOption,
    Dataset,
    GroupRewards,
    ModelOption,
    Overrides,
    Rewards,
    Tools,
    converted,
    own_config,
    path_option,
    run_configuration,
    sft_configuration,
    trial_of,
    use_functions,
)
from service.cli.outlet import Stages, say
from service.config.file import ConfigError
from service.config.tree import Config
from service.launch.signals import EXIT_INTERRUPTED, stop_signals
from service.store.errors import StoreError
from service.store.place import StoreOptions
from service.store.tables import RunKind

app = typer.Typer()
MaybeConfigPath = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG", help="a YAML file; default with --resume: the run's own"),
]


@app.command(
    "serve",
    help="Train on the tasks that clients submit over HTTP.\n\n"
    "Only clients on this machine can connect, unless RAYLOOM_API_KEY is set to a key.",
)
@app.command(
    "train",
    help="Train a model, and write a report.\n\n"
    "Needs a CONFIG, or --dataset and --reward, or --resume.",
)
def start(
    context: typer.Context,
    config: MaybeConfigPath = None,
    model: ModelOption = None,
    dataset: Dataset = None,
    reward: Rewards = None,
    group_reward: GroupRewards = None,
    tools: Tools = None,
    address: Annotated[
        str | None, typer.Option(help="join this Ray cluster instead of starting a local one")
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(metavar="DIRECTORY", help="directory of the new run; default: runs/NAME-TIME"),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN_DIR", help="a run to continue from its newest checkpoint"),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="with --resume: continue from this checkpoint (name or step); undo later steps",
        ),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            metavar="",
            help="with --resume: take over the run from the process that runs it, which then ends",
        ),
    ] = False,
    state_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY",
            help="directory on a local disk for the run's database; default: the run's directory",
        ),
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="the run's database in PostgreSQL; for a URL with a password, set the variable "
            "RAYLOOM_DATABASE_URL instead",
        ),
    ] = None,
    call: CallOption = None,
    answer: AnswerOption = None,
    overrides: Overrides = None,
) -> None:
    """Run `train` or `serve`, which differ only in the source of the tasks."""
    is_local, api = address is None, None
    stages = Stages(f"reading {config or dataset or resume or 'the configuration'}")
    with stop_signals() as signals:
        try:
            new_run, resumed = path_option("--run-dir", run_dir), path_option("--resume", resume)
            use_functions(resumed or new_run)
            settings = run_configuration(
                config or (resumed and own_config(resumed)),
                dataset=dataset,
                rewards=reward or [],
                group_rewards=group_reward or [],
                tools=tools or [],
                model=model,
                overrides=overrides or [],
            )
            if resumed is not None and config is not None:
                _fetch_missing(settings, resumed)
            if take_over and resumed is None:
                raise ConfigError(
                    "--take-over: got no --resume, expected --resume RUN_DIR, the run to take over"
                )
            if checkpoint is not None and resumed is None:
                raise ConfigError(
                    f"--checkpoint {checkpoint}: got no --resume, expected --resume RUN_DIR, the "
                    "checkpoint's run"
                )
            if new_run is not None and resumed is not None:
                raise ConfigError(
                    f"--run-dir {new_run}: got --resume {resumed} too, expected one of them: a run "
                    "continues in its own directory; leave --run-dir out"
                )
            store = _store_options(state_dir, database_url, is_new=resumed is None)
            kind = RunKind(context.info_name or "")
            if kind is RunKind.SERVE:
                settings, api = checked_service(settings, is_local=is_local)
            elif not settings.has_environment:
                raise ConfigError(
                    "tasks.environment is session: agents play it over HTTP, which `rayloom train` "
                    "does not open; start `rayloom serve`, or name an environment"
                )
            settings = converted(settings)
            _check_machine_and_files(settings, new_run, resumed, kind=kind, is_local=is_local)
            returns_to = ""
            if checkpoint is not None and resumed is not None:
                from service.launch.resume import named_checkpoint
                from service.launch.run_dir import RunDir

                returns_to = named_checkpoint(RunDir(path=resumed), checkpoint).directory
            stages.next("loading packages")
            # Within `stop_signals`: Ctrl-C may come during these seconds of imports.
            from service.cli.train import run_training

            code = run_training(
                settings,
                signals,
                stages,
                address=address,
                new_run=new_run,
                resume=resumed,
                checkpoint=returns_to,
                takes_over=take_over,
                store=store,
                trial=trial_of(call, answer),
                api=api,
            )
        except KeyboardInterrupt:
            say("rayloom: interrupted before the run began", err=True)
            code = EXIT_INTERRUPTED
    raise typer.Exit(code)


@app.command()
def sft(
    config: MaybeConfigPath = None,
    model: ModelOption = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            metavar="DATA",
            help="chats in a column messages: JSONL, JSON, Parquet, a directory, or a hub name",
        ),
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY", help="directory of the new training; default: runs/sft-TIME"
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN_DIR", help="a training to continue from its newest checkpoint"),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train a model on chats, so that it imitates the assistant's replies, and export it.

    The exported model is in RUN_DIR/export, for example for `rayloom train --model`. Exit codes: 0
    after the last step, 1 if the training failed, 2 if the command was refused, 130 if it was
    interrupted.
    """
    stages = Stages(f"reading {config or resume or dataset or 'the configuration'}")
    with stop_signals() as signals:
        try:
            new_run, resumed = path_option("--run-dir", run_dir), path_option("--resume", resume)
            if new_run is not None and resumed is not None:
                raise ConfigError(
                    f"--run-dir {new_run}: got --resume {resumed} too, expected one of them; leave "
                    "--run-dir out"
                )
            settings = sft_configuration(
                config or (resumed and _own_sft_config(resumed)),
                dataset=dataset,
                model=model,
                overrides=overrides or [],
            )
            stages.next("loading packages")
            from service.cli.sft import run_sft

            code = run_sft(settings, signals, stages, new_run=new_run, resumed=resumed)
        except KeyboardInterrupt:
            say("rayloom: interrupted before the training began", err=True)
            code = EXIT_INTERRUPTED
    raise typer.Exit(code)


def _own_sft_config(run: Path) -> Path:
    from service.launch.run_dir import RunDir

    if not RunDir(path=run).chats_file.is_file():
        raise ConfigError(
            f"--resume {run}: there is no supervised training; expected a directory that "
            "`rayloom sft` has made"
        )
    return own_config(run, is_sft=True)


def _store_options(
    state_dir: str | None, database_url: str | None, *, is_new: bool
) -> StoreOptions:
    place = path_option("--state-dir", state_dir)
    options = StoreOptions(state_dir=place, database_url=database_url)
    if not is_new and options != StoreOptions():
        raise ConfigError(
            f"{'--state-dir' if place else '--database-url'}: got --resume too, expected a new "
            "run: a run continues with its own database; leave the option out, or, if the "
            "database was moved, name its new location in the run's store.json"
        )
    if is_new:
        try:
            options.check()
        except StoreError as error:
            raise ConfigError(str(error)) from error
    return options


def _fetch_missing(config: Config, resumed: Path) -> None:
    if config.run.checkpoint_url is not None:
        from service.launch.remote_run import fetch_missing
        from service.launch.run_dir import RunDir

        fetch_missing(config, RunDir(path=resumed), tell=partial(say, err=True))


def _check_machine_and_files(
    config: Config, new_run: Path | None, resumed: Path | None, *, kind: RunKind, is_local: bool
) -> None:
    from service.config.preflight import (
        check_machine,
        check_metrics_address,
        check_model_sources,
    )
    from service.launch.remote_run import check_address
    from service.launch.run_dir import RunDir, check_new, check_resumable, prepared_directory

    if resumed is not None:
        # If all steps are done, the run needs no other part of the machine.
        if is_local:
            check_metrics_address(config)
        check_resumable(RunDir(path=resumed), config, kind=kind)
        check_address(config, RunDir(path=resumed))
        return
    check_machine(config, is_local=is_local)
    if new_run is not None:
        check_new(RunDir(path=new_run))
        with prepared_directory(RunDir(path=new_run)):
            # The directory can be made. It is removed again, because a later error must leave none.
            pass
    check_address(config)
    check_model_sources(config)
