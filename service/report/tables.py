"""Make the tables on a run's page, with text in every cell, ready for the page's template.

The statistics are named and grouped as in `actors.statistics`. The functions have no side effects.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from actors.statistics import GROUPS, STATISTICS
from actors.trajectory_queue.ledger import TokenCounts
from actors.trajectory_queue.messages import QueueStats
from actors.types import BranchReason, Outcome
from service import units
from service.telemetry.records import EvaluationRecord, EvaluationSample, StepRecord
from service.telemetry.summary import AVERAGED_STEPS, Evaluations, RunSummary
from service.telemetry.totals import RunTotals


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


def _last_of_sets(evaluation: Evaluations) -> Iterator[EvaluationRecord]:
    """Yield the last evaluation of each task set: first the run's own set, then the named sets."""
    # Otherwise the page's tile "Evaluation" already shows the result of the run's own set.
    if evaluation.last is not None and (evaluation.sets or evaluation.last.num_samples > 1):
        yield evaluation.last
    yield from evaluation.sets.values()


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
    """Return tables of the reward components, the logged metrics, and each environment's reward."""
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
    """Return one table with the means over the first and the last steps; () if no step has a value.

    what: header of the column of names. steps: the values of each step, by name.
    """
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
    """Return a table of the answers of the first and the last evaluation to the same tasks."""
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
    """Return the texts without the first and last lines, and the end marker, that all texts share.

    Example, last lines of two prompts: "1 + 1?<|end|>", "1 + 2?<|end|>" -> "1 + 1?", "1 + 2?"
    """
    texts = [text.rstrip() for text in texts]
    bare = [re.sub(r"(<[^<>\s]+>)+$", "", text) for text in texts]
    has_marker = len({text[len(each) :] for text, each in zip(texts, bare, strict=True)}) == 1
    lines = [text.splitlines() for text in (bare if has_marker else texts)]
    num_first = _num_shared(lines)
    num_last = _num_shared([each[num_first:][::-1] for each in lines])
    return ["\n".join(each[num_first : len(each) - num_last]) for each in lines]


def _num_shared(sequences: Sequence[Sequence[str]]) -> int:
    """Return how many first elements all sequences share, but fewer than the shortest has.

    Example: [["a", "b"], ["a", "c"]] -> 1; [["a"], ["a"]] -> 0
    """
    shared = itertools.takewhile(
        lambda column: len(set(column)) == 1, zip(*sequences, strict=False)
    )
    shortest = min((len(each) for each in sequences), default=0)
    # Without the shared elements, no sequence may be empty.
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
    """Return a table for each group of statistics: first, least, greatest and last values.

    The prefix that the names of a group share appears only in the table's caption.
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


def window_table(queue: QueueStats | None, *, max_items: int, max_lag: int) -> Table:
    """Return a table that counts the rollouts in flight in each state.

    Its last row has the sum, and `max_items`, which the sum may not exceed. max_lag: shown in a
    note below the table.
    """
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
    """Return a table on the queue: its waiting trajectories, its counts and its waiting times.

    It has a waiting time for each side of the queue: the producer and the consumer of trajectories.
    """
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


def balance_equation(summary: RunSummary) -> str:
    """Return an equation that says what became of the rollouts that the run admitted.

    If a rollout is lost or counted twice, the equation shows it by the sign ≠.
    Example: '30 720 admitted = 29 952 trained + 768 evicted + 0 in flight'
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
