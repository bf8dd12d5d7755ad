"""Measure what a long history costs at a run's start, resume and end, and for `inspect`.

    python -m benchmarks.long_history [--steps 100000] [--rollouts 200] [--keep DIRECTORY]

The benchmark makes the directory of a short run and of a long one (`history_inputs`). Then it
measures each part in a separate process, for the two runs in turn: the seconds without the imports,
and the growth of the process's memory after the imports. It takes minutes to make the long run;
with --keep this is done only once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from actors.limits import MIB
from actors.metrics import Metrics
from actors.trajectory_queue.ledger import LedgerCounts
from benchmarks.history_inputs import Scale, make_history
from service.config.file import load_config
from service.inspect.reader import find_entry, open_journal
from service.launch.resume import finished_step
from service.launch.run_dir import RunDir, check_resumable
from service.report.document import write_report
from service.run.recorder import RunRecorder
from service.store.lineage import read_history
from service.store.run_store import RunStore
from service.telemetry.summary import summarize_run, write_summary
from service.worker_thread import WorkerThread

SHORT_STEPS = 100
PASSES = 3


def start(run_dir: RunDir) -> None:
    """Open the store and the recorder as a supervisor does, and begin the first term."""

    async def begin() -> None:
        store = RunStore(run_dir.database_url)
        recorder = RunRecorder(store, Metrics(), thread=WorkerThread("store"), num_steps=1)
        await recorder.begin_term(store.acquire_lease(owner="benchmark:2"))
        store.close()

    asyncio.run(begin())


def resume(run_dir: RunDir) -> None:
    """Run the checks that `--resume` makes before anything starts."""
    config = load_config(run_dir.config_file)
    check_resumable(run_dir, config)
    finished_step(run_dir, steps=config.run.steps)


def inspect(run_dir: RunDir) -> None:
    """Inspect the last trajectory of the run."""
    journal = open_journal(run_dir.path)
    find_entry(journal, f"g{journal.files[-1].step:06d}.0-0")


def end(run_dir: RunDir) -> None:
    """Write summary.json and the report of the run."""
    store = RunStore(run_dir.database_url)
    history = read_history(store)
    store.close()
    summary = summarize_run(history, ledger=LedgerCounts(), wall_s=1.0, versions={})
    write_summary(run_dir.summary_file, summary)
    write_report(
        run_dir.report_file,
        summary=summary,
        history=history,
        config_text=run_dir.config_file.read_text(),
    )


PARTS: dict[str, Callable[[RunDir], None]] = {
    part.__name__: part for part in (start, resume, inspect, end)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rollouts", type=int, default=200, help="of one step")
    parser.add_argument("--keep", type=Path, help="keep the two runs here, or take those that are")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        part, directory = options.measure
        print(json.dumps(_measure(PARTS[part], RunDir(path=Path(directory)))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = options.keep or Path(temporary)
        runs = {steps: place / f"{steps}-steps" for steps in (SHORT_STEPS, options.steps)}
        for steps, path in runs.items():
            if not path.exists():
                _make(path, Scale(steps=steps, rollouts_per_step=options.rollouts))
        for steps, path in runs.items():
            size = RunDir(path=path).database_file.stat().st_size
            print(f"{steps:,} steps, {steps * options.rollouts:,} rollouts: {size / MIB:.0f} MiB")
        for part in PARTS:
            _compare(part, list(runs.values()))


def _make(path: Path, scale: Scale) -> None:
    began, aside = time.monotonic(), path.with_suffix(".partial")

    def tell(step: int) -> None:
        if step and step % 5000 == 0:
            print(f"step {step:,}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    shutil.rmtree(aside, ignore_errors=True)
    asyncio.run(make_history(RunDir(path=aside), scale, tell=tell))
    aside.rename(path)


def _compare(part: str, runs: list[Path]) -> None:
    """Print the medians of the short and the long run, and their ratios."""
    found: dict[Path, list[tuple[float, float]]] = {run: [] for run in runs}
    for _ in range(PASSES):
        for run in runs:
            # Measured on a copy, because a start adds a term.
            with tempfile.TemporaryDirectory() as temporary:
                copy = Path(temporary) / "run"
                shutil.copytree(run, copy)
                line = [sys.executable, "-m", __spec__.name, "--measure", part, str(copy)]
                answer = subprocess.run(line, check=True, capture_output=True, text=True).stdout
            seconds, memory = json.loads(answer.splitlines()[-1])
            found[run].append((seconds, memory))
    short, long = (
        [statistics.median(each) for each in zip(*found[run], strict=True)] for run in runs
    )
    print(
        f"{part:8} seconds {short[0]:7.3f} -> {long[0]:7.3f} ({long[0] / short[0]:.1f} times)   "
        f"memory {short[1]:6.1f} -> {long[1]:6.1f} MiB ({long[1] - short[1]:+.1f})"
    )


def _measure(part: Callable[[RunDir], None], run_dir: RunDir) -> tuple[float, float]:
    """Return a part's seconds, and its MiB above the memory after the imports."""
    before = psutil.Process().memory_info().rss
    began = time.monotonic()
    part(run_dir)
    seconds = time.monotonic() - began
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / MIB


if __name__ == "__main__":
    main()
