"""The weight board's state machine: what is published, who holds it, who is asked to do what.

Pure: times come in as arguments, nothing waits. `actor.WeightBoard` wraps it.
Invariants: a publication's (epoch, version) never goes back, and once an epoch was seen nothing
older is accepted; a replica is live while its lease lasts, and only live replicas are waited for;
a command goes, in order, to the members it was addressed to and to nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from actors.batch import Float32s
from actors.weights.errors import RendezvousNeeded, StaleEpoch, StaleVersion
from actors.weights.manifest import WeightManifest

# How long a replica is believed after the poll that it promised to end; more than one poll, since
# a replica counts its lease from the last poll that was answered.
POLL_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedGroup:
    """A weight group on its way: its manifest, its checksum, and a reference to its buffer.

    buffer: an object reference to [num_bytes] uint8, opaque here, since this module knows no Ray.
    """

    manifest: WeightManifest
    checksum: str
    buffer: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One published policy version; `groups` is empty when the weights travelled another way."""

    epoch: int
    version: int
    groups: tuple[PublishedGroup, ...] = ()


class CommandKind(StrEnum):
    """The four calls of vLLM's weight-transfer handshake."""

    INIT = "init"
    START = "start"
    UPDATE = "update"
    FINISH = "finish"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One step of the handshake for one replica.

    payload: vLLM's own plain dict (or list of dicts) for INIT and UPDATE.
    version: what the engines hold once FINISH is done.
    """

    sequence: int
    epoch: int
    kind: CommandKind
    payload: Any = None
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica as the board sees it. load_s: seconds that its last load took.

    parity: how it scores `parity.parity_tokens` since then. silent_s: seconds since it was heard.
    """

    replica_id: str
    epoch: int | None
    version: int | None
    num_workers: int
    load_s: float
    parity: Float32s | None
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """Every live replica holds (epoch, version)."""

    epoch: int
    version: int
    replicas: tuple[ReplicaReport, ...]
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardStatus:
    """epoch, version: the current publication's; None before the first."""

    epoch: int | None
    version: int | None
    newest_epoch: int | None
    replicas: tuple[ReplicaReport, ...]
    needs_rendezvous: bool

    @property
    def num_workers(self) -> int:
        """Engine workers of all live replicas: the world size of a transfer group is this + 1."""
        return sum(replica.num_workers for replica in self.replicas)


@dataclass(slots=True, kw_only=True)
class _Replica:
    replica_id: str
    num_workers: int
    heard_at: float
    lease_until: float
    epoch: int | None = None
    version: int | None = None
    load_s: float = 0.0
    parity: Float32s | None = None


class Board:
    """Publications, replicas and commands. Times: seconds of one monotonic clock."""

    def __init__(self, *, apply_limit_s: float = 120.0) -> None:
        """apply_limit_s: how long a replica may be silent while it applies what it was given."""
        self._apply_limit_s = apply_limit_s
        self._newest_epoch: int | None = None
        self._current: Publication | None = None
        self._replicas: dict[str, _Replica] = {}
        self._members: frozenset[str] = frozenset()
        self._uses_commands = False
        self._sequence = 0
        self._queues: dict[str, list[Command]] = {}
        self._pending: dict[int, set[str]] = {}
        self._failures: dict[int, dict[str, str]] = {}

    # Publications

    def check_epoch(self, epoch: int) -> None:
        """Take note of an epoch. Raises: StaleEpoch when a newer one was seen."""
        if self._newest_epoch is not None and epoch < self._newest_epoch:
            raise StaleEpoch(got=epoch, newest=self._newest_epoch)
        self._newest_epoch = epoch

    def publish(self, publication: Publication) -> None:
        """Make it the current one.

        Raises: StaleEpoch; StaleVersion when the same epoch already published a later version.
        """
        self.check_epoch(publication.epoch)
        current = self._current
        if (
            current is not None
            and current.epoch == publication.epoch
            and publication.version < current.version
        ):
            raise StaleVersion(got=publication.version, current=current.version)
        self._current = publication

    @property
    def current(self) -> Publication | None:
        return self._current

    # Replicas

    def heartbeat(
        self,
        replica_id: str,
        epoch: int | None,
        *,
        version: int | None,
        num_workers: int,
        lease_s: float,
        now: float,
    ) -> None:
        """A replica was heard; one not known joins. It is live for lease_s plus some grace."""
        lease_until = now + lease_s + POLL_GRACE_S
        replica = self._replicas.get(replica_id)
        if replica is None:
            replica = _Replica(
                replica_id=replica_id,
                num_workers=num_workers,
                heard_at=now,
                lease_until=lease_until,
            )
            self._replicas[replica_id] = replica
        replica.heard_at, replica.lease_until = now, lease_until
        replica.epoch, replica.version = epoch, version

    def next_for(self, replica_id: str, *, now: float) -> Publication | Command | None:
        """What a replica has to do now: its oldest command, else a publication it lacks."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return None
        work: Publication | Command | None = None
        if queue := self._queues.get(replica_id):
            work = queue[0]
        elif self._current is not None and self._current.groups and not self._holds(replica):
            work = self._current
        if work is not None:
            replica.lease_until = now + self._apply_limit_s
        return work

    def report(
        self,
        replica_id: str,
        epoch: int,
        *,
        version: int,
        load_s: float,
        parity: Float32s | None,
        now: float,
    ) -> None:
        """A replica holds (epoch, version). Of a replica that was forgotten: ignored."""
        if (replica := self._replicas.get(replica_id)) is None:
            return
        replica.epoch, replica.version = epoch, version
        replica.load_s, replica.parity = load_s, parity
        replica.heard_at, replica.lease_until = now, now + POLL_GRACE_S

    def leave(self, replica_id: str) -> None:
        """A replica is gone: nothing waits for it any more, and its open commands have failed."""
        self._replicas.pop(replica_id, None)
        self._queues.pop(replica_id, None)
        for sequence, waiting in self._pending.items():
            if replica_id in waiting:
                waiting.discard(replica_id)
                self._failures[sequence][replica_id] = "the replica left or fell silent"

    def forget_silent(self, *, now: float) -> tuple[str, ...]:
        """Drop the replicas whose lease has run out, and name them."""
        silent = tuple(r.replica_id for r in self._replicas.values() if r.lease_until < now)
        for replica_id in silent:
            self.leave(replica_id)
        return silent

    def laggards(self) -> tuple[str, ...]:
        """Live replicas that do not hold the current publication."""
        return tuple(r.replica_id for r in self._replicas.values() if not self._holds(r))

    def reports(self, *, now: float) -> tuple[ReplicaReport, ...]:
        return tuple(_report(replica, now=now) for replica in self._replicas.values())

    def status(self, *, now: float) -> BoardStatus:
        return BoardStatus(
            epoch=None if self._current is None else self._current.epoch,
            version=None if self._current is None else self._current.version,
            newest_epoch=self._newest_epoch,
            replicas=self.reports(now=now),
            needs_rendezvous=self.needs_rendezvous,
        )

    def _holds(self, replica: _Replica) -> bool:
        current = self._current
        return current is not None and (replica.epoch, replica.version) == (
            current.epoch,
            current.version,
        )

    # Commands

    @property
    def needs_rendezvous(self) -> bool:
        """Whether the replicas are not those that met at the last INIT."""
        return self._uses_commands and frozenset(self._replicas) != self._members

    def submit(
        self, epoch: int, kind: CommandKind, *, payload: Any = None, version: int | None = None
    ) -> int:
        """Queue a command for every member; return its sequence number.

        INIT makes the replicas that are live now the members and drops what was queued before; a
        payload with a `rank_offset` (NCCL) is shifted for each member by the workers before it.
        Raises: StaleEpoch; RendezvousNeeded when the members are not the live replicas;
            ValueError when INIT names a world size that the members do not add up to.
        """
        self.check_epoch(epoch)
        if kind is CommandKind.INIT:
            payloads = self._init_payloads(payload)
            self._members = frozenset(payloads)
            self._uses_commands = True
            self._queues.clear()
        elif self.needs_rendezvous or not self._members:
            joined = sorted(set(self._replicas) - self._members)
            left = sorted(self._members - set(self._replicas))
            raise RendezvousNeeded(joined=joined, left=left)
        else:
            payloads = dict.fromkeys(self._members, payload)
        self._sequence += 1
        command = Command(sequence=self._sequence, epoch=epoch, kind=kind, version=version)
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


def _report(replica: _Replica, *, now: float) -> ReplicaReport:
    return ReplicaReport(
        replica_id=replica.replica_id,
        epoch=replica.epoch,
        version=replica.version,
        num_workers=replica.num_workers,
        load_s=replica.load_s,
        parity=replica.parity,
        silent_s=now - replica.heard_at,
    )
