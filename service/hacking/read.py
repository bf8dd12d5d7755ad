"""Audit a run's journal for reward hacking, during or after the run, and describe the findings.

`rayloom inspect --hacking` uses this module. So does a run's recorder, which audits each stored
step (after a resume, it first reads the earlier steps). The recorder writes `hacking.jsonl` in the
run's directory, one record in each line: findings, and the newest verdicts of the user's second
verifier. Verdicts must be stored, because the user may change the verifier; everything else can be
computed again from the journal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from actors.journal.files import JournalStep
from service.hacking.features import MIN_EARLIER_STEPS, RECENT_STEPS, StepFeatures, step_features
from service.inspect.listing import aligned
from service.inspect.reader import OpenJournal, load_step
from service.telemetry.records import Finding
from service.units import visible_text

FILE = "hacking.jsonl"
# Verdicts of about a thousand steps; a journal keeps fewer.
MAX_BYTES = 2**22
Place = tuple[int, int]
"""A step, and the term that trained it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A record of the audit: a finding, or the shadow verifier's verdicts on one step."""

    step: int
    term: int
    finding: Finding | None = None
    verdicts: Mapping[str, bool] = field(default_factory=dict)
    """Verdicts by trajectory id."""


_LINES = TypeAdapter(Line)


def append(run_dir: Path, line: Line) -> None:
    """Append a record. Raises: OSError."""
    tree: dict[str, Any] = _LINES.dump_python(line, mode="json")
    path = run_dir / FILE
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({key: value for key, value in tree.items() if value}) + "\n")
        is_long = file.tell() > MAX_BYTES
    if is_long:
        _leave_out_old_verdicts(path)


def _leave_out_old_verdicts(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    half = len(lines) // 2
    kept = [text for text in lines[:half] if '"finding": ' in text] + lines[half:]
    shorter = path.with_suffix(".new")
    shorter.write_text("".join(kept), encoding="utf-8")
    shorter.replace(path)


def read_kept(run_dir: Path, *, surviving: Collection[Place]) -> list[Line]:
    """Return the audit's records, without records of steps that a return to a checkpoint undid.

    Records of steps before the journal's first step are returned too. Invalid lines are skipped,
    such as a line that was written only in part.
    surviving: the journal's steps that were not undone, as pairs (step, term). A term of the run
    begins when the run starts or returns to a checkpoint. Raises: OSError.
    """
    file = run_dir / FILE
    if not file.is_file():
        return []
    oldest = min((step for step, _ in surviving), default=0)
    kept = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            line = _LINES.validate_json(text)
        except ValidationError:
            continue
        if line.step < oldest or (line.step, line.term) in surviving:
            kept.append(line)
    return kept


Verify = Callable[[JournalStep], Mapping[str, bool]]


def kept_of(journal: OpenJournal) -> list[Line]:
    """Return the records of a run's audit for reward hacking, without records of undone steps.

    `journal.files` says which steps were not undone. The list is empty if the journal is a single
    file without a run directory. Raises: OSError.
    """
    if journal.run_dir is None:
        return []
    places = {(file.step, file.term) for file in journal.files}
    return read_kept(journal.run_dir.path, surviving=places)


def read_features(
    journal: OpenJournal, *, verify: Verify | None = None, newest: int | None = None
) -> Iterator[tuple[StepFeatures, ...]]:
    """Yield the features of each step, as a tuple with one element for each environment.

    verify: shadow verifier, which gives each trajectory a second verdict. If None, the verdicts in
    `hacking.jsonl` are used. newest: how many of the newest steps to read; None for all.
    Raises: ConfigError if a file cannot be read; OSError.
    """
    kept = {
        (line.step, line.term): line.verdicts for line in kept_of(journal) if line.finding is None
    }
    files = journal.files if newest is None else journal.files[-newest:]
    for file in files:
        step = load_step(file.path)
        verdicts = kept.get((file.step, file.term), {}) if verify is None else verify(step)
        yield tuple(each.with_verified(verdicts) for each in step_features(step))


_HEADER = (
    "step", "environment", "graded", "missing", "reward", "tokens", "turns", "equal", "malformed",
    "repeated", "copied", "verified",
)  # fmt: skip
_MEANING = (
    "means and shares of the graded trajectories; missing: rollouts that failed; tokens: median; "
    "equal: share of the most frequent answer"
)
_CLOSING = (
    "these patterns are new in the run and earn reward, or are always wrong; the run cannot decide "
    "whether they are wanted (docs/hacking.md)"
)


def describe_audit(
    journal: OpenJournal,
    steps: Sequence[Sequence[StepFeatures]],
    findings: Sequence[Finding],
    *,
    limit: int,
) -> list[str]:
    """Return the result of an audit as lines of text.

    limit: maximum number of lines in the table; the newest are shown. 0 shows all lines.
    """
    rows = [_row(part) for parts in steps for part in parts]
    shown = rows[-limit:] if limit else rows
    lines = [*aligned([_HEADER, *shown]), "", _MEANING]
    if len(shown) < len(rows):
        lines.append(f"{len(shown)} of {len(rows)} lines; --limit 0 shows all")
    lines.append("")
    if not findings:
        too_few = len(steps) < RECENT_STEPS + MIN_EARLIER_STEPS
        least = f"; at least {RECENT_STEPS + MIN_EARLIER_STEPS} are needed" if too_few else ""
        return [*lines, f"no pattern was found in {len(steps)} steps{least}"]
    for finding in findings:
        lines += _of_finding(journal, finding)
    return [*lines, "", _CLOSING]


def _of_finding(journal: OpenJournal, finding: Finding) -> Iterator[str]:
    yield visible_text(f"{finding.kind} (found at step {finding.step})")
    yield visible_text(f"  {finding.text}")
    for name in finding.examples:
        yield visible_text(f"  rayloom inspect {journal.place} {name}")


def _row(part: StepFeatures) -> tuple[str, ...]:
    graded = part.is_graded
    number = int(graded.sum())

    def mean(values: np.ndarray, form: str = ".2f") -> str:
        known = values[graded & ~np.isnan(values.astype(np.float64))]
        return format(float(known.mean()), form) if known.size else ""

    most = np.unique(part.answer[graded], return_counts=True)[1].max(initial=0)
    return (
        str(part.step),
        visible_text(part.environment),
        str(number),
        str(part.num_missing),
        mean(part.reward, ".3g"),
        f"{np.median(part.num_tokens[graded]):.0f}" if number else "",
        mean(part.num_turns, ".1f"),
        f"{most / number:.2f}" if number else "",
        mean(part.is_malformed),
        mean(part.repeated),
        mean(part.copied),
        mean(part.verified),
    )
