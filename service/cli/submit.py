"""`rayloom submit`: submit the tasks of a file to a service, and wait until they have ended.

The command writes the result of each ended task as a line to a file, so that the same command
continues after an interruption. The service recognises accepted tasks by their ids.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import IO

from pydantic import ValidationError
from rich.live import Live
from rich.text import Text

from actors.environment.tasks import BadTaskFile, read_tasks
from actors.types import Task
from service.api.schemas import RolloutAnswer, TaskBody
from service.cli.outlet import OutletConsole, outlet, say
from service.client import OVER, ApiError, Client, NoAnswer
from service.config.file import ConfigError
from service.launch.signals import EXIT_INTERRUPTED

EXIT_OK, EXIT_NO_ANSWER, EXIT_REFUSED = 0, 1, 2
# Smallest time between plain lines.
LINE_EVERY_S = 10.0
LOOK_WAIT_S = 5


def submit_file(
    file: Path,
    client: Client,
    *,
    results_file: Path,
    batch: str | None = None,
    num_samples: int | None = None,
    tasks_per_request: int = 64,
    waits: bool = True,
) -> int:
    """Submit the tasks of a file, and return the exit code.

    waits: whether to wait until all tasks have ended; otherwise wait until they are accepted.
    Raises: ConfigError if a file cannot be used.
    """
    try:
        tasks = read_tasks(file)
        bodies = {task.task_id: _body(task) for task in tasks}
    except BadTaskFile as error:
        raise ConfigError(str(error)) from error
    with ExitStack() as stack:
        try:
            results = stack.enter_context(Results(results_file))
        except OSError as error:
            raise ConfigError(
                f"{results_file}: cannot be written ({error.strerror}); name another file with "
                "--results"
            ) from error
        progress = stack.enter_context(open_progress(os.environ, total=len(tasks)))
        work = _Submitting(
            client=client,
            tasks=tasks,
            bodies=bodies,
            results=results,
            progress=progress,
            batch=batch,
            num_samples=num_samples,
            tasks_per_request=tasks_per_request,
            waits=waits,
        )
        try:
            work.run()
        except KeyboardInterrupt:
            code, why = EXIT_INTERRUPTED, "interrupted"
        except NoAnswer as error:
            code, why = EXIT_NO_ANSWER, str(error)
        except ApiError as error:
            is_refusal = 400 <= error.status < 500
            code, why = EXIT_REFUSED if is_refusal else EXIT_NO_ANSWER, str(error)
        else:
            code, why = EXIT_OK, ""
    say(work.summary())
    if why:
        say(f"rayloom: {why}; the same command continues from here", err=True)
    return code


def _body(task: Task) -> TaskBody:
    try:
        return TaskBody(id=task.task_id, seed=task.seed, data=dict(task.data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadTaskFile(f"task {task.task_id!r}: {where}: {first['msg']}") from error


class Results:
    """The file with the results of tasks that have ended. Use it in a `with` statement."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self.over: dict[str, str] = {}
        """Status of each ended task, by name."""
        self.rewards: list[float] = []

    def __enter__(self) -> Results:
        """Read the existing results, and open the file for appending. Raises: OSError."""
        lines = self._path.read_bytes().split(b"\n") if self._path.exists() else [b""]
        for line in lines[:-1]:
            self._note(json.loads(line))
        self._file = self._path.open("a", encoding="utf-8")
        if lines[-1]:
            # An earlier command was killed in the middle of a line.
            self._file.truncate(sum(len(line) + 1 for line in lines[:-1]))
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, name: str, answer: RolloutAnswer | None) -> None:
        """Write the result of a task.

        answer: the service's answer; None if the service no longer has the task.
        """
        line = {"id": name, "status": "unknown"}
        if answer is not None:
            line = answer.model_dump(mode="json", exclude={"ahead"})
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._note(line)

    def _note(self, line: Mapping[str, object]) -> None:
        self.over[str(line["id"])] = str(line["status"])
        reward = line.get("reward")
        if isinstance(reward, int | float):
            self.rewards.append(reward)


@dataclass(kw_only=True)
class _Submitting:
    """Submits the tasks; `run` returns when everything is done."""

    client: Client
    tasks: list[Task]
    bodies: Mapping[str, TaskBody]
    results: Results
    progress: Progress
    batch: str | None
    num_samples: int | None
    tasks_per_request: int
    waits: bool
    accepted: deque[str] = field(default_factory=deque)
    """Accepted tasks, in order, that may not have ended yet."""

    def run(self) -> None:
        """Submit all tasks, and wait for them if requested.

        Raises: ApiError if the service refuses a task; NoAnswer if it does not answer.
        """
        left = deque(task for task in self.tasks if task.task_id not in self.results.over)
        while left or (self.accepted and self.waits):
            if left and self._has_room(batch := _batch_of(left, self.tasks_per_request)):
                for _ in batch:
                    self.accepted.append(left.popleft().task_id)
            elif self.accepted:
                self._look()
            self.progress.show(self.summary())

    def _has_room(self, batch: list[Task]) -> bool:
        """Submit a batch; return False if the service has no room, or the batch is too large."""
        try:
            self.client.submit(
                batch[0].environment,
                [self.bodies[task.task_id] for task in batch],
                num_samples=self.num_samples,
                batch=self.batch,
                waits_for_room=not self.accepted,
            )
        except ApiError as error:
            if error.status == 413 and len(batch) > 1:
                self.tasks_per_request = len(batch) // 2
            elif error.status != 429:
                raise
            return False
        return True

    def _look(self) -> None:
        """Write the result of the oldest accepted task if this task has ended."""
        name, answer = self.accepted[0], None
        try:
            answer = self.client.rollout(name, wait_s=LOOK_WAIT_S)
        except ApiError as error:
            if error.status != 404:
                raise
        if answer is None or answer.status in OVER:
            self.accepted.popleft()
            self.results.add(name, answer)

    def summary(self) -> str:
        over, rewards = self.results.over, self.results.rewards
        counts = Counter(over[task.task_id] for task in self.tasks if task.task_id in over)
        parts = [f"{counts.total()} of {len(self.tasks)} tasks are over"]
        parts += [f"{count} {status}" for status, count in sorted(counts.items())]
        if self.accepted:
            parts.append(f"{len(self.accepted)} accepted")
        if rewards:
            parts.append(f"mean reward {sum(rewards) / len(rewards):.3f}")
        return ", ".join(parts)


def _batch_of(tasks: deque[Task], size: int) -> list[Task]:
    """Return the first tasks that share an environment, at most `size`."""
    first = tasks[0].environment
    return list(takewhile(lambda task: task.environment == first, list(tasks)[:size]))


class Progress:
    """Shows progress: on a terminal in one line that changes, elsewhere in lines now and then."""

    def __init__(self, live: Live | None) -> None:
        self._live = live
        self._shown, self._shown_at = "", 0.0

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with outlet(self._live.console.file):
                self._live.stop()

    def show(self, text: str) -> None:
        now = time.monotonic()
        if self._live is not None:
            with outlet(self._live.console.file):
                self._live.update(Text(text))
        elif text != self._shown and now >= self._shown_at + LINE_EVERY_S:
            say(text)
            self._shown, self._shown_at = text, now


def open_progress(environ: Mapping[str, str], *, total: int) -> Progress:
    """Return the progress display; it prints plain lines in a pipe, in CI, or with NO_COLOR set."""
    console = OutletConsole()
    is_plain = bool(environ.get("NO_COLOR") or environ.get("CI")) or not console.is_terminal
    if is_plain or console.is_dumb_terminal:
        say(f"{total} tasks to submit")
        return Progress(None)
    return Progress(Live(console=console, transient=True, refresh_per_second=4))
