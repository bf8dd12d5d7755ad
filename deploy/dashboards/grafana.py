"""Convert a dashboard's YAML file to the JSON that Grafana imports, with Grafana's own types.

A file has a dashboard's sections and their panels with PromQL; `Panel` describes the keys. This
module adds positions, ids, variables, alerts as annotations, and links to the other dashboards and
to the runbooks. It needs the development tools.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as sdk
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shared
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat, QueryEditorMode
from pydantic import ConfigDict, TypeAdapter

from actors.statistics import BY_NAME
from deploy.rules.__main__ import PLACE_LABELS

SOURCES = Path(__file__).parent
COLUMNS = 24
TAG = "rayloom"
SCHEMA_VERSION = 39
DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
# With this step $__rate_interval is at least four minutes, in which a series that is scraped once a
# minute has the two points that a rate needs.
SHORTEST_STEP = "1m"
# The selectors of a run and of a Ray cluster in a dashboard's file, and those that replace them:
# runs of two clusters, namespaces or releases may have the same name. The variables' All also
# matches series without these labels, as on a laptop.
RUN = 'run="$run"'
RAY_CLUSTER = 'ray_io_cluster=~"$ray_cluster"'
_PLACE = ",".join(f'{label}=~"${label}"' for label in PLACE_LABELS)
RUN_OF_PLACE = f"{RUN},{_PLACE}"
RAY_CLUSTER_OF_PLACE = f"{RAY_CLUSTER},{_PLACE}"
STEP_SECONDS = f"sum(rayloom_train_newest_step_seconds{{{RUN}}})"
# The windows of [$several_steps], each with its condition on the seconds of the newest step. Six
# steps of an hour fit a window; before the first step the shortest window is used.
WINDOWS = {
    "5m": f"unless on () {STEP_SECONDS} > 60",
    "1h": f"and on () {STEP_SECONDS} > 60 <= 1200",
    "6h": f"and on () {STEP_SECONDS} > 1200",
}
RUNBOOKS = "docs/runbooks.md"
# Series that have a place: those of runs, and of Ray clusters that have no run yet.
_OF_PLACES = '__name__=~"rayloom_train_steps_total|ray_cluster_active_nodes"'
# The units by their names in Grafana.
UNITS = {
    "number": "none",
    "nats": "suffix:nats",
    "share": "percentunit",
    "versions": "suffix:versions",
    "seconds": "s",
}
# Keys that the SDK writes for all variables, and that Grafana accepts only for intervals or never.
_NOT_OF_VARIABLES = ("id", "auto", "auto_min", "auto_count")
# The SDK does not know the query of an annotation from Prometheus.
_ALERTS = {
    "name": "Alerts",
    "datasource": {"type": "prometheus", "uid": "${datasource}"},
    "enable": True,
    "iconColor": "red",
    "target": {
        "refId": "Alerts",
        "expr": f'ALERTS{{alertstate="firing",{RUN_OF_PLACE}}}',
        "interval": SHORTEST_STEP,
    },
    "titleFormat": "{{alertname}}",
    "tagKeys": "severity",
}
_STRICT = ConfigDict(extra="forbid")


Look = Literal["number", "name", "lines", "heatmap"]
"""The form in which a panel shows its series.

number: the value at the end of the chosen time; name: the legends of the series at that time.
"""
HEIGHTS: Mapping[Look, int] = {"number": 4, "name": 4, "lines": 8, "heatmap": 8}


Choice = Literal["environment", "replica", "ray_cluster"]
"""A variable that only some dashboards have. Every dashboard has variables for the data source, the
run and PLACE_LABELS.
"""
# The caption of each choice, and the query for its values.
CHOICES: Mapping[Choice, tuple[str, str]] = {
    "environment": (
        "Environment",
        f"label_values(rayloom_rollouts_total{{{RUN_OF_PLACE}}}, environment)",
    ),
    "replica": (
        "Replica",
        f"label_values(vllm:num_requests_running{{{RUN_OF_PLACE}}}, replica)",
    ),
    "ray_cluster": (
        "Ray cluster",
        f"label_values(ray_cluster_active_nodes{{{_PLACE}}}, ray_io_cluster)",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    __pydantic_config__ = _STRICT

    title: str
    description: str
    unit: str = ""
    """One of Grafana's units, such as "s" or "suffix:nats"; unused if the panel shows statistics,
    which have a unit themselves.
    """
    statistics: Mapping[str, str] = field(default_factory=dict)
    """Names of statistics by legend; all statistics of a panel have the same unit."""
    queries: Mapping[str, str] = field(default_factory=dict)
    """PromQL by legend. A legend is a name, or labels such as {{label}}.

    [$several_steps] is replaced by one of WINDOWS. The placeholders RUN and RAY_CLUSTER are
    replaced by selectors that also have PLACE_LABELS.
    """
    look: Look = "lines"
    width: int = 8
    """The width in columns of the grid, which has 24."""
    height: int = 0
    """The height in lines of the grid; 0 for the height in HEIGHTS of the panel's look."""
    is_stacked: bool = False
    is_logarithmic: bool = False
    min: float | None = None
    """Lower end of the axis; None for the smallest value, or for 0 if the panel is stacked."""
    max: float | None = None
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """The smallest value of each colour, in ascending order; the first colour's value is -.inf."""
    runbooks: tuple[str, ...] = ()
    """Names of the alerts that concern the panel's values."""

    @property
    def series(self) -> dict[str, str]:
        """The PromQL of all series of the panel, by legend."""
        found = {legend: _of_newest_step(name) for legend, name in self.statistics.items()} | {
            legend: _with_window(query) for legend, query in self.queries.items()
        }
        return {
            legend: query.replace(RUN, RUN_OF_PLACE).replace(RAY_CLUSTER, RAY_CLUSTER_OF_PLACE)
            for legend, query in found.items()
        }

    @property
    def has_legend_beside(self) -> bool:
        """Whether the legend is to the right of the curves, with room for more than three lines.

        A legend with names of replicas is always below the curves, because such names would leave
        the curves too little width.
        """
        has_labels = any("{{" in legend for legend in self.queries)
        has_replicas = any("{{replica}}" in legend for legend in self.queries)
        return (len(self.series) > 3 or has_labels) and not has_replicas

    @property
    def series_unit(self) -> str:
        units = {UNITS[BY_NAME[name].unit] for name in self.statistics.values()} or {self.unit}
        assert len(units) == 1, f"{self.title}: a panel shows one unit, got {sorted(units)}"
        return units.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    __pydantic_config__ = _STRICT

    uid: str
    title: str
    description: str
    choices: tuple[Choice, ...] = ()
    sections: Mapping[str, tuple[Panel, ...]]
    """The panels of each section, by the section's title."""

    @property
    def file_name(self) -> str:
        return f"{self.uid}.json"

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for panels in self.sections.values() for panel in panels)


def _of_newest_step(statistic: str) -> str:
    return f"{BY_NAME[statistic].metric}{{{RUN}}}"


def _with_window(query: str) -> str:
    """Return a query with [$several_steps] replaced by a time window that holds several steps."""
    if "$several_steps" not in query:
        return query
    # The conditions allow only one copy of the query to give a value.
    return "\nor ".join(
        f"({query.replace('$several_steps', window)}) {condition}"
        for window, condition in WINDOWS.items()
    )


def load_dashboards() -> tuple[Dashboard, ...]:
    """Return all dashboards, in the order of their files.

    Raises: pydantic.ValidationError for an unknown key; KeyError for an unknown statistic.
    """
    files = sorted(SOURCES.glob("*.yaml"))
    trees = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]
    return tuple(TypeAdapter(Dashboard).validate_python(tree) for tree in trees)


def to_json(dashboard: Dashboard) -> str:
    tree = json.loads(json.dumps(_built(dashboard), cls=JSONEncoder))
    _mend(tree)
    return json.dumps(_without_null(tree), indent=1, ensure_ascii=False) + "\n"


def _mend(tree: dict[str, Any]) -> None:
    """Remove, in place, the keys that the SDK writes and the current Grafana refuses."""
    del tree["style"]
    tree["annotations"]["list"] = [_ALERTS]
    for variable in tree["templating"]["list"]:
        for key in _NOT_OF_VARIABLES:
            del variable[key]
    for panel in tree["panels"]:
        if panel["type"] == "heatmap":
            panel["options"]["tooltip"] = {"mode": "single"}


def _without_null(node: Any, *, keeps: bool = False) -> Any:
    """Return the tree without nulls, which the SDK writes for unset fields and Grafana refuses.

    keeps: whether to keep the nulls directly in `node`.
    """
    if isinstance(node, list):
        return [_without_null(item, keeps=keeps) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        # In a threshold's steps, null means minus infinity and must stay.
        key: _without_null(value, keeps=key == "steps")
        for key, value in node.items()
        if value is not None or keeps
    }


def _built(dashboard: Dashboard) -> models.Dashboard:
    builder = (
        sdk.Dashboard(dashboard.title)
        .uid(dashboard.uid)
        .description(dashboard.description)
        .tags([TAG])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .annotations([])
        .link(_to_others())
        .variables(_variables(dashboard))
    )
    _place(builder, dashboard)
    built = builder.build()
    built.schema_version = SCHEMA_VERSION
    return built


def _to_others() -> sdk.DashboardLink:
    return (
        sdk.DashboardLink("Rayloom")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def _variables(dashboard: Dashboard) -> list[Builder[models.VariableModel]]:
    run = _query(
        "run", "Run", f"label_values(rayloom_train_steps_total{{{_PLACE}}}, run)"
    ).description("run.name of its configuration.")
    chosen = [_choice(choice, *CHOICES[choice]) for choice in dashboard.choices]
    runbooks = (
        sdk.TextBoxVariable("runbooks")
        .label("Runbooks")
        .description("Where the runbooks can be read; panels link to them.")
        .default_value(RUNBOOKS)
        .current(models.VariableOption(selected=True, text=RUNBOOKS, value=RUNBOOKS))
    )
    return [
        sdk.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
        *_place_variables(),
        run,
        *chosen,
        runbooks,
    ]


def _place_variables() -> list[sdk.QueryVariable]:
    """Return the variables with which a dashboard's user selects values of PLACE_LABELS."""
    found, selectors = [], [_OF_PLACES]
    for label in PLACE_LABELS:
        query = f"label_values({{{','.join(selectors)}}}, {label})"
        found.append(_choice(label, label.capitalize(), query))
        # The next variables offer only values that occur together with the chosen value.
        selectors.append(f'{label}=~"${label}"')
    return found


def _choice(name: str, label: str, query: str) -> sdk.QueryVariable:
    return (
        _query(name, label, query)
        .multi(True)
        .include_all(True)
        # This also matches series without the label.
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _query(name: str, label: str, query: str) -> sdk.QueryVariable:
    return (
        sdk.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        # Runs, replicas and clusters come and go.
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def _place(builder: sdk.Dashboard, dashboard: Dashboard) -> None:
    """Place the panels of each section in lines from left to right, below the section's row."""
    top, number = 0, 1
    for title, panels in dashboard.sections.items():
        place = models.GridPos(x=0, y=top, w=COLUMNS, h=1)
        builder.with_row(sdk.Row(title).id(number).grid_pos(place))
        left, top, line_height = 0, top + 1, 0
        for panel in panels:
            height = panel.height or HEIGHTS[panel.look]
            if left + panel.width > COLUMNS:
                left, top, line_height = 0, top + line_height, 0
            number += 1
            place = models.GridPos(x=left, y=top, w=panel.width, h=height)
            builder.with_panel(_panel(panel, number, place))
            left, line_height = left + panel.width, max(line_height, height)
        top, number = top + line_height, number + 1


def _panel(panel: Panel, number: int, place: models.GridPos) -> Builder[models.Panel]:
    if panel.look == "lines":
        return _common(_lines(panel), panel, number, place)
    if panel.look == "heatmap":
        return _common(_heatmap(panel), panel, number, place)
    return _common(_number(panel), panel, number, place)


P = TypeVar("P", stat.Panel, timeseries.Panel, heatmap.Panel)


def _common(builder: P, panel: Panel, number: int, place: models.GridPos) -> P:
    """Set the options that do not depend on a panel's look."""
    builder = (
        builder.id(number)
        .grid_pos(place)
        .title(panel.title)
        .description(panel.description)
        .datasource(DATASOURCE)
        .unit(panel.series_unit)
        .targets(_targets(panel))
    )
    if panel.min is not None or panel.is_stacked:
        builder = builder.min(panel.min or 0)
    if panel.max is not None:
        builder = builder.max(panel.max)
    if panel.thresholds:
        steps = [
            models.Threshold(value=None if value == -math.inf else value, color=colour)
            for colour, value in panel.thresholds.items()
        ]
        mode = models.ThresholdsMode.ABSOLUTE
        builder = builder.thresholds(sdk.ThresholdsConfig().mode(mode).steps(steps))
    if panel.runbooks:
        builder = builder.links([_to_runbook(alert) for alert in panel.runbooks])
    return builder


def _to_runbook(alert: str) -> sdk.DashboardLink:
    return (
        sdk.DashboardLink(f"Runbook of {alert}")
        .type(models.DashboardLinkType.LINK)
        .url(f"${{runbooks:raw}}#{alert.lower()}")
        .target_blank(True)
    )


def _targets(panel: Panel) -> list[Builder[Any]]:
    is_heatmap = panel.look == "heatmap"
    found: list[Builder[Any]] = []
    for index, (legend, expr) in enumerate(panel.series.items()):
        query = (
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + index))
            .datasource(DATASOURCE)
            .editor_mode(QueryEditorMode.CODE)
            .expr(expr)
            .format(PromQueryFormat.HEATMAP if is_heatmap else PromQueryFormat.TIME_SERIES)
            .legend_format(legend)
            .interval(SHORTEST_STEP)
        )
        # With a range, the last value of a series that has ended would be shown as the current one.
        is_present = panel.look in ("number", "name")
        found.append(query.instant() if is_present else query.range())
    return found


def _number(panel: Panel) -> stat.Panel:
    is_name = panel.look == "name"
    colours, texts = shared.BigValueColorMode, shared.BigValueTextMode
    orientations = shared.VizOrientation
    return (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .color_mode(colours.VALUE if panel.thresholds else colours.NONE)
        .graph_mode(shared.BigValueGraphMode.NONE)
        .text_mode(texts.NAME if is_name else texts.AUTO)
        # Side by side, several names are too small to read.
        .orientation(orientations.HORIZONTAL if is_name else orientations.AUTO)
        .color_scheme(sdk.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    )


def _lines(panel: Panel) -> timeseries.Panel:
    stacking = shared.StackingMode.NORMAL if panel.is_stacked else shared.StackingMode.NONE
    scale = common.ScaleDistributionConfig().type(shared.ScaleDistribution.LINEAR)
    places = shared.LegendPlacement
    if panel.is_logarithmic:
        scale = common.ScaleDistributionConfig().type(shared.ScaleDistribution.LOG).log(10)
    builder = (
        timeseries.Panel()
        .fill_opacity(40 if panel.is_stacked else 0)
        .scale_distribution(scale)
        .show_points(shared.VisibilityMode.AUTO)
        .span_nulls(True)
        .stacking(common.StackingConfig().mode(stacking).group("A"))
        .legend(
            common.VizLegendOptions()
            .display_mode(shared.LegendDisplayMode.TABLE)
            .placement(places.RIGHT if panel.has_legend_beside else places.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull"])
            .sort_by("Last *")
            .sort_desc(True)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(shared.TooltipDisplayMode.MULTI)
            .sort(shared.SortOrder.DESCENDING)
        )
    )
    if panel.min == 0 and panel.unit in ("none", UNITS["versions"]):
        # Grafana's axis goes to 100 while a count is 0.
        builder = builder.axis_soft_max(1)
    if panel.thresholds:
        style = common.GraphThresholdsStyleConfig().mode(shared.GraphTresholdsStyleMode.DASHED)
        builder = builder.thresholds_style(style)
    return builder


def _heatmap(panel: Panel) -> heatmap.Panel:
    return (
        heatmap.Panel()
        .calculate(False)
        .cell_gap(1)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(HeatmapColorMode.SCHEME)
            .scheme("Blues")
            .steps(32)
            .reverse(True)
        )
        .y_axis(heatmap.YAxisConfig().unit(panel.series_unit))
    )
