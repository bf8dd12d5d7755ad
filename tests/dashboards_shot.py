"""Draw every dashboard with Grafana's own components, with a run's data and without data.

    make dashboards-shot        # build/dashboards/NAME.png and NAME-empty.png

The series are those of a synthetic run, and a wave for each other series that a panel queries.
Prometheus answers the panels' queries, and Chromium draws deploy/dashboards/shot/. The command
exits with 1 if a panel cannot be drawn, or has no data although its series exist.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from worlds.builders.synthetic_run import SyntheticRun, Value, labelled, series
from worlds.servers.browser import Browser, browser
from worlds.servers.prometheus_server import fill, find_tools, serving

from deploy.dashboards.__main__ import DASHBOARDS

OUT = Path(__file__).parents[1] / "build" / "dashboards"
SHOWN_S, SCRAPE_S, STEP_S, RUN = 3600, 30, 60, "demo"
PLACE = {"namespace": "rl", "release": "demo"}
WIDTH, LINE = 1608, 38
# Values of realistic length, because legends show them.
NAMES: Mapping[str, Sequence[str]] = {
    "application": ("rayloom",),
    "code": ("not_available", "rollout_stopped"),
    "component": ("answer", "format"),
    "deployment": ("Gateway", "Engine"),
    "end": ("killed", "died"),
    "environment": ("calculator", "code-search"),
    "fate": ("trained", "too_old", "masked"),
    "finished_reason": ("stop", "length"),
    "function": ("grade_answer", "search_documents"),
    "GpuIndex": ("0", "1"),
    "ip": ("10.0.3.17", "10.0.12.204"),
    "Name": ("CPU", "GPU", "memory"),
    "node": ("demo-head-x7k2p", "demo-worker-inference-9q4zt"),
    "NodeAddress": ("10.0.3.17", "10.0.12.204"),
    "outcome": ("completed", "max_turns", "environment_error"),
    "reason": ("retokenised", "history_rewritten"),
    "rank": ("0", "1"),
    "replica": ("default#Engine#k3x9q2ab", "default#Engine#p07tz4mn"),
    "route": ("/api/v1/rollouts", "/v1/chat/completions"),
    "State": ("ALIVE", "PENDING_CREATION"),
    "status": ("200", "429"),
    "status_code": ("200", "500"),
    "use": ("policy", "auxiliary"),
}
# Values by metric and label, for labels whose meaning depends on the metric.
NAMES_OF: Mapping[tuple[str, str], Sequence[str]] = {
    ("rayloom_environment_phase_seconds", "phase"): ("reset", "generate", "step"),
    ("rayloom_publish_seconds", "phase"): ("send", "check", "load"),
    ("ray_resources", "State"): ("USED", "AVAILABLE"),
}
# Series of the synthetic run whose labels have fewer values than the panels show.
TOO_FEW = ("rayloom_publish_seconds", "rayloom_rollouts", "rayloom_engine_policy_version")
# A node's memory, and the status of a running application.
CONSTANTS = {"ray_node_mem_total": 1e10, "ray_serve_application_status": 6.0}
# Metrics that bound or contain others have waves of twice the height.
BOUNDS = re.compile("limit|expected|queries|available|free_bytes|_max|largest")
# The share of a histogram's values up to each bound.
BUCKETS = {"0.1": 0.1, "1.0": 0.5, "10.0": 0.9, "100.0": 0.99, "+Inf": 1.0}
ALERTS = ("RayloomNoRollouts", "RayloomCheckpointVolumeFull")
SERIES = re.compile(r"\b((?:rayloom|ray|vllm)[_:][a-zA-Z0-9_:]+)(\{[^}]*\})?")
MATCHER = re.compile(r'(\w+)(=~?)"([^"]*)"')
GROUPED = re.compile(r"(?:by|on|without)\s*\(([^)]*)\)|\{\{\s*(\w+)\s*\}\}")
OF_ALL = {"", "run", "cluster", "namespace", "release", "le", "__name__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A picture of a dashboard, and its faults."""

    path: Path
    num_panels: int
    without_data: tuple[str, ...]
    """The titles of panels without data."""
    complaints: tuple[str, ...]


def wave(metric: str, number: int, share: float = 1.0) -> Value:
    """Return a plausible curve: a counter grows, a share is below 1."""
    number = (number + sum(map(ord, metric))) % 7
    height = (0.25 + 0.04 * number) * (2 if BOUNDS.search(metric) else 1)
    if metric in CONSTANTS:
        return lambda t: CONSTANTS[metric]
    if re.search("(_total|_sum|_bucket|_seconds_count)$", metric):
        return lambda t: share * height * t
    if re.search("bytes|_mem|gram|memory", metric):
        height *= 1e10
    elif re.search("percentage|utilization", metric):
        height *= 100
    elif "network" in metric:
        height *= 1e7
    elif not re.search("ratio|perc|nats|reward", metric):
        height *= 10
    return lambda t: height * (1 + 0.2 * math.sin(t / 500 + number))


def labels_of(query: str, legend: str) -> Iterator[tuple[str, dict[str, Sequence[str]]]]:
    """Yield each metric of a query, with values for the labels that select, group or name it."""
    groups = {
        label.strip()
        for of, shown in GROUPED.findall(f"{query} {legend}")
        for label in (of or shown).split(",")
    } - OF_ALL
    for metric, inside in SERIES.findall(query):
        known: dict[str, Sequence[str]] = {}
        for label, _, value in MATCHER.findall(inside):
            values = tuple(each for each in value.split("|") if re.fullmatch(r"[\w ./-]+", each))
            if label not in OF_ALL and values:
                known[label] = values
        for label in sorted(groups - known.keys()):
            known[label] = NAMES.get(label, ("first", "second"))
        family = re.sub("_(total|bucket|count|sum)$", "", metric)
        known |= {label: NAMES_OF[family, label] for label in known if (family, label) in NAMES_OF}
        yield metric, known


def values_of(boards: Mapping[str, Mapping[str, Any]]) -> dict[str, Value]:
    """Return the curve of each series, without the labels of the run."""
    run = SyntheticRun(step_s=STEP_S, scrape_s=SCRAPE_S, seconds=2 * SHOWN_S, run=RUN)
    found = {name: value for name, value in run.values.items() if not name.startswith(TOO_FEW)}
    found["rayloom_run_planned_steps"] = lambda t: 200
    for event in ("checkpoint", "checkpoint_upload_waiting"):
        found[f"rayloom_{event}_timestamp_seconds"] = lambda t: t // 300 * 300
    of_the_run = {name.partition("{")[0] for name in found}
    found |= {series("ALERTS", alertname=name, alertstate="firing"): lambda t: 1 for name in ALERTS}
    metrics: dict[str, dict[str, dict[str, None]]] = {}
    for board in boards.values():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                for metric, known in labels_of(target["expr"], target.get("legendFormat", "")):
                    labels = metrics.setdefault(metric, {})
                    for label, values in known.items():
                        labels.setdefault(label, {}).update(dict.fromkeys(values))
    for metric in metrics.keys() - of_the_run:
        labels = metrics[metric]
        for number, values in enumerate(product(*labels.values())):
            one = dict(zip(labels, values, strict=True))
            if metric.endswith("_bucket"):
                for bound, share in BUCKETS.items():
                    found[series(metric, **one, le=bound)] = wave(metric, number, share)
            elif metric == "rayloom_engine_policy_version":
                found[series(metric, **one)] = run.done
            else:
                found[series(metric, **one)] = wave(metric, number)
    return found


def open_metrics(values: Mapping[str, Value], begin: int) -> str:
    """Return two hours of the series in OpenMetrics, with begin as the first second."""
    families: dict[str, list[str]] = {}
    for name, value in values.items():
        shown = labelled(name, run=RUN, **PLACE)
        metric = shown.partition("{")[0]
        for second in range(0, 2 * SHOWN_S + 1, SCRAPE_S):
            if (number := value(second)) is not None:
                number += begin if "timestamp_seconds" in metric else 0
                line = f"{shown} {number:.10g} {begin + second}"
                families.setdefault(metric, []).append(line)
    lines = []
    for metric, samples in sorted(families.items()):
        kind = "counter" if metric.endswith("_total") else "unknown"
        lines += [f"# TYPE {metric.removesuffix('_total')} {kind}", *samples]
    return "\n".join([*lines, "# EOF", ""])


def store(text: str, data: Path) -> None:
    """Write OpenMetrics as blocks that Prometheus reads."""
    data.mkdir(parents=True)
    source = data.parent / "series.txt"
    source.write_text(text)
    line = [find_tools()["promtool"], "tsdb", "create-blocks-from", "openmetrics"]
    done = subprocess.run(
        [*line, str(source), str(data)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def answers(panel: Mapping[str, Any], address: str, now: int) -> list[dict[str, Any]]:
    """Query Prometheus for a panel's data, as Grafana does."""
    found = []
    for target in panel.get("targets", ()):
        asked: dict[str, Any] = {"query": fill(target["expr"], run=RUN)}
        if target.get("instant"):
            path, asked = "query", asked | {"time": now}
        else:
            path, asked = "query_range", asked | {"start": now - SHOWN_S, "end": now, "step": 60}
        url = f"{address}/api/v1/{path}?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            result = json.load(answer)["data"]["result"]
        found.append({"legend": target.get("legendFormat", ""), "result": result})
    return found


def html(shown: Mapping[str, Any]) -> str:
    """Return a page that draws a dashboard without a Grafana server."""
    script = (OUT / "page.js").read_text(encoding="utf-8").replace("</script", "<\\/script")
    style = (OUT / "page.css").read_text(encoding="utf-8")
    data = json.dumps(shown).replace("<", "\\u003c")
    return (
        f"<!doctype html><meta charset=utf-8><style>{style}</style><div id=root></div>"
        f"<script>window.process={{env:{{}}}};window.BOARD={data}</script><script>{script}</script>"
    )


def draw(tab: Browser, board: Mapping[str, Any], path: Path, address: str, now: int) -> Drawn:
    panels = [{"panel": panel, "data": answers(panel, address, now)} for panel in board["panels"]]
    page = path.with_suffix(".html")
    page.write_text(html({"now": now, "shown_s": SHOWN_S, "panels": panels}), encoding="utf-8")
    bottom = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
    tab.complaints.clear()
    tab.look(width=WIDTH, height=LINE * bottom, is_dark=True)
    tab.open(page.as_uri())
    tab.wait_for(f"document.querySelectorAll('[data-place]').length == {len(panels)}", limit_s=60)
    # uPlot draws in later frames than React.
    time.sleep(1.0)
    tab.picture(path)
    page.unlink()
    empty = (
        each["panel"]["title"]
        for each in panels
        if each["data"] and not any(one["result"] for one in each["data"])
    )
    return Drawn(
        path=path,
        num_panels=sum(panel["type"] != "row" for panel in board["panels"]),
        without_data=tuple(empty),
        # Grafana's server would serve some fonts; the page has its own.
        complaints=(
            *(text for text in tab.complaints if "ERR_FILE_NOT_FOUND" not in text),
            *tab.texts("[data-error]"),
        ),
    )


def main() -> int:
    files = sorted(DASHBOARDS.glob("*.json"))
    boards = {file.stem.removeprefix("rayloom-"): json.loads(file.read_text()) for file in files}
    if unknown := set(sys.argv[1:]) - boards.keys():
        sys.exit(f"got {', '.join(sorted(unknown))}, expected names of {', '.join(boards)}")
    boards = {name: board for name, board in boards.items() if name in (sys.argv[1:] or boards)}
    now = int(time.time()) // 60 * 60
    is_wrong = False
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tab = stack.enter_context(browser())
        for kind, directory in (("", work / "filled"), ("-empty", work / "empty")):
            if not kind:
                store(open_metrics(values_of(boards), now - 2 * SHOWN_S), directory / "data")
            with serving("", directory) as address:
                for name, board in boards.items():
                    drawn = draw(tab, board, OUT / f"{name}{kind}.png", address, now)
                    missing = () if kind else drawn.without_data
                    print(f"build/dashboards/{drawn.path.name}: {drawn.num_panels} panels")
                    for text in (*(f"no data: {title}" for title in missing), *drawn.complaints):
                        is_wrong = True
                        print(f"  {text[:300]}")
    return is_wrong


if __name__ == "__main__":
    sys.exit(main())
