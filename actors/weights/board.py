"""The weight board's state: the publication, the replicas that have it, and groups for broadcasts.

    board.publish(Publication(term=1, version=7, groups=groups), now=0.0)    # by the trainer
    board.heartbeat("a", None, version=None, num_workers=1, lease_s=5.0, now=0.0)
    board.next_for("a")                         # -> that publication; the replica loads it
    board.report("a", 1, version=7, scores=scores, now=2.0)
    board.laggards()                            # -> (), so every live replica samples from it

Times are arguments, and no method waits; `actor.WeightBoard` adds the waiting. Each start or
recovery of a run begins a new term. Invariants:

- The current publication's (term, version) never decreases. Calls of an old term are refused.
- A replica is live until its lease ends; each sign of life renews the lease. Callers wait only for
  live replicas.
- A replica holds a version after it has reported that it has loaded the version.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actors.batch import Int32s
from actors.weights.logprob_check import CheckText, EngineScores

# Time in seconds for which a replica counts as live after the promised end of its poll. It is
# longer than a poll, because a replica counts its lease from the last poll that was answered.
POLL_GRACE_S = 10.0
NUM_CHECK_TOKENS = 17
# Number of consecutive failed broadcasts after which an engine ends itself. By then, even if 64
# engines share a broadcast at first, the engine at fault is alone in its group (`largest_group`).
MAX_FAILED_BROADCASTS = 5
# Number of names of ended replicas that are kept; readers check for losses every half second.
MAX_RETIRED = 256


class WeightError(Exception):
    """Base class of this package's errors. The message is the only argument, for Ray's pickling."""


class StaleTerm(WeightError):
    """Raised if an older term of the run calls the board; that term was replaced and must stop."""


class StaleVersion(WeightError):
    """Raised if a term publishes a version that is older than its current version."""


class NotPublished(WeightError):
    """Raised if a caller waits for a version that is not the current publication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """The position of each tensor in a flat weight buffer; the four tuples have the same order."""

    names: tuple[str, ...]
    """Hugging Face parameter names."""
    dtypes: tuple[str, ...]
    """torch names without the prefix, such as "bfloat16"."""
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """Position of each tensor in bytes from the buffer's start."""
    num_bytes: int
    """Length of the buffer in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Named tensors, packed into one buffer."""

    manifest: WeightManifest
    checksum: str
    """CRC-32 of the buffer's bytes (`buffer_checksum`)."""
    buffer: Any
    """[num_bytes] uint8. In a publication it is an object reference, which is opaque here, or None
    if the trainer's rank 0 keeps the buffer and broadcasts it to the replicas that take a seat.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A published policy version."""

    term: int
    version: int
    groups: tuple[WeightGroup, ...]
    check: CheckText | None = None
    """The text that an engine scores after it has loaded the publication; None for
    `check_tokens`.
    """

    @property
    def is_broadcast(self) -> bool:
        """Whether the buffers are broadcast instead of read from the object store."""
        return any(group.buffer is None for group in self.groups)


StartStages = tuple[tuple[str, float], ...]
"""The stages of an engine's start, each with its name and seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A member's place in one broadcast of the current publication; the trainer has rank 0."""

    store: str
    """HOST:PORT of the store at which the members meet."""
    name: str
    """Prefix of this broadcast's keys in the store; no two broadcasts have the same prefix."""
    rank: int
    """Rank of the member's first worker."""
    size: int
    """Number of ranks in the group: the workers of all members, and the trainer's rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """The state of a live replica on the board."""

    replica_id: str
    num_workers: int
    """Number of the engine's processes that take part in a broadcast."""
    term: int | None = None
    version: int | None = None
    scores: EngineScores | None = None
    """The engine's scores of the publication's text after its last load; None before the first
    load, or if the engine did not answer in time."""
    loaded_at: float | None = None
    """Time by the board's clock at which the replica reported its version as loaded; None if it has
    reported no version to this board.
    """
    is_held: bool = False
    """Whether the replica holds its turns and samples nothing."""
    stages: StartStages = ()
    """The stages of the replica's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardStatus:
    """The current publication, and the live replicas."""

    term: int | None
    """Term of the current publication; None before the first."""
    version: int | None
    """Version of the current publication; None before the first."""
    replicas: tuple[ReplicaReport, ...]

    retired: frozenset[str] = frozenset()
    """Replicas that were asked to end, as when Serve scales down; only the newest MAX_RETIRED."""

    now: float = 0.0
    """Time of the status, by the board's clock."""

    quiet_s: float = 0.0
    """Seconds since the last progress. Progress means that all live replicas hold the current
    publication, or that a start or a load gets further than all earlier ones.
    """

    @property
    def scores(self) -> tuple[EngineScores, ...]:
        """The live replicas' log-probabilities of the check text, computed after the last load.

        Replicas that have not reported any are left out.
        """
        return tuple(r.scores for r in self.replicas if r.scores is not None)

    @property
    def holders(self) -> frozenset[str]:
        """The live replicas that hold the current publication."""
        if self.version is None:
            return frozenset()
        held = (self.term, self.version)
        return frozenset(r.replica_id for r in self.replicas if (r.term, r.version) == held)

    @property
    def is_loaded(self) -> bool:
        """Whether a replica is live, and every live replica holds the current publication."""
        return 0 < len(self.holders) == len(self.replicas)


def check_tokens(vocab_size: int) -> Int32s:
    """Return the default text by which an engine is compared with the trainer: ids, [17] int32.

    Engine and trainer both score this text if a publication's `check` is None. The scores are
    log-probabilities of the plain softmax (temperature 1), in nats. The token ids are fixed, and
    spread over the beginning of any vocabulary.
    """
    return (7 * np.arange(NUM_CHECK_TOKENS, dtype=np.int32) + 3) % vocab_size


def largest_group(num_waiting: int, num_failed: int) -> int:
    """Return the largest broadcast group that an engine with failed broadcasts may join.

    One faulty engine makes the broadcast fail for its whole group, so groups shrink until that
    engine is alone. The first failure does not shrink a group, because a member may have died, and
    dead members are not in the next group. Each further failure divides the size by four.
    num_waiting: engines that wait for a broadcast. num_failed: the engine's failures in a row.
    Example: 20 waiting engines, and 0, 1, 2, 3 failures -> 20, 20, 5, 2
    """
    return -(-num_waiting // 4 ** max(0, num_failed - 1))


class Board:
    """The publications, replicas and broadcast groups of a weight board.

    All times are seconds of one monotonic clock.
    """

    def __init__(self, *, now: float) -> None:
        self._newest_term: int | None = None
        self._current: Publication | None = None
        self._replicas: dict[str, ReplicaReport] = {}
        self._lease_ends: dict[str, float] = {}
        self._stages: dict[str, StartStages] = {}
        """Stages of the start of each replica that has not polled yet."""
        self._moved_at = now
        self._furthest_start = self._furthest_load = -1.0
        """The furthest progress of any replica's start, and of any load, since the last
        `_settle`.
        """
        self._retired: deque[str] = deque(maxlen=MAX_RETIRED)
        self._waiting: set[str] = set()
        """The replicas that wait for a seat."""
        self._num_failed: Counter[str] = Counter()
        """Number of seats that each replica has got since it last loaded a version."""
        self._num_groups = 0
        self._is_held = False

    # Publications

    def check_term(self, term: int) -> None:
        """Refuse a call of an older term; record the term if it is new.

        Raises: StaleTerm if a newer term is known.
        """
        if self._newest_term is not None and term < self._newest_term:
            raise StaleTerm(
                f"board: got term {term}, expected at least {self._newest_term}; this run was "
                "replaced by a newer one and must stop"
            )
        self._newest_term = term

    def publish(self, publication: Publication, *, now: float) -> None:
        """Make a publication the current one.

        Raises: StaleTerm if a newer term is known; StaleVersion if the same term has already
            published a later version.
        """
        self.check_term(publication.term)
        current = self._current
        if (
            current is not None
            and current.term == publication.term
            and publication.version < current.version
        ):
            raise StaleVersion(
                f"board: got policy version {publication.version}, expected at least "
                f"{current.version}; to go back, start a new term"
            )
        self._current = publication
        self._settle(now)

    @property
    def current(self) -> Publication | None:
        return self._current

    def is_current(self, term: int, version: int) -> bool:
        current = self._current
        return current is not None and (current.term, current.version) == (term, version)

    def is_past(self, term: int, version: int) -> bool:
        """Return whether the current publication is later than (term, version)."""
        current = self._current
        return current is not None and (current.term, current.version) > (term, version)

    # Replicas

    def starting(self, replica_id: str, *, work: float, now: float) -> None:
        """Record that a replica is still starting, and how much work its start has done.

        work: a number that grows while the start makes progress. Only a new maximum over all
        replicas counts as progress, so starts that crash again and again do not count for long.
        `_settle` resets the maximum.
        """
        if work > self._furthest_start:
            self._furthest_start, self._moved_at = work, now

    def started(self, replica_id: str, stages: StartStages) -> None:
        """Record that a replica has started; it is live only after its first poll."""
        self._stages[replica_id] = stages

    def heartbeat(
        self,
        replica_id: str,
        term: int | None,
        *,
        version: int | None,
        num_workers: int,
        is_held: bool = False,
        lease_s: float,
        now: float,
    ) -> None:
        """Record a replica's poll; the replica is then live for lease_s + POLL_GRACE_S."""
        known = self._replicas.get(replica_id) or ReplicaReport(
            replica_id=replica_id,
            num_workers=num_workers,
            stages=self._stages.pop(replica_id, ()),
        )
        self._replicas[replica_id] = replace(known, term=term, version=version, is_held=is_held)
        self._extend(replica_id, lease_s=lease_s, now=now)
        if replica_id in self.laggards():
            self._get_on(0, now=now)

    def beat(self, replica_id: str, *, num_loaded: int = 0, lease_s: float, now: float) -> None:
        """Record that a replica is alive, and that it has loaded num_loaded parts.

        Do nothing if the board does not know the replica.
        """
        if replica_id in self._replicas:
            self._extend(replica_id, lease_s=lease_s, now=now)
            self._get_on(num_loaded, now=now)

    def hold(self, is_held: bool) -> None:
        """Order all replicas, also later ones, to interrupt their turns (is_held) or to resume."""
        self._is_held = is_held

    def next_for(self, replica_id: str) -> Publication | bool | None:
        """Return the next work of a replica: a publication to load, an order, or None.

        - The current publication: the replica lacks the publication, and must load it.
        - The order True: the replica must pause its turns, so that it samples nothing.
        - The order False: the replica must resume its turns.
        - None: the replica has nothing to do, or the board does not know the replica.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return None
        if not self._holds(replica):
            return self._current
        return None if replica.is_held == self._is_held else self._is_held

    def report(
        self,
        replica_id: str,
        term: int,
        *,
        version: int,
        scores: EngineScores | None,
        now: float,
    ) -> None:
        """Record that a replica has loaded (term, version); ignore a forgotten replica."""
        if (replica := self._replicas.get(replica_id)) is None:
            return
        self._replicas[replica_id] = replace(
            replica, term=term, version=version, scores=scores, loaded_at=now
        )
        self._extend(replica_id, lease_s=0.0, now=now)
        self._num_failed.pop(replica_id, None)
        self._settle(now)

    def leave(self, replica_id: str, *, is_in_order: bool = False) -> None:
        """Remove a replica, so that nobody waits for it and later broadcasts leave it out.

        is_in_order: whether the replica was asked to end.
        """
        if is_in_order:
            self._retired.append(replica_id)
        self._replicas.pop(replica_id, None)
        self._lease_ends.pop(replica_id, None)
        self._waiting.discard(replica_id)
        self._num_failed.pop(replica_id, None)

    def forget_silent(self, *, now: float) -> tuple[str, ...]:
        """Remove the replicas whose lease has expired, and return their names."""
        silent = tuple(name for name, lease_end in self._lease_ends.items() if lease_end < now)
        for replica_id in silent:
            self.leave(replica_id)
        if self._replicas and not self.laggards():
            self._settle(now)
        return silent

    def laggards(self) -> tuple[str, ...]:
        """Return the live replicas that do not hold the current publication."""
        return tuple(r.replica_id for r in self._replicas.values() if not self._holds(r))

    def status(self, *, now: float) -> BoardStatus:
        return BoardStatus(
            term=None if self._current is None else self._current.term,
            version=None if self._current is None else self._current.version,
            replicas=tuple(self._replicas.values()),
            retired=frozenset(self._retired),
            now=now,
            quiet_s=now - self._moved_at,
        )

    def _holds(self, replica: ReplicaReport) -> bool:
        current = self._current
        return current is None or (replica.term, replica.version) == (
            current.term,
            current.version,
        )

    def _extend(self, replica_id: str, *, lease_s: float, now: float) -> None:
        self._lease_ends[replica_id] = now + lease_s + POLL_GRACE_S

    def _settle(self, now: float) -> None:
        """Reset the measure of progress (`BoardStatus.quiet_s`), as after a publication or a load.

        Afterwards a start counts as progress only if it gets further than all starts since the
        reset. Loads count in the same way. So a replica that always crashes soon shows no progress.
        """
        self._moved_at = now
        self._furthest_start = self._furthest_load = -1.0

    def _get_on(self, num_loaded: int, *, now: float) -> None:
        if num_loaded > self._furthest_load:
            self._furthest_load, self._moved_at = num_loaded, now

    # Broadcasts

    def ask_for_seat(self, replica_id: str) -> None:
        """Record that a replica waits for a broadcast of the current publication."""
        if replica_id in self._replicas:
            self._waiting.add(replica_id)

    def stop_asking(self, replica_id: str) -> None:
        self._waiting.discard(replica_id)

    def waiting(self) -> tuple[str, ...]:
        """Return the replicas that wait for a broadcast and lack the current publication."""
        return tuple(name for name in self.laggards() if name in self._waiting)

    def seat(self, members: Iterable[str], *, store: str) -> dict[str, Seat]:
        """Form a broadcast group of waiting members, and return the seat (place) of each member.

        Members that do not wait get no seat, so the result may be empty. After failed broadcasts
        the group is smaller (`largest_group`), until a faulty engine is alone. That engine ends
        itself after MAX_FAILED_BROADCASTS.
        """
        waiting = self.waiting()
        present = [name for name in members if name in waiting]
        names = sorted(present, key=self._num_failed.__getitem__)
        size = 0
        while size < len(names) and size < largest_group(len(names), self._num_failed[names[size]]):
            size += 1
        replicas = [self._replicas[name] for name in names[:size]]
        if not replicas or self._current is None:
            return {}
        self._num_failed.update(names[:size])
        self._num_groups += 1
        name = f"t{self._current.term}-v{self._current.version}-g{self._num_groups}"
        size = 1 + sum(replica.num_workers for replica in replicas)
        seats, rank = {}, 1
        for replica in replicas:
            seats[replica.replica_id] = Seat(store=store, name=name, rank=rank, size=size)
            self._waiting.discard(replica.replica_id)
            rank += replica.num_workers
        return seats
