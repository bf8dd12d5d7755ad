"""A trajectory as one HTML file that needs nothing else: the page over it."""

from __future__ import annotations

from pathlib import Path

from service.inspect.document import trajectory_document
from service.inspect.view import TrajectoryView
from service.page.packed import page_with
from service.telemetry.summary import write_aside


def write_page(path: Path, view: TrajectoryView) -> None:
    """Write the page aside and rename it. Raises: OSError."""
    write_aside(path, page_with(trajectory_document(view)))
