"""One side of a comparison in a separate process, which makes one step for each command.

The module has both ends of the pipe: the child answers each command with a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.line_process import LineProcess
from benchmarks.pairs import Seconds

READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """A side's report on one training step.

    entropy: mean over the trained tokens, in nats; None if the side does not compute it.
    """

    seconds: Seconds
    loss: float
    grad_norm: float
    entropy: float | None = None


def quiet_environment(*, num_threads: int) -> dict[str, str]:
    """Return the environment variables of every side.

    They set the number of threads, and let the C library keep freed memory. Without them each step
    would get the same pages from the kernel again. The memory thresholds are the largest that glibc
    accepts. A thread that waits for another thread sleeps, so that it occupies no core that the
    other thread needs.
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "passive",
        "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        "MALLOC_MMAP_THRESHOLD_": str(32 * 1024 * 1024),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def restart_quietly(module: str, *, num_threads: int) -> None:
    """Restart `python -m module` with `quiet_environment`, unless its variables are already set.

    A benchmark that measures in its own process calls this, because the C library and the threads
    read their variables when a process starts.
    """
    environment = quiet_environment(num_threads=num_threads)
    if any(os.environ.get(name) != value for name, value in environment.items()):
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **environment})


class Side(LineProcess):
    """The parent's end of the pipe."""

    def step(self, command: str = "step") -> StepTaken:
        """Let the child make one step, and return its report."""
        answer = json.loads(self.ask(command))
        return StepTaken(**{**answer, "seconds": Seconds(**answer["seconds"])})


def serve(step: Callable[[str], StepTaken]) -> None:
    """Answer commands in the child until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    # Any other output of this process goes to standard error.
    os.dup2(2, 1)
    print(json.dumps(READY), file=answers, flush=True)
    for line in sys.stdin:
        taken = step(line.strip())
        seconds = {"wall_s": taken.seconds.wall_s, "cpu_s": taken.seconds.cpu_s}
        values = {"loss": taken.loss, "grad_norm": taken.grad_norm, "entropy": taken.entropy}
        print(json.dumps({"seconds": seconds, **values}), file=answers, flush=True)
