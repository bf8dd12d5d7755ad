"""Audit a run's journal for reward hacking, during or after the run. Reads only.

Called by `rayloom inspect --hacking`, and by the recorder for the steps of an earlier process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from actors.journal.files import JournalStep
from service.hacking.features import StepFeatures, step_features
from service.hacking.kept import Kept, read_kept
from service.hacking.patterns import Detector
from service.inspect.reader import OpenJournal, load_step
from service.telemetry.findings import Finding

Verify = Callable[[JournalStep], Mapping[str, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HackingAudit:
    """The result of an audit. steps: for each step one part for each environment."""

    steps: tuple[tuple[StepFeatures, ...], ...]
    findings: tuple[Finding, ...]


def audit_hacking(journal: OpenJournal, *, verify: Verify | None = None) -> HackingAudit:
    """Audit a journal.

    verify: a shadow verifier; None uses the verdicts that the run has kept.
    Raises: ConfigError if a file cannot be read; OSError.
    """
    detector, steps, findings = Detector(), [], list[Finding]()
    for features in read_features(journal, verify=verify):
        steps.append(features)
        findings += detector.see(features)
    return HackingAudit(steps=tuple(steps), findings=tuple(findings))


def kept_of(journal: OpenJournal) -> Kept:
    """Read the records that the run has kept. Raises: OSError."""
    if journal.run_dir is None:
        return Kept()
    places = {(file.step, file.term) for file in journal.files}
    return read_kept(journal.run_dir.path, surviving=places)


def read_features(
    journal: OpenJournal, *, verify: Verify | None = None, newest: int | None = None
) -> Iterator[tuple[StepFeatures, ...]]:
    """Yield the features of each step.

    newest: number of newest steps; None for all. Raises: the errors of `audit_hacking`.
    """
    kept = kept_of(journal)
    files = journal.files if newest is None else journal.files[-newest:]
    for file in files:
        step = load_step(file.path)
        verdicts = kept.verdicts.get((file.step, file.term), {}) if verify is None else verify(step)
        yield tuple(each.with_verified(verdicts) for each in step_features(step))
