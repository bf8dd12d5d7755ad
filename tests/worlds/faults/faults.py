"""The faults of a chaos run: which there are, which comes next, and how each is done to a run.

A plan is drawn from a seed: the kind that has come least often comes next, and chance decides
between equals, so that every kind comes about as often as every other.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from worlds.faults.breaking_proxy import BreakingProxy
from worlds.faults.mounts import fill
from worlds.runs.run_driver import ENGINE, Run
from worlds.servers.postgresql_server import PostgresqlServer

PARTS = {
    "environment actor": r"ray::EnvironmentActor",
    "engine": ENGINE,
    "replica": r"ray::ServeReplica:rayloom",
    "rank": r"ray::TrainerRankActor",
    "merge actor": r"ray::MergeActor",
    "queue": r"ray::TrajectoryQueue",
    "weight board": r"ray::WeightBoard",
    "supervisor": r"ray::Supervisor",
}
FREEZES_S = (3.0, 20.0)
AWAY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is done to a run."""

    name: str
    """Of its kind, such as "kill the queue"."""
    inflict: Callable[[Run], None]
    """Returns when the cause is over; its effects need not be."""
    ends_command: bool = False
    """The command is gone with it, and has to be started again with --resume."""


def part_faults() -> list[Fault]:
    """Kills and freezes of every part of a run."""
    kills = [Fault(name=f"kill the {part}", inflict=_killing(part)) for part in PARTS]
    freezes = [
        Fault(name=f"freeze the {part} for {seconds:g} s", inflict=_freezing(part, seconds))
        for part in PARTS
        for seconds in FREEZES_S
    ]
    return [*kills, *freezes]


def command_kill() -> Fault:
    """kill -9 of the command; its Ray and all that runs there end by themselves."""

    def inflict(run: Run) -> None:
        run.process.kill()
        run.process.wait()

    return Fault(name="kill the command", inflict=inflict, ends_command=True)


def full_disk(directory: Path) -> Fault:
    """directory: the mount point of a small file system that the run writes to."""

    def inflict(_run: Run) -> None:
        ballast = directory / "ballast"
        fill(ballast)
        time.sleep(AWAY_S)
        ballast.unlink()

    return Fault(name="fill the disk", inflict=inflict)


def database_faults(server: PostgresqlServer, proxy: BreakingProxy) -> list[Fault]:
    """A crash of PostgreSQL, and a cut link to it. proxy: between the run and the server."""

    def restart(_run: Run) -> None:
        server.stop(signal.SIGQUIT)
        time.sleep(AWAY_S)
        server.start()

    def cut(_run: Run) -> None:
        proxy.cut()
        time.sleep(AWAY_S)
        proxy.mend()

    return [
        Fault(name="restart PostgreSQL", inflict=restart),
        Fault(name="cut the link to PostgreSQL", inflict=cut),
    ]


@dataclass(slots=True)
class Plan:
    """Which fault comes next; the same for the same seed and faults."""

    faults: list[Fault]
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    """Inflicted ones, by name."""

    def next(self) -> Fault:
        fewest = min(self.counts[fault.name] for fault in self.faults)
        rare = [fault for fault in self.faults if self.counts[fault.name] == fewest]
        return self.rng.choice(rare)


def _killing(part: str) -> Callable[[Run], None]:
    def inflict(run: Run) -> None:
        run.kill_part(PARTS[part])

    return inflict


def _freezing(part: str, seconds: float) -> Callable[[Run], None]:
    def inflict(run: Run) -> None:
        process = run.freeze_part(PARTS[part])
        time.sleep(seconds)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)

    return inflict
