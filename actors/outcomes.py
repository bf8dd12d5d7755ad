"""Which disposition each outcome gets, and when an attempt is repeated.

The table is data: an environment may replace any row of it. Called by the queue (retries) and by
the merge actor (train, clamp, mask, drop). Source of the defaults: docs/semantics.md, Outcomes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from actors.trajectory import Outcome


class Disposition(StrEnum):
    """What becomes of a trajectory."""

    TRAIN = "train"
    TRAIN_CLAMPED = "train_clamped"
    MASK = "mask"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRule:
    """max_retries: further attempts of the same rollout before `disposition` applies."""

    disposition: Disposition
    max_retries: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomePolicy:
    """The rules of one environment: the defaults with its own rows laid over them."""

    overrides: Mapping[Outcome, OutcomeRule] = field(default_factory=dict)

    def rule(self, outcome: Outcome) -> OutcomeRule:
        return self.overrides.get(outcome, DEFAULT_RULES[outcome])

    def is_retried(self, outcome: Outcome, *, attempt: int) -> bool:
        """Whether attempt number `attempt` (0 is the first), ended so, is followed by another."""
        return attempt < self.rule(outcome).max_retries

    def disposition(self, outcome: Outcome) -> Disposition:
        return self.rule(outcome).disposition
