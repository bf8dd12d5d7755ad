"""The faults of a chaos run, and the plan by which they follow each other.

The plan chooses the fault that has occurred least often, and draws from the seed among equally rare
ones, so that all faults occur about equally often.
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
    """A fault that a chaos test can inflict on a run."""

    name: str
    """A description of the fault, such as "kill the queue"."""
    inflict: Callable[[Run], None]
    """Inflicts the fault, and returns when its cause is over; effects may last longer."""
    ends_command: bool = False
    """Whether the fault ends the command, which must then be started again with --resume."""


def part_faults() -> list[Fault]:
    """Return the faults that kill or freeze a part of a run, for each part."""
    kills = [Fault(name=f"kill the {part}", inflict=_killing(part)) for part in PARTS]
    freezes = [
        Fault(name=f"freeze the {part} for {seconds:g} s", inflict=_freezing(part, seconds))
        for part in PARTS
        for seconds in FREEZES_S
    ]
    return [*kills, *freezes]


def command_kill() -> Fault:
    """Return a fault that kills the command with SIGKILL; its Ray cluster then ends by itself."""

    def inflict(run: Run) -> None:
        run.process.kill()
        run.process.wait()

    return Fault(name="kill the command", inflict=inflict, ends_command=True)


def full_disk(directory: Path) -> Fault:
    """Return a fault that fills a disk for a while.

    directory: mount point of a small file system to which the run writes.
    """

    def inflict(_run: Run) -> None:
        ballast = directory / "ballast"
        fill(ballast)
        time.sleep(AWAY_S)
        ballast.unlink()

    return Fault(name="fill the disk", inflict=inflict)


def database_faults(server: PostgresqlServer, proxy: BreakingProxy) -> list[Fault]:
    """Return a fault that crashes and restarts PostgreSQL, and one that cuts the connections to it.

    proxy: the proxy between the run and the server.
    """

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
    """The order of the faults; it depends only on the seed and the list of faults."""

    faults: list[Fault]
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    """Number of times each fault was inflicted, by name."""

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
