"""A run in a local database of Trackio, through the package `trackio`; `trackio show` draws it.

`trackio.init` and `Run.log` write from a thread of their own, which drops what the database does
not take and says so in a warning. The points are given to the database itself, as
`trackio.import_csv` does: a write that fails raises, and a point that is written again is the same
row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from service.trackers.settings import TrackioSettings
from service.trackers.tracker import Point

DIRECTORY_VARIABLE = "TRACKIO_DIR"


class Trackio:
    """A row for each point; it has the run's own id, so that --resume goes on with the run."""

    def __init__(
        self, settings: TrackioSettings, *, run_id: str, name: str, config: Mapping[str, Any]
    ) -> None:
        """config: what is shown beside the curves. Raises: ImportError; OSError; ValueError for a
        name of a project that Trackio does not take, and where it writes elsewhere already."""
        if settings.directory is not None:
            # Read once, when the package is imported.
            os.environ[DIRECTORY_VARIABLE] = str(Path(settings.directory).expanduser())
        from trackio import Table
        from trackio.sqlite_storage import SQLiteStorage
        from trackio.utils import TRACKIO_DIR

        asked = os.environ.get(DIRECTORY_VARIABLE)
        if asked and Path(asked) != TRACKIO_DIR:
            raise ValueError(
                f"Trackio writes to {TRACKIO_DIR} in this process, expected {asked}; the package "
                f"was imported before: set {DIRECTORY_VARIABLE} in the environment of the run"
            )
        SQLiteStorage.validate_project_name(settings.project)
        self._table, self._storage = Table, SQLiteStorage
        self._project, self._run_id, self._name = settings.project, run_id, name
        self._config: Mapping[str, Any] | None = {**config, "_Group": settings.group}

    def write(self, point: Point) -> None:
        """Raises: OSError; sqlite3.Error."""
        row: dict[str, Any] = {"term": point.term, **point.curves}
        if point.samples:
            row[f"{point.kind}/samples"] = {
                "_type": self._table.TYPE,
                "_value": [
                    {
                        "task": sample.task_id,
                        "prompt": sample.text.prompt,
                        "answer": sample.text.answer,
                        "outcome": sample.outcome.value,
                        "return": sample.episode_return,
                    }
                    for sample in point.samples
                ],
            }
        self._storage.bulk_log(
            project=self._project,
            run=self._name,
            run_id=self._run_id,
            metrics_list=[row],
            steps=[point.step],
            timestamps=[datetime.fromtimestamp(point.wall_time, UTC).isoformat()],
            log_ids=[self._id_of(point)],
            config=self._config,
        )
        self._config = None

    def flush(self) -> None:
        """Each point is committed to the database."""

    def close(self, *, is_ended: bool) -> None:
        """Each write opens the database and closes it."""

    def _id_of(self, point: Point) -> str:
        """The same for a point that is written once more, after a kill before it was noted."""
        content = [self._run_id, point.kind, point.term, point.step, point.wall_time]
        written = json.dumps([*content, sorted(point.curves.items())])
        return blake2b(written.encode(), digest_size=16).hexdigest()
