"""A client's submission, and the replies to it, as plain values without HTTP or Ray.

A submission is one task with the requested number of rollouts; the client chooses its id. The
submission waits in the backlog until the trajectory queue can admit its rollouts as a group. Only
the store keeps the task itself, and only as long as the task's rollouts may be played again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from hashlib import sha256

import msgspec
from pydantic import ConfigDict

from actors.trajectory_queue.ledger import LedgerEvent
from actors.types import Outcome, Task, TrajectorySummary
from service.access.keys import NO_LIMITS, KeyLimits, tenant_of
from service.intake.session import SessionRequest

# Most tasks of several requests in one transaction; a larger request has its own.
MAX_TASKS_PER_COMMIT = 2048
_TASK_FIELDS = tuple(each.name for each in fields(Task))
_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False)


class Status(StrEnum):
    """The state of a rollout, or of a submission as a whole."""

    QUEUED = "queued"
    """The rollout or submission is accepted, but its group is not admitted yet."""
    RUNNING = "running"
    """The rollout or submission is admitted, and is played now or will be played again."""
    FINISHED = "finished"
    """The rollout or submission has been played, and waits for its training step."""
    TRAINED = "trained"
    """The rollout or submission was trained; the step's checkpoint may not be committed yet."""
    EVICTED = "evicted"
    """The rollout or submission ended untrained; a committed checkpoint may not record this yet."""
    CANCELLED = "cancelled"
    """The rollout or submission was cancelled at the client's request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One task of a client's request, before the task is accepted and gets a position."""

    task: Task
    num_samples: int
    """Number of rollouts of the task."""
    min_usable_samples: int | None = None
    """Number of usable rollouts that are enough to train; None if the group waits for all."""
    digest: str
    """Digest of the request; it is equal for a repeated request and differs for a changed
    request.
    """
    num_bytes: int
    """Approximate number of stored bytes."""
    key_name: str = ""
    """Name of the key with which the request was sent.

    It is empty if this is the first admin key, or if there is no key.
    """
    batch: str = ""
    """The client's name for a batch of tasks; empty if the client gave no name."""
    sessions: SessionRequest | None = None
    """The sessions of a task for external agents, one for each rollout; None for other tasks."""

    @classmethod
    def of(
        cls,
        task: Task,
        *,
        asked_samples: int | None,
        default_samples: int,
        min_usable_samples: int | None = None,
        key_name: str = "",
        batch: str = "",
        sessions: SessionRequest | None = None,
    ) -> RolloutRequest:
        """Make a request for a task, with a digest by which a repeated request is recognized.

        The digest is made of what the client sent. It does not depend on the run's defaults, which
        may change when the run is resumed. It includes only the keys of the first session, because
        the keys of all sessions are derived from one key of the client.
        asked_samples: the number of samples that the client requests; None uses `default_samples`.
        Raises: ValueError if there is not one session for each sample.
        """
        num_samples = asked_samples or default_samples
        sent_task = {name: getattr(task, name) for name in _TASK_FIELDS}
        sent: tuple[object, ...] = (sent_task, asked_samples, min_usable_samples)
        if sessions is not None:
            if len(sessions.keys) != num_samples:
                raise ValueError(
                    f"submission {task.task_id}: got keys of {len(sessions.keys)} sessions, "
                    f"expected {num_samples}, one for each sample"
                )
            sent += (dict(sessions.asked), asdict(sessions.keys[0]))
        if batch:
            sent += ({"batch": batch},)
        content = _ENCODER.encode(sent).encode()
        return cls(
            task=task,
            num_samples=num_samples,
            min_usable_samples=min_usable_samples,
            digest=sha256(content).hexdigest(),
            num_bytes=len(content),
            key_name=key_name,
            batch=batch,
            sessions=sessions,
        )

    @property
    def id(self) -> str:
        return self.task.task_id


class PackedRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A `RolloutRequest` as the API sends it to the supervisor and the store.

    `text` is the whole request in encoded form, which only the store decodes. The other fields are
    those that the supervisor's queue reads.

    It is a Struct, because there are many requests, and a Struct is made and sent several times
    faster than a dataclass.
    """

    id: str
    environment: str
    digest: str
    num_samples: int
    num_bytes: int
    key_name: str
    batch: str
    text: str
    """The whole `RolloutRequest`, in the form in which it is stored."""
    sessions: SessionRequest | None

    @property
    def tenant(self) -> str:
        """The tenant that owns the task; empty if the run itself owns it."""
        return tenant_of(self.id)


class Offer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The tasks that one HTTP request submits; all are accepted, or none."""

    tasks: tuple[PackedRequest, ...]
    key: str = ""
    """The digest of the request's Idempotency-Key and its tenant; empty without such a key."""
    limits: KeyLimits = NO_LIMITS
    """Limits of the request's API key."""

    @property
    def digest(self) -> str:
        """The digest of the requested tasks, in their order."""
        return sha256("\n".join(item.digest for item in self.tasks).encode()).hexdigest()


def num_sessions(requests: Sequence[PackedRequest]) -> int:
    """Return the number of sessions that the requested tasks open together."""
    return sum(item.num_samples for item in requests if item.sessions is not None)


def independent_batches(offers: Sequence[Offer]) -> Iterator[list[Offer]]:
    """Divide offers, in order, into batches that can each be stored in one transaction.

    Two offers of a batch have no task id and no Idempotency-Key in common. A batch has at most
    MAX_TASKS_PER_COMMIT tasks, unless it is a single larger offer.
    """
    batch: list[Offer] = []
    names: set[str] = set()
    for offer in offers:
        own = {item.id for item in offer.tasks}
        if offer.key:
            # No id contains a blank.
            own.add(f"key {offer.key}")
        is_apart = names.isdisjoint(own)
        if batch and not (is_apart and len(names) + len(own) <= MAX_TASKS_PER_COMMIT):
            yield batch
            batch, names = [], set()
        names |= own
        batch.append(offer)
    if batch:
        yield batch


class Submission(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An accepted task with its position, without the task's data."""

    id: str
    position: int
    """Position in the order of acceptance (1, 2, 3, …), which no other submission ever gets."""
    digest: str
    num_samples: int
    num_bytes: int
    accepted_at: float
    """Seconds since 1970."""
    environment: str
    key_name: str = ""
    """Name of the key of the request; see `RolloutRequest`."""
    batch: str = ""
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """The result of an ended attempt to play a rollout."""

    rollout_id: str
    attempt: int
    outcome: Outcome
    reward: float
    num_turns: int
    num_sampled_tokens: int
    policy_versions: tuple[int, int] | None
    """Oldest and newest version that sampled a token; None if no token was sampled."""
    detail: str = ""

    @classmethod
    def of(cls, summary: TrajectorySummary) -> RolloutResult:
        oldest, newest = summary.oldest_version, summary.newest_version
        return cls(
            rollout_id=summary.rollout_id,
            attempt=summary.attempt,
            outcome=summary.outcome,
            reward=summary.episode_return,
            num_turns=summary.num_turns,
            num_sampled_tokens=summary.num_sampled,
            policy_versions=None if oldest is None or newest is None else (oldest, newest),
            detail=summary.detail,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSubmissions:
    """The stored submissions that have not ended, with which a restarted run continues."""

    submissions: tuple[Submission, ...]
    """Submissions that are not over, in the order of acceptance."""
    bindings: Mapping[str, str]
    """Ids of submissions, by the id of the group that plays them.

    If two terms bound a group, the newer term's binding is used.
    """
    results: tuple[RolloutResult, ...]
    events: tuple[LedgerEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """The state of one rollout, as clients see it."""

    index: int
    status: Status
    result: RolloutResult | None = None
    """Result of the last ended attempt; None until an attempt has ended."""
    step: int | None = None
    """The training step that took the rollout; None if no step did."""
    reason: str | None = None
    """The reason why the rollout was evicted; None if it was not evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionView:
    """A submission as a client sees it."""

    id: str
    position: int
    status: Status
    num_ahead: int
    """Number of submissions that will be admitted before this one; 0 unless it is queued."""
    rollouts: tuple[RolloutView, ...]
    environment: str
    batch: str
    accepted_at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The number of accepted submissions that wait to be admitted, and its limit."""

    waiting: int
    capacity: int
    """Maximum number of submissions that wait at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceAnswer:
    """The position of an accepted task in the order of acceptance, and its status."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    id: str
    place: int
    """position in the order of acceptance: 1, 2, 3, …"""
    ahead: int
    """number of tasks that will be played before this one; 0 once it is admitted"""
    status: Status
    is_new: bool
    """whether the task is new; false if it was accepted before"""
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitReply:
    """The reply to a request that submits tasks (`Offer`): all tasks are accepted, or none."""

    backlog: Backlog
    places: tuple[PlaceAnswer, ...] = ()
    """The position of each task, in the order of the request; empty if the request is refused."""
    conflicts: tuple[str, ...] = ()
    """Ids that were accepted before with another content; the request is then refused."""
    is_key_taken: bool = False
    """Whether another request was accepted with the same idempotency key."""
    refusal: str = ""
    """The reason why nothing can be accepted now; empty if there is no such reason."""
    is_quota: bool = False
    """Whether the request exceeds a limit of the caller's key."""
    retry_after_s: int | None = None
    """Seconds after which to retry a refused request; None if waiting does not help."""
    is_too_large: bool = False
    """Whether only a smaller request could be accepted."""

    @property
    def new_ids(self) -> frozenset[str]:
        """The ids of the accepted tasks that had not been accepted before."""
        return frozenset(place.id for place in self.places if place.is_new)
