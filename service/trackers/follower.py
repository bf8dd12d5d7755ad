"""Write the run's stored records to one tracker, in a thread.

The thread reads the records that it has not written yet from the run's database, so that no queue
in memory is needed, and stores its progress in a file. Invariants: each stored record is written at
least once, even if the tracker was unavailable or this process was killed, as long as the database
has the record; a failing tracker delays nothing else. `trackers.Trackers` owns the followers.
"""

from __future__ import annotations

import inspect
import json
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.user_code import describe, type_of
from service.config.file import ConfigError
from service.store.lineage import Place, Readable, RecordKind, StoredRecord, records_after
from service.trackers.completions import Completions
from service.trackers.tracker import Completion, Tracker, point_of

log = logging.getLogger("rayloom.trackers")

# Delay before the second attempt, and its limit: the delay doubles after each failure, and a random
# part of up to half of it is added.
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A tracker and the place to which it writes."""

    name: str
    """Name of the setting that turns the tracker on."""
    address: str
    """Address of the run in the tracker, which stays the same after --resume."""
    make: Callable[[], Tracker]
    """Function that creates the tracker; the follower's thread calls it until it succeeds."""
    completions: Completions | None = None
    """Reader of the completions of a step for its point; None if points have no completions."""


class Follower(threading.Thread):
    """The thread of a tracker: call `start` once, `wake` after each stored record, `end` last."""

    def __init__(
        self,
        target: Target,
        *,
        store: Readable,
        places_file: Path,
        tell: Callable[[str], None],
    ) -> None:
        """Create a follower. tell: function that shows a notice to the user."""
        super().__init__(name=f"tracker {target.name}", daemon=True)
        self._setting = f"trackers.{target.name}"
        self._target, self._store, self._tell = target, store, tell
        self._places_file = places_file
        self._tracker: Tracker | None = None
        self._woken, self._ending = threading.Event(), threading.Event()
        self._writes_rest = True
        self._num_failures = 0
        """Number of consecutive failures."""
        self._has_noticed = False

    def wake(self) -> None:
        self._woken.set()

    def end(self, *, writes_rest: bool = True) -> None:
        """Make the thread write the stored records, close the tracker and end, even after errors.

        writes_rest: whether to write the records that are not written yet.
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
            # The outermost frame of the thread: code of others may raise anything.
            self._failed(error)
            return
        if self._num_failures:
            log.info("%s is written again", self._setting)
        self._num_failures = 0

    def _follow(self, *, is_last: bool) -> None:
        """Write the records after the stored progress.

        is_last: whether the thread ends afterwards. In that case no tracker is made if there are no
        new records.
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
        """Return the progress of the target; if the target has changed, return the beginning.

        Raises: OSError; ValueError if the file of the progress was altered.
        """
        if not self._places_file.exists():
            return {}
        written = json.loads(self._places_file.read_text())
        if written["target"] != self._target.address:
            return {}
        return {RecordKind(kind): (at[0], at[1], at[2]) for kind, at in written["places"].items()}

    def _write_places(self, places: Mapping[RecordKind, Place]) -> None:
        """Write the progress of the target. Raises: OSError."""
        self._places_file.parent.mkdir(exist_ok=True)
        new = self._places_file.with_suffix(".new")
        new.write_text(json.dumps({"target": self._target.address, "places": places}))
        new.replace(self._places_file)


def _call(method: Callable[..., object], *arguments: object, **named: object) -> None:
    """Call a method of a tracker.

    Raises: TypeError if the method's body has not run; any error of the method.
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
