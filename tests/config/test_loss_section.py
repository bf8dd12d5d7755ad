"""The report's fold "Statistics of the loss": what it shows, and what it leaves out."""

from __future__ import annotations

import re

from worlds.record_builders import Run, known_statistics, learning_run, step_record, summary_of

from service.report.figures import LOSS_FIGURES, loss_plots
from service.report.page import render_report
from service.report.tables import statistic_tables
from service.telemetry.records import StepRecord
from service.telemetry.totals import totals_of

FOLD = re.compile(r'<details class="fold" id="loss-statistics">.*?</details>', re.DOTALL)


def fold_of(*steps: StepRecord) -> str | None:
    run = Run(steps=steps)
    found = FOLD.search(render_report(summary=summary_of(run), history=run, config_text=""))
    return found[0] if found else None


def with_statistics(*each: dict[str, float]) -> tuple[StepRecord, ...]:
    return tuple(step_record(step, statistics=known) for step, known in enumerate(each, 1))


def legends(records: tuple[StepRecord, ...]) -> dict[str, list[str]]:
    return {plot.title: [entry.label for entry in plot.legend] for plot in loss_plots(records)}


def test_every_line_of_every_figure_is_drawn_where_everything_is_known() -> None:
    drawn = legends(learning_run(3).steps)
    assert drawn == {figure.title: [c.label for c in figure.curves] for figure in LOSS_FIGURES}


def test_the_fold_is_closed_and_holds_figures_and_tables() -> None:
    fold = fold_of(*learning_run(3).steps)
    assert fold is not None
    assert fold.count("<figure") == len(LOSS_FIGURES)
    assert "<caption>Log-probabilities, policy</caption>" in fold
    assert fold.count('<th scope="row">positive mean</th>') == 3


def test_there_is_no_fold_where_no_step_has_statistics() -> None:
    assert fold_of() is None
    assert fold_of(step_record(1, statistics={}), step_record(2, statistics={})) is None


def test_one_step_has_its_numbers_and_no_figures() -> None:
    fold = fold_of(step_record(1))
    assert fold is not None
    assert "<figure" not in fold and "<table>" in fold


def test_what_was_not_known_has_neither_a_figure_nor_a_row() -> None:
    known = known_statistics(1)
    del known["kl_mean"], known["kl_min"], known["kl_max"]
    fold = fold_of(*with_statistics(known, known))
    assert fold is not None
    assert "KL to the reference</h3>" not in fold and "KL of one token</h3>" not in fold
    assert "kl mean" not in fold and "surrogate mean" in fold


def test_a_rule_that_never_masks_and_a_weight_that_is_always_one_draw_nothing() -> None:
    off = {"masked_fraction": 0.0, "masked_token_fraction": 0.0, "importance_weight_mean": 1.0,
           "importance_weight_max": 1.0, "clip_fraction_low": 0.0}  # fmt: skip
    assert legends(with_statistics(off, off)) == {"Clipped": ["low"]}
    on = off | {"masked_fraction": 0.5, "masked_token_fraction": 0.5, "importance_weight_max": 1.5}
    assert legends(with_statistics(off, on)) == {
        "Clipped": ["low"],
        "Masked": ["by any rule", "token band"],
        "Importance weight": ["largest"],
    }


def test_a_table_tells_where_a_number_began_where_it_went_and_where_it_ended() -> None:
    records = with_statistics(
        {}, {"kl_mean": 0.5}, {"kl_mean": 8.0, "ratio_max": 2.0}, {"kl_mean": -1.0}, {}
    )
    tables = {table.caption: table.rows for table in statistic_tables(totals_of(records))}
    assert tables == {
        "Objective and KL": (("kl mean", "0.5", "-1", "8", "-1"),),
        "Ratios, clips, masks": (("ratio max", "2", "2", "2", "2"),),
    }


def test_thinning_out_keeps_the_peak_of_a_largest_value() -> None:
    still = {"ratio_max": 1.5, "ratio_mean": 1.0}
    records = with_statistics(
        *(still | {"ratio_max": 90.0} if at == 450 else still for at in range(900))
    )
    (plot,) = [plot for plot in loss_plots(records) if plot.title == "Ratio"]
    # Of the means, which are near 1, the vertical axis would end before 2.
    assert "50</text>" in plot.svgs[0]
    assert "largest from 1.5 to 1.5, at most 90" in plot.alt
