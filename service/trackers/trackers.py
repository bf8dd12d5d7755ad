"""Run the trackers of a run: a thread for each tracker writes the records that the recorder stores.

A thread reads the records that it has not written yet from the run's database, and stores its
progress in a file. Invariants: each record that the database keeps is written at least once, even
if the tracker was unavailable or this process was killed. A failing tracker delays nothing else.
"""

from __future__ import annotations

import inspect
import json
import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from actors.environment.user_names import find
from actors.journal.files import TrajectoryEntry, file_name
from actors.user_code import describe, type_of
from service.config.file import ConfigError, dump_config
from service.config.sections import OwnTrackerSettings
from service.config.tree import Config
from service.inspect.reader import OpenJournal, load_step, tokenizer_of
from service.inspect.token_text import TokenText
from service.launch.run_dir import RunDir
from service.store.lineage import Place, RecordKind, StoredRecord, records_after
from service.store.read_only import ReadOnlyStore
from service.trackers.mlflow import Mlflow
from service.trackers.tracker import Completion, JsonLines, TensorBoard, Tracker, point_of
from service.trackers.trackio import Trackio
from service.trackers.wandb import Wandb

# Maximum number of characters of a prompt and of a completion, as in an evaluation's samples.
MAX_CHARS = 2000


class Completions:
    """Reads from a run's journal the completions that trackers show.

    most: number of trajectories of each step to read, beginning with the first.
    """

    def __init__(self, directory: Path, *, most: int) -> None:
        self._run_dir, self._most = RunDir(path=directory), most

    def of_step(self, step: int, *, term: int) -> list[Completion]:
        """Return the first completions of a step, in the order of the step's groups.

        Return an empty list if the journal no longer has the step.
        Raises: ConfigError if the step's file cannot be read.
        """
        path = self._run_dir.journal / file_name(step, term=term)
        if not self._most or not path.is_file():
            return []
        entries = [each for each in load_step(path).entries if each.trajectory.samples]
        return [self._completion(entry) for entry in entries[: self._most]]

    @cached_property
    def _text(self) -> TokenText:
        return tokenizer_of(OpenJournal(place=self._run_dir.path, run_dir=self._run_dir, files=()))

    def _completion(self, entry: TrajectoryEntry) -> Completion:
        trajectory = entry.trajectory
        rewards: defaultdict[str, float] = defaultdict(float)
        for turn in trajectory.turns:
            for name, value in turn.reward_components.items():
                rewards[name] += value
        first = trajectory.samples[0]
        prompt, answer = np.split(first.token_ids, [first.prompt_length])
        return Completion(
            task_id=trajectory.task_id,
            rollout_id=trajectory.rollout_id,
            prompt=self._shown(prompt.tolist()),
            completion=self._shown(answer.tolist()),
            outcome=trajectory.outcome.value,
            episode_return=trajectory.episode_return,
            rewards=dict(rewards),
            advantage=_mean_advantage(entry),
            untrained=entry.reason.value if entry.reason is not None else "",
        )

    def _shown(self, token_ids: list[int]) -> str:
        text = b"".join(self._text.pieces(token_ids)).decode(errors="replace")
        if len(text) <= MAX_CHARS:
            return text
        half = MAX_CHARS // 2
        return f"{text[:half]} … {text[-half:]}"


def _mean_advantage(entry: TrajectoryEntry) -> float | None:
    if not entry.num_trained:
        return None
    return float(np.concatenate(entry.advantages).mean(dtype=np.float64))


log = logging.getLogger("rayloom.trackers")

# Delay before the second attempt, and its limit: the delay doubles after each failure, and a random
# part of up to half of it is added.
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A tracker that the configuration turns on, and where it writes."""

    name: str
    """Name of the setting in section `trackers` that turns the tracker on."""
    address: str
    """Text that identifies where the tracker writes this run; it stays the same after --resume.
    If it changes, all records are written again."""
    make: Callable[[], Tracker]
    """Function that creates the tracker; the follower's thread calls it until it succeeds."""
    completions: Completions | None = None
    """Reader of a step's completions; None if the tracker gets no completions."""


class Follower(threading.Thread):
    """The thread that writes a run's records to one tracker.

    Call `start` once, `wake` after each stored record, and `end` last.
    """

    def __init__(
        self,
        target: Target,
        *,
        store: ReadOnlyStore,
        places_file: Path,
        tell: Callable[[str], None],
    ) -> None:
        """Create the thread, but do not start it.

        Args: places_file: file with the progress, which is the last written record of each kind.
        tell: shows a notice to the user.
        """
        super().__init__(name=f"tracker {target.name}", daemon=True)
        self._setting = f"trackers.{target.name}"
        self._target, self._store, self._tell = target, store, tell
        self._places_file = places_file
        self._tracker: Tracker | None = None
        self._woken, self._ending = threading.Event(), threading.Event()
        self._writes_rest = True
        self._num_failures = 0
        """Number of consecutive failed attempts to write."""
        self._has_noticed = False

    def wake(self) -> None:
        self._woken.set()

    def end(self, *, writes_rest: bool = True) -> None:
        """Make the thread write the remaining records, close the tracker and end.

        The thread tries this once. If an error occurs, the thread ends and does not retry.
        Args: writes_rest: whether to write the remaining records; if not, only close the tracker.
        """
        self._writes_rest = writes_rest
        self._ending.set()
        self._woken.set()

    def run(self) -> None:
        while True:
            self._woken.clear()
            is_last = self._ending.is_set()
            self._attempt(is_last=is_last)
            if is_last:
                return
            if self._num_failures:
                delay_s = min(FIRST_DELAY_S * 2 ** min(self._num_failures - 1, 30), LONGEST_DELAY_S)
                self._ending.wait(delay_s * random.uniform(1.0, 1.5))
            else:
                self._woken.wait()

    def _attempt(self, *, is_last: bool) -> None:
        try:
            if not is_last or self._writes_rest:
                self._follow(is_last=is_last)
            if is_last and self._tracker is not None:
                _call(self._tracker.close, is_ended=self._writes_rest)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            # Catch everything in this thread, because a library or a user's tracker may raise any
            # error.
            self._failed(error)
            return
        if self._num_failures:
            log.info("%s is written again", self._setting)
        self._num_failures = 0

    def _follow(self, *, is_last: bool) -> None:
        """Write the records that are not written yet, and store the progress.

        is_last: whether the thread ends after this call.
        """
        places = self._read_places()
        begun_with, waiting = dict(places), records_after(self._store, places)
        if self._tracker is None:
            if is_last and not waiting:
                return
            self._tracker = self._target.make()
        try:
            for stored in waiting:
                term, newest = stored.place[0], max((at[0] for at in places.values()), default=0)
                point = point_of(
                    stored,
                    is_first_of_term=term > newest,
                    completions=self._completions_of(stored),
                )
                _call(self._tracker.write, point)
                places[stored.kind] = stored.place
        finally:
            if places != begun_with:
                _call(self._tracker.flush)
                self._write_places(places)

    def _completions_of(self, stored: StoredRecord) -> Sequence[Completion]:
        if self._target.completions is None or stored.kind is not RecordKind.STEP:
            return ()
        term, step, _ = stored.place
        try:
            return self._target.completions.of_step(step, term=term)
        except ConfigError as error:
            # A damaged file of the journal must not prevent the export of the curves.
            log.warning("%s: step %d has no completions: %s", self._setting, step, error)
            return ()

    def _failed(self, error: BaseException) -> None:
        self._num_failures += 1
        next_try = "--resume writes it" if self._ending.is_set() else "retrying until the end"
        text = f"{self._setting} is not written: {describe(error)}; {next_try}"
        if not self._has_noticed:
            self._has_noticed = True
            self._tell(text)
        elif self._num_failures == 1:
            log.warning("%s", text)

    def _read_places(self) -> dict[RecordKind, Place]:
        """Return the position (`Place`) of the last written record of each kind.

        Raises: OSError; ValueError if the progress file was altered.
        """
        if not self._places_file.exists():
            return {}
        try:
            written = json.loads(self._places_file.read_text())
            if written["target"] != self._target.address:
                return {}
            places = written["places"].items()
            return {RecordKind(kind): (at[0], at[1], at[2]) for kind, at in places}
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{self._places_file} cannot be read ({error}); restore it, or remove it to write "
                "every record again"
            ) from error

    def _write_places(self, places: Mapping[RecordKind, Place]) -> None:
        self._places_file.parent.mkdir(exist_ok=True)
        new = self._places_file.with_suffix(".new")
        new.write_text(json.dumps({"target": self._target.address, "places": places}))
        new.replace(self._places_file)


def _call(method: Callable[..., object], *arguments: object, **named: object) -> None:
    """Call a method of a tracker, which may be a user's own class.

    Raises: TypeError if the method is async or a generator; any error that the method raises.
    """
    found = method(*arguments, **named)
    if inspect.iscoroutine(found):
        # Python would warn that it was never awaited.
        found.close()
    if inspect.iscoroutine(found) or inspect.isgenerator(found) or inspect.isasyncgen(found):
        name = getattr(method, "__name__", method)
        raise TypeError(
            f"{name} returned {type_of(found)}, so that its body has not run; expected a plain "
            "method, which a thread calls; remove async or yield"
        )


CLOSE_LIMIT_S = 30.0


class Trackers:
    """The trackers of a run, each with its thread.

    Only `close` and `catch_up` wait for the threads.
    """

    def __init__(self, targets: Sequence[Target], *, store: ReadOnlyStore, directory: Path) -> None:
        """Store the targets, but start no thread.

        Args: directory: directory of the files with each tracker's progress.
        """
        self._targets, self._store, self._directory = targets, store, directory
        self._followers: list[Follower] = []

    def begin(self, tell: Callable[[str], None]) -> None:
        """Start the threads, which write the records that are not written yet.

        Args: tell: shows a notice to the user; it may be called in any thread.
        """
        if not self._followers:
            self._followers = self._make(tell)
            for follower in self._followers:
                follower.start()
        self.wake()

    def catch_up(self, tell: Callable[[str], None], *, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Write the records of an ended run that are not written yet, and end the threads.

        This blocks for at most `limit_s` seconds.
        """
        self._followers = self._make(tell)
        for follower in self._followers:
            follower.end()
            follower.start()
        self._join(limit_s)

    def _make(self, tell: Callable[[str], None]) -> list[Follower]:
        return [
            Follower(
                target,
                store=self._store,
                places_file=self._directory / f"{target.name}.json",
                tell=tell,
            )
            for target in self._targets
        ]

    def wake(self) -> None:
        """Make the threads look for new records; call this after a record has been stored."""
        for follower in self._followers:
            follower.wake()

    def close(self, *, writes_rest: bool = True, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Write the remaining records, close the trackers and end the threads.

        This blocks for at most `limit_s` seconds.
        Args: writes_rest: whether to write the remaining records; False if another process has
        taken over the run.
        """
        for follower in self._followers:
            follower.end(writes_rest=writes_rest)
        self._join(limit_s)

    def _join(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        for follower in self._followers:
            follower.join(max(0.0, until - time.monotonic()))
            if follower.is_alive():
                log.warning("%s did not end in time; --resume writes the rest", follower.name)


def trackers_of(
    config: Config, run_dir: RunDir, *, run_id: str, store: ReadOnlyStore
) -> Trackers | None:
    """Return the trackers that the configuration names; None if it names no tracker."""
    targets = list(_targets(config, run_dir.path, run_id))
    if not targets:
        return None
    return Trackers(targets, store=store, directory=run_dir.path / "trackers")


def _targets(config: Config, run_dir: Path, run_id: str) -> Iterator[Target]:
    settings, name = config.trackers, config.run.name
    completions = Completions(run_dir, most=settings.completions) if settings.completions else None
    if settings.jsonl:
        make: Callable[[], Tracker] = partial(JsonLines, run_dir / "metrics.jsonl")
        # No address: the file moves with the run's directory.
        yield Target(name="jsonl", address="", make=make, completions=completions)
    if (chosen := settings.tensorboard) is not None:
        directory = Path(chosen).expanduser() / run_id if chosen else run_dir / "tensorboard"
        address = str(directory) if chosen else ""
        yield Target(name="tensorboard", address=address, make=partial(TensorBoard, directory))
    if (wandb := settings.wandb) is not None:
        make = partial(
            Wandb,
            wandb,
            run_id=run_id,
            name=name,
            config=_shown(config),
            directory=Path(wandb.directory or run_dir).expanduser(),
        )
        address = f"{wandb.mode} {wandb.entity or ''}/{wandb.project}/{run_id}"
        yield Target(name="wandb", address=address, make=make, completions=completions)
    if (trackio := settings.trackio) is not None:
        make = partial(Trackio, trackio, run_id=run_id, name=name, config=_shown(config))
        address = f"{trackio.directory or ''} {trackio.project}/{run_id}"
        yield Target(name="trackio", address=address, make=make, completions=completions)
    if (mlflow := settings.mlflow) is not None:
        make = partial(Mlflow, mlflow, run_id=run_id, name=name)
        address = f"{mlflow.url} {mlflow.experiment}/{run_id}"
        yield Target(name="mlflow", address=address, make=make)
    if (own := settings.own) is not None:
        make = partial(
            _own_tracker, own, run_id=run_id, name=name, config=_shown(config), directory=run_dir
        )
        yield Target(name="own", address=f"{own.use} {run_id}", make=make, completions=completions)


def _own_tracker(
    settings: OwnTrackerSettings, *, run_id: str, name: str, config: dict[str, Any], directory: Path
) -> Tracker:
    """Import and call what trackers.own.use names. Raises: BadName, and any error of the call."""
    made: Tracker = find(settings.use, what="trackers.own.use")(
        run_id=run_id, name=name, config=config, directory=directory, **settings.options
    )
    return made


def _shown(config: Config) -> dict[str, Any]:
    shown: dict[str, Any] = yaml.safe_load(dump_config(config))
    return shown
