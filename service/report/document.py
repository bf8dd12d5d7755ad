"""The data of a run's page: one JSON tree with the same form for a finished and a live run.

This module and `tables` make all texts of the page, including the explanations of the numbers. The
page draws charts from the numbers of the steps. report.html contains this tree, and the API serves
it for the page at `/`. Only `write_report` has side effects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from actors.statistics import BY_NAME, STATISTICS
from actors.trajectory_queue.messages import QueueStats
from service import units
from service.page.packed import page_with
from service.report import tables
from service.report.tables import balance_equation, words
from service.telemetry.curves import step_numbers
from service.telemetry.records import EvaluationRecord, StepRecord
from service.telemetry.summary import History, RunSummary, write_aside
from service.telemetry.totals import RunTotals

# A check that holds only at a run's end.
IN_FLIGHT = "nothing in flight"


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


def checks(summary: RunSummary, totals: RunTotals) -> list[dict[str, str | bool]]:
    """Return the guarantees of a run, such as "no update skipped", and whether the run kept each.

    The text of a guarantee describes the violation, if there is one.
    """
    num_breaks = totals.num_version_breaks
    found = [
        ("ledger balances", summary.ledger.is_balanced, balance_equation(summary)),
        _in_flight(summary),
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
    return [dict(zip(("name", "is_kept", "text"), each, strict=True)) for each in found]


def _in_flight(summary: RunSummary) -> tuple[str, bool, str]:
    """Return the check of rollouts in flight. A run that ended early may have some."""
    count = units.plural(summary.ledger.in_flight, "rollout")
    is_early = summary.planned_steps is not None and summary.steps < summary.planned_steps
    if summary.ledger.in_flight and summary.exit_reason is not None and is_early:
        verb = "is" if summary.ledger.in_flight == 1 else "are"
        them = "it" if summary.ledger.in_flight == 1 else "them"
        return f"{count} {verb} in flight; --resume plays {them}", True, ""
    text = f"{count} had not left the ledger at the end."
    return IN_FLIGHT, summary.ledger.in_flight == 0, text


def _checked(summary: RunSummary) -> str:
    """Return a sentence on the results of the log-probability checks."""
    check = summary.logprob_check
    return (
        f"Both scored texts of up to {units.full_count(int(check.tokens or 0))} tokens, at most "
        f"{units.significant(check.max, digits=2)} nats apart and "
        f"{units.significant(check.mean, digits=2)} in the mean; a check after a publication took "
        f"up to {units.significant(check.seconds, digits=2)} s, all of them "
        f"{units.percent(check.share)} of the time of the steps."
    )


def tiles(summary: RunSummary) -> list[dict[str, str]]:
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
    return [dict(zip(("label", "value", "detail"), each, strict=True)) for each in found]


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


def _statistic_definitions(totals: RunTotals) -> tuple[tuple[str, str], ...]:
    found = {
        (words(each.values), each.help): each.name
        for each in STATISTICS
        if each.name in totals.statistics
    }
    return tuple((values, help_of(name)) for (values, _), name in found.items())


def _definitions() -> tuple[tuple[str, str], ...]:
    return (
        (
            "Reward",
            "mean return of a step's graded trajectories, divided by the best possible return "
            "if the environment knows it; first and last are means over five steps.",
        ),
        (
            "Memory",
            "largest memory of all processes of the run together; a page that they share "
            "counts once.",
        ),
        (
            "Evaluation",
            "mean return over all samples of the held-out tasks (evaluation.samples), scaled as "
            "the reward; never trained on.",
        ),
        (
            "Policy version",
            "a counter of published weights; it grows by one each step.",
        ),
        (
            "Policy age",
            "number of versions that a token was older than the trainer when it was trained on.",
        ),
        (
            "Mismatch",
            "Δ = trainer − engine log-probability of the same token under the same "  # noqa: RUF001
            "weights, nats; k3 = exp(Δ) − 1 − Δ, averaged over steps by their trained tokens.",  # noqa: RUF001
        ),
        (
            "Check after publish",
            "largest |Δ| on one fixed prompt, right after each publish, over all engines.",
        ),
        (
            "Ledger",
            "every admitted rollout leaves exactly once: trained, or evicted with one reason.",
        ),
        ("Merge ratio", "turns divided by the training samples that they became."),
        (
            "Sampled tokens",
            "engine output of all attempts, also of attempts that no step took; \"in the steps' "
            'trajectories" counts only the others.',
        ),
        ("Trained tokens", "tokens in the loss."),
        ("Clip fraction", "trained tokens whose ratio was clipped, of all trained tokens."),
        ("Loss", help_of("loss")),
        ("Entropy", help_of("entropy_mean")),
        ("Effective sample size", help_of("effective_sample_size")),
        (
            "Zero-variance groups",
            "groups of a step whose members all had the same return.",
        ),
        ("Gradient norm", help_of("grad_norm")),
        ("Malformed share", "turns whose action could not be read, of all turns."),
        (
            "Stage times",
            "wall seconds of the training loop; collect is the wait for closed groups.",
        ),
    )


def help_of(name: str) -> str:
    """Return a statistic's explanation with a small first letter.

    The page shows the explanation after the statistic's name, in the same sentence.
    """
    text = BY_NAME[name].help.replace("`", "")
    return text[0].lower() + text[1:]


DIGITS = 6
Numbers = dict[str, list[float | int | None]]


Phase = Literal[
    "refused",
    "starting",
    "training",
    "paused",
    "evaluating",
    "writing a checkpoint",
    "recovering",
    "stopping",
    "finished",
    "failed",
    "without its lease",
]
"""The phase of a run, as users see it.

refused: the start was refused and is tried again. paused: an operator has paused a part of the run;
without the pause the run would train. without its lease: another process has taken over the run.
"""
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """The part of a run's state that its page shows only while the run is running."""

    phase: Phase
    phase_detail: str
    started_at: float
    """Seconds since 1970."""
    checkpoint_step: int
    engines: Mapping[str, int]
    """The policy version of each engine, by the replica's id."""
    engines_expected: int
    queue: QueueStats | None
    """The queue's state; None until the queue has answered."""
    max_items: int
    """Maximum number of rollouts in flight."""
    max_bytes: int
    """Maximum size of finished rollouts that wait for a step."""
    max_lag: int
    """Maximum number of versions by which rollouts may run ahead."""
    notices: Sequence[str]
    """The newest notices, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPicture:
    """A snapshot of a running run, or the result of an ended run, from which its page is made."""

    summary: RunSummary
    history: History
    config_text: str
    """The effective configuration, as YAML."""
    after: int = 0
    """The last step that the caller already has."""
    live: LiveState | None = None


def run_document(picture: RunPicture) -> dict[str, Any]:
    """Return the page's data: only the steps after `picture.after`, and everything else in full."""
    summary, history, live = picture.summary, picture.history, picture.live
    totals = history.totals
    steps = [record for record in history.steps if record.step > picture.after]
    return {
        "kind": "run",
        "name": summary.name,
        "term": history.num_terms,
        "after": picture.after,
        "finished_at": None if live or not history.steps else history.steps[-1].wall_time,
        "verdict": verdict(summary),
        "ending": ending(summary),
        "is_scaled": summary.is_reward_scaled,
        "policy_age_bound": summary.policy_age_bound,
        "outcomes": dict(summary.outcomes),
        "stage_seconds": summary.stage_seconds.by_name(),
        "tiles": tiles(summary),
        # A live run has rollouts in flight, which is not an error.
        "checks": [
            each for each in checks(summary, totals) if live is None or each["name"] != IN_FLIGHT
        ],
        "tables": [
            asdict(each)
            for each in (
                *tables.summary_tables(summary),
                *tables.reward_tables(history.steps),
            )
        ],
        "loss_tables": [asdict(each) for each in tables.statistic_tables(totals)],
        "loss_definitions": _statistic_definitions(totals),
        "definitions": _definitions(),
        "statistics": {
            each.name: {"group": each.group, "unit": each.unit, "help": each.help}
            for each in STATISTICS
            if each.name in totals.statistics
        },
        "steps": step_columns(steps),
        "evaluations": evaluation_columns(
            [each for each in history.evaluations if each.is_charted]
        ),
        "config_text": picture.config_text.strip(),
        "live": None if live is None else _live(live),
    }


def step_columns(records: Sequence[StepRecord]) -> Numbers:
    """Return a column for each number of `step_numbers`.

    A column has one value for each record; the value is None if it is unknown.
    """
    columns: Numbers = {name: [] for record in records for name in step_numbers(record)}
    for record in records:
        known = step_numbers(record)
        for name, values in columns.items():
            values.append(_short(known.get(name)))
    return columns


def evaluation_columns(records: Sequence[EvaluationRecord]) -> Numbers:
    return {
        "step": [record.step for record in records],
        "policy_version": [record.policy_version for record in records],
        "num_tasks": [record.num_tasks for record in records],
        "reward": [_short(record.best_known_reward) for record in records],
    }


def _short(value: float | int | None) -> float | int | None:
    """Return a value rounded for a chart; None if it is unknown or not finite."""
    if value is None or not math.isfinite(value):
        return None
    if float(value).is_integer():
        return int(value)
    return float(f"{value:.{DIGITS}g}") if abs(value) < 10**DIGITS else round(value)


def _live(live: LiveState) -> dict[str, Any]:
    queue = live.queue
    return {
        "phase": live.phase,
        "phase_detail": live.phase_detail,
        "started_at": live.started_at,
        "checkpoint_step": live.checkpoint_step,
        "engines": dict(live.engines),
        "tables": [
            asdict(each)
            for each in (
                tables.window_table(queue, max_items=live.max_items, max_lag=live.max_lag),
                tables.queue_table(queue, max_bytes=live.max_bytes),
                tables.engines_table(live.engines, expected=live.engines_expected),
            )
            if each.rows
        ],
        "notices": list(live.notices),
    }


def write_report(path: Path, *, summary: RunSummary, history: History, config_text: str) -> None:
    """Write the report of a run to the file `path`, which is replaced atomically.

    config_text: the run's effective configuration as YAML.
    """
    write_aside(path, render_report(summary=summary, history=history, config_text=config_text))


def render_report(*, summary: RunSummary, history: History, config_text: str) -> str:
    """Return the page as HTML."""
    picture = RunPicture(summary=summary, history=history, config_text=config_text)
    return page_with(run_document(picture))
