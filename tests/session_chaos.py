"""Test a service with 64 sessions and faults at random points that a seed chooses.

    $ PYTHONPATH=. python tests/session_chaos.py --seed 1 --points 200
    $ PYTHONPATH=. python tests/session_chaos.py --seed 1 --points 0 --sessions 512 --seconds 300

Gateway, engine, supervisor, API and agents are killed, the gateway is stopped for some seconds, and
the database is locked for some. The seed chooses the next fault, and the number of answers that the
agents get before it. The agents (`worlds.agents.session_agents`) store each answer. At the end
Ctrl-C stops the run, and these must be true:

- Every session has ended once, the ledger is balanced, and the audit of the journal is clean.
- If a session was trained, each answer that a client saw is in its trajectory, with the same ids
  and log-probabilities, and was trained once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from worlds.agents.session_agents import GROUP_SIZE, Memory
from worlds.agents.submitting_client import OVER
from worlds.faults.faults import Fault, Plan
from worlds.runs.run_checks import check_stopped
from worlds.runs.run_driver import ENGINE, ROOT, START_S, STEP_S, Run, running, small_config

from actors.journal.files import TrajectoryEntry
from service.inspect.reader import open_journal

KEY = "a key of the chaos run, long enough"
NUM_HOSTS = 4
# The share of faults that come at once, before any answer after the last fault.
COMPOUND = 0.25
# The range for the number of answers between two faults, and a limit for the wait for them.
ANSWERS, CALM_S = (8, 64), 180.0
LIMIT_S = 900.0
FREEZE_S, LOCK_S = 4.0, 3.0
PARTS = {
    "gateway": r"ray::Gateway",
    "engine": ENGINE,
    "supervisor": r"ray::Supervisor",
    "API": r"ray::ServeReplica:\S*-api:api",
}
Key = tuple[tuple[int, ...], bytes]


@dataclass
class Host:
    """A process of agents, which is started again whenever it was killed."""

    name: str
    directory: Path
    url: str
    num_groups: int
    """The number of groups that are played at once."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def file(self) -> Path:
        return self.directory / f"{self.name}.jsonl"

    def start(self) -> None:
        with (self.directory / f"{self.name}.out").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "worlds.agents.session_agents", self.url, str(self.file),
                 self.name, str(self.num_groups)],
                cwd=ROOT / "tests", stdout=output, stderr=output,
                env={**os.environ, "RAYLOOM_API_KEY": KEY},
            )  # fmt: skip

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Request that the process ends after its current games."""
        self.file.with_suffix(".stop").touch()

    def check(self) -> None:
        assert self.process is not None
        assert self.process.poll() in (None, 0), self.file.with_suffix(".out").read_text()[-3000:]


@dataclass
class Proof:
    """A service and its agents."""

    run: Run
    directory: Path
    plan: Plan
    num_groups: int
    """The number of groups that are played at once."""
    hosts: list[Host] = field(default_factory=list)

    def play(self, num_points: int, *, seconds: float) -> None:
        """Play with a number of faults, then for some seconds without, then stop the run."""
        url = self.run.api_address(limit_s=START_S)
        each = self.num_groups // NUM_HOSTS
        self.hosts = [Host(f"host-{n}", self.directory, url, each) for n in range(NUM_HOSTS)]
        self.plan.faults += [Fault(name="kill the agents", inflict=self._kill_agents)]
        try:
            for host in self.hosts:
                host.start()
            self._wait_for_answers(64)
            for number in range(num_points):
                fault = self.plan.next()
                self.plan.counts[fault.name] += 1
                began = time.monotonic()
                fault.inflict(self.run)
                if self.plan.rng.random() >= COMPOUND:
                    self._wait_for_answers(self.plan.rng.randrange(*ANSWERS))
                say(f"{number + 1}: {fault.name}, then {time.monotonic() - began:.1f} s")
            self._play_on(seconds)
            self._finish(url)
        finally:
            for host in self.hosts:
                host.kill()

    def _play_on(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for host in self.hosts:
                host.check()
            time.sleep(1)

    def _finish(self, url: str) -> None:
        for host in self.hosts:
            host.stop()
        for host in self.hosts:
            assert host.process is not None
            assert host.process.wait(LIMIT_S) == 0, host.file.with_suffix(".out").read_text()[
                -3000:
            ]
        # A step takes several groups: another host's groups fill the last step.
        filler = Host("filler", self.directory, url, self.num_groups // NUM_HOSTS)
        deadline = time.monotonic() + LIMIT_S
        groups = [group for host in self.hosts for group in Memory.read(host.file).groups]
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}) as client:
            filler.start()
            while left := [name for name in groups if self._status(client, name) not in OVER]:
                assert time.monotonic() < deadline, left
                filler.check()
                groups = left
                time.sleep(2)
            filler.stop()
            assert filler.process is not None and filler.process.wait(LIMIT_S) == 0
            self._check_ends(client)
        self.run.interrupt()
        assert self.run.wait(limit_s=LIMIT_S) == 130, self.run.output.read_text()[-4000:]
        assert self.run.wait_until_gone(limit_s=STEP_S) == []

    def _status(self, client: httpx.Client, name: str) -> str:
        answer = client.get(f"/api/v1/rollouts/{name}", timeout=START_S)
        return str(answer.json().get("status")) if answer.status_code == 200 else "unknown"

    def _check_ends(self, client: httpx.Client) -> None:
        """Check that each session still has the end that the service reported to its agent."""
        for host in self.hosts:
            memory = Memory.read(host.file)
            assert not memory.errors, memory.errors
            assert all(memory.groups.values())
            assert len(memory.finished) == GROUP_SIZE * len(memory.groups)
            for name, received in memory.finished.items():
                answer = client.get(f"/api/v1/sessions/{name}", timeout=START_S)
                assert answer.status_code == 200, (name, answer.text)
                found = answer.json()
                for key in ("status", "reward", "outcome", "ended_at"):
                    assert found[key] == received[key], (name, found, received)

    def _wait_for_answers(self, number: int) -> None:
        before, deadline = self._num_answers(), time.monotonic() + CALM_S + START_S
        while self._num_answers() < before + number:
            for host in self.hosts:
                host.check()
            assert self.run.process.poll() is None, self.run.log()
            assert time.monotonic() < deadline, f"no answers come: {self.run.log()}"
            time.sleep(0.2)

    def _num_answers(self) -> int:
        files = [host.file for host in self.hosts if host.file.exists()]
        return sum(file.read_bytes().count(b'"what": "saw"') for file in files)

    def _kill_agents(self, _run: Run) -> None:
        host = self.plan.rng.choice(self.hosts)
        host.kill()
        time.sleep(self.plan.rng.random())
        host.start()


def session_faults() -> list[Fault]:
    """Return the faults of the run; `Proof` adds those of the agents."""

    def killing(title: str) -> Fault:
        return Fault(name=f"kill the {title}", inflict=lambda run: run.kill_part(PARTS[title]))

    def freeze(run: Run) -> None:
        process = run.freeze_part(PARTS["gateway"])
        time.sleep(FREEZE_S)
        with contextlib.suppress(Exception):
            process.resume()

    def lock(run: Run) -> None:
        (file,) = run.place.path.glob("*.db")
        with contextlib.closing(sqlite3.connect(file, timeout=60)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(LOCK_S)
            connection.rollback()

    return [
        *(killing(title) for title in PARTS),
        Fault(name=f"freeze the gateway for {FREEZE_S:g} s", inflict=freeze),
        Fault(name=f"lock the database for {LOCK_S:g} s", inflict=lock),
    ]


def check_turns(run: Run, memories: list[Memory]) -> str:
    """Compare the trained turns with the answers that agents saw; return a summary."""
    trained: dict[str, TrajectoryEntry] = {}
    reasons = Counter(str(event.reason) for event in run.events() if event.kind == "evicted")
    for step in open_journal(run.place.path).steps():
        for entry in step.entries:
            if entry.reason is None:
                name = session_of(entry)
                assert name not in trained, f"{name} was trained twice"
                trained[name] = entry
    seen: defaultdict[str, dict[str, Key]] = defaultdict(dict)
    views = {name: view for memory in memories for name, view in memory.finished.items()}
    for memory in memories:
        for answer in memory.answers:
            key = key_of(answer.ids, answer.logprobs)
            # A repeated answer is equal to the first one.
            assert seen[answer.session].setdefault(answer.turn, key) == key, answer
    num_turns = num_seen = 0
    for name, entry in trained.items():
        found = Counter(keys_of(entry))
        shown = Counter(seen[name].values())
        assert not shown - found, f"{name}: {shown - found} were seen and are not trained"
        if name in views:
            expected = views[name]["turns"] - views[name]["left_out"]
            assert found.total() == expected, (name, found.total(), views[name])
            assert entry.trajectory.episode_return == views[name]["reward"]
        num_turns, num_seen = num_turns + found.total(), num_seen + shown.total()
    assert num_seen > 0
    return (
        f"{len(trained.keys() & views.keys())} of {len(views)} sessions trained, {num_turns} turns "
        f"in them, of which clients saw {num_seen}; evicted: {dict(reasons)}"
    )


def session_of(entry: TrajectoryEntry) -> str:
    member = entry.trajectory.rollout_id.rpartition("-")[2]
    return f"{entry.trajectory.task_id}-{member}"


def keys_of(entry: TrajectoryEntry) -> Iterator[Key]:
    """Yield the keys of an entry's turns; check that exactly their tokens are trained."""
    for sample in entry.trajectory.samples:
        assert sample.num_trained == sum(turn.end - turn.start for turn in sample.turns)
        for turn in sample.turns:
            assert sample.mask[turn.tokens].all()
            yield key_of(sample.token_ids[turn.tokens], sample.logprobs[turn.tokens])


def key_of(ids: object, logprobs: object) -> Key:
    """Return a turn's key: other turns of the same text have other log-probabilities."""
    return tuple(np.asarray(ids).tolist()), np.asarray(logprobs, np.float32).tobytes()


def prove(
    directory: Path,
    *,
    seed: int,
    num_points: int,
    num_sessions: int = 64,
    seconds: float = 0.0,
    model: str | None = None,
) -> None:
    """Play and check; KEY must be in the environment.

    num_sessions: the number that is open at once. seconds: the time of play after the faults.
    model: the directory of a model; None: the run builds one.
    """
    rng, num_groups = random.Random(seed), num_sessions // GROUP_SIZE
    config = small_config(
        directory,
        model,
        run={
            "steps": 1_000_000,
            "checkpoint_every": 2,
            "evaluate_every": 1_000_000,
            "journal_steps": 1_000_000,
        },
        tasks={"environment": "guessing", "evaluation_tasks": 0},
        rollouts={"num_actors": 1, "max_turns": 64, "episode_deadline_s": 3600},
        algorithm={"max_lag": 1, "groups_per_step": num_groups // 2, "group_size": GROUP_SIZE},
        inference={"max_num_seqs": 64},
        trainer={"num_ranks": 1, "learning_rate": 1e-5},
        service={"port": 0, "keep_ended_tasks": 1_000_000},
    )
    plan = Plan(session_faults(), rng)
    with running(config, directory / "run", command="serve") as run:
        proof = Proof(run, directory, plan, num_groups)
        proof.play(num_points, seconds=seconds)
        check_stopped(run)
        found = check_turns(run, [Memory.read(host.file) for host in proof.hosts])
    say(f"seed {seed}: {found}")
    for name, count in sorted(plan.counts.items()):
        say(f"  {count:3} {name}")


def say(text: str) -> None:
    """Print a text with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="seed for the choice of faults")
    parser.add_argument("--points", type=int, default=200, help="number of faults")
    parser.add_argument("--sessions", type=int, default=64, help="number at once; a multiple of 16")
    parser.add_argument("--seconds", type=float, default=0.0, help="time of play after the faults")
    options = parser.parse_args()
    os.environ["RAYLOOM_API_KEY"] = KEY
    with tempfile.TemporaryDirectory(prefix="session-chaos-") as directory:
        prove(
            Path(directory),
            seed=options.seed,
            num_points=options.points,
            num_sessions=options.sessions,
            seconds=options.seconds,
        )


if __name__ == "__main__":
    main()
