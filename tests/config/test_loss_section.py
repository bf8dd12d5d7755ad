"""Tests of the report's tables "Statistics of the loss"."""

from __future__ import annotations

from worlds.builders.record_builders import known_statistics, learning_run, step_record

from service.report.tables import statistic_tables
from service.telemetry.records import StepRecord
from service.telemetry.totals import totals_of


def with_statistics(*each: dict[str, float]) -> tuple[StepRecord, ...]:
    return tuple(step_record(step, statistics=known) for step, known in enumerate(each, 1))


def test_each_group_of_statistics_has_a_table_if_all_are_known() -> None:
    tables = {each.caption: each.rows for each in statistic_tables(learning_run(3).totals)}
    rows = tables["Log-probabilities, policy"]
    assert [row[0] for row in rows if row[0].startswith("positive")] == [
        "positive mean",
        "positive max",
    ]


def test_there_is_no_table_if_no_step_has_statistics() -> None:
    assert statistic_tables(totals_of(with_statistics({}, {}))) == ()


def test_an_unknown_statistic_has_no_row() -> None:
    known = known_statistics(1)
    del known["kl_mean"], known["kl_min"], known["kl_max"]
    tables = statistic_tables(totals_of(with_statistics(known, known)))
    rows = [row[0] for table in tables for row in table.rows]
    assert "surrogate mean" in rows and not [row for row in rows if row.startswith("kl ")]


def test_a_table_shows_the_first_lowest_highest_and_last_value() -> None:
    records = with_statistics(
        {}, {"kl_mean": 0.5}, {"kl_mean": 8.0, "ratio_max": 2.0}, {"kl_mean": -1.0}, {}
    )
    tables = {table.caption: table.rows for table in statistic_tables(totals_of(records))}
    assert tables == {
        "Objective and KL": (("kl mean", "0.5", "-1", "8", "-1"),),
        "Ratios, clips, masks": (("ratio max", "2", "2", "2", "2"),),
    }
