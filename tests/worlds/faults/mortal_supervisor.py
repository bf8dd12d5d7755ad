"""A substitute for the supervisor, in a real Ray actor, that dies if a test asks it to."""

from __future__ import annotations

import asyncio
import os

import ray

from service.run.health import Cursor, Ending, RunStatus


@ray.remote(num_cpus=0)
class Mortal:
    """A supervisor, as the command sees it, that ends its own process or the run.

    dies: end the process after the first call of `status`, instead of ending the run. name: the
    supervisor's name in its status. checkpoint_step: step of the newest committed checkpoint.
    """

    def __init__(self, *, dies: bool, name: str = "", checkpoint_step: int = 0) -> None:
        self.dies, self.name, self.checkpoint_step = dies, name, checkpoint_step
        self.was_asked = asyncio.Event()

    async def status(self, cursor: Cursor) -> RunStatus:
        self.was_asked.set()
        return RunStatus(
            name="small", phase="training", started_at=0.0, steps=4, step=cursor.steps,
            supervisor=self.name, checkpoint_step=self.checkpoint_step,
        )  # fmt: skip

    async def run(self) -> Ending:
        if self.dies:
            await self.was_asked.wait()
            # Wait until the answer of `status` is sent.
            await asyncio.sleep(0.5)
            os._exit(1)
        return Ending(reason="all 4 steps are done", has_report=False)
