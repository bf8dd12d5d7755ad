"""The commands that try a configuration without a run: `check` and `try`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

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
from service.cli.outlet import leave, say
from service.config.file import ConfigError, describe_config

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

    The data are read, and the functions are imported and called. Comments at the end describe the
    model's chat template.
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

        typer.echo(describe_needs(needs(settings, num_parameters=parameters)))
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
    typer.echo(describe_config(settings, options))
    typer.echo(describe_template(settings))
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
    leave(run_try(request))
