"""The weight board's state machine: what is published, who holds it, who is asked to do what.

    board.publish(Publication(term=1, version=7, groups=groups))    # by the trainer
    board.heartbeat("a", None, version=None, num_workers=1, lease_s=5.0, now=0.0)
    board.next_for("a", now=0.0)                # -> that publication; the replica loads it
    board.report("a", 1, version=7, check_logprobs=scores, now=2.0)
    board.laggards()                            # -> (), so every live replica samples from it

Pure: times come in as arguments, nothing waits; `actor.WeightBoard` adds the waiting. Invariants: a
publication's (term, version) never goes back, and nothing older than the newest known term is
accepted; a replica is live while its lease lasts, and only live replicas are waited for; a command
goes, in order, to the members that it was addressed to and to no other replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from actors.batch import Float32s, Int32s

# How long after the promised end of its poll a replica still counts as live. More than one poll,
# because a replica counts its lease from the last poll that was answered.
POLL_GRACE_S = 10.0
NUM_CHECK_TOKENS = 17


class WeightError(Exception):
    """Base of this package's errors; the message is the only argument, so that Ray can carry it."""


class StaleTerm(WeightError):
    """An older run (lease) tried to publish or to command; it has been replaced and must stop."""


class StaleVersion(WeightError):
    """A version older than the current one of the same term."""


class NotPublished(WeightError):
    """A version was waited for that is not the current publication."""


class ReplicasLagging(WeightError):
    """Not every live replica held the version in time."""


class RendezvousNeeded(WeightError):
    """The replicas are not those that met at the last init; the trainer must initialise again."""


class WeightCommandFailed(WeightError):
    """Replicas failed a command of the transfer handshake, or did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Where each tensor lies in a flat weight buffer; the four tuples run in parallel."""

    names: tuple[str, ...]
    """Hugging Face parameter names."""
    dtypes: tuple[str, ...]
    """torch names without the prefix, such as "bfloat16"."""
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """Bytes from the buffer's start."""
    num_bytes: int
    """Length of the buffer, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Named tensors, packed into one buffer."""

    manifest: WeightManifest
    checksum: str
    """Of the buffer's bytes."""
    buffer: Any
    """[num_bytes] uint8; in a publication an object reference to it, which is opaque here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One published policy version."""

    term: int
    version: int
    groups: tuple[WeightGroup, ...] = ()
    """Empty when the weights travelled by commands."""


class CommandKind(StrEnum):
    """The four calls of vLLM's weight-transfer handshake."""

    INIT = "init"
    START = "start"
    UPDATE = "update"
    FINISH = "finish"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One step of the handshake for one replica."""

    sequence: int
    term: int
    kind: CommandKind
    payload: Any = None
    """vLLM's own plain dict (or list of dicts) for INIT and UPDATE."""
    version: int | None = None
    """What the engines hold once FINISH is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A live replica as the board knows it."""

    replica_id: str
    num_workers: int
    """Processes of its engine that take part in a transfer group."""
    term: int | None = None
    version: int | None = None
    check_logprobs: Float32s | None = None
    """Its scores of `check_tokens` after its last load; None before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardStatus:
    """The current publication, and the live replicas."""

    term: int | None
    """Of the current publication; None before the first."""
    version: int | None
    """Of the current publication; None before the first."""
    replicas: tuple[ReplicaReport, ...]
    needs_rendezvous: bool

    @property
    def num_workers(self) -> int:
        """Engine workers of all live replicas: the world size of a transfer group is this + 1."""
        return sum(replica.num_workers for replica in self.replicas)


def check_tokens(vocab_size: int) -> Int32s:
    """The text that trainer and engines score after each publish, [17] int32.

    Fixed, and spread over the first tokens of any vocabulary. The scores are log-probabilities of
    the plain softmax (temperature 1), in nats.
    """
    return (7 * np.arange(NUM_CHECK_TOKENS, dtype=np.int32) + 3) % vocab_size


def largest_difference(own: Float32s, engines: Sequence[Float32s]) -> float | None:
    """Largest |trainer - engine| over the scores of `check_tokens`, nats.

    Args: own, engines: [16] float32 each, one for each token but the first.
    Returns: None where no engine has answered.
    Raises: ValueError when an engine scored another number of tokens.
    """
    for logprobs in engines:
        if logprobs.shape != own.shape:
            raise ValueError(
                f"log-probability check: got {logprobs.shape[0]} log-probabilities of an engine, "
                f"expected {own.shape[0]}; trainer and engine run different versions of Rayloom"
            )
    return max((float(np.abs(own - logprobs).max()) for logprobs in engines), default=None)


class Board:
    """Publications, replicas and commands. Times: seconds of one monotonic clock."""

    def __init__(self, *, apply_limit_s: float = 120.0) -> None:
        """apply_limit_s: how long a replica may be silent while it applies what it was given."""
        self._apply_limit_s = apply_limit_s
        self._newest_term: int | None = None
        self._current: Publication | None = None
        self._replicas: dict[str, ReplicaReport] = {}
        self._lease_ends: dict[str, float] = {}
        self._members: frozenset[str] = frozenset()
        self._uses_commands = False
        self._sequence = 0
        self._queues: dict[str, list[Command]] = {}
        self._pending: dict[int, set[str]] = {}
        self._failures: dict[int, dict[str, str]] = {}

    # Publications

    def check_term(self, term: int) -> None:
        """Take note of a term. Raises: StaleTerm when a newer one was seen."""
        if self._newest_term is not None and term < self._newest_term:
            raise StaleTerm(
                f"board: got term {term}, expected at least {self._newest_term}; this run was "
                "replaced by a newer one and must stop"
            )
        self._newest_term = term

    def publish(self, publication: Publication) -> None:
        """Make it the current one.

        Raises: StaleTerm; StaleVersion when the same term already published a later version.
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
                f"{current.version}; going back takes a new term"
            )
        self._current = publication

    @property
    def current(self) -> Publication | None:
        return self._current

    # Replicas

    def heartbeat(
        self,
        replica_id: str,
        term: int | None,
        *,
        version: int | None,
        num_workers: int,
        lease_s: float,
        now: float,
    ) -> None:
        """A replica polls; a new one joins. It is live for lease_s and POLL_GRACE_S."""
        known = self._replicas.get(replica_id) or ReplicaReport(
            replica_id=replica_id, num_workers=num_workers
        )
        self._replicas[replica_id] = replace(known, term=term, version=version)
        self._lease_ends[replica_id] = now + lease_s + POLL_GRACE_S

    def next_for(self, replica_id: str, *, now: float) -> Publication | Command | None:
        """What a replica has to do now: its oldest command, else a publication it lacks."""
        if (replica := self._replicas.get(replica_id)) is None:
            return None
        work: Publication | Command | None = None
        if queue := self._queues.get(replica_id):
            work = queue[0]
        elif self._current is not None and self._current.groups and not self._holds(replica):
            work = self._current
        if work is not None:
            self._lease_ends[replica_id] = now + self._apply_limit_s
        return work

    def report(
        self,
        replica_id: str,
        term: int,
        *,
        version: int,
        check_logprobs: Float32s | None,
        now: float,
    ) -> None:
        """A replica holds (term, version). Ignored for one that was forgotten."""
        if (replica := self._replicas.get(replica_id)) is None:
            return
        self._replicas[replica_id] = replace(
            replica, term=term, version=version, check_logprobs=check_logprobs
        )
        self._lease_ends[replica_id] = now + POLL_GRACE_S

    def leave(self, replica_id: str) -> None:
        """A replica is gone: it is no longer waited for, and its open commands have failed."""
        self._replicas.pop(replica_id, None)
        self._lease_ends.pop(replica_id, None)
        self._queues.pop(replica_id, None)
        for sequence, waiting in self._pending.items():
            if replica_id in waiting:
                waiting.discard(replica_id)
                self._failures[sequence][replica_id] = "the replica left or fell silent"

    def forget_silent(self, *, now: float) -> tuple[str, ...]:
        """Drop the replicas whose lease has run out; return their names."""
        silent = tuple(name for name, lease_end in self._lease_ends.items() if lease_end < now)
        for replica_id in silent:
            self.leave(replica_id)
        return silent

    def laggards(self) -> tuple[str, ...]:
        """Live replicas that do not hold the current publication."""
        return tuple(r.replica_id for r in self._replicas.values() if not self._holds(r))

    def status(self) -> BoardStatus:
        return BoardStatus(
            term=None if self._current is None else self._current.term,
            version=None if self._current is None else self._current.version,
            replicas=tuple(self._replicas.values()),
            needs_rendezvous=self.needs_rendezvous,
        )

    def _holds(self, replica: ReplicaReport) -> bool:
        current = self._current
        return current is not None and (replica.term, replica.version) == (
            current.term,
            current.version,
        )

    # Commands

    @property
    def needs_rendezvous(self) -> bool:
        """Whether the replicas are not those that met at the last INIT."""
        return self._uses_commands and frozenset(self._replicas) != self._members

    def submit(
        self, term: int, kind: CommandKind, *, payload: Any = None, version: int | None = None
    ) -> int:
        """Queue a command for every member; return its sequence number.

        INIT makes the replicas that are live now the members and drops what was queued before; a
        payload with a `rank_offset` (NCCL) is shifted for each member by the workers before it.
        Raises: StaleTerm; RendezvousNeeded when the members are not the live replicas;
            ValueError when INIT names a world size that the members do not add up to.
        """
        self.check_term(term)
        if kind is CommandKind.INIT:
            payloads = self._init_payloads(payload)
            self._members = frozenset(payloads)
            self._uses_commands = True
            self._queues.clear()
        elif self.needs_rendezvous or not self._members:
            raise RendezvousNeeded(
                f"board: replicas joined {sorted(set(self._replicas) - self._members)} and left "
                f"{sorted(self._members - set(self._replicas))} since the transfer was "
                "initialised; initialise it again"
            )
        else:
            payloads = dict.fromkeys(self._members, payload)
        self._sequence += 1
        command = Command(sequence=self._sequence, term=term, kind=kind, version=version)
        for replica_id, part in payloads.items():
            self._queues.setdefault(replica_id, []).append(replace(command, payload=part))
        self._pending[command.sequence] = set(payloads)
        self._failures[command.sequence] = {}
        return command.sequence

    def acknowledge(self, replica_id: str, sequence: int, *, error: str | None) -> None:
        """A replica has executed a command, or failed to."""
        if queue := self._queues.get(replica_id):
            self._queues[replica_id] = [c for c in queue if c.sequence > sequence]
        if replica_id in self._pending.get(sequence, ()):
            self._pending[sequence].discard(replica_id)
            if error is not None:
                self._failures[sequence][replica_id] = error

    def waiting_for(self, sequence: int) -> tuple[str, ...]:
        return tuple(sorted(self._pending.get(sequence, ())))

    def close_command(self, sequence: int) -> Mapping[str, str]:
        """Stop following a command; return the error of each member that failed it."""
        self._pending.pop(sequence, None)
        return self._failures.pop(sequence, {})

    def _init_payloads(self, payload: Any) -> dict[str, Any]:
        members = sorted(self._replicas)
        if not isinstance(payload, Mapping) or "rank_offset" not in payload:
            return dict.fromkeys(members, payload)
        payloads: dict[str, Any] = {}
        offset = int(payload["rank_offset"])
        for replica_id in members:
            payloads[replica_id] = {**payload, "rank_offset": offset}
            offset += self._replicas[replica_id].num_workers
        if offset != payload["world_size"]:
            raise ValueError(
                f"board: got a transfer group of {payload['world_size']} ranks, expected {offset} "
                f"({len(members)} live replicas); read the board's status and initialise again"
            )
        return payloads
