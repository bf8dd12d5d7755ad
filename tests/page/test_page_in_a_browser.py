"""Tests of a report and of a trajectory's page in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds.builders.chat_examples import example_step, text, with_trained
from worlds.builders.record_builders import (
    evaluation_record,
    history_of,
    learning_run,
    step_record,
    summary_of,
)
from worlds.servers.browser import Browser, browser

from actors.journal.files import JournalStep
from service.cli.inspect import write_page
from service.inspect.view import build_view
from service.report.document import write_report
from service.telemetry.summary import History

RUNS = {
    "no steps": history_of(),
    "an evaluation alone": history_of(evaluations=(evaluation_record(0),)),
    "one step": learning_run(1),
    "no statistics known": history_of(steps=tuple(step_record(i, statistics={}) for i in (1, 2))),
    "exact zeros": history_of(
        steps=tuple(step_record(i, mismatch_k3_mean=0.0, mismatch_max=0.0) for i in (1, 2, 3))
    ),
    "many steps": learning_run(300),
}
# JavaScript that counts the pixels of a figure that are not blank.
INK = """(canvas => {
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0; for (let at = 3; at < data.length; at += 4) count += data[at] > 0; return count
})(document.querySelector('%s canvas'))"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as found:
        found.look()
        yield found


def shown(tab: Browser, run: History, directory: Path, **changes: object) -> None:
    file = directory / "report.html"
    write_report(file, summary=summary_of(run, **changes), history=run, config_text="run: {a: <b>}")
    tab.requests.clear()
    tab.open(file.as_uri())
    assert tab.complaints == [] and tab.requests == [file.as_uri()]


def test_a_report_of_any_length_is_drawn_without_errors(tab: Browser, tmp_path: Path) -> None:
    for name, run in RUNS.items():
        shown(tab, run, tmp_path)
        figures = tab.texts("figure h3")
        assert bool(figures) == bool(run.steps), name
        assert len(tab.texts("table caption")) >= 3, name
        assert "NaN" not in " ".join(tab.texts("main")), name
        described = tab.eval("document.querySelectorAll('[role=img][aria-label]').length")
        assert described == tab.eval("document.querySelectorAll('.drawing canvas').length"), name
        ids = tab.eval("[...document.querySelectorAll('[id]')].map(e => e.id)")
        assert len(ids) == len(set(ids)), name


def test_a_broken_promise_is_shown(tab: Browser, tmp_path: Path) -> None:
    shown(tab, RUNS["one step"], tmp_path, policy_age_bound=-1)
    assert tab.texts(".checks .broken") == [
        "✗The oldest trained token was 0 versions behind; the bound is -1."
    ]


def test_figures_show_values_under_the_pointer_and_in_every_legend(
    tab: Browser, tmp_path: Path
) -> None:
    shown(tab, learning_run(40), tmp_path)
    assert tab.eval(INK % "#reward") > 2000 and tab.eval(INK % "#stages") > 2000
    assert tab.texts("#loss .legend .value") == ["0.01"]
    tab.hover("#reward .u-over", at=0.5)
    tab.wait_for("!document.querySelector('#reward .tip').hidden")
    step, *values = tab.texts("#reward .tip > div")
    assert step in ("step 19", "step 20", "step 21") and values[0].startswith("training")
    assert 0.55 < float(values[0].rpartition(" ")[2]) < 0.65
    # The other figures show the same step in their legends; their tooltips stay hidden.
    assert tab.texts("#stages .legend .value")[0] == "0.8 s"
    assert tab.eval("document.querySelector('#stages .tip').hidden")
    tab.hover("h1")
    tab.wait_for("document.querySelector('#reward .tip').hidden")
    tab.eval("document.querySelector('#age .u-over').focus()")
    tab.key("ArrowRight")
    tab.wait_for("!document.querySelector('#age .tip').hidden")


def test_unknown_or_constant_statistics_have_no_figure(tab: Browser, tmp_path: Path) -> None:
    off = {"masked_fraction": 0.0, "masked_token_fraction": 0.0, "importance_weight_mean": 1.0,
           "importance_weight_max": 1.0, "clip_fraction_low": 0.0}  # fmt: skip
    on = off | {"masked_fraction": 0.5, "masked_token_fraction": 0.5, "importance_weight_max": 1.5}
    for second, drawn in (
        (off, ["Clipped"]),
        (on, ["Clipped", "Masked", "Importance weight"]),
    ):
        steps = tuple(step_record(i, statistics=each) for i, each in enumerate((off, second), 1))
        shown(tab, history_of(steps=steps), tmp_path)
        assert tab.texts("#loss-statistics figure h3") == drawn
    assert "by any rule" in tab.texts("#statistic-masked .legend")[0]


def test_figures_follow_the_theme_and_fit_a_phone(tab: Browser, tmp_path: Path) -> None:
    shown(tab, learning_run(40), tmp_path)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.eval(ground)
    tab.look(width=390, is_dark=True)
    tab.wait_for("document.querySelector('#reward canvas').clientWidth < 390")
    assert tab.eval(ground) != light
    assert tab.eval("document.documentElement.scrollWidth") <= 390
    assert tab.print_pdf().startswith(b"%PDF")
    tab.look()


def token_page(tab: Browser, step: JournalStep, row: int, directory: Path) -> None:
    file = directory / "tokens.html"
    write_page(file, build_view(step, step.entries[row], text()))
    tab.open(file.as_uri())
    assert tab.complaints == []


def test_each_token_has_its_colour_and_its_columns_under_the_pointer(
    tab: Browser, tmp_path: Path
) -> None:
    token_page(tab, with_trained(example_step(), 0, [22]), 0, tmp_path)
    assert tab.texts(".text .t.fault") == ["higher"]
    assert tab.texts(".text .t.trained:not(.fault)") == ["4", "<|end|>", "6", "<|end|>"]
    tab.hover(".text .t.fault")
    tab.wait_for("!document.querySelector('.columns-tip').hidden")
    assert tab.texts(".columns-tip") == [
        "token 22 · “higher” · id 374 · sampled and trained · advantage 0.5773 · "
        "FAULT: trained, but it was not sampled"
    ]
    for paint in ("advantage", "logprob", "version"):
        tab.click(f"[data-paint={paint}]")
        assert "higher" not in tab.texts(".text .t.heat") or paint == "advantage"
        assert len(tab.texts(".text .t.heat")) in (4, 5), paint


def test_a_branch_is_below_its_original_sample_in_the_tree(tab: Browser, tmp_path: Path) -> None:
    token_page(tab, example_step(), 2, tmp_path)
    assert tab.texts(".tree .name") == ["sample 0", "sample 1"]
    depths = "[...document.querySelectorAll('.tree li')].map(e => e.style.cssText)"
    assert tab.eval(depths) == ["--depth: 0;", "--depth: 1;"]
    assert tab.texts("#sample-1 details.shared summary") == ["19 tokens as in sample 0"]
    assert tab.texts("#sample-1 .t.differs") == ["h"]


def test_markup_in_a_models_text_is_shown_as_text(tab: Browser, tmp_path: Path) -> None:
    token_page(tab, example_step(), 3, tmp_path)
    assert "<b>das</b> & \\x1b[31m?" in "".join(tab.texts(".text .t"))
    assert tab.eval("document.querySelectorAll('.text b').length") == 0
