"""When a run gets nowhere: the rules that end it, and the sentences that say why. Pure.

A run is given up when the last `max_failed_groups` groups in a row could not be trained and this
has lasted for `failed_groups_grace_s`, so that a server's short absence is borne. What fails while
no engine is ready is no fault of the environment and does not count; engines that stay away are a
lost part.
It is given up as well when no update of `max_skipped_steps` steps in a row was finite, or when the
merge actor refused every trajectory of so many.
Asked by the loop after each drain and each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.algorithm import AlgorithmSettings
from actors.environment.settings import RolloutSettings
from actors.merge.report import StepReport
from actors.trainer.settings import TrainerSettings
from actors.trajectory_queue.failures import FailedGroups
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Outcome
from service.inference.settings import InferenceSettings
from service.run.ports import PartLost

REMEDIES = {
    Outcome.TRUNCATED_TOKENS: "raise rollouts.max_tokens_per_turn, or ask for shorter answers",
    Outcome.TRUNCATED_CONTEXT: "raise model.max_context_tokens, or shorten the prompts",
    Outcome.WALL_TIMEOUT: "look at what it waits for, or raise rollouts.turn_deadline_s",
    Outcome.STALE: "lower algorithm.max_lag",
    Outcome.AGENT_ERROR: "look at the model's chat template and rollouts.template_options",
    Outcome.ENVIRONMENT_ERROR: "mend the environment, or the tasks that it is given",
    Outcome.REWARD_ERROR: "mend what scores the answers",
    Outcome.INFRASTRUCTURE_ERROR: "look at the logs of the engines and environment actors",
    Outcome.EMPTY: "look at the model: it ends its answers before the first token",
    Outcome.TOKEN_MISALIGNED: "look at the engines: their log-probabilities cannot be used",
}
OTHER_REMEDY = "look at the rules of rollouts.outcomes and at algorithm.min_group_size"


class GivenUp(Exception):
    """The run was given up; the text says what failed, how often, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLimits:
    """The leaves of the configuration that say how much is borne."""

    rollouts: RolloutSettings
    algorithm: AlgorithmSettings
    trainer: TrainerSettings
    inference: InferenceSettings


class FailureWatch:
    """Looks at the row of failed groups from time to time. One for an epoch."""

    def __init__(self, limits: FailureLimits) -> None:
        self._limits = limits
        self._row: int | None = None
        self._row_since = 0.0
        self._num_excused = 0
        self._away_since: float | None = None
        self._num_skipped = 0
        self._num_misaligned = 0

    def look_at_merge(self, step: int, report: StepReport, *, notices: Sequence[str]) -> None:
        """notices: what the merge actor says of the step. Raises: GivenUp."""
        num_refused = report.evictions.get(EvictionReason.TOKEN_MISALIGNED, 0)
        is_refused = 0 < report.num_trajectories <= num_refused
        self._num_misaligned = self._num_misaligned + 1 if is_refused else 0
        if self._num_misaligned >= self._limits.trainer.max_skipped_steps:
            raise GivenUp(
                f"every trajectory of the last {self._num_misaligned} steps, up to step {step}, "
                "ended as token_misaligned, and nothing was trained; the last step's first: "
                f"{next(iter(notices), 'without a notice')}; mend what records the turns; to bear "
                "more, raise trainer.max_skipped_steps"
            )

    def look_at_step(self, step: int, *, was_trained: bool) -> None:
        """was_trained: whether any update of the step was finite. Raises: GivenUp."""
        self._num_skipped = 0 if was_trained else self._num_skipped + 1
        if self._num_skipped >= self._limits.trainer.max_skipped_steps:
            raise GivenUp(
                f"no update of the last {self._num_skipped} steps, up to step {step}, was finite, "
                "and none was applied; their inputs lie in checkpoints/skipped: look at the loss "
                "and the gradient norm before, and begin again with a lower trainer.learning_rate "
                "or, with a critic, algorithm.critic.learning_rate; to bear more, raise "
                "trainer.max_skipped_steps"
            )

    def look(self, failed: FailedGroups | None, *, num_engines_ready: int, now: float) -> None:
        """now: seconds of a clock that never goes back.

        Raises: GivenUp; PartLost when it is the engines that stay away.
        """
        if failed is None:
            self._row = self._away_since = None
            return
        if failed.num_before != self._row:
            self._row, self._row_since, self._num_excused = failed.num_before, now, 0
        if num_engines_ready == 0:
            self._excuse(failed, now)
            return
        self._away_since = None
        num_counted = failed.num_groups - self._num_excused
        lasted_s = now - self._row_since
        rollouts = self._limits.rollouts
        is_long = lasted_s >= rollouts.failed_groups_grace_s
        if num_counted >= rollouts.max_failed_groups and is_long:
            raise GivenUp(_sentence(failed, num_counted, lasted_s, self._limits))

    def _excuse(self, failed: FailedGroups, now: float) -> None:
        self._away_since = now if self._away_since is None else self._away_since
        if now - self._away_since > self._limits.inference.start_deadline_s:
            raise PartLost(
                f"no engine has been ready for {now - self._away_since:.0f} s, expected one within "
                f"{self._limits.inference.start_deadline_s:g} s (inference.start_deadline_s)"
            )
        # The row begins anew when an engine is back.
        self._row_since, self._num_excused = now, failed.num_groups


def _sentence(failed: FailedGroups, num_groups: int, lasted_s: float, limits: FailureLimits) -> str:
    ordered = sorted(failed.outcomes.items(), key=lambda item: -item[1])
    algorithm = limits.algorithm
    counts = ", ".join(f"{count} {outcome.value}" for outcome, count in ordered)
    detail = f": {failed.last_detail}" if failed.last_detail else ""
    return (
        f"the last {num_groups} groups in a row could not be trained (within {lasted_s:.0f} s): "
        f"each had fewer usable rollouts than algorithm.min_group_size ({algorithm.min_group_size} "
        f"of {algorithm.group_size}); of their attempts ended {counts}; the last, on task "
        f"{failed.task_id!r} of {failed.environment!r}, as {failed.last_outcome.value}{detail}; "
        f"{REMEDIES.get(failed.main_outcome, OTHER_REMEDY)}; "
        "to bear more, raise rollouts.max_failed_groups"
    )
