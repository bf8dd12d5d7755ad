"""Tests of the ledger of rollouts: it balances, counts nothing twice, and can be restored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from worlds.builders.queue_builders import through_json

from actors.trajectory_queue.ledger import (
    EvictionReason,
    Ledger,
    LedgerError,
    LedgerEventKind,
    TokenCounts,
)
from actors.types import Outcome


class LedgerMachine(RuleBasedStateMachine):
    """A state machine of allowed and refused transitions in any order, with restarts."""

    flying = Bundle("flying")
    gone = Bundle("gone")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.num_admitted = 0
        self.events: list[int] = []

    @rule(target=flying)
    def admit(self) -> str:
        self.num_admitted += 1
        self.ledger.admit(f"r{self.num_admitted}")
        return f"r{self.num_admitted}"

    @rule(target=gone, rollout=consumes(flying))
    def train(self, rollout: str) -> str:
        self.ledger.train(rollout, step=1)
        return rollout

    @rule(target=gone, rollout=consumes(flying), reason=st.sampled_from(EvictionReason))
    def evict(self, rollout: str, reason: EvictionReason) -> str:
        self.ledger.evict(rollout, reason)
        return rollout

    @rule(rollout=gone)
    def leave_twice(self, rollout: str) -> None:
        with pytest.raises(LedgerError, match=rollout):
            self.ledger.train(rollout, step=1)
        with pytest.raises(LedgerError, match=rollout):
            self.ledger.evict(rollout, EvictionReason.MASKED)

    @rule(rollout=flying)
    def admit_twice(self, rollout: str) -> None:
        with pytest.raises(LedgerError, match=rollout):
            self.ledger.admit(rollout)

    @rule()
    def drain(self) -> None:
        self.events += [event.seq for event in self.ledger.drain()]

    @rule()
    def restart(self) -> None:
        self.ledger = Ledger(snapshot=through_json(self.ledger.snapshot(waiting=TokenCounts())))

    @invariant()
    def balances(self) -> None:
        counts = self.ledger.counts()
        assert counts.is_balanced and counts.admitted == self.num_admitted

    @invariant()
    def numbers_events_without_gaps(self) -> None:
        assert self.events == list(range(len(self.events)))


TestLedger = LedgerMachine.TestCase


def test_a_rollout_that_was_never_admitted_cannot_leave() -> None:
    with pytest.raises(LedgerError, match="rollout r1 cannot be trained, because it is not in"):
        Ledger().train("r1", step=0)


def test_events_record_each_rollouts_end_with_reason_and_step() -> None:
    ledger = Ledger()
    ledger.admit("a")
    ledger.admit("b")
    ledger.train("a", step=4)
    ledger.evict("b", EvictionReason.STALE)
    kinds = [(e.rollout_id, e.kind, e.reason, e.step) for e in ledger.drain()]
    assert kinds == [
        ("a", LedgerEventKind.ADMITTED, None, None),
        ("b", LedgerEventKind.ADMITTED, None, None),
        ("a", LedgerEventKind.TRAINED, None, 4),
        ("b", LedgerEventKind.EVICTED, EvictionReason.STALE, None),
    ]
    assert ledger.drain() == []


@given(st.sampled_from(Outcome))
def test_every_outcome_except_completed_has_an_eviction_reason(outcome: Outcome) -> None:
    if outcome is Outcome.COMPLETED:
        with pytest.raises(ValueError, match="completed"):
            EvictionReason.of(outcome)
    else:
        assert EvictionReason.of(outcome).value == outcome.value
