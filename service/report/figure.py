"""A figure of the report: its SVG in two shapes, its legend in words, its alternative text.

Legends are HTML beside the SVG, so that their letters keep their size on a narrow screen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from service import units
from service.report.series import Buckets, Floats
from service.report.style import colour, new_axes, styled, themed_svg

MAX_POINTS = 320
MAX_BANDS = 200
MAX_HAIRLINES = 60


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """CSS pixels at which letters have their natural size."""

    width: float
    height: float


HERO = (Shape(width=940, height=330), Shape(width=340, height=240))
HALF = (Shape(width=450, height=230), Shape(width=340, height=210))
SMALL = (Shape(width=310, height=140),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """svg_wide: empty where nothing was drawn, and alt is shown. svg_narrow: empty where the
    wide one serves narrow screens too. alt: what a reader would see.
    """

    key: str
    title: str
    alt: str
    note: str = ""
    legend: tuple[LegendEntry, ...] = ()
    svg_wide: str = ""
    svg_narrow: str = ""

    @property
    def is_empty(self) -> bool:
        return not self.svg_wide


Draw = Callable[[Axes], None]


def render(draw: Draw, shapes: tuple[Shape, ...], *, key: str) -> list[str]:
    """The drawing as an SVG of each shape."""
    drawn = []
    with styled():
        for index, shape in enumerate(shapes):
            figure, axes = new_axes(shape.width, shape.height)
            draw(axes)
            drawn.append(themed_svg(figure, key=f"{key}-{index}"))
    return drawn


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
