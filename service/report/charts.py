"""The report's large charts: reward, outcomes, stages, policy age, and the mismatch of engines.

Each takes at least one record. What was never measured gives a Plot without a drawing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from actors.types import Outcome
from service import units
from service.report.drawing import (
    HALF,
    HERO,
    MAX_BANDS,
    MAX_POINTS,
    Buckets,
    Draw,
    Floats,
    LegendEntry,
    Mark,
    Plot,
    Records,
    buckets_of,
    colour,
    line,
    render,
    stacked,
    step_axis,
    trailing_mean,
    value_axis,
    values_of,
)
from service.report.figures import Curve
from service.telemetry.records import EvaluationRecord
from service.telemetry.summary import AVERAGED_STEPS, RunSummary

MAX_EVALUATIONS = 60

Evaluations = Sequence[EvaluationRecord]
Points = tuple[Floats, Floats]

MISMATCH_CURVES = (
    Curve(label="max |Δ|", role="purple", read="mismatch_max", thin=Buckets.maximum),
    Curve(label="k3", role="blue", read="mismatch_k3_mean", thin=Buckets.maximum),
    Curve(
        label="check after publish", role="green", read="logprob_check_max", thin=Buckets.maximum
    ),
)

STAGES = (
    ("collect", "collect (wait for rollouts)", "sky"),
    ("merge", "merge", "yellow"),
    ("score", "score (critic, reference)", "orange"),
    ("train", "train", "azure"),
    ("publish", "publish", "green"),
    ("checkpoint", "checkpoint", "grey"),
    ("evaluate", "evaluate", "purple"),
)

OUTCOMES: tuple[tuple[str, str, tuple[Outcome, ...]], ...] = (
    ("completed", "azure", (Outcome.COMPLETED,)),
    ("max turns", "sky", (Outcome.MAX_TURNS,)),
    ("truncated by tokens", "yellow", (Outcome.TRUNCATED_TOKENS,)),
    ("truncated by context", "orange", (Outcome.TRUNCATED_CONTEXT,)),
    ("malformed tool call", "red", (Outcome.MALFORMED_TOOL_CALL,)),
    ("late or cancelled", "grey", (Outcome.WALL_TIMEOUT, Outcome.STALE, Outcome.CANCELLED)),
    (
        "error",
        "purple",
        (
            Outcome.AGENT_ERROR,
            Outcome.ENVIRONMENT_ERROR,
            Outcome.INFRASTRUCTURE_ERROR,
            Outcome.REWARD_ERROR,
            Outcome.EMPTY,
            Outcome.TOKEN_MISALIGNED,
        ),
    ),
)


def large_plots(records: Records, summary: RunSummary) -> tuple[Plot, ...]:
    """summary: of all steps, where records are only some of them."""
    return (
        outcomes_plot(records, summary),
        stages_plot(records, summary),
        age_plot(records, bound=summary.policy_age_bound),
        mismatch_plot(records),
    )


def age_plot(records: Records, *, bound: int | None) -> Plot:
    """How many versions behind the trainer the trained tokens were."""
    buckets = buckets_of(records)
    largest = buckets.maximum(values_of(records, lambda record: record.policy_age_max))
    mean = buckets.mean(values_of(records, lambda record: record.value("policy_age_mean") or 0.0))

    def draw(axes: Axes) -> None:
        axes.stairs(largest, buckets.edges, baseline=None, color=colour("purple"), linewidth=1.6)
        line(axes, buckets.centres, mean, role="blue")
        if bound is not None:
            axes.axhline(bound, color=colour("red"), linewidth=1.2, linestyle=(0, (5, 3)))
        step_axis(axes, buckets)
        axes.set_ylim(-0.08, max(1.0, float(largest.max()), bound or 0) * 1.15)
        value_axis(axes, is_integer=True)

    legend = [
        LegendEntry(label="oldest token", role="purple", mark=Mark.LINE),
        LegendEntry(label="mean", role="blue", mark=Mark.LINE),
    ]
    if bound is not None:
        legend.append(LegendEntry(label=f"bound {bound}", role="red", mark=Mark.DASH))
    return Plot(
        key="age",
        title="Policy age",
        alt=f"Line chart of policy age: at most {int(largest.max())} versions, bound "
        f"{'not given' if bound is None else bound}.",
        note="Versions behind the trainer when a token was trained.",
        legend=tuple(legend),
        svgs=render(draw, HALF, key="age"),
    )


def mismatch_plot(records: Records) -> Plot:
    """Trainer against engine on the same tokens, logarithmic; exact zeros lie on the floor."""
    buckets = buckets_of(records)
    curves = [(curve, curve.thin(buckets, curve.values(records))) for curve in MISMATCH_CURVES]
    curves = [(curve, y) for curve, y in curves if np.isfinite(y).any()]
    title, key = "Sampler and trainer mismatch", "mismatch"
    if not curves:
        return Plot(key=key, title=title, alt="No token of the trainer's own version was seen.")

    def draw(axes: Axes) -> None:
        floor = _log_axis(axes, np.concatenate([y for _, y in curves]))
        for curve, y in curves:
            line(axes, buckets.centres, np.where(y > 0, y, y * 0 + floor), role=curve.role)
        step_axis(axes, buckets)

    peaks = ", ".join(
        f"{curve.label} at most {units.significant(np.nanmax(y))}" for curve, y in curves
    )
    return Plot(
        key=key,
        title=title,
        alt=f"Line chart on a logarithmic scale, nats: {peaks}.",
        note="Nats, on tokens sampled by the version that the trainer held.",
        legend=tuple(curve.entry for curve, _ in curves),
        svgs=render(draw, HALF, key=key),
    )


def _log_axis(axes: Axes, values: Floats) -> float:
    """Decades from the smallest positive value up; returns where zeros are drawn."""
    known = values[np.isfinite(values)]
    positive = known[known > 0]
    has_zero = len(positive) < len(known)
    low = math.floor(math.log10(positive.min())) if len(positive) else -12
    high = math.ceil(math.log10(positive.max())) if len(positive) else -11
    first = low - 1 if has_zero else low
    high = max(high, first + 1)
    floor = 10.0**first

    def label(value: float, _: int) -> str:
        if has_zero and value < floor * 1.01:
            return "0"
        return f"1e{round(math.log10(value))}".replace("-", "\u2212")

    axes.set_yscale("log")
    axes.set_ylim(floor * 0.7, 10.0**high * 1.4)
    stride = max(1, math.ceil((high - first) / 5))
    axes.set_yticks([10.0**power for power in range(first, high + 1, stride)])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(label))
    return floor


def stages_plot(records: Records, summary: RunSummary) -> Plot:
    """Where the seconds of a step went."""
    buckets = buckets_of(records, max_points=MAX_BANDS)
    bands = []
    for name, label, role in STAGES:
        seconds = np.array([getattr(record.stages, name) for record in records])
        if np.nansum(seconds) > 0:
            told = units.duration(getattr(summary.stage_seconds, name))
            bands.append((label, role, np.nan_to_num(buckets.mean(seconds)), told))

    def draw_axis(axes: Axes) -> None:
        axes.set_ylim(bottom=0)
        value_axis(axes)

    return _stacked_plot(
        buckets,
        bands,
        draw_axis,
        key="stages",
        title="Stage times",
        alt="Stacked chart of seconds per step; in all",
        note=f"Seconds of a step, by stage{'; neighbours averaged' if buckets.is_thinned else ''}.",
        empty="No stage was timed.",
    )


def outcomes_plot(records: Records, summary: RunSummary) -> Plot:
    """How the trajectories of each step ended, as shares."""
    buckets = buckets_of(records, max_points=MAX_BANDS)
    families = []
    for label, role, outcomes in OUTCOMES:
        counts = np.array([sum(r.outcomes.get(each, 0) for each in outcomes) for r in records])
        if counts.any():
            in_all = sum(summary.outcomes.get(each, 0) for each in outcomes)
            families.append((label, role, in_all, buckets.total(counts)))
    everything = sum((totals for *_, totals in families), buckets.centres * 0)
    num_ended = max(sum(in_all for *_, in_all, _ in families), 1)
    bands = [
        (
            label,
            role,
            totals / np.maximum(everything, 1),
            units.percent(in_all / num_ended),
        )
        for label, role, in_all, totals in families
    ]

    def draw_axis(axes: Axes) -> None:
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))

    return _stacked_plot(
        buckets,
        bands,
        draw_axis,
        key="outcomes",
        title="Outcomes",
        alt="Stacked chart of outcome shares per step; overall",
        note="Shares of each step's trajectories.",
        empty="No trajectory ended.",
    )


def _stacked_plot(
    buckets: Buckets,
    bands: Sequence[tuple[str, str, Floats, str]],
    draw_axis: Draw,
    *,
    key: str,
    title: str,
    alt: str,
    note: str,
    empty: str,
) -> Plot:
    """bands: (label, role, [K] heights, value in the legend) of each part of the whole."""
    if not bands:
        return Plot(key=key, title=title, alt=empty)

    def draw(axes: Axes) -> None:
        stacked(axes, buckets, [(role, heights) for _, role, heights, _ in bands])
        step_axis(axes, buckets)
        draw_axis(axes)

    return Plot(
        key=key,
        title=title,
        alt=f"{alt} {', '.join(f'{label} {told}' for label, *_, told in bands)}.",
        note=note,
        legend=tuple(
            LegendEntry(label=label, role=role, mark=Mark.AREA, value=told)
            for label, role, _, told in bands
        ),
        svgs=render(draw, HALF, key=key),
    )


def reward_plot(records: Records, evaluations: Evaluations) -> Plot:
    """Training reward, its trailing mean, and the evaluations; best play at 1 where known."""
    rewards = values_of(records, lambda record: record.best_known_reward)
    title = "Reward" if _is_scaled(records) else "Reward (plain return)"
    points = _evaluation_points(evaluations)
    known = rewards[np.isfinite(rewards)]
    if not len(known) and not len(points[0]):
        return Plot(key="reward", title=title, alt="No trajectory was graded.")
    ends = f"from {units.reward(known[0])} to {units.reward(known[-1])}" if len(known) else ""
    return Plot(
        key="reward",
        title=title,
        alt=f"Line chart of the mean training reward {ends} over "
        f"{units.plural(len(records), 'step')}, with {units.plural(len(points[0]), 'evaluation')}.",
        note="1 is the best possible play." if _is_scaled(records) else "",
        legend=_reward_legend(records, has_evaluations=len(points[0]) > 0),
        svgs=render(lambda axes: _draw_reward(axes, records, rewards, points), HERO, key="reward"),
    )


def _reward_legend(records: Records, *, has_evaluations: bool) -> tuple[LegendEntry, ...]:
    if len(records) > MAX_POINTS:
        each, mean, mark = "range of the steps", "mean", Mark.BAND
    else:
        each, mean, mark = "training, each step", f"mean of {AVERAGED_STEPS} steps", Mark.FAINT
    evaluation = "evaluation, held out, temperature 0"
    legend = (
        LegendEntry(label=each, role="blue", mark=mark),
        LegendEntry(label=mean, role="blue", mark=Mark.LINE),
        LegendEntry(label=evaluation, role="orange", mark=Mark.DOT),
    )
    return legend if has_evaluations else legend[:2]


def _is_scaled(records: Records) -> bool:
    return any(record.value("scaled_reward_mean") is not None for record in records)


def _evaluation_points(evaluations: Evaluations) -> Points:
    found = [
        (float(evaluation.step), value)
        for evaluation in evaluations
        if evaluation.is_scheduled
        and (value := evaluation.best_known_reward) is not None
        and math.isfinite(value)
    ]
    stride = max(1, math.ceil(len(found) / MAX_EVALUATIONS))
    kept = np.array(found[::-stride][::-1], dtype=np.float64).reshape(-1, 2)
    return kept[:, 0], kept[:, 1]


def _draw_reward(axes: Axes, records: Records, rewards: Floats, evaluations: Points) -> None:
    buckets = buckets_of(records)
    smooth = buckets.mean(trailing_mean(rewards, width=AVERAGED_STEPS))
    x = buckets.centres
    if buckets.is_thinned:
        low, high = buckets.minimum(rewards), buckets.maximum(rewards)
        axes.fill_between(x, low, high, color=colour("blue"), alpha=0.18, linewidth=0)
    elif len(records) > 1:
        line(axes, x, buckets.mean(rewards), role="blue", width=1.0, alpha=0.4)
    line(axes, x, smooth, role="blue", width=2.4)
    step_axis(axes, buckets)
    if len(evaluations[0]):
        axes.set_xlim(min(evaluations[0][0] - 0.5, buckets.edges[0]), buckets.edges[-1])
        line(axes, *evaluations, role="orange", width=1.0, alpha=0.6)
        axes.plot(
            *evaluations,
            linestyle="none",
            marker="o",
            markersize=6.5,
            color=colour("orange"),
            markeredgecolor=colour("surface"),
            markeredgewidth=1.2,
            clip_on=False,
            zorder=4,
        )
    if _is_scaled(records):
        _best_possible_line(axes)
    value_axis(axes)
    axes.margins(y=0.1)


def _best_possible_line(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.axhline(1.0, color=colour("green"), linewidth=1.2, linestyle=(0, (5, 3)))
    axes.annotate(
        "best possible play",
        xy=(0.0, 1.0),
        xycoords=("axes fraction", "data"),
        xytext=(6, 4),
        textcoords="offset points",
        color=colour("green"),
        fontsize=10,
    )
    axes.set_ylim(min(0.0, low), max(1.12, high))
