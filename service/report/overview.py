"""The overview on a run's page: verdict, balance of the ledger, checks and tiles. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from service import units
from service.telemetry.summary import RunSummary
from service.telemetry.totals import RunTotals

# A check that holds only at a run's end.
IN_FLIGHT = "nothing in flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A guarantee of the run: `name` states it, and `text` says how it was violated."""

    name: str
    is_kept: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A key figure with one line of context."""

    label: str
    value: str
    detail: str


def verdict(summary: RunSummary) -> str:
    """Return a line that describes the run.

    Example: 'Reward 0.37 → 0.93 in 120 steps, 4 min 12 s.'
    """
    time = units.duration(summary.wall_s)
    if summary.steps == 0:
        return f"No training step was completed in {time}."
    taken = units.plural(summary.steps, "step")
    first, last = summary.reward_first, summary.reward_last
    if first is None or last is None:
        return f"{taken} in {time}; the reward was not measured."
    if summary.steps == 1:
        return f"Reward {units.reward(last)} after 1 step, {time}."
    return f"Reward {units.reward(first)} → {units.reward(last)} in {taken}, {time}."


def ending(summary: RunSummary) -> str:
    """Return a sentence on how the run ended; empty if unknown."""
    reason = (summary.exit_reason or "").strip()
    if not reason:
        return ""
    return reason[0].upper() + reason[1:] + ("" if reason.endswith((".", "!", "?")) else ".")


def balance_equation(summary: RunSummary) -> str:
    """Return the ledger's balance.

    Example: '30 720 = 29 952 trained + 768 evicted + 0 in flight'.
    """
    ledger = summary.ledger
    out = ledger.trained + ledger.num_evicted + ledger.in_flight
    sign = "=" if ledger.is_balanced else f"≠ {units.full_count(out)} ="
    return (
        f"{units.full_count(ledger.admitted)} admitted {sign} "
        f"{units.full_count(ledger.trained)} trained + "
        f"{units.full_count(ledger.num_evicted)} evicted + "
        f"{units.full_count(ledger.in_flight)} in flight"
    )


def checks(summary: RunSummary, totals: RunTotals) -> tuple[Check, ...]:
    num_breaks = totals.num_version_breaks
    found = [
        ("ledger balances", summary.ledger.is_balanced, balance_equation(summary)),
        (
            IN_FLIGHT,
            summary.ledger.in_flight == 0,
            f"{units.plural(summary.ledger.in_flight, 'rollout')} had not left the ledger at the "
            "end.",
        ),
        (
            "a new version each step",
            num_breaks == 0,
            f"The policy version failed to grow at {units.plural(num_breaks, 'step')}.",
        ),
    ]
    if summary.policy_age_bound is not None:
        age = units.plural(summary.max_policy_age, "version")
        found.append(
            (
                "age within bound",
                summary.max_policy_age <= summary.policy_age_bound,
                f"The oldest trained token was {age} behind; the bound is "
                f"{summary.policy_age_bound}.",
            )
        )
    if (ratio := summary.logprob_check.ratio) is not None:
        found.append(("engines compute as the trainer", ratio <= 1, _checked(summary)))
    found += [
        (
            "no update skipped",
            summary.skipped_steps == 0,
            f"{units.plural(summary.skipped_steps, 'step')} had an update that was not finite and "
            "was not applied.",
        ),
        (
            "no reward for malformed",
            summary.malformed_rewarded == 0,
            f"{units.full_count(summary.malformed_rewarded)} malformed trajectories got a "
            "positive reward.",
        ),
    ]
    return tuple(Check(name=name, is_kept=is_kept, text=text) for name, is_kept, text in found)


def _checked(summary: RunSummary) -> str:
    """Return a sentence on the results of the log-probability checks.

    Example: 'Both scored texts of up to 4 096 tokens, at most 4e-05 nats apart, …'.
    """
    check = summary.logprob_check
    return (
        f"Both scored texts of up to {units.full_count(int(check.tokens or 0))} tokens, at most "
        f"{units.significant(check.max, digits=2)} nats apart and "
        f"{units.significant(check.mean, digits=2)} in the mean; a check after a publication took "
        f"up to {units.significant(check.seconds, digits=2)} s, all of them "
        f"{units.percent(check.share)} of the time of the steps."
    )


def tiles(summary: RunSummary) -> tuple[Tile, ...]:
    mismatch, bound = summary.mismatch, summary.policy_age_bound
    delta = units.significant(mismatch.max_abs_delta, digits=2)
    reward_detail = "not measured"
    if summary.reward_first is not None:
        scale = ", best possible 1" if summary.is_reward_scaled else ""
        reward_detail = f"from {units.reward(summary.reward_first)}{scale}"
    found = (
        ("Reward", units.reward(summary.reward_last), reward_detail),
        ("Evaluation", *_evaluation(summary)),
        (
            "Steps",
            units.full_count(summary.steps),
            f"policy version {units.full_count(summary.policy_version)}",
        ),
        ("Wall time", units.duration(summary.wall_s), _resumes_and_memory(summary)),
        (
            "Policy age, largest",
            units.full_count(summary.max_policy_age),
            "versions" if bound is None else f"bound {bound}",
        ),
        (
            "Mismatch, mean k3",
            units.significant(mismatch.mean_k3, digits=2),
            "not measured" if mismatch.max_abs_delta is None else f"max |Δ| {delta} nats",
        ),
        (
            "Sampled tokens",
            units.short_count(summary.tokens.sampled or summary.sampled_tokens),
            f"{units.percent(summary.tokens.trained_share)} trained",
        ),
        (
            "Rollouts trained",
            units.short_count(summary.ledger.trained),
            f"of {units.short_count(summary.ledger.admitted)} admitted",
        ),
    )
    return tuple(Tile(label=label, value=value, detail=detail) for label, value, detail in found)


def _evaluation(summary: RunSummary) -> tuple[str, str]:
    first, last = summary.evaluation.first, summary.evaluation.last
    if first is None or last is None:
        return units.UNKNOWN, "none was made"
    tasks = units.plural(last.num_tasks, "held-out task")
    detail = f"from {units.reward(first.best_known_reward)}, {tasks}" if first != last else tasks
    return units.reward(last.best_known_reward), detail


def _resumes(count: int) -> str:
    if count == 0:
        return "without interruption"
    return "resumed once" if count == 1 else f"resumed {count} times"


def _resumes_and_memory(summary: RunSummary) -> str:
    resumes = _resumes(summary.num_resumes)
    if summary.peak_memory_bytes is None:
        return resumes
    return f"{resumes}, memory at most {units.gibibytes(summary.peak_memory_bytes)}"
