"""How every figure is drawn: palette, series thinned to so many points, axes, and themed SVG.

Figures are drawn in the light palette. `themed_svg` then turns each of its colours into the CSS
variable of its role, so that the browser alone decides between light and dark. Hues keep apart for
the common kinds of colour blindness (after Okabe and Ito). Legends are HTML beside the SVG, so that
their letters keep their size on a narrow screen.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from service import units
from service.telemetry.records import StepRecord

Floats = NDArray[np.float64]
Records = Sequence[StepRecord]
Read = Callable[[StepRecord], float | None]
Draw = Callable[[Axes], None]

MAX_POINTS = 320
MAX_BANDS = 200
MAX_HAIRLINES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Tone:
    """One role's colour on a light and on a dark page; light tones are unique."""

    light: str
    dark: str


PALETTE: Mapping[str, Tone] = {
    "surface": Tone(light="#ffffff", dark="#181b20"),
    "ink": Tone(light="#1c2127", dark="#e8eaed"),
    "muted": Tone(light="#66707c", dark="#98a1ac"),
    "grid": Tone(light="#e7eaee", dark="#2a2f37"),
    "blue": Tone(light="#0b68ac", dark="#55a9e8"),
    "azure": Tone(light="#1d72b2", dark="#3f8ac6"),
    "sky": Tone(light="#8ac6ea", dark="#225378"),
    "green": Tone(light="#0f9271", dark="#35bf97"),
    "yellow": Tone(light="#ecc94b", dark="#cbab3c"),
    "orange": Tone(light="#e0912a", dark="#eda14a"),
    "red": Tone(light="#c8481a", dark="#ef7748"),
    "purple": Tone(light="#b0699a", dark="#cf8cba"),
    "grey": Tone(light="#aab2bc", dark="#5b646f"),
}

SETTINGS: Mapping[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rayloom",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "figure.dpi": 72,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": PALETTE["grid"].light,
    "axes.linewidth": 1.0,
    "axes.labelcolor": PALETTE["muted"].light,
    "axes.labelsize": 10.5,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.015,
    "grid.color": PALETTE["grid"].light,
    "grid.linewidth": 1.0,
    "text.color": PALETTE["ink"].light,
    "xtick.color": PALETTE["grid"].light,
    "xtick.labelcolor": PALETTE["muted"].light,
    "xtick.labelsize": 10.0,
    "xtick.major.size": 4.0,
    "xtick.minor.size": 0.0,
    "ytick.labelcolor": PALETTE["muted"].light,
    "ytick.labelsize": 10.0,
    "ytick.major.size": 0.0,
    "ytick.minor.size": 0.0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "axes.unicode_minus": True,
    "figure.constrained_layout.w_pad": 0.02,
    "figure.constrained_layout.h_pad": 0.03,
}

_LONG_DECIMAL = re.compile(r"-?\d+\.\d{3,}")
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_ROLE_OF_COLOUR = {tone.light: role for role, tone in PALETTE.items()}


def colour(role: str) -> str:
    return PALETTE[role].light


def css_variables(*, is_dark: bool) -> str:
    """The palette as CSS declarations, one a role."""
    return "".join(
        f"--{role}:{tone.dark if is_dark else tone.light};" for role, tone in PALETTE.items()
    )


def new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of so many CSS pixels with one pair of axes. Call it within `styled`."""
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    return figure, figure.subplots()


def styled() -> Any:
    """A context in which figures are made and saved."""
    return rc_context(dict(SETTINGS))


def themed_svg(figure: Figure, *, key: str) -> str:
    """An <svg> element for use inside HTML: no fonts, no addresses, colours by CSS variable.

    key: unique on the page; it keeps the ids of several figures apart.
    """
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata=_NO_METADATA)
    text = target.getvalue()
    text = text[text.index("<svg") :]
    view_box = re.search(r'viewBox="[^"]*"', text)
    assert view_box is not None, "matplotlib wrote an SVG without a viewBox"
    text = re.sub(r"<svg[^>]*>", f'<svg {view_box[0]} aria-hidden="true">', text, count=1)
    text = re.sub(r"<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*(?:;\s*)?", "", text)
    text = re.sub(r'<(g|svg) id="[^"]*"', r"<\1", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", text)
    text = re.sub(r"<[^>]*>", lambda tag: _LONG_DECIMAL.sub(_two_decimals, tag[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    return re.sub(r"#[0-9a-f]{6}\b", _as_variable, text).strip()


def _two_decimals(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}"


def _as_variable(found: re.Match[str]) -> str:
    role = _ROLE_OF_COLOUR.get(found[0])
    return f"var(--{role})" if role else found[0]


def values_of(records: Records, read: Read) -> Floats:
    """[N] float64, one a record; None and infinity become NaN."""
    values = np.array([read(record) for record in records], dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """N records in K neighbourhoods. starts: [K] first record of each; edges: [K + 1] in steps.

    centres: [K] mean step of each. Invariant: K <= N, and every bucket has a record.
    """

    starts: NDArray[np.intp]
    centres: Floats
    edges: Floats

    @property
    def is_thinned(self) -> bool:
        """Whether some bucket has more than one step."""
        return bool(np.any(np.diff(self.edges) > 1.5))

    def mean(self, values: Floats) -> Floats:
        """[K]; NaN where nothing of the bucket is known."""
        known = np.isfinite(values)
        sums = np.add.reduceat(np.where(known, values, 0.0), self.starts)
        counts = np.add.reduceat(known.astype(np.float64), self.starts)
        return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)

    def total(self, values: Floats) -> Floats:
        """[K]; what is not known adds nothing."""
        return np.add.reduceat(np.nan_to_num(values), self.starts)

    def maximum(self, values: Floats) -> Floats:
        return np.fmax.reduceat(values, self.starts)

    def minimum(self, values: Floats) -> Floats:
        return np.fmin.reduceat(values, self.starts)


def bucketed(steps: Floats, *, max_points: int) -> Buckets:
    """Cut N >= 1 records at increasing `steps` into at most `max_points` equal neighbourhoods.

    Example: steps 1..4 with max_points 2 -> starts [0, 2], centres [1.5, 3.5], edges [.5, 2.5, 4.5]
    """
    count = min(len(steps), max_points)
    starts = np.linspace(0, len(steps), count, endpoint=False).astype(np.intp)
    sizes = np.diff(np.append(starts, len(steps)))
    edges = np.append(steps[starts] - 0.5, steps[-1] + 0.5)
    return Buckets(starts=starts, centres=np.add.reduceat(steps, starts) / sizes, edges=edges)


def buckets_of(records: Records, *, max_points: int = MAX_POINTS) -> Buckets:
    """The buckets of N >= 1 records, by their steps."""
    return bucketed(values_of(records, lambda record: record.step), max_points=max_points)


def trailing_mean(values: Floats, *, width: int) -> Floats:
    """[N] mean of each value and the width - 1 before it, as far as they exist and are known."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0.0], np.cumsum(known)])
    upper = np.arange(1, len(values) + 1)
    lower = np.maximum(upper - width, 0)
    num = counts[upper] - counts[lower]
    window = sums[upper] - sums[lower]
    return np.divide(window, num, out=np.full(len(values), np.nan), where=num > 0)


class Mark(StrEnum):
    """How a legend draws its swatch."""

    LINE = "line"
    FAINT = "faint"
    DASH = "dash"
    DOT = "dot"
    AREA = "area"
    BAND = "band"


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendEntry:
    label: str
    role: str
    mark: Mark
    value: str = ""


# (width, height) for a wide and for a narrow screen: CSS pixels at which letters have their natural
# size.
HERO = ((940, 330), (340, 240))
HALF = ((450, 230), (340, 210))
SMALL = ((310, 140),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    key: str
    title: str
    alt: str
    """What a reader would see; shown where nothing was drawn."""
    note: str = ""
    legend: tuple[LegendEntry, ...] = ()
    svgs: tuple[str, ...] = ()
    """One for all screens, or one for wide and one for narrow ones; empty: nothing was drawn."""


def render(draw: Draw, shapes: Sequence[tuple[int, int]], *, key: str) -> tuple[str, ...]:
    """The drawing as an SVG of each shape."""
    drawn = []
    with styled():
        for index, (width, height) in enumerate(shapes):
            figure, axes = new_axes(width, height)
            draw(axes)
            drawn.append(themed_svg(figure, key=f"{key}-{index}"))
    return tuple(drawn)


def step_axis(axes: Axes, buckets: Buckets, *, label: str = "training step") -> None:
    axes.set_xlim(buckets.edges[0], buckets.edges[-1])
    axes.xaxis.set_major_locator(
        MaxNLocator(integer=True, nbins=7, steps=[1, 2, 2.5, 5, 10], min_n_ticks=1)
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.short_count(value)))
    axes.set_xlabel(label)


def value_axis(axes: Axes, *, num_ticks: int = 5, is_integer: bool = False) -> None:
    axes.yaxis.set_major_locator(
        MaxNLocator(
            nbins=num_ticks,
            integer=is_integer,
            steps=[1, 2, 5, 10] if is_integer else [1, 2, 2.5, 5, 10],
            min_n_ticks=1 if is_integer else 2,
        )
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _tick(value: float) -> str:
    text = units.short_count(value) if abs(value) >= 1000 else units.significant(value)
    return text.replace("-", "\u2212", 1) if text.startswith("-") else text


def line(
    axes: Axes,
    x: Floats,
    y: Floats,
    *,
    role: str,
    width: float = 1.8,
    alpha: float = 1.0,
    dashes: bool = False,
) -> None:
    """Join the known points; a lone one is a dot."""
    known = y == y
    num_known = int(known.sum())
    axes.plot(
        x[known],
        y[known],
        color=colour(role),
        linewidth=width,
        alpha=alpha,
        linestyle=(0, (4, 3)) if dashes else "solid",
        marker="o" if num_known == 1 else None,
        markersize=5,
        markeredgewidth=0,
    )


def stacked(axes: Axes, buckets: Buckets, bands: list[tuple[str, Floats]]) -> None:
    """Lay bands of (role, [K] heights) one on the other; few of them get a hairline between."""
    base = buckets.centres * 0.0
    for role, heights in bands:
        top = base + heights
        axes.stairs(top, buckets.edges, baseline=base, fill=True, color=colour(role), linewidth=0)
        base = top
    base = buckets.centres * 0.0
    for _, heights in bands[:-1] if len(base) <= MAX_HAIRLINES else ():
        base = base + heights
        axes.stairs(base, buckets.edges, baseline=None, color=colour("surface"), linewidth=0.7)
    axes.grid(visible=False)
