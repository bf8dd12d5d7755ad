"""Accepts submissions, shows where they stand, and fills group numbers with them in order.

An acceptance is stored before it is answered, a binding before its group is admitted.
One for a process; lives in the supervisor and is called from its event loop alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

from actors.deadline import is_set_within
from actors.outcomes import OutcomePolicy
from actors.trajectory_queue.groups import GroupRequest, group_id
from actors.trajectory_queue.ledger import LedgerEvent
from actors.trajectory_queue.messages import OpenSlot
from actors.types import TrajectorySummary
from service.intake.submission import (
    Backlog,
    RolloutRequest,
    RolloutResult,
    Status,
    SubmissionView,
    SubmitReply,
)
from service.intake.table import SubmissionTable, rebuild
from service.store.run_store import RunStore
from service.store.submissions import SubmissionStore

WAIT_S = 1.0
MAX_RETRY_AFTER_S = 60


class SubmissionQueue:
    """Refuses everything as not ready until `begin_term`."""

    def __init__(
        self, store: RunStore, *, capacity: int, groups_per_step: int, policy: OutcomePolicy
    ) -> None:
        """capacity: submissions that may wait in the backlog. groups_per_step: P."""
        self._store = SubmissionStore(store)
        self._capacity = capacity
        self._groups_per_step = groups_per_step
        self._policy = policy
        self._term = 0
        self._table = SubmissionTable(policy)
        self._has_news = asyncio.Event()
        self._cancelling = asyncio.Lock()
        self._step_s = 5.0
        self._closed_because = "the run has not begun; wait until /readyz says 200"

    def begin_term(self, term: int) -> None:
        """Go on from what is stored, as the owner of this lease."""
        self._term = term
        self._table = rebuild(self._policy, self._store.read())
        self._closed_because = ""
        self._has_news.set()

    def close(self, reason: str) -> None:
        """Accept nothing from here on; what is known can still be asked for."""
        self._closed_because = reason

    @property
    def backlog(self) -> Backlog:
        return Backlog(waiting=self._table.num_waiting, capacity=self._capacity)

    @property
    def groups_to_cancel(self) -> list[str]:
        """Groups in flight whose submission was cancelled; a restored queue has them again."""
        return self._table.cancelled_groups()

    def submit(self, requests: Sequence[RolloutRequest]) -> SubmitReply:
        """Accept all or none; a known id with the same content is answered as the first time.

        Raises: LeaseLost, StoreError.
        """
        new = [item for item in requests if item.id not in self._table]
        conflicts = tuple(
            item.id
            for item in requests
            if item.id in self._table and self._table.content_of(item.id) != item.content
        )
        if conflicts:
            return SubmitReply(conflicts=conflicts, backlog=self.backlog)
        if new and (refusal := self._refusal(len(new))):
            return refusal
        for submission in self._store.add(new, term=self._term) if new else ():
            self._table.accept(submission)
        self._has_news.set()
        return SubmitReply(
            views=tuple(self._table.view(item.id) for item in requests),
            new_ids=frozenset(item.id for item in new),
            backlog=self.backlog,
        )

    def _refusal(self, num_new: int) -> SubmitReply | None:
        """Why so many cannot be accepted now; None: they can."""
        if self._closed_because:
            return SubmitReply(refusal=self._closed_because, backlog=self.backlog)
        if num_new > self._capacity:
            return SubmitReply(
                refusal=(
                    f"{num_new} new tasks are offered at once, expected at most "
                    f"{self._capacity}, for which there is room"
                ),
                is_too_large=True,
                backlog=self.backlog,
            )
        num_waiting = self._table.num_waiting
        excess = num_waiting + num_new - self._capacity
        if excess <= 0:
            return None
        wait_s = math.ceil(math.ceil(excess / self._groups_per_step) * self._step_s)
        return SubmitReply(
            refusal=(
                f"{num_waiting} tasks wait already and {num_new} more are offered, "
                f"expected at most {self._capacity} together"
            ),
            retry_after_s=max(1, min(MAX_RETRY_AFTER_S, wait_s)),
            backlog=self.backlog,
        )

    def view(self, submission_id: str) -> SubmissionView | None:
        return self._table.view(submission_id) if submission_id in self._table else None

    async def cancel(
        self, submission_id: str, *, evict: Callable[[str], Awaitable[bool]]
    ) -> SubmissionView | None:
        """Cancel what no step has taken; returns how it stands then.

        evict: asks the queue to give a group up; False: a step has it, and nothing changes here.
        Nothing changes either for one that is unknown, has left already, or is cancelled.
        Raises: LeaseLost, StoreError.
        """
        # One at a time: a second call would find the group evicted by the first, not yet stored.
        async with self._cancelling:
            view = self.view(submission_id)
            if view is None or view.status in (Status.TRAINED, Status.EVICTED, Status.CANCELLED):
                return view
            while (group_id := self._table.group_of(submission_id)) is not None:
                term = self._term
                if not await evict(group_id):
                    return self.view(submission_id)
                # The queue of a newer term may have the group again.
                if term == self._term:
                    break
            self._store.cancel(submission_id, term=self._term)
            self._table.cancel(submission_id)
            return self.view(submission_id)

    async def fill(self, slots: Sequence[OpenSlot]) -> list[GroupRequest]:
        """The first of the backlog for as many slots as there are; waits a moment for one.

        Raises: LeaseLost, StoreError.
        """
        self._has_news.clear()
        if not self._table.num_waiting:
            await is_set_within(WAIT_S, self._has_news)
        requests = [item.request for item in self._table.next_waiting(len(slots))]
        pairs = list(zip(slots, requests, strict=False))
        bindings = {
            group_id(slot.group_number, replacement=slot.replacement): request.id
            for slot, request in pairs
        }
        if bindings:
            self._store.bind(bindings, term=self._term)
        for group, submission_id in bindings.items():
            self._table.bind(submission_id, group)
        return [
            GroupRequest(
                group_number=slot.group_number,
                task=request.task,
                num_samples=request.num_samples,
                min_usable_samples=request.min_usable_samples,
            )
            for slot, request in pairs
        ]

    def note_rollouts(self, summaries: Sequence[TrajectorySummary]) -> list[RolloutResult]:
        """Take in ended attempts. Returns: what is to be stored of them."""
        results = [RolloutResult.of(summary) for summary in summaries]
        self._table.note_results(results)
        return results

    def note_events(self, events: Sequence[LedgerEvent]) -> None:
        self._table.note_events(events)

    def note_step_seconds(self, seconds: float) -> None:
        """How long a step takes now; estimates when a refused request may be sent again."""
        self._step_s = seconds
