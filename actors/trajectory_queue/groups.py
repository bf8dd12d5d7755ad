"""Groups and their rollouts: attempts, retries, waiting, and the closing and replacement of groups.

Each new attempt of a rollout has a higher number than all earlier attempts, even after a restart.
So a late result is never mistaken for the result of a newer attempt. Only failed attempts use the
retry budget; attempts that are repeated after a restart do not. This module does no I/O.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

from actors.outcomes import Disposition, OutcomePolicy, are_equal
from actors.trajectory_queue.ledger import (
    EvictionReason,
    TokenCounts,
    token_cause,
    untrained_tokens,
)
from actors.types import Outcome, RolloutAssignment, Task, TrajectorySummary

RolloutState = Literal["pending", "handed_out", "finished", "gone"]
"""The state of a rollout. finished: its payload is stored. gone: it has left the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A task to play as a new group of rollouts, and the group number that the group will have."""

    group_number: int
    task: Task
    num_samples: int
    """Number of rollouts, >= 1."""
    min_usable_samples: int | None = None
    """Number of usable rollouts at which the group closes; None to wait for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """A reference to a finished trajectory: one row of a block in Ray's object store."""

    block: Any
    """Reference to a TrajectoryBlock, which `QueueState` never fetches."""
    row: int
    num_bytes: int
    """Size in bytes of the whole block, which is kept while any of its rows is needed."""
    arrived_at: float = 0.0
    """Time at which the queue accepted the trajectory, by the monotonic clock of its process."""


# The location of a payload that was lost with the queue that owned it.
LOST_ROW = BlockRow(block=None, row=0, num_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSnapshot:
    """The state of a rollout that a restarted queue needs."""

    rollout_id: str
    next_attempt: int
    """The number of the next attempt."""
    num_failures: int
    """Number of failed attempts, which the retry budget limits."""
    is_gone: bool
    num_sampled: int = 0
    """Number of the attempt's sampled tokens if a step has taken the attempt, otherwise 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """The state of a group, with its task, from which a restarted queue plays it again."""

    number: int
    replacement: int
    task: Task
    min_usable_samples: int | None
    rollouts: tuple[RolloutSnapshot, ...]


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One member of a group."""

    rollout_id: str
    state: RolloutState = "pending"
    next_attempt: int = 0
    num_failures: int = 0
    attempt: int = -1
    """Number of the newest attempt that was handed out; -1 before the first."""
    actor_id: str = ""
    """The actor that plays the rollout; empty unless it is handed out."""
    summary: TrajectorySummary | None = None
    payload: BlockRow | None = None
    num_sampled: int = 0
    """Number of sampled tokens of the finished attempt."""

    @property
    def trajectory_id(self) -> str:
        """The id of the newest attempt."""
        return f"{self.rollout_id}.a{self.attempt}"

    def hand_out(self, actor_id: str) -> int:
        """Start the next attempt and return its number."""
        assert self.state == "pending", self
        self.state, self.actor_id = "handed_out", actor_id
        self.attempt, self.next_attempt = self.next_attempt, self.next_attempt + 1
        return self.attempt

    def is_with(self, actor_id: str, *, attempt: int) -> bool:
        """Return whether the actor now plays this attempt."""
        is_current = self.attempt == attempt and self.actor_id == actor_id
        return self.state == "handed_out" and is_current

    def finish(self, summary: TrajectorySummary, payload: BlockRow) -> None:
        self.state, self.actor_id = "finished", ""
        self.summary, self.payload = summary, payload
        self.num_sampled = summary.num_sampled

    def fail(self, outcome: Outcome, policy: OutcomePolicy) -> None:
        """End an attempt without a trajectory. The rollout is retried if its retry budget allows
        it; otherwise it is evicted from the group.
        """
        is_retried = policy.is_retried(outcome, attempt=self.num_failures)
        self.num_failures += 1
        self.clear("pending" if is_retried else "gone")

    def clear(self, state: RolloutState) -> None:
        """Drop the attempt's result and set the state."""
        self.state, self.actor_id, self.summary, self.payload = state, "", None, None
        self.num_sampled = 0


def group_id(number: int, *, replacement: int) -> str:
    """Return a group's id, such as g000012.0; its rollouts are g000012.0-0, g000012.0-1, …"""
    return f"g{number:06d}.{replacement}"


@dataclass(slots=True, kw_only=True)
class Group:
    """The rollouts of one task."""

    number: int
    replacement: int
    """Number of earlier groups with the same group number."""
    task: Task
    policy: OutcomePolicy
    min_usable_samples: int | None = None
    is_scored: bool = False
    """Whether the returns of the rollouts include the environment's rewards for the whole group."""
    rollouts: dict[str, Rollout] = field(default_factory=dict)

    @property
    def group_id(self) -> str:
        return group_id(self.number, replacement=self.replacement)

    @property
    def is_closed(self) -> bool:
        """Whether all rollouts have ended: none is pending or handed out."""
        return not self.unfinished()

    @property
    def has_enough(self) -> bool:
        """Whether min_usable_samples is reached, so that the group can close without the rest."""
        return self.min_usable_samples is not None and self.num_usable >= self.min_usable_samples

    @property
    def num_usable(self) -> int:
        """Number of finished rollouts whose return may be in the baseline."""
        return len(self.usable())

    def finished(self) -> list[Rollout]:
        return [r for r in self.rollouts.values() if r.state == "finished"]

    def usable(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts.values() if self.is_usable(rollout)]

    def unfinished(self) -> list[Rollout]:
        open_states = ("pending", "handed_out")
        return [r for r in self.rollouts.values() if r.state in open_states]

    def end_attempt(self, rollout: Rollout, summary: TrajectorySummary, payload: BlockRow) -> None:
        """Record the end of an attempt. The environment's outcome policy decides whether the
        rollout is finished, is retried, or is evicted from the group.
        """
        outcome = summary.outcome
        is_kept = self.policy.disposition(outcome) is not Disposition.DROP
        if self.policy.is_retried(outcome, attempt=rollout.num_failures) or not is_kept:
            rollout.fail(outcome, self.policy)
        else:
            rollout.finish(summary, payload)

    def assignment(self, rollout: Rollout) -> RolloutAssignment:
        return RolloutAssignment(
            rollout_id=rollout.rollout_id,
            group_id=self.group_id,
            group_number=self.number,
            attempt=rollout.attempt,
            task=self.task,
        )

    def tokens_without_step(self, rollout: Rollout, reason: EvictionReason) -> TokenCounts:
        """Count the sampled tokens of a finished attempt that no step will train, by cause.

        - Tokens of a turn that a session left out of training: the turn's `LeftOutReason`.
        - Other tokens of an attempt that the outcome policy masks (keeps out of the loss): the
          attempt's outcome, or MASKED if the attempt completed.
        - All other tokens: `reason`.
        """
        summary = rollout.summary
        if summary is None:
            return TokenCounts(untrained={reason: rollout.num_sampled}).known()
        if self.policy.rule(summary.outcome).masks(is_graded=summary.is_graded):
            # A training step would not train these tokens either.
            reason = token_cause(EvictionReason.MASKED, summary.outcome)
        return untrained_tokens(summary, reason)

    def snapshot(self, *, is_taken: bool) -> GroupSnapshot:
        """Return the group's snapshot. is_taken: whether a step has taken the group."""
        rollouts = tuple(
            RolloutSnapshot(
                rollout_id=rollout.rollout_id,
                next_attempt=rollout.next_attempt,
                num_failures=rollout.num_failures,
                is_gone=rollout.state == "gone",
                num_sampled=rollout.num_sampled if is_taken else 0,
            )
            for rollout in self.rollouts.values()
        )
        return GroupSnapshot(
            number=self.number,
            replacement=self.replacement,
            task=self.task,
            min_usable_samples=self.min_usable_samples,
            rollouts=rollouts,
        )

    def is_usable(self, rollout: Rollout) -> bool:
        """Return whether a rollout has finished with a return that may be in the baseline."""
        return self._baseline_return(rollout) is not None

    def baseline_returns(self) -> list[float]:
        """Return the finished rollouts' returns that enter the group's baseline.

        The rule of a rollout's outcome may leave its return out, or replace it by a lower one.
        """
        found = map(self._baseline_return, self.rollouts.values())
        return [value for value in found if value is not None]

    def _baseline_return(self, rollout: Rollout) -> float | None:
        summary = rollout.summary
        if summary is None:
            return None
        rule = self.policy.rule(summary.outcome)
        is_clamped = rule.disposition is Disposition.TRAIN_CLAMPED
        return rule.baseline_return(
            summary.episode_return,
            is_graded=summary.is_graded,
            worst_completed=self._worst_completed() if is_clamped else None,
        )

    def _worst_completed(self) -> float | None:
        found = [rollout.summary for rollout in self.rollouts.values() if rollout.summary]
        completed = [each for each in found if each.outcome is Outcome.COMPLETED]
        return min((each.episode_return for each in completed), default=None)


class ReadyRollouts:
    """The pending rollouts of each environment, in the order of handing out.

    A rollout that is no longer pending stays here until it is popped; the caller skips it.
    """

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[bool, int, int, str]]] = {}
        """A heap for each environment, of (is first attempt, group number, member, rollout id), so
        that retries come first."""

    def add(self, rollout: Rollout, group: Group) -> None:
        member = int(rollout.rollout_id.rpartition("-")[2])
        heap = self._heaps.setdefault(group.task.environment, [])
        heapq.heappush(heap, (rollout.next_attempt == 0, group.number, member, rollout.rollout_id))

    def pop(self, environments: Collection[str]) -> str | None:
        """Remove the next rollout of these environments; return its id, or None if none is left."""
        heaps = [heap for name in environments if (heap := self._heaps.get(name))]
        return heapq.heappop(min(heaps, key=itemgetter(0)))[-1] if heaps else None

    def ids(self, environments: Collection[str]) -> Iterator[str]:
        """Yield the ids of the rollouts of these environments, in no order."""
        heaps = (self._heaps.get(environment, ()) for environment in environments)
        return (rollout_id for heap in heaps for *_, rollout_id in heap)


class WaitingRollouts:
    """The finished rollouts that no step has taken, and the size of their payloads."""

    def __init__(self) -> None:
        self._payloads: dict[str, BlockRow] = {}
        self._num_rows: Counter[Any] = Counter()
        """Number of rows in `_payloads` by block."""
        self.num_bytes = 0
        """Total size of the blocks; each counts once, with all its rows."""

    def __len__(self) -> int:
        return len(self._payloads)

    def ids(self) -> list[str]:
        """Return the rollouts' ids, in the order in which the rollouts finished."""
        return list(self._payloads)

    def oldest_s(self, now: float) -> float | None:
        """Return the seconds that the oldest rollout has waited; None if none waits."""
        return max((now - row.arrived_at for row in self._payloads.values()), default=None)

    def add(self, rollout: Rollout) -> None:
        assert rollout.payload is not None
        payload = self._payloads[rollout.rollout_id] = rollout.payload
        if not self._num_rows[payload.block]:
            self.num_bytes += payload.num_bytes
        self._num_rows[payload.block] += 1

    def drop(self, rollout_id: str) -> None:
        """Remove a rollout if it waits."""
        if (payload := self._payloads.pop(rollout_id, None)) is None:
            return
        self._num_rows[payload.block] -= 1
        if not self._num_rows[payload.block]:
            del self._num_rows[payload.block]
            self.num_bytes -= payload.num_bytes


def check_request(request: GroupRequest, *, free: Collection[int], min_group_size: int) -> None:
    """Raise ValueError if a task cannot be admitted.

    The request is refused if its group number is not free, if its group could never close, or if
    the group would be too small to be trained.

    free: the numbers without a task. min_group_size: >= 1.
    """
    if request.group_number not in free:
        raise ValueError(
            f"queue: group {request.group_number} is not free for a task, expected one of "
            f"{sorted(free)[:8]}; ask admissible() first"
        )
    enough = request.num_samples
    if request.min_usable_samples is not None:
        enough = request.min_usable_samples
    if not min_group_size <= enough <= request.num_samples:
        raise ValueError(
            f"queue: group {request.group_number} closes with {enough} usable samples, expected "
            f"at least min_group_size={min_group_size} and at most num_samples="
            f"{request.num_samples}"
        )


def new_group(request: GroupRequest, *, replacement: int, policy: OutcomePolicy) -> Group:
    """Create a group whose rollouts are all pending; a rollout's id is such as g000012.0-3."""
    group = Group(
        number=request.group_number,
        replacement=replacement,
        task=request.task,
        policy=policy,
        min_usable_samples=request.min_usable_samples,
    )
    for member in range(request.num_samples):
        rollout_id = f"{group.group_id}-{member}"
        group.rollouts[rollout_id] = Rollout(rollout_id=rollout_id)
    return group


def restore_group(snapshot: GroupSnapshot, *, policy: OutcomePolicy, is_taken: bool) -> Group:
    """Restore a group from its snapshot, which does not contain the trajectories.

    If a step has taken the group (is_taken), its rollouts stay finished, although their
    trajectories are lost: the training loop may already have the step's batch. Otherwise the
    rollouts are played again. Evicted rollouts stay evicted in both cases.
    """
    group = Group(
        number=snapshot.number,
        replacement=snapshot.replacement,
        task=snapshot.task,
        policy=policy,
        min_usable_samples=snapshot.min_usable_samples,
        is_scored=is_taken,
    )
    for each in snapshot.rollouts:
        state: RolloutState = "finished" if is_taken else "pending"
        group.rollouts[each.rollout_id] = Rollout(
            rollout_id=each.rollout_id,
            state="gone" if each.is_gone else state,
            next_attempt=each.next_attempt,
            num_failures=each.num_failures,
            payload=LOST_ROW if is_taken and not each.is_gone else None,
            num_sampled=each.num_sampled if is_taken else 0,
        )
    return group


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedGroups:
    """The groups that have failed since the last usable group; too many of them end the run.

    A group is usable if it closes with enough members for a baseline. Any other group is evicted,
    and its number gets another task. If every episode fails, this would repeat forever.
    """

    num_usable_before: int
    """Number of usable groups in the term before these failures; it identifies this series."""

    num_groups: int

    outcomes: Mapping[Outcome, int]
    """Number of unusable attempts that ended with each outcome."""

    last_outcome: Outcome
    last_detail: str
    task_id: str
    environment: str

    @property
    def main_outcome(self) -> Outcome:
        """The most frequent outcome. Of several equally frequent outcomes: the last attempt's
        outcome if it is among them, otherwise the outcome that occurred first.
        """
        most = max(self.outcomes.values())
        if self.outcomes.get(self.last_outcome) == most:
            return self.last_outcome
        return next(outcome for outcome, count in self.outcomes.items() if count == most)


class FailureCounter:
    """A counter of the groups that failed since the last usable group."""

    def __init__(self) -> None:
        self._num_usable = self._num_failed = 0
        self._outcomes: Counter[Outcome] = Counter()
        self._last: tuple[Outcome, str, Task] | None = None

    def add_attempt(self, outcome: Outcome, *, detail: str, task: Task) -> None:
        """Record a failed attempt, or an attempt whose return is not in the group's baseline."""
        self._outcomes[outcome] += 1
        self._last = (outcome, detail, task)

    def add_group(self, *, is_usable: bool) -> None:
        """Record a closed group."""
        if not is_usable:
            self._num_failed += 1
            return
        self._num_usable += 1
        self._num_failed, self._last = 0, None
        self._outcomes.clear()

    def current(self) -> FailedGroups | None:
        """Return the failures; None if no group has failed since the last usable group."""
        if not self._num_failed or self._last is None:
            return None
        outcome, detail, task = self._last
        return FailedGroups(
            num_usable_before=self._num_usable,
            num_groups=self._num_failed,
            outcomes=dict(self._outcomes),
            last_outcome=outcome,
            last_detail=detail,
            task_id=task.task_id,
            environment=task.environment,
        )


class Refills:
    """Dynamic sampling: decides whether a closed group is replaced because its returns are equal.

    Equal returns give advantages of 0, so the group's number gets another task (a refill). Each
    group number gets at most `limit` refills; after that, a group with equal returns is kept.
    Without the limit, a step could wait forever if the policy solves every task. Reward shaping is
    not considered here, because the merge actor applies reward shaping later.
    Source: DAPO, arXiv 2503.14476, equation 11. Deviations: only this group is replaced instead of
        the whole batch; the number of refills is limited.
    """

    def __init__(self, *, limit: int, counts: Mapping[int, int] | None = None) -> None:
        self._limit = limit
        self._counts = dict(counts or {})

    def claim(self, number: int, returns: Sequence[float]) -> bool:
        """Return whether a closed group must be replaced; if so, use up one refill of its number.

        returns: the rollouts' returns that enter the group's baseline.
        """
        used = self._counts.get(number, 0)
        if used >= self._limit or not are_equal(returns):
            return False
        self._counts[number] = used + 1
        return True

    def forget(self, number: int) -> None:
        """Drop the refill count of a group number that will not be used again."""
        self._counts.pop(number, None)

    def counts(self) -> dict[int, int]:
        """Return the number of refills of each group number that has not been forgotten."""
        return dict(self._counts)
