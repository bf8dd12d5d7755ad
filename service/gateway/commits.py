"""Store the changes of all sessions: changes that arrive within 5 ms share one transaction.

There is one transaction at a time, and a pause of 5 ms after each. In the pause the supervisor can
take the database's lock, to renew its lease and to store steps.

Invariants: changes are stored in their order of arrival. A turn is durable before
`GroupCommit.commit` returns. If `commit` raises, the client does not receive the turn; the turn is
not stored, or stored as "unseen". An unseen turn is trained only if the client repeats the request
and then receives the turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from actors.deadline import within
from service.intake.session import Change, TurnAdded, TurnMarked
from service.store.errors import LeaseLost, StoreError
from service.store.sessions import SessionStore
from service.worker_thread import WorkerThread

# If the last transaction ended longer ago than this, the next one begins at once, so that a single
# turn waits only for the disk.
PAUSE_S = 0.005
# Largest number of changes in one transaction: a statement of SQLite can have 32,766 values.
MAX_CHANGES = 2048
# A change, and the future for which its caller waits; None if no caller waits.
_Entry = tuple[Change, asyncio.Future[None] | None]


class StoreAway(Exception):
    """The database did not answer in time. Nothing is lost: the change stays in the queue."""


class TooLate(Exception):
    """A change was not stored, because its session or its submission has ended."""


class GroupCommit:
    """Writes the changes of all sessions of a gateway; nothing else in the gateway writes sessions.

    If the database does not answer, `commit` raises after `hold_s`, but the change stays in the
    queue, and the `RunStore` keeps trying to write it. If the `RunStore` gives up, or if another
    supervisor has taken over the run, nothing more is written, and the gateway ends. The next
    gateway continues from the stored changes. They may include turns that no client received.

    Use an instance only in one event loop.
    """

    def __init__(self, store: SessionStore, *, term: int, hold_s: float) -> None:
        """Start with an empty queue.

        term: number of the supervisor's lease on the run; the store refuses changes of an older
        lease. hold_s: seconds for which `commit` waits for the database; shorter than the time
        after which the store gives up.
        """
        self._store = store
        self._term = term
        self._hold_s = hold_s
        # Use a separate thread, so that sessions can be loaded while a write waits for the store.
        self._thread = WorkerThread("store", expected=LeaseLost)
        self._entries: deque[_Entry] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._ended_at = -PAUSE_S
        self._is_closed = False
        self.failure: BaseException | None = None
        """The error that ended the writing: LeaseLost, StoreError or an unexpected one."""
        self.num_commits = 0
        self.num_changes = 0
        """Number of changes that `num_commits` transactions have stored since the gateway's
        start."""

    def add(self, change: Change, done: asyncio.Future[None] | None = None) -> None:
        """Queue a change and return at once; the change is stored soon, after all earlier ones.

        The change is not stored if its session has already ended in the store. done: completed
        when the change is stored; if it is not stored, `done` gets the error, such as TooLate.
        Raises: LeaseLost, StoreError if writing has failed; RuntimeError after `close`.
        """
        if self.failure is not None:
            raise self.failure
        if self._is_closed:
            raise RuntimeError("the gateway's store is closed, expected no change after that")
        self._enter(change, done)

    async def commit(self, change: Change) -> None:
        """Store a change, after all earlier ones; it is durable when this returns.

        If this method raises, do not send the client the turn that the change adds. After StoreAway
        or a cancellation, the turn may still be stored. It is then marked as unseen, which means
        that no client received it.

        Raises: StoreAway if the database does not answer within `hold_s`; the change then stays in
            the queue. TooLate if the change is not stored, such as after the session has ended
            (`SessionStore.apply` lists the cases). LeaseLost, StoreError if writing has failed.
            RuntimeError after `close`.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.add(change, done)
        try:
            await within(self._hold_s, done)
        except TimeoutError:
            self._hide(change)
            raise StoreAway(
                f"the run's database has not answered for {self._hold_s:g} s, and a turn is "
                "answered only after it is stored; send the same request again"
            ) from None
        except asyncio.CancelledError:
            self._hide(change)
            raise

    async def close(self) -> None:
        """Accept no more changes, and store those in the queue.

        If that fails, the attribute `failure` has the error.
        """
        self._is_closed = True
        if self._writing is not None:
            await asyncio.wait([self._writing])

    def _hide(self, change: Change) -> None:
        # The queue accepts this change even during `close`, if it still has entries to write.
        is_over = self.failure is not None or (self._is_closed and self._writing is None)
        if isinstance(change, TurnAdded) and not is_over:
            number = change.turn.number
            marked = TurnMarked(session_id=change.session_id, number=number, is_unseen=True)
            self._enter(marked, None)

    def _enter(self, change: Change, done: asyncio.Future[None] | None) -> None:
        self._entries.append((change, done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Write changes until the queue is empty; store LeaseLost and StoreError in `failure`."""
        batch: list[_Entry] = []
        try:
            while self._entries:
                # Yield even if the pause is over: changes that other tasks add now join the batch.
                await asyncio.sleep(self._ended_at + PAUSE_S - time.monotonic())
                num_changes = min(len(self._entries), MAX_CHANGES)
                batch = [self._entries.popleft() for _ in range(num_changes)]
                await self._store_batch(batch)
        except BaseException as error:
            self._fail(error, batch)
            if not isinstance(error, LeaseLost | StoreError):
                raise
        finally:
            # Do not do this in a callback of the task: an entry that is added before the callback
            # runs would start no writer.
            self._writing = None

    async def _store_batch(self, batch: Sequence[_Entry]) -> None:
        changes = [change for change, _ in batch]
        too_late = await self._thread.call(self._store.apply, changes, term=self._term)
        self._ended_at = time.monotonic()
        self.num_commits += 1
        self.num_changes += len(changes) - len(too_late)
        for place, (change, done) in enumerate(batch):
            if done is None or done.done():
                continue
            if place in too_late:
                done.set_exception(_too_late(change))
            else:
                done.set_result(None)

    def _fail(self, error: BaseException, batch: Sequence[_Entry]) -> None:
        self.failure = error
        for _, done in (*batch, *self._entries):
            if done is not None and not done.done():
                done.set_exception(error)
        self._entries.clear()


def _too_late(change: Change) -> TooLate:
    return TooLate(
        f"session {change.session_id}: {type(change).__name__} came too late, expected a session "
        "that has not ended, of a submission that is neither cancelled nor over, and each turn "
        "number once; begin a new session"
    )
