"""The texts of a run's page: verdict, checks, tiles, tables and definitions. Pure.

All values are ready for the template. The texts on statistics come from the table of statistics.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from actors.statistics import BY_NAME, GROUPS, STATISTICS
from actors.trajectory_queue.ledger import TokenCounts
from actors.trajectory_queue.messages import QueueStats
from actors.types import BranchReason, Outcome
from service import units
from service.telemetry.records import EvaluationRecord, EvaluationSample, StepRecord
from service.telemetry.summary import AVERAGED_STEPS, Evaluations, RunSummary
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """Cells of text; the first cell names its row."""
    total: tuple[str, ...] | None = None
    """The last row, shown separately."""
    note: str = ""
    is_text: bool = False
    """Whether the cells are sentences, which wrap over the whole width of the page."""


def verdict(summary: RunSummary) -> str:
    """Describe the run in one line. Example: 'Reward 0.37 → 0.93 in 120 steps, 4 min 12 s.'"""
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
    """Return how the run ended, as a sentence; empty if unknown."""
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
    """Describe the log-probability check.

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


def _last_of_sets(evaluation: Evaluations) -> Iterator[EvaluationRecord]:
    """Yield the last evaluation of the run's own set, then the last one of each named set.

    Without named sets, an evaluation with one sample per task is left out: the tile shows it.
    """
    if evaluation.last is not None and (evaluation.sets or evaluation.last.num_samples > 1):
        yield evaluation.last
    yield from evaluation.sets.values()


def _resumes(count: int) -> str:
    if count == 0:
        return "without interruption"
    return "resumed once" if count == 1 else f"resumed {count} times"


def _resumes_and_memory(summary: RunSummary) -> str:
    resumes = _resumes(summary.num_resumes)
    if summary.peak_memory_bytes is None:
        return resumes
    return f"{resumes}, memory at most {units.gibibytes(summary.peak_memory_bytes)}"


def summary_tables(summary: RunSummary) -> tuple[Table, ...]:
    """Return the tables of the whole run that have at least one row."""
    found = (
        _answers_table(summary.evaluation),
        _ledger_table(summary),
        _fate_table(summary.tokens),
        _counted("Outcomes", "trajectories", summary.outcomes),
        _evaluations("Last evaluations", _last_of_sets(summary.evaluation)),
        _evaluations("Requested evaluations", summary.evaluation.asked),
        _stages_table(summary),
        _tokens_table(summary),
        _counted("Why turns opened a new sample", "reason", summary.merge.branches),
        Table(
            caption="Versions",
            header=("package", "version"),
            rows=tuple(summary.versions.items()),
        ),
    )
    return tuple(table for table in found if table.rows)


def reward_tables(steps: Sequence[StepRecord]) -> tuple[Table, ...]:
    """Return the tables of the rewards' components, and of a mixture's environments."""
    return (
        *_early_and_late(
            "Reward components",
            "component",
            [step.reward_components for step in steps],
            note="Means over the graded trajectories that have it, as the environment gave it.",
        ),
        *_early_and_late(
            "Logged metrics",
            "metric",
            [step.logged_metrics for step in steps],
            note="Means over the trajectories whose functions logged it; it is not rewarded.",
        ),
        *_early_and_late(
            "Reward by environment",
            "environment",
            [
                {name: each.best_known_reward for name, each in step.environments.items()}
                for step in steps
            ],
            note="Mean return of the graded trajectories, as a share of the best possible return "
            "if the environment knows it; over the steps that have some.",
        ),
    )


def _early_and_late(
    caption: str, what: str, steps: Sequence[Mapping[str, float | None]], *, note: str
) -> tuple[Table, ...]:
    """Return a table of means over the first and over the last steps, if there are any."""
    early, late = _means(steps[:AVERAGED_STEPS]), _means(steps[-AVERAGED_STEPS:])
    names = sorted({*early, *late})
    if not names:
        return ()
    table = Table(
        caption=caption,
        header=(what, f"first {AVERAGED_STEPS} steps", f"last {AVERAGED_STEPS}"),
        rows=tuple(
            (name, units.reward(early.get(name)), units.reward(late.get(name))) for name in names
        ),
        note=note,
    )
    return (table,)


def _means(records: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the means by name, each over the records that have a value."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: sum(of_name) / len(of_name) for name, of_name in values.items()}


def _evaluations(caption: str, records: Iterable[EvaluationRecord]) -> Table:
    return Table(
        caption=caption,
        header=(
            "set", "version", "reward", "tasks", "samples", "temperature", "pass@k", "majority",
        ),
        rows=tuple(
            (
                each.name or "held out",
                str(each.policy_version),
                units.reward(each.best_known_reward),
                units.full_count(each.num_tasks),
                units.full_count(each.num_samples),
                f"{each.temperature:g}",
                ", ".join(f"{k}: {value:.2f}" for k, value in sorted(each.pass_at.items())),
                units.fixed(each.majority_mean, decimals=2),
            )
            for each in records
        ),
    )  # fmt: skip


def _answers_table(evaluation: Evaluations) -> Table:
    """Return the answers to the same held-out tasks in the first and in the last evaluation."""
    first, last = evaluation.first, evaluation.last
    if first is None or last is None or first == last:
        return Table(caption="Held-out answers", header=(), rows=())
    before = {each.task_id: each for each in reversed(first.samples)}
    after = {each.task_id: each for each in reversed(last.samples)}
    both = [(before[name], after[name]) for name in reversed(before) if name in after]
    tasks = _differing_lines([one.text.prompt for one, _ in both])
    return Table(
        caption="Held-out answers, before and after",
        header=(
            "task", f"before, version {first.policy_version}", "return",
            f"after, version {last.policy_version}", "return",
        ),
        rows=tuple(
            (task, *_answer(one), *_answer(other))
            for task, (one, other) in zip(tasks, both, strict=True)
        ),
        note=f"At temperature {last.temperature:g}. Lines that all prompts share are left out.",
        is_text=True,
    )  # fmt: skip


def _answer(sample: EvaluationSample) -> tuple[str, str]:
    return sample.text.answer, units.reward(sample.episode_return)


def _differing_lines(texts: Sequence[str]) -> list[str]:
    """Remove the first and the last lines that all texts share, and a shared end marker.

    Example: _differing_lines(["to\n1 + 1?<|end|>", "to\n1 + 2?<|end|>"]) -> ["1 + 1?", "1 + 2?"]
    """
    texts = [text.rstrip() for text in texts]
    bare = [re.sub(r"(<[^<>\s]+>)+$", "", text) for text in texts]
    has_marker = len({text[len(each) :] for text, each in zip(texts, bare, strict=True)}) == 1
    lines = [text.splitlines() for text in (bare if has_marker else texts)]
    num_first = _num_shared(lines)
    num_last = _num_shared([each[num_first:][::-1] for each in lines])
    return ["\n".join(each[num_first : len(each) - num_last]) for each in lines]


def _num_shared(sequences: Sequence[Sequence[str]]) -> int:
    """Return the length of the common prefix, at most the shortest length minus 1."""
    shared = itertools.takewhile(
        lambda column: len(set(column)) == 1, zip(*sequences, strict=False)
    )
    shortest = min((len(each) for each in sequences), default=0)
    return min(sum(1 for _ in shared), max(shortest - 1, 0))


def _ledger_table(summary: RunSummary) -> Table:
    ledger = summary.ledger
    evicted = sorted(ledger.evicted.items(), key=lambda item: -item[1])
    counts = {
        "trained": ledger.trained,
        **{f"evicted: {words(reason)}": count for reason, count in evicted},
        "in flight": ledger.in_flight,
    }
    return Table(
        caption="Ledger",
        header=("rollouts", "count", "share"),
        rows=tuple(
            (name, *_count_and_share(count, ledger.admitted)) for name, count in counts.items()
        ),
        total=("admitted", units.full_count(ledger.admitted), ""),
        note=balance_equation(summary) + (" ✓" if ledger.is_balanced else ": does not balance"),
    )


def _fate_table(tokens: TokenCounts) -> Table:
    counts = {"trained": tokens.trained}
    counts |= {f"untrained: {words(cause)}": count for cause, count in tokens.untrained.items()}
    return Table(
        caption="What became of the sampled tokens",
        header=("tokens", "count", "share"),
        rows=tuple(
            (name, *_count_and_share(count, tokens.sampled))
            for name, count in counts.items()
            if tokens.sampled
        ),
        total=("sampled", units.full_count(tokens.sampled), ""),
        note="Tokens of attempts that no step took are included; each token counts under the first "
        "cause that kept it out of the loss.",
    )


def _stages_table(summary: RunSummary) -> Table:
    total, steps = summary.stage_seconds.total, max(summary.steps, 1)
    return Table(
        caption="Stage times",
        header=("stage", "total", "share", "a step"),
        rows=tuple(
            (
                words(name),
                units.duration(seconds),
                _share(seconds, total),
                units.duration(seconds / steps),
            )
            for name, seconds in summary.stage_seconds.by_name().items()
            if seconds > 0
        ),
        total=("all stages", units.duration(total), "", units.duration(total / steps)),
    )


def _tokens_table(summary: RunSummary) -> Table:
    counts = {
        "tokens sampled, in the steps' trajectories": summary.sampled_tokens,
        "tokens trained": summary.trained_tokens,
        "tokens in packed rows": summary.packed_tokens,
        "tokens inserted, never trained": summary.inserted_tokens,
        "samples before merging (turns)": summary.merge.samples_before,
        "samples after merging": summary.merge.samples_after,
        "groups of zero variance": summary.zero_variance_groups,
        "groups with a negative return, under scale mean": summary.negative_return_groups,
        "steps with a skipped update": summary.skipped_steps,
    }
    return Table(
        caption="Tokens and samples",
        header=("what", "count"),
        rows=tuple((name, units.full_count(count)) for name, count in counts.items()),
    )


def _counted(
    caption: str, noun: str, counts: Mapping[Outcome, int] | Mapping[BranchReason, int]
) -> Table:
    total = sum(counts.values())
    return Table(
        caption=caption,
        header=(noun, "count", "share"),
        rows=tuple(
            (words(name), *_count_and_share(count, total)) for name, count in counts.items()
        ),
    )


def _count_and_share(count: int, total: int) -> tuple[str, str]:
    return units.full_count(count), _share(count, total)


def _share(part: float, whole: float) -> str:
    return units.percent(part / whole) if whole else units.UNKNOWN


def words(name: str) -> str:
    """Return a name as words. Example: 'zero_variance' -> 'zero variance'."""
    return name.replace("_", " ")


def statistic_tables(totals: RunTotals) -> tuple[Table, ...]:
    """Return a table for each group of statistics: the first, extreme and last value of each.

    The prefix that a group's names share appears only in its caption.
    """
    tables = (_statistic_table(group, totals) for group in GROUPS)
    return tuple(table for table in tables if table.rows)


def _statistic_table(group: str, totals: RunTotals) -> Table:
    names = [statistic.name for statistic in STATISTICS if statistic.group == group]
    known = [(name, totals.statistics[name]) for name in names if name in totals.statistics]
    # The last word of a name is always in its row.
    columns = zip(*(name.split("_")[:-1] for name in names), strict=False)
    num_shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    return Table(
        caption=group,
        header=("statistic", "first", "smallest", "largest", "last"),
        rows=tuple(
            (
                " ".join(name.split("_")[num_shared:]),
                *map(units.significant, (found.first, found.least, found.greatest, found.last)),
            )
            for name, found in known
        ),
    )


def statistic_definitions(totals: RunTotals) -> tuple[tuple[str, str], ...]:
    """Explain the values from which each known statistic is computed."""
    found = {
        (words(each.values), each.help): each.name
        for each in STATISTICS
        if each.name in totals.statistics
    }
    return tuple((values, help_of(name)) for (values, _), name in found.items())


def definitions() -> tuple[tuple[str, str], ...]:
    """Explain each number of the run's page."""
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


def window_table(queue: QueueStats | None, *, max_items: int, max_lag: int) -> Table:
    """Show how many rollouts may be in flight, and how many are in each state."""
    if queue is None:
        return Table(caption="Window", header=(), rows=())
    in_flight = queue.ledger.in_flight
    return Table(
        caption="Window",
        header=("rollouts", "count"),
        rows=(
            ("admitted, not begun", units.full_count(_rest(in_flight, queue))),
            ("being played", units.full_count(queue.num_handed_out)),
            ("finished, wait for a step", units.full_count(queue.num_waiting)),
        ),
        total=("in flight", f"{units.full_count(in_flight)} of {units.full_count(max_items)}"),
        note=f"Rollouts may run {units.plural(max_lag, 'version')} ahead (algorithm.max_lag).",
    )


def _rest(in_flight: int, queue: QueueStats) -> int:
    return max(in_flight - queue.num_handed_out - queue.num_waiting, 0)


def queue_table(queue: QueueStats | None, *, max_bytes: int) -> Table:
    """Show the rollouts that wait for a step, and how long producer and consumer have waited."""
    if queue is None:
        return Table(caption="Queue", header=(), rows=())
    mib = 1 << 20
    return Table(
        caption="Queue",
        header=("what", "amount"),
        rows=(
            ("MiB of finished trajectories", units.significant(queue.waiting_bytes / mib)),
            ("MiB at most", units.full_count(max_bytes // mib)),
            ("oldest has waited", units.duration(queue.oldest_s)),
            ("attempts repeated", units.full_count(queue.num_retries)),
            ("late results refused", units.full_count(queue.num_refused)),
            ("groups replaced", units.full_count(queue.num_replaced_groups)),
            *(
                (f"{words(side)} waited", units.duration(seconds))
                for side, seconds in queue.blocked_s.items()
            ),
        ),
    )


def engines_table(engines: Mapping[str, int], *, expected: int) -> Table:
    return Table(
        caption="Engines",
        header=("replica", "policy version"),
        rows=tuple((name, units.full_count(version)) for name, version in sorted(engines.items())),
        note=f"{len(engines)} of {expected} hold a version.",
    )


def help_of(name: str) -> str:
    """Return the explanation of a statistic, worded to follow its name on the page."""
    text = BY_NAME[name].help.replace("`", "")
    return text[0].lower() + text[1:]
