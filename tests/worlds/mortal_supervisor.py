"""A supervisor that dies when it is told to, in a real actor."""

from __future__ import annotations

import os

import ray

from service.run.health import Cursor, Ending, Phase, RunStatus


@ray.remote(num_cpus=0)
class Mortal:
    """What the command sees of a supervisor: it ends its own process, or the run."""

    def __init__(self, *, dies: bool) -> None:
        self.dies = dies

    async def status(self, cursor: Cursor) -> RunStatus:
        return RunStatus(
            name="small", phase=Phase.TRAINING, started_at=0.0, steps=4, step=cursor.steps
        )

    async def run(self) -> Ending:
        if self.dies:
            os._exit(1)
        return Ending(reason="all 4 steps are done", has_report=False)
