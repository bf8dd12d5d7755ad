"""What a dashboard is: sections of panels, each with its queries. Plain values, no Grafana."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Look(StrEnum):
    """How a panel draws its series, under Grafana's names."""

    NUMBER = "stat"
    LINES = "timeseries"
    HEATMAP = "heatmap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """expr: PromQL. legend: a name, or labels as {{label}}."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """unit: one of Grafana's, such as "s", or "suffix: nats". width: of 24 columns."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    look: Look = Look.LINES
    width: int = 8
    is_stacked: bool = False
    is_logarithmic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    title: str
    panels: tuple[Panel, ...]

    @property
    def queries(self) -> tuple[Query, ...]:
        return tuple(query for panel in self.panels for query in panel.queries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """uid: what links to the dashboard name; it never changes."""

    uid: str
    title: str
    description: str
    sections: tuple[Section, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for section in self.sections for panel in section.panels)
