"""What a run's numbers say, in words: the one-sentence verdict and the checks beside it; pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from service import units
from service.telemetry.records import StepRecord
from service.telemetry.summary import RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A promise that the run kept, in the words of `name`, or broke, in those of `text`."""

    name: str
    is_kept: bool
    text: str


def verdict(summary: RunSummary) -> str:
    """Example: 'Reward 0.37 → 0.93 in 120 steps, 4 min 12 s.'"""
    time = units.duration(summary.wall_s)
    if summary.steps == 0:
        return f"No training step was completed in {time}."
    taken = units.plural(summary.steps, "step")
    first, last = summary.reward.first, summary.reward.last
    if first is None or last is None:
        return f"{taken} in {time}; the reward was not measured."
    if summary.steps == 1:
        return f"Reward {units.reward(last)} after 1 step, {time}."
    return f"Reward {units.reward(first)} → {units.reward(last)} in {taken}, {time}."


def ending(summary: RunSummary) -> str:
    """How the run ended, as a sentence; empty where nobody said."""
    reason = (summary.exit_reason or "").strip()
    if not reason:
        return ""
    return reason[0].upper() + reason[1:] + ("" if reason.endswith((".", "!", "?")) else ".")


def checks(summary: RunSummary, records: Sequence[StepRecord]) -> tuple[Check, ...]:
    found = [_ledger_balances(summary), _nothing_in_flight(summary), _versions_grow(records)]
    if summary.policy_age_bound is not None:
        found.append(_age_is_bounded(summary, summary.policy_age_bound))
    found.append(
        Check(
            name="no update skipped",
            is_kept=summary.skipped_steps == 0,
            text=f"{units.plural(summary.skipped_steps, 'step')} had an update that was not "
            "finite and was not applied.",
        )
    )
    found.append(
        Check(
            name="no reward for malformed",
            is_kept=summary.malformed_rewarded == 0,
            text=f"{units.full_count(summary.malformed_rewarded)} malformed trajectories got a "
            "positive reward.",
        )
    )
    return tuple(found)


def _ledger_balances(summary: RunSummary) -> Check:
    ledger = summary.ledger
    return Check(name="ledger balances", is_kept=ledger.is_balanced, text=balance_equation(summary))


def balance_equation(summary: RunSummary) -> str:
    """Example: '30 720 = 29 952 trained + 768 evicted + 0 in flight'."""
    ledger = summary.ledger
    out = ledger.trained + ledger.num_evicted + ledger.in_flight
    sign = "=" if ledger.is_balanced else f"≠ {units.full_count(out)} ="
    return (
        f"{units.full_count(ledger.admitted)} admitted {sign} "
        f"{units.full_count(ledger.trained)} trained + "
        f"{units.full_count(ledger.num_evicted)} evicted + "
        f"{units.full_count(ledger.in_flight)} in flight"
    )


def _nothing_in_flight(summary: RunSummary) -> Check:
    left = summary.ledger.in_flight
    return Check(
        name="nothing in flight",
        is_kept=left == 0,
        text=f"{units.plural(left, 'rollout')} had not left the ledger at the end.",
    )


def _versions_grow(records: Sequence[StepRecord]) -> Check:
    versions = [record.policy_version for record in records]
    breaks = sum(after != before + 1 for before, after in itertools.pairwise(versions))
    return Check(
        name="one version a step",
        is_kept=breaks == 0,
        text=f"The policy version failed to grow by one at {units.plural(breaks, 'step')}.",
    )


def _age_is_bounded(summary: RunSummary, bound: int) -> Check:
    return Check(
        name="age within bound",
        is_kept=summary.max_policy_age <= bound,
        text=f"The oldest trained token was {units.plural(summary.max_policy_age, 'version')} "
        f"behind; the bound is {bound}.",
    )
