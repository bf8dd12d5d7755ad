"""The report: one HTML file that needs nothing else, on a phone as on a screen, light or dark.

No script, no font, no address: it can be kept, mailed and opened offline. Called by the supervisor
at the end of an epoch, and by whoever wants a report of a run directory again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from service.report import plots, reward, stacks, style, tables
from service.report.figure import Plot
from service.report.loss_figures import loss_figures
from service.report.loss_tables import LOSS_DEFINITIONS, loss_tables
from service.report.tables import Table, Tile
from service.report.verdict import Check, checks, ending, verdict
from service.telemetry.summary import HistoryLike, RunSummary, write_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What the template reads. lead: the figure across the page; small: figures of one line.

    loss_*: the fold with the statistics of the loss, which is there when there are tables for it.
    """

    summary: RunSummary
    verdict: str
    ending: str
    finished: str
    tiles: tuple[Tile, ...]
    checks: tuple[Check, ...]
    lead: Plot | None
    plots: tuple[Plot, ...]
    small: tuple[Plot, ...]
    loss_figures: tuple[Plot, ...]
    loss_tables: tuple[Table, ...]
    loss_definitions: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]
    definitions: tuple[tuple[str, str], ...]
    config_text: str
    light: Markup
    dark: Markup


def write_report(
    path: Path, *, summary: RunSummary, history: HistoryLike, config_text: str
) -> None:
    """Write report.html aside and rename it. config_text: the effective configuration, as YAML."""
    write_aside(path, render_report(summary=summary, history=history, config_text=config_text))


def write_reward_png(path: Path, *, history: HistoryLike) -> None:
    """Write the reward figure alone, as a PNG on white."""
    reward.write_reward_png(path, history.steps, history.evaluations)


def render_report(*, summary: RunSummary, history: HistoryLike, config_text: str) -> str:
    page = _page(summary, history, config_text=config_text)
    environment = Environment(
        loader=PackageLoader("service.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup
    return environment.get_template("report.html.j2").render(page=page)


def _page(summary: RunSummary, history: HistoryLike, *, config_text: str) -> Page:
    records = history.steps
    finished = ""
    if records:
        finished = time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(records[-1].wall_time))
    return Page(
        summary=summary,
        verdict=verdict(summary),
        ending=ending(summary),
        finished=finished.lstrip("0"),
        tiles=tables.tiles(summary),
        checks=checks(summary, records),
        lead=reward.reward_plot(records, history.evaluations) if records else None,
        plots=_plots(summary, history),
        small=plots.small_multiples(records) if records else (),
        loss_figures=loss_figures(records),
        loss_tables=loss_tables(records),
        loss_definitions=LOSS_DEFINITIONS,
        tables=tuple(
            table
            for table in (
                tables.ledger_table(summary),
                tables.outcomes_table(summary),
                tables.stages_table(summary),
                tables.tokens_table(summary),
                tables.mismatches_table(summary),
                tables.versions_table(summary),
            )
            if not table.is_empty
        ),
        definitions=tables.DEFINITIONS,
        config_text=config_text.strip(),
        light=Markup(style.css_variables(is_dark=False)),
        dark=Markup(style.css_variables(is_dark=True)),
    )


def _plots(summary: RunSummary, history: HistoryLike) -> tuple[Plot, ...]:
    records = history.steps
    if not records:
        return ()
    return (
        stacks.outcomes_plot(records),
        stacks.stages_plot(records),
        plots.age_plot(records, bound=summary.policy_age_bound),
        plots.mismatch_plot(records),
    )
