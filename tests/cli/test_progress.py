"""Tests of what a user sees during a run: the line of a step, the plain and the live display."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from worlds.builders.record_builders import (
    START,
    evaluation_record,
    status_of,
    step_record,
    unmeasured_step,
)

from actors.trajectory_queue.ledger import LedgerCounts
from actors.types import Outcome
from service import units
from service.cli.display import (
    MAX_REWARDS,
    STAGE_STYLES,
    LineDisplay,
    LiveDisplay,
    ProgressState,
    open_display,
    picture,
    sparkline,
)
from service.run.health import RunStatus
from service.telemetry.records import StageSeconds, step_line


def lines_of(statuses: list[RunStatus]) -> list[str]:
    stream = io.StringIO()
    display = LineDisplay(Console(file=stream, width=40))
    for status in statuses:
        display.update(status)
    display.close()
    return stream.getvalue().splitlines()


def test_step_line_shows_the_step_on_one_line_and_the_remaining_time() -> None:
    record = step_record(12, scaled_reward_mean=0.412, mismatch_k3_mean=2e-9)
    assert step_line(record, 120, left_s=252.4) == (
        "step  12/120  reward 0.41  loss 0.01  267 tok/s  1.5 s (collect 0.8)"
        "  16 rollouts, 2 max_turns  trained 89\u00a0%  4 min left"
    )
    aged = step_record(12, scaled_reward_mean=0.412, policy_version=13, policy_age_max=1)
    line = step_line(aged, 120, left_s=40)
    assert "v13  reward 0.41  age 1" in line and line.endswith("40 s left")
    assert step_line(record, 120, left_s=3700).endswith("1 h 02 min left")


def test_step_line_leaves_out_what_was_not_measured() -> None:
    assert step_line(unmeasured_step(3), 9) == (f"step 3/9  reward {units.UNKNOWN}  0 rollouts")


@given(
    st.integers(1, 10**6),
    st.floats(-1e9, 1e9),
    st.dictionaries(st.sampled_from(list(Outcome)), st.integers(0, 10**5), max_size=8),
    st.floats(0, 1e7),
)
def test_a_step_line_fits_120_columns_whatever_happens(
    step: int, reward: float, outcomes: dict[Outcome, int], left_s: float
) -> None:
    record = replace(
        step_record(step, scaled_reward_mean=reward, mismatch_k3_mean=1e-12, loss=-123456.7),
        outcomes=outcomes,
        num_trajectories=sum(outcomes.values()),
        policy_version=step + 1,
    )
    line = step_line(record, 10**6, left_s=left_s)
    assert len(line) <= 120 and line.endswith("left") and line.startswith("step")


def test_step_line_shows_that_an_update_was_skipped() -> None:
    record = step_record(1, loss=float("nan"), is_skipped=True)
    line = step_line(record, 1)
    assert "loss" not in line
    assert line.endswith("update skipped: not finite")


def test_plain_display_prints_one_line_a_step_phase_evaluation_and_notice() -> None:
    # The command and not the display reports how the run ended.
    lines = lines_of(
        [
            status_of(0, phase="starting", phase_detail="2 engines"),
            status_of(0, phase="starting", phase_detail="2 engines"),
            status_of(1),
            status_of(2, evaluations=(evaluation_record(2),), notices=("engine 1 died",)),
            status_of(2, phase="writing a checkpoint", records=()),
            status_of(2, records=()),
            status_of(3, phase="finished", is_done=True, exit_reason="all 3 steps are done"),
        ]
    )
    assert [line.split("  ")[0] for line in lines] == [
        "starting: 2 engines",
        "2 engines: 0.0 s",
        "training",
        "step",
        "step",
        "evaluation",
        "warning: engine 1 died",
        "writing a checkpoint",
        "step",
    ]


def test_plain_display_prints_every_step_of_a_status_that_carries_several() -> None:
    records = tuple(step_record(step) for step in (1, 2, 3))
    lines = lines_of([status_of(3, records=records)])
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "1/120",
        "2/120",
        "3/120",
    ]


def test_plain_display_writes_no_escape_codes_and_does_not_wrap() -> None:
    lines = lines_of([status_of(1)])
    assert len(lines) == 2
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("environ", "is_terminal", "expected"),
    [
        ({}, True, LiveDisplay),
        ({}, False, LineDisplay),
        ({"CI": "true"}, True, LineDisplay),
        ({"NO_COLOR": "1"}, True, LineDisplay),
        # The command was started in a cell of a notebook.
        ({"JPY_PARENT_PID": "7"}, True, LineDisplay),
    ],
)
def test_display_is_live_only_in_an_interactive_terminal(
    environ: dict[str, str], is_terminal: bool, expected: type
) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, _environ={"TERM": "xterm"})
    display = open_display(environ=environ, console=console)
    display.close()
    assert isinstance(display, expected)


@pytest.mark.parametrize(("width", "expected"), [(49, LineDisplay), (50, LiveDisplay)])
def test_a_terminal_too_narrow_for_the_live_display_gets_lines(width: int, expected: type) -> None:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, _environ={"TERM": "xterm"}
    )
    display = open_display(environ={}, console=console)
    display.close()
    assert isinstance(display, expected)


def test_a_live_display_can_be_stopped_and_drawn_again() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, _environ={"TERM": "xterm"})
    display = LiveDisplay(console)
    display.update(status_of(1))
    display.leave()
    # The cursor is visible again.
    assert file.getvalue().rstrip().endswith("\x1b[?25h")
    display.update(status_of(2))
    display.close()
    assert "step 2/" in file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("height", [10, 24, 60])
def test_live_display_fits_its_terminal(width: int, height: int) -> None:
    state, lines = ProgressState(), []
    for step in range(12):
        lines += [text for text, _ in state.absorb(status_of(step), now=START + 2.0 * step)]
    console = Console(file=io.StringIO(), width=width, height=height, record=True)
    console.print(picture(state, lines=lines, width=width, num_lines=height - 15))
    text = console.export_text()
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert len(text.splitlines()) <= max(height, 13)
    assert "guessing" in text and "step 11/120" in text


@pytest.mark.parametrize("width", [80, 140])
def test_live_display_shows_the_state_of_the_run(width: int) -> None:
    state = ProgressState()
    shown = state.absorb(status_of(1, evaluations=(evaluation_record(0),)), now=START + 65)
    shown += state.absorb(status_of(2), now=START + 67)
    console = Console(file=io.StringIO(), width=width, record=True)
    lines = [text for text, _ in shown]
    console.print(picture(state, lines=lines, width=width, num_lines=4))
    text = console.export_text()
    for expected in (
        "1:07 elapsed",
        "about 2:57 left",
        "version 2",
        "8 a second",
        "200 tokens a second",
        "6 waiting · 3.0 MiB · 1 engine ready",
        "20 admitted = 12 trained + 2 evicted + 6 in flight",
        "collect 0.8",
        "0.60 at version 0",
        "runs/demo · http://127.0.0.1:9090/metrics",
    ):
        assert expected in text, expected


def test_live_display_survives_unmeasured_steps_and_keeps_notices() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, height=24, force_terminal=True)
    display = LiveDisplay(console, clock=lambda: START + 5)
    display.update(status_of(0, phase="starting", metrics_address=None, run_dir=""))
    display.update(status_of(1, records=(unmeasured_step(1),), notices=("rank 1 [died]",)))
    display.update(status_of(1, records=(), evaluations=(evaluation_record(1, reward=None),)))
    display.update(status_of(0, records=(), steps=0, ledger=LedgerCounts(admitted=1)))
    display.close()
    written = stream.getvalue()
    assert "! rank 1 [died]" in written
    assert "does not balance" in written


def test_a_step_repeated_after_a_recovery_replaces_the_shown_step() -> None:
    state = ProgressState()
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3)):
        record = step_record(step, scaled_reward_mean=reward)
        state.absorb(status_of(step, records=(record,)), now=START + step)
    again = step_record(2, scaled_reward_mean=0.9)
    state.absorb(status_of(2, records=(again,), rollouts_done=0), now=START + 9)
    assert list(state.rewards) == [0.1, 0.9]
    assert [record.step for record in state.recent] == [1, 2]
    assert not state.rates


def test_every_stage_has_a_style() -> None:
    assert set(STAGE_STYLES) == set(StageSeconds().by_name())


def test_sparkline_rises_with_its_values_and_leaves_gaps() -> None:
    assert sparkline([0.0, 0.5, 1.0], width=3, low=0.0, high=1.0) == "▁▅█"
    assert sparkline([0.0, None, 1.0], width=10, low=None, high=None) == "▁ █"
    assert sparkline([None], width=10, low=None, high=None) == ""


@given(
    values=st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), max_size=80),
    width=st.integers(-2, 50),
)
def test_sparkline_never_exceeds_its_width(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width=width, low=0.0, high=1.0)) <= max(width, 0)


def test_the_rewards_of_a_long_run_are_sampled_evenly() -> None:
    state = ProgressState()
    for step in range(1, 2 * MAX_REWARDS, 99):
        records = tuple(step_record(each) for each in range(step, step + 99))
        state.absorb(status_of(step, records=records), now=START)
    assert MAX_REWARDS // 2 <= len(state.rewards) <= MAX_REWARDS
