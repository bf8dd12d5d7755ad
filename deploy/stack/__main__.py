"""`python -m deploy.stack up|status|down`: a service with its monitoring, in the background.

Everything is stored in one directory, build/stack by default: the run, the output of each process,
and processes.json with the process ids and start times, so that `down` ends exactly these
processes. A second `up` continues the run in the directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
import yaml

from deploy.rules.__main__ import rules_text

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).parents[1] / "configs" / "guessing-cpu.yaml"
# Seconds that the service, its engines and its ranks may take to end.
END_LIMIT_S = 120.0
START_LIMIT_S = 30.0
SERVICE, PROMETHEUS, ALERTMANAGER = "service", "prometheus", "alertmanager"
PROGRAMS = {PROMETHEUS: "prometheus", ALERTMANAGER: "prometheus-alertmanager"}
HEALTH = {SERVICE: "/healthz", PROMETHEUS: "/-/ready", ALERTMANAGER: "/-/ready"}

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Directory = Annotated[Path, typer.Option(help="Directory of the run and of all outputs.")]
DIRECTORY = Path("build/stack")


@app.command()
def up(
    directory: Directory = DIRECTORY,
    config: Annotated[Path, typer.Option(help="The run's configuration.")] = CONFIG,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="As in rayloom.")] = None,
    port: Annotated[int, typer.Option(help="Port of the API; the others use the next.")] = 8000,
) -> None:
    """Start the processes; wait up to 30 seconds until Prometheus and Alertmanager answer."""
    directory = directory.absolute()
    missing = [name for name in PROGRAMS.values() if shutil.which(name) is None]
    if missing:
        _refuse(f"{' and '.join(missing)} not found (Debian: apt-get install {' '.join(missing)})")
    if alive := _alive(directory):
        _refuse(f"{', '.join(alive)} of {directory} run already; `down` ends them")
    directory.mkdir(parents=True, exist_ok=True)
    api, metrics, prometheus, alertmanager = (f"127.0.0.1:{port + each}" for each in range(4))
    rules = directory / "rules.yaml"
    rules.write_text(rules_text(), encoding="utf-8")
    (directory / "prometheus.yml").write_text(
        prometheus_config(targets=[metrics], rules=rules, alertmanager=alertmanager)
    )
    (directory / "alertmanager.yml").write_text(alertmanager_config())
    run_dir = directory / "run"
    service = [sys.executable, "-m", "service.cli.main", "serve", str(config)]
    service += ["--resume" if run_dir.exists() else "--run-dir", str(run_dir)]
    chosen = [*(overrides or ()), f"service.port={port}", f"metrics.port={port + 1}"]
    service += [part for each in chosen for part in ("--set", each)]
    commands = {
        SERVICE: service,
        PROMETHEUS: prometheus_command(PROGRAMS[PROMETHEUS], directory, address=prometheus),
        ALERTMANAGER: alertmanager_command(PROGRAMS[ALERTMANAGER], directory, address=alertmanager),
    }
    addresses = {SERVICE: api, PROMETHEUS: prometheus, ALERTMANAGER: alertmanager}
    started = {}
    for name, command in commands.items():
        with (directory / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        # Written at once, so that `down` ends this process also if the next one does not start.
        started[name] = {
            "pid": process.pid,
            "started": psutil.Process(process.pid).create_time(),
            "address": addresses[name],
        }
        (directory / "processes.json").write_text(json.dumps(started, indent=1))
    deadline = time.monotonic() + START_LIMIT_S
    watching = (PROMETHEUS, ALERTMANAGER)
    while not all(_answers(name, addresses[name]) for name in watching):
        if time.monotonic() > deadline or len(_alive(directory)) < len(commands):
            break
        time.sleep(0.2)
    status(directory)


@app.command()
def status(directory: Directory = DIRECTORY) -> None:
    """Print the processes, their addresses and firing alerts; exit with 1 if a process ended."""
    directory = directory.absolute()
    processes, alive = _processes(directory), _alive(directory)
    for name, process in processes.items():
        address = process["address"]
        is_up = name in alive
        state = "answers" if is_up and _answers(name, address) else "starts" if is_up else "ended"
        typer.echo(f"{name:13} {state:8} http://{address}  {directory / name}.out")
    if PROMETHEUS in alive:
        url = f"http://{processes[PROMETHEUS]['address']}/api/v1/alerts"
        with urllib.request.urlopen(url, timeout=10) as reply:
            alerts = json.load(reply)["data"]["alerts"]
        firing = sorted(each["labels"]["alertname"] for each in alerts if each["state"] == "firing")
        typer.echo(f"alerts        {', '.join(firing) or 'none fires'}")
    if not processes:
        typer.echo(f"nothing has been started in {directory}")
    if len(alive) < max(len(processes), 1):
        raise typer.Exit(1)


@app.command()
def down(directory: Directory = DIRECTORY) -> None:
    """End the processes; the service first commits its newest step."""
    directory = directory.absolute()
    alive = _alive(directory)
    for process in alive.values():
        process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(list(alive.values()), timeout=END_LIMIT_S)
    for process in left:
        process.kill()
    for name, process in alive.items():
        typer.echo(f"{name:13} {'was killed' if process in left else 'has ended'}")
    (directory / "processes.json").unlink(missing_ok=True)


def _processes(directory: Path) -> dict[str, dict[str, object]]:
    file = directory / "processes.json"
    found: dict[str, dict[str, object]] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _alive(directory: Path) -> dict[str, psutil.Process]:
    """Return the stack's running processes by name."""
    found = {}
    for name, process in _processes(directory).items():
        try:
            running = psutil.Process(int(str(process["pid"])))
            # The id of an ended process may now belong to another process.
            is_own = running.create_time() == process["started"]
            if is_own and running.status() != psutil.STATUS_ZOMBIE:
                found[name] = running
        except psutil.NoSuchProcess:
            continue
    return found


def _answers(name: str, address: object) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}{HEALTH[name]}", timeout=5):
            return True
    except OSError:
        return False


def _refuse(reason: str) -> None:
    typer.echo(f"stack: {reason}", err=True)
    raise typer.Exit(2)


def prometheus_config(
    *, targets: Sequence[str], rules: Path, alertmanager: str, every: str = "5s"
) -> str:
    """Return the configuration of Prometheus.

    targets, alertmanager: addresses as host:port. every: time between two scrapes and between two
    evaluations of the rules.
    """
    config: dict[str, Any] = {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [str(rules)],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [{"job_name": "rayloom", "static_configs": [{"targets": list(targets)}]}],
    }
    return yaml.safe_dump(config, sort_keys=False)


def alertmanager_config(*, webhook: str = "") -> str:
    """Return the configuration of Alertmanager.

    webhook: a URL that receives every alert when it fires and resolves; empty for none.
    """
    receiver: dict[str, Any] = {"name": "all"}
    if webhook:
        receiver["webhook_configs"] = [{"url": webhook, "send_resolved": True}]
    route = {
        "receiver": "all",
        "group_by": ["run", "alertname"],
        "group_wait": "1s",
        "group_interval": "1s",
        "repeat_interval": "4h",
    }
    return yaml.safe_dump({"route": route, "receivers": [receiver]}, sort_keys=False)


def prometheus_command(program: str, directory: Path, *, address: str) -> list[str]:
    """Return the command that starts Prometheus.

    directory: contains prometheus.yml. address: host:port to listen on.
    """
    return [
        program, f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'prometheus'}", f"--web.listen-address={address}",
        "--log.level=warn",
    ]  # fmt: skip


def alertmanager_command(program: str, directory: Path, *, address: str) -> list[str]:
    """Return the command that starts Alertmanager.

    directory: contains alertmanager.yml. address: host:port to listen on.
    """
    return [
        program, f"--config.file={directory / 'alertmanager.yml'}",
        f"--storage.path={directory / 'alertmanager'}", f"--web.listen-address={address}",
        "--cluster.listen-address=", "--log.level=warn",
    ]  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    app()
