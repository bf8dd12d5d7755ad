"""A trajectory as one HTML file that needs nothing else, light or dark: no script, no address.

The report's look and palette; every token is a <span> whose class is its colour and whose columns
show when it is pointed at. Whatever text the template is given, markup and control characters in
it are escaped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from service.inspect.facts import facts, number
from service.inspect.view import MEANINGS, Token, TokenClass, TrajectoryView
from service.report import drawing
from service.report.page import page_environment
from service.telemetry.summary import write_aside
from service.visible import visible_text

# What each class means for the training, in the legend.
EXPLANATIONS: dict[TokenClass, str] = {
    TokenClass.TRAINED: "in the loss",
    TokenClass.MASKED: "its trajectory is not in the loss, or it has no log-probability",
    TokenClass.PROMPT: "what the sample began with",
    TokenClass.OBSERVATION: "what the environment said between two turns",
    TokenClass.INSERTED: "closes a reply that did not close itself",
    TokenClass.TEMPLATE: "role headers, footers and special tokens",
}


def write_page(path: Path, view: TrajectoryView) -> None:
    """Write the page aside and rename it. Raises: OSError."""
    write_aside(path, render_page(view))


def render_page(view: TrajectoryView) -> str:
    """The page as text: what the template asks for, by the names in it."""
    page = {
        "view": view,
        "title": view.entry.trajectory.trajectory_id,
        "facts": facts(view.step, view.entry, is_refused=view.is_refused),
        "counts": view.counts,
        "meanings": MEANINGS,
        "explanations": EXPLANATIONS,
        "light": Markup(drawing.css_variables(is_dark=False)),
        "dark": Markup(drawing.css_variables(is_dark=True)),
    }
    environment = page_environment("service.inspect", "service.report")
    environment.finalize = _shown
    environment.filters |= {"columns": columns, "number": _number}
    return environment.get_template("inspect.html.j2").render(page=page)


def columns(token: Token) -> str:
    """All that is known of a token, in one line; what is not known is left out."""
    parts = [
        f"token {token.position}",
        f"“{token.text}”",
        f"id {token.token_id}",
        MEANINGS[token.kind],
        None if token.turn is None else f"turn {token.turn}",
        None if token.logprob is None else f"logprob {token.logprob:.4f}",
        None if token.version is None else f"version {token.version}",
        None if token.advantage is None else f"advantage {number(token.advantage)}",
        "the history differs from here" if token.starts_branch else None,
        *(f"FAULT: {fault}" for fault in token.faults),
    ]
    return " · ".join(part for part in parts if part is not None)


def _number(value: float | None, *, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _shown(value: Any) -> Any:
    """Text as it may stand on a page; lone surrogates, which no file can hold, are escaped too."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return visible_text(value) if is_text else value
