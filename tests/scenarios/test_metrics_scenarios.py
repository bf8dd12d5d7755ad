"""/metrics and the dashboards against a real Prometheus that scraped a real, disturbed training."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
from worlds.checks.metric_expectations import differences, of_events, of_newest, of_steps
from worlds.checks.metric_names import NOT_OF_THE_DEMO, declared, is_of_run
from worlds.runs.run_driver import START_S, Run, running, small_config
from worlds.servers.prometheus_server import Prometheus, Series, find_tools, scraping, series

from actors.metrics import Part, PublishPhase
from actors.trajectory_queue.ledger import EvictionReason, LedgerEvent, LedgerEventKind
from actors.trajectory_queue.messages import Side
from actors.types import BranchReason, LeftOutReason, Outcome, Timings
from deploy.dashboards.grafana import load_dashboards
from service.report.document import PHASES
from service.store.tables import Pausable
from service.telemetry.records import StageSeconds
from service.telemetry.summary import History

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

STILL_S = 60.0
LABEL_VALUES = {
    "environment": {"guessing"},
    "component": {"hit"},
    "outcome": {outcome.value for outcome in Outcome},
    "reason": {reason.value for reason in (*EvictionReason, *BranchReason)},
    "fate": {fate.value for fate in (LedgerEventKind.TRAINED, *EvictionReason, *LeftOutReason)},
    "part": {*get_args(Part), *(part.value for part in Pausable)},
    "side": {"before", "after"} | set(get_args(Side)),
    "stage": set(StageSeconds().by_name()),
    "kind": {kind.value for kind in LedgerEventKind} | {"sampled", "trained"},
    "phase": {*PHASES, *get_args(PublishPhase)}
    | Timings(reset_s=1.0, generate_s=1.0, step_s=1.0).by_phase().keys(),
    "rank": {"0"},
    "secret": {"api_key", "database"},
}
# Only a GPU has a known peak. A trajectory waits, and a checkpoint lacks its copy, for less time
# than between two scrapes: test_prometheus.py and test_panel_numbers.py.
UNSEEN = ("mfu", "queue_oldest", "upload_waiting")
# Their labels are versions, and names that Serve gives.
OPEN = {"rayloom_build_info", "rayloom_engine_policy_version"}


def all_counted(history: History, events: Sequence[LedgerEvent]) -> dict[Series, float | None]:
    """What a scrape shows when nothing has happened that the history does not hold."""
    num_trained = sum(event.kind == "trained" for event in events)
    return {
        **of_steps(history.steps),
        **of_events(events),
        series("rayloom_ledger_trained_rollouts"): num_trained,
        series("rayloom_engines_ready"): 1,
        series("rayloom_evaluation_scaled_reward_mean_ratio"): (
            history.evaluations[-1].scaled_reward_mean
        ),
    }


def stand_still(
    run: Run, prometheus: Prometheus
) -> tuple[list[dict[Series, float]], History, tuple[LedgerEvent, ...]]:
    """Every scrape, and the rows when the last of them shows all of them.

    With its only environment actor frozen, the run ends the step in hand and comes to rest. Rows
    come before their metrics, so that a history read after a scrape holds all that it shows. The
    queue's gauges are read once a second, and may be that much older than the rows.
    """
    run.freeze_part("ray::EnvironmentActor")
    deadline = time.monotonic() + STILL_S
    while True:
        scrapes = prometheus.scrapes()
        history, events = run.history(), run.events()
        wrong = {
            **differences(scrapes[-1], all_counted(history, events)),
            **fewer_than_stored(scrapes[-1], events),
        }
        if not wrong:
            return scrapes, history, events
        assert time.monotonic() < deadline, f"(seen, stored) after {STILL_S:g} s: {wrong}"
        time.sleep(0.5)


def check_every_scrape(
    scrapes: list[dict[Series, float]], history: History, events: Sequence[LedgerEvent]
) -> None:
    """Whenever it came: a scrape shows the rows up to some moment, and nothing half done."""
    for seen in scrapes:
        num_steps = int(seen[series("rayloom_train_steps_total")])
        num_events = int(sum_of(seen, "rayloom_ledger_events_total"))
        records = history.steps[:num_steps]
        wrong = differences(
            seen,
            {
                **of_steps(records),
                **of_events(events[:num_events]),
                **of_newest(records[-1] if records else None),
            },
        )
        assert not wrong, f"(seen, stored) at step {num_steps}: {wrong}"
        ended = sum_of(seen, "rayloom_rollouts_total")
        assert ended == sum_of(seen, "rayloom_trajectory_seconds_count")
        states = ("trained", "evicted", "in_flight")
        accounted = sum(sum_of(seen, f"rayloom_ledger_{state}_rollouts") for state in states)
        assert sum_of(seen, "rayloom_ledger_admitted_rollouts") == accounted


def fewer_than_stored(
    seen: dict[Series, float], events: Sequence[LedgerEvent]
) -> dict[Series, tuple[float, float]]:
    """The queue's gauges may only be ahead of the rows, by what no step has finalised yet."""
    reasons = Counter(event.reason for event in events if event.reason)
    stored = {
        series("rayloom_ledger_admitted_rollouts"): sum(
            event.kind is LedgerEventKind.ADMITTED for event in events
        )
    } | {
        series("rayloom_ledger_evicted_rollouts", reason=reason.value): reasons[reason.value]
        for reason in EvictionReason
    }
    return {key: (seen[key], count) for key, count in stored.items() if seen[key] < count}


def check_series(scrapes: list[dict[Series, float]]) -> None:
    """Only declared names and labels with values from closed sets, which no actor's id is in."""
    by_series = {name: item for item in declared() for name in item.series}
    for name, labels in {key for seen in scrapes for key in seen}:
        assert {label for label, _ in labels} - {"le"} <= set(by_series[name].labels)
        for label, value in labels if name not in OPEN else ():
            assert label == "le" or value in LABEL_VALUES[label]


def check_replacement(scrapes: list[dict[Series, float]]) -> None:
    """The death of the actor is counted once, and brings or leaves no series."""
    died = series("rayloom_replacements_total", part="environment_actor")
    before = [seen for seen in scrapes if seen[died] == 0]
    after = [seen for seen in scrapes if seen[died] == 1]
    assert before and after and [*before, *after] == scrapes
    last = scrapes[-1]
    assert sum_of(last, "rayloom_replacements_total") == 1
    # A value that is not known of a single step may be absent; nothing else comes or goes.
    gauges = {item.name for item in declared() if item.kind == "gauge"}
    assert {key for key in before[-1].keys() ^ last.keys() if key[0] not in gauges} == set()


def sum_of(seen: dict[Series, float], name: str) -> float:
    return math.fsum(value for (found, _), value in seen.items() if found == name)


def test_metrics_are_exact_and_every_panel_has_data_though_an_actor_is_killed(
    tmp_path: Path, small_model: str
) -> None:
    find_tools()
    started = time.time()
    config = small_config(
        tmp_path,
        small_model,
        # A dashboard shows copies of checkpoints where they are made.
        run={
            "steps": 1000,
            "evaluate_every": 1000,
            "checkpoint_every": 2,
            "checkpoint_url": f"file://{tmp_path}/copies",
        },
        trainer={"num_ranks": 1},
        rollouts={"num_actors": 1, "frozen_after_s": 600},
        # A dashboard shows a KL where the loss has one.
        algorithm={"loss": {"kl": {"coefficient": 0.01}}},
    )
    with running(config, tmp_path / "run") as run:
        address = run.metrics_address(limit_s=START_S)
        with scraping(address, tmp_path / "prometheus", run="small") as prometheus:
            done = series("rayloom_train_steps_total")
            prometheus.wait_for(done, at_least=2, limit_s=START_S)
            run.kill_part("ray::EnvironmentActor")
            run.wait_for_log("rollouts are played again by", limit_s=START_S)
            run.advance(3, limit_s=START_S)
            # Only the scrapes during a step with a check show it; not every step has the time.
            check = series("rayloom_logprob_check_max_nats")
            prometheus.wait_for(check, at_least=0.0, limit_s=START_S)
            scrapes, history, events = stand_still(run, prometheus)
            assert len(history.steps) >= 5 and history.num_terms == 1

            check_every_scrape(scrapes, history, events)
            check_series(scrapes)
            check_replacement(scrapes)

            assert prometheus.runs() == ["small"]
            panels = [
                panel
                for dashboard in load_dashboards()
                for title, section in dashboard.sections.items()
                if title not in NOT_OF_THE_DEMO
                for panel in section
            ]
            for query in (query for panel in panels for query in panel.series.values()):
                if is_of_run(query) and not any(name in query for name in UNSEEN):
                    prometheus.wait_for_points(query, since=started)
