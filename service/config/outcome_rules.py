"""The rows of the outcome table that a run has of its own."""

from __future__ import annotations

from actors.merge.advantages import Truncation
from actors.outcomes import DEFAULT_RULES, Disposition, OutcomeRule
from actors.types import TRUNCATIONS, Outcome
from service.config.sections import Sections


def outcome_rules(config: Sections) -> dict[Outcome, OutcomeRule]:
    """The rows that differ from the default table: a critic's, with the run's own laid over them.

    Raises: ValueError, as OutcomeRule.
    """
    own = {
        outcome: OutcomeRule(
            disposition=rule.disposition, max_retries=rule.max_retries, penalty=rule.penalty
        )
        for outcome, rule in config.rollouts.outcomes.items()
    }
    return {**_rules_of_critic(config), **own}


def disposition_of(config: Sections, outcome: Outcome) -> Disposition:
    """Of the run's own table, or else a critic's, or else the default one."""
    own = config.rollouts.outcomes.get(outcome)
    if own is not None:
        return own.disposition
    return _rules_of_critic(config).get(outcome, DEFAULT_RULES[outcome]).disposition


def _rules_of_critic(config: Sections) -> dict[Outcome, OutcomeRule]:
    critic = config.algorithm.critic
    if not config.algorithm.has_critic:
        return {}
    rule = Truncation(critic.truncation).rule(penalty=critic.truncation_penalty)
    return dict.fromkeys(TRUNCATIONS, rule)
