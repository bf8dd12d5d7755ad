"""A training run and a service under random faults, for so many minutes: `make chaos SEED=n`.

Half of the time `rayloom train` runs on SQLite on a small disk, half of it `rayloom serve` on
PostgreSQL with a client that submits and cancels. Faults come one after the other, chosen by the
seed, now and then before the run has recovered from the last one. At the end the run is stopped by
Ctrl-C, and: every accepted task has ended, the ledger is balanced, the audit of the whole journal
is clean (advantages recomputed from the returns, nothing trained twice), and no process or shared
memory is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from worlds.breaking_proxy import breaking_proxy
from worlds.faults import Plan, command_kill, database_faults, full_disk, part_faults
from worlds.mounts import small_disk
from worlds.postgresql_server import PASSWORD, postgresql
from worlds.run_checks import check_stopped
from worlds.run_driver import START_S, STEP_S, Run, running, small_config
from worlds.submitting_client import SubmittingClient

from service.launch.run_dir import RunDir
from service.store.place import VARIABLE

KEY = "a key of the chaos run, long enough"
# How often the next fault comes before the run has made a step after the last one.
COMPOUND = 0.25
END_LIMIT_S = 600.0
# A run's files have room in it, and it is soon filled.
DISK_KIB = 512 * 1024
SECTIONS = {
    "run": {
        "steps": 1_000_000,
        "checkpoint_every": 3,
        "evaluate_every": 1_000_000,
        "journal_steps": 1_000_000,
    },
    "tasks": {"evaluation_tasks": 0},
    "rollouts": {"num_actors": 2, "turn_deadline_s": 90, "frozen_after_s": 10},
    "algorithm": {"max_lag": 1},
    "trainer": {"num_ranks": 1},
}


class Chaos:
    """One run, started as often as its faults end it."""

    def __init__(self, directory: Path, plan: Plan, *, command: str, port: int) -> None:
        self.run_dir = directory / "run"
        self.plan = plan
        self._command = command
        # The client asks for what it has submitted at the very end.
        own = {"port": port, "keep_ended_tasks": 1_000_000}
        service = {"service": own} if command == "serve" else {}
        self._config = small_config(directory, **SECTIONS, **service)

    @contextlib.contextmanager
    def started(self) -> Iterator[Run]:
        arguments = ["--resume"] if RunDir(path=self.run_dir).may_have_run() else []
        with running(self._config, self.run_dir, arguments, command=self._command) as run:
            yield run

    def play(self, until: float) -> None:
        """Inflict faults until the time is up, then let the run make a step and end in order."""
        while time.monotonic() < until:
            with self.started() as run:
                if self._play(run, until):
                    return
                assert run.wait_until_gone(limit_s=STEP_S) == []
        with self.started() as run:
            self._end(run)

    def _play(self, run: Run, until: float) -> bool:
        """Returns: False when a fault has ended the command."""
        run.advance(2, limit_s=START_S)
        while time.monotonic() < until:
            fault = self.plan.next()
            say(f"{run.place.path.parent.name}: {fault.name}")
            self.plan.counts[fault.name] += 1
            began = time.monotonic()
            fault.inflict(run)
            if fault.ends_command:
                return False
            if self.plan.rng.random() >= COMPOUND:
                run.advance(2, limit_s=START_S)
                say(f"  two steps later, {time.monotonic() - began:.1f} s")
        self._end(run)
        return True

    def _end(self, run: Run) -> None:
        run.advance(1, limit_s=START_S)
        self.before_end(run)
        run.interrupt()
        assert run.wait(limit_s=END_LIMIT_S) == 130, run.output.read_text()[-4000:]
        assert run.wait_until_gone(limit_s=STEP_S) == []
        check_stopped(run)
        terms, steps = run.history().num_terms, run.summary()["steps"]
        say(f"{run.place.path.parent.name}: clean after {steps} steps in {terms} terms")

    def before_end(self, run: Run) -> None:
        """Something to wait for while the run still plays."""


class ServiceChaos(Chaos):
    """A service with a client beside it."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        port = free_port()
        super().__init__(directory, plan, command="serve", port=port)
        self.client = SubmittingClient(
            base_url=f"http://127.0.0.1:{port}", key=KEY, rng=random.Random(plan.rng.random())
        )

    def play(self, until: float) -> None:
        client = threading.Thread(target=self.client.work, daemon=True)
        client.start()
        try:
            super().play(until)
        finally:
            self.client.stop()
            client.join()
        assert not self.client.errors, self.client.errors[:3]

    def before_end(self, run: Run) -> None:
        """The client stops; everything that it was promised ends, but for an unfilled last step."""
        self.client.stop()
        deadline = time.monotonic() + END_LIMIT_S
        num_groups = 4
        while len(left := self.client.unfinished()) >= 2 * num_groups:
            assert time.monotonic() < deadline, left
            time.sleep(2)
        unknown = [name for name in left if self.client._status(name) == "unknown"]
        assert not unknown, unknown
        say(f"  {len(self.client.accepted)} tasks accepted, {len(left)} left for the next step")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="of the choice of the faults")
    parser.add_argument("--minutes", type=float, default=30.0, help="in all")
    options = parser.parse_args()
    os.environ["RAYLOOM_API_KEY"] = KEY
    rng = random.Random(options.seed)
    half_s = 60 * options.minutes / 2
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        root = Path(directory)
        train, serve = root / "train", root / "serve"
        train.mkdir()
        serve.mkdir()
        with small_disk(train, kib=DISK_KIB):
            plan = Plan([*part_faults(), command_kill(), full_disk(train)], rng)
            Chaos(train, plan, command="train", port=0).play(time.monotonic() + half_s)
        with (
            postgresql(root / "postgresql", life_s=half_s + 2 * END_LIMIT_S) as server,
            breaking_proxy(server.port) as proxy,
        ):
            os.environ[VARIABLE] = server.url.replace(f":{server.port}/", f":{proxy.port}/")
            os.environ["PGPASSWORD"] = PASSWORD
            faults = [*part_faults(), command_kill(), *database_faults(server, proxy)]
            service = ServiceChaos(serve, Plan(faults, rng, plan.counts))
            service.play(time.monotonic() + half_s)
    left = set(os.listdir("/dev/shm")) - before
    assert not left, f"shared memory is left: {left}"
    counts: Counter[str] = plan.counts
    say(f"seed {options.seed}: {counts.total()} faults")
    for name, count in sorted(counts.items()):
        say(f"  {count:3} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
