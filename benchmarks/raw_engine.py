"""Run bare vLLM in a benchmark's process: `AsyncLLM.generate` with the service's settings.

This is the other side of benchmarks of the whole path to an engine. It receives prompts that were
played before, turn by turn, and samples the same number of tokens for each turn. `pin` gives the
engine's process one core and everything else the other, on both sides.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from service.inference.settings import EngineSettings

ENGINE_CORE, OTHER_CORE = {0}, {1}

_Job = TypeVar("_Job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A turn, as a request to vLLM."""

    prompt: list[int]
    num_tokens: int


class RawEngine:
    """A bare engine. Do not start it in a process that runs another vLLM engine."""

    def __init__(self, settings: EngineSettings) -> None:
        os.environ.update(settings.environment)
        from vllm.v1.engine.async_llm import AsyncLLM

        from service.inference.engine import _engine_args

        self._loop = asyncio.new_event_loop()
        arguments = _engine_args(settings, records_experts=False)
        arguments.weight_transfer_config = None

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        self._llm = self._loop.run_until_complete(start())
        (self._engine,) = (
            child
            for child in psutil.Process().children()
            if "EngineCore" in " ".join(child.cmdline())
        )
        self._number = 0

    def pin(self) -> None:
        pin(self._engine.pid, ENGINE_CORE)
        pin(os.getpid(), OTHER_CORE)

    @property
    def pid(self) -> int:
        """Return the pid of the engine's process."""
        return int(self._engine.pid)

    def cpu_s(self) -> float:
        """Return the processor seconds of the engine's process."""
        return cpu_s(self._engine)

    def play(self, conversations: list[list[Asked]], *, at_once: int | None = None) -> float:
        """Play `at_once` conversations at a time, or all if it is None; return the seconds."""
        started = time.perf_counter()
        self._loop.run_until_complete(
            some_at_once(conversations, self._converse, limit=at_once or len(conversations))
        )
        return time.perf_counter() - started

    async def _converse(self, turns: list[Asked]) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        for turn in turns:
            self._number += 1
            parameters = SamplingParams(
                temperature=1.0,
                max_tokens=turn.num_tokens,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,
            )
            prompt = tokens_input(turn.prompt)
            async for output in self._llm.generate(prompt, parameters, str(self._number)):
                assert not output.finished or len(output.outputs[0].token_ids) == turn.num_tokens

    def close(self) -> None:
        self._llm.shutdown()


async def some_at_once(
    jobs: Iterable[_Job], work: Callable[[_Job], Awaitable[None]], *, limit: int
) -> None:
    """Run jobs in their order, never more than `limit` at once."""
    left = iter(jobs)

    async def go_on() -> None:
        for job in left:
            await work(job)

    await asyncio.gather(*(go_on() for _ in range(limit)))


def cpu_s(process: psutil.Process) -> float:
    """Return the seconds of processor time so far; 0 for a process that has ended."""
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def pin(pid: int, cores: set[int]) -> None:
    """Pin all threads of a process to `cores` with one priority; later threads inherit both."""
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        # A thread may have ended in the meantime.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)
            # Ray lowers the priority of its workers: beside other work they would fall behind.
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
