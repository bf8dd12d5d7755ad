"""The report's tiles, tables and definitions, as values ready for the template; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service import units
from service.report.verdict import balance_equation
from service.telemetry.summary import RunSummary, evaluation_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A key figure: what it is, how much, and one line of context."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text; the first cell of each names it. total: the last row, set apart."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    total: tuple[str, ...] | None = None
    note: str = ""

    @property
    def is_empty(self) -> bool:
        return not self.rows


def tiles(summary: RunSummary) -> tuple[Tile, ...]:
    reward, ledger, mismatch = summary.reward, summary.ledger, summary.mismatch
    is_bounded = summary.policy_age_bound is not None
    found = [
        Tile(
            label="Reward",
            value=units.reward(reward.last),
            detail=_reward_detail(summary),
        ),
        _evaluation_tile(summary),
        Tile(
            label="Steps",
            value=units.full_count(summary.steps),
            detail=f"policy version {units.full_count(summary.policy_version)}",
        ),
        Tile(
            label="Wall time",
            value=units.duration(summary.wall_s),
            detail=_resumes(summary.num_resumes),
        ),
        Tile(
            label="Policy age, largest",
            value=units.full_count(summary.max_policy_age),
            detail=f"bound {summary.policy_age_bound}" if is_bounded else "versions",
        ),
        Tile(
            label="Mismatch, mean k3",
            value=units.significant(mismatch.mean_k3, digits=2),
            detail="not measured"
            if mismatch.max_abs_delta is None
            else f"max |Δ| {units.significant(mismatch.max_abs_delta, digits=2)} nats",
        ),
        Tile(
            label="Sampled tokens",
            value=units.short_count(summary.sampled_tokens),
            detail=f"{units.short_count(summary.trained_tokens)} trained",
        ),
        Tile(
            label="Rollouts trained",
            value=units.short_count(ledger.trained),
            detail=f"of {units.short_count(ledger.admitted)} admitted",
        ),
    ]
    return tuple(found)


def _reward_detail(summary: RunSummary) -> str:
    if summary.reward.first is None:
        return "not measured"
    scale = ", best possible 1" if summary.is_reward_scaled else ""
    return f"from {units.reward(summary.reward.first)}{scale}"


def _evaluation_tile(summary: RunSummary) -> Tile:
    first, last = summary.evaluation_first, summary.evaluation_last
    if first is None or last is None:
        return Tile(label="Evaluation", value=units.UNKNOWN, detail="none was made")
    detail = f"from {units.reward(evaluation_reward(first))}" if first is not last else ""
    tasks = units.plural(last.num_tasks, "held-out task")
    return Tile(
        label="Evaluation",
        value=units.reward(evaluation_reward(last)),
        detail=f"{detail}, {tasks}" if detail else tasks,
    )


def _resumes(count: int) -> str:
    if count == 0:
        return "without interruption"
    return "resumed once" if count == 1 else f"resumed {count} times"


def ledger_table(summary: RunSummary) -> Table:
    ledger = summary.ledger
    rows = [("trained", *_count_and_share(ledger.trained, ledger.admitted))]
    rows += [
        (f"evicted: {words(reason)}", *_count_and_share(count, ledger.admitted))
        for reason, count in sorted(ledger.evicted.items(), key=lambda item: -item[1])
    ]
    rows.append(("in flight", *_count_and_share(ledger.in_flight, ledger.admitted)))
    return Table(
        caption="Ledger",
        header=("rollouts", "count", "share"),
        rows=tuple(rows),
        total=("admitted", units.full_count(ledger.admitted), ""),
        note=balance_equation(summary) + (" ✓" if ledger.is_balanced else ": does not balance"),
    )


def outcomes_table(summary: RunSummary) -> Table:
    return _counted("Outcomes", "trajectories", summary.outcomes)


def mismatches_table(summary: RunSummary) -> Table:
    return _counted("Why turns could not be merged", "kind", summary.merge.mismatches)


def stages_table(summary: RunSummary) -> Table:
    total, steps = summary.stages.total, max(summary.steps, 1)
    rows = [
        (
            words(name),
            units.duration(seconds),
            _share(seconds, total),
            units.duration(seconds / steps),
        )
        for name, seconds in summary.stages.by_name().items()
        if seconds > 0
    ]
    return Table(
        caption="Stage times",
        header=("stage", "total", "share", "a step"),
        rows=tuple(rows),
        total=("all stages", units.duration(total), "", units.duration(total / steps)),
    )


def tokens_table(summary: RunSummary) -> Table:
    merge = summary.merge
    counts = {
        "tokens sampled": summary.sampled_tokens,
        "tokens trained": summary.trained_tokens,
        "tokens in packed rows": summary.packed_tokens,
        "tokens inserted, never trained": summary.inserted_tokens,
        "samples before merging (turns)": merge.samples_before,
        "samples after merging": merge.samples_after,
        "groups of zero variance": summary.zero_variance_groups,
        "steps with a skipped update": summary.skipped_steps,
    }
    return Table(
        caption="Tokens and samples",
        header=("what", "count"),
        rows=tuple((name, units.full_count(count)) for name, count in counts.items()),
    )


def versions_table(summary: RunSummary) -> Table:
    return Table(
        caption="Versions",
        header=("package", "version"),
        rows=tuple(summary.versions.items()),
    )


DEFINITIONS: tuple[tuple[str, str], ...] = (
    (
        "Reward",
        "mean return of a step's graded trajectories, divided by the best possible return where "
        "the environment knows it; first and last are means over five steps.",
    ),
    (
        "Evaluation",
        "mean return on held-out tasks at temperature 0, scaled likewise; never trained on.",
    ),
    ("Policy version", "a counter of published weights; it grows by one each step."),
    ("Policy age", "how many versions behind the trainer a token was when it was trained on."),
    (
        "Mismatch",
        "Δ = trainer − engine log-probability of the same token under the same weights, nats; "  # noqa: RUF001
        "k3 = exp(Δ) − 1 − Δ, averaged over steps by their trained tokens.",  # noqa: RUF001
    ),
    (
        "Parity",
        "largest |Δ| on one fixed prompt, right after each publish, over all engines.",
    ),
    (
        "Ledger",
        "every admitted rollout leaves exactly once: trained, or evicted with one reason.",
    ),
    ("Merge ratio", "turns divided by the training samples that they became."),
    ("Sampled tokens", "in the trajectories of the trained steps; engine output only."),
    ("Trained tokens", "tokens with a place in the loss."),
    ("Clip fraction", "trained tokens whose ratio was clipped, of all trained tokens."),
    ("Loss", "sum over the step's trained tokens, each by its weight in the update."),
    ("Entropy", "of the policy's next-token distribution, nats, over trained tokens."),
    (
        "Effective sample size",
        "(Σ r)² / (M Σ r²) of the importance ratios r of M trained tokens; 1 when all are equal.",
    ),
    ("Zero-variance groups", "groups of a step whose members all had the same return."),
    ("Gradient norm", "before clipping, over all parameters."),
    ("Malformed share", "turns whose action could not be read, of all turns."),
    ("Stage times", "wall seconds of the training loop; collect is the wait for closed groups."),
)


def words(name: str) -> str:
    """Example: 'zero_variance' -> 'zero variance'."""
    return name.replace("_", " ")


def _counted(caption: str, noun: str, counts: Mapping[str, int]) -> Table:
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
