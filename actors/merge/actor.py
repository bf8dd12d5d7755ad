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
from actors.merge.disposition import problem_notices
from actors.merge.groups import Group, classify_groups, read_groups
from actors.merge.report import StepReport
from actors.merge.scoring import plan_scores, read_scores
from actors.merge.settings import StepSettings
from actors.merge.step import StepResult, build_step
from actors.trajectory_queue.codec import TrajectoryBlock
from actors.trajectory_queue.ledger import EvictionReason, RolloutOutcome
from actors.trajectory_queue.messages import StepInput

FETCH_DEADLINE_S = 60.0
# Once one payload is known to be lost, the others are here or nearly so.
PROBE_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStep:
    """A step whose batch lies in the object store."""

    step: int
    """Counted from 1."""
    shards: tuple[Any, ...]
    """A reference to each rank's RankShard, in the order of ranks."""
    outcomes: tuple[RolloutOutcome, ...]
    report: StepReport
    value_shards: tuple[Any, ...] = ()
    """Likewise to its ValueShard; empty without a critic."""
    notices: tuple[str, ...] = ()
    """What a person should know; mostly none."""

    def outcomes_after(self, *, is_all_skipped: bool) -> tuple[RolloutOutcome, ...]:
        """Nothing was trained by a step whose every update was refused as not finite."""
        if not is_all_skipped:
            return self.outcomes
        reason = EvictionReason.NONFINITE_STEP
        return tuple(
            RolloutOutcome(rollout_id=item.rollout_id, reason=item.reason or reason)
            for item in self.outcomes
        )


@ray.remote
class MergeActor:
    """Keeps nothing from one call to the next: a replacement goes on where this one died."""

    def __init__(self, settings: StepSettings, journal: JournalSettings | None = None) -> None:
        """journal: where each step is written down; None: nowhere."""
        self._settings = settings
        self._journal = Journal(journal) if journal is not None else None

    def plan(self, step_input: StepInput, trainer_version: int) -> tuple[Any, ...]:
        """Lay out what models must score; return a reference to each rank's part.

        Asked for only where rewards or advantages need a reference or a critic. `build` lays the
        same step out again to read the scores, so that nothing has to be kept for it.
        Raises: PayloadsLost, naming the rollouts.
        """
        shards = plan_scores(
            self._read(step_input),
            self._settings,
            step=step_input.step,
            trainer_version=trainer_version,
        )
        return tuple(ray.put(shard) for shard in shards)

    def build(
        self, step_input: StepInput, trainer_version: int, scores: Sequence[Any] = ()
    ) -> BuiltStep:
        """Build the batch of a taken step. trainer_version: what the trainer holds.

        Args: scores: of each rank, a reference to its answers to the plan; empty where none was
        asked for.
        Raises: PayloadsLost, naming the rollouts; ValueError, as build_step and read_scores.
        """
        groups = self._read(step_input)
        if scores:
            answers = ray.get(list(scores), timeout=FETCH_DEADLINE_S)
            groups = read_scores(groups, self._settings, answers)
        result = build_step(
            groups, self._settings, step=step_input.step, trainer_version=trainer_version
        )
        return BuiltStep(
            step=step_input.step,
            shards=tuple(ray.put(shard) for shard in result.shards),
            outcomes=result.outcomes,
            report=result.report,
            value_shards=tuple(ray.put(shard) for shard in result.value_shards),
            notices=self._notices(result),
        )

    def _notices(self, result: StepResult) -> tuple[str, ...]:
        unwritten = self._journal.write(result) if self._journal is not None else ""
        # Counted as the run and its journal do: the trainer holds version n - 1 at step n.
        problems = problem_notices(result.members, step=result.report.trainer_version + 1)
        return (*problems, unwritten) if unwritten else problems

    def _read(self, step_input: StepInput) -> tuple[Group, ...]:
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
