"""Tests of the table of statistics: each is declared once, made in one place, and shown."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from worlds.builders.record_builders import learning_run

from actors.metrics import Metrics
from actors.statistics import BY_NAME, STATISTICS
from deploy.dashboards.__main__ import DOCUMENT, with_statistics
from service.report.tables import statistic_tables

REPOSITORY = Path(__file__).parents[1]
# The files in which a source makes its values; each has `Statistic.values` once, in quotes.
PRODUCERS = {
    "policy_loss": ("actors/trainer/loss/micro_batch.py", "actors/trainer/statistics.py"),
    "critic": ("actors/trainer/critic.py",),
    "merge": ("actors/merge/report.py",),
    "publish": ("actors/weights/logprob_check.py",),
    "trainer": ("actors/trainer/utilization.py",),
}


def test_every_statistic_is_declared_once_and_its_values_are_made_in_one_line() -> None:
    assert len(BY_NAME) == len(STATISTICS)
    lines = {
        source: "".join((REPOSITORY / name).read_text(encoding="utf-8") for name in names)
        for source, names in PRODUCERS.items()
    }
    made = {each.values: lines[each.source].count(f'"{each.values}"') for each in STATISTICS}
    assert {values: count for values, count in made.items() if count != 1} == {}


def test_statistics_of_one_group_are_adjacent() -> None:
    groups = [statistic.group for statistic in STATISTICS]
    assert groups == sorted(groups, key=groups.index)


def test_the_metrics_show_every_statistic_once() -> None:
    metrics, (record,) = Metrics(), learning_run(1).steps
    metrics.statistics.show(record.statistics)
    shown = Counter(sample.name for family in metrics.values.collect() for sample in family.samples)
    assert {shown[each.metric] for each in STATISTICS} == {1}
    assert all(each.metric.startswith("rayloom_") for each in STATISTICS)


def test_the_report_has_a_row_for_every_statistic() -> None:
    tables = statistic_tables(learning_run(1).totals)
    assert sum(len(table.rows) for table in tables) == len(STATISTICS)


def test_the_document_has_the_table_as_the_command_writes_it() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_statistics(text), "python -m deploy.dashboards"
    assert all(f"`{statistic.name}`" in text for statistic in STATISTICS)
