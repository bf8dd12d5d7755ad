"""The numbers that panels show, by real promtool: right for steps of seconds and of an hour."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from worlds.prometheus_server import fill
from worlds.promtool import run_test
from worlds.synthetic_run import (
    CHECKPOINT_EVERY,
    EVICTED,
    SAMPLED_TOKENS,
    STAGES,
    TRAINED,
    TRAINED_TOKENS,
    SyntheticRun,
    series,
)

from actors.metrics import PublishPhase
from deploy.dashboards.grafana import load_dashboards
from service.run.health import Phase

HOUR = 3600
# Of a step's time, until the queue is full; then the environment actors are blocked.
FREE = 0.7
NUM_ACTORS = 2
PLANNED_STEPS = 100_000
# Seconds of a trajectory.
PHASES = {"reset": 2.0, "generate": 30.0, "step": 8.0}
# Seconds of a publish.
PUBLISH = {PublishPhase.SEND: 3.0, PublishPhase.CHECK: 1.0, PublishPhase.LOAD: 6.0}
OUTCOMES = {"completed": 12, "environment_error": 3, "max_turns": 1}

PANELS = {
    (spec.uid.removeprefix("rayloom-"), panel.title): panel.series
    for spec in load_dashboards()
    for panel in spec.panels
}


@dataclass(frozen=True, slots=True)
class Number:
    """What a panel shows under one legend: one number, or one for each value of a label."""

    dashboard: str
    panel: str
    legend: str
    expected: float | dict[str, float]


def a_run(*, step_s: float, scrape_s: int, seconds: int) -> SyntheticRun:
    """One that plays its rollouts from the begin of a step on, and then waits for the trainer."""
    run = SyntheticRun(step_s=step_s, scrape_s=scrape_s, seconds=seconds)
    done = run.done

    def blocked(t: float) -> float:
        within = t - done(t) * step_s
        return NUM_ACTORS * (done(t) * (1 - FREE) * step_s + max(within - FREE * step_s, 0.0))

    run.values[series("rayloom_queue_blocked_seconds_total", side="producer")] = blocked
    run.values["rayloom_run_planned_steps"] = lambda t: PLANNED_STEPS
    per_step = {
        series("rayloom_merge_samples_total", side="before"): 24.0,
        series("rayloom_merge_samples_total", side="after"): 8.0,
        series("rayloom_merge_branches_total", reason="template"): 2.0,
        "rayloom_zero_variance_groups_total": 1.0,
        "rayloom_negative_return_groups_total": 0.0,
        "rayloom_malformed_turns_total": 5.0,
        "rayloom_inserted_tokens_total": 7.0,
    }
    for outcome, count in OUTCOMES.items():
        name = "rayloom_rollouts_total"
        per_step[series(name, environment="game", outcome=outcome)] = count
    for kind, seconds_by_phase, times in (
        ("environment", PHASES, TRAINED + EVICTED),
        ("publish", PUBLISH, 1),
    ):
        name = "rayloom_environment_phase_seconds" if times > 1 else "rayloom_publish_seconds"
        labels = {"environment": "game"} if kind == "environment" else {}
        for phase, spent_s in seconds_by_phase.items():
            per_step[series(f"{name}_sum", phase=phase, **labels)] = spent_s * times
            per_step[series(f"{name}_count", phase=phase, **labels)] = times
    for name, amount in per_step.items():
        run.values[name] = lambda t, amount=amount: amount * done(t)
    return run


def of_the_newest_step(step_s: float, done: int) -> list[Number]:
    bottleneck = "pipeline", "Who is the bottleneck"
    return [
        Number(*bottleneck, "waiting for rollouts", STAGES["collect"]),
        Number(*bottleneck, "training", STAGES["train"]),
        Number(*bottleneck, "publishing", STAGES["publish"]),
        Number(*bottleneck, "merging", STAGES["merge"]),
        Number("overview", "Waiting for rollouts", "share", STAGES["collect"]),
        Number("overview", "Steps per hour", "steps", HOUR / step_s),
        Number("overview", "Time left", "left", (PLANNED_STEPS - done) * step_s),
        Number(
            "overview", "Tokens per second", "{{kind}}",
            {"sampled": SAMPLED_TOKENS / step_s, "trained": TRAINED_TOKENS / step_s},
        ),
        Number(
            "trainer", "Tokens trained per second", "of the training",
            TRAINED_TOKENS / (STAGES["train"] * step_s),
        ),
        Number("trainer", "Tokens trained per second", "of the step", TRAINED_TOKENS / step_s),
        Number("trainer", "Steps since the newest checkpoint", "steps", done % CHECKPOINT_EVERY),
        Number("pipeline", "Ledger out of balance", "difference", 0),
        Number("inference", "Versions behind", "behind", 0),
    ]  # fmt: skip


def over_several_steps() -> list[Number]:
    """Counted from the first step on, so that each is exact after one step."""
    odd, signal = "Malformed turns and inserted tokens", "Groups without a signal"
    return [
        Number(
            "pipeline", "Share of the rollouts that is trained", "trained",
            TRAINED / (TRAINED + EVICTED),
        ),
        Number(
            "pipeline", "Rollouts that leave, per step", "{{kind}}",
            {"trained": TRAINED, "evicted": EVICTED},
        ),
        Number("pipeline", "Turns per sample", "turns", 3),
        Number(
            "pipeline", "Turns that opened a new sample, by reason", "{{reason}}", {"template": 2}
        ),
        Number("rollouts", "Share that ended in an error", "{{environment}}", {"game": 3 / 16}),
        Number("rollouts", "Truncated trajectories", "{{outcome}}", {"max_turns": 1 / 16}),
        Number("rollouts", "Time of a trajectory, by phase", "{{phase}}", PHASES),
        Number("rollouts", odd, "malformed turns", 5),
        Number("rollouts", odd, "inserted tokens", 7),
        Number("rollouts", signal, "zero variance", 1),
        Number("rollouts", signal, "negative return", 0),
        Number("learning", signal, "zero variance", 1),
        Number("inference", "Time of a publish, by phase", "{{phase}}", dict(PUBLISH)),
    ]  # fmt: skip


def levelled_out(step_s: float) -> list[Number]:
    """Of several steps: a stage's series begin with the first one, which they cannot count."""
    return [
        Number(
            "trainer", "Time of a stage, mean", "{{stage}}",
            {stage: share * step_s for stage, share in STAGES.items()},
        ),
        Number("pipeline", "Who is the bottleneck", "environment actors blocked", 1 - FREE),
    ]  # fmt: skip


def check(run: SyntheticRun, second: float, numbers: list[Number], file: Path) -> None:
    tests = [as_promtool(number, second, run.run) for number in numbers]
    test = {
        "interval": f"{run.scrape_s}s",
        "input_series": run.input_series(),
        "promql_expr_test": tests,
    }
    run_test(test, file)


def as_promtool(number: Number, second: float, run: str) -> dict[str, Any]:
    """Two digits are compared: a window's edges lie between two scrapes."""
    query = fill(PANELS[number.dashboard, number.panel][number.legend], run=run)
    if isinstance(number.expected, dict):
        [label] = re.findall(r"\{\{(\w+)\}\}", number.legend)
        query = f"sum by ({label}) ({query})"
        samples = [(f'{{{label}="{key}"}}', value) for key, value in number.expected.items()]
    else:
        query, samples = f"sum({query})", [("{}", number.expected)]
    return {
        "expr": f"round({query}, 0.01)",
        "eval_time": f"{second:g}s",
        "exp_samples": [
            {"labels": labels, "value": math.floor(value * 100 + 0.5) / 100}
            for labels, value in samples
        ],
    }


@pytest.mark.parametrize("scrape_s", [15, 60])
@pytest.mark.parametrize(
    ("step_s", "hours"), [(2.0, 0.5), (600.0, 2.2), (3600.0, 7.5)], ids=["2s", "600s", "3600s"]
)
def test_a_panel_shows_what_a_run_of_any_pace_did(
    tmp_path: Path, step_s: float, hours: float, scrape_s: int
) -> None:
    second = hours * HOUR
    run = a_run(step_s=step_s, scrape_s=scrape_s, seconds=int(second))
    numbers = [
        *of_the_newest_step(step_s, run.done(second)),
        *over_several_steps(),
        *levelled_out(step_s),
    ]
    check(run, second, numbers, tmp_path / "test.yaml")


@pytest.mark.parametrize("scrape_s", [15, 60])
@pytest.mark.parametrize("step_s", [600.0, 3600.0])
def test_after_one_slow_step_a_panel_shows_that_step(
    tmp_path: Path, step_s: float, scrape_s: int
) -> None:
    second = 1.5 * step_s
    run = a_run(step_s=step_s, scrape_s=scrape_s, seconds=int(second))
    numbers = [*of_the_newest_step(step_s, 1), *over_several_steps()]
    check(run, second, numbers, tmp_path / "test.yaml")


def test_what_counts_the_time_since_a_step_is_empty_once_the_run_has_ended(tmp_path: Path) -> None:
    run = a_run(step_s=600.0, scrape_s=15, seconds=2 * HOUR)
    run.enter(Phase.FINISHED, since=1.5 * HOUR)
    query = PANELS["overview", "Since the newest step and checkpoint"]["step"]
    looks = [
        {"expr": f"sum({fill(query, run=run.run)})", "eval_time": when, "exp_samples": samples}
        for when, samples in (
            ("4500s", [{"labels": "{}", "value": 300}]),
            ("6000s", []),
        )
    ]
    test = {"interval": "15s", "input_series": run.input_series(), "promql_expr_test": looks}
    run_test(test, tmp_path / "test.yaml")
