"""Drives `rayloom train` and `serve` as a user does: a process of its own, watched from outside."""

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
# Bounds of a wait on a busy machine, not measures: until a run trains, and of one step.
START_S = 300.0
STEP_S = 120.0
# Seconds that a part may be missing in the table of processes: it may be on its way back.
FOUND_S = 120.0

# An engine's process by its title, or by its command line: now and then one comes without a title.
ENGINE = (
    r"VLLM::EngineCore"
    r"|\S*python\S* (?:-\S+ )*?-c from multiprocessing\.spawn import spawn_main"
)

# Four groups of four short games a step: seconds each, and every part is the real one.
SMALL: dict[str, Any] = {
    "run": {"name": "small", "steps": 4, "checkpoint_every": 2, "evaluate_every": 2},
    "model": {"tiny": {"warmup_steps": 20}, "max_context_tokens": 256},
    "tasks": {"environment": "guessing", "evaluation_tasks": 4},
    "rollouts": {
        "slots_per_actor": 16,
        "max_turns": 4,
        "max_tokens_per_turn": 8,
        # Masked, they would teach nothing, and a long run ends once its policy ends no answer.
        "outcomes": {"truncated_tokens": {"disposition": "train_clamped"}},
    },
    "algorithm": {"groups_per_step": 4, "group_size": 4},
    "inference": {"enforce_eager": True, "max_num_seqs": 32, "kv_cache_gib": 0.25},
    "trainer": {"num_ranks": 2, "learning_rate": 4e-4},
    "queue": {"max_mib": 64},
}


def small_config(directory: Path, built: str | None = None, **sections: dict[str, Any]) -> Path:
    """Write SMALL with some sections' keys replaced; returns the file.

    built: SMALL's model, where it is there already; None: the run builds its own.
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
    """The manifest of a checkpoint without its weights; returns its directory."""
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
    # Characters that earlier starts have printed.
    printed_before: int = 0

    def wait(self, *, limit_s: float) -> int:
        return self.process.wait(timeout=limit_s)

    def wait_for_step(self, step: int, *, limit_s: float) -> None:
        """Wait until `step` is stored; fails when the run ends before, or at the limit."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self._newest_step() >= step:
                return
            assert self.process.poll() is None, f"the run ended early: {self.log()}"
            time.sleep(0.2)
        raise AssertionError(f"step {step} did not come within {limit_s} s: {self.log()}")

    def advance(self, num_steps: int, *, limit_s: float) -> None:
        """Wait for so many steps beyond those that are stored now."""
        self.wait_for_step(self._newest_step() + num_steps, limit_s=limit_s)

    def wait_for_log(self, words: str, *, limit_s: float) -> None:
        """Wait until the run has written `words`; fails when it ends before, or at the limit."""
        deadline = time.monotonic() + limit_s
        while words not in self.log():
            assert self.process.poll() is None, f"the run ended early: {self.log()}"
            assert time.monotonic() < deadline, f"no {words!r} within {limit_s} s: {self.log()}"
            time.sleep(0.1)

    def metrics_address(self, *, limit_s: float) -> str:
        """host:port, which the run writes down when it starts to serve them."""
        self.wait_for_log("metrics at http", limit_s=limit_s)
        found = re.findall(r"metrics at http://(\S+)/metrics", self.place.log_file.read_text())
        return str(found[-1])

    def api_address(self, *, limit_s: float) -> str:
        """http://host:port/prefix, as the newest start has printed it."""
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
        """Every process that this run has started and that lives, whoever its parent is now."""
        if self.process.poll() is not None and psutil.pid_exists(self.process.pid):
            # A number is given anew once no process of its session is left: it is another's now.
            return []
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                # The run leads a session of its own, and nothing that it starts leaves it.
                is_ours = os.getsid(process.pid) == self.process.pid
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_until_gone(self, *, limit_s: float) -> list[psutil.Process]:
        """Wait until nothing of the run is alive; returns what still is at the limit."""
        deadline = time.monotonic() + limit_s
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def processes(self, title: str) -> list[psutil.Process]:
        """This run's own descendants whose title begins so (a pattern): ray::EnvironmentActor."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if re.match(title, " ".join(child.cmdline())):
                    found.append(child)
        return found

    def kill_part(self, title: str) -> None:
        """kill -9 one process of a part."""
        self._newest(title).send_signal(signal.SIGKILL)

    def freeze_part(self, title: str) -> psutil.Process:
        """Stop one process of a part without ending it: one that has long been at work.

        A replacement that is still starting has the deadline of a start, which is minutes.
        """
        oldest = min(self._found(title), key=psutil.Process.create_time)
        oldest.send_signal(signal.SIGSTOP)
        return oldest

    def _newest(self, title: str) -> psutil.Process:
        return max(self._found(title), key=psutil.Process.create_time)

    def _found(self, title: str) -> list[psutil.Process]:
        """At least one: a table that is read while processes come and go may lack one for once."""
        deadline = time.monotonic() + FOUND_S
        while not (found := self.processes(title)):
            assert time.monotonic() < deadline, f"no process {title} in {self.alive()}"
            time.sleep(0.1)
        return found

    def pids(self, title: str) -> set[int]:
        """The processes of a part, of which there is one at least."""
        return {process.pid for process in self._found(title)}

    def interrupt(self) -> None:
        """Ctrl-C in a terminal: it reaches the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def log(self) -> str:
        """Its end; of a run that never began one, what was printed."""
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
        # Its file is there before its tables are.
        steps = self._read(lambda store: read_history(store).steps if store.newest_term() else ())
        return steps[-1].step if steps else 0

    def _read(self, what: Callable[[ReadOnlyStore], _Read]) -> _Read:
        """From the run's database, also where it is away for a moment."""
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
    """Start a run; whatever happens, nothing of it is left alive at the end.

    is_job: as a shell starts it, in its own session; else in another.

    config: None: the arguments say what is played, or the run that is resumed. entrance: what
    stands before the command, to run it on another node.
    """
    where = ["--resume", str(run_dir)] if "--resume" in arguments else ["--run-dir", str(run_dir)]
    if command == "evaluate":
        # It makes no run; its arguments name one.
        where = []
    rest = [argument for argument in arguments if argument != "--resume"]
    # A command that enters another mount namespace begins in that one's root.
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
    """kill -9 a run and every process that it started."""
    family = run.alive()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=20)
    run.process.kill()
    run.process.wait(timeout=20)
