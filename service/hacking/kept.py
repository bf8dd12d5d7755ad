"""The audit's records in a run's directory: findings of reward hacking, and verdicts.

`hacking.jsonl` has one record in each line. Its size is bounded, because it keeps only the newest
verdicts. The audit can compute everything else again from the journal, but not a verdict, because
the user's verifier may have changed. The recorder of a run writes the file, and reads it when the
run continues; `rayloom inspect --hacking` reads it too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from service.telemetry.findings import Finding

FILE = "hacking.jsonl"
# Verdicts of about a thousand steps; a journal keeps fewer.
MAX_BYTES = 2**22
Place = tuple[int, int]
"""A step, and the term that trained it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The record of a step with findings or verdicts."""

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
    """Read the records of the steps that the run has not undone; omit an incomplete line.

    surviving: the steps of the journal with their terms. Lines of older steps always count.
    Raises: OSError.
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
