"""The report's figures, one function each: from step records to a Plot.

Each takes at least one record. What was never measured gives an empty Plot, not a flat line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from service import units
from service.report import series
from service.report.figure import (
    HALF,
    MAX_POINTS,
    SMALL,
    LegendEntry,
    Mark,
    Plot,
    line,
    render,
    step_axis,
    value_axis,
)
from service.report.series import Buckets, Floats, buckets_of
from service.report.style import colour
from service.telemetry.records import StepRecord

Records = Sequence[StepRecord]


def age_plot(records: Records, *, bound: int | None) -> Plot:
    """How many versions behind the trainer the trained tokens were."""
    buckets = buckets_of(records, max_points=MAX_POINTS)
    largest = buckets.maximum(series.values_of(records, lambda record: record.policy_age_max))
    mean = buckets.mean(series.values_of(records, lambda record: record.policy_age_mean))

    def draw(axes: Axes) -> None:
        axes.stairs(largest, buckets.edges, baseline=None, color=colour("purple"), linewidth=1.6)
        line(axes, buckets.centres, mean, role="blue")
        if bound is not None:
            axes.axhline(bound, color=colour("red"), linewidth=1.2, linestyle=(0, (5, 3)))
        step_axis(axes, buckets)
        axes.set_ylim(-0.08, max(1.0, float(largest.max()), bound or 0) * 1.15)
        value_axis(axes, is_integer=True)

    wide, narrow = render(draw, HALF, key="age")
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
        svg_wide=wide,
        svg_narrow=narrow,
    )


def mismatch_plot(records: Records) -> Plot:
    """Trainer against engine on the same tokens, logarithmic; exact zeros lie on the floor."""
    buckets = buckets_of(records, max_points=MAX_POINTS)
    curves = [
        ("max |Δ|", "purple", _maxima(buckets, records, lambda record: record.mismatch_max)),
        ("k3", "blue", _maxima(buckets, records, lambda record: record.mismatch_k3)),
        ("parity after publish", "green", _maxima(buckets, records, lambda r: r.parity_max)),
    ]
    curves = [curve for curve in curves if np.isfinite(curve[2]).any()]
    title, key = "Sampler and trainer mismatch", "mismatch"
    if not curves:
        return Plot(key=key, title=title, alt="No token of the trainer's own version was seen.")
    values = np.concatenate([curve[2] for curve in curves])

    def draw(axes: Axes) -> None:
        floor = _log_axis(axes, values)
        for _, role, y in curves:
            line(axes, buckets.centres, np.where(y > 0, y, y * 0 + floor), role=role)
        step_axis(axes, buckets)

    wide, narrow = render(draw, HALF, key=key)
    peaks = ", ".join(f"{name} at most {units.significant(np.nanmax(y))}" for name, _, y in curves)
    return Plot(
        key=key,
        title=title,
        alt=f"Line chart on a logarithmic scale, nats: {peaks}.",
        note="Nats, on tokens sampled by the version that the trainer held.",
        legend=tuple(
            LegendEntry(label=name, role=role, mark=Mark.LINE) for name, role, _ in curves
        ),
        svg_wide=wide,
        svg_narrow=narrow,
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
    stride = max(1, math.ceil((high - first) / 5))
    floor = 10.0**first
    axes.set_yscale("log")
    axes.set_ylim(floor * 0.7, 10.0**high * 1.4)
    axes.set_yticks([10.0**power for power in range(first, high + 1, stride)])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(
            lambda value, _: (
                "0"
                if has_zero and value < floor * 1.01
                else f"1e{round(math.log10(value))}".replace("-", "\u2212")
            )
        )
    )
    return floor


def small_multiples(records: Records) -> tuple[Plot, ...]:
    """What else is worth a glance, in small figures of one line each."""
    return (
        _small(records, "merge", "Merge ratio", "turns a sample", _merge_ratio, base=1.0),
        _small(records, "loss", "Loss", "", lambda r: r.loss),
        _small(records, "entropy", "Entropy", "nats a token", lambda r: r.entropy),
        _small(records, "grad", "Gradient norm", "before clipping", lambda r: r.grad_norm),
        _small(records, "clip", "Clip fraction", "of tokens", lambda r: r.clip_fraction),
        _small(records, "malformed", "Malformed turns", "share of turns", _malformed_share),
        _small(records, "variance", "Zero-variance groups", "", lambda r: r.zero_variance_groups),
        _small(records, "ess", "Effective sample size", "share", lambda r: r.effective_sample_size),
        _small(records, "tokens", "Sampled tokens", "a second", _tokens_per_second),
    )


def _small(
    records: Records,
    key: str,
    title: str,
    note: str,
    read: Callable[[StepRecord], float | None],
    *,
    base: float | None = None,
) -> Plot:
    """base: a value that the vertical axis shows in any case."""
    values = series.values_of(records, read)
    known = values[np.isfinite(values)]
    if len(known) < 2:
        only = f"{units.significant(known[0])}, measured once" if len(known) else "not measured"
        return Plot(key=key, title=title, note=note, alt=only)
    buckets = buckets_of(records, max_points=MAX_POINTS)

    def draw(axes: Axes) -> None:
        line(axes, buckets.centres, buckets.mean(values), role="blue", width=1.5)
        step_axis(axes, buckets, label="")
        axes.margins(y=0.15)
        if base is not None:
            axes.set_ylim(bottom=min(base, float(known.min())))
        value_axis(axes, num_ticks=3)

    (drawn,) = render(draw, SMALL, key=key)
    return Plot(
        key=key,
        title=title,
        alt=f"Line chart from {units.significant(known[0])} to {units.significant(known[-1])}, "
        f"largest {units.significant(known.max())}.",
        note=note,
        svg_wide=drawn,
    )


def _malformed_share(record: StepRecord) -> float | None:
    return record.malformed_turns / record.turns if record.turns else None


def _merge_ratio(record: StepRecord) -> float | None:
    return record.samples_before / record.samples_after if record.samples_after else None


def _tokens_per_second(record: StepRecord) -> float | None:
    return record.sampled_tokens / record.stages.total if record.stages.total > 0 else None


def _maxima(
    buckets: Buckets, records: Records, read: Callable[[StepRecord], float | None]
) -> Floats:
    return buckets.maximum(series.values_of(records, read))
