"""Accept the tasks that clients submit, show their states, and choose which are played next.

A group of rollouts plays each task. A task is stored before the client learns that it was accepted.
The id of the task's group is stored before the trajectory queue gets the group. Ended tasks are
only in the store, which keeps the newest. Only the supervisor's event loop calls the queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace

import msgspec

from actors.deadline import is_set_within
from actors.limits import MIB
from actors.outcomes import OutcomePolicy
from actors.trajectory_queue.groups import GroupRequest, group_id
from actors.trajectory_queue.ledger import LedgerEvent
from actors.trajectory_queue.messages import OpenSlot
from actors.types import TrajectorySummary
from service.access.keys import NO_LIMITS, KeyLimits, may_see, tenant_of
from service.backlog.table import SubmissionTable, rebuild
from service.config.sections import ServiceSettings
from service.intake.listing import (
    FeedEntry,
    FeedPage,
    Page,
    SessionFilter,
    SessionPage,
    SessionPlace,
    TaskFilter,
    TaskPage,
)
from service.intake.submission import (
    Backlog,
    Offer,
    PackedRequest,
    PlaceAnswer,
    RolloutRequest,
    RolloutResult,
    Status,
    Submission,
    SubmissionView,
    SubmitReply,
    independent_batches,
    num_sessions,
)
from service.store.errors import LeaseLost, StoreError
from service.store.feed import read_feed
from service.store.leases import Lease
from service.store.run_store import RunStore
from service.store.sessions import SessionStore
from service.store.submissions import SubmissionStore, offer_of
from service.worker_thread import WorkerThread

WAIT_S = 1.0
# Most seconds between a group's binding and the event that the queue has admitted it.
ADMISSION_LIMIT_S = 5.0
MAX_RETRY_AFTER_S = 60
# Limits for a page of a list: the rows of one read of the store, and the number of reads.
ROWS_PER_READ = 500
READS_PER_PAGE = 4
_OFFERS = msgspec.msgpack.Decoder(Offer)


class SubmissionQueue:
    """The supervisor's queue of clients' submissions, from their acceptance until they are over.

    Until `begin_term` it refuses every request as not ready.
    """

    def __init__(
        self,
        store: RunStore,
        *,
        thread: WorkerThread,
        settings: ServiceSettings,
        groups_per_step: int,
        policy: OutcomePolicy,
    ) -> None:
        """Create a queue.

        groups_per_step: number of groups in a training step. policy: decides which attempts of
        rollouts are repeated or dropped.
        """
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
        # Held while the table is read, the change is stored, and the table is changed.
        self._changing = asyncio.Lock()
        self._step_s = 5.0
        self._closed_because = "the run has not begun; wait until /readyz says 200"
        # Events of the ledger that no checkpoint contains yet; until then the feed omits them.
        self._unpublished: list[LedgerEvent] = []

    async def begin_term(self, lease: Lease) -> None:
        """Load the stored submissions and begin to accept requests.

        lease: allows this process to write to the run's store.
        """
        held = lease.queue_snapshot.groups if lease.queue_snapshot else ()
        groups = [group_id(group.number, replacement=group.replacement) for group in held]
        async with self._changing:
            self._term, self._unpublished = lease.term, []
            await self._thread.call(self._store.begin_term, lease)
            self._table = await self._thread.call(self._rebuild, groups)
            self._closed_because = ""
        self._has_news.set()

    def _rebuild(self, held_groups: Sequence[str]) -> SubmissionTable:
        return rebuild(self._policy, self._store.read(), held_groups=held_groups)

    def close(self, reason: str) -> None:
        """Refuse all later requests with `reason`; known submissions can still be read."""
        self._closed_because = reason

    @property
    def backlog(self) -> Backlog:
        return Backlog(waiting=self._table.num_waiting, capacity=self._settings.max_waiting_tasks)

    @property
    def groups_to_cancel(self) -> list[str]:
        """Groups of cancelled submissions that the trajectory queue has, and must evict."""
        return self._table.cancelled_groups()

    def accepted_at(self, group_id: str) -> float | None:
        """Return when the group's submission was accepted; None if no client submitted it."""
        return self._table.accepted_at(group_id)

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        *,
        key: str = "",
        limits: KeyLimits = NO_LIMITS,
    ) -> SubmitReply:
        """Accept all tasks of a request or none. A task that is already known is not added again.

        key: digest of the Idempotency-Key and of the caller's tenant; empty if the request has no
        Idempotency-Key. A different request with the same key is refused while a task of the first
        request is still stored. limits: the limits of the caller's API key.
        Raises: LeaseLost, StoreError.
        """
        offer = offer_of(requests, key=key, limits=limits)
        (answer,) = await self._thread.finish(self._answer([offer]))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def submit_packed(self, offers: Sequence[bytes]) -> list[bytes | Exception]:
        """Accept or refuse several requests, each encoded as a MessagePack `Offer`.

        Returns: for each offer a `SubmitReply` as MessagePack, or the error that `submit` would
        raise.
        """
        answers = await self._thread.finish(self._answer([_OFFERS.decode(each) for each in offers]))
        return [
            each if isinstance(each, Exception) else msgspec.msgpack.encode(each)
            for each in answers
        ]

    async def _answer(self, offers: Sequence[Offer]) -> list[SubmitReply | Exception]:
        answers: list[SubmitReply | Exception] = []
        async with self._changing:
            for batch in independent_batches(offers):
                answers += await self._decide(batch)
        return answers

    async def _decide(self, batch: Sequence[Offer]) -> list[SubmitReply | Exception]:
        """Answer requests (offers) as if they arrived in order; store all new tasks at once.

        batch: requests that share no task id and no Idempotency-Key (`independent_batches`).
        """
        unknown = [item.id for offer in batch for item in offer.tasks if item.id not in self._table]
        keys = [offer.key for offer in batch if offer.key]
        try:
            digests, of_keys = await self._thread.call(self._store.digests, unknown, keys)
            over = await self._ended(digests)
        except StoreError as error:
            return [error] * len(batch)
        # An answer is None if the offer is accepted as soon as its tasks are stored.
        answers: list[SubmitReply | Exception | None] = []
        ahead: list[PackedRequest] = []
        request_keys: dict[str, tuple[str, str]] = {}
        for offer in batch:
            new = self._new_of(offer, digests, of_keys.get(offer.key), ahead)
            if isinstance(new, SubmitReply):
                answers.append(new)
            elif not new:
                answers.append(self._reply(offer, {}, over))
            else:
                answers.append(None)
                ahead += new
                if offer.key:
                    of_request = (offer.key, offer.digest)
                    request_keys |= dict.fromkeys((item.id for item in new), of_request)
        places: dict[str, PlaceAnswer] = {}
        failure: Exception | None = None
        if ahead:
            try:
                accepted = await self._thread.call(
                    self._store.add, ahead, term=self._term, request_keys=request_keys
                )
            except (LeaseLost, StoreError) as error:
                failure = error
            else:
                places = self._accept(accepted)
                self._has_news.set()
        return [
            answer or failure or self._reply(offer, places, over)
            for offer, answer in zip(batch, answers, strict=True)
        ]

    def _accept(self, accepted: Sequence[Submission]) -> dict[str, PlaceAnswer]:
        places: dict[str, PlaceAnswer] = {}
        for num_ahead, submission in enumerate(accepted, start=self._table.num_waiting):
            self._table.accept(submission)
            places[submission.id] = PlaceAnswer(
                id=submission.id,
                place=submission.position,
                ahead=num_ahead,
                status=Status.QUEUED,
                num_samples=submission.num_samples,
                is_new=True,
            )
        return places

    def _reply(
        self, offer: Offer, new: Mapping[str, PlaceAnswer], over: Mapping[str, SubmissionView]
    ) -> SubmitReply:
        """Return the reply to an accepted request.

        new: the answers for its new tasks. over: the states of its tasks that had ended before.
        """
        return SubmitReply(
            places=tuple(
                new.get(item.id) or self._known_place(item.id, over) for item in offer.tasks
            ),
            backlog=self.backlog,
        )

    def _known_place(self, submission_id: str, over: Mapping[str, SubmissionView]) -> PlaceAnswer:
        view = over.get(submission_id) or self._table.view(submission_id)
        return PlaceAnswer(
            id=submission_id,
            place=view.position,
            ahead=view.num_ahead,
            status=view.status,
            num_samples=len(view.rollouts),
            is_new=False,
        )

    def _new_of(
        self,
        offer: Offer,
        over: Mapping[str, str],
        stored: str | None,
        ahead: Sequence[PackedRequest],
    ) -> list[PackedRequest] | SubmitReply:
        """Return the new tasks of a request, or the reply that refuses the request.

        over: digests of ended tasks that are still stored, by id. stored: digest of an earlier
        request with the same Idempotency-Key. ahead: accepted tasks that are not in the table yet.
        """
        if stored not in (None, offer.digest):
            return SubmitReply(is_key_taken=True, backlog=self.backlog)
        new: list[PackedRequest] = []
        conflicts: list[str] = []
        for item in offer.tasks:
            if item.id in self._table:
                known = self._table.digest_of(item.id)
            elif item.id in over:
                known = over[item.id]
            else:
                new.append(item)
                continue
            if known != item.digest:
                conflicts.append(item.id)
        if conflicts:
            return SubmitReply(conflicts=tuple(conflicts), backlog=self.backlog)
        refusal = None
        if new:
            refusal = self._refusal(new, ahead) or self._beyond_quota(new, ahead, offer.limits)
        return refusal or new

    async def _ended(self, submission_ids: Collection[str]) -> dict[str, SubmissionView]:
        if not submission_ids:
            return {}
        return await self._thread.call(self._store.ended, submission_ids)

    def _refusal(
        self, new: Sequence[PackedRequest], ahead: Sequence[PackedRequest]
    ) -> SubmitReply | None:
        """Return the reply that refuses new tasks for now; None if they can be accepted.

        ahead: tasks of earlier requests that were accepted but are not in the table yet.
        """
        num_new, capacity = len(new), self._settings.max_waiting_tasks
        if self._closed_because:
            return SubmitReply(refusal=self._closed_because, backlog=self.backlog)
        if num_new > capacity:
            return SubmitReply(
                refusal=(
                    f"got {num_new} new tasks at once, expected at most {capacity}, which an empty "
                    "backlog can take"
                ),
                is_too_large=True,
                backlog=self.backlog,
            )
        num_waiting = self._table.num_waiting + len(ahead)
        # If the backlog has too many bytes, the number of steps that make room is not known.
        excess = num_waiting + num_new - capacity
        if excess > 0:
            return self._full(
                f"{num_waiting} tasks wait already, got {num_new} more, "
                f"expected at most {capacity} together (service.max_waiting_tasks)",
                excess=excess,
            )
        num_bytes = self._table.waiting_bytes + sum(item.num_bytes for item in (*ahead, *new))
        most = self._settings.max_waiting_mib * MIB
        # If nothing waits, only the size of a body limits what is accepted.
        if num_bytes > most and num_waiting:
            return self._full(
                f"the waiting and the new tasks are {num_bytes / MIB:.1f} MiB together, "
                f"expected at most {self._settings.max_waiting_mib} MiB (service.max_waiting_mib)",
                excess=1,
            )
        return None

    def _beyond_quota(
        self,
        new: Sequence[PackedRequest],
        ahead: Sequence[PackedRequest],
        limits: KeyLimits,
    ) -> SubmitReply | None:
        """Return the reply that refuses tasks beyond the limits of their API key, or None."""
        name = new[0].key_name
        for limit, measure, count in (
            ("max_waiting_tasks", len, self._table.num_waiting_of),
            ("max_open_sessions", num_sessions, self._table.num_open_sessions_of),
        ):
            most, num_new = getattr(limits, limit), measure(new)
            if most is None or not num_new:
                continue
            num_ahead = measure([item for item in ahead if item.key_name == name])
            num_before = count(name) + num_ahead
            if num_before + num_new > most:
                refused = self._full(
                    f"this key has {num_before} of {limit} already, got {num_new} more, expected "
                    f"at most {most} together",
                    excess=1,
                )
                return replace(refused, is_quota=True, is_too_large=num_new > most)
        return None

    def _full(self, refusal: str, *, excess: int) -> SubmitReply:
        """Return a refusal with the estimated seconds until `excess` waiting tasks are admitted."""
        wait_s = math.ceil(math.ceil(excess / self._groups_per_step) * self._step_s)
        return SubmitReply(
            refusal=refusal,
            retry_after_s=max(1, min(MAX_RETRY_AFTER_S, wait_s)),
            backlog=self.backlog,
        )

    async def view(self, submission_id: str, *, sees: str | None = None) -> SubmissionView | None:
        """Return a submission's state; None if it is unknown, no longer kept, or not visible.

        sees: the tenant whose tasks are visible; None: all tasks are visible. Raises: StoreError.
        """
        if not may_see(sees, tenant_of(submission_id)):
            return None
        if submission_id in self._table:
            return self._table.view(submission_id)
        return (await self._ended([submission_id])).get(submission_id)

    async def page(self, wanted: TaskFilter, *, after: int, limit: int) -> TaskPage:
        """Return a page of the submissions that match `wanted`, in the order of acceptance.

        after: position after which the page begins. Raises: StoreError.
        """
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
                    return Page(items=tuple(found), next=after)
            if len(rows) < ROWS_PER_READ:
                return Page(items=tuple(found), next=None)
            after = rows[-1][0]
        return Page(items=tuple(found), next=after)

    async def _views(
        self, rows: Sequence[tuple[int, str, SubmissionView | None]]
    ) -> list[SubmissionView]:
        """Return the states of a page's submissions; omit submissions that are no longer kept."""
        # Submissions that have ended since the rows were read.
        over = await self._ended(
            [name for _, name, ended in rows if ended is None and name not in self._table]
        )
        views = []
        for _, name, ended in rows:
            if ended is not None:
                views.append(ended)
            elif name in self._table:
                views.append(self._table.view(name))
            elif name in over:
                views.append(over[name])
        return views

    async def sessions(
        self, wanted: SessionFilter, *, after: SessionPlace | None, limit: int
    ) -> SessionPage:
        """Return a page of the sessions that match `wanted`, in order. Raises: StoreError.

        after: position after which the page begins; None begins with the first session.
        """
        return await self._thread.call(self._sessions.page, wanted, after=after, limit=limit)

    async def feed(self, *, after: int, limit: int, sees: str | None = None) -> FeedPage:
        """Return entries of the feed (see `read_feed`). Raises: StoreError."""
        store = self._run_store
        return await self._thread.call(read_feed, store, after=after, limit=limit, sees=sees)

    async def cancel(
        self,
        submission_id: str,
        *,
        evict: Callable[[str], Awaitable[bool]],
        sees: str | None = None,
    ) -> SubmissionView | None:
        """Cancel a submission unless a training step has taken it; return its state (see `view`).

        Nothing changes if the submission is unknown, or already trained, evicted or cancelled.

        evict: removes a group from the trajectory queue. It returns False if a step has taken the
        group, or if the queue does not have the group yet. sees: as in `view`.
        Raises: LeaseLost, StoreError.
        """
        # If the queue does not have the group yet, the loop waits for the group's admission.
        # One call at a time: a second one would find the group evicted but not stored as cancelled.
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
        """Store a submission's cancellation; return False if its group or the lease has changed."""
        async with self._changing:
            if (self._group_of(submission_id), self._term) != (group, term):
                return False
            await self._thread.call(self._store.cancel, submission_id, term=term)
            self._table.cancel(submission_id)
            if group is None:
                await self._archive([self._table.view(submission_id)])
            return True

    async def archive(self, kept: Sequence[int]) -> None:
        """Store the final states of submissions that are over, and remove these from memory.

        A submission is over if no return to a kept checkpoint can play its rollouts again. kept:
        the number of the last ledger event in each kept checkpoint, newest first. Raises:
        LeaseLost.
        """

        async def archive() -> None:
            async with self._changing:
                if views := self._table.over(kept):
                    await self._archive(views)

        await self._thread.finish(archive())

    async def _archive(self, views: Sequence[SubmissionView]) -> None:
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
        """Return groups for the trajectory queue to admit, one for each of the next submissions.

        If no submission waits, wait up to WAIT_S for one.
        slots: the queue's free group numbers, which limit how many groups are returned.
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
        """Record the results of ended attempts, and return them for the store."""
        results = [RolloutResult.of(summary) for summary in summaries]
        self._table.note_results(results)
        return results

    def note_events(self, events: Sequence[LedgerEvent]) -> None:
        self._table.note_events(events)
        self._unpublished += [event for event in events if self._table.told_by(event)]
        if events:
            self._has_events.set()

    def take_entries(self, *, last_event_seq: int) -> list[FeedEntry]:
        """Return new entries of the feed, in which clients read what became of their tasks.

        Each entry reports one ledger event, and is returned only once. Events after number
        `last_event_seq` are left for a later call. The caller stores the entries with a checkpoint.
        """
        entries, now = [], time.time()
        for event in self._unpublished:
            found = self._table.told_by(event) if event.seq <= last_event_seq else None
            if found is not None:
                task, result = found
                entries.append(FeedEntry.of_event(event, task=task, result=result, at=now))
        self._unpublished = [event for event in self._unpublished if event.seq > last_event_seq]
        return entries

    def note_step_seconds(self, seconds: float) -> None:
        """Record the duration of a step, from which the Retry-After of refusals is estimated."""
        self._step_s = seconds
