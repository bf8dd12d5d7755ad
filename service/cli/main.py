"""The command line `rayloom`, with the commands of `service.cli.commands`.

Some packages take seconds to import. Only the functions of the commands import them, so that most
wrong arguments are refused before these imports.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperCommand, TyperGroup

from service import VERSION
from service.cli.commands import before_run, cluster, keys, runs, training
from service.cli.outlet import bound_ending, code_after, escape_unencodable, outlet, put, say
from service.config.file import ConfigError

EXIT_REFUSED = 2
# These keep their exit code without standard output: a run's result is in its directory.
_RUNS = {"train", "serve", "sft"}


@contextmanager
def _help_outlet() -> Iterator[None]:
    """Guard a block that prints a help page: a closed pipe or terminal raises no error."""
    with outlet(sys.__stdout__):
        try:
            yield
        except SystemExit as error:
            # rich would end the process with code 1.
            raise BrokenPipeError("the reader of the help has closed it") from error


class _Group(TyperGroup):
    """A group of commands, whose help page ends without an error if its reader closes the pipe."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _help_outlet():
            super().format_help(ctx, formatter)


app = typer.Typer(
    cls=_Group,
    help="Train language-model agents by reinforcement learning, on a laptop or a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class _Command(TyperCommand):
    """A command that refuses two values for an option that takes one, and an empty path."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _help_outlet():
            super().format_help(ctx, formatter)
        # The help of `train` is not a run, so that `main` must not exempt it.
        if code := code_after(0):
            raise typer.Exit(code)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        texts, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option in given:
            count = given.count(option)
            # typer would use only the last value.
            if count > 1 and not option.multiple and not getattr(option, "is_flag", True):
                raise ConfigError(
                    f"{option.opts[0]} was given {count} times, expected it once; remove all but "
                    "one"
                )
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is None or not isinstance(error.__cause__, ValidationError):
                raise
            got = error.__cause__.errors()[0]["input"]
            raise ConfigError(f"{_shown(error.param)}: {_unfit(error.param, got)}") from error
        for each in self.params:
            # typer would read an empty path as the working directory.
            if (
                isinstance(ctx.params.get(each.name), Path)
                and not str(texts.get(each.name, "x")).strip()
            ):
                raise ConfigError(f"{_shown(each)}: got an empty text, expected a path; name one")
        return rest


def _shown(parameter: Any) -> str:
    """Return a parameter's name as the help shows it."""
    if parameter.param_type_name == "option":
        return str(parameter.opts[0])
    return str(parameter.metavar or parameter.name).upper()


def _unfit(parameter: Any, got: Any) -> str:
    """Return the error for an invalid value, such as "got 'fast', expected one of own, norm"."""
    kind = parameter.type_descriptor
    if kind.choices:
        known = [str(getattr(each, "value", each)) for each in kind.choices]
        near = difflib.get_close_matches(str(got), known, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else "name one of them"
        return f"got {got!r}, expected one of {', '.join(known)}; {remedy}"
    low, high = parameter.min, parameter.max
    if kind.annotation is int:
        expected = "an integer"
    else:
        expected = "a finite number" if high is None else "a number"
    if low is not None and high is not None:
        expected += f" from {low} to {high}"
    elif low is not None:
        expected += f" of at least {low}"
    return f"got {got!r}, expected {expected}; correct it"


# The commands of these apps become commands of `rayloom` itself, in the order of its help.
for commands in (training, cluster, before_run, runs):
    app.add_typer(commands.app)
app.add_typer(before_run.model_app, name="model", cls=_Group)
app.add_typer(before_run.tasks_app, name="tasks", cls=_Group)
app.add_typer(keys.app, name="keys", cls=_Group)
# typer would print the lines of a docstring as they are; join those of each paragraph.
for group in (
    *(each.app for each in (training, cluster, before_run, runs, keys)),
    before_run.model_app,
    before_run.tasks_app,
):
    for command in group.registered_commands:
        command.cls = _Command
        paragraphs = cleandoc(command.help or command.callback.__doc__ or "").split("\n\n")
        command.help = "\n\n".join(each.replace("\n", " ") for each in paragraphs)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        put(f"rayloom {VERSION}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            help="print the version and end",
            is_eager=True,
            callback=_print_version,
        ),
    ] = False,
) -> None:
    """Train language-model agents by reinforcement learning, on a laptop or a Ray cluster."""


def main() -> None:
    """Run the command line; if a configuration is refused, print why, and exit with code 2."""
    # Users' environments are in the current directory, which a console script does not import from.
    sys.path.insert(0, os.getcwd())
    # Set these variables now: the packages read them when the commands import the packages.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # With 0 columns, typer and rich would print nothing.
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        size = os.environ.get(name, "")
        if not size.isdecimal() or not int(size):
            os.environ.pop(name, None)
    for stream in (sys.stdout, sys.stderr):
        escape_unencodable(stream)
    code: int | str | None = EXIT_REFUSED
    try:
        app()
    except ConfigError as error:
        say(f"rayloom: {error}", err=True)
    except SystemExit as error:
        code = error.code
    if not code and not set(sys.argv[1:2]) & _RUNS:
        code = code_after(0)
    bound_ending(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)


if __name__ == "__main__":
    main()
