"""The conservation ledger: every admitted rollout is counted until it is either trained or evicted.

Invariant, at any time: admitted = trained + evicted (by reason) + in flight. A rollout is in flight
from its admission until it is trained or evicted; retries do not count as rollouts. Each change is
a numbered event; the caller drains and stores the events. After a crash, events that were not
stored are drained again with the same numbers. Only the ids of rollouts in flight are kept, so that
the ledger does not grow with the run. The ledger also counts the sampled tokens that no training
step used, for the record of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from actors.types import LeftOutReason, Outcome, Trajectory, TrajectorySummary


class EvictionReason(StrEnum):
    """The reason why a rollout was evicted instead of trained.

    The reason concerns the rollout's group, step or outcome.
    """

    MASKED = "masked"
    ZERO_VARIANCE = "zero_variance"
    NEGATIVE_RETURN = "negative_return"
    GROUP_TOO_SMALL = "group_too_small"
    NONFINITE_STEP = "nonfinite_step"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_CONTEXT = "truncated_context"
    MAX_TURNS = "max_turns"
    MALFORMED_TOOL_CALL = "malformed_tool_call"
    WALL_TIMEOUT = "wall_timeout"
    STALE = "stale"
    CANCELLED = "cancelled"
    AGENT_ERROR = "agent_error"
    ENVIRONMENT_ERROR = "environment_error"
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    REWARD_ERROR = "reward_error"
    EMPTY = "empty"
    TOKEN_MISALIGNED = "token_misaligned"

    @classmethod
    def of(cls, outcome: Outcome) -> EvictionReason:
        """Return the eviction reason of a trajectory that is dropped because of its outcome.

        Raises: ValueError for `completed`, because a completed trajectory is never dropped.
        """
        if outcome is Outcome.COMPLETED:
            raise ValueError(
                "ledger: got a completed trajectory, which cannot be dropped; train it"
            )
        return cls(outcome.value)


def token_cause(reason: EvictionReason, outcome: Outcome) -> EvictionReason:
    """Return the cause under which the tokens of an untrained trajectory are counted.

    reason: why the trajectory's rollout was evicted. If the trajectory was masked because of its
    outcome, the outcome is the cause.
    Example: (STALE, WALL_TIMEOUT) -> STALE; (MASKED, WALL_TIMEOUT) -> WALL_TIMEOUT
    """
    is_masked = reason is EvictionReason.MASKED and outcome is not Outcome.COMPLETED
    return EvictionReason.of(outcome) if is_masked else reason


TokenCause = EvictionReason | LeftOutReason
"""The cause for which a sampled token is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Counts of sampled tokens; each token is trained, or untrained for exactly one cause.

    Several causes may apply to a token: the cause of its turn, its trajectory, its group or its
    step. Only the first cause in this order counts.
    """

    trained: int = 0
    untrained: Mapping[TokenCause, int] = field(default_factory=dict)
    """Number of untrained tokens by cause; only causes that occurred."""

    @property
    def sampled(self) -> int:
        return self.trained + sum(self.untrained.values())

    @property
    def trained_share(self) -> float | None:
        """The trained share of the sampled tokens; None if no token was sampled."""
        return self.trained / self.sampled if self.sampled else None

    def known(self) -> TokenCounts:
        """Return the counts, without the causes that have a count of 0."""
        occurred = {cause: count for cause, count in self.untrained.items() if count}
        return TokenCounts(trained=self.trained, untrained=occurred)

    def causes(self) -> list[tuple[TokenCause, float]]:
        """Return each cause with its share of the sampled tokens, the largest first."""
        ordered = sorted(self.untrained.items(), key=lambda item: -item[1])
        return [(cause, count / self.sampled) for cause, count in ordered if count]

    def plus(self, other: TokenCounts) -> TokenCounts:
        sums = dict(self.untrained)
        for cause, count in other.untrained.items():
            sums[cause] = sums.get(cause, 0) + count
        return TokenCounts(trained=self.trained + other.trained, untrained=sums)

    def without_training(self, cause: EvictionReason) -> TokenCounts:
        """Return the counts of a step that applied no update.

        The tokens that were counted as trained count as untrained, under `cause`.
        """
        if not self.trained:
            return self
        return TokenCounts(untrained=self.untrained).plus(
            TokenCounts(untrained={cause: self.trained})
        )


def untrained_tokens(attempt: Trajectory | TrajectorySummary, cause: EvictionReason) -> TokenCounts:
    """Count the sampled tokens of an attempt that is not trained.

    All tokens count under `cause`, except those of turns that a session left out of training: they
    count under the reason for which their turn was left out.
    """
    untrained: dict[TokenCause, int] = {cause: attempt.num_sampled}
    untrained.update(attempt.left_out_tokens.items())
    return TokenCounts(untrained=untrained).known()


class LedgerEventKind(StrEnum):
    """The change of a rollout's state that a ledger event records."""

    ADMITTED = "admitted"
    TRAINED = "trained"
    EVICTED = "evicted"


class LedgerError(ValueError):
    """Raised if a rollout is admitted twice, or leaves the ledger without being in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent:
    """A change of a rollout's state in the ledger."""

    seq: int
    """The event's number: 0, 1, 2, ... without gaps."""

    rollout_id: str
    kind: LedgerEventKind

    reason: EvictionReason | None = None
    """The reason of an eviction; None for other kinds."""

    step: int | None = None
    """The step that took the rollout, counted from 1; None if no step did."""


RolloutOutcomes = Mapping[str, EvictionReason | None]
"""The result of each rollout of a taken step, by the rollout's id: the reason of its eviction, or
None if it was trained. (`Outcome` is the end of a trajectory.)"""


def check_outcomes(step: int, expected: set[str], outcomes: RolloutOutcomes) -> None:
    """Raise ValueError unless `outcomes` has exactly the rollouts of the step, `expected`."""
    if wrong := expected ^ outcomes.keys():
        raise ValueError(
            f"queue: step {step} has {len(expected)} rollouts, got {len(outcomes)} outcomes; "
            f"expected one outcome for each rollout; wrong or missing: {sorted(wrong)[:8]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Numbers of rollouts by state; `evicted` has only the reasons that occurred."""

    admitted: int = 0
    trained: int = 0
    evicted: Mapping[EvictionReason, int] = field(default_factory=dict)
    in_flight: int = 0

    @property
    def num_evicted(self) -> int:
        return sum(self.evicted.values())

    @property
    def is_balanced(self) -> bool:
        return self.admitted == self.trained + self.num_evicted + self.in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """The state of the ledger, including undrained events."""

    admitted: int = 0
    trained: int = 0
    evicted: Mapping[EvictionReason, int] = field(default_factory=dict)
    in_flight: tuple[str, ...] = ()
    next_seq: int = 0
    undrained: tuple[LedgerEvent, ...] = ()
    dropped_tokens: TokenCounts = field(default_factory=TokenCounts)
    """Counts of the sampled tokens of attempts that no step took, since the last finalised step."""


class Ledger:
    """The state machine of the ledger. A rollout is absent, then in flight, then trained or
    evicted; there are no other transitions.
    """

    def __init__(self, *, snapshot: LedgerSnapshot | None = None) -> None:
        snapshot = snapshot or LedgerSnapshot()
        self._admitted = snapshot.admitted
        self._trained = snapshot.trained
        self._evicted = dict(snapshot.evicted)
        self._in_flight = dict.fromkeys(snapshot.in_flight)
        self._next_seq = snapshot.next_seq
        self._events = list(snapshot.undrained)
        self._dropped_tokens = snapshot.dropped_tokens

    def admit(self, rollout_id: str) -> None:
        """Admit a rollout. Raises: LedgerError if it is in flight already."""
        if rollout_id in self._in_flight:
            raise LedgerError(
                f"ledger: cannot admit rollout {rollout_id}, which is already in flight; admit "
                "each rollout once"
            )
        self._in_flight[rollout_id] = None
        self._admitted += 1
        self._record(rollout_id, LedgerEventKind.ADMITTED)

    def train(self, rollout_id: str, *, step: int) -> None:
        """Record a rollout as trained. Raises: LedgerError if it is not in flight."""
        self._leave(rollout_id, LedgerEventKind.TRAINED)
        self._trained += 1
        self._record(rollout_id, LedgerEventKind.TRAINED, step=step)

    def evict(self, rollout_id: str, reason: EvictionReason, *, step: int | None = None) -> None:
        """Record a rollout as evicted. Raises: LedgerError if it is not in flight."""
        self._leave(rollout_id, LedgerEventKind.EVICTED)
        self._evicted[reason] = self._evicted.get(reason, 0) + 1
        self._record(rollout_id, LedgerEventKind.EVICTED, reason=reason, step=step)

    def drop_tokens(self, tokens: TokenCounts) -> None:
        """Count the sampled tokens of an attempt that no step takes."""
        self._dropped_tokens = self._dropped_tokens.plus(tokens)

    def take_dropped_tokens(self) -> TokenCounts:
        """Return the tokens that were dropped since the last call, for the record of a step."""
        taken, self._dropped_tokens = self._dropped_tokens, TokenCounts()
        return taken

    def drain(self) -> list[LedgerEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            admitted=self._admitted,
            trained=self._trained,
            evicted=dict(self._evicted),
            in_flight=len(self._in_flight),
        )

    def snapshot(self, *, waiting: TokenCounts) -> LedgerSnapshot:
        """Return the ledger's state.

        waiting: the tokens of finished attempts that wait for a step. In the snapshot they count as
        dropped, because a queue that starts from it repeats these attempts.
        """
        return LedgerSnapshot(
            admitted=self._admitted,
            trained=self._trained,
            evicted=dict(self._evicted),
            in_flight=tuple(self._in_flight),
            next_seq=self._next_seq,
            undrained=tuple(self._events),
            dropped_tokens=self._dropped_tokens.plus(waiting),
        )

    def _leave(self, rollout_id: str, kind: LedgerEventKind) -> None:
        if rollout_id not in self._in_flight:
            raise LedgerError(
                f"ledger: rollout {rollout_id} cannot be {kind}, because it is not in flight: it "
                "was never admitted or has left already"
            )
        del self._in_flight[rollout_id]

    def _record(
        self,
        rollout_id: str,
        kind: LedgerEventKind,
        *,
        reason: EvictionReason | None = None,
        step: int | None = None,
    ) -> None:
        event = LedgerEvent(
            seq=self._next_seq, rollout_id=rollout_id, kind=kind, reason=reason, step=step
        )
        self._next_seq += 1
        self._events.append(event)
