"""report.html: whole, self-contained and accessible at every length of run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.record_builders import (
    Run,
    evaluation_record,
    learning_run,
    step_record,
    summary_of,
    unmeasured_step,
)

from actors.trajectory_queue.ledger import LedgerCounts
from actors.types import Outcome
from service.report.charts import OUTCOMES, STAGES, reward_plot
from service.report.drawing import PALETTE, Mark, bucketed, trailing_mean
from service.report.page import render_report, write_report
from service.report.tables import balance_equation, checks, ending, verdict
from service.telemetry.records import StageSeconds

VOID = {"meta", "link", "br", "hr", "img", "input"}

RUNS = {
    "no steps": Run(),
    "an evaluation alone": Run(evaluations=(evaluation_record(0),)),
    "one step": learning_run(1),
    "two steps": learning_run(2),
    "many steps": learning_run(900),
    "nothing measured": Run(steps=(unmeasured_step(1), unmeasured_step(2))),
    "no statistics known": Run(steps=tuple(step_record(i, statistics={}) for i in (1, 2))),
    "exact zeros": Run(
        steps=tuple(step_record(i, mismatch_k3_mean=0.0, mismatch_max=0.0) for i in (1, 2, 3))
    ),
    "negative plain returns": Run(
        steps=tuple(step_record(i, reward_mean=-5.0 * i, scaled_reward_mean=None) for i in (1, 2))
    ),
}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)


class Page(HTMLParser):
    """All elements in order; every tag that opens must close, properly nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)
        assert not self._open, f"not closed: {[element.tag for element in self._open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [element.tag for element in self._open]
        element = Element(tag, {name: value or "" for name, value in attrs}, inside=names)
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1].tag == tag, f"</{tag}> closes nothing"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text.append(data)

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]


@cache
def page_of(name: str) -> tuple[str, Page]:
    run = RUNS[name]
    text = render_report(summary=summary_of(run), history=run, config_text="run: {}")
    return text, Page(text)


@pytest.mark.parametrize("name", RUNS)
def test_report_is_well_formed_self_contained_and_described(name: str) -> None:
    text, page = page_of(name)
    figures = page.all("figure")
    described = [
        element
        for element in page.elements
        if element.attributes.get("role") == "img" and element.attributes.get("aria-label")
    ]
    assert len(described) == len(figures)
    assert bool(figures) == bool(RUNS[name].steps)
    assert len(page.all("caption")) == len(page.all("table")) >= 3
    assert "nan" not in re.sub(r"\s(d|points)=\"[^\"]*\"", "", text).lower()
    assert_loads_nothing(text, page)
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))


def assert_loads_nothing(text: str, page: Page) -> None:
    assert "://" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]?)", text)) <= {"#"}
    assert not [element for element in page.elements if "src" in element.attributes]
    assert not page.all("script")
    targets = [e.attributes["href"] for e in page.elements if "href" in e.attributes]
    assert all(target.startswith("#") or target == "data:," for target in targets)


def test_references_inside_a_figure_point_at_its_own_parts() -> None:
    text, page = page_of("two steps")
    ids = {element.attributes.get("id") for element in page.elements}
    named = re.findall(r'(?:url\(#|href="#)([^)"]+)', text)
    assert named
    assert set(named) <= ids


def test_figures_follow_the_theme_by_css_variables() -> None:
    text, page = page_of("two steps")
    assert "prefers-color-scheme: dark" in text
    drawn = {
        role
        for element in page.elements
        if "svg" in element.inside or element.tag in {"use", "path"}
        for role in re.findall(r"var\(--(\w+)\)", element.attributes.get("style", ""))
    }
    assert {"blue", "muted", "grid"} <= drawn <= set(PALETTE)
    lights = [tone.light for tone in PALETTE.values()]
    assert len(set(lights)) == len(lights)


def test_long_runs_are_thinned_out() -> None:
    shorter, longer = (
        reward_plot(run.steps, run.evaluations) for run in (RUNS["many steps"], learning_run(4000))
    )
    assert len(longer.svgs[0]) < 1.3 * len(shorter.svgs[0])
    assert longer.legend[0].mark is Mark.BAND


def test_configuration_and_names_are_text_not_markup() -> None:
    text = render_report(
        summary=summary_of(Run(), name="<b>"),
        history=Run(),
        config_text="a: <script>alert(1)</script>",
    )
    page = Page(text)
    assert not page.all("script") and not page.all("b")
    assert "&lt;script&gt;" in text


def test_the_report_is_written_whole_and_nothing_beside_it(tmp_path: Path) -> None:
    write_report(
        tmp_path / "report.html", summary=summary_of(Run()), history=Run(), config_text="run: {}"
    )
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [
        (0, "No training step was completed in 4 min 12 s."),
        (1, "Reward 0.30 after 1 step, 4 min 12 s."),
        (120, "Reward 0.31 → 0.89 in 120 steps, 4 min 12 s."),
    ],
)
def test_verdict_is_one_sentence_at_every_length(num_steps: int, expected: str) -> None:
    assert verdict(summary_of(learning_run(num_steps))) == expected


def test_verdict_says_when_the_reward_was_not_measured() -> None:
    summary = summary_of(RUNS["nothing measured"])
    assert verdict(summary) == "2 steps in 4 min 12 s; the reward was not measured."


def test_ending_is_a_sentence() -> None:
    run = RUNS["no steps"]
    assert ending(summary_of(run, exit_reason="all 5 steps are done")) == "All 5 steps are done."
    assert ending(summary_of(run)) == ""


def test_broken_promises_are_named() -> None:
    run = Run(
        steps=(
            step_record(1, policy_age_max=3, is_skipped=True, num_malformed_rewarded=2),
            step_record(2, policy_version=1),
        )
    )
    summary = summary_of(
        run, ledger=LedgerCounts(admitted=9, trained=4, in_flight=2), policy_age_bound=1
    )
    found = checks(summary, run.totals)
    assert not any(check.is_kept for check in found)
    assert len(found) == 6
    assert balance_equation(summary) == ("9 admitted ≠ 6 = 4 trained + 0 evicted + 2 in flight")


def test_a_broken_promise_stands_on_the_page() -> None:
    summary = summary_of(Run(), ledger=LedgerCounts(admitted=9, trained=4, in_flight=2))
    text = render_report(summary=summary, history=Run(), config_text="")
    assert text.count("✗") == 2
    assert "does not balance" in text


def test_every_outcome_and_every_stage_has_a_colour_of_its_own() -> None:
    named = [outcome for _, _, outcomes in OUTCOMES for outcome in outcomes]
    assert sorted(named) == sorted(Outcome)
    assert {name for name, _, _ in STAGES} == set(StageSeconds().by_name())
    assert len({role for _, role, _ in OUTCOMES}) == len(OUTCOMES)
    assert len({role for _, _, role in STAGES}) == len(STAGES)


@given(
    values=st.lists(
        st.one_of(st.just(float("nan")), st.floats(-1e6, 1e6)), min_size=1, max_size=60
    ),
    max_points=st.integers(1, 70),
)
def test_buckets_lose_no_sum_and_no_extreme(values: list[float], max_points: int) -> None:
    steps = np.arange(1.0, len(values) + 1)
    given_values = np.array(values)
    buckets = bucketed(steps, max_points=max_points)
    assert len(buckets.starts) == min(len(values), max_points)
    assert buckets.edges[0] == 0.5 and buckets.edges[-1] == len(values) + 0.5
    assert np.all(np.diff(buckets.edges) > 0)
    assert buckets.total(given_values).sum() == pytest.approx(np.nansum(given_values), abs=1e-6)
    if np.isfinite(given_values).any():
        assert np.nanmax(buckets.maximum(given_values)) == np.nanmax(given_values)
        assert np.nanmin(buckets.minimum(given_values)) == np.nanmin(given_values)


def test_trailing_mean_looks_back_only_and_passes_over_gaps() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0])
    assert trailing_mean(values, width=2).tolist() == [1.0, 1.0, 3.0, 4.0]
