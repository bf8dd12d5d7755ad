"""Property test of the queue: the ledger balances, each rollout ends once, and no deadlocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from worlds.builders.queue_builders import (
    end,
    fill,
    make_settings,
    restart,
    take,
    take_all,
    through_json,
)

from actors.trajectory_queue.groups import Group, Rollout
from actors.trajectory_queue.ledger import EvictionReason, LedgerEventKind
from actors.trajectory_queue.messages import ActorReleased
from actors.trajectory_queue.state import QueueState
from actors.types import SESSION, Outcome, RolloutAssignment

BOTH = ("game", SESSION)
OUTCOMES = st.sampled_from(
    [Outcome.COMPLETED] * 6
    + [Outcome.TRUNCATED_TOKENS, Outcome.WALL_TIMEOUT, Outcome.AGENT_ERROR, Outcome.EMPTY]
)


def attempt_of(rollout: Rollout) -> str:
    return f"{rollout.rollout_id}.a{rollout.attempt}"


class QueueMachine(RuleBasedStateMachine):
    """A state machine of the events of a queue: results, deaths, steps, losses and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_exits: Counter[str] = Counter()
        self.version_when_taken: dict[str, int] = {}
        self.lost_attempts: set[str] = set()
        self.num_sampled = self.num_recorded = 0
        """The tokens of all returned attempts, and those that the records of steps count."""
        self.num_deaths = 0

    @initialize(
        step=st.integers(1, 3),
        lag=st.integers(0, 2),
        window=st.integers(1, 5),
        max_items=st.integers(1, 12),
        refills=st.integers(0, 2),
    )
    def begin(self, step: int, lag: int, window: int, max_items: int, refills: int) -> None:
        shape = make_settings(
            step=step,
            lag=lag,
            window=window,
            max_items=max_items,
            max_variance_refills=refills,
            durable=frozenset({SESSION}),
        )
        self.use_queue(QueueState(shape))

    @rule(
        num_samples=st.integers(2, 3),
        is_mortal=st.booleans(),
        max_count=st.integers(1, 9),
        environments=st.sampled_from([("game",), (SESSION,), BOTH]),
    )
    def take(
        self, num_samples: int, is_mortal: bool, max_count: int, environments: tuple[str, ...]
    ) -> None:
        fill(self.queue, num_samples=num_samples, environments=BOTH)
        actor = self.mortal if is_mortal else "immortal"
        taken = take(self.queue, max_count, actor=actor, environments=environments)
        assert {assignment.task.environment for assignment in taken} <= set(environments)
        self.hold(actor, taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), max_count=st.integers(1, 5))
    def bring_back(self, data: st.DataObject, max_count: int) -> None:
        for _ in range(min(max_count, len(self.held))):
            actor, assignment = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            reward = data.draw(st.sampled_from([0.0, 0.0, 1.0]))
            outcome = data.draw(OUTCOMES)
            # The turns of a session are delivered again if their payload is lost: the same tokens.
            is_session = assignment.task.environment == SESSION
            num_sampled = 0 if is_session else data.draw(st.integers(0, 9))
            assert end(
                self.queue,
                assignment,
                actor=actor,
                outcome=outcome,
                reward=reward,
                num_sampled=num_sampled,
            )
            self.num_sampled += num_sampled

    @rule()
    def take_step(self) -> None:
        if (step := self.queue.take_step()) is not None:
            self.taken.append(step)

    @precondition(lambda self: self.taken)
    @rule()
    def finalise_the_oldest_step(self) -> None:
        self.finalise(*self.taken.pop(0))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def lose_a_payload(self, data: st.DataObject) -> None:
        finished = {
            rollout.rollout_id: attempt_of(rollout)
            for _, groups in self.taken
            for group in groups
            for rollout in group.finished()
        }
        lost = data.draw(st.sampled_from(sorted(finished)))
        self.lost_attempts.add(finished[lost])
        rolled_back = self.queue.replay_lost([lost])
        assert rolled_back
        assert self.queue.replay_lost([lost]) == (), "a payload was lost twice"
        self.taken = [step for step in self.taken if step[0] not in rolled_back]

    @rule()
    def kill_an_actor(self) -> None:
        dead = self.mortal
        self.num_deaths += 1
        self.queue.release_actor(dead)
        with pytest.raises(ActorReleased, match=dead):
            take_all(self.queue, actor=dead)
        self.held = [(actor, assignment) for actor, assignment in self.held if actor != dead]

    @rule(actor=st.sampled_from(["immortal", "mortal"]))
    def an_actor_gives_back(self, actor: str) -> None:
        actor = actor if actor == "immortal" else self.mortal
        self.queue.give_back(actor)
        self.held = [held for held in self.held if held[0] != actor]

    @rule()
    def restart_the_queue(self) -> None:
        self.drain()
        self.use_queue(restart(self.queue))

    @rule()
    def replace_the_queue_and_keep_taken_steps(self) -> None:
        self.drain()
        taken, snapshot = self.taken, through_json(self.queue.snapshot())
        self.use_queue(QueueState(self.queue.settings, snapshot=snapshot, keeps_taken=True))
        assert self.queue.snapshot() == snapshot
        self.taken = taken

    @rule()
    def complete_the_next_step_whatever_the_bounds(self) -> None:
        while self.taken:
            self.finalise(*self.taken.pop(0))
        while (step := self.queue.take_step()) is None:
            fill(self.queue, environments=BOTH)
            for environment in BOTH:
                taken = take_all(self.queue, actor="willing", environments=(environment,))
                self.hold("willing", taken)
            assert self.held, "deadlock: there are no rollouts to play and no step to train"
            for actor, assignment in self.held:
                end(self.queue, assignment, actor=actor, num_sampled=0)
            self.held = []
        self.finalise(*step)

    @rule()
    def cancel_the_run_and_start_another(self) -> None:
        in_flight = self.queue.stats().ledger.in_flight
        assert self.queue.cancel_all() == in_flight
        counts = self.queue.stats().ledger
        assert counts.in_flight == 0
        self.drain()
        assert len(self.num_exits) == counts.admitted
        assert set(self.num_exits.values()) <= {1}
        self.restart_the_queue()

    @invariant()
    def the_ledger_balances(self) -> None:
        assert self.queue.stats().ledger.is_balanced

    @invariant()
    def every_sampled_token_is_counted_once(self) -> None:
        """Check that each token is in a step's record, a taken step, or counted as dropped."""
        snapshot = self.queue.snapshot()
        taken = sum(each.num_sampled for group in snapshot.groups for each in group.rollouts)
        dropped = snapshot.ledger.dropped_tokens
        assert self.num_recorded + taken + dropped.sampled == self.num_sampled
        assert not dropped.trained and all(dropped.untrained.values())

    @invariant()
    def no_place_is_refilled_more_often_than_the_limit(self) -> None:
        used = self.queue.snapshot().variance_refills.values()
        assert max(used, default=0) <= self.queue.settings.algorithm.max_variance_refills

    @invariant()
    def no_rollout_leaves_twice(self) -> None:
        self.drain()
        assert max(self.num_exits.values(), default=0) <= 1

    @property
    def mortal(self) -> str:
        return f"mortal {self.num_deaths}"

    def use_queue(self, queue: QueueState) -> None:
        self.queue = queue
        self.held: list[tuple[str, RolloutAssignment]] = []
        self.taken: list[tuple[int, Sequence[Group]]] = []

    def tokens_of(self, groups: Sequence[Group]) -> int:
        return sum(rollout.num_sampled for group in groups for rollout in group.finished())

    def hold(self, actor: str, assignments: Sequence[RolloutAssignment]) -> None:
        version = self.queue.stats().loaded_version
        for assignment in assignments:
            assert assignment.trajectory_id not in self.version_when_taken
            self.held.append((actor, assignment))
            self.version_when_taken[assignment.trajectory_id] = version

    def finalise(self, step: int, groups: Sequence[Group]) -> None:
        for rollout in (rollout for group in groups for rollout in group.finished()):
            attempt = attempt_of(rollout)
            assert attempt not in self.lost_attempts
            age = step - 1 - self.version_when_taken[attempt]
            assert age <= self.queue.settings.algorithm.max_policy_age
        self.num_recorded += self.tokens_of(groups)
        finished = [rollout.rollout_id for group in groups for rollout in group.finished()]
        self.num_recorded += self.queue.finalise(step, dict.fromkeys(finished)).sampled
        self.queue.set_loaded_version(step)

    def drain(self) -> None:
        for event in self.queue.drain().events:
            # Sessions are durable: no fault of an actor or payload may end one with this reason.
            is_session = int(event.rollout_id[1:7]) % 2 == 1
            assert not (is_session and event.reason is EvictionReason.INFRASTRUCTURE_ERROR)
            self.num_exits[event.rollout_id] += event.kind is not LedgerEventKind.ADMITTED


TestQueueStories = QueueMachine.TestCase
TestQueueStories.settings = settings(max_examples=40, stateful_step_count=60)


class ManyStories(QueueMachine):
    """The same stories, for a test with more examples."""


TestManyQueueStories = pytest.mark.proof(pytest.mark.slow(ManyStories.TestCase))
TestManyQueueStories.settings = settings(max_examples=200, stateful_step_count=60)
