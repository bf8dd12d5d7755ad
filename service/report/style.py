"""How every figure looks, in one place: palette, matplotlib settings, and SVG that follows a theme.

Figures are drawn in the light palette. `themed_svg` then turns each of its colours into the CSS
variable of its role, so that the browser alone decides between light and dark. Hues keep apart for
the common kinds of colour blindness (after Okabe and Ito).
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure


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
