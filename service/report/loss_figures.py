"""The figures of the fold "Statistics of the loss": small ones, of several lines each.

In the order in which one looks for the cause of a collapse. A line that was never known at two
steps, or that never left the value at which it says nothing, is left out; so is a figure without
any line. The fold's tables have every number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from service import units
from service.report import series
from service.report.figure import (
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
from service.telemetry.records import StepRecord

Records = Sequence[StepRecord]
Thin = Callable[[Buckets, Floats], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """name: of the statistic. thin: how neighbouring steps become one point. idle_at: the value at
    which it says nothing.
    """

    label: str
    role: str
    name: str
    thin: Thin = Buckets.mean
    idle_at: float | None = None
    dashes: bool = False

    def is_idle(self, values: Floats) -> bool:
        known = values[np.isfinite(values)]
        if len(known) < 2:
            return True
        return self.idle_at is not None and bool((known == self.idle_at).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    key: str
    title: str
    note: str
    curves: tuple[Curve, ...]


def _mean(name: str, *, idle_at: float | None = None) -> Curve:
    return Curve(label="mean", role="blue", name=name, idle_at=idle_at)


def _largest(name: str, *, idle_at: float | None = None) -> Curve:
    return Curve(
        label="largest",
        role="purple",
        name=name,
        thin=Buckets.maximum,
        idle_at=idle_at,
    )


def _smallest(name: str) -> Curve:
    return Curve(label="smallest", role="green", name=name, thin=Buckets.minimum)


def _masked(label: str, role: str, name: str, *, dashes: bool = True) -> Curve:
    # A rule that is off masks nothing; dashes keep apart what covers the whole.
    return Curve(label=label, role=role, name=name, idle_at=0.0, dashes=dashes)


FIGURES = (
    Figure(
        key="logprobs",
        title="Log-probability",
        note="mean, by advantage",
        curves=(
            Curve(label="above 0", role="green", name="policy_logprob_positive_mean"),
            Curve(label="below 0", role="orange", name="policy_logprob_negative_mean"),
        ),
    ),
    Figure(
        key="kl",
        title="KL to the reference",
        note="nats a token",
        curves=(_mean("kl_mean"),),
    ),
    Figure(
        key="kl-largest",
        title="KL of one token",
        note="nats",
        curves=(_largest("kl_max"),),
    ),
    Figure(
        key="ratio",
        title="Ratio",
        note="of policies, at a token",
        curves=(_largest("ratio_max"), _mean("ratio_mean")),
    ),
    Figure(
        key="clips",
        title="Clipped",
        note="share of trained tokens",
        curves=(
            Curve(label="low", role="blue", name="clip_fraction_low"),
            Curve(label="high", role="orange", name="clip_fraction_high", dashes=True),
        ),
    ),
    Figure(
        key="masks",
        title="Masked",
        note="share of trained tokens",
        curves=(
            _masked("by any rule", "blue", "masked_fraction", dashes=False),
            _masked("token band", "orange", "masked_token_fraction"),
            _masked("sequence band", "green", "masked_sequence_fraction"),
            _masked("outlier", "purple", "masked_outlier_fraction"),
        ),
    ),
    Figure(
        key="weights",
        title="Importance weight",
        note="of trained tokens",
        curves=(
            _largest("importance_weight_max", idle_at=1.0),
            _mean("importance_weight_mean", idle_at=1.0),
        ),
    ),
    Figure(
        key="critic",
        title="Critic",
        note="share of variance explained",
        curves=(Curve(label="explained", role="blue", name="critic_explained_variance"),),
    ),
    Figure(
        key="returns",
        title="Return",
        note="over trajectories",
        curves=(
            _largest("reward_max"),
            _smallest("reward_min"),
            Curve(label="deviation", role="orange", name="reward_std", dashes=True),
        ),
    ),
    Figure(
        key="advantages",
        title="Advantage",
        note="over trained tokens",
        curves=(
            _largest("advantage_max"),
            _mean("advantage_mean"),
            _smallest("advantage_min"),
        ),
    ),
    Figure(
        key="surrogates",
        title="Surrogate",
        note="mean of trained tokens",
        curves=(
            Curve(label="in the loss", role="blue", name="surrogate_mean"),
            Curve(
                label="ratio × advantage",  # noqa: RUF001
                role="orange",
                name="unclipped_surrogate_mean",
                dashes=True,
            ),
        ),
    ),
)


def loss_figures(records: Records) -> tuple[Plot, ...]:
    """Draw what there is to see; nothing for a run whose records have no statistics."""
    known = [record for record in records if record.statistics]
    if not known:
        return ()
    drawn = (_plot(figure, known) for figure in FIGURES)
    return tuple(plot for plot in drawn if plot is not None)


def _plot(figure: Figure, records: Records) -> Plot | None:
    measured = [(curve, _values(records, curve.name)) for curve in figure.curves]
    measured = [(curve, values) for curve, values in measured if not curve.is_idle(values)]
    if not measured:
        return None
    buckets = buckets_of(records, max_points=MAX_POINTS)

    def draw(axes: Axes) -> None:
        for curve, values in measured:
            y = curve.thin(buckets, values)
            line(axes, buckets.centres, y, role=curve.role, width=1.5, dashes=curve.dashes)
        step_axis(axes, buckets, label="")
        axes.margins(y=0.15)
        value_axis(axes, num_ticks=4)

    key = f"statistic-{figure.key}"
    (drawn,) = render(draw, SMALL, key=key)
    return Plot(
        key=key,
        title=figure.title,
        note=figure.note,
        alt="Line chart; " + "; ".join(_told(curve, values) for curve, values in measured) + ".",
        legend=tuple(
            LegendEntry(
                label=curve.label,
                role=curve.role,
                mark=Mark.DASH if curve.dashes else Mark.LINE,
            )
            for curve, _ in measured
        ),
        svg_wide=drawn,
    )


def _values(records: Records, name: str) -> Floats:
    return series.values_of(records, lambda record: record.statistics.get(name))


def _told(curve: Curve, values: Floats) -> str:
    """Example: 'largest from 1.02 to 3.4, at most 9.1'"""
    known = values[np.isfinite(values)]
    first, last, peak = map(units.significant, (known[0], known[-1], known.max()))
    return f"{curve.label} from {first} to {last}, at most {peak}"
