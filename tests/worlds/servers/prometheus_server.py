"""A real Prometheus for tests: on loopback, with its own port and directory, and a bounded life."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.dashboards.grafana import CHOICES, SHORTEST_STEP, load_dashboards
from deploy.rules.__main__ import PLACE_LABELS
from worlds.checks.missing_tools import skip_or_fail
from worlds.servers.ports import free_port

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
UNPACKED = ROOT / "build" / "prometheus"
TOOLS = ("prometheus", "promtool")
LIFE_S = 900
SCRAPE_S = 1
SUBQUERY_STEP_S = 60
DOWNLOAD_LIMIT_S = 300

ADDED = ("job", "instance", "run")

# A series without the labels that Prometheus and the endpoint add: its name, and its labels that
# are not empty.
Series = tuple[str, frozenset[tuple[str, str]]]


def series(name: str, /, **labels: str) -> Series:
    return name, frozenset((key, value) for key, value in labels.items() if value)


def series_of(metric: Mapping[str, str]) -> Series:
    own = {key: value for key, value in metric.items() if key not in ADDED}
    return series(own.pop("__name__", ""), **own)


def find_tools() -> dict[str, str]:
    """Return the paths of prometheus and promtool, installed or unpacked from Debian's package.

    Unpacking starts no service and needs no root. If the package cannot be downloaded, the test is
    skipped with the reason; if CI is set, it fails.
    """
    try:
        return _installed() or _unpacked() or _downloaded()
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or error
        skip_or_fail(f"Prometheus is not installed, and Debian's cannot be downloaded: {told}")


def _installed() -> dict[str, str]:
    found = {tool: shutil.which(tool) for tool in TOOLS}
    return {tool: path for tool, path in found.items() if path} if all(found.values()) else {}


def _unpacked() -> dict[str, str]:
    found = {tool: str(UNPACKED / tool) for tool in TOOLS}
    return found if all(Path(path).exists() for path in found.values()) else {}


def _downloaded() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as directory:
        # apt downloads as a user of its own, who must be able to write here.
        Path(directory).chmod(0o777)
        try:
            _run("apt-get", "download", "prometheus", cwd=directory)
        except subprocess.CalledProcessError:
            # A fresh container has no list of packages yet.
            _run("apt-get", "update", cwd=directory)
            _run("apt-get", "download", "prometheus", cwd=directory)
        (package,) = Path(directory).glob("prometheus_*.deb")
        _run("dpkg-deb", "--extract", str(package), f"{directory}/unpacked", cwd=directory)
        shutil.copytree(f"{directory}/unpacked/usr/bin", UNPACKED, dirs_exist_ok=True)
    return _unpacked()


def _run(*line: str, cwd: str) -> None:
    subprocess.run(
        line, cwd=cwd, check=True, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """A running Prometheus. instance: its target; empty if it has several."""

    address: str
    instance: str
    run: str
    """The run that the dashboard shows."""

    def newest(self) -> dict[Series, float]:
        """Return the series of the newest scrape with their values."""
        found = self._ask("query", query=self._own)
        return {series_of(item["metric"]): float(item["value"][1]) for item in found}

    def wait_for(self, wanted: Series, *, at_least: float, limit_s: float) -> None:
        """Wait until a scrape shows a value of `at_least` or more."""
        deadline = time.monotonic() + limit_s
        while (value := self.newest().get(wanted, -math.inf)) < at_least:
            assert time.monotonic() < deadline, f"{wanted} is {value} after {limit_s:g} s"
            time.sleep(0.2)

    def wait_for_scrapes(self, count: int, *, limit_s: float) -> None:
        """Wait for `count` more scrapes."""
        wanted, deadline = len(self.scrapes()) + count, time.monotonic() + limit_s
        while len(self.scrapes()) < wanted:
            assert time.monotonic() < deadline, f"no {count} scrapes in {limit_s:g} s"
            time.sleep(0.2)

    def scrapes(self) -> list[dict[Series, float]]:
        """Return the series and values of each scrape so far, in order."""
        by_time: dict[float, dict[Series, float]] = {}
        for item in self._ask("query", query=f"{self._own}[{LIFE_S}s]"):
            for at, value in item["values"]:
                by_time.setdefault(at, {})[series_of(item["metric"])] = float(value)
        return [by_time[at] for at in sorted(by_time)]

    def draw(self, expr: str, *, since: float) -> list[float]:
        """Return the finite points that Grafana would draw for a panel's query, one per second."""
        filled = fill(expr, run=self.run)
        found = self._ask("query_range", query=filled, start=since, end=time.time(), step=SCRAPE_S)
        points = [float(value) for item in found for _, value in item["values"]]
        return [point for point in points if math.isfinite(point)]

    def wait_for_points(self, expr: str, *, since: float) -> None:
        """Wait until Grafana would draw a panel's query.

        The steps of a subquery are at whole minutes of the clock, so a subquery over less than a
        minute of scrapes may have no points.
        """
        deadline = time.monotonic() + 2 * SUBQUERY_STEP_S
        while not self.draw(expr, since=since):
            assert time.monotonic() < deadline, f"no data in {2 * SUBQUERY_STEP_S} s: {expr}"
            time.sleep(SCRAPE_S)

    def runs(self) -> list[str]:
        """Return the runs that the dashboard's variable offers."""
        return self._ask("label/run/values", **{"match[]": "rayloom_train_steps_total"})

    def down(self) -> set[str]:
        """Return the targets that cannot be scraped, as host:port."""
        return {item["metric"]["instance"] for item in self._ask("query", query="up == 0")}

    @property
    def _own(self) -> str:
        return f'{{__name__=~"rayloom_.+",instance="{self.instance}"}}'

    def _ask(self, what: str, **parameters: object) -> Any:
        asked = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.address}/api/v1/{what}?{asked}", timeout=30) as it:
                reply = json.load(it)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        data = reply["data"]
        return data["result"] if isinstance(data, dict) else data


@contextlib.contextmanager
def scraping(target: str, directory: Path, *, run: str) -> Iterator[Prometheus]:
    """Scrape host:port with the committed configuration, every SCRAPE_S seconds.

    run: the run's name.
    """
    text = CONFIG.read_text()
    assert text.count("127.0.0.1:9400") == 1 and text.count("scrape_interval: 5s") == 1
    text = text.replace("127.0.0.1:9400", target)
    text = text.replace("scrape_interval: 5s", f"scrape_interval: {SCRAPE_S}s")
    with serving(text, directory) as address:
        yield Prometheus(address=address, instance=target, run=run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An address to scrape, and the labels that its series get."""

    address: str
    """host:port"""
    labels: Mapping[str, str]


@contextlib.contextmanager
def scraping_all(
    targets: Sequence[Target], directory: Path, *, run: str, rules: str = "", alertmanager: str = ""
) -> Iterator[Prometheus]:
    """Scrape several targets, every SCRAPE_S seconds.

    run: the run's name. rules: as YAML. alertmanager: host:port.
    """
    config: dict[str, Any] = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "scrape_configs": [
            {
                "job_name": "pods",
                "static_configs": [
                    {"targets": [each.address], "labels": dict(each.labels)} for each in targets
                ],
            }
        ],
    }
    if rules:
        (directory.parent / "rules.yaml").write_text(rules)
        config["rule_files"] = [str(directory.parent / "rules.yaml")]
    if alertmanager:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    with serving(yaml.safe_dump(config), directory) as address:
        yield Prometheus(address=address, instance="", run=run)


@contextlib.contextmanager
def serving(text: str, directory: Path) -> Iterator[str]:
    """Run Prometheus with a configuration. Yields: its URL."""
    tools = find_tools()
    directory.mkdir(exist_ok=True)
    config, output = directory / "prometheus.yml", directory / "output"
    config.write_text(text)
    address = f"127.0.0.1:{free_port()}"
    with output.open("w") as file:
        # `timeout` ends it even if this process is killed.
        process = subprocess.Popen(
            [
                "timeout", "--kill-after=5", str(LIFE_S), tools["prometheus"],
                f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}", "--log.level=warn",
            ],
            stdout=file, stderr=subprocess.STDOUT, cwd=directory,
        )  # fmt: skip
    url = f"http://{address}"
    try:
        deadline = time.monotonic() + 60
        while not _is_ready(url):
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=20)


def panels_without_data(prometheus: Prometheus, *, since: float) -> set[str]:
    """Return the panels of all dashboards that have no data, each as "Dashboard: panel".

    If only some series of a panel have no data, each is listed with its legend.
    """
    empty: set[str] = set()
    for dashboard in load_dashboards():
        for panel in dashboard.panels:
            drawn = {
                legend: bool(prometheus.draw(query, since=since))
                for legend, query in panel.series.items()
            }
            title = f"{dashboard.title}: {panel.title}"
            if not any(drawn.values()):
                empty.add(title)
            elif not all(drawn.values()):
                empty |= {f"{title}: {legend}" for legend in drawn if not drawn[legend]}
    return empty


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def fill(expr: str, *, run: str, place: Mapping[str, str] = {}) -> str:
    """Return a panel's query as Grafana sends it, with All chosen for every further choice."""
    # Grafana's own rule is four scrape intervals, and the shortest step, a minute, is the interval.
    assert SHORTEST_STEP == "1m"
    filled = expr.replace("$__rate_interval", f"{4 * 60}s").replace("$run", run)
    for label in PLACE_LABELS:
        filled = filled.replace(f"${label}", place.get(label, ".*"))
    for choice in CHOICES:
        filled = filled.replace(f"${choice}", ".*")
    assert "$" not in filled
    return filled
