"""Call third-party code, which may hang, raise anything, or refuse to be cancelled.

Invariant: `bounded` ends within its limit plus a second of grace, and raises only the errors that
its docstring names. A later error of an abandoned call is ignored. A user's environment may fail a
thousand times a minute, so `FaultLog` writes the traceback once for each location.
`LostCallCounter` counts the calls that gave no answer.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

# Time in seconds for a cancelled call to clean up before its environment is closed.
UNWIND_S = 1.0
MAX_LOCATIONS = 100
_CLOSE_FAILED = "its close failed too: "

_Result = TypeVar("_Result")
# A new thread is started only if none is idle. The maximum is the default number of an actor's
# slots.
_threads = ThreadPoolExecutor(max_workers=256, thread_name_prefix="user-code")
# The event loop keeps only weak references to its tasks.
_abandoned: set[asyncio.Task[Any]] = set()


class CallTimedOut(Exception):
    """Raised if a call does not end within its limit."""


class CallFailed(Exception):
    """Raised if a call raises; `__cause__` is the call's exception."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(describe(error))
        self.error = error


class RaisedInWorker(Exception):
    """A substitute, made only of texts, for an exception that a call raised in a worker.

    The module `workers` runs such calls in other processes.
    """

    def __init__(self, kind: str, text: str, where: str, trace: str) -> None:
        """Store the description of an exception.

        Args:
            kind: Name of the exception's type.
            text: The exception's own text.
            where: The place that raised it, in the form of `location`.
            trace: The frames of its traceback as text.
        """
        super().__init__(text)
        self.kind = kind
        self.where = where
        self.add_note(f"{trace}{kind}")


class _CallExited(Exception):
    """Raised if a call raises an exception that would end the event loop or hang the caller."""


def describe(error: BaseException) -> str:
    """Return one line about an error: its type and the beginning of its text."""
    text = "its text cannot be read"
    # Third-party exceptions: `__str__` itself may raise, or return text that UTF-8 cannot encode.
    with suppress(Exception, SystemExit):
        text = " ".join(str(error).split())[:300].encode(errors="replace").decode()
    kind = error.kind if isinstance(error, RaisedInWorker) else type(error).__name__
    return f"{kind}: {text}{note_of_close(error)}" if text else f"{kind}{note_of_close(error)}"


def type_of(value: object) -> str:
    """Return the name of a value's type with its article, such as "a str" or "an int"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def shown_json(value: object) -> str:
    """Return a value from JSON or YAML as text for a message; None becomes null."""
    return "null" if value is None else f"{value!r:.200}"


def json_type_of(value: object) -> str:
    """Return the name of a value's type as `type_of` does, but null for None, as JSON has it."""
    return "null" if value is None else type_of(value)


@asynccontextmanager
async def closing(close: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Call `close` at the end of the block.

    If the body raises, its exception is raised, and an exception of `close` is added to it as a
    note (`note_of_close`).
    """
    try:
        yield
    except BaseException as error:
        try:
            await close()
        except (Exception, SystemExit) as second:  # noqa: BLE001  # the user's code may raise any
            root_cause(error).add_note(f"{_CLOSE_FAILED}{describe(root_cause(second))}")
        raise
    await close()


def note_of_close(error: BaseException) -> str:
    """Return the note that `closing` added to an exception, to be appended to an error text.

    The note begins with "; ". Return "" if there is no note.
    """
    notes = getattr(error, "__notes__", ())
    return "".join(f"; {note}" for note in notes if note.startswith(_CLOSE_FAILED))


async def in_thread(
    call: Callable[[], _Result], *, on_start: Callable[[], None] | None = None
) -> _Result:
    """Make a blocking call in a thread, and return its result.

    asyncio has few default threads, so a few hanging calls would make all others wait.
    Args: on_start: called in the event loop after the thread has begun.
    """
    loop = asyncio.get_running_loop()

    def work() -> _Result:
        if on_start is not None:
            loop.call_soon_threadsafe(on_start)
        try:
            return call()
        except (SystemExit, KeyboardInterrupt, StopIteration) as error:
            # SystemExit and KeyboardInterrupt would end the event loop, as in `_contained`. With
            # StopIteration, which a future cannot hold, the caller would wait forever.
            raise _CallExited(describe(error)) from error

    return await loop.run_in_executor(_threads, work)


def num_abandoned() -> int:
    """Return the number of abandoned calls of this process that have not ended yet."""
    return len(_abandoned)


async def bounded(call: Callable[[], Awaitable[_Result]], *, limit_s: float) -> _Result:
    """Return the result of a call that is awaited for at most limit_s seconds.

    Args: call: a function that returns the awaitable.
    Raises: CallTimedOut; CallFailed if the function or the awaitable raises; asyncio.CancelledError
    only if the caller itself is cancelled (the call is then cancelled too).
    """
    task = asyncio.ensure_future(_contained(call))
    try:
        # Most calls end in their first step and need no timer.
        await asyncio.sleep(0)
        if not task.done():
            await asyncio.wait((task,), timeout=max(0.0, limit_s))
        if not task.done():
            _abandon(task)
            await asyncio.wait((task,), timeout=UNWIND_S)
            raise CallTimedOut(f"no answer within {limit_s:.3g} s")
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if task.cancelled():
        raise CallFailed(asyncio.CancelledError())
    error = task.exception()
    if error is not None:
        raise CallFailed(error) from error
    return task.result()


async def _contained(call: Callable[[], Awaitable[_Result]]) -> _Result:
    try:
        return await call()
    except (SystemExit, KeyboardInterrupt) as error:
        # In a task these two would end the event loop, and with it every other episode.
        raise _CallExited(describe(error)) from error


def _abandon(task: asyncio.Task[Any]) -> None:
    _abandoned.add(task)
    task.add_done_callback(_take_error)
    task.cancel()


def _take_error(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()


def root_cause(error: BaseException) -> BaseException:
    """Follow the chain of `__cause__` from an error, and return its last error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def location(error: BaseException, *, outside: Collection[str] = ()) -> str:
    """Return the place where an error was raised, such as `/path/game.py:12 in reset`, or "".

    outside: files whose lines are not named; the line that called them is named instead.
    """
    if isinstance(error, RaisedInWorker):
        return error.where
    all_frames = traceback.extract_tb(error.__traceback__)
    frames = [each for each in all_frames if each.filename not in outside]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


class FaultLog:
    """A log that has each fault (kind and location) only once, and at most MAX_LOCATIONS faults."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: set[tuple[str, str]] = set()

    def log(self, summary: str, error: BaseException) -> None:
        """Log the summary with the traceback, unless this fault has been logged already."""
        root = root_cause(error)
        key = (type(root).__name__, location(root))
        if key in self._seen or len(self._seen) >= MAX_LOCATIONS:
            return
        self._seen.add(key)
        self._logger.warning("%s; further such errors are only counted", summary, exc_info=root)


# The calls of a user's functions that gave no answer, by function, task and how they ended.
MAX_COUNTED = 1000
MAX_TASKS_NAMED = 3
_logger = logging.getLogger(__name__)

task_id: ContextVar[str] = ContextVar("task_id", default="")
"""The id of the task being played in the current context, for counts and log lines; empty if there
is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostCalls:
    """Calls of one function that gave no answer (lost calls) and that all ended in the same way."""

    function: str
    end: str
    """How the calls ended: `killed` (the pool killed the process at the call's limit), `cancelled`
    (the pool cancelled the coroutine at its limit) or `died` (the process ended during the call).
    """
    count: int
    why: str
    """Why the first of these calls was lost."""
    tasks: tuple[str, ...]
    """The known ids of the first tasks whose calls were lost, at most MAX_TASKS_NAMED of them."""


class LostCallCounter:
    """A counter of lost calls: the calls to a pool of workers that gave no answer."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        """The number of calls that gave no answer, by function, task id and `LostCalls.end`."""
        self._reasons: dict[tuple[str, str], str] = {}
        """Why the first lost call was lost, by function and `LostCalls.end`."""

    def count(self, function: str, end: str, why: str) -> None:
        """Count a lost call of the current task, and log the first lost call of each function."""
        task = task_id.get()
        is_first = not any(each == function for each, _, _ in self.counts)
        if len(self.counts) >= MAX_COUNTED:
            task = ""
        self.counts[function, task, end] += 1
        self._reasons.setdefault((function, end), why)
        if is_first:
            _logger.warning(
                "%s: a call %s: %s (task %s); further such calls are only counted",
                function,
                "ended its process" if end == "died" else "was ended at its limit",
                why,
                task or "unknown",
            )

    def add(self, other: LostCallCounter) -> None:
        """Add the counts of another counter.

        A pool that replaces an outdated pool adds the outdated pool's counts to its own.
        """
        self.counts.update(other.counts)
        self._reasons.update(other._reasons)

    @property
    def calls(self) -> tuple[LostCalls, ...]:
        """The calls that gave no answer, as one entry for each function and each way of ending.

        The calls of all tasks are counted together. The entries are in the order in which they
        first occurred.
        """
        counts: Counter[tuple[str, str]] = Counter()
        tasks: dict[tuple[str, str], list[str]] = {}
        for (function, task, end), count in self.counts.items():
            counts[function, end] += count
            if task:
                tasks.setdefault((function, end), []).append(task)
        return tuple(
            LostCalls(
                function=function,
                end=end,
                count=count,
                why=self._reasons[function, end],
                tasks=tuple(tasks.get((function, end), ())[:MAX_TASKS_NAMED]),
            )
            for (function, end), count in counts.items()
        )
