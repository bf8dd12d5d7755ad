"""The merge actor, which fetches a step's payloads, builds the batch and stores the shards.

In each step the loop calls `build` once, after `plan` if the run has a critic or a reference.
Payloads are read without a copy. The shards are put into Ray's object store, and the reply contains
only their references. `PayloadsLost` names the rollouts whose payloads were lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from actors.batch import array_bytes
from actors.merge.groups import (
    GroupMembers,
    ScoresLost,
    classify_groups,
    problem_notices,
    read_groups,
)
from actors.merge.journal import Journal
from actors.merge.report import GroupReturns, StepReport, group_returns
from actors.merge.scoring import plan_scores, read_scores
from actors.merge.settings import StepSettings
from actors.merge.step import StepResult, build_step
from actors.trajectory_queue.codec import TrajectoryBlock
from actors.trajectory_queue.ledger import EvictionReason, RolloutOutcomes, TokenCounts
from actors.trajectory_queue.messages import StepInput

FETCH_DEADLINE_S = 60.0
# Shorter deadline after a fetch has failed: the other payloads are local, or FETCH_DEADLINE_S has
# passed for them already.
PROBE_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStep:
    """A step whose batch is in the object store."""

    step: int
    """The step's number, counted from 1."""
    shards: tuple[Any, ...]
    """A reference to each rank's RankShard, in the order of ranks."""
    outcomes: RolloutOutcomes
    report: StepReport
    notices: tuple[str, ...] = ()
    """Warnings for the user; usually empty."""
    returns: tuple[GroupReturns, ...] = ()
    """The returns of each group of the step."""
    num_bytes: int = 0
    """Number of bytes of all shards."""

    def report_after(self, *, is_all_skipped: bool, dropped: TokenCounts) -> StepReport:
        """Return the report with the final counts of tokens.

        Args: is_all_skipped: whether all updates of the step were skipped. dropped: the
        tokens of attempts that ended since the previous step without being used by any step.
        """
        own = self.report.tokens
        if is_all_skipped:
            own = own.without_training(EvictionReason.NONFINITE_STEP)
        return replace(self.report, tokens=own.plus(dropped))

    def outcomes_after(self, *, is_all_skipped: bool) -> RolloutOutcomes:
        """Return the step's outcomes. If all updates were skipped, none counts as trained."""
        if not is_all_skipped:
            return self.outcomes
        skipped = EvictionReason.NONFINITE_STEP
        return {rollout_id: reason or skipped for rollout_id, reason in self.outcomes.items()}


class MergeActor:
    """The actor that builds batches, and keeps no state between two calls."""

    def __init__(self, settings: StepSettings, journal: Journal | None = None) -> None:
        """Create the actor. journal: writes the steps; None if they are not recorded."""
        self._settings = settings
        self._journal = journal

    def plan(self, step_input: StepInput, trainer_version: int) -> tuple[Any, ...]:
        """Divide the rows that the trainer must score among the ranks, and store the shards.

        The loop calls `plan` only if rewards or advantages need a reference model or a critic. It
        then passes the ranks' scores to `build`.

        Returns: for each rank, an object reference to its shard.
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
        self,
        step_input: StepInput,
        trainer_version: int,
        scores: Sequence[Any] = (),
        republished: Sequence[int] = (),
    ) -> BuiltStep:
        """Build the batch of a step whose groups were taken from the queue.

        Args: trainer_version: the policy version that the trainer holds. scores: for each rank, a
            reference to the RowScores that the rank computed for its shard of `plan`; empty if
            `plan` was not called. republished: policy versions without a training step of
            their own, from restarts of the trainer (`actors.policy_age`).
        Raises: PayloadsLost, naming the rollouts; ScoresLost; ValueError if `build_step` or
            `read_scores` raises it.
        """
        groups = self._read(step_input)
        if scores:
            try:
                answers = ray.get(list(scores), timeout=FETCH_DEADLINE_S)
            except (ObjectLostError, GetTimeoutError) as error:
                raise ScoresLost(f"step {step_input.step}: a rank died with its scores") from error
            groups = read_scores(groups, self._settings, answers)
        result = build_step(
            groups,
            self._settings,
            step=step_input.step,
            trainer_version=trainer_version,
            republished=republished,
        )
        return BuiltStep(
            step=step_input.step,
            shards=tuple(ray.put(shard) for shard in result.shards),
            outcomes=result.outcomes,
            report=result.report,
            notices=self._notices(result, republished),
            returns=group_returns(groups),
            num_bytes=array_bytes(result.shards),
        )

    def _notices(self, result: StepResult, republished: Sequence[int]) -> tuple[str, ...]:
        unwritten = ""
        if self._journal is not None:
            unwritten = self._journal.write(result, republished=republished)
        problems = problem_notices(result.members, step=result.report.step)
        return (*problems, unwritten) if unwritten else problems

    def _read(self, step_input: StepInput) -> tuple[GroupMembers, ...]:
        return classify_groups(read_groups(step_input, _fetch(step_input.blocks)), self._settings)


def _fetch(blocks: Sequence[Any]) -> list[TrajectoryBlock | None]:
    """Fetch the blocks in order, with None in place of a block that is lost or late."""
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
