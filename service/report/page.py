"""report.html: the page over a finished run.

Called by the supervisor at the end of a term, and by whoever wants a report of a run directory
again.
"""

from __future__ import annotations

from pathlib import Path

from service.page.packed import page_with
from service.report.document import RunPicture, run_document
from service.telemetry.summary import HistoryLike, RunSummary, write_aside


def write_report(
    path: Path, *, summary: RunSummary, history: HistoryLike, config_text: str
) -> None:
    """Write report.html aside and rename it. config_text: the effective configuration, as YAML."""
    write_aside(path, render_report(summary=summary, history=history, config_text=config_text))


def render_report(*, summary: RunSummary, history: HistoryLike, config_text: str) -> str:
    """Return the page as text."""
    picture = RunPicture(summary=summary, history=history, config_text=config_text)
    return page_with(run_document(picture))
