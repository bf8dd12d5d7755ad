"""Format the audit for reward hacking as text: a line for each step, and the findings."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from service.hacking.features import StepFeatures
from service.hacking.read import HackingAudit
from service.hacking.window import MIN_EARLIER_STEPS, RECENT_STEPS
from service.inspect.listing import aligned
from service.inspect.reader import OpenJournal
from service.telemetry.findings import Finding
from service.visible import visible_text

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


def describe(journal: OpenJournal, found: HackingAudit, *, limit: int) -> list[str]:
    """Describe an audit. limit: maximum number of newest lines in the table; 0 for all."""
    rows = [_row(part) for parts in found.steps for part in parts]
    shown = rows[-limit:] if limit else rows
    lines = [*aligned([_HEADER, *shown]), "", _MEANING]
    if len(shown) < len(rows):
        lines.append(f"{len(shown)} of {len(rows)} lines; --limit 0 shows all")
    lines.append("")
    if not found.findings:
        too_few = len(found.steps) < RECENT_STEPS + MIN_EARLIER_STEPS
        least = f"; at least {RECENT_STEPS + MIN_EARLIER_STEPS} are needed" if too_few else ""
        return [*lines, f"no pattern was found in {len(found.steps)} steps{least}"]
    for finding in found.findings:
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
