"""Figures of parts that make a whole: the stages of a step, the outcomes of its trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from actors.types import Outcome
from service import units
from service.report.figure import (
    HALF,
    MAX_BANDS,
    LegendEntry,
    Mark,
    Plot,
    render,
    stacked,
    step_axis,
    value_axis,
)
from service.report.series import Floats, buckets_of
from service.telemetry.records import StepRecord

Records = Sequence[StepRecord]

STAGES = (
    ("collect", "collect (wait for rollouts)", "sky"),
    ("merge", "merge", "yellow"),
    ("score", "score (critic, reference)", "orange"),
    ("train", "train", "azure"),
    ("publish", "publish", "green"),
    ("checkpoint", "checkpoint", "grey"),
    ("evaluate", "evaluate", "purple"),
)

OUTCOMES: tuple[tuple[str, str, frozenset[Outcome]], ...] = (
    ("completed", "azure", frozenset({Outcome.COMPLETED})),
    ("max turns", "sky", frozenset({Outcome.MAX_TURNS})),
    ("truncated by tokens", "yellow", frozenset({Outcome.TRUNCATED_TOKENS})),
    ("truncated by context", "orange", frozenset({Outcome.TRUNCATED_CONTEXT})),
    ("malformed tool call", "red", frozenset({Outcome.MALFORMED_TOOL_CALL})),
    (
        "late or cancelled",
        "grey",
        frozenset({Outcome.WALL_TIMEOUT, Outcome.STALE, Outcome.CANCELLED}),
    ),
    (
        "error",
        "purple",
        frozenset(
            {
                Outcome.AGENT_ERROR,
                Outcome.ENVIRONMENT_ERROR,
                Outcome.INFRASTRUCTURE_ERROR,
                Outcome.REWARD_ERROR,
                Outcome.EMPTY,
                Outcome.TOKEN_MISALIGNED,
            }
        ),
    ),
)


def stages_plot(records: Records) -> Plot:
    """Where the seconds of a step went."""
    buckets = buckets_of(records, max_points=MAX_BANDS)
    bands, legend = [], []
    for name, label, role in STAGES:
        seconds = np.array([getattr(record.stages, name) for record in records])
        if np.nansum(seconds) > 0:
            bands.append((role, np.nan_to_num(buckets.mean(seconds))))
            legend.append(
                LegendEntry(
                    label=label,
                    role=role,
                    mark=Mark.AREA,
                    value=units.duration(float(np.nansum(seconds))),
                )
            )
    if not bands:
        return Plot(key="stages", title="Stage times", alt="No stage was timed.")

    def draw(axes: Axes) -> None:
        stacked(axes, buckets, bands)
        step_axis(axes, buckets)
        axes.set_ylim(bottom=0)
        value_axis(axes)

    is_thinned = buckets.is_thinned
    wide, narrow = render(draw, HALF, key="stages")
    return Plot(
        key="stages",
        title="Stage times",
        alt="Stacked chart of seconds per step; in all "
        + ", ".join(f"{entry.label} {entry.value}" for entry in legend)
        + ".",
        note="Seconds of a step, by stage" + ("; neighbours averaged." if is_thinned else "."),
        legend=tuple(legend),
        svg_wide=wide,
        svg_narrow=narrow,
    )


def outcomes_plot(records: Records) -> Plot:
    """How the trajectories of each step ended, as shares."""
    buckets = buckets_of(records, max_points=MAX_BANDS)
    families = _families(records)
    everything = sum((buckets.total(counts) for _, _, counts in families), buckets.centres * 0)
    title = "Outcomes"
    if not everything.sum():
        return Plot(key="outcomes", title=title, alt="No trajectory ended.")
    bands = [
        (role, buckets.total(counts) / np.maximum(everything, 1)) for _, role, counts in families
    ]

    def draw(axes: Axes) -> None:
        stacked(axes, buckets, bands)
        step_axis(axes, buckets)
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))

    wide, narrow = render(draw, HALF, key="outcomes")
    legend = tuple(
        LegendEntry(
            label=label,
            role=role,
            mark=Mark.AREA,
            value=units.percent(counts.sum() / everything.sum()),
        )
        for label, role, counts in families
    )
    return Plot(
        key="outcomes",
        title=title,
        alt="Stacked chart of outcome shares per step; overall "
        + ", ".join(f"{entry.label} {entry.value}" for entry in legend)
        + ".",
        note="Shares of each step's trajectories.",
        legend=legend,
        svg_wide=wide,
        svg_narrow=narrow,
    )


def _families(records: Records) -> list[tuple[str, str, Floats]]:
    """(label, role, [N] counts) of each family that occurred."""
    family_of = {
        outcome.value: index
        for index, (_, _, outcomes) in enumerate(OUTCOMES)
        for outcome in outcomes
    }
    counts = np.zeros((len(OUTCOMES), len(records)))
    for column, record in enumerate(records):
        for outcome, count in record.outcomes.items():
            counts[family_of[outcome], column] += count
    return [
        (label, role, counts[index])
        for index, (label, role, _) in enumerate(OUTCOMES)
        if counts[index].any()
    ]
