"""The merge/advantage actor: fetches a step's payloads, builds the batch, stores the shards.

Payloads are read in place (views of shared memory); only references leave. A payload that is gone
is named, so that the supervisor can have its rollout played again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from actors.journal.files import Journal, JournalSettings
from actors.merge.payloads import read_groups
from actors.merge.report import StepReport
from actors.merge.settings import StepSettings
from actors.merge.step import build_step
from actors.trajectory_queue.columns import TrajectoryColumns
from actors.trajectory_queue.ledger import Settlement
from actors.trajectory_queue.messages import StepInput

FETCH_DEADLINE_S = 60.0
# Once one payload is known to be lost, the others are here or nearly so.
PROBE_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReply:
    """shards: a reference to each rank's RankShard, in the order of ranks.

    notice: what a person should know, once; mostly empty.
    """

    step: int
    shards: tuple[Any, ...]
    settlements: tuple[Settlement, ...]
    report: StepReport
    notice: str = ""


@ray.remote
class MergeActor:
    """Stateless between steps: a replacement goes on where this one died."""

    def __init__(self, settings: StepSettings, journal: JournalSettings | None = None) -> None:
        """journal: where each step is written down; None: nowhere."""
        self._settings = settings
        self._journal = Journal(journal) if journal is not None else None

    def build(self, step_input: StepInput, trainer_version: int) -> MergeReply:
        """Build the batch of a taken step. trainer_version: what the trainer holds.

        Raises: PayloadsLost, naming the rollouts; ValueError, as build_step.
        """
        groups = read_groups(step_input, _fetch(step_input.blocks))
        result = build_step(
            groups, self._settings, step=step_input.step, trainer_version=trainer_version
        )
        return MergeReply(
            step=step_input.step,
            shards=tuple(ray.put(shard) for shard in result.shards),
            settlements=result.settlements,
            report=result.report,
            notice=self._journal.write(result) if self._journal is not None else "",
        )


def _fetch(blocks: Sequence[Any]) -> list[TrajectoryColumns | None]:
    """The blocks in their order; None for one that is lost or does not come in time."""
    references = list(blocks)
    try:
        return list(ray.get(references, timeout=FETCH_DEADLINE_S))
    except (ObjectLostError, GetTimeoutError):
        ready, _ = ray.wait(references, num_returns=len(references), timeout=PROBE_DEADLINE_S)
        here = set(ready)
        return [_fetch_one(block) if block in here else None for block in references]


def _fetch_one(block: Any) -> TrajectoryColumns | None:
    try:
        columns: TrajectoryColumns = ray.get(block, timeout=PROBE_DEADLINE_S)
    except (ObjectLostError, GetTimeoutError):
        return None
    return columns
