"""Tests of the `rayloom` commands on the pages: their options, settings and files exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer._click.exceptions import UsageError
from worlds.checks.page_commands import NOT_RUN, blocks_of, pages_of_start, reason_not_to_run
from worlds.runs.run_driver import ROOT

from deploy.reference import configuration_page
from service.cli.main import app

BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = set(re.findall(r"^\| `([\w.]+)` \|", configuration_page(), re.MULTILINE))
# Below these keys, the user chooses the names.
NAMED = (
    *("tasks.options", "tasks.columns", "rollouts.outcomes", "mixture", "evaluation.sets"),
    "inference.engine_args",
)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words after `rayloom` of each command in a page's blocks."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                words = ["&&", *shlex.split(line[2:], comments=True)]
                ends = [at for at, word in enumerate(words) if word in ("&&", "|", ";", "&", ">")]
                for begin, end in zip(ends, [*ends[1:], len(words)], strict=True):
                    if end > begin + 1 and Path(words[begin + 1]).name == "rayloom":
                        yield words[begin + 2 : end]


ALL = [(page.name, words) for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]


def parsed(words: list[str]) -> dict[str, Any]:
    """Parse a command without running it. Returns: its parameters. Raises: UsageError."""
    command: Any = typer.main.get_command(app)
    parent = None
    while isinstance(command, typer.core.TyperGroup):
        parent = command.make_context("rayloom", words[:1], parent=parent)
        _, command, words = command.resolve_command(parent, list(words))
    parameters: dict[str, Any] = command.make_context(command.name, words, parent=parent).params
    return parameters


def test_each_command_on_a_page_is_accepted_by_the_command_line() -> None:
    assert len(ALL) > 50
    for page, words in ALL:
        try:
            overrides = parsed(words).get("overrides") or ()
        except UsageError as error:
            pytest.fail(f"{page}: rayloom {shlex.join(words)}: {error.format_message()}")
        for override in overrides:
            key, sign, _ = override.partition("=")
            assert sign and (key in SETTINGS or key.startswith(NAMED)), (page, override)
        for word in words:
            if word.startswith(("deploy/", "docs/")):
                assert (ROOT / word.partition(":")[0]).exists(), (page, word)
    with pytest.raises(UsageError, match="--datasets"):
        parsed(["train", "--datasets", "a.jsonl"])


def test_the_list_of_commands_that_are_not_run_is_short_and_up_to_date() -> None:
    on_start = [
        command
        for page in pages_of_start()
        for block in blocks_of(page)
        for command in block.commands
    ]
    for words in NOT_RUN:
        assert any(re.search(words, command) for command in on_start), words
    run = [command for command in on_start if reason_not_to_run(command) is None]
    assert len(run) > 25 and len(run) > 2 * (len(on_start) - len(run))
    # Each command begins with a program that exists in the project's directory.
    programs = {Path(command.split()[0]).name for command in run}
    assert programs <= {"cd", "curl", "python", "rayloom", "source"}
