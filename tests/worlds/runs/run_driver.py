"""`rayloom train` and `serve` started as a user does: in a process that is watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

from actors.trainer.checkpoint import FORMAT, MANIFEST, Progress
from actors.trajectory_queue.ledger import LedgerEvent
from service.launch.run_dir import RunDir
from service.store.errors import StoreError
from service.store.lineage import read_events, read_history
from service.store.read_only import ReadOnlyStore
from service.telemetry.summary import History

ROOT = Path(__file__).parents[3]
_Read = TypeVar("_Read")
# Limits for waiting on a busy machine, not measurements: until a run trains, and for one step.
START_S = 300.0
STEP_S = 120.0
# Seconds for which a part may be missing in the table of processes: it may be restarting.
FOUND_S = 120.0

# Matches an engine's process by its title or, since some have no title, by its command line.
ENGINE = (
    r"VLLM::EngineCore"
    r"|\S*python\S* (?:-\S+ )*?-c from multiprocessing\.spawn import spawn_main"
)

# Each step has four groups of four short games and takes seconds; every part is the real one.
SMALL: dict[str, Any] = {
    "run": {"name": "small", "steps": 4, "checkpoint_every": 2, "evaluate_every": 2},
    "model": {"tiny": {"warmup_steps": 20}, "max_context_tokens": 256},
    "tasks": {"environment": "guessing", "evaluation_tasks": 4},
    "rollouts": {
        "slots_per_actor": 16,
        "max_turns": 4,
        "max_tokens_per_turn": 8,
        # If truncated answers were masked, they would teach nothing, and a long run would end
        # once its policy no longer ends any answer.
        "outcomes": {"truncated_tokens": {"disposition": "train_clamped"}},
    },
    "algorithm": {"groups_per_step": 4, "group_size": 4},
    "inference": {"enforce_eager": True, "max_num_seqs": 32, "kv_cache_gib": 0.25},
    "trainer": {"num_ranks": 2, "learning_rate": 4e-4},
    "queue": {"max_mib": 64},
}


def small_config(directory: Path, built: str | None = None, **sections: dict[str, Any]) -> Path:
    """Write SMALL with some sections' keys replaced; return the file.

    built: the path of SMALL's model, if it exists already; None: the run builds its own.
    """
    tree = {name: dict(keys) for name, keys in SMALL.items()}
    if built is not None:
        tree["model"].update(tiny=None, path=built)
    for name, keys in sections.items():
        tree.setdefault(name, {}).update(keys)
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def write_checkpoint(place: RunDir, step: int, term: int = 1) -> Path:
    """Write the manifest of a checkpoint without its weights; return its directory."""
    progress = Progress(
        step=step, version=step, term=term, num_updates=step, num_ranks=1, model="/gone"
    )
    directory = place.checkpoints / progress.directory_name
    directory.mkdir(parents=True)
    (directory / MANIFEST).write_text(json.dumps({"format": FORMAT, **asdict(progress)}))
    return directory


@dataclass
class Run:
    """A started `rayloom train` or `serve`, and the directory it writes to."""

    process: subprocess.Popen[str]
    place: RunDir
    output: Path
    # The number of characters that earlier starts have printed.
    printed_before: int = 0

    def wait(self, *, limit_s: float) -> int:
        return self.process.wait(timeout=limit_s)

    def wait_for_step(self, step: int, *, limit_s: float) -> None:
        """Wait until `step` is stored; fail if the run ends before that, or at the limit."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self._newest_step() >= step:
                return
            assert self.process.poll() is None, f"the run ended early: {self.log()}"
            time.sleep(0.2)
        raise AssertionError(f"step {step} is not stored after {limit_s} s: {self.log()}")

    def advance(self, num_steps: int, *, limit_s: float) -> None:
        """Wait for `num_steps` more steps than are stored now."""
        self.wait_for_step(self._newest_step() + num_steps, limit_s=limit_s)

    def wait_for_log(self, words: str, *, limit_s: float) -> None:
        """Wait until the log has `words`; fail if the run ends before that, or at the limit."""
        deadline = time.monotonic() + limit_s
        while words not in self.log():
            assert self.process.poll() is None, f"the run ended early: {self.log()}"
            assert time.monotonic() < deadline, f"no {words!r} within {limit_s} s: {self.log()}"
            time.sleep(0.1)

    def metrics_address(self, *, limit_s: float) -> str:
        """Return host:port of the metrics, which the run logs when it starts to serve them."""
        self.wait_for_log("metrics at http", limit_s=limit_s)
        found = re.findall(r"metrics at http://(\S+)/metrics", self.place.log_file.read_text())
        return str(found[-1])

    def api_address(self, *, limit_s: float) -> str:
        """Return http://host:port/prefix of the API, as the newest start has printed it."""
        said = "the API listens on "
        self.wait_for_output(said, limit_s=limit_s)
        return self.output.read_text()[self.printed_before :].rpartition(said)[2].split()[0]

    def wait_for_output(self, words: str, *, limit_s: float) -> None:
        """Wait until the newest start of the run has printed `words`."""
        deadline = time.monotonic() + limit_s
        while words not in self.output.read_text()[self.printed_before :]:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)

    def alive(self) -> list[psutil.Process]:
        """Return every living process that this run has started, whoever its parent is now."""
        if self.process.poll() is not None and psutil.pid_exists(self.process.pid):
            # The id was reused, which happens only after all processes of its session have ended.
            return []
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                # The run leads a session of its own, and no process that it starts leaves it.
                is_ours = os.getsid(process.pid) == self.process.pid
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_until_gone(self, *, limit_s: float) -> list[psutil.Process]:
        """Wait until no process of the run is alive; return those that are, at the limit."""
        deadline = time.monotonic() + limit_s
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def processes(self, title: str) -> list[psutil.Process]:
        """Return this run's descendants whose title a pattern matches: ray::EnvironmentActor."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if re.match(title, " ".join(child.cmdline())):
                    found.append(child)
        return found

    def kill_part(self, title: str) -> None:
        """Kill the newest process of a part with SIGKILL."""
        self._newest(title).send_signal(signal.SIGKILL)

    def freeze_part(self, title: str) -> psutil.Process:
        """Freeze the oldest process of a part with SIGSTOP.

        A newer one may still be starting, and a start has a deadline of minutes.
        """
        oldest = min(self._found(title), key=psutil.Process.create_time)
        oldest.send_signal(signal.SIGSTOP)
        return oldest

    def _newest(self, title: str) -> psutil.Process:
        return max(self._found(title), key=psutil.Process.create_time)

    def _found(self, title: str) -> list[psutil.Process]:
        """Return the processes of a part; wait until there is at least one.

        A table that is read while processes start and end may lack one.
        """
        deadline = time.monotonic() + FOUND_S
        while not (found := self.processes(title)):
            assert time.monotonic() < deadline, f"no process {title} in {self.alive()}"
            time.sleep(0.1)
        return found

    def pids(self, title: str) -> set[int]:
        """Return the ids of a part's processes, of which there must be at least one."""
        return {process.pid for process in self._found(title)}

    def interrupt(self) -> None:
        """Send SIGINT to the whole process group, as Ctrl-C in a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def log(self) -> str:
        """Return the end of the log or, if there is no log file, of the run's output."""
        text = (self.place.log_file if self.place.log_file.exists() else self.output).read_text()
        return text[-4000:]

    def summary(self) -> dict[str, Any]:
        tree: dict[str, Any] = json.loads(self.place.summary_file.read_text())
        return tree

    def history(self) -> History:
        return self._read(read_history)

    def events(self) -> tuple[LedgerEvent, ...]:
        return self._read(read_events)

    def _newest_step(self) -> int:
        if not self.place.may_have_run():
            return 0
        # The database's file exists before its tables do.
        steps = self._read(lambda store: read_history(store).steps if store.newest_term() else ())
        return steps[-1].step if steps else 0

    def _read(self, what: Callable[[ReadOnlyStore], _Read]) -> _Read:
        """Read from the run's database; try again while it cannot be read."""
        deadline = time.monotonic() + FOUND_S
        while True:
            try:
                with self.place.looked_into() as store:
                    return what(store)
            except StoreError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)


@contextlib.contextmanager
def running(
    config: Path | None,
    run_dir: Path,
    arguments: Sequence[str] = (),
    *,
    command: str = "train",
    entrance: Sequence[str] = (),
    cwd: Path = ROOT,
    is_job: bool = False,
) -> Iterator[Run]:
    """Start a run; kill all its processes at the end of the block.

    config: None if the arguments name the run that is resumed, or what is played.
    entrance: a prefix that runs the command on another node.
    is_job: whether the run stays in this session, as a job of a shell; otherwise it gets its own.
    """
    where = ["--resume", str(run_dir)] if "--resume" in arguments else ["--run-dir", str(run_dir)]
    if command == "evaluate":
        # `evaluate` makes no run; its arguments name one.
        where = []
    rest = [argument for argument in arguments if argument != "--resume"]
    # A command that enters another mount namespace starts in the root of that namespace.
    place = [*entrance, "env", f"--chdir={cwd}"] if entrance else []
    program = [*place, sys.executable, "-m", "service.cli.main", command]
    line = [*program, *([] if config is None else [str(config)]), *where, *rest]
    output = run_dir.parent / f"{run_dir.name}.out"
    printed_before = len(output.read_text()) if output.exists() else 0
    with output.open("a") as file:
        process = subprocess.Popen(
            line, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=not is_job,
            process_group=0 if is_job else None,
        )  # fmt: skip
    run = Run(
        process=process, place=RunDir(path=run_dir), output=output, printed_before=printed_before
    )
    try:
        yield run
    finally:
        end(run)


def end(run: Run) -> None:
    """Kill a run and every process that it started with SIGKILL."""
    family = run.alive()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=20)
    run.process.kill()
    run.process.wait(timeout=20)
