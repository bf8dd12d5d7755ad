"""Tests of the committed dashboards: their panels, queries, labels and links."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from worlds.checks.grafana_schema import type_errors
from worlds.checks.metric_names import NAME, RAYS, RAYS_NAME, declared
from worlds.servers.prometheus_server import fill
from worlds.servers.promtool import promtool

from actors.metrics import STEP_COUNTERS
from actors.statistics import STATISTICS
from deploy.dashboards.__main__ import DASHBOARDS, dashboards
from deploy.dashboards.grafana import (
    CHOICES,
    COLUMNS,
    RAY_CLUSTER_OF_PLACE,
    RUN_OF_PLACE,
    SOURCES,
    WINDOWS,
    Panel,
    load_dashboards,
)
from deploy.rules.__main__ import PLACE_LABELS, RUN_LABELS, rules_text
from service.inference.replica import SHOWN

SPECS = load_dashboards()
TREES: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in DASHBOARDS.glob("*.json")
}
PANELS = [panel for tree in TREES.values() for panel in tree["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
MAX_BYTES = 200 * 1024
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF_RAY = "{" + RAY_CLUSTER_OF_PLACE

ALERTS = set(re.findall(r"alert: (\w+)", rules_text()))
# Metrics that no panel shows, and why.
NOT_SHOWN = {
    "rayloom_build_info": "it says nothing over time",
    "rayloom_secret_read_failures": "0 unless a mounted file is broken, which the log reports too",
    "rayloom_checkpoint_uploaded_step": "the time for which newer checkpoints wait is shown",
    "rayloom_reward_collapsed_since_step": "its alert shows the step, next to the mean return",
    "rayloom_run_paused": "the phase is shown, which is paused while anything is",
    "rayloom_run_phase_timestamp_seconds": "an alert begins to count from it",
    "rayloom_policy_age_versions": "the newest step's is shown, right at any pace",
    "rayloom_sampled_tokens": "the newest step's are shown, right at any pace",
    "rayloom_trained_tokens": "the newest step's are shown, right at any pace",
}
# Metrics that grow only when a step is stored or a version is published. Between two slow steps,
# their rate over minutes is 0.
OF_STEPS = {
    "rayloom_ledger_events", "rayloom_merge_samples", "rayloom_merge_branches",
    "rayloom_played_tokens", "rayloom_train_steps", "rayloom_stage_seconds",
    "rayloom_publish_seconds",
    *(name for name, _ in STEP_COUNTERS.values()),
}  # fmt: skip

every_dashboard = pytest.mark.parametrize("name", sorted(TREES))


def names_in(query: str) -> set[str]:
    return set(NAME.findall(query))


def family(name: str) -> str:
    return re.sub("_(total|bucket|count|sum)$", "", name)


def is_shown_by_replicas(query: str) -> bool:
    """Whether a query only uses metrics of vLLM that the replicas push."""
    names = set(re.findall(r"\bvllm:[a-z_]+", query))
    return bool(names) and {family(name) for name in names} <= SHOWN


def test_the_committed_files_are_up_to_date() -> None:
    committed = {file.name: file.read_text(encoding="utf-8") for file in DASHBOARDS.iterdir()}
    assert committed == dashboards(), "run python -m deploy.dashboards"


def test_there_is_a_dashboard_for_each_question() -> None:
    names = [
        "inference", "infrastructure", "learning", "overview", "pipeline", "rollouts", "trainer",
    ]  # fmt: skip
    assert [file.stem for file in sorted(SOURCES.glob("*.yaml"))] == names
    assert [spec.uid for spec in SPECS] == [f"rayloom-{name}" for name in names]
    assert len({spec.title for spec in SPECS}) == len(names)
    assert all(panels for spec in SPECS for panels in spec.sections.values())


def test_a_panel_with_an_unknown_key_or_of_two_units_is_refused() -> None:
    with pytest.raises(ValidationError, match="colour"):
        TypeAdapter(Panel).validate_python({"title": "T", "description": "D.", "colour": "red"})
    panel = Panel(title="T", description="D.", statistics={"KL": "kl_mean", "ratio": "ratio_max"})
    with pytest.raises(AssertionError, match="a panel shows one unit"):
        _ = panel.series_unit


def test_grafanas_types_accept_every_dashboard_and_refuse_a_wrong_one(tmp_path: Path) -> None:
    broken = json.loads(json.dumps(TREES["rayloom-overview"]))
    broken["panels"][1]["options"]["colorMode"] = "loud"
    broken["panels"][2]["fieldConfig"]["defaults"]["unitt"] = "s"
    trees = {**TREES, "broken": broken}
    errors = type_errors({name.replace("-", "_"): tree for name, tree in trees.items()}, tmp_path)
    assert {line.partition(".json.ts")[0] for line in errors} == {"broken"}, errors
    assert any("loud" in line for line in errors) and any("unitt" in line for line in errors)


@every_dashboard
def test_the_variables_are_those_that_the_queries_use(name: str) -> None:
    tree = TREES[name]
    [spec] = [spec for spec in SPECS if spec.uid == name]
    variables = {item["name"]: item for item in tree["templating"]["list"]}
    assert list(variables) == [
        "datasource", *PLACE_LABELS, "run", *spec.choices, "runbooks",
    ]  # fmt: skip
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(tree)))
    assert used - {"__rate_interval", "__all"} == variables.keys()
    for choice in (*PLACE_LABELS, *spec.choices):
        chosen = variables[choice]
        assert chosen["multi"] and chosen["includeAll"] and chosen["current"]["value"] == "$__all"
        # The series of a run on a laptop have no labels of a place.
        assert chosen["allValue"] == ".*"
    for name in ("run", *spec.choices):
        for label in PLACE_LABELS:
            assert f'{label}=~"${label}"' in variables[name]["query"]["query"], name


def test_a_dashboard_has_variables_for_the_other_labels_of_its_series() -> None:
    assert {spec.uid: set(spec.choices) for spec in SPECS if spec.choices} == {
        "rayloom-rollouts": {"environment"},
        "rayloom-inference": {"replica"},
        "rayloom-infrastructure": {"ray_cluster"},
    }
    assert len(CHOICES) == 3


@every_dashboard
def test_ids_are_unique_and_panels_do_not_overlap(name: str) -> None:
    panels = TREES[name]["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    cells = Counter(
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) < COLUMNS


@every_dashboard
def test_a_file_is_small_enough_for_a_config_map(name: str) -> None:
    assert (DASHBOARDS / f"{name}.json").stat().st_size < MAX_BYTES


@every_dashboard
def test_alerts_are_annotations_and_other_dashboards_are_linked(name: str) -> None:
    tree = TREES[name]
    [alerts] = tree["annotations"]["list"]
    assert alerts["enable"] and alerts["datasource"] == SOURCE
    assert alerts["target"]["expr"] == f'ALERTS{{alertstate="firing",{RUN_OF_PLACE}}}'
    [link] = tree["links"]
    assert link["type"] == "dashboards" and link["tags"] == ["rayloom"] == tree["tags"]
    assert link["includeVars"] and link["keepTime"]


def test_a_panel_has_a_description_and_unique_complete_queries() -> None:
    def is_complete(panel: dict[str, Any]) -> bool:
        targets = panel["targets"]
        references = [target["refId"] for target in targets]
        legends = [target["legendFormat"] for target in targets]
        return (
            bool(panel["title"] and panel["fieldConfig"]["defaults"]["unit"])
            and panel["description"].endswith(".")
            and all(part["datasource"] == SOURCE for part in (panel, *targets))
            and bool(references and all(legends))
            and len(set(references)) == len(references)
            and len(set(legends)) == len(legends)
        )

    assert [panel["title"] for panel in PANELS if not is_complete(panel)] == []


def test_a_panel_of_current_values_uses_instant_queries() -> None:
    """Check this because a range query would show the last value of an ended series for an hour."""
    asked = {
        (panel["type"], target["instant"], target["range"])
        for panel in PANELS
        for target in panel["targets"]
    }
    assert asked == {
        ("stat", True, False),
        ("timeseries", False, True),
        ("heatmap", False, True),
    }
    stats = [panel for panel in PANELS if panel["type"] == "stat"]
    assert {panel["options"]["graphMode"] for panel in stats} == {"none"}


def test_every_row_of_panels_fills_the_width() -> None:
    for tree in TREES.values():
        widths: Counter[int] = Counter()
        for panel in tree["panels"]:
            widths[panel["gridPos"]["y"]] += panel["gridPos"]["w"]
        assert set(widths.values()) == {COLUMNS}, tree["title"]


def test_axes_and_legends_suit_what_a_panel_shows() -> None:
    shown = {panel["title"]: panel for panel in TREES["rayloom-inference"]["panels"]}
    custom = {title: panel["fieldConfig"]["defaults"] for title, panel in shown.items()
              if panel["type"] == "timeseries"}  # fmt: skip
    # Grafana's default begins a stack at its lowest series, and shows a 0 on an axis to 100.
    assert custom["Time of a publish, by phase"]["min"] == 0
    assert custom["Failed publishes"]["custom"]["axisSoftMax"] == 1
    assert "axisSoftMax" not in custom["KV cache in use"]["custom"]
    places = {title: shown[title]["options"]["legend"]["placement"] for title in custom}
    assert places["Requests that end, by reason"] == "right"
    assert places["Failed publishes"] == places["KV cache in use"] == "bottom"
    # Grafana adds a space before a suffix.
    assert not [item for item in PANELS if "suffix: " in item["fieldConfig"]["defaults"]["unit"]]


def test_titles_are_unique_in_a_dashboard() -> None:
    for spec in SPECS:
        titles = [panel.title for panel in spec.panels]
        assert len(set(titles)) == len(titles)


def test_thresholds_ascend_from_minus_infinity() -> None:
    for panel in (panel for spec in SPECS for panel in spec.panels if panel.thresholds):
        values = list(panel.thresholds.values())
        assert values[0] == -math.inf and values == sorted(set(values)), panel.title
    first = [
        panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]
        for panel in PANELS
        if "thresholds" in panel["fieldConfig"]["defaults"]
    ]
    assert first and all(step["value"] is None for step in first)


def test_every_alert_has_a_panel_that_links_to_its_runbook() -> None:
    linked = {alert for spec in SPECS for panel in spec.panels for alert in panel.runbooks}
    assert linked == ALERTS
    urls = {link["url"] for panel in PANELS for link in panel.get("links", ())}
    assert urls == {f"${{runbooks:raw}}#{alert.lower()}" for alert in ALERTS}


def test_a_query_selects_one_run_of_a_place_or_one_ray_cluster() -> None:
    """Select by place too, because two releases of the chart may have runs of the same name."""

    def fits(query: str) -> bool:
        ours = re.findall(r"\b(?:rayloom_|vllm:)[a-z0-9_]+(\S*)", query)
        rays = re.findall(r"\bray_[a-z0-9_]+(?=\{)(\S*)", query)
        alerts = re.findall(r"\bALERTS(\S*)", query)
        return (
            not re.search(r"\b(job|instance)\b", query)
            and bool(names_in(query) or is_shown_by_replicas(query) or rays or alerts)
            and all(selector.startswith("{" + RUN_OF_PLACE) for selector in ours)
            and all(selector.startswith(OF_RAY) for selector in rays)
            and all(RUN_OF_PLACE in selector for selector in alerts)
        )

    assert [query for query in QUERIES if not fits(query)] == []


def test_a_query_uses_only_the_common_ranges() -> None:
    """Check that a rate uses Grafana's interval, and an increase the window of several steps."""
    wrong = []
    for query in (q for spec in SPECS for panel in spec.panels for q in panel.queries.values()):
        ranges = Counter(re.findall(r"\[([^\]]*)\]", query))
        num_rates = len(re.findall(r"\brate\(", query))
        num_others = len(re.findall(r"\b(?:increase|avg_over_time)\(", query))
        of_steps = ranges["$several_steps"] + ranges["$several_steps:1m"]
        is_right = (
            ranges["$__rate_interval"] == num_rates
            and of_steps == num_others
            and ranges.total() == num_rates + num_others
            and not re.search(r"\b(irate|idelta|delta|resets)\(", query)
        )
        wrong += [] if is_right else [query]
    assert wrong == []
    ranges = {each for query in QUERIES for each in re.findall(r"\[([^\]]*)\]", query)}
    assert ranges == {"$__rate_interval", *WINDOWS, *(f"{window}:1m" for window in WINDOWS)}


def test_metrics_that_grow_with_steps_have_no_rate_over_minutes() -> None:
    rated = {family(name) for query in QUERIES for name in re.findall(r"\brate\(\s*(\w+)", query)}
    assert rated and rated & OF_STEPS == set()


def test_a_query_takes_no_rate_of_a_gauge() -> None:
    gauges = {item.name for item in declared() if item.kind == "gauge"}
    rated = {
        query: set(re.findall(r"\b(?:rate|increase)\(\s*(rayloom_\w+)", query)) for query in QUERIES
    }
    assert [query for query, names in rated.items() if names & gauges] == []


def test_every_metric_and_label_of_a_query_is_declared() -> None:
    by_series = {name: item.labels for item in declared() for name in item.series} | {
        name: (*labels, *PLACE_LABELS, "ray_io_cluster") for name, labels in RAYS.items()
    }

    def unknown(query: str) -> set[str]:
        if "ALERTS" in query:
            return set()
        names = names_in(query) | set(re.findall(r"\bray_[a-z0-9_]+(?=\{)", query))
        labels = {label for name in names & by_series.keys() for label in by_series[name]}
        if is_shown_by_replicas(query):
            labels |= {"replica", "finished_reason"}
        used = set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", query)) - set(RUN_LABELS)
        for grouped in re.findall(r"\b(?:by|without|ignoring) \(([^)]*)\)", query):
            used |= {label.strip() for label in grouped.split(",")} - {"le"}
        return (names - by_series.keys()) | (used - labels)

    assert {query: missing for query in QUERIES if (missing := unknown(query))} == {}


def test_a_legend_names_labels_that_the_query_keeps() -> None:
    """Check this because Grafana shows nothing for a label that the query summed away."""
    wrong = []
    for spec in SPECS:
        for panel in spec.panels:
            for legend, query in panel.queries.items():
                named = set(re.findall(r"\{\{(\w+)\}\}", legend))
                grouped = {
                    label.strip()
                    for labels in re.findall(r"\bby \(([^)]*)\)", query)
                    for label in labels.split(",")
                }
                is_summed = "sum(" in query.replace("\n", "") or bool(grouped)
                if named and is_summed and not named <= grouped:
                    wrong.append((panel.title, legend))
    assert wrong == []


def test_every_declared_metric_is_shown_or_listed_as_not_shown() -> None:
    asked = {name for query in QUERIES for name in names_in(query)}
    hidden = {item.name for item in declared() if not asked & set(item.series)}
    assert hidden - {each.metric for each in STATISTICS} == NOT_SHOWN.keys()
    assert {name for query in QUERIES for name in RAYS_NAME.findall(query)} - {
        "ray_io_cluster",
        "ray_cluster",
    } == RAYS.keys()


def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": fill(query, run="any")}
        for number, query in enumerate(QUERIES)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stderr
    assert f"{len(QUERIES)} rules found" in done.stdout
