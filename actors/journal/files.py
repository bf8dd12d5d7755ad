"""The journal's directory: a file a step and epoch, written aside and renamed, the newest kept.

A step that is played again in a later epoch gets a file of its own; which of them is the run's is
the question of `service.store.lineage`. What cannot be written is told once and never ends a run:
the journal is for people, the training needs none of it. Called by the merge actor.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from actors.journal.codec import write_step
from actors.journal.record import GroupRule, JournalStep, journal_step
from actors.merge.step import StepResult

_NAME = re.compile(r"step-([0-9]+)-epoch-([0-9]+)\.npz")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    """What a journal is written with; a run that keeps none has no settings of one."""

    directory: Path
    """Of the run, as the merge actor's node sees it."""
    epoch: int
    keep_steps: int
    """The newest so many."""
    max_policy_age: int
    """Of the run, written into each file, as the rule is."""
    group_rule: GroupRule | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFile:
    path: Path
    step: int
    epoch: int


def file_name(step: int, *, epoch: int) -> str:
    """Example: file_name(12, epoch=2) -> step-000012-epoch-0002.npz"""
    return f"step-{step:06d}-epoch-{epoch:04d}.npz"


def named_file(path: Path) -> JournalFile | None:
    """What a journal file's name says of it; None for another name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    return JournalFile(path=path, step=int(match[1]), epoch=int(match[2]))


def list_files(directory: Path) -> list[JournalFile]:
    """The journal's files by step, then epoch; none where there is no directory."""
    found = [file for path in directory.glob("step-*.npz") if (file := named_file(path))]
    return sorted(found, key=lambda file: (file.step, file.epoch))


def write_file(directory: Path, step: JournalStep) -> Path:
    """Write a step aside and rename it. Raises: OSError, with nothing left behind."""
    # The run's directory is not made: where it is not seen, nothing of it is to be invented.
    directory.mkdir(exist_ok=True)
    path = directory / file_name(step.step, epoch=step.epoch)
    aside = directory / f".{path.name}.{os.getpid()}.tmp"
    try:
        # Not synced to the disk: after a loss of power a file may be damaged, and is found so.
        with aside.open("wb") as file:
            write_step(file, step)
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
    return path


def prune(directory: Path, *, newest: int, keep_steps: int) -> None:
    """Remove the files of steps up to newest - keep_steps. Raises: OSError."""
    for file in list_files(directory):
        if file.step <= newest - keep_steps:
            file.path.unlink(missing_ok=True)


class Journal:
    """Writes the steps of one epoch."""

    def __init__(self, settings: JournalSettings) -> None:
        self._settings = settings
        self._is_told = False

    def write(self, result: StepResult) -> str:
        """Write a step; returns a warning, once, when it cannot be written, else an empty text."""
        settings = self._settings
        step = journal_step(
            result,
            epoch=settings.epoch,
            max_policy_age=settings.max_policy_age,
            group_rule=settings.group_rule,
        )
        try:
            write_file(settings.directory, step)
            prune(settings.directory, newest=step.step, keep_steps=settings.keep_steps)
        except OSError as error:
            return self._warning(step.step, error)
        return ""

    def _warning(self, step: int, error: OSError) -> str:
        if self._is_told:
            return ""
        self._is_told = True
        return (
            f"step {step} is not in the journal: {self._settings.directory} cannot be written "
            f"({error.strerror or error}); training goes on, `rayloom inspect` lacks such steps; "
            "make room there, or set run.journal_steps to 0"
        )
