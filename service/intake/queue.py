"""Accepts submissions, shows where they stand, and fills group numbers with them in order.

An acceptance is stored before it is answered, a binding before its group is admitted. A submission
that is over leaves memory; the store still knows the newest of them.
One for a process; lives in the supervisor and is called from its event loop alone.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from actors.deadline import is_set_within
from actors.limits import MIB
from actors.outcomes import OutcomePolicy
from actors.trajectory_queue.groups import GroupRequest, group_id
from actors.trajectory_queue.ledger import LedgerEvent
from actors.trajectory_queue.messages import OpenSlot
from actors.types import TrajectorySummary
from service.access.keys import NO_LIMITS, KeyLimits, may_see
from service.access.names import tenant_of
from service.config.tree import ServiceSettings
from service.intake.feed import FeedEntry, FeedPage
from service.intake.listing import SessionFilter, SessionPage, SessionPlace, TaskFilter, TaskPage
from service.intake.submission import (
    Backlog,
    KnownSubmission,
    RolloutRequest,
    RolloutResult,
    Status,
    SubmissionView,
    SubmitReply,
    digest_of_requests,
)
from service.intake.table import SubmissionTable, rebuild
from service.store.feed import read_feed
from service.store.run_store import Lease, RunStore
from service.store.sessions import SessionStore
from service.store.submissions import SubmissionStore
from service.store.thread import StoreThread

WAIT_S = 1.0
# Between a group's binding and the loop's word that the queue has taken it.
ADMISSION_LIMIT_S = 5.0
MAX_RETRY_AFTER_S = 60
# Of the tasks that a list may have to look at for a page: in a store's read, and reads in all.
ROWS_PER_READ = 500
READS_PER_PAGE = 4
# A larger request has a transaction of its own.
MAX_TASKS_PER_COMMIT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """A request that waits to be answered."""

    tasks: Sequence[RolloutRequest]
    key: str
    digest: str
    limits: KeyLimits
    reply: asyncio.Future[SubmitReply]


class SubmissionQueue:
    """Refuses everything as not ready until `begin_term`."""

    def __init__(
        self,
        store: RunStore,
        *,
        thread: StoreThread,
        settings: ServiceSettings,
        groups_per_step: int,
        policy: OutcomePolicy,
    ) -> None:
        """groups_per_step: P."""
        self._run_store = store
        self._store = SubmissionStore(store)
        self._sessions = SessionStore(store)
        self._thread = thread
        self._settings = settings
        self._groups_per_step = groups_per_step
        self._policy = policy
        self._term = 0
        self._table = SubmissionTable(policy)
        self._has_news = asyncio.Event()
        self._has_events = asyncio.Event()
        self._cancelling = asyncio.Lock()
        # Held from the look at the table over the write to the change of the table.
        self._changing = asyncio.Lock()
        self._step_s = 5.0
        self._closed_because = "the run has not begun; wait until /readyz says 200"
        # Those that wait to be answered, in order.
        self._offers: deque[_Offer] = deque()
        # Noted of the ledger and in no checkpoint yet, so that the feed does not tell of it.
        self._untold: list[LedgerEvent] = []

    async def begin_term(self, lease: Lease) -> None:
        """Go on from what is stored, as the owner of this lease."""
        held = lease.queue_snapshot.groups if lease.queue_snapshot else ()
        groups = [group_id(group.number, replacement=group.replacement) for group in held]
        async with self._changing:
            self._term, self._untold = lease.term, []
            await self._thread.call(self._store.begin_term, lease)
            self._table = await self._thread.call(self._rebuild, groups)
            self._closed_because = ""
        self._has_news.set()

    def _rebuild(self, held_groups: Sequence[str]) -> SubmissionTable:
        return rebuild(self._policy, self._store.read(), held_groups=held_groups)

    def close(self, reason: str) -> None:
        """Accept nothing from here on; what is known can still be asked for."""
        self._closed_because = reason

    @property
    def backlog(self) -> Backlog:
        return Backlog(waiting=self._table.num_waiting, capacity=self._settings.max_waiting_tasks)

    @property
    def groups_to_cancel(self) -> list[str]:
        """Groups in flight whose submission was cancelled; a restored queue has them again."""
        return self._table.cancelled_groups()

    def accepted_at(self, group_id: str) -> float | None:
        """As the table's."""
        return self._table.accepted_at(group_id)

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        *,
        key: str = "",
        limits: KeyLimits = NO_LIMITS,
    ) -> SubmitReply:
        """Accept all or none; a known id with the same content is answered as the first time.

        key: the digest of the request's Idempotency-Key and its tenant; empty: it has none. While a
        task is known that was accepted under it, no other request is. limits: of the key that the
        requests come with.
        Raises: LeaseLost, StoreError.
        """
        offer = _Offer(
            tasks=requests,
            key=key,
            digest=digest_of_requests(requests),
            limits=limits,
            reply=asyncio.get_running_loop().create_future(),
        )
        self._offers.append(offer)
        return await self._thread.finish(self._answer(offer))

    async def _answer(self, offer: _Offer) -> SubmitReply:
        """Whoever gets the lock answers for all that wait, with one transaction."""
        async with self._changing:
            if not offer.reply.done():
                batch = self._next_batch()
                try:
                    await self._decide(batch)
                except BaseException as error:
                    # The first is this caller's own.
                    for each in batch[1:]:
                        if not each.reply.done():
                            each.reply.set_exception(error)
                    raise
        return offer.reply.result()

    def _next_batch(self) -> list[_Offer]:
        """The first of what is offered, up to one that depends on what becomes of another.

        The lock is given in the order of the offers: the first is the one whose caller has it.
        """
        batch: list[_Offer] = []
        names: set[str] = set()
        while self._offers:
            offer = self._offers[0]
            own = {item.id for item in offer.tasks}
            if offer.key:
                # No id has a blank.
                own.add(f"key {offer.key}")
            if batch and (names & own or len(names) + len(own) > MAX_TASKS_PER_COMMIT):
                break
            names |= own
            batch.append(self._offers.popleft())
        return batch

    async def _decide(self, batch: Sequence[_Offer]) -> None:
        """Answer each as if they came one after the other; store what is new of all at once."""
        over = await self._known_as_over(
            [item.id for offer in batch for item in offer.tasks if item.id not in self._table]
        )
        new_of: list[tuple[_Offer, list[RolloutRequest]]] = []
        ahead: list[RolloutRequest] = []
        for offer in batch:
            new = await self._new_of(offer, over, ahead)
            if isinstance(new, SubmitReply):
                offer.reply.set_result(new)
                continue
            new_of.append((offer, new))
            ahead += new
        if ahead:
            accepted = await self._thread.call(
                self._store.add,
                ahead,
                term=self._term,
                request_keys={
                    item.id: (offer.key, offer.digest)
                    for offer, new in new_of
                    if offer.key
                    for item in new
                },
            )
            for submission in accepted:
                self._table.accept(submission)
            self._has_news.set()
        for offer, new in new_of:
            offer.reply.set_result(
                SubmitReply(
                    views=tuple(
                        over[item.id].view if item.id in over else self._table.view(item.id)
                        for item in offer.tasks
                    ),
                    new_ids=frozenset(item.id for item in new),
                    backlog=self.backlog,
                )
            )

    async def _new_of(
        self,
        offer: _Offer,
        over: Mapping[str, KnownSubmission],
        ahead: Sequence[RolloutRequest],
    ) -> list[RolloutRequest] | SubmitReply:
        """What of it is to be stored, or why nothing is. ahead: what is to be stored before it."""
        if offer.key:
            stored = await self._thread.call(self._store.digest_of_request, offer.key)
            if stored not in (None, offer.digest):
                return SubmitReply(is_key_taken=True, backlog=self.backlog)
        digests = {
            item.id: over[item.id].digest if item.id in over else self._table.digest_of(item.id)
            for item in offer.tasks
            if item.id in over or item.id in self._table
        }
        conflicts = tuple(
            item.id for item in offer.tasks if digests.get(item.id, item.digest) != item.digest
        )
        if conflicts:
            return SubmitReply(conflicts=conflicts, backlog=self.backlog)
        new = [item for item in offer.tasks if item.id not in digests]
        refusal = None
        if new:
            refusal = self._refusal(new, ahead) or self._beyond_quota(new, ahead, offer.limits)
        return refusal or new

    async def _known_as_over(self, submission_ids: Sequence[str]) -> dict[str, KnownSubmission]:
        return await self._thread.call(self._store.find, submission_ids) if submission_ids else {}

    def _refusal(
        self, new: Sequence[RolloutRequest], ahead: Sequence[RolloutRequest]
    ) -> SubmitReply | None:
        """Why these cannot be accepted now; None: they can. ahead: accepted, not stored yet."""
        num_new, capacity = len(new), self._settings.max_waiting_tasks
        if self._closed_because:
            return SubmitReply(refusal=self._closed_because, backlog=self.backlog)
        if num_new > capacity:
            return SubmitReply(
                refusal=(
                    f"{num_new} new tasks are offered at once, expected at most "
                    f"{capacity}, for which there is room"
                ),
                is_too_large=True,
                backlog=self.backlog,
            )
        num_waiting = self._table.num_waiting + len(ahead)
        # Of a backlog that is too large in bytes, how many steps make room is not known.
        excess = num_waiting + num_new - capacity
        if excess > 0:
            return self._full(
                f"{num_waiting} tasks wait already and {num_new} more are offered, "
                f"expected at most {capacity} together (service.max_waiting_tasks)",
                excess=excess,
            )
        num_bytes = self._table.waiting_bytes + sum(item.num_bytes for item in (*ahead, *new))
        most = self._settings.max_waiting_mib * MIB
        # What is taken when nothing waits is bounded by the size of a body.
        if num_bytes > most and num_waiting:
            return self._full(
                f"the tasks that wait and those that are offered are {num_bytes / MIB:.1f} MiB, "
                f"expected at most {self._settings.max_waiting_mib} MiB (service.max_waiting_mib)",
                excess=1,
            )
        return None

    def _beyond_quota(
        self,
        new: Sequence[RolloutRequest],
        ahead: Sequence[RolloutRequest],
        limits: KeyLimits,
    ) -> SubmitReply | None:
        """Why their key may not add these now; None: it may. ahead: as `_refusal`."""
        name = new[0].key_name
        own = [item for item in ahead if item.key_name == name]
        asked = {
            "max_waiting_tasks": (len(new), len(own), self._table.num_waiting_of),
            "max_open_sessions": (
                _num_sessions(new),
                _num_sessions(own),
                self._table.num_open_sessions_of,
            ),
        }
        for limit, (num_new, num_ahead, count) in asked.items():
            most = getattr(limits, limit)
            if most is None or not num_new:
                continue
            num_before = count(name) + num_ahead
            if num_before + num_new > most:
                refused = self._full(
                    f"{num_new} more than {num_before} are offered under this key, expected at "
                    f"most {most} together ({limit} of the key)",
                    excess=1,
                )
                return replace(refused, is_quota=True, is_too_large=num_new > most)
        return None

    def _full(self, refusal: str, *, excess: int) -> SubmitReply:
        """excess: tasks that have to be admitted before there is room."""
        wait_s = math.ceil(math.ceil(excess / self._groups_per_step) * self._step_s)
        return SubmitReply(
            refusal=refusal,
            retry_after_s=max(1, min(MAX_RETRY_AFTER_S, wait_s)),
            backlog=self.backlog,
        )

    async def view(self, submission_id: str, *, sees: str | None = None) -> SubmissionView | None:
        """None for one that was never accepted, has been over for too long, or is not shown.

        sees: the tenant whose tasks are shown; None: every tenant's. Raises: StoreError.
        """
        if not may_see(sees, tenant_of(submission_id)):
            return None
        if submission_id in self._table:
            return self._table.view(submission_id)
        known = (await self._known_as_over([submission_id])).get(submission_id)
        return known.view if known else None

    async def page(self, wanted: TaskFilter, *, after: int, limit: int) -> TaskPage:
        """Those behind a position, in the order of acceptance. Raises: StoreError."""
        found: list[SubmissionView] = []
        for _ in range(READS_PER_PAGE):
            rows = await self._thread.call(
                self._store.page, wanted, after=after, limit=ROWS_PER_READ
            )
            for view in await self._views(rows):
                after = view.position
                if wanted.status in (None, view.status):
                    found.append(view)
                if len(found) == limit:
                    return TaskPage(tasks=tuple(found), next=after)
            if len(rows) < ROWS_PER_READ:
                return TaskPage(tasks=tuple(found), next=None)
            after = rows[-1][0]
        return TaskPage(tasks=tuple(found), next=after)

    async def _views(
        self, rows: Sequence[tuple[int, str, SubmissionView | None]]
    ) -> list[SubmissionView]:
        """Of those that are still known."""
        # What has ended since the rows were read.
        over = await self._known_as_over(
            [name for _, name, ended in rows if ended is None and name not in self._table]
        )
        views = []
        for _, name, ended in rows:
            if ended is not None:
                views.append(ended)
            elif name in self._table:
                views.append(self._table.view(name))
            elif name in over:
                views.append(over[name].view)
        return views

    async def sessions(
        self, wanted: SessionFilter, *, after: SessionPlace | None, limit: int
    ) -> SessionPage:
        """Those behind a place, in its order. Raises: StoreError."""
        return await self._thread.call(self._sessions.page, wanted, after=after, limit=limit)

    async def feed(self, *, after: int, limit: int, sees: str | None = None) -> FeedPage:
        """What was told behind a number, as `read_feed`. Raises: StoreError."""
        return await self._thread.call(
            read_feed, self._run_store, after=after, limit=limit, sees=sees
        )

    async def cancel(
        self,
        submission_id: str,
        *,
        evict: Callable[[str], Awaitable[bool]],
        sees: str | None = None,
    ) -> SubmissionView | None:
        """Cancel what no step has taken; returns how it stands then.

        evict: asks the queue to give a group up; False: a step has it, and nothing changes here, or
        the loop is about to admit it, which is waited for. Nothing changes either for one that is
        unknown, has left already, or is cancelled. sees: as `view`, whose None it returns.
        Raises: LeaseLost, StoreError.
        """
        # One at a time: a second call would find the group evicted by the first, not yet stored.
        async with self._cancelling:
            evicted = None
            deadline = asyncio.get_running_loop().time() + ADMISSION_LIMIT_S
            while True:
                view = await self.view(submission_id, sees=sees)
                if view is None or view.status in (Status.TRAINED, Status.CANCELLED):
                    return view
                group, term = self._group_of(submission_id), self._term
                if evicted != (group, term):
                    if view.status is Status.EVICTED:
                        return view
                    self._has_events.clear()
                    is_admitted = group is None or self._table.is_admitted(submission_id)
                    if group is not None and not await evict(group):
                        left = deadline - asyncio.get_running_loop().time()
                        if is_admitted or not await is_set_within(left, self._has_events):
                            return await self.view(submission_id, sees=sees)
                        continue
                    evicted = group, term
                if await self._thread.finish(self._cancel(submission_id, group, term)):
                    return await self.view(submission_id, sees=sees)

    def _group_of(self, submission_id: str) -> str | None:
        return self._table.group_of(submission_id) if submission_id in self._table else None

    async def _cancel(self, submission_id: str, group: str | None, term: int) -> bool:
        """Returns: False when it has got another group since, or a newer term may have it again."""
        async with self._changing:
            if (self._group_of(submission_id), self._term) != (group, term):
                return False
            await self._thread.call(self._store.cancel, submission_id, term=term)
            self._table.cancel(submission_id)
            if group is None:
                await self._let_go([self._table.view(submission_id)])
            return True

    async def archive(self, *, last_event_seq: int, newest_event_seq: int) -> None:
        """Let go of what is over. Args: as SubmissionTable.over. Raises: LeaseLost."""

        async def archive() -> None:
            async with self._changing:
                views = self._table.over(
                    last_event_seq=last_event_seq, newest_event_seq=newest_event_seq
                )
                if views:
                    await self._let_go(views)

        await self._thread.finish(archive())

    async def _let_go(self, views: Sequence[SubmissionView]) -> None:
        rollout_ids = [
            f"{group}-{rollout.index}"
            for view in views
            if (group := self._table.group_of(view.id)) is not None
            for rollout in view.rollouts
        ]
        await self._thread.call(
            self._store.archive,
            views,
            rollout_ids,
            term=self._term,
            keep=self._settings.keep_ended_tasks,
            keep_entries=self._settings.keep_feed_entries,
        )
        for view in views:
            self._table.forget(view.id)

    async def fill(self, slots: Sequence[OpenSlot]) -> list[GroupRequest]:
        """The first of the backlog for as many slots as there are; waits a moment for one.

        Raises: LeaseLost, StoreError.
        """
        self._has_news.clear()
        if not self._table.num_waiting:
            await is_set_within(WAIT_S, self._has_news)
        return await self._thread.finish(self._bind(slots))

    async def _bind(self, slots: Sequence[OpenSlot]) -> list[GroupRequest]:
        async with self._changing:
            waiting = self._table.next_waiting(len(slots))
            filled = slots[: len(waiting)]
            bindings = {
                group_id(slot.group_number, replacement=slot.replacement): submission.id
                for slot, submission in zip(filled, waiting, strict=True)
            }
            if not bindings:
                return []
            requests = await self._thread.call(self._store.bind, bindings, term=self._term)
            for group, submission_id in bindings.items():
                self._table.bind(submission_id, group)
        return [
            GroupRequest(
                group_number=slot.group_number,
                task=request.task,
                num_samples=request.num_samples,
                min_usable_samples=request.min_usable_samples,
            )
            for slot, request in zip(filled, requests, strict=True)
        ]

    def note_rollouts(self, summaries: Sequence[TrajectorySummary]) -> list[RolloutResult]:
        """Take in ended attempts. Returns: what is to be stored of them."""
        results = [RolloutResult.of(summary) for summary in summaries]
        self._table.note_results(results)
        return results

    def note_events(self, events: Sequence[LedgerEvent]) -> None:
        self._table.note_events(events)
        self._untold += [event for event in events if self._table.told_by(event)]
        if events:
            self._has_events.set()

    def take_entries(self, *, last_event_seq: int) -> list[FeedEntry]:
        """What the feed tells with a checkpoint whose ledger reaches to this event."""
        entries, now = [], time.time()
        for event in self._untold:
            told = self._table.told_by(event) if event.seq <= last_event_seq else None
            if told is not None:
                task, result = told
                entries.append(FeedEntry.of_event(event, task=task, result=result, at=now))
        self._untold = [event for event in self._untold if event.seq > last_event_seq]
        return entries

    def note_step_seconds(self, seconds: float) -> None:
        """How long a step takes now; estimates when a refused request may be sent again."""
        self._step_s = seconds


def _num_sessions(requests: Sequence[RolloutRequest]) -> int:
    return sum(item.num_samples for item in requests if item.sessions is not None)
