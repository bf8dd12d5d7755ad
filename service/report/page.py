"""The report: one HTML file that needs nothing else, on a phone as on a screen, light or dark.

No script, no font, no address: it can be kept, mailed and opened offline. Called by the supervisor
at the end of a term, and by whoever wants a report of a run directory again.
"""

from __future__ import annotations

import time
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from service.report import charts, drawing, figures, tables
from service.telemetry.summary import HistoryLike, RunSummary, write_aside


def write_report(
    path: Path, *, summary: RunSummary, history: HistoryLike, config_text: str
) -> None:
    """Write report.html aside and rename it. config_text: the effective configuration, as YAML."""
    write_aside(path, render_report(summary=summary, history=history, config_text=config_text))


def page_environment(*packages: str) -> Environment:
    """For pages of any text: what is not our own markup is escaped. packages: with templates."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(package, "templates") for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_report(*, summary: RunSummary, history: HistoryLike, config_text: str) -> str:
    """The page as text: what the template asks for, by the names in it."""
    environment = page_environment("service.report")
    environment.filters["svg"] = Markup
    records = history.steps
    finished = ""
    if records:
        finished = time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(records[-1].wall_time))
    page = {
        "summary": summary,
        "verdict": tables.verdict(summary),
        "ending": tables.ending(summary),
        "finished": finished.lstrip("0"),
        "tiles": tables.tiles(summary),
        "checks": tables.checks(summary, history.totals),
        # The figure across the page, those of half its width, and those of a third.
        "lead": charts.reward_plot(records, history.evaluations) if records else None,
        "plots": charts.large_plots(records, summary) if records else (),
        "small": figures.small_plots(records) if records else (),
        "loss_figures": figures.loss_plots(records),
        "loss_tables": tables.statistic_tables(history.totals),
        "loss_definitions": tables.statistic_definitions(history.totals),
        "tables": tables.summary_tables(summary),
        "help_of": tables.help_of,
        "config_text": config_text.strip(),
        "light": Markup(drawing.css_variables(is_dark=False)),
        "dark": Markup(drawing.css_variables(is_dark=True)),
    }
    return environment.get_template("report.html.j2").render(page=page)
