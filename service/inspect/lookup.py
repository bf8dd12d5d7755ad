"""What the API shows of a run's journal: a page of its trajectories, and one token by token.

Read in a process of its own on the run's node: the tokenizer's import takes seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from actors.journal.record import JournalStep, TrajectoryEntry
from service.inspect.build import build_view
from service.inspect.document import trajectory_document
from service.inspect.facts import advantage, exit_of
from service.inspect.listing import Filters, matching
from service.inspect.reader import (
    OpenJournal,
    UnknownTrajectory,
    find_entry,
    is_refused,
    open_journal,
    tokenizer_of,
)
from service.launch.run_dir import RunDir
from service.visible import visible_text

Place = tuple[int, int]
"""A step, and an entry's number in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLine:
    """A trajectory in a list."""

    step: int
    id: str
    task: str
    outcome: str
    episode_return: float
    advantage: str
    """One number, or its range; empty if nothing was trained."""
    num_turns: int
    num_trained: int
    """Tokens."""
    num_sampled: int
    ledger: str
    """As a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPage:
    """Trajectories, those of the newest step first."""

    lines: tuple[JournalLine, ...]
    next: Place | None
    """The position after which the next page begins; None: there are no more."""


def journal_page(run_dir: RunDir, wanted: Filters, after: Place | None) -> JournalPage:
    """Return a page; empty if there is no journal. Raises: ConfigError for a damaged file."""
    journal = _opened(run_dir)
    lines: list[JournalLine] = []
    place = None
    if journal is not None:
        for step, number, entry in matching(journal, wanted, after=after):
            if len(lines) == wanted.limit:
                return JournalPage(lines=tuple(lines), next=place)
            lines.append(_line(step, entry, is_refused=is_refused(journal, entry)))
            place = (step.step, number)
    return JournalPage(lines=tuple(lines), next=None)


def trajectory_json(run_dir: RunDir, name: str) -> bytes | None:
    """Return the page's document on a trajectory; None for one that the journal does not hold.

    name: as `find_entry`. Raises: ConfigError for a damaged file.
    """
    journal = _opened(run_dir)
    if journal is None:
        return None
    try:
        step, entry = find_entry(journal, name)
    except UnknownTrajectory:
        return None
    view = build_view(step, entry, tokenizer_of(journal), is_refused=is_refused(journal, entry))
    # Escaped: a lone surrogate may be in an environment's own words.
    return json.dumps(trajectory_document(view), allow_nan=False).encode("ascii")


def _opened(run_dir: RunDir) -> OpenJournal | None:
    has_any = run_dir.journal.is_dir() and any(run_dir.journal.glob("*.journal"))
    return open_journal(run_dir.path) if has_any else None


def _line(step: JournalStep, entry: TrajectoryEntry, *, is_refused: bool) -> JournalLine:
    trajectory = entry.trajectory
    return JournalLine(
        step=step.step,
        id=visible_text(trajectory.trajectory_id),
        task=visible_text(trajectory.task_id),
        outcome=trajectory.outcome.value,
        episode_return=trajectory.episode_return,
        advantage=advantage(entry),
        num_turns=len(trajectory.turns),
        num_trained=0 if is_refused else entry.num_trained,
        num_sampled=trajectory.num_sampled,
        ledger=exit_of(entry, is_refused=is_refused),
    )
