"""Tests of the document of a run's report, for runs of every length."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds.builders.record_builders import (
    evaluation_record,
    history_of,
    learning_run,
    step_record,
    summary_of,
    unmeasured_step,
)

from actors.trajectory_queue.ledger import LedgerCounts
from actors.trajectory_queue.messages import QueueStats
from actors.types import Outcome, SampledText
from service.page.packed import PACKED
from service.report.document import (
    LiveState,
    RunPicture,
    checks,
    ending,
    render_report,
    run_document,
    verdict,
    write_report,
)
from service.report.tables import balance_equation, summary_tables
from service.telemetry.records import EvaluationRecord, EvaluationSample, StageSeconds
from service.telemetry.summary import History
from service.units import UNKNOWN

RUNS = {
    "no steps": history_of(),
    "an evaluation alone": history_of(evaluations=(evaluation_record(0),)),
    "one step": learning_run(1),
    "two steps": learning_run(2),
    "many steps": learning_run(300),
    "nothing measured": history_of(steps=(unmeasured_step(1), unmeasured_step(2))),
    "no statistics known": history_of(steps=tuple(step_record(i, statistics={}) for i in (1, 2))),
    "exact zeros": history_of(
        steps=tuple(step_record(i, mismatch_k3_mean=0.0, mismatch_max=0.0) for i in (1, 2, 3))
    ),
    "negative plain returns": history_of(
        steps=tuple(step_record(i, reward_mean=-5.0 * i, scaled_reward_mean=None) for i in (1, 2))
    ),
}


def document_of(run: History, **changes: object) -> dict[str, Any]:
    summary = summary_of(run, **changes)
    return run_document(RunPicture(summary=summary, history=run, config_text="run: {}\n"))


def test_reward_components_are_a_table_and_curves_if_an_environment_has_them() -> None:
    steps = tuple(
        step_record(i, reward_components={"form": i / 4, **({"used tool": 1.0} if i > 5 else {})})
        for i in range(1, 9)
    )
    document = document_of(history_of(steps=steps))
    [table] = [each for each in document["tables"] if each["caption"] == "Reward components"]
    assert table["rows"] == (("form", "0.75", "1.50"), ("used tool", UNKNOWN, "1.00"))
    assert document["steps"]["rewards.form"] == [i / 4 for i in range(1, 9)]
    assert document["steps"]["rewards.used tool"] == [None] * 5 + [1.0] * 3
    plain = document_of(learning_run(8))
    assert "Reward components" not in {each["caption"] for each in plain["tables"]}


@pytest.mark.parametrize("name", RUNS)
def test_the_document_of_a_run_of_any_length_is_json_with_complete_columns(name: str) -> None:
    run = RUNS[name]
    document = document_of(run)
    json.dumps(document, allow_nan=False)
    steps = document["steps"]
    assert {len(values) for values in steps.values()} <= {len(run.steps)}
    assert steps.get("step", []) == [record.step for record in run.steps]
    assert document["evaluations"]["step"] == [record.step for record in run.evaluations]
    assert len(document["tiles"]) == 8 and len(document["tables"]) >= 3
    assert all(
        len(row) == len(table["header"]) for table in document["tables"] for row in table["rows"]
    )


def test_answers_to_the_same_held_out_tasks_are_next_to_each_other() -> None:
    def played(step: int, answers: dict[str, str]) -> EvaluationRecord:
        samples = (
            EvaluationSample(
                task_id=task,
                outcome=Outcome.COMPLETED,
                episode_return=float(answer == "2"),
                text=SampledText(prompt=f"<user>\nWhat is {task}?\n<model>\n", answer=answer),
            )
            for task, answer in answers.items()
        )
        return replace(evaluation_record(step), samples=tuple(samples))

    first = played(0, {"1 + 1": "3", "5 - 3": "2", "9 - 7": "1"})
    last = played(20, {"1 + 1": "2", "5 - 3": "2"})
    [table] = [
        each
        for each in document_of(history_of(evaluations=(first, last)))["tables"]
        if each["is_text"]
    ]
    assert table["header"] == ("task", "before, version 0", "return", "after, version 20", "return")
    assert table["rows"] == (
        ("What is 1 + 1?", "3", "0.00", "2", "1.00"),
        ("What is 5 - 3?", "2", "1.00", "2", "1.00"),
    )
    captions = {each["caption"] for each in document_of(history_of(evaluations=(first,)))["tables"]}
    assert table["caption"] not in captions


def test_the_columns_have_the_values_of_the_records() -> None:
    known = step_record(1, is_skipped=True, kl_mean=0.123456789, num_turns=0)
    columns = document_of(history_of(steps=(known, unmeasured_step(2))))["steps"]
    assert columns["kl_mean"] == [0.123457, None] and columns["is_skipped"] == [1, 0]
    assert columns["reward"] == [0.5, None] and columns["malformed_share"] == [None, None]
    assert columns["stages.train"] == [0.5, 0] and columns["outcomes.completed"] == [14, None]
    assert columns["tokens_per_second"] == [pytest.approx(400 / 1.5, rel=1e-5), None]
    assert columns["wall_time"][0] == known.wall_time


def test_a_document_after_a_step_has_only_the_later_steps() -> None:
    run = learning_run(30)
    picture = RunPicture(summary=summary_of(run), history=run, config_text="", after=28)
    assert run_document(picture)["steps"]["step"] == [29, 30]


def test_every_figure_draws_existing_columns() -> None:
    """Check that figures use the records' names of statistics, outcomes and stages."""
    figures = json.loads((PACKED.parent / "src" / "figures.json").read_text(encoding="utf-8"))
    columns = document_of(learning_run(2))["steps"]
    specs = [spec for size in ("large", "small", "loss") for spec in figures[size]]
    assert {curve["read"] for spec in specs for curve in spec["curves"]} <= columns.keys()
    parts = [part for band in figures["outcomes"] for part in band["parts"]]
    assert sorted(parts) == sorted(Outcome)
    stages = [part for band in figures["stages"] for part in band["parts"]]
    assert sorted(stages) == sorted(StageSeconds().by_name())
    for bands in (figures["outcomes"], figures["stages"]):
        assert len({band["role"] for band in bands}) == len(bands)


def test_configuration_and_names_are_shown_as_text() -> None:
    text = render_report(
        summary=summary_of(history_of(), name="</script><b>"),
        history=history_of(),
        config_text="a: <script>alert(1)</script><!--",
    )
    assert text.count("<script") == 2 and text.count("</script>") == 2
    assert "<b>" not in text and "\\u003cscript>" in text


def test_the_report_is_written_completely_without_other_files(tmp_path: Path) -> None:
    write_report(
        tmp_path / "report.html",
        summary=summary_of(history_of()),
        history=history_of(),
        config_text="run: {}",
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


def test_verdict_says_that_the_reward_was_not_measured() -> None:
    summary = summary_of(RUNS["nothing measured"])
    assert verdict(summary) == "2 steps in 4 min 12 s; the reward was not measured."


def test_ending_is_a_sentence() -> None:
    run = RUNS["no steps"]
    assert ending(summary_of(run, exit_reason="all 5 steps are done")) == "All 5 steps are done."
    assert ending(summary_of(run)) == ""


def test_broken_promises_are_listed() -> None:
    run = history_of(
        steps=(
            step_record(
                1,
                policy_age_max=3,
                is_skipped=True,
                num_malformed_rewarded=2,
                logprob_check_ratio=1.5,
            ),
            step_record(2, policy_version=1),
        )
    )
    summary = summary_of(
        run, ledger=LedgerCounts(admitted=9, trained=4, in_flight=2), policy_age_bound=1
    )
    found = checks(summary, run.totals)
    assert not any(check["is_kept"] for check in found)
    assert len(found) == 7
    assert balance_equation(summary) == ("9 admitted ≠ 6 = 4 trained + 0 evicted + 2 in flight")


@pytest.mark.parametrize("steps", [5, 6])
def test_a_run_that_was_stopped_before_its_last_step_may_have_rollouts_in_flight(
    steps: int,
) -> None:
    summary = summary_of(
        history_of(steps=(step_record(steps),)),
        ledger=LedgerCounts(admitted=17, trained=4, in_flight=13),
        planned_steps=6,
        exit_reason=f"stopped after step {steps} of 6",
    )
    second = checks(summary, history_of().totals)[1]
    stopped = {"name": "13 rollouts are in flight; --resume plays them", "is_kept": True}
    assert (stopped.items() <= second.items()) == second["is_kept"] == (steps == 5)
    assert steps == 5 or second["text"] == "13 rollouts had not left the ledger at the end."


def test_a_live_run_may_have_rollouts_in_flight() -> None:
    summary = summary_of(history_of(), ledger=LedgerCounts(admitted=9, trained=4, in_flight=5))
    live = LiveState(
        phase="training", phase_detail="", started_at=0.0, checkpoint_step=0,
        engines={"engine-1": 3}, engines_expected=2, max_items=20, max_bytes=1 << 30, max_lag=1,
        notices=("began",),
        queue=QueueStats(
            num_handed_out=2, num_waiting=1, waiting_bytes=3 << 20, num_replaced_groups=0,
            num_refused=0, num_retries=0, loaded_version=3, ledger=summary.ledger,
        ),
    )  # fmt: skip
    picture = RunPicture(summary=summary, history=history_of(), config_text="")
    ended, going = (run_document(replace(picture, live=each)) for each in (None, live))
    broken = [
        [check["name"] for check in document["checks"] if not check["is_kept"]]
        for document in (ended, going)
    ]
    assert broken == [["nothing in flight"], []]
    window, queue, engines = going["live"]["tables"]
    assert [row[1] for row in window["rows"]] == ["2", "2", "1"]
    assert window["total"] == ("in flight", "5 of 20") and queue["rows"][0][1] == "3"
    assert engines["rows"] == (("engine-1", "3"),) and ended["live"] is None


@pytest.mark.parametrize(
    ("prompts", "shown"),
    [
        (["<u>Add:\n1 + 1?<|im_end|>\n", "<u>Add:\n1 + 2?<|im_end|>\n"], ["1 + 1?", "1 + 2?"]),
        (["a < 1\nq", "b < 1\nq"], ["a < 1", "b < 1"]),
        (["one line", "one line"], ["one line", "one line"]),
        (["a[/INST]", ""], ["a[/INST]", ""]),
    ],
)
def test_the_table_of_answers_shows_what_differs_in_the_prompts(
    prompts: list[str], shown: list[str]
) -> None:
    first, last = (
        replace(
            evaluation_record(step),
            policy_version=step,
            samples=tuple(
                EvaluationSample(
                    task_id=str(index),
                    outcome=Outcome.COMPLETED,
                    episode_return=1.0,
                    text=SampledText(prompt=prompt, answer="2"),
                )
                for index, prompt in enumerate(prompts)
            ),
        )
        for step in (0, 4)
    )
    run = history_of(steps=(step_record(1),), evaluations=(first, last))
    tables = {each.caption: each for each in summary_tables(summary_of(run))}
    rows = tables["Held-out answers, before and after"].rows
    assert [row[0] for row in rows] == shown
