"""Write a run to a local database of Trackio, which `trackio show` displays.

Trackio's `Run.log` writes from a background thread, which drops a row that the database rejects
and only warns. This module calls the storage layer directly, as `trackio.import_csv` does: a write
that fails raises, and a point that is written twice remains one row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from service.config.sections import TrackioSettings
from service.trackers.tracker import Point, completion_row, sample_row

DIRECTORY_VARIABLE = "TRACKIO_DIR"


class Trackio:
    """The tracker for Trackio, which writes a row for each point.

    The rows have the run's id, so that --resume continues the same run in Trackio.
    """

    def __init__(
        self, settings: TrackioSettings, *, run_id: str, name: str, config: Mapping[str, Any]
    ) -> None:
        """Prepare to write to the project that the settings name.

        Args: config: the run's configuration, which Trackio shows next to the curves.
        Raises: ImportError without the package; OSError; ValueError if Trackio rejects the name of
        the project, or was imported in this process with another directory.
        """
        if settings.directory is not None:
            # The package reads the variable once, when it is imported.
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
        """Write a point as a row. Raises: OSError or sqlite3.Error if the write fails."""
        row: dict[str, Any] = {"term": point.term, **point.curves}
        if point.samples:
            row[f"{point.kind}/samples"] = {
                "_type": self._table.TYPE,
                "_value": [sample_row(each) for each in point.samples],
            }
        if point.completions:
            row[f"{point.kind}/completions"] = {
                "_type": self._table.TYPE,
                "_value": [
                    {**completion_row(each), "rewards": json.dumps(each.rewards)}
                    for each in point.completions
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
        """Do nothing, because `write` commits each point."""

    def close(self, *, is_ended: bool) -> None:
        """Do nothing: no connection is open, because `write` opens and closes the database."""

    def _id_of(self, point: Point) -> str:
        """Return an id of a point's row, so that a point that is written twice remains one row."""
        content = [self._run_id, point.kind, point.term, point.step, point.wall_time]
        written = json.dumps([*content, sorted(point.curves.items())])
        return blake2b(written.encode(), digest_size=16).hexdigest()
