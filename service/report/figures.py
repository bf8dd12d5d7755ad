"""The report's charts of lines, as lists: those beside the large charts, and those of the fold.

Each takes at least one record. A line that was not known at two steps, or that never left the value
at which it says nothing, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from service import units
from service.report.drawing import (
    SMALL,
    Buckets,
    Floats,
    LegendEntry,
    Mark,
    Plot,
    Read,
    Records,
    buckets_of,
    line,
    render,
    step_axis,
    value_axis,
    values_of,
)
from service.telemetry.records import StepRecord


def _statistic(name: str) -> Read:
    return lambda record: record.value(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    label: str
    role: str
    read: str | Read
    """A statistic by its name, or what else is read of a record."""
    thin: Callable[[Buckets, Floats], Floats] = Buckets.mean
    """How neighbouring steps become one point."""
    idle_at: float | None = None
    """The value at which it says nothing: a curve that never leaves it is left out."""
    dashes: bool = False

    def values(self, records: Records) -> Floats:
        read = _statistic(self.read) if isinstance(self.read, str) else self.read
        return values_of(records, read)

    @property
    def entry(self) -> LegendEntry:
        mark = Mark.DASH if self.dashes else Mark.LINE
        return LegendEntry(label=self.label, role=self.role, mark=mark)

    def is_idle(self, values: Floats) -> bool:
        known = values[np.isfinite(values)]
        return len(known) < 2 or (self.idle_at is not None and bool((known == self.idle_at).all()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A small chart of lines."""

    key: str
    title: str
    note: str
    curves: tuple[Curve, ...]
    base: float | None = None
    """A value that the vertical axis shows in any case."""
    num_ticks: int = 4


def _single(key: str, title: str, note: str, read: str | Read, base: float | None = None) -> Figure:
    curve = Curve(label="", role="blue", read=read)
    return Figure(key=key, title=title, note=note, curves=(curve,), base=base, num_ticks=3)


def _mean(read: str, idle_at: float | None = None) -> Curve:
    return Curve(label="mean", role="blue", read=read, idle_at=idle_at)


def _largest(read: str, idle_at: float | None = None) -> Curve:
    return Curve(label="largest", role="purple", read=read, thin=Buckets.maximum, idle_at=idle_at)


def _smallest(read: str) -> Curve:
    return Curve(label="smallest", role="green", read=read, thin=Buckets.minimum)


def _masked(label: str, role: str, read: str) -> Curve:
    return Curve(label=label, role=role, read=read, idle_at=0.0, dashes=True)


def _folded(title: str, note: str, *curves: Curve) -> Figure:
    key = f"statistic-{title.lower().replace(' ', '-')}"
    return Figure(key=key, title=title, note=note, curves=curves)


def _share(part: Callable[[StepRecord], float], whole: Callable[[StepRecord], float]) -> Read:
    return lambda record: part(record) / whole(record) if whole(record) > 0 else None


def _clip_fraction(record: StepRecord) -> float | None:
    low, high = record.value("clip_fraction_low"), record.value("clip_fraction_high")
    return None if low is None or high is None else low + high


# What else is worth a glance beside the large figures.
SMALL_FIGURES = (
    _single("merge", "Merge ratio", "turns a sample", lambda record: record.merge.ratio, 1.0),
    _single("loss", "Loss", "", "loss"),
    _single("entropy", "Entropy", "nats a token", "entropy_mean"),
    _single("grad", "Gradient norm", "before clipping", "grad_norm"),
    _single("clip", "Clip fraction", "of tokens", _clip_fraction),
    _single(
        "malformed",
        "Malformed turns",
        "share of turns",
        _share(lambda record: record.num_malformed_turns, lambda record: record.num_turns),
    ),
    _single("variance", "Zero-variance groups", "", lambda record: record.num_zero_variance_groups),
    _single("ess", "Effective sample size", "share", "effective_sample_size"),
    _single(
        "tokens",
        "Sampled tokens",
        "a second",
        _share(lambda record: record.num_sampled_tokens, lambda record: record.stages.total),
    ),
)

# Those of the fold, in the order in which one looks for the cause of a collapse.
LOSS_FIGURES = (
    _folded(
        "Log-probability",
        "mean, by advantage",
        Curve(label="above 0", role="green", read="policy_logprob_positive_mean"),
        Curve(label="below 0", role="orange", read="policy_logprob_negative_mean"),
    ),
    _folded("KL to the reference", "nats a token", _mean("kl_mean")),
    _folded("KL of one token", "nats", _largest("kl_max")),
    _folded("Ratio", "of policies, at a token", _largest("ratio_max"), _mean("ratio_mean")),
    _folded(
        "Clipped",
        "share of trained tokens",
        Curve(label="low", role="blue", read="clip_fraction_low"),
        Curve(label="high", role="orange", read="clip_fraction_high", dashes=True),
    ),
    # A rule that is off masks nothing; dashes keep apart what covers the whole.
    _folded(
        "Masked",
        "share of trained tokens",
        Curve(label="by any rule", role="blue", read="masked_fraction", idle_at=0.0),
        _masked("token band", "orange", "masked_token_fraction"),
        _masked("sequence band", "green", "masked_sequence_fraction"),
        _masked("outlier", "purple", "masked_outlier_fraction"),
    ),
    _folded(
        "Importance weight",
        "of trained tokens",
        _largest("importance_weight_max", idle_at=1.0),
        _mean("importance_weight_mean", idle_at=1.0),
    ),
    _folded(
        "Critic",
        "share of variance explained",
        Curve(label="explained", role="blue", read="critic_explained_variance"),
    ),
    _folded(
        "Return",
        "over trajectories",
        _largest("reward_max"),
        _smallest("reward_min"),
        Curve(label="deviation", role="orange", read="reward_std", dashes=True),
    ),
    _folded(
        "Advantage",
        "over trained tokens",
        _largest("advantage_max"),
        _mean("advantage_mean"),
        _smallest("advantage_min"),
    ),
    _folded(
        "Surrogate",
        "mean of trained tokens",
        Curve(label="in the loss", role="blue", read="surrogate_mean"),
        Curve(
            label="ratio × advantage",  # noqa: RUF001
            role="orange",
            read="unclipped_surrogate_mean",
            dashes=True,
        ),
    ),
)


def small_plots(records: Records) -> tuple[Plot, ...]:
    """Every small figure; what was measured less than twice is told in words."""
    return tuple(
        _line_plot(figure, records) or _told_plot(figure, records) for figure in SMALL_FIGURES
    )


def loss_plots(records: Records) -> tuple[Plot, ...]:
    """The figures of the fold that have a line to draw."""
    known = [record for record in records if record.statistics]
    drawn = (_line_plot(figure, known) for figure in LOSS_FIGURES if known)
    return tuple(plot for plot in drawn if plot is not None)


def _line_plot(figure: Figure, records: Records) -> Plot | None:
    measured = [(curve, curve.values(records)) for curve in figure.curves]
    measured = [(curve, values) for curve, values in measured if not curve.is_idle(values)]
    if not measured:
        return None
    buckets = buckets_of(records)

    def draw(axes: Axes) -> None:
        for curve, values in measured:
            y = curve.thin(buckets, values)
            line(axes, buckets.centres, y, role=curve.role, width=1.5, dashes=curve.dashes)
        step_axis(axes, buckets, label="")
        axes.margins(y=0.15)
        if figure.base is not None:
            least = min(float(np.nanmin(values)) for _, values in measured)
            axes.set_ylim(bottom=min(figure.base, least))
        value_axis(axes, num_ticks=figure.num_ticks)

    return Plot(
        key=figure.key,
        title=figure.title,
        note=figure.note,
        alt="Line chart; " + "; ".join(_told(curve, values) for curve, values in measured) + ".",
        legend=tuple(curve.entry for curve, _ in measured if curve.label),
        svgs=render(draw, SMALL, key=figure.key),
    )


def _told(curve: Curve, values: Floats) -> str:
    """Example: 'largest from 1.02 to 3.4, at most 9.1'"""
    known = values[np.isfinite(values)]
    first, last, peak = map(units.significant, (known[0], known[-1], known.max()))
    return f"{curve.label} from {first} to {last}, at most {peak}".strip()


def _told_plot(figure: Figure, records: Records) -> Plot:
    values = figure.curves[0].values(records)
    known = values[np.isfinite(values)]
    only = f"{units.significant(known[0])}, measured once" if len(known) else "not measured"
    return Plot(key=figure.key, title=figure.title, note=figure.note, alt=only)
