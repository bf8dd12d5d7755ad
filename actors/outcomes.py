"""The table of outcomes: how a trajectory is trained, and whether its attempt is repeated.

The configuration of an environment may replace any row of the table. The queue decides by the table
which rollouts to retry and which groups to replace. The merge actor decides whether to train,
clamp, penalise, mask or drop a trajectory. docs/semantics.md, Outcomes, explains the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from actors.limits import STRICT, NotNegative, Retries
from actors.types import Outcome

# Returns closer than this, relative to the largest, are equal: sums of rewards carry rounding.
EQUAL_TOLERANCE = 1e-9


class Disposition(StrEnum):
    """The treatment of a trajectory; the methods of `OutcomeRule` define what each value means."""

    TRAIN = "train"
    TRAIN_CLAMPED = "train_clamped"
    TRAIN_PENALISED = "train_penalised"
    SCORE = "score"
    MASK = "mask"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRule:
    """The treatment of trajectories with one outcome: one row of `rollouts.outcomes`."""

    __pydantic_config__ = STRICT

    disposition: Disposition
    """The treatment of a trajectory with this outcome."""
    max_retries: Retries = 0
    """Number of further attempts of the same rollout before the disposition applies."""
    penalty: NotNegative = 0.0
    """Amount subtracted from the return, with train_penalised; 0 with every other disposition."""

    def masks(self, *, is_graded: bool) -> bool:
        """Return whether the rule masks a trajectory: keeps it out of the loss without dropping it.

        A masked trajectory counts in its group's baseline if it is graded.
        is_graded: whether the trajectory's return is a grade (`Trajectory.is_graded`).
        """
        is_scored = self.disposition is Disposition.SCORE
        return self.disposition is Disposition.MASK or (is_scored and not is_graded)

    def baseline_return(
        self, episode_return: float, *, is_graded: bool, worst_completed: float | None = None
    ) -> float | None:
        """Return a trajectory's value in its group's baseline; None if it is not in the baseline.

        worst_completed: the lowest return of the group's completed trajectories; None if there are
        none, and then ignored. The value depends on the disposition (docs/semantics.md, Outcomes):

            train            episode_return
            train_clamped    min(episode_return, 0, worst_completed)
            train_penalised  episode_return - penalty
            score, mask      episode_return if is_graded, else None
            drop             None
        """
        match self.disposition:
            case Disposition.TRAIN:
                return episode_return
            case Disposition.TRAIN_CLAMPED:
                lowest = 0.0 if worst_completed is None else min(0.0, worst_completed)
                return min(episode_return, lowest)
            case Disposition.TRAIN_PENALISED:
                return episode_return - self.penalty
            case Disposition.SCORE | Disposition.MASK:
                return episode_return if is_graded else None
            case Disposition.DROP:
                return None


DEFAULT_RULES: Mapping[Outcome, OutcomeRule] = {
    Outcome.COMPLETED: OutcomeRule(disposition=Disposition.TRAIN),
    Outcome.TRUNCATED_TOKENS: OutcomeRule(disposition=Disposition.MASK),
    Outcome.TRUNCATED_CONTEXT: OutcomeRule(disposition=Disposition.MASK),
    Outcome.MAX_TURNS: OutcomeRule(disposition=Disposition.TRAIN_CLAMPED),
    Outcome.MALFORMED_TOOL_CALL: OutcomeRule(disposition=Disposition.TRAIN_CLAMPED),
    Outcome.WALL_TIMEOUT: OutcomeRule(disposition=Disposition.DROP),
    Outcome.STALE: OutcomeRule(disposition=Disposition.DROP),
    Outcome.CANCELLED: OutcomeRule(disposition=Disposition.DROP),
    Outcome.AGENT_ERROR: OutcomeRule(disposition=Disposition.DROP, max_retries=1),
    Outcome.ENVIRONMENT_ERROR: OutcomeRule(disposition=Disposition.DROP, max_retries=2),
    Outcome.INFRASTRUCTURE_ERROR: OutcomeRule(disposition=Disposition.DROP, max_retries=2),
    Outcome.EMPTY: OutcomeRule(disposition=Disposition.DROP, max_retries=2),
    Outcome.REWARD_ERROR: OutcomeRule(disposition=Disposition.DROP),
    Outcome.TOKEN_MISALIGNED: OutcomeRule(disposition=Disposition.DROP),
}

# A dropped trajectory was not scored: its return is the part earned before it was cut off, or 0.
UNSCORED = frozenset(
    outcome for outcome, rule in DEFAULT_RULES.items() if rule.disposition is Disposition.DROP
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomePolicy:
    """The rules of one environment; an outcome without an entry in `overrides` has its default."""

    overrides: Mapping[Outcome, OutcomeRule] = field(default_factory=dict)

    def rule(self, outcome: Outcome) -> OutcomeRule:
        return self.overrides.get(outcome, DEFAULT_RULES[outcome])

    def is_retried(self, outcome: Outcome, *, attempt: int) -> bool:
        """Return whether a rollout whose attempt ended with this outcome is played again.

        attempt: number of the rollout's attempts that failed before this one.
        """
        return attempt < self.rule(outcome).max_retries

    def disposition(self, outcome: Outcome) -> Disposition:
        return self.rule(outcome).disposition

    def without_retries(self) -> OutcomePolicy:
        """Return the same rules without retries, for agents that cannot play a task again."""
        rules = {outcome: replace(self.rule(outcome), max_retries=0) for outcome in Outcome}
        return OutcomePolicy(overrides=rules)


def are_equal(returns: Sequence[float]) -> bool:
    """Return whether returns differ at most by rounding; fewer than two returns are equal.

    The condition is max - min <= 1e-9 max(1, |r_1|, ..., |r_G|).

    Example: are_equal([0.1 + 0.2, 0.3]) -> True; are_equal([0.3, 0.4]) -> False
    """
    if len(returns) < 2:
        return True
    largest = max(1.0, *(abs(value) for value in returns))
    return max(returns) - min(returns) <= EQUAL_TOLERANCE * largest
