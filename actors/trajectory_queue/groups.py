"""Groups and their rollouts: attempts, retries, and when a group closes.

A rollout is pending, handed out, finished (its payload waits) or gone (it left the ledger).
Attempt numbers only grow: a retry, a lost payload and a restart each take a fresh one, so that a
late result can never pass for a newer one. Only failures use up the retry budget. Pure: nothing
here talks to the ledger; each method says what happened, and the queue state acts on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from typing import Any

from actors.outcomes import Disposition, OutcomePolicy
from actors.types import Outcome, RolloutAssignment, Task, TrajectorySummary


class RolloutState(Enum):
    """Where a rollout stands."""

    PENDING = "pending"
    HANDED_OUT = "handed_out"
    FINISHED = "finished"
    GONE = "gone"


class AttemptEnd(StrEnum):
    """What became of a rollout when an attempt of it ended."""

    FINISHED = "finished"
    RETRIED = "retried"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A task for a group number that the window admits.

    num_samples: rollouts, >= 1. min_usable_samples: close as soon as so many are usable; None:
    wait for all.
    """

    group_number: int
    task: Task
    num_samples: int
    min_usable_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """Where a payload lies: row `row` of the block behind `block`, a reference the state never
    looks into. num_bytes: of the row.
    """

    block: Any
    row: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSnapshot:
    """next_attempt: the number of the next attempt. num_failures: used of the retry budget."""

    rollout_id: str
    next_attempt: int
    num_failures: int
    is_gone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """A group with its task, so that a restarted run can play it again."""

    number: int
    replacement: int
    task: Task
    min_usable_samples: int | None
    rollouts: tuple[RolloutSnapshot, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "task": {**asdict(self.task), "data": dict(self.task.data)}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GroupSnapshot:
        rollouts = tuple(RolloutSnapshot(**rollout) for rollout in data["rollouts"])
        return cls(**{**data, "task": Task(**data["task"]), "rollouts": rollouts})


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One member of a group; `attempt` is the number of the attempt that is or was handed out."""

    rollout_id: str
    state: RolloutState = RolloutState.PENDING
    next_attempt: int = 0
    num_failures: int = 0
    attempt: int = -1
    actor_id: str = ""
    summary: TrajectorySummary | None = None
    payload: BlockRow | None = None

    def hand_out(self, actor_id: str) -> int:
        """Start the next attempt. Returns: its number."""
        assert self.state is RolloutState.PENDING, self
        self.state, self.actor_id = RolloutState.HANDED_OUT, actor_id
        self.attempt, self.next_attempt = self.next_attempt, self.next_attempt + 1
        return self.attempt

    def is_with(self, actor_id: str, *, attempt: int) -> bool:
        """Whether this attempt is the one that this actor plays now."""
        is_current = self.attempt == attempt and self.actor_id == actor_id
        return self.state is RolloutState.HANDED_OUT and is_current

    def finish(self, summary: TrajectorySummary, payload: BlockRow) -> None:
        self.state, self.actor_id = RolloutState.FINISHED, ""
        self.summary, self.payload = summary, payload

    def fail(self, outcome: Outcome, policy: OutcomePolicy) -> AttemptEnd:
        """End an attempt without a payload: retried while the budget lasts, then dropped."""
        is_retried = policy.is_retried(outcome, attempt=self.num_failures)
        self.num_failures += 1
        self.clear(RolloutState.PENDING if is_retried else RolloutState.GONE)
        return AttemptEnd.RETRIED if is_retried else AttemptEnd.DROPPED

    def clear(self, state: RolloutState) -> None:
        """Let go of the attempt and its payload."""
        self.state, self.actor_id, self.summary, self.payload = state, "", None, None


def group_id(number: int, *, replacement: int) -> str:
    """Such as g000012.0; its rollouts are g000012.0-0, g000012.0-1, …"""
    return f"g{number:06d}.{replacement}"


@dataclass(slots=True, kw_only=True)
class Group:
    """The rollouts of one task. replacement: how often its number was filled before."""

    number: int
    replacement: int
    task: Task
    policy: OutcomePolicy
    min_usable_samples: int | None = None
    rollouts: dict[str, Rollout] = field(default_factory=dict)

    @property
    def group_id(self) -> str:
        return group_id(self.number, replacement=self.replacement)

    @property
    def is_closed(self) -> bool:
        """Whether no rollout of it is pending or handed out."""
        open_states = (RolloutState.PENDING, RolloutState.HANDED_OUT)
        return all(rollout.state not in open_states for rollout in self.rollouts.values())

    @property
    def has_enough(self) -> bool:
        """Whether min_usable_samples is reached, so that the rest need not be waited for."""
        return self.min_usable_samples is not None and self.num_usable >= self.min_usable_samples

    @property
    def num_usable(self) -> int:
        """Finished rollouts whose return may stand in the baseline."""
        return sum(self.is_usable(rollout) for rollout in self.rollouts.values())

    def finished(self) -> list[Rollout]:
        return [r for r in self.rollouts.values() if r.state is RolloutState.FINISHED]

    def unfinished(self) -> list[Rollout]:
        open_states = (RolloutState.PENDING, RolloutState.HANDED_OUT)
        return [r for r in self.rollouts.values() if r.state in open_states]

    def end_attempt(
        self, rollout: Rollout, summary: TrajectorySummary, payload: BlockRow
    ) -> AttemptEnd:
        """Take in how an attempt ended, by the environment's policy."""
        outcome = summary.outcome
        is_kept = self.policy.disposition(outcome) is not Disposition.DROP
        if self.policy.is_retried(outcome, attempt=rollout.num_failures) or not is_kept:
            return rollout.fail(outcome, self.policy)
        rollout.finish(summary, payload)
        return AttemptEnd.FINISHED

    def assignment(self, rollout: Rollout) -> RolloutAssignment:
        return RolloutAssignment(
            rollout_id=rollout.rollout_id,
            group_id=self.group_id,
            group_number=self.number,
            attempt=rollout.attempt,
            task=self.task,
        )

    def snapshot(self) -> GroupSnapshot:
        rollouts = tuple(
            RolloutSnapshot(
                rollout_id=rollout.rollout_id,
                next_attempt=rollout.next_attempt,
                num_failures=rollout.num_failures,
                is_gone=rollout.state is RolloutState.GONE,
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
        """Whether a rollout has finished with a return that may stand in the baseline."""
        return self._baseline_return(rollout) is not None

    def baseline_returns(self) -> list[float]:
        """What the finished rollouts bring to the baseline, behind the outcomes' rules."""
        found = map(self._baseline_return, self.rollouts.values())
        return [value for value in found if value is not None]

    def _baseline_return(self, rollout: Rollout) -> float | None:
        summary = rollout.summary
        if summary is None:
            return None
        rule = self.policy.rule(summary.outcome)
        return rule.baseline_return(summary.episode_return, is_graded=summary.is_graded)


def check_size(request: GroupRequest, *, min_group_size: int) -> None:
    """Raises: ValueError when a group would close too small to be trained."""
    least = min(request.num_samples, request.min_usable_samples or request.num_samples)
    if least < min_group_size:
        raise ValueError(
            f"queue: group {request.group_number} closes with {least} usable samples, "
            f"expected at least min_group_size={min_group_size}"
        )


def new_group(request: GroupRequest, *, replacement: int, policy: OutcomePolicy) -> Group:
    """A group with all its rollouts pending. Rollout ids follow from the group's: g000012.0-3.

    Raises: ValueError when it asks for no rollout, or to close at a number it can never reach.
    """
    enough = request.min_usable_samples
    if request.num_samples < 1 or (enough is not None and not 1 <= enough <= request.num_samples):
        raise ValueError(
            f"group {request.group_number}: got num_samples={request.num_samples}, "
            f"min_usable_samples={enough}, expected 1 <= min_usable_samples <= num_samples"
        )
    group = Group(
        number=request.group_number,
        replacement=replacement,
        task=request.task,
        policy=policy,
        min_usable_samples=enough,
    )
    for member in range(request.num_samples):
        rollout_id = f"{group.group_id}-{member}"
        group.rollouts[rollout_id] = Rollout(rollout_id=rollout_id)
    return group


def restore_group(snapshot: GroupSnapshot, *, policy: OutcomePolicy) -> Group:
    """A group of a run that starts again: what had not left the ledger is pending again."""
    group = Group(
        number=snapshot.number,
        replacement=snapshot.replacement,
        task=snapshot.task,
        policy=policy,
        min_usable_samples=snapshot.min_usable_samples,
    )
    for each in snapshot.rollouts:
        group.rollouts[each.rollout_id] = Rollout(
            rollout_id=each.rollout_id,
            state=RolloutState.GONE if each.is_gone else RolloutState.PENDING,
            next_attempt=each.next_attempt,
            num_failures=each.num_failures,
        )
    return group
