"""A substitute for the merge actor that dies on demand, in a module that Ray's workers import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.merge.actor import BuiltStep
from actors.merge.groups import PayloadsLost
from actors.trajectory_queue.messages import StepInput
from worlds.parts.loop_world import report

# Large enough that Ray stores the array in its object store, not in the reply.
SIZE = 200_000


class Maker:
    """A merge actor that dies once for each line of a file; each death removes one line."""

    def __init__(self, deaths: Path) -> None:
        self._deaths = deaths

    def plan(self, step_input: StepInput, version: int) -> tuple[Any, ...]:
        self._maybe_die()
        if version < 0:
            raise PayloadsLost(["r1"])
        return (ray.put(np.full(SIZE, version)),)

    def build(
        self, step_input: StepInput, version: int, scores: Any, republished: Any
    ) -> BuiltStep:
        self._maybe_die()
        return BuiltStep(
            step=1,
            shards=(ray.put(np.full(SIZE, version)),),
            outcomes={},
            report=report(1),
        )

    def _maybe_die(self) -> None:
        lines = self._deaths.read_text().splitlines()
        if lines:
            self._deaths.write_text("\n".join(lines[1:]))
            os._exit(1)
