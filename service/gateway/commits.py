"""Stores what happens in all sessions together: one transaction for what comes within 5 ms.

Invariants: one transaction at a time, and changes are stored in the order in which they came; a
turn is durable before `commit` returns; a turn whose `commit` raised is stored as unseen, or never,
so that it is trained only where a client's marked retry was answered with it.
One for a gateway; belongs to one event loop.

A transaction begins at once where the last one ended 5 ms ago or longer: a lone turn waits for the
disk alone. Else it begins 5 ms after the last one's end: what comes meanwhile shares its sync, and
the supervisor, whose lease and steps go through the same lock, gets its turn in between. What can
wait, such as intents, begins no transaction for 100 ms: mostly it goes along with a turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from actors.deadline import is_set_within, within
from service.intake.turns import Change, TurnAdded, TurnUnseen
from service.store.run_store import LeaseLost, StoreError
from service.store.sessions import SessionStore
from service.store.thread import StoreThread

PAUSE_S = 0.005
LINGER_S = 0.1
# Of one transaction. A statement has room for 32,766 values in SQLite.
MAX_CHANGES = 2048


class StoreAway(Exception):
    """The database has not answered in time. Nothing is lost: the changes stay in the queue."""


class TooLate(Exception):
    """The session has ended, or its submission is cancelled or over; nothing more is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTotals:
    """Since the gateway's start, of what is durable."""

    num_commits: int = 0
    num_changes: int = 0
    commit_s: float = 0.0
    """Seconds in transactions, with the wait for the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    changes: tuple[Change, ...]
    done: asyncio.Future[None] | None
    """None: nobody waits."""
    can_linger: bool = False


class GroupCommit:
    """The only writer of its sessions.

    Where the database does not answer, it goes on trying as long as the `RunStore` does, also after
    `hold_s`: of a transaction whose connection broke nobody knows otherwise whether it was done.
    After that, or where the lease is lost, it is over: it writes nothing more, and the gateway
    ends. Its successor goes on from what is stored: where the very last transaction was done but
    not confirmed, its turns look as after a kill between commit and answer.
    """

    def __init__(self, store: SessionStore, *, term: int, hold_s: float) -> None:
        """hold_s: how long a `commit` waits for the database; shorter than the store's patience."""
        self._store = store
        self._term = term
        self._hold_s = hold_s
        # Of its own: a session is loaded meanwhile, also while a write waits for the database.
        self._thread = StoreThread()
        self._entries: deque[_Entry] = deque()
        self._hurries = asyncio.Event()
        """Among the entries is one that cannot linger, or it is closed."""
        self._writing: asyncio.Task[None] | None = None
        self._ended_at = -PAUSE_S
        self._is_closed = False
        self._failure: BaseException | None = None
        self._totals = CommitTotals()

    @property
    def totals(self) -> CommitTotals:
        return self._totals

    @property
    def failure(self) -> BaseException | None:
        """Why it is over: LeaseLost, StoreError, or a defect; None: it is not."""
        return self._failure

    def add(self, changes: Sequence[Change], *, can_linger: bool = False) -> None:
        """Store them soon, behind all that came before; one that comes too late is left out.

        can_linger: for want of others to go along with, they may take `LINGER_S`.
        Raises: LeaseLost, StoreError where it is over; RuntimeError after `close`.
        """
        self._queue(changes, done=None, can_linger=can_linger)

    async def commit(self, changes: Sequence[Change]) -> None:
        """Store them, behind all that came before; they are durable when this returns.

        Where it raises, or its caller is cancelled, the client is not shown the turns among the
        changes. Those that are in the queue still are stored, as unseen.
        Raises: StoreAway after `hold_s`: the changes stand in the queue; TooLate: of these changes,
            what came too late is not stored; LeaseLost, StoreError: it is over; RuntimeError after
            `close`.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue(changes, done=done)
        try:
            await within(self._hold_s, done)
        except TimeoutError:
            self._hide(changes)
            raise StoreAway(
                f"the run's database has not answered for {self._hold_s:g} s, expected it to store "
                "the turn before it is shown; send the same request again"
            ) from None
        except asyncio.CancelledError:
            self._hide(changes)
            raise

    async def close(self) -> None:
        """Take nothing more, and store what is left; `failure` says whether that went well."""
        self._is_closed = True
        self._hurries.set()
        if self._writing is not None:
            await asyncio.wait([self._writing])

    def _hide(self, changes: Sequence[Change]) -> None:
        hidden = [
            TurnUnseen(session_id=change.session_id, number=change.turn.number)
            for change in changes
            if isinstance(change, TurnAdded)
        ]
        # While it closes, the queue takes these still: they belong to what is in it.
        is_over = self._failure is not None or (self._is_closed and self._writing is None)
        if hidden and not is_over:
            self._enter(_Entry(changes=tuple(hidden), done=None))

    def _queue(
        self,
        changes: Sequence[Change],
        *,
        done: asyncio.Future[None] | None,
        can_linger: bool = False,
    ) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise RuntimeError("the gateway's store is closed; expected no change after its end")
        self._enter(_Entry(changes=tuple(changes), done=done, can_linger=can_linger))

    def _enter(self, entry: _Entry) -> None:
        self._entries.append(entry)
        if not entry.can_linger:
            self._hurries.set()
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Until the queue is empty. Raises: a defect."""
        batch: list[_Entry] = []
        try:
            while self._entries:
                await is_set_within(LINGER_S, self._hurries)
                # Also of no time at all: what is to be stored in this turn of the loop comes along.
                await asyncio.sleep(self._ended_at + PAUSE_S - time.monotonic())
                batch = self._next_batch()
                if not self._is_closed and all(each.can_linger for each in self._entries):
                    self._hurries.clear()
                await self._store_batch(batch)
        except BaseException as error:
            self._fail(error, batch)
            if not isinstance(error, LeaseLost | StoreError):
                raise
        finally:
            # Not in a callback of the task: an entry that came before it would start no writer.
            self._writing = None

    def _next_batch(self) -> list[_Entry]:
        batch = [self._entries.popleft()]
        num_changes = len(batch[0].changes)
        while self._entries:
            num_changes += len(self._entries[0].changes)
            if num_changes > MAX_CHANGES:
                break
            batch.append(self._entries.popleft())
        return batch

    async def _store_batch(self, batch: Sequence[_Entry]) -> None:
        changes = [change for entry in batch for change in entry.changes]
        started = time.monotonic()
        too_late = await self._thread.call(self._store.apply, changes, term=self._term)
        self._ended_at = time.monotonic()
        self._totals = CommitTotals(
            num_commits=self._totals.num_commits + 1,
            num_changes=self._totals.num_changes + len(changes) - len(too_late),
            commit_s=self._totals.commit_s + self._ended_at - started,
        )
        first = 0
        for entry in batch:
            places = range(first, first + len(entry.changes))
            first = places.stop
            if entry.done is None or entry.done.done():
                continue
            if late := [changes[place] for place in places if place in too_late]:
                entry.done.set_exception(_too_late(late[0]))
            else:
                entry.done.set_result(None)

    def _fail(self, error: BaseException, batch: Sequence[_Entry]) -> None:
        self._failure = error
        for entry in (*batch, *self._entries):
            if entry.done is not None and not entry.done.done():
                entry.done.set_exception(error)
        self._entries.clear()


def _too_late(change: Change) -> TooLate:
    return TooLate(
        f"session {change.session_id}: {type(change).__name__} came too late, expected a session "
        "that has not ended, of a submission that is neither cancelled nor over, and a turn's "
        "number once; begin a new session"
    )
