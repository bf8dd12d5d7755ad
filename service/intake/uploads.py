"""Describe the trajectories that clients sample elsewhere and upload, and the trajectories' groups.

The client names a group for each trajectory. The trajectories wait in the store until the group is
complete. The group is then submitted for training (`service.intake.submission`), under its id. The
task has the environment `UPLOADED`, so the gateway delivers the trajectories as rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from pydantic import ConfigDict

from actors.environment.tasks import derived_seed
from actors.expert_records import MixtureShape
from actors.trajectory_queue.codec import decoder_of, to_bytes, with_shared, without_shared
from actors.types import UPLOADED, Sample, Task, Trajectory
from service.intake.submission import RolloutRequest

# Pydantic's settings for records that the API returns unchanged.
_ANSWER = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """The properties of a run's policy with which an uploaded trajectory must agree."""

    tokenizer_fingerprint: str
    """Fingerprint of the tokenizer, from `actors.environment.tokenizer.tokenizer_fingerprint`."""
    vocab_size: int | None
    """Size of the policy's vocabulary; None if unknown."""
    mixture: MixtureShape | None
    """Shape of the mixture of experts; if it is None, recorded experts cannot be replayed."""
    max_context_tokens: int
    """Maximum number of tokens of prompt and reply together."""
    temperature: float
    republished: tuple[int, ...] = ()
    """Versions that were published without a new step (`actors.policy_age`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An uploaded trajectory whose content has been checked."""

    id: str
    """The trajectory's id, which is unique in the run."""
    group: str
    digest: str
    """Digest of the trajectory, its group's id and its metadata.

    It is the same for JSON and for MessagePack.
    """
    content: bytes
    """The encoded trajectory, which does not name its group."""
    oldest_version: int
    newest_version: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Data for people, which the run does not use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """A client's rule that decides when a group is complete."""

    id: str
    num_members: int | None = None
    """Number of members with which the group is complete; None if the client states no number."""
    closes: bool = False
    """Whether to complete the group after this upload, with the members that it then has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadLimits:
    """The run's limits for an upload."""

    oldest_version: int
    """Oldest version that sampled tokens may have, so that they are not too old when admitted."""
    newest_version: int
    """The newest version that can have sampled tokens."""
    min_members: int
    max_members: int
    max_waiting_bytes: int
    """Limit for the total bytes of the trajectories whose group is not in the window."""


class UploadRefusal(StrEnum):
    """The reason why a trajectory of an upload is refused.

    The values are stable, because programs use them.
    """

    STALE_POLICY = "stale-policy"
    UNKNOWN_VERSION = "unknown-version"
    """No policy with this version has been published."""
    ID_CONFLICT = "id-conflict"
    GROUP_CLOSED = "group-closed"
    GROUP_FULL = "group-full"
    GROUP_CONFLICT = "group-conflict"
    """A task that is not an upload group has the group's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedTrajectory:
    __pydantic_config__ = _ANSWER

    id: str
    code: UploadRefusal
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadGroup:
    """The state of a group of uploaded trajectories. A complete group becomes a submission."""

    id: str
    num_uploaded: int
    num_members: int | None
    """Number of members with which the group is complete; if it is None, the client closes it."""
    is_closed: bool
    """Whether the group is complete, so that it can be submitted and accepts no more members."""

    def request(self, key_name: str = "") -> RolloutRequest:
        """Return the request that submits the group for training; the group must be closed.

        All requests of a group have the same digest, so that a repeated request is recognized.
        key_name: name of the API key of the client that closed the group.
        """
        assert self.is_closed and self.num_members is not None, self
        task = Task(task_id=self.id, environment=UPLOADED, seed=derived_seed("submitted", self.id))
        return RolloutRequest.of(
            task,
            asked_samples=self.num_members,
            default_samples=self.num_members,
            key_name=key_name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadReply:
    """The reply to an upload; the accepted trajectories are stored before it is sent."""

    accepted: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    """Uploads that were accepted before with the same content."""
    rejected: tuple[RejectedTrajectory, ...] = ()
    groups: tuple[UploadGroup, ...] = ()
    """The state of all groups that the request names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryAnswer:
    """The state of an accepted trajectory."""

    __pydantic_config__ = _ANSWER

    id: str
    group: str
    member: int
    """the trajectory's index among the rollouts of its group"""
    bytes: int
    created_at: float
    """seconds since 1970"""
    is_submitted: bool
    """whether the group is submitted; GET /api/v1/rollouts/GROUP then shows its state"""
    metadata: dict[str, Any]


_NONE = np.empty(0, np.int32)


# The content of a stored trajectory: the queue's message, with run-length versions.
#
# A column of versions is a third of a trajectory's bytes, but consists of a few runs.
# Invariant: stored_content(decoded_content(stored)) == stored, for uploads in either format.
@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    trajectory: Trajectory
    """The trajectory, whose samples have no versions."""
    runs: tuple[tuple[tuple[int, int], ...], ...]
    """For each sample, the runs of equal versions: pairs of a version and a number of tokens."""


_decoder = decoder_of(_Stored)


def stored_content(trajectory: Trajectory) -> bytes:
    bare = [replace(sample, versions=_NONE) for sample in trajectory.samples]
    return to_bytes(
        _Stored(
            trajectory=without_shared(replace(trajectory, samples=tuple(bare))),
            runs=tuple(_runs(sample) for sample in trajectory.samples),
        )
    )


def decoded_content(content: bytes) -> Trajectory:
    """Decode a stored trajectory, which `stored_content` encoded."""
    found: _Stored = _decoder.decode(content)
    whole = with_shared(found.trajectory)
    samples = [
        replace(sample, versions=np.repeat(*np.array(runs, np.int32).T))
        for sample, runs in zip(whole.samples, found.runs, strict=True)
    ]
    return replace(whole, samples=tuple(samples))


def _runs(sample: Sample) -> tuple[tuple[int, int], ...]:
    borders = np.flatnonzero(sample.versions[1:] != sample.versions[:-1]) + 1
    starts = [0, *borders.tolist()]
    ends = [*starts[1:], sample.num_tokens]
    versions = sample.versions[starts].tolist()
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return tuple(zip(versions, lengths, strict=True))
