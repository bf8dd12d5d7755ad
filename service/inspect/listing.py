"""The trajectories of a journal, one a line, the newest step first. Called by `rayloom inspect`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actors.journal.record import JournalStep, TrajectoryEntry
from actors.types import Outcome
from service.inspect.facts import advantage, exit_of, number
from service.inspect.reader import OpenJournal, is_refused, load_step
from service.visible import visible_text

HEADER = ("step", "trajectory", "outcome", "return", "advantage", "turns", "tokens", "ledger")
_WORDS = frozenset({"trajectory", "outcome", "ledger", "environment"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """step, outcome, task: None means all. limit: rows at most, 0 means all."""

    step: int | None = None
    task: str | None = None
    outcome: Outcome | None = None
    limit: int = 0


def list_trajectories(journal: OpenJournal, filters: Filters) -> str:
    """Return a table in plain text, and a line on what is not in it."""
    rows: list[tuple[str, ...]] = []
    num_found = 0
    for step, _, entry in matching(journal, filters):
        num_found += 1
        if not filters.limit or len(rows) < filters.limit:
            rows.append(row_of(step, entry, is_refused=is_refused(journal, entry)))
    return "\n".join([*aligned([HEADER, *rows]), "", _closing(journal, len(rows), num_found)])


def row_of(step: JournalStep, entry: TrajectoryEntry, *, is_refused: bool) -> tuple[str, ...]:
    trajectory = entry.trajectory
    num_trained = 0 if is_refused else entry.num_trained
    return (
        str(step.step),
        visible_text(trajectory.trajectory_id),
        trajectory.outcome.value,
        number(trajectory.episode_return),
        advantage(entry),
        str(len(trajectory.turns)),
        f"{num_trained}/{trajectory.num_sampled}",
        exit_of(entry, is_refused=is_refused),
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns, two spaces apart, to the right except those of words, by the first row's
    names.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if name in _WORDS else cell.rjust(width)
            for cell, width, name in zip(row, widths, rows[0], strict=True)
        ).rstrip()
        for row in rows
    ]


def matching(
    journal: OpenJournal, filters: Filters, *, after: tuple[int, int] | None = None
) -> Iterator[tuple[JournalStep, int, TrajectoryEntry]]:
    """Yield each match with its number in its step, the newest step first.

    after: a step and a number in it; only later entries of this order are returned.
    """
    last_step, last_place = after or (math.inf, -1)
    for file in reversed(journal.files):
        if file.step > last_step or filters.step not in (None, file.step):
            continue
        step = load_step(file.path)
        for place, entry in enumerate(step.entries):
            trajectory = entry.trajectory
            if (
                (file.step < last_step or place > last_place)
                and filters.outcome in (None, trajectory.outcome)
                and filters.task in (None, trajectory.task_id)
            ):
                yield step, place, entry


def _closing(journal: OpenJournal, num_rows: int, num_found: int) -> str:
    shown = f"{num_rows} of {num_found}" if num_rows < num_found else str(num_found)
    first, last = journal.files[0].step, journal.files[-1].step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    more = "; --limit 0 shows all" if num_rows < num_found else ""
    replayed = (
        f"; {journal.num_superseded} files of steps played again"
        if (journal.num_superseded)
        else ""
    )
    return f"{shown} trajectories, {steps}; tokens: trained/sampled{more}{replayed}"
