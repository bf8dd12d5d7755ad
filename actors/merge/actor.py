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
from actors.merge.candidates import NO_SCORES
from actors.merge.groups import (
    ClassifiedGroup,
    classify_groups,
    problem_notices,
    read_groups,
)
from actors.merge.report import StepReport
from actors.merge.scoring import ScorePlan, plan_scores, read_scores
from actors.merge.settings import StepSettings
from actors.merge.step import StepResult, build_step
from actors.trajectory_queue.codec import TrajectoryBlock
from actors.trajectory_queue.ledger import Settlement
from actors.trajectory_queue.messages import StepInput

FETCH_DEADLINE_S = 60.0
# Once one payload is known to be lost, the others are here or nearly so.
PROBE_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReply:
    """shards: a reference to each rank's RankShard, in the order of ranks. value_shards: likewise
    to its ValueShard; empty without a critic.

    notices: what a person should know; mostly none.
    """

    step: int
    shards: tuple[Any, ...]
    settlements: tuple[Settlement, ...]
    report: StepReport
    value_shards: tuple[Any, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A step whose samples are being scored: it is read already."""

    step: int
    groups: tuple[ClassifiedGroup, ...]
    plan: ScorePlan


@ray.remote
class MergeActor:
    """Keeps nothing from one step to the next: a replacement goes on where this one died."""

    def __init__(self, settings: StepSettings, journal: JournalSettings | None = None) -> None:
        """journal: where each step is written down; None: nowhere."""
        self._settings = settings
        self._journal = Journal(journal) if journal is not None else None
        self._planned: _Planned | None = None

    def plan(self, step_input: StepInput, trainer_version: int) -> tuple[Any, ...]:
        """Read a taken step; return a reference to what each rank must score before `build`.

        Asked for only where rewards or advantages need a reference or a critic.
        Raises: PayloadsLost, naming the rollouts.
        """
        groups = self._read(step_input)
        plan = plan_scores(
            groups, self._settings, step=step_input.step, trainer_version=trainer_version
        )
        self._planned = _Planned(step=step_input.step, groups=groups, plan=plan)
        return tuple(ray.put(shard) for shard in plan.shards)

    def build(
        self, step_input: StepInput, trainer_version: int, scores: Sequence[Any] = ()
    ) -> MergeReply:
        """Build the batch of a taken step. trainer_version: what the trainer holds.

        Args: scores: of each rank, a reference to its answers to the plan; empty where none was
        asked for.
        Raises: PayloadsLost, naming the rollouts; ValueError, as build_step and read_scores.
        """
        planned, self._planned = self._planned, None
        if scores and planned is not None and planned.step == step_input.step:
            groups = planned.groups
            found = read_scores(planned.plan, ray.get(list(scores), timeout=FETCH_DEADLINE_S))
        else:
            groups, found = self._read(step_input), NO_SCORES
        result = build_step(
            groups,
            self._settings,
            step=step_input.step,
            trainer_version=trainer_version,
            scores=found,
        )
        return MergeReply(
            step=step_input.step,
            shards=tuple(ray.put(shard) for shard in result.shards),
            settlements=result.settlements,
            report=result.report,
            value_shards=tuple(ray.put(shard) for shard in result.value_shards),
            notices=self._notices(result),
        )

    def _notices(self, result: StepResult) -> tuple[str, ...]:
        unwritten = self._journal.write(result) if self._journal is not None else ""
        # Counted as the run and its journal do: the trainer holds version n - 1 at step n.
        problems = problem_notices(result.classified, step=result.report.trainer_version + 1)
        return (*problems, unwritten) if unwritten else problems

    def _read(self, step_input: StepInput) -> tuple[ClassifiedGroup, ...]:
        return classify_groups(read_groups(step_input, _fetch(step_input.blocks)), self._settings)


def _fetch(blocks: Sequence[Any]) -> list[TrajectoryBlock | None]:
    """The blocks in their order; None for one that is lost or does not come in time."""
    references = list(blocks)
    try:
        return list(ray.get(references, timeout=FETCH_DEADLINE_S))
    except (ObjectLostError, GetTimeoutError):
        ready, _ = ray.wait(references, num_returns=len(references), timeout=PROBE_DEADLINE_S)
        here = set(ready)
        return [_fetch_one(block) if block in here else None for block in references]


def _fetch_one(block: Any) -> TrajectoryBlock | None:
    try:
        found: TrajectoryBlock = ray.get(block, timeout=PROBE_DEADLINE_S)
    except (ObjectLostError, GetTimeoutError):
        return None
    return found
