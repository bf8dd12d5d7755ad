"""Tests of the Prometheus rules with promtool: alerts fire for their fault and then resolve."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from worlds.builders.synthetic_run import (
    EVICTED,
    STAGES,
    TRAINED,
    TRAINED_TOKENS,
    SyntheticRun,
    series,
)
from worlds.checks.metric_names import NAME, RAYS, declared
from worlds.servers.promtool import promtool, run_test

from deploy.rules.__main__ import FOLDER, PLACE_LABELS, rule_files, rules_text
from service.report.document import Phase

HOUR = 3600
# The seconds of a step for each kind of run.
PACES = (2.0, 600.0, 3600.0)
RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks.md"
RULES = [rule for group in yaml.safe_load(rules_text())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
CONSUMER = series("rayloom_queue_blocked_seconds_total", side="consumer")
PRODUCER = series("rayloom_queue_blocked_seconds_total", side="producer")
NOT_READY = series("rayloom_http_requests_total", route="/readyz", status="503")
COMPLETED = series("rayloom_rollouts_total", environment="game", outcome="completed")
# At this time all faults have ended, and so have the windows that contain them.
LATER = 11 * HOUR


@dataclass(frozen=True, slots=True)
class At:
    """The expected values of a query at a moment, by the label that the query keeps."""

    second: float
    query: str
    expected: dict[str, float]
    label: str = "run"


def firing(run: SyntheticRun, second: float, *alerts: str) -> At:
    """Return the expectation that exactly these alerts of a run fire at a moment."""
    query = f'count by (alertname) (ALERTS{{alertstate="firing",run="{run.run}"}})'
    return At(second, query, dict.fromkeys(alerts, 1.0), "alertname")


def check(directory: Path, runs: Sequence[SyntheticRun], looks: Sequence[At]) -> None:
    """Have promtool evaluate the rules over the series of runs that are scraped at one pace."""
    rules = directory / "rules.yaml"
    rules.write_text(rules_text())
    [scrape_s] = {run.scrape_s for run in runs}
    test = {
        "interval": f"{scrape_s}s",
        "input_series": [each for run in runs for each in run.input_series()],
        "promql_expr_test": [expectation(look) for look in looks],
    }
    run_test(test, directory / "test.yaml", rule_files=[rules])


def expectation(look: At) -> dict[str, Any]:
    samples = [
        {"labels": f'{{{look.label}="{key}"}}', "value": value}
        for key, value in look.expected.items()
    ]
    return {"expr": look.query, "eval_time": f"{look.second:g}s", "exp_samples": samples}


@pytest.mark.parametrize("scale", [1.0, 1 / 60])
def test_prometheus_reads_the_rules_on_either_scale_of_time(tmp_path: Path, scale: float) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(rules_text(scale=scale))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0 and f"{len(RULES)} rules found" in done.stdout, done.stdout


def test_the_rule_files_of_the_chart_are_up_to_date() -> None:
    found = {file.name: file.read_text("utf-8") for file in FOLDER.glob("*")}
    assert found == rule_files(), "run python -m deploy.rules"


def test_a_scale_shortens_every_duration_and_nothing_else() -> None:
    whole, short = rules_text(), rules_text(scale=1 / 60)
    assert "for: 30m" in whole and "for: 30000ms" in short
    assert "[6h]" in whole and "[360000ms]" in short
    assert "+ 600)" in whole and "+ 10)" in short
    assert "0 * rayloom:run_training + 7200" in whole and "run_training + 120" in short
    assert "{" not in re.sub(r"\{\{.*?\}\}|\{[A-Za-z]\w*(=|!=|!~|: )[^}]*\}", "", whole)


def test_the_rules_use_only_declared_metrics_and_no_labels_of_targets() -> None:
    known = {name for metric in declared() for name in metric.series}
    for rule in RULES:
        assert set(NAME.findall(rule["expr"])) <= known, rule
        assert (
            set(re.findall(r"\bray_[a-z_]+(?=[{ )])", rule["expr"])) - {"ray_io_cluster"}
            <= RAYS.keys()
        )
        assert not re.search(r"\b(instance|job|pod)\b", rule["expr"])


def test_each_alert_has_a_severity_a_summary_and_its_own_runbook() -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOKS.read_text("utf-8"), re.MULTILINE)
    assert sections == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "$labels.run" in rule["annotations"]["summary"]
        assert rule["annotations"]["runbook_url"] == f"RUNBOOKS#{rule['alert'].lower()}"


@pytest.mark.proof
@pytest.mark.chart
@pytest.mark.parametrize("scrape_s", [60, 15])
def test_the_recorded_numbers_are_right_and_a_healthy_run_is_quiet_at_every_pace(
    tmp_path: Path, scrape_s: int
) -> None:
    runs = [
        SyntheticRun(step_s=step_s, scrape_s=scrape_s, seconds=14 * HOUR, run=f"of-{step_s:g}-s")
        for step_s in PACES
    ]
    moments = [5 * 60, 2 * HOUR, 9 * HOUR, 14 * HOUR - 120]
    looks = [firing(run, moment) for run in runs for moment in moments]
    step_s = {run.run: run.step_s for run in runs}
    numbers = {
        "step_seconds:mean6h": step_s,
        "steps_per_hour:mean6h": {name: HOUR / step for name, step in step_s.items()},
        "trained_tokens_per_second:newest": {
            name: TRAINED_TOKENS / step for name, step in step_s.items()
        },
        "collect_share:mean6h": dict.fromkeys(step_s, STAGES["collect"]),
        "trained_share:mean6h": dict.fromkeys(step_s, TRAINED / (TRAINED + EVICTED)),
    }
    # Look between the ends of two steps, as a panel may.
    last = 13.75 * HOUR + 60
    looks += [
        At(
            last,
            f"round(rayloom:{name} * 1e6) / 1e6",
            {run: round(value * 1e6) / 1e6 for run, value in by_run.items()},
        )
        for name, by_run in numbers.items()
    ]
    check(tmp_path, runs, looks)


@pytest.mark.proof
@pytest.mark.chart
def test_an_ended_run_fires_no_alert_before_or_after_its_pod_is_gone(tmp_path: Path) -> None:
    """Expect only RayloomRunFailed for a failed run, while its pod exists."""
    runs, looks = [], []
    for step_s in PACES:
        for phase in ("finished", "without its lease", "failed"):
            name = f"{phase} at {step_s:g} s"
            run = SyntheticRun(step_s=step_s, scrape_s=60, seconds=14 * HOUR, run=name)
            end(run, phase)
            runs.append(run)
            told = ["RayloomRunFailed"] if phase == "failed" else []
            looks += [firing(run, hours * HOUR, *told) for hours in (4.1, 5, 8, 11)]
            looks += [firing(run, hours * HOUR) for hours in (12.1, 12.5, 13.5)]
    check(tmp_path, runs, looks)


def end(run: SyntheticRun, phase: Phase) -> None:
    """End a run after 4 hours: its numbers stop, its parts are lost, and later its pod too."""
    for name, before in list(run.values.items()):
        run.values[name] = lambda t, before=before: before(min(t, 4 * HOUR))
    run.enter(phase, since=4 * HOUR)
    # Probes and clients continue to send requests.
    run.count_faster(NOT_READY, since=4 * HOUR, until=12 * HOUR, a_second=1.0)
    for name in ("rayloom_engines_ready", "rayloom_trainer_ranks", "rayloom_environment_actors"):
        run.change(name, since=4 * HOUR, until=math.inf, to=lambda t: 0)
    run.vanish(since=12 * HOUR, until=math.inf)


def test_a_resumed_run_is_not_stalled_by_the_age_of_its_newest_step(tmp_path: Path) -> None:
    run = SyntheticRun(step_s=600.0, scrape_s=60, seconds=6 * HOUR)
    stamp = "rayloom_train_newest_step_timestamp_seconds"
    began = 4.2 * HOUR
    run.change(stamp, since=4 * HOUR, until=began + 600, to=lambda t: 2 * HOUR)
    run.enter("starting", since=4 * HOUR)
    run.enter("training", since=began)
    run.enter("finished", since=5 * HOUR)
    # A probe fails each second while the run starts and after it has finished.
    for since, until in ((4 * HOUR, began), (5 * HOUR, 6 * HOUR)):
        run.count_faster(NOT_READY, since=since, until=until, a_second=1.0)
    run.vanish(since=2 * HOUR, until=4 * HOUR)
    moments = (4.1 * HOUR, began + 60, began + 500, 5.9 * HOUR)
    check(tmp_path, [run], [firing(run, moment) for moment in moments])


def test_a_run_whose_pod_was_replaced_is_one_run(tmp_path: Path) -> None:
    """Remove the first pod while the run trains and the second one after the run has finished."""
    runs = [
        SyntheticRun(
            step_s=60.0, scrape_s=15, seconds=2 * HOUR, run="small",
            labels={"namespace": namespace, "pod": pod},
        )
        for namespace, pod in (("a", "a-1"), ("a", "a-2"), ("b", "b-1"), ("c", "c-1"))
    ]  # fmt: skip
    first, second, lost, quick = runs
    gone = 0.5 * HOUR
    first.vanish(since=gone, until=math.inf)
    second.vanish(since=0, until=gone + 300)
    second.enter("finished", since=gone + 600)
    second.vanish(since=gone + 660, until=math.inf)
    lost.vanish(since=gone, until=math.inf)
    # The rules are evaluated each half minute, so they do not see this phase.
    quick.enter("finished", since=gone + 615)
    quick.vanish(since=gone + 630, until=math.inf)
    query = 'count by (namespace) (ALERTS{alertstate="firing",alertname="RayloomTargetDown"})'
    looks = [
        At(moment, query, dict.fromkeys(namespaces, 1.0), "namespace")
        for moment, namespaces in (
            (gone - 60, ""),
            (gone + 200, "ab"),
            (gone + 400, "b"),
            *((gone + minutes * 60, "b") for minutes in (14, 20, 40)),
            (gone + 70 * 60, ""),
        )
    ]
    check(tmp_path, runs, looks)


@pytest.mark.parametrize("label", PLACE_LABELS)
def test_an_alert_fires_only_for_the_faulty_one_of_two_runs_of_the_same_name(
    tmp_path: Path, label: str
) -> None:
    """Give two runs of one name in different places to Prometheus; the second has faults."""
    place = {"cluster": "eu", "namespace": "rl", "release": "a"}
    healthy, faulty = (
        SyntheticRun(step_s=60.0, scrape_s=60, seconds=3 * HOUR, labels={**place, **changed})
        for changed in ({}, {label: "other"})
    )
    # The counts differ from the other run's, but the ledgers of both runs are in balance.
    for name in list(faulty.values):
        if name.startswith("rayloom_ledger_") and "_total" not in name:
            before = faulty.values[name]
            faulty.values[name] = lambda t, before=before: 3 * (before(t) or 0.0)
    lose_half(faulty, HOUR, 2 * HOUR)
    faulty.vanish(since=2 * HOUR, until=math.inf)

    def at(second: float, *alerts: str) -> list[At]:
        query = 'count by (alertname) (ALERTS{{alertstate="firing",{}="{}"}})'
        told = dict.fromkeys(alerts, 1.0)
        return [
            At(second, query.format(label, "other"), told, "alertname"),
            At(second, query.format(label, place[label]), {}, "alertname"),
        ]

    looks = [*at(HOUR - 60), *at(HOUR + 600, "RayloomRankLost")]
    looks += at(2 * HOUR + 300, "RayloomTargetDown")
    check(tmp_path, [healthy, faulty], looks)


@pytest.mark.proof
@pytest.mark.slow
def test_a_service_without_clients_fires_no_alert_nor_does_its_next_step(
    tmp_path: Path,
) -> None:
    runs, looks = [], []
    for step_s in (2.0, 600.0):
        run = SyntheticRun(step_s=step_s, scrape_s=60, seconds=9 * HOUR, run=f"of-{step_s:g}-s")
        run.count_faster(CONSUMER, since=HOUR, until=8 * HOUR, a_second=1.0 - STAGES["collect"])
        run.stand_idle(since=HOUR, until=8 * HOUR)
        runs.append(run)
        looks += [firing(run, hours * HOUR) for hours in (0.9, 2, 5, 7.9, 8.1, 8.5, 9)]
    check(tmp_path, runs, looks)


def test_the_alert_for_missing_rollouts_waits_for_their_time_limit(
    tmp_path: Path,
) -> None:
    """Let all rollouts begin together and end after 45 minutes, while the loop waits for them."""
    lasts_s, ends = 45 * 60, 6 * 45 * 60
    run = SyntheticRun(step_s=lasts_s, scrape_s=60, seconds=6 * HOUR + 600)
    run.values["rayloom_trajectory_seconds_limit"] = lambda t: HOUR
    run.values[COMPLETED] = lambda t: 16 * run.done(min(t, ends))
    run.values[CONSUMER] = lambda t: 0.99 * t
    # The alert waits for the limit and 20 minutes. Then the window must no longer contain the last
    # end, and the rule waits 5 minutes more.
    missed = ends + HOUR + 20 * 60
    looks = [firing(run, minutes * 60) for minutes in (44, 89, 134, 200, 269)]
    looks += [firing(run, missed), firing(run, missed + 12 * 60, "RayloomNoRollouts")]
    check(tmp_path, [run], looks)


def test_usual_losses_of_preemptible_nodes_fire_alerts_only_in_a_small_run(
    tmp_path: Path,
) -> None:
    """Lose an engine about every 7 minutes, a publish each hour, and once half of the actors."""
    runs = []
    for name, num_engines in (("large", 200), ("small", 2)):
        run = SyntheticRun(step_s=60.0, scrape_s=60, seconds=4 * HOUR, run=name)
        run.values["rayloom_engines_expected"] = lambda t, n=num_engines: n
        run.values["rayloom_engines_ready"] = lambda t, n=num_engines: n - 1
        run.values["rayloom_environment_actors_expected"] = lambda t, n=num_engines: n
        for part, value in (
            ("engine", lambda t: t // 400),
            ("environment_actor", lambda t, n=num_engines: n // 2 if t > HOUR else 0),
        ):
            run.values[series("rayloom_replacements_total", part=part)] = value
        run.values["rayloom_publish_failures_total"] = lambda t: t // HOUR
        runs.append(run)
    large, small = runs
    looks = [firing(large, minutes * 60) for minutes in (5, 30, 61, 70, 80, 90, 120, 200, 239)]
    looks += [
        firing(small, minutes * 60, "RayloomEngineMissing", "RayloomPartFlapping")
        for minutes in (70, 120, 239)
    ]
    check(tmp_path, runs, looks)


Fault = Callable[[SyntheticRun, float, float], None]


def showing(name: str, value: float) -> Fault:
    return lambda run, since, until: run.change(name, since=since, until=until, to=lambda t: value)


def counting(name: str, a_second: float) -> Fault:
    return lambda run, since, until: run.count_faster(
        name, since=since, until=until, a_second=a_second
    )


def both(*faults: Fault) -> Fault:
    def inflict(run: SyntheticRun, since: float, until: float) -> None:
        for fault in faults:
            fault(run, since, until)

    return inflict


def stall(run: SyntheticRun, since: float, until: float) -> None:
    for name in ("rayloom_train_newest_step", "rayloom_train_newest_step_timestamp_seconds"):
        shown = run.values[name](since)
        run.change(name, since=since, until=until, to=lambda t, shown=shown: shown)


def wait_for_rollouts(run: SyntheticRun, since: float, until: float) -> None:
    run.stop_counting(COMPLETED, since=since, until=until)
    run.count_faster(CONSUMER, since=since, until=until, a_second=1.0 - STAGES["collect"])


def collect_longer(run: SyntheticRun, since: float, until: float) -> None:
    """Let each step wait a hundred times as long for its rollouts."""
    name = series("rayloom_stage_seconds_sum", stage="collect")
    run.count_faster(name, since=since, until=until, a_second=99 * STAGES["collect"])


def lose_half(run: SyntheticRun, since: float, until: float) -> None:
    run.change("rayloom_trainer_ranks", since=since, until=until, to=lambda t: 1)


def keep_old_checkpoint(run: SyntheticRun, since: float, until: float) -> None:
    shown = run.values["rayloom_checkpoint_step"](since)
    run.change("rayloom_checkpoint_step", since=since, until=until, to=lambda t: shown)


def keep_old_weights(run: SyntheticRun, since: float, until: float) -> None:
    name = series("rayloom_engine_policy_version", replica="a")
    shown = run.values[name](since)
    run.change(name, since=since, until=until, to=lambda t: shown)


def start_over_and_over(run: SyntheticRun, since: float, until: float) -> None:
    """Let three starts fail: refused, without a ready engine, and from a checkpoint."""
    for minutes, phase in ((0, "refused"), (20, "starting"), (40, "recovering")):
        run.enter(phase, since=since + 60 * minutes)
    run.enter("training", since=until)
    run.count_faster(NOT_READY, since=since, until=until, a_second=1.0)


def vanish(run: SyntheticRun, since: float, until: float) -> None:
    run.vanish(since=since, until=until)


def fail(run: SyntheticRun, since: float, until: float) -> None:
    run.enter("failed", since=since)
    run.enter("training", since=until)


def lose_nodes(run: SyntheticRun, since: float, until: float) -> None:
    """Remove nodes of the cluster and an environment actor with them."""
    nodes = series("ray_cluster_active_nodes", node_type="worker")
    run.change(nodes, since=since, until=until, to=lambda t: 7)
    run.change("rayloom_environment_actors", since=since, until=until, to=lambda t: 1)


def copy_nothing(run: SyntheticRun, since: float, until: float) -> None:
    """Let no committed checkpoint reach run.checkpoint_url."""
    for name in ("sum", "count"):
        run.stop_counting(f"rayloom_checkpoint_upload_seconds_{name}", since=since, until=until)
    waiting = "rayloom_checkpoint_upload_waiting_timestamp_seconds"
    run.change(waiting, since=since, until=until, to=lambda t: since)


# For each alert: its fault, the minutes until which it must not fire (None: it may fire at once),
# the minutes after which it must fire, and the minutes that the fault lasts.
FAULTS: dict[str, tuple[Fault, float | None, float, float]] = {
    "RayloomStalled": (stall, 10, 20, 60),
    "RayloomNotTraining": (start_over_and_over, 59, 62, 90),
    "RayloomNoRollouts": (wait_for_rollouts, 30, 42, 60),
    "RayloomQueueStarved": (collect_longer, 20, 100, 120),
    "RayloomQueueFull": (counting(PRODUCER, 1.8), 30, 90, 100),
    "RayloomPolicyStale": (
        counting(series("rayloom_ledger_events_total", kind="evicted", reason="stale"), 0.2),
        None, 55, 60,
    ),
    "RayloomRewardCollapsed": (
        showing("rayloom_reward_collapsed_since_step", 150), None, 1, 60
    ),
    "RayloomEntropyCollapsed": (showing("rayloom_entropy_nats", 0.001), 10, 60, 90),
    "RayloomMismatchHigh": (showing("rayloom_mismatch_k3_nats", 0.5), 9, 15, 60),
    "RayloomLogprobCheckFailed": (showing("rayloom_logprob_check_ratio", 3.0), None, 5, 60),
    "RayloomNonFinite": (counting("rayloom_train_skipped_steps_total", 0.01), None, 5, 30),
    "RayloomMalformedRewarded": (
        counting("rayloom_malformed_rewarded_total", 0.01), None, 5, 30
    ),
    "RayloomPublishFailing": (counting("rayloom_publish_failures_total", 0.01), 4, 14, 30),
    "RayloomVersionSkew": (keep_old_weights, 10, 20, 60),
    "RayloomCheckpointOld": (keep_old_checkpoint, 8, 20, 60),
    "RayloomCheckpointFailing": (
        counting("rayloom_checkpoint_failures_total", 0.01), None, 5, 30
    ),
    "RayloomUploadsBehind": (copy_nothing, 32, 40, 60),
    "RayloomPartFlapping": (
        counting(series("rayloom_replacements_total", part="engine"), 0.01), 24, 36, 60
    ),
    "RayloomRankLost": (lose_half, 4, 10, 60),
    "RayloomEngineMissing": (showing("rayloom_engines_ready", 0), 14, 20, 60),
    "RayloomLedgerOutOfBalance": (showing("rayloom_ledger_in_flight_rollouts", 7), 1, 6, 60),
    "RayloomDatabaseAway": (showing("rayloom_database_away_seconds", 40), None, 3, 60),
    "RayloomTargetDown": (vanish, 1, 4, 30),
    "RayloomRunFailed": (fail, None, 3, 60),
    "RayloomRequestsRefused": (
        counting(series("rayloom_http_requests_total", route="/api", status="429"), 0.5),
        9, 25, 60,
    ),
    "RayloomHeadMemoryHigh": (
        showing(series("ray_node_mem_used", RayNodeType="head", ip="1"), 7.5e9), 9, 15, 60
    ),
    "RayloomDiskFull": (
        showing(series("ray_node_disk_utilization_percentage", ip="1"), 93), 9, 15, 60
    ),
    "RayloomCheckpointVolumeFull": (showing("rayloom_checkpoint_free_bytes", 1.4e9), 1, 6, 60),
    "RayloomObjectStoreSpilling": (
        showing(series("ray_object_store_memory", Location="SPILLED"), 5e8), 9, 15, 60
    ),
    "RayloomOutOfMemory": (showing("ray_memory_manager_worker_eviction_total", 1), None, 5, 60),
    "RayloomNodesMissing": (lose_nodes, 14, 20, 60),
    "RayloomServeUnhealthy": (
        showing(series("ray_serve_application_status", application="api"), 2), 4, 10, 60
    ),
}  # fmt: skip


def test_a_smaller_cluster_and_a_deployment_fire_no_alert(tmp_path: Path) -> None:
    """Check a cluster that was made smaller with its run and an application being deployed."""
    smaller = SyntheticRun(
        step_s=60.0, scrape_s=60, seconds=3 * HOUR, run="smaller", labels={"release": "a"}
    )
    nodes = series("ray_cluster_active_nodes", node_type="worker")
    smaller.show_cluster()
    smaller.change(nodes, since=HOUR, until=math.inf, to=lambda t: 4)
    deploying = SyntheticRun(
        step_s=60.0, scrape_s=60, seconds=3 * HOUR, run="deploying", labels={"release": "b"}
    )
    status = series("ray_serve_application_status", application="api")
    deploying.show_cluster()
    deploying.change(status, since=HOUR, until=math.inf, to=lambda t: 5)
    looks = [firing(run, hours * HOUR) for run in (smaller, deploying) for hours in (0.9, 1.5, 3)]
    check(tmp_path, [smaller, deploying], looks)


def test_an_application_that_never_came_up_is_reported_without_a_run(tmp_path: Path) -> None:
    run = SyntheticRun(step_s=60.0, scrape_s=60, seconds=HOUR, run="", labels={"release": "a"})
    status = series("ray_serve_application_status", application="api")
    run.values = {status: lambda t: 1}
    told = {"a": 1.0}
    query = 'count by (release) (ALERTS{alertstate="firing",alertname="RayloomServeUnhealthy"})'
    check(tmp_path, [run], [At(240, query, {}, "release"), At(600, query, told, "release")])


def test_a_collapse_is_reported_with_its_first_step_while_the_run_trains(tmp_path: Path) -> None:
    runs = [
        SyntheticRun(step_s=60.0, scrape_s=60, seconds=HOUR, run=name, labels={"release": "a"})
        for name in ("well", "fallen", "over")
    ]
    for run in runs[1:]:
        run.change("rayloom_reward_collapsed_since_step", since=1200, until=2400, to=lambda t: 17.0)
    runs[2].enter("finished", since=600)
    query = 'max by (run) (rayloom_reward_collapsed_since_step) and on (run) ALERTS{alertname="%s"}'
    found = query % "RayloomRewardCollapsed"
    looks = [
        At(1140, found, {}), At(1260, found, {"fallen": 17.0}), At(3000, found, {}),
    ]  # fmt: skip
    check(tmp_path, runs, looks)


@pytest.mark.proof
@pytest.mark.slow
def test_the_alert_for_checkpoint_uploads_depends_on_their_usual_duration(tmp_path: Path) -> None:
    """Check uploads of a minute, of an hour, never ended, and waiting at the end of a run."""
    waiting = "rayloom_checkpoint_upload_waiting_timestamp_seconds"
    runs, since = [], HOUR
    for name, copy_s in (("quick", 60.0), ("slow", 3600.0), ("first", None), ("over", 60.0)):
        run = SyntheticRun(
            step_s=600.0, scrape_s=60, seconds=8 * HOUR, run=name, labels={"release": "a"}
        )
        run.show_cluster()
        for kind, amount in (("sum", copy_s or 0.0), ("count", float(copy_s is not None))):
            run.values[f"rayloom_checkpoint_upload_seconds_{kind}"] = (
                lambda t, run=run, amount=amount: amount * run.done(min(t, since))
            )
        run.change(waiting, since=since, until=7 * HOUR, to=lambda t: since)
        runs.append(run)
    runs[-1].enter("finished", since=since + 60)
    query = 'count by (run) (ALERTS{alertstate="firing",alertname="RayloomUploadsBehind"})'
    looks = [
        At(since + 60 * minutes, query, dict.fromkeys(told, 1.0))
        for minutes, told in (
            (-1, ()),
            (32, ()),
            (40, ("quick",)),
            (118, ("quick",)),
            (130, ("quick", "first")),
            (208, ("quick", "first")),
            (220, ("quick", "first", "slow")),
            (357, ("quick", "first", "slow")),
            (365, ()),
        )
    ]
    check(tmp_path, runs, looks)


def test_every_alert_has_a_fault_in_the_table() -> None:
    assert list(FAULTS) == [rule["alert"] for rule in ALERTS]


@pytest.mark.proof
@pytest.mark.chart
@pytest.mark.parametrize("third", [0, 1, 2])
def test_each_alert_fires_only_for_its_fault_and_resolves(tmp_path: Path, third: int) -> None:
    """Check the alerts in thirds, because Prometheus limits the samples of a query."""
    since, runs, looks = 3 * HOUR, [], []
    for alert, (fault, quiet_min, told_min, lasts_min) in list(FAULTS.items())[third::3]:
        # Each run is in its own place, because the series of Ray have no label for the run.
        run = SyntheticRun(
            step_s=60.0, scrape_s=60, seconds=LATER, run=alert, labels={"release": alert}
        )
        run.show_cluster()
        fault(run, since, since + 60 * lasts_min)
        runs.append(run)
        looks += [firing(run, since - 60), firing(run, since + 60 * told_min, alert)]
        looks.append(firing(run, LATER))
        if quiet_min is not None:
            looks.append(firing(run, since + 60 * quiet_min))
    check(tmp_path, runs, looks)
