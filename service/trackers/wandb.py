"""Write a run to Weights & Biases, or to the offline files of W&B, with the package `wandb`.

The package's own step can only increase, but a run may return to a checkpoint. The curves are
therefore drawn over a metric `step`, and `term` distinguishes steps that were trained again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from service.config.sections import WandbSettings
from service.trackers.tracker import Point, completion_row, sample_row

# The wandb process buffers data before it writes its file; a kill -9 of our process ends it too.
FLUSH_EVERY_S = 1.0
FLUSHED_AFTER_S = 2.0


class Wandb:
    """The tracker for W&B. It owns a wandb process, which ends with this process."""

    def __init__(
        self, settings: WandbSettings, *, run_id: str, name: str, config: Any, directory: Path
    ) -> None:
        """Begin or continue the W&B run with the id `run_id`.

        Args: config: the run's configuration, which W&B shows next to the curves. directory: the
        directory in which wandb writes its files. Raises: ImportError; wandb.Error; OSError.
        """
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        self._run: Any = wandb.init(
            id=run_id,
            resume="allow",
            name=name,
            config=config,
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags,
            mode=settings.mode,
            dir=str(directory),
            # Only the curves: no data of the machine, the code, the output or the environment.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
                x_transaction_log_flush_interval=FLUSH_EVERY_S,
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, point: Point) -> None:
        row: dict[str, Any] = {"step": point.step, "term": point.term, **point.curves}
        if point.samples:
            row[f"{point.kind}/samples"] = self._table(point, map(sample_row, point.samples))
        if point.completions:
            rows = (
                {**completion_row(each), "rewards": json.dumps(each.rewards)}
                for each in point.completions
            )
            row[f"{point.kind}/completions"] = self._table(point, rows)
        self._run.log(row)

    def flush(self) -> None:
        """Wait FLUSHED_AFTER_S seconds, after which wandb's process should have written everything.

        The package wandb has no function that flushes.
        """
        time.sleep(FLUSHED_AFTER_S)

    def close(self, *, is_ended: bool) -> None:
        # If another process continues the run, wandb must not show the run as ended. The wandb
        # process ends with this one.
        if is_ended:
            self._run.finish()

    def _table(self, point: Point, rows: Iterable[Mapping[str, Any]]) -> Any:
        """Return a wandb table of at least one row, with the point's step as the first column."""
        table = [{"step": point.step, **row} for row in rows]
        return self._wandb.Table(columns=list(table[0]), data=[list(row.values()) for row in table])
