"""The arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.config.file import ConfigError

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="setting to change, such as run.steps=10; repeatable"
    ),
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
        metavar="",
        help="call functions and judges before the start, or call nothing; default: only functions",
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


def path_option(option: str, text: str | None, *, what: str = "a directory") -> Path | None:
    if text is not None and not text.strip():
        raise ConfigError(f"{option}: got an empty text, expected {what}; name one")
    return None if text is None else Path(text)
