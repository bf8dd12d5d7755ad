"""The figure that says whether it learnt: reward over steps, for the report and for a README."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from service import units
from service.report import series
from service.report.figure import (
    HERO,
    MAX_POINTS,
    LegendEntry,
    Mark,
    Plot,
    line,
    render,
    step_axis,
    value_axis,
)
from service.report.series import Floats, buckets_of
from service.report.style import colour, new_axes, styled
from service.telemetry.records import EvaluationRecord, StepRecord
from service.telemetry.summary import EDGE_STEPS, evaluation_reward

Records = Sequence[StepRecord]

MAX_EVALUATIONS = 60


def reward_plot(records: Records, evaluations: Sequence[EvaluationRecord]) -> Plot:
    """Training reward, its trailing mean, and the evaluations; best play at 1 where known."""
    rewards = series.values_of(records, lambda record: record.best_known_reward)
    title = "Reward" if _is_scaled(records) else "Reward (plain return)"
    points = _evaluation_points(evaluations)
    if not np.isfinite(rewards).any() and not len(points[0]):
        return Plot(key="reward", title=title, alt="No trajectory was graded.")
    wide, narrow = render(
        lambda axes: _draw_reward(axes, records, rewards, points), HERO, key="reward"
    )
    known = rewards[np.isfinite(rewards)]
    ends = f"from {units.reward(known[0])} to {units.reward(known[-1])}" if len(known) else ""
    return Plot(
        key="reward",
        title=title,
        alt=f"Line chart of the mean training reward {ends} over "
        f"{units.plural(len(records), 'step')}, with {units.plural(len(points[0]), 'evaluation')}.",
        note="1 is the best possible play." if _is_scaled(records) else "",
        legend=_legend(records, has_evaluations=len(points[0]) > 0),
        svg_wide=wide,
        svg_narrow=narrow,
    )


def write_reward_png(path: Path, records: Records, evaluations: Sequence[EvaluationRecord]) -> None:
    """The reward figure by itself, on white, twice as dense as a screen: for a README."""
    rewards = series.values_of(records, lambda record: record.best_known_reward)
    with styled():
        figure, axes = new_axes(820, 330)
        if len(records):
            _draw_reward(axes, records, rewards, _evaluation_points(evaluations))
        axes.set_ylabel("reward, 1 = best possible play" if _is_scaled(records) else "reward")
        _draw_legend(axes, _legend(records, has_evaluations=bool(evaluations)))
        figure.savefig(path, dpi=144, facecolor=colour("surface"), format="png")


def _legend(records: Records, *, has_evaluations: bool) -> tuple[LegendEntry, ...]:
    if len(records) > MAX_POINTS:
        range_entry = LegendEntry(label="range of the steps", role="blue", mark=Mark.BAND)
        mean_entry = LegendEntry(label="mean", role="blue", mark=Mark.LINE)
    else:
        range_entry = LegendEntry(label="training, each step", role="blue", mark=Mark.FAINT)
        mean_entry = LegendEntry(label=f"mean of {EDGE_STEPS} steps", role="blue", mark=Mark.LINE)
    evaluation = LegendEntry(
        label="evaluation, held out, temperature 0", role="orange", mark=Mark.DOT
    )
    return (range_entry, mean_entry, *([evaluation] if has_evaluations else []))


def _draw_legend(axes: Axes, entries: Sequence[LegendEntry]) -> None:
    """For the picture that has no page around it."""
    looks: dict[Mark, dict[str, Any]] = {
        Mark.FAINT: {"linewidth": 1.0, "alpha": 0.45},
        Mark.BAND: {"linewidth": 8.0, "alpha": 0.18},
        Mark.LINE: {"linewidth": 2.4},
        Mark.DOT: {"linewidth": 0, "marker": "o", "markersize": 6},
    }
    handles = [
        axes.plot([], [], color=colour(entry.role), **looks[entry.mark])[0] for entry in entries
    ]
    axes.legend(handles, [entry.label for entry in entries], loc="lower right")


def _is_scaled(records: Records) -> bool:
    return any(record.scaled_reward_mean is not None for record in records)


def _evaluation_points(evaluations: Sequence[EvaluationRecord]) -> tuple[Floats, Floats]:
    found = [
        (evaluation.step, value)
        for evaluation in evaluations
        if (value := evaluation_reward(evaluation)) is not None and math.isfinite(value)
    ]
    stride = max(1, math.ceil(len(found) / MAX_EVALUATIONS))
    kept = found[::-stride][::-1]
    return (
        np.array([step for step, _ in kept], dtype=np.float64),
        np.array([value for _, value in kept], dtype=np.float64),
    )


def _draw_reward(
    axes: Axes, records: Records, rewards: Floats, evaluations: tuple[Floats, Floats]
) -> None:
    buckets = buckets_of(records, max_points=MAX_POINTS)
    smooth = buckets.mean(series.trailing_mean(rewards, width=EDGE_STEPS))
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
