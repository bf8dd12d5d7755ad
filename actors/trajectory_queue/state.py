"""The queue's state and rules, as a state machine without I/O. Called only by the queue actor.

Invariants: after every call, admitted rollouts = trained + evicted + in flight. At most one actor
plays a rollout at a time. The queue accepts only the result of the rollout's current attempt; late
results are refused and counted. The bounds of `QueueSettings` never hold back a rollout of the step
that is being collected, because that could cause a deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from actors.trajectory_queue.groups import (
    LOST_ROW,
    BlockRow,
    FailureCounter,
    Group,
    GroupRequest,
    ReadyRollouts,
    Refills,
    Rollout,
    WaitingRollouts,
    check_request,
    new_group,
    restore_group,
)
from actors.trajectory_queue.ledger import (
    EvictionReason,
    Ledger,
    RolloutOutcomes,
    TokenCounts,
    check_outcomes,
    untrained_tokens,
)
from actors.trajectory_queue.messages import (
    ActorReleased,
    OpenSlot,
    QueueCut,
    QueueSnapshot,
    QueueStats,
)
from actors.trajectory_queue.settings import QueueStateSettings
from actors.trajectory_queue.window import AdmissionWindow
from actors.types import Outcome, RolloutAssignment, TrajectorySummary

# Outcomes that a hold can cause: no turn is sampled during a hold, so a deadline may pass.
HELD_UP = frozenset({Outcome.WALL_TIMEOUT, Outcome.INFRASTRUCTURE_ERROR})


class QueueState:
    """The complete state of the queue; payloads are opaque references."""

    def __init__(
        self,
        settings: QueueStateSettings,
        *,
        snapshot: QueueSnapshot | None = None,
        keeps_taken: bool = False,
    ) -> None:
        """Start from a snapshot. Rollouts that the training loop has not taken are played again.

        keeps_taken: whether the training loop still has the steps that it took but did not
        finalise. If False, the rollouts of these steps are played again too.
        """
        self.settings = settings
        snapshot = snapshot or QueueSnapshot()
        self._window = AdmissionWindow(
            settings.algorithm, num_steps=settings.num_steps, snapshot=snapshot.window
        )
        self._ledger = Ledger(snapshot=snapshot.ledger)
        self._replacements = dict(snapshot.replacements)
        self._refills = Refills(
            limit=settings.algorithm.max_variance_refills, counts=snapshot.variance_refills
        )
        self._groups: dict[int, Group] = {}
        """The admitted groups that are neither evicted nor finalised, by group number."""
        self._group_numbers: dict[str, int] = {}
        """The group number of each rollout, by rollout id."""
        self._closed: set[int] = set()
        """Numbers of the groups without a pending or handed-out rollout."""
        self._ready = ReadyRollouts()
        self._handed_out: dict[str, None] = {}
        """Rollout ids, in the order of handing out."""
        self._waiting = WaitingRollouts()
        self._unscored: dict[int, str] = {}
        """The actor that scores each group that must be scored as a whole, by the group's number;
        empty if no actor has taken the group."""
        self._withheld: dict[str, TrajectorySummary] = {}
        """The summaries that are drained only after their group is scored, by rollout id."""
        self._summaries: list[TrajectorySummary] = []
        self._num_refused = self._num_retries = self._num_replaced_groups = 0
        self._failures = FailureCounter()
        self._released: set[str] = set()
        """Ids of dead actors."""
        self._is_ended = self._is_held = False
        self._held_up: set[str] = set()
        """Ids of rollouts that were handed out when a hold began and have not ended since."""
        self._unwanted: dict[str, str] = {}
        """The actors that still play attempts of evicted rollouts, by trajectory id."""
        self.num_changes = 0
        """A counter that grows with each change that a waiting call may depend on."""
        if not keeps_taken:
            self._window.roll_back_all()
        for each in snapshot.groups:
            is_taken = self._window.is_taken(each.number)
            policy = self.settings.policy(each.task.environment)
            group = restore_group(each, policy=policy, is_taken=is_taken)
            self._add(group)
            if not is_taken and not self._is_durable(group):
                num_sampled = sum(rollout.num_sampled for rollout in each.rollouts)
                tokens = TokenCounts(untrained={EvictionReason.CANCELLED: num_sampled})
                self._ledger.drop_tokens(tokens.known())

    def admissible(self) -> list[OpenSlot]:
        """Return the free group numbers, ascending. An eviction makes a group's number free."""
        if self._is_ended:
            return []
        numbers = range(self._window.oldest, self._window.admissible_end)
        return [
            OpenSlot(group_number=number, replacement=self._replacements.get(number, 0))
            for number in numbers
            if number not in self._groups and not self._window.is_taken(number)
        ]

    def admit(self, requests: Sequence[GroupRequest]) -> None:
        """Give a task to each requested group number, or to none of them if one is refused.

        Raises: ValueError if a number is not free or a group could never be trained.
        """
        free = {slot.group_number for slot in self.admissible()}
        for request in requests:
            check_request(request, free=free, min_group_size=self.settings.algorithm.min_group_size)
            free.remove(request.group_number)
        groups = [
            new_group(
                request,
                replacement=self._replacements.get(request.group_number, 0),
                policy=self.settings.policy(request.task.environment),
            )
            for request in requests
        ]
        for group in groups:
            self._add(group)
            for rollout_id in group.rollouts:
                self._ledger.admit(rollout_id)

    def take_rollouts(
        self, actor_id: str, *, max_count: int, environments: Collection[str]
    ) -> list[RolloutAssignment]:
        """Hand out up to max_count rollouts: retries first, then the oldest group first.

        The bounds of `QueueSettings` apply to the rollouts of all actors together.
        Args: environments: names of the environments whose tasks the actor can play.
        Raises: ActorReleased if the actor was released, so that a late call of a dead actor takes
        no rollouts.
        """
        self._check_released(actor_id)
        if self._is_held:
            return []
        assignments: list[RolloutAssignment] = []
        for rollout in islice(self._candidates(environments), max_count):
            rollout.hand_out(actor_id)
            self._handed_out[rollout.rollout_id] = None
            assignments.append(self._group_of(rollout).assignment(rollout))
        return assignments

    def put(self, actor_id: str, summary: TrajectorySummary, payload: BlockRow) -> bool:
        """Accept an ended attempt; return False if the actor does not play this attempt now."""
        rollout = self._find(summary.rollout_id)
        if rollout is None or not rollout.is_with(actor_id, attempt=summary.attempt):
            self._num_refused += 1
            if self._unwanted.pop(summary.trajectory_id, None) is not None:
                self._ledger.drop_tokens(untrained_tokens(summary, EvictionReason.CANCELLED))
            return False
        group = self._group_of(rollout)
        del self._handed_out[rollout.rollout_id]
        was_held_up = rollout.rollout_id in self._held_up
        self._held_up.discard(rollout.rollout_id)
        if was_held_up and summary.outcome in HELD_UP and not self._is_durable(group):
            self._drop_tokens(summary)
            rollout.clear("pending")
            self._after_attempt(rollout, summary.outcome)
            return True
        self._end_attempt(group, rollout, summary, payload)
        self._close_if_done(group)
        return True

    def take_group(self, actor_id: str, *, environments: Collection[str]) -> Group | None:
        """Hand out the oldest group that must be scored as a whole; None if there is none.

        Raises: ActorReleased if the actor was released.
        """
        self._check_released(actor_id)
        for number in sorted(number for number, actor in self._unscored.items() if not actor):
            if (group := self._groups[number]).task.environment in environments:
                self._unscored[number] = actor_id
                return group
        return None

    def put_group(
        self, actor_id: str, group_id: str, scored: Sequence[tuple[TrajectorySummary, BlockRow]]
    ) -> bool:
        """Accept the usable members of a group, with the rewards that the group's scoring gave.

        Returns: whether the members were accepted. The result is refused if this actor does not
            score the group now, or if `scored` does not have exactly the group's usable attempts.
        """
        group = self._scored_by(actor_id, group_id)
        wanted = {(r.rollout_id, r.attempt) for r in group.usable()} if group else set()
        if group is None or wanted != {(each.rollout_id, each.attempt) for each, _ in scored}:
            self._num_refused += 1
            return False
        group.is_scored = True
        del self._unscored[group.number]
        for summary, payload in scored:
            rollout = group.rollouts[summary.rollout_id]
            self._waiting.drop(rollout.rollout_id)
            self._end_attempt(group, rollout, summary, payload)
        for rollout in group.rollouts.values():
            self._release(rollout)
        self._close_if_done(group)
        return True

    def lose_group(self, actor_id: str, group_id: str) -> bool:
        """Repeat a group whose payloads were lost, as `replay_lost` does.

        Returns: whether this actor was scoring the group; if not, nothing changes.
        """
        group = self._scored_by(actor_id, group_id)
        if group is not None:
            self.replay_lost(list(group.rollouts))
        return group is not None

    def _scored_by(self, actor_id: str, group_id: str) -> Group | None:
        held = (self._groups[number] for number, by in self._unscored.items() if by == actor_id)
        return next((group for group in held if group.group_id == group_id), None)

    def _end_attempt(
        self, group: Group, rollout: Rollout, summary: TrajectorySummary, payload: BlockRow
    ) -> None:
        group.end_attempt(rollout, summary, payload)
        waits = self._scores_groups(group) and not group.is_scored
        if waits and rollout.state == "finished":
            self._withheld[rollout.rollout_id] = summary
        else:
            self._withheld.pop(rollout.rollout_id, None)
            self._summaries.append(summary)
        if rollout.state != "finished":
            self._drop_tokens(summary)
        self._after_attempt(rollout, summary.outcome)
        if not group.is_usable(rollout):
            self._failures.add_attempt(summary.outcome, detail=summary.detail, task=group.task)

    def _drop_tokens(self, summary: TrajectorySummary) -> None:
        cause = EvictionReason.of(summary.outcome)
        self._ledger.drop_tokens(untrained_tokens(summary, cause))

    def _release(self, rollout: Rollout) -> None:
        """Let `drain` return a rollout's summary if it was withheld until the group is scored."""
        if (summary := self._withheld.pop(rollout.rollout_id, None)) is not None:
            self._summaries.append(summary)

    def release_actor(self, actor_id: str) -> int:
        """End a dead actor's attempts as infrastructure errors; give the actor no more rollouts.

        Rollouts of a durable environment (`QueueStateSettings.durable`) do not fail: they are
        pending again, as if they had never been handed out.
        Returns: the number of rollouts that the actor held.
        """
        self._released.add(actor_id)
        return self._take_back(actor_id, detail="its environment actor died")

    def give_back(self, actor_id: str) -> int:
        """End the attempts that a live actor has dropped. The actor may take rollouts again.

        The attempts end as in `release_actor`. Returns: the number of rollouts the actor held.
        """
        return self._take_back(actor_id, detail="its environment actor lost its queue")

    def take_step(self) -> tuple[int, list[Group]] | None:
        """Take and return (step, closed groups) of the next step; None if it is incomplete."""
        if self._is_ended:
            return None
        taken = self._window.take(self._closed.__contains__)
        if taken is None:
            return None
        self.num_changes += 1
        groups = [self._groups[number] for number in taken[1]]
        for rollout in _finished(groups):
            self._waiting.drop(rollout.rollout_id)
        return taken[0], groups

    def finalise(self, step: int, outcomes: RolloutOutcomes) -> TokenCounts:
        """Record whether each rollout of a step was trained or evicted, and forget the step.

        Steps are finalised in order.
        Returns: counts of the sampled tokens of attempts that no step took. The counts begin again
            at zero after each finalised step.
        Raises: ValueError if outcomes does not have exactly the rollouts of the step, if the step
        is not taken, or after cancel_all; nothing is changed then.
        """
        if self._is_ended:
            raise ValueError(
                f"queue: step {step} cannot be finalised after cancel_all, which ended the run"
            )
        groups = [self._groups[number] for number in self._window.taken_groups(step)]
        check_outcomes(step, {rollout.rollout_id for rollout in _finished(groups)}, outcomes)
        self._window.finalise(step)
        for rollout_id, reason in outcomes.items():
            if reason is None:
                self._ledger.train(rollout_id, step=step)
            else:
                self._ledger.evict(rollout_id, reason, step=step)
        for group in groups:
            self._forget(group)
            self._replacements.pop(group.number, None)
            self._refills.forget(group.number)
        return self._ledger.take_dropped_tokens()

    def replay_lost(self, rollout_ids: Iterable[str]) -> tuple[int, ...]:
        """Repeat the rollouts whose payloads were lost.

        Each counts as an infrastructure error, except in a durable environment. The first step with
        such a rollout and all later steps are rolled back, and must be taken again. Rollouts
        without a payload in the queue are ignored.
        Returns: the steps that were rolled back, ascending.
        """
        rollouts = [r for r in map(self._find, rollout_ids) if r and r.payload is not None]
        steps = [self._window.step_of(self._group_of(rollout).number) for rollout in rollouts]
        first = min((step for step in steps if step is not None), default=None)
        rolled_back = () if first is None else self._roll_back(first)
        # The payloads of a step that an earlier queue took are all lost.
        lost = {r.rollout_id: r for r in rollouts}
        for group in {id(g): g for g in map(self._group_of, rollouts) if g.is_scored}.values():
            # The returns of these rollouts include rewards of a whole group that no longer exists.
            lost |= {r.rollout_id: r for r in group.finished()}
        for rollout in map(self._find, self._waiting.ids()):
            if rollout is not None and rollout.payload is LOST_ROW:
                lost[rollout.rollout_id] = rollout
        for rollout_id in lost:
            self._waiting.drop(rollout_id)
        self._fail(lost.values(), detail="its payload was lost")
        return rolled_back

    def hold(self, is_held: bool) -> None:
        """Begin a hold if is_held, otherwise end it. During a hold no rollouts are handed out.

        The engines sample no turns during a hold, so rollouts that are handed out may time out or
        have an infrastructure error. These rollouts are played again without counting a failure.
        In durable environments (`QueueStateSettings.durable`) a failure counts, because a new
        attempt would get the same result from the client.
        """
        self._is_held = is_held
        if is_held:
            self._held_up.update(self._handed_out)
        self.num_changes += 1

    def set_loaded_version(self, version: int) -> None:
        """Record that every ready engine holds `version`. Raises: ValueError if it decreases."""
        self._window.set_loaded_version(version)
        self.num_changes += 1

    def cancel_group(self, group_id: str) -> bool:
        """Evict a group as cancelled; return False if it is gone or a step has taken it."""
        group = next((g for g in self._groups.values() if g.group_id == group_id), None)
        if group is None or self._window.is_taken(group.number):
            return False
        self._evict_group(group, EvictionReason.CANCELLED)
        return True

    def cancel_all(self) -> int:
        """End the run: evict all rollouts in flight as cancelled and hand out no more.

        Returns: the number of cancelled rollouts.
        """
        before = self._ledger.counts().in_flight
        for group in list(self._groups.values()):
            self._evict_group(group, EvictionReason.CANCELLED)
        self._is_ended = True
        return before

    def drain(self) -> QueueCut:
        summaries, self._summaries = self._summaries, []
        return QueueCut(
            events=tuple(self._ledger.drain()),
            summaries=tuple(summaries),
            failed_groups=self._failures.current(),
        )

    def holds_back(self, environments: Collection[str]) -> bool:
        """Return whether a rollout of these environments waits only because the queue is full."""
        if not self._is_full():
            return False
        found = map(self._find, self._ready.ids(environments))
        is_any_pending = any(r is not None and r.state == "pending" for r in found)
        return is_any_pending and next(self._candidates(environments), None) is None

    def stats(self, *, now: float = 0.0) -> QueueStats:
        """Return the statistics. now: the current time by the clock of `BlockRow.arrived_at`."""
        return QueueStats(
            num_handed_out=len(self._handed_out),
            num_waiting=len(self._waiting),
            waiting_bytes=self._waiting.num_bytes,
            num_replaced_groups=self._num_replaced_groups,
            num_refused=self._num_refused,
            num_retries=self._num_retries,
            loaded_version=self._window.loaded_version,
            ledger=self._ledger.counts(),
            oldest_s=self._waiting.oldest_s(now),
        )

    def snapshot(self) -> QueueSnapshot:
        """Return the state from which a new queue can start, without the trajectories.

        The new queue repeats each rollout that no step has taken. If the rollout had finished, its
        tokens count as dropped, except in a durable environment.
        """
        return QueueSnapshot(
            window=self._window.snapshot(),
            ledger=self._ledger.snapshot(waiting=self._tokens_waiting()),
            groups=tuple(
                self._groups[number].snapshot(is_taken=self._window.is_taken(number))
                for number in sorted(self._groups)
            ),
            replacements=dict(self._replacements),
            variance_refills=self._refills.counts(),
        )

    def _tokens_waiting(self) -> TokenCounts:
        tokens = TokenCounts()
        for rollout in map(self._find, self._waiting.ids()):
            if rollout is not None and not self._is_durable(group := self._group_of(rollout)):
                tokens = tokens.plus(group.tokens_without_step(rollout, EvictionReason.CANCELLED))
        return tokens

    def _is_durable(self, group: Group) -> bool:
        return group.task.environment in self.settings.durable

    def _scores_groups(self, group: Group) -> bool:
        return group.task.environment in self.settings.scores_groups

    def _check_released(self, actor_id: str) -> None:
        if actor_id in self._released:
            raise ActorReleased(
                f"queue: actor {actor_id} was released; a replacement needs a new id"
            )

    def _find(self, rollout_id: str) -> Rollout | None:
        number = self._group_numbers.get(rollout_id)
        return None if number is None else self._groups[number].rollouts[rollout_id]

    def _group_of(self, rollout: Rollout) -> Group:
        return self._groups[self._group_numbers[rollout.rollout_id]]

    def _is_full(self) -> bool:
        num_items, settings = len(self._handed_out) + len(self._waiting), self.settings
        return num_items >= settings.max_items or self._waiting.num_bytes >= settings.max_bytes

    def _candidates(self, environments: Collection[str]) -> Iterator[Rollout]:
        """Yield pending rollouts of these environments in the order of handing out."""
        while not self._is_full():
            rollout_id = self._ready.pop(environments)
            if rollout_id is None:
                return
            rollout = self._find(rollout_id)
            if rollout is not None and rollout.state == "pending":
                yield rollout
        # A bound is reached: hand out only rollouts that complete the step that is being collected.
        for number in self._window.collecting():
            group = self._groups.get(number)
            if group is None or group.task.environment not in environments:
                continue
            for rollout in group.unfinished():
                if rollout.state == "pending":
                    yield rollout

    def _add(self, group: Group) -> None:
        self._groups[group.number] = group
        for rollout in group.rollouts.values():
            if rollout.state != "gone":
                self._group_numbers[rollout.rollout_id] = group.number
            if rollout.state == "pending":
                self._make_ready(rollout)

    def _make_ready(self, rollout: Rollout) -> None:
        group = self._group_of(rollout)
        self._closed.discard(group.number)
        self._unscored.pop(group.number, None)
        group.is_scored = False
        self.num_changes += 1
        self._ready.add(rollout, group)

    def _roll_back(self, first: int) -> tuple[int, ...]:
        """Put back into the queue what step `first` and all later steps took.

        Returns: the numbers of these steps, ascending.
        """
        held = {number: self._window.step_of(number) for number in self._groups}
        numbers = [number for number, step in held.items() if step is not None and step >= first]
        for rollout in _finished(self._groups[number] for number in numbers):
            self._waiting.add(rollout)
        return self._window.roll_back(first)

    def _take_back(self, actor_id: str, *, detail: str) -> int:
        self.num_changes += 1
        self._unwanted = {each: by for each, by in self._unwanted.items() if by != actor_id}
        for number, scored_by in self._unscored.items():
            if scored_by == actor_id:
                self._unscored[number] = ""
        held = [r for r in map(self._find, list(self._handed_out)) if r and r.actor_id == actor_id]
        for rollout in held:
            del self._handed_out[rollout.rollout_id]
            self._held_up.discard(rollout.rollout_id)
        self._fail(held, detail=detail)
        return len(held)

    def _fail(self, rollouts: Iterable[Rollout], *, detail: str) -> None:
        """Fail attempts whose results are lost; in durable environments, only repeat them."""
        for rollout in rollouts:
            # Ending a previous rollout may have closed the group and evicted this rollout.
            if self._find(rollout.rollout_id) is None or rollout.state == "gone":
                continue
            group = self._group_of(rollout)
            if self._is_durable(group):
                rollout.clear("pending")
                self._make_ready(rollout)
            else:
                outcome = Outcome.INFRASTRUCTURE_ERROR
                if rollout.state == "finished":
                    lost = group.tokens_without_step(rollout, EvictionReason.of(outcome))
                    self._ledger.drop_tokens(lost)
                rollout.fail(outcome, group.policy)
                self._after_attempt(rollout, outcome)
                self._failures.add_attempt(outcome, detail=detail, task=group.task)
            self._close_if_done(group)

    def _after_attempt(self, rollout: Rollout, outcome: Outcome) -> None:
        match rollout.state:
            case "finished":
                self._waiting.add(rollout)
            case "pending":
                self._num_retries += 1
                self._make_ready(rollout)
            case "gone":
                self._evict(rollout, EvictionReason.of(outcome))

    def _close_if_done(self, group: Group) -> None:
        if self._groups.get(group.number) is not group:
            return
        if group.has_enough:
            for rollout in group.unfinished():
                self._evict(rollout, EvictionReason.CANCELLED)
        if not group.is_closed:
            return
        self.num_changes += 1
        is_usable = group.num_usable >= self.settings.algorithm.min_group_size
        if is_usable and self._scores_groups(group) and not group.is_scored:
            self._unscored.setdefault(group.number, "")
            return
        self._closed.add(group.number)
        self._failures.add_group(is_usable=is_usable)
        if is_usable and not self._refills.claim(group.number, group.baseline_returns()):
            return
        self._num_replaced_groups += 1
        reason = EvictionReason.ZERO_VARIANCE if is_usable else EvictionReason.GROUP_TOO_SMALL
        self._evict_group(group, reason)

    def _evict_group(self, group: Group, reason: EvictionReason) -> None:
        """Evict a group's remaining rollouts. The group's number is then free for another task."""
        for rollout in group.rollouts.values():
            if rollout.state != "gone":
                self._evict(rollout, reason)
        self._forget(group)
        self._replacements[group.number] = group.replacement + 1

    def _evict(self, rollout: Rollout, reason: EvictionReason) -> None:
        self._release(rollout)
        if rollout.state == "handed_out":
            self._unwanted[rollout.trajectory_id] = rollout.actor_id
        elif rollout.state == "finished":
            self._ledger.drop_tokens(self._group_of(rollout).tokens_without_step(rollout, reason))
        self._handed_out.pop(rollout.rollout_id, None)
        self._held_up.discard(rollout.rollout_id)
        self._waiting.drop(rollout.rollout_id)
        rollout.clear("gone")
        self.num_changes += 1
        self._ledger.evict(rollout.rollout_id, reason)

    def _forget(self, group: Group) -> None:
        del self._groups[group.number]
        self._unscored.pop(group.number, None)
        self._closed.discard(group.number)
        for rollout_id in group.rollouts:
            self._group_numbers.pop(rollout_id, None)


def _finished(groups: Iterable[Group]) -> Iterator[Rollout]:
    return (rollout for group in groups for rollout in group.finished())
