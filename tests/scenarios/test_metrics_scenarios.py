"""Test of /metrics and the dashboards with a real Prometheus and a training with a killed actor."""

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

FROZEN_S = 60.0
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
# Only a GPU has a known peak. Trajectories that wait and checkpoints without a copy exist for less
# time than passes between two scrapes; test_prometheus.py and test_panel_numbers.py test these.
UNSEEN = ("mfu", "queue_oldest", "upload_waiting")
# Their labels have no fixed values: versions, and names that Serve gives.
OPEN = {"rayloom_build_info", "rayloom_engine_policy_version"}


def all_counted(history: History, events: Sequence[LedgerEvent]) -> dict[Series, float | None]:
    """Return the values of a scrape if the history contains all that has happened."""
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


def freeze_run(
    run: Run, prometheus: Prometheus
) -> tuple[list[dict[Series, float]], History, tuple[LedgerEvent, ...]]:
    """Return all scrapes, and the stored rows once the last scrape shows all of them.

    With its only environment actor frozen, the run ends the current step and then waits. Rows are
    stored before their metrics change, so that a history that is read after a scrape contains all
    that the scrape shows. The queue's gauges are read once a second, so that they may be a second
    older than the rows.
    """
    run.freeze_part("ray::EnvironmentActor")
    deadline = time.monotonic() + FROZEN_S
    while True:
        scrapes = prometheus.scrapes()
        history, events = run.history(), run.events()
        wrong = {
            **differences(scrapes[-1], all_counted(history, events)),
            **fewer_than_stored(scrapes[-1], events),
        }
        if not wrong:
            return scrapes, history, events
        assert time.monotonic() < deadline, f"(seen, stored) after {FROZEN_S:g} s: {wrong}"
        time.sleep(0.5)


def check_every_scrape(
    scrapes: list[dict[Series, float]], history: History, events: Sequence[LedgerEvent]
) -> None:
    """Check that each scrape shows exactly the rows up to some moment."""
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
    """Return the gauges of the queue that are below the rows; they may only be ahead of them."""
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
    """Check that names and labels are declared, with values from closed sets without actor ids."""
    by_series = {name: item for item in declared() for name in item.series}
    for name, labels in {key for seen in scrapes for key in seen}:
        assert {label for label, _ in labels} - {"le"} <= set(by_series[name].labels)
        for label, value in labels if name not in OPEN else ():
            assert label == "le" or value in LABEL_VALUES[label]


def check_replacement(scrapes: list[dict[Series, float]]) -> None:
    """Check that the death of the actor is counted once, and adds or removes no series."""
    died = series("rayloom_replacements_total", part="environment_actor")
    before = [seen for seen in scrapes if seen[died] == 0]
    after = [seen for seen in scrapes if seen[died] == 1]
    assert before and after and [*before, *after] == scrapes
    last = scrapes[-1]
    assert sum_of(last, "rayloom_replacements_total") == 1
    # A value that a single step does not have may be absent; no other series comes or goes.
    gauges = {item.name for item in declared() if item.kind == "gauge"}
    assert {key for key in before[-1].keys() ^ last.keys() if key[0] not in gauges} == set()


def sum_of(seen: dict[Series, float], name: str) -> float:
    return math.fsum(value for (found, _), value in seen.items() if found == name)


def test_metrics_are_exact_and_panels_have_data_after_an_actor_is_killed(
    tmp_path: Path, small_model: str
) -> None:
    find_tools()
    started = time.time()
    config = small_config(
        tmp_path,
        small_model,
        # A dashboard shows copies of checkpoints if the run makes some.
        run={
            "steps": 1000,
            "evaluate_every": 1000,
            "checkpoint_every": 2,
            "checkpoint_url": f"file://{tmp_path}/copies",
        },
        trainer={"num_ranks": 1},
        rollouts={"num_actors": 1, "frozen_after_s": 600},
        # A dashboard shows a KL if the loss has one.
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
            # Only scrapes during a step with a check show it; not every step has time for one.
            check = series("rayloom_logprob_check_max_nats")
            prometheus.wait_for(check, at_least=0.0, limit_s=START_S)
            scrapes, history, events = freeze_run(run, prometheus)
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
