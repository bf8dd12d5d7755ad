"""The dashboard as it is committed: the rules that each panel keeps, and what it shows."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from worlds.metric_names import NAME, declared

from actors.statistics import STATISTICS
from deploy.dashboards.__main__ import FILE
from deploy.dashboards.grafana import COLUMNS, Panel, load_dashboard, to_json
from service.inference.vllm_metrics import SHOWN

OVERVIEW = load_dashboard()
TREE: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
PANELS = [panel for panel in TREE["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
MAX_BYTES = 200 * 1024

# Metrics that no panel shows, and why.
NOT_SHOWN = {
    "rayloom_build_info": "it says nothing over time",
    "rayloom_checkpoint_step": "its age is shown",
    "rayloom_ledger_admitted_rollouts": "it is the sum of the three states that are shown",
    "rayloom_policy_age_versions": "the newest step's is shown, right at any pace",
    "rayloom_sampled_tokens": "the newest step's are shown, right at any pace",
    "rayloom_stage_seconds": "the newest step's are shown, right at any pace",
    "rayloom_train_steps": "the number and the pace of the newest are shown",
    "rayloom_trained_tokens": "the newest step's are shown, right at any pace",
}


def names_in(query: str) -> set[str]:
    return set(NAME.findall(query))


def is_shown_by_replicas(query: str) -> bool:
    """Whether it asks for vLLM's own metrics, all of which replicas push."""
    names = set(re.findall(r"\bvllm:[a-z_]+", query))
    return (
        bool(names) and {re.sub("_(total|bucket|count|sum)$", "", name) for name in names} <= SHOWN
    )


def test_the_committed_file_is_what_the_code_makes() -> None:
    assert FILE.read_text(encoding="utf-8") == to_json(OVERVIEW), "python -m deploy.dashboards"


def test_a_panel_with_an_unknown_key_or_of_two_units_is_refused() -> None:
    with pytest.raises(ValidationError, match="colour"):
        TypeAdapter(Panel).validate_python({"title": "T", "description": "D.", "colour": "red"})
    panel = Panel(title="T", description="D.", statistics={"KL": "kl_mean", "ratio": "ratio_max"})
    with pytest.raises(AssertionError, match="a panel shows one unit"):
        _ = panel.series_unit


def test_there_are_the_sections_that_a_reader_looks_for() -> None:
    rows = [panel["title"] for panel in TREE["panels"] if panel["type"] == "row"]
    assert rows == [
        "Overview", "Pipeline", "Rollouts", "Learning health", "Statistics of the loss",
        "Inference", "Parts", "Service",
    ]  # fmt: skip
    assert all(section.panels for section in OVERVIEW.sections)


def test_the_only_variables_are_the_data_source_and_the_run() -> None:
    variables = TREE["templating"]["list"]
    assert [item["name"] for item in variables] == ["datasource", "run"]
    used = set(re.findall(r"\$\{?(\w+)", FILE.read_text(encoding="utf-8")))
    assert used == {"datasource", "run", "__rate_interval"}


def test_ids_are_unique_and_every_panel_has_its_own_place() -> None:
    ids = [panel["id"] for panel in TREE["panels"]]
    assert sorted(ids) == list(range(1, len(ids) + 1))
    cells = Counter(
        (x, y)
        for place in (panel["gridPos"] for panel in TREE["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) < COLUMNS


def test_the_file_is_small_enough_for_a_config_map() -> None:
    assert FILE.stat().st_size < MAX_BYTES


def test_a_panel_says_what_it_shows_and_where_from() -> None:
    def is_complete(panel: dict[str, Any]) -> bool:
        targets = panel["targets"]
        references = [target["refId"] for target in targets]
        legends = [target["legendFormat"] for target in targets]
        source = {"type": "prometheus", "uid": "${datasource}"}
        return (
            bool(panel["title"] and panel["fieldConfig"]["defaults"]["unit"])
            and panel["description"].endswith(".")
            and all(part["datasource"] == source for part in (panel, *targets))
            and bool(references and all(legends))
            and len(set(references)) == len(references)
            and len(set(legends)) == len(legends)
        )

    assert [panel["title"] for panel in PANELS if not is_complete(panel)] == []


def test_a_query_asks_for_one_run_at_an_interval_that_fits_the_scrapes() -> None:
    def fits(query: str) -> bool:
        selectors = re.findall(r"(?:rayloom_|vllm:)[a-z0-9_]+(\S*)", query)
        ranges = re.findall(r"\[([^\]]*)\]", query)
        return (
            "job" not in query
            and (bool(names_in(query)) or is_shown_by_replicas(query))
            and all(selector.startswith('{run="$run"') for selector in selectors)
            and set(ranges) <= {"$__rate_interval"}
            and len(ranges) == len(re.findall(r"\brate\(", query))
            and not re.search(r"\b(irate|increase|delta)\(", query)
        )

    assert [query for query in QUERIES if not fits(query)] == []


def test_a_query_takes_the_rate_of_what_grows_and_of_nothing_else() -> None:
    gauges = {item.name for item in declared() if item.kind == "gauge"}
    rated = {query: set(re.findall(r"\brate\((rayloom_\w+)", query)) for query in QUERIES}
    assert [query for query, names in rated.items() if names & gauges] == []


def test_every_metric_and_label_of_a_query_is_declared() -> None:
    by_series = {name: item for item in declared() for name in item.series}

    def unknown(query: str) -> set[str]:
        names = names_in(query)
        labels = {label for name in names & by_series.keys() for label in by_series[name].labels}
        used = set(re.findall(r"(\w+)(?:=|!=)\"", query)) - {"run"}
        for grouped in re.findall(r"\b(?:by|ignoring) \(([^)]*)\)", query):
            used |= {label.strip() for label in grouped.split(",")} - {"le"}
        return (names - by_series.keys()) | (used - labels)

    assert {query: missing for query in QUERIES if (missing := unknown(query))} == {}


def test_every_declared_metric_is_shown_or_named_as_not_shown() -> None:
    asked = {name for query in QUERIES for name in names_in(query)}
    hidden = {item.name for item in declared() if not asked & set(item.series)}
    assert hidden - {each.metric for each in STATISTICS} == NOT_SHOWN.keys()
