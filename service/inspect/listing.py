"""List the trajectories of a run's journal, one in each line, the newest step first.

The journal has the stored tokens of the newest steps. `rayloom inspect` uses this module, and so
does the API, in a separate process on the run's node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import ConfigDict

from actors.journal.files import JournalStep, TrajectoryEntry
from actors.types import Outcome
from service.inspect.reader import OpenJournal, is_refused, journal_of, load_step
from service.inspect.view import advantage, exit_of, number
from service.launch.run_dir import RunDir
from service.units import visible_text

HEADER = ("step", "trajectory", "outcome", "return", "advantage", "turns", "tokens", "ledger")
_WORDS = frozenset({"trajectory", "group", "task", "outcome", "ledger", "environment"})

Place = tuple[int, int]
"""(step, index of an entry in that step of the journal)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLineAnswer:
    """One trajectory in a list of the journal's trajectories."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    step: int
    """the training step that took the trajectory"""
    id: str
    task: str
    outcome: Outcome
    episode_return: float
    advantage: str
    """one number, or the range over the trained tokens; empty: nothing was trained"""
    num_turns: int
    num_trained: int
    """number of trained tokens"""
    num_sampled: int
    """number of sampled tokens"""
    ledger: str
    """trained, or the reason why it was not trained"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalAnswer:
    """One page of the list of the journal's trajectories, the newest step first."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    trajectories: tuple[JournalLineAnswer, ...]
    next: str | None
    """the `cursor` of the next page; null: this is the last"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The filters of a list of trajectories.

    If step, task or outcome is None, it excludes nothing. limit: maximum number of rows; 0 for all.
    """

    step: int | None = None
    task: str | None = None
    outcome: Outcome | None = None
    limit: int = 0


def list_trajectories(journal: OpenJournal, filters: Filters) -> str:
    """Return the list of trajectories as a plain-text table.

    The last line says how many of the matching trajectories the table shows.
    """
    rows: list[tuple[str, ...]] = []
    num_found = 0
    for step, _, entry in matching(journal, filters):
        num_found += 1
        if not filters.limit or len(rows) < filters.limit:
            rows.append(_row(line_of(step, entry, is_refused=is_refused(journal, entry))))
    return "\n".join([*aligned([HEADER, *rows]), "", _closing(journal, len(rows), num_found)])


def journal_page(run_dir: RunDir, wanted: Filters, after: Place | None) -> JournalAnswer:
    """Return one page of a run's list of trajectories; it is empty if the run has no journal.

    Args: wanted: the filters; `limit` is the size of the page. after: the page begins after this
    entry; None for the first page.
    Raises: ConfigError if a file of the journal is damaged.
    """
    journal = journal_of(run_dir)
    lines: list[JournalLineAnswer] = []
    last = ""
    if journal is not None:
        for step, number_in_step, entry in matching(journal, wanted, after=after):
            if len(lines) == wanted.limit:
                return JournalAnswer(trajectories=tuple(lines), next=last)
            lines.append(line_of(step, entry, is_refused=is_refused(journal, entry)))
            last = f"{step.step}.{number_in_step}"
    return JournalAnswer(trajectories=tuple(lines), next=None)


def line_of(step: JournalStep, entry: TrajectoryEntry, *, is_refused: bool) -> JournalLineAnswer:
    trajectory = entry.trajectory
    return JournalLineAnswer(
        step=step.step,
        id=visible_text(trajectory.trajectory_id),
        task=visible_text(trajectory.task_id),
        outcome=trajectory.outcome,
        episode_return=trajectory.episode_return,
        advantage=advantage(entry),
        num_turns=len(trajectory.turns),
        num_trained=0 if is_refused else entry.num_trained,
        num_sampled=trajectory.num_sampled,
        ledger=exit_of(entry, is_refused=is_refused),
    )


def _row(line: JournalLineAnswer) -> tuple[str, ...]:
    return (
        str(line.step),
        line.id,
        line.outcome.value,
        number(line.episode_return),
        line.advantage,
        str(line.num_turns),
        f"{line.num_trained}/{line.num_sampled}",
        line.ledger,
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with aligned columns that are two spaces apart.

    The first row has the names of the columns. The columns in `_WORDS` are aligned to the left, the
    others to the right.
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
    """Yield the journal's entries that pass the filters, the newest step first.

    Yields: the step, the entry's index in the step, and the entry.
    Args: after: (step, index) of an entry; only entries after that entry are yielded.
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
