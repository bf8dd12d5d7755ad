"""Audit a run's journal for reward hacking, during or after the run, and describe it. Reads only.

Called by `rayloom inspect --hacking`, and by the recorder for the steps of an earlier process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from actors.journal.files import JournalStep
from service.hacking.features import StepFeatures, step_features
from service.hacking.kept import Line, read_kept
from service.hacking.window import MIN_EARLIER_STEPS, RECENT_STEPS
from service.inspect.listing import aligned
from service.inspect.reader import OpenJournal, load_step
from service.telemetry.findings import Finding
from service.visible import visible_text

Verify = Callable[[JournalStep], Mapping[str, bool]]


def kept_of(journal: OpenJournal) -> list[Line]:
    """Read the records that the run has kept. Raises: OSError."""
    if journal.run_dir is None:
        return []
    places = {(file.step, file.term) for file in journal.files}
    return read_kept(journal.run_dir.path, surviving=places)


def read_features(
    journal: OpenJournal, *, verify: Verify | None = None, newest: int | None = None
) -> Iterator[tuple[StepFeatures, ...]]:
    """Yield the features of each step, one part for each environment.

    verify: a shadow verifier; None uses the verdicts that the run has kept. newest: number of
    newest steps; None for all. Raises: ConfigError if a file cannot be read; OSError.
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
    """Describe an audit. limit: maximum number of newest lines in the table; 0 for all."""
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
