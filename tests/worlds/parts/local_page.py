"""The run that the page reads, in this process, with a real store and a journal."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from service.inspect.listing import Filters, JournalAnswer, Place, journal_page
from service.inspect.view import trajectory_json
from service.launch.run_dir import RunDir
from service.report.document import LiveState, RunPicture
from service.store.lineage import read_history
from service.telemetry.summary import summarize_run
from worlds.parts.submission_service import Service


@dataclass
class LocalPage:
    """The part of `service.api.ports.RunPort` that the page's routes call."""

    service: Service

    async def picture(self, *, term: int, after: int) -> RunPicture:
        history = read_history(self.service.store)
        after = after if term == history.num_terms else 0
        stats = self.service.queue.stats(now=0.0)
        return RunPicture(
            summary=summarize_run(
                history, ledger=stats.ledger, wall_s=1.0, versions={"ray": "2"}, name="served"
            ),
            history=replace(history, steps=tuple(s for s in history.steps if s.step > after)),
            config_text="run: {}",
            after=after,
            live=LiveState(
                phase="training", phase_detail="", started_at=0.0, checkpoint_step=0,
                engines={"engine-1": 0}, engines_expected=1, queue=stats, max_items=8,
                max_bytes=1 << 20, max_lag=1, notices=("it began",),
            ),
        )  # fmt: skip

    async def journal(self, wanted: Filters, *, after: Place | None) -> JournalAnswer:
        return await asyncio.to_thread(journal_page, self._run_dir, wanted, after)

    async def trajectory(self, name: str) -> bytes | None:
        return await asyncio.to_thread(trajectory_json, self._run_dir, name)

    @property
    def _run_dir(self) -> RunDir:
        return RunDir(path=self.service.directory)
