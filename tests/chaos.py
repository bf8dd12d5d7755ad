"""Test a training run and a service under random faults: `make chaos SEED=n`.

Half of the time `rayloom train` runs with SQLite on a small disk; half of it `rayloom serve` runs
with PostgreSQL and a client that submits and cancels tasks. The game's returns follow a script
(`worlds.parts.scripted_game`). The seed chooses the faults, which come one after another, sometimes
before the run has recovered from the last one. At the end Ctrl-C stops the run, and these must be
true:

- Every accepted task has ended, and cancelled tasks have the status cancelled.
- The ledger is balanced, and the audit of the whole journal is clean: it recomputes advantages from
  returns, and no rollout is trained twice.
- Every whole group has the script's returns, the advantages that the plain formula gives for them,
  and the same advantages as in a training without faults.
- No process, port or shared memory is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from worlds.agents.submitting_client import SubmittingClient
from worlds.faults.breaking_proxy import breaking_proxy
from worlds.faults.faults import Plan, command_kill, database_faults, full_disk, part_faults
from worlds.faults.mounts import small_disk
from worlds.parts.scripted_game import member_of, scripted_return
from worlds.runs.run_checks import check_stopped
from worlds.runs.run_driver import STEP_S, Run, running, small_config
from worlds.servers.ports import free_port
from worlds.servers.postgresql_server import PASSWORD, postgresql

from actors.types import Outcome
from service.inspect.reader import open_journal
from service.launch.run_dir import RunDir
from service.store.place import VARIABLE

KEY = "a key of the chaos run, long enough"
# The share of faults that come before the run has made steps after the last fault.
COMPOUND = 0.25
# A limit for a recovery, a start or an end on a busy machine, not an expected time.
LIMIT_S = 900.0
# Large enough for a run's files, and small enough to be filled soon.
DISK_KIB = 512 * 1024
CALM_STEPS = 40
GROUP_SIZE = 4
GAME = "scripted_game:ScriptedGame"
SECTIONS = {
    "run": {
        "steps": 1_000_000,
        "checkpoint_every": 3,
        "evaluate_every": 1_000_000,
        "journal_steps": 1_000_000,
    },
    "tasks": {"environment": GAME, "evaluation_tasks": 0},
    "rollouts": {"num_actors": 2, "turn_deadline_s": 90, "frozen_after_s": 10},
    "algorithm": {"max_lag": 1, "group_size": GROUP_SIZE},
    # The script rewards nothing that can be learnt, so that the policy hardly changes.
    "trainer": {"num_ranks": 1, "learning_rate": 1e-5},
}


class Chaos:
    """A run that is started again whenever a fault has ended it."""

    def __init__(self, directory: Path, plan: Plan, *, command: str, port: int) -> None:
        self._directory = directory
        self.run_dir = directory / "run"
        self.plan = plan
        self._command = command
        # At the end the client reads the status of all tasks that it has submitted.
        is_service = command == "serve"
        own = {"port": port, "keep_ended_tasks": 1_000_000}
        self._ports = (port,) if is_service else ()
        self._config = config_in(directory, **({"service": own} if is_service else {}))
        self.advantages: dict[str, list[float]] = {}
        """The result of `scripted_advantages`; set at the end."""

    @contextlib.contextmanager
    def started(self) -> Iterator[Run]:
        arguments = ["--resume"] if RunDir(path=self.run_dir).may_have_run() else []
        with running(
            self._config, self.run_dir, arguments, command=self._command, cwd=self._directory
        ) as run:
            yield run

    def play(self, until: float) -> None:
        """Inflict faults until the time is over, then let the run make a step and stop it."""
        while time.monotonic() < until:
            with self.started() as run:
                if self._play(run, until):
                    return
                assert run.wait_until_gone(limit_s=STEP_S) == []
        with self.started() as run:
            self._end(run)

    def _play(self, run: Run, until: float) -> bool:
        """Inflict faults on a run until the time is over; return False if a fault has ended it."""
        run.advance(2, limit_s=LIMIT_S)
        while time.monotonic() < until:
            fault = self.plan.next()
            say(f"{run.place.path.parent.name}: {fault.name}")
            self.plan.counts[fault.name] += 1
            began = time.monotonic()
            fault.inflict(run)
            if fault.ends_command:
                return False
            if self.plan.rng.random() >= COMPOUND:
                run.advance(2, limit_s=LIMIT_S)
                say(f"  two steps later, {time.monotonic() - began:.1f} s")
        self._end(run)
        return True

    def _end(self, run: Run) -> None:
        run.advance(1, limit_s=LIMIT_S)
        self.before_end(run)
        run.interrupt()
        assert run.wait(limit_s=LIMIT_S) == 130, run.output.read_text()[-4000:]
        assert run.wait_until_gone(limit_s=STEP_S) == []
        check_ports_free(run, *self._ports)
        check_stopped(run)
        self.advantages = scripted_advantages(run)
        terms, steps = run.history().num_terms, run.summary()["steps"]
        say(
            f"{run.place.path.parent.name}: clean after {steps} steps in {terms} terms, "
            f"{len(self.advantages)} groups as scripted"
        )

    def before_end(self, run: Run) -> None:
        """Do nothing; a subclass may finish its work here while the run still plays."""


class ServiceChaos(Chaos):
    """A service and its client."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        port = free_port()
        super().__init__(directory, plan, command="serve", port=port)
        self.client = SubmittingClient(
            base_url=f"http://127.0.0.1:{port}",
            key=KEY,
            environment=GAME,
            rng=random.Random(plan.rng.random()),
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
        """Stop the client; wait until its tasks have ended except for an incomplete last step."""
        self.client.stop()
        deadline = time.monotonic() + LIMIT_S
        num_groups = 4
        while len(left := self.client.unfinished()) >= 2 * num_groups:
            assert time.monotonic() < deadline, left
            time.sleep(2)
        unknown = [name for name in left if self.client.status(name) == "unknown"]
        assert not unknown, unknown
        played = [name for name in self.client.cancelled if self.client.status(name) != "cancelled"]
        assert not played, played
        say(
            f"  {len(self.client.accepted)} tasks accepted, {len(self.client.cancelled)} of them "
            f"cancelled, {len(left)} left for the next step"
        )


def config_in(directory: Path, **sections: dict[str, object]) -> Path:
    """Write the configuration, and beside it the game's module, as a user does; return the path."""
    directory.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parent / "worlds" / "parts" / "scripted_game.py", directory)
    together = {name: {**SECTIONS.get(name, {}), **keys} for name, keys in sections.items()}
    return small_config(directory, **{**SECTIONS, **together})


def scripted_advantages(run: Run) -> dict[str, list[float]]:
    """Return the advantages of each task's members, for tasks with only trained, completed members.

    Check their returns with the script, and their advantages with the plain formula.
    """
    found = {}
    for step in open_journal(run.place.path).steps():
        groups = defaultdict(list)
        for entry in step.entries:
            groups[entry.trajectory.group_id].append(entry)
        for entries in groups.values():
            are_whole = all(
                each.reason is None and each.trajectory.outcome is Outcome.COMPLETED
                for each in entries
            )
            if not are_whole or len(entries) < GROUP_SIZE:
                continue
            entries.sort(key=lambda each: member_of(each.trajectory.rollout_id))
            task_id = entries[0].trajectory.task_id
            returns = [each.trajectory.episode_return for each in entries]
            assert returns == [scripted_return(task_id, member) for member in range(GROUP_SIZE)]
            mean, deviation = statistics.mean(returns), statistics.stdev(returns)
            plain = [(each - mean) / (deviation + 1e-6) for each in returns]
            for entry, advantage in zip(entries, plain, strict=True):
                given = np.concatenate(entry.advantages)
                np.testing.assert_allclose(given, advantage, rtol=1e-5, atol=1e-6)
            found[task_id] = [float(entry.advantages[0][0]) for entry in entries]
    return found


def calm_advantages(directory: Path) -> dict[str, list[float]]:
    """Return the advantages of a training of CALM_STEPS steps without faults."""
    config = config_in(directory, run={"steps": CALM_STEPS})
    with running(config, directory / "run", cwd=directory) as run:
        assert run.wait(limit_s=LIMIT_S + CALM_STEPS * STEP_S) == 0, run.log()
        return scripted_advantages(run)


def compare(found: dict[str, list[float]], calm: dict[str, list[float]]) -> None:
    """Check that tasks of both runs have bit-identical advantages."""
    both = sorted(found.keys() & calm.keys())
    assert both, f"none of {len(found)} groups is among the {len(calm)} without faults"
    differing = [task_id for task_id in both if found[task_id] != calm[task_id]]
    assert not differing, differing
    say(f"train: {len(both)} groups as in a run without faults")


def check_ports_free(run: Run, *ports: int) -> None:
    """Check that the ports of the run's last metrics and of its API, `ports`, are free."""
    shown = re.findall(r"metrics at http://\S+:(\d+)/metrics", run.place.log_file.read_text())
    for port in (*ports, int(shown[-1])):
        # This also succeeds while connections have just ended.
        socket.create_server(("127.0.0.1", port)).close()


def say(text: str) -> None:
    """Print a text with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def train_half(root: Path, rng: random.Random, *, seconds: float) -> None:
    """Play faults with `rayloom train` and SQLite on a small disk."""
    train = root / "train"
    train.mkdir()
    calm = calm_advantages(root / "calm")
    with small_disk(train, kib=DISK_KIB):
        plan = Plan([*part_faults(), command_kill(), full_disk(train)], rng)
        chaos = Chaos(train, plan, command="train", port=0)
        chaos.play(time.monotonic() + seconds)
        compare(chaos.advantages, calm)
        print_counts(plan.counts)


def serve_half(root: Path, rng: random.Random, *, seconds: float) -> None:
    """Play faults with `rayloom serve`, PostgreSQL and a client."""
    with (
        postgresql(root / "postgresql", life_s=seconds + 2 * LIMIT_S) as server,
        breaking_proxy(server.port) as proxy,
    ):
        os.environ[VARIABLE] = server.url.replace(f":{server.port}/", f":{proxy.port}/")
        os.environ["PGPASSWORD"] = PASSWORD
        plan = Plan([*part_faults(), command_kill(), *database_faults(server, proxy)], rng)
        ServiceChaos(root / "serve", plan).play(time.monotonic() + seconds)
        print_counts(plan.counts)


HALVES = {"train": train_half, "serve": serve_half}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="seed for the choice of faults")
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes in all")
    parser.add_argument("--half", choices=HALVES, help="play only this half, for half of the time")
    options = parser.parse_args()
    os.environ["RAYLOOM_API_KEY"] = KEY
    before = set(os.listdir("/dev/shm"))
    for name, play in HALVES.items():
        with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
            if options.half in (None, name):
                rng = random.Random(f"{options.seed} {name}")
                play(Path(directory), rng, seconds=30 * options.minutes)
    left = set(os.listdir("/dev/shm")) - before
    assert not left, f"shared memory is left: {left}"
    return 0


def print_counts(counts: Counter[str]) -> None:
    say(f"{counts.total()} faults")
    for name, count in sorted(counts.items()):
        say(f"  {count:3} {name}")


if __name__ == "__main__":
    sys.exit(main())
