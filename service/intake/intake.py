"""Takes submissions in, tells where they stand, and gives them to the loop as numbers free up.

What a client is told was stored first: an acceptance before its answer, a binding before the group
is admitted. One for a process; lives in the supervisor and is called from its event loop alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from actors.algorithm import AlgorithmSettings
from actors.deadline import is_set_within
from actors.outcomes import OutcomePolicy
from actors.trajectory_queue.groups import GroupRequest, group_id
from actors.trajectory_queue.ledger import LedgerEvent
from actors.trajectory_queue.messages import OpenSlot
from actors.types import TrajectorySummary
from service.config.tree import ServiceSettings
from service.intake.book import Book, rebuild
from service.intake.submission import (
    Line,
    RolloutResult,
    Status,
    SubmissionView,
    SubmitReply,
    Wanted,
)
from service.store.run_store import RunStore
from service.store.submissions import SubmissionStore

WAIT_S = 1.0
MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeSettings:
    """What the intake reads of the configuration."""

    service: ServiceSettings
    algorithm: AlgorithmSettings
    policy: OutcomePolicy


class Intake:
    """`begin_epoch` comes first: until then everything is refused as not ready."""

    def __init__(self, settings: IntakeSettings, store: RunStore) -> None:
        self._settings = settings
        self._store = SubmissionStore(store)
        self._epoch = 0
        self._book = Book(settings.policy)
        self._news = asyncio.Event()
        self._cancelling = asyncio.Lock()
        self._step_s = 5.0
        self._closed_because = "the run has not begun; wait until /readyz says 200"

    def begin_epoch(self, epoch: int) -> None:
        """Go on from what is stored, as the holder of this lease."""
        stored = self._store.read()
        self._epoch = epoch
        self._book = rebuild(
            self._settings.policy,
            submissions=stored.submissions,
            bindings=stored.bindings,
            results=stored.results,
            events=stored.events,
        )
        self._closed_because = ""
        self._news.set()

    def close(self, reason: str) -> None:
        """Take nothing in from here on; what is known can still be asked for."""
        self._closed_because = reason

    @property
    def line(self) -> Line:
        return Line(
            waiting=self._book.num_waiting, capacity=self._settings.service.max_waiting_tasks
        )

    @property
    def groups_to_cancel(self) -> list[str]:
        """Groups in flight whose submission was cancelled; a restored queue holds them again."""
        return self._book.cancelled_groups()

    def submit(self, wanted: Sequence[Wanted]) -> SubmitReply:
        """Accept all or none; a known id with the same content is answered as the first time.

        Raises: LeaseLost, StoreError.
        """
        known = [item for item in wanted if item.task.task_id in self._book]
        conflicts = tuple(
            item.task.task_id
            for item in known
            if self._book.digest(item.task.task_id) != item.digest
        )
        new = [item for item in wanted if item.task.task_id not in self._book]
        if conflicts:
            return SubmitReply(conflicts=conflicts, line=self.line)
        if new and self._closed_because:
            return SubmitReply(refusal=self._closed_because, line=self.line)
        if len(new) > self._settings.service.max_waiting_tasks:
            return SubmitReply(
                refusal=(
                    f"{len(new)} new tasks are offered at once, expected at most "
                    f"{self._settings.service.max_waiting_tasks}, for which there is room"
                ),
                is_too_large=True,
                line=self.line,
            )
        if new and self._book.num_waiting + len(new) > self._settings.service.max_waiting_tasks:
            return SubmitReply(
                refusal=(
                    f"{self._book.num_waiting} tasks wait already and {len(new)} more are offered, "
                    f"expected at most {self._settings.service.max_waiting_tasks} together"
                ),
                retry_after_s=self._retry_after_s(len(new)),
                line=self.line,
            )
        for submission in self._store.add(new, epoch=self._epoch) if new else ():
            self._book.accept(submission)
        self._news.set()
        return SubmitReply(
            views=tuple(self._book.view(item.task.task_id) for item in wanted),
            new_ids=frozenset(item.task.task_id for item in new),
            line=self.line,
        )

    def view(self, submission_id: str) -> SubmissionView | None:
        return self._book.view(submission_id) if submission_id in self._book else None

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
            while (group_id := self._book.group_of(submission_id)) is not None:
                epoch = self._epoch
                if not await evict(group_id):
                    return self.view(submission_id)
                # A newer epoch's queue may hold the group again.
                if epoch == self._epoch:
                    break
            self._store.cancel(submission_id, epoch=self._epoch)
            self._book.cancel(submission_id)
            return self.view(submission_id)

    async def fill(self, slots: Sequence[OpenSlot]) -> list[GroupRequest]:
        """The next in line for as many slots as there are tasks for, waited for a moment.

        Raises: LeaseLost, StoreError.
        """
        self._news.clear()
        if not self._book.num_waiting:
            await is_set_within(WAIT_S, self._news)
        found = self._book.next_in_line(len(slots))
        pairs = list(zip(slots, found, strict=False))
        groups = {
            group_id(slot.group_number, replacement=slot.replacement): submission.id
            for slot, submission in pairs
        }
        if groups:
            self._store.bind(groups, epoch=self._epoch)
        for each, submission_id in groups.items():
            self._book.bind(submission_id, each)
        return [
            GroupRequest(
                group_number=slot.group_number,
                task=submission.wanted.task,
                num_samples=submission.wanted.num_samples,
                min_usable_samples=submission.wanted.min_usable_samples,
            )
            for slot, submission in pairs
        ]

    def note_rollouts(self, summaries: Sequence[TrajectorySummary]) -> list[RolloutResult]:
        """Take in ended attempts. Returns: what is to be stored of them."""
        results = [RolloutResult.of(summary) for summary in summaries]
        self._book.note_results(results)
        return results

    def note_events(self, events: Sequence[LedgerEvent]) -> None:
        self._book.note_events(events)

    def note_step_seconds(self, seconds: float) -> None:
        """How long a step takes now, from which the time to try again is guessed."""
        self._step_s = seconds

    def _retry_after_s(self, num_new: int) -> int:
        excess = self._book.num_waiting + num_new - self._settings.service.max_waiting_tasks
        steps = math.ceil(excess / self._settings.algorithm.groups_per_step)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(steps * self._step_s)))
