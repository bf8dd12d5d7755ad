"""The stored uploads of trajectories, which are kept while they may be delivered to the trainer.

Invariants: the content of an upload with a given id never changes; a closed group has `num_members`
members, numbered from 0, and gets no more. A group's rows are deleted at the latest when the
submission with the group's id is deleted (`service.store.submissions`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from sqlalchemy import Connection, Select, bindparam, delete, exists, func, insert, select, update

from actors.policy_age import undone_after
from actors.types import UNDONE, Sample, Trajectory
from service.access.keys import own_id
from service.intake.uploads import (
    GroupPolicy,
    RejectedTrajectory,
    TrajectoryAnswer,
    Upload,
    UploadGroup,
    UploadLimits,
    UploadRefusal,
    UploadReply,
    decoded_content,
)
from service.store import tables
from service.store.lineage import first_versions
from service.store.run_store import RunStore


class UploadsFull(Exception):
    """A request's trajectories exceed the bytes that may wait for the admission of their groups.

    Nothing of the refused request is stored.
    """


class GroupDiffers(Exception):
    """A request gives a group another number of members than the stored group has.

    Nothing of the refused request is stored.
    """


class UploadStore:
    """Reads and writes the tables `uploads` and `upload_groups` of a run's database."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def add(
        self,
        uploads: Sequence[Upload],
        policies: Sequence[GroupPolicy],
        *,
        term: int,
        limits: UploadLimits,
    ) -> UploadReply:
        """Check the uploads of a request, store those that are acceptable, and return the result.

        Args: policies: clients' rules for when a group is complete, at most one for each group.
        Returns: the result of each upload, and the state of each group.
        Raises: UploadsFull; GroupDiffers; LeaseLost; StoreError.
        """

        def add(connection: Connection) -> UploadReply:
            intake = _Intake(connection, uploads, policies, limits)
            for upload in uploads:
                intake.take(upload)
            for policy in policies:
                if policy.closes:
                    intake.close(policy.id)
            intake.store(connection, term)
            return intake.reply()

        return self._store.write(term, add)

    def load(self, group: str, member: int) -> Trajectory | None:
        """Return an uploaded trajectory; None if it is unknown, or if its content was deleted.

        Policy versions that a recovery has undone are marked (`actors.policy_age`). Raises:
        StoreError.
        """
        uploads = tables.uploads.c
        query = select(uploads.content, uploads.term).where(
            uploads.group_id == group, uploads.member == member, uploads.content.is_not(None)
        )

        def load(connection: Connection) -> tuple[bytes, int | None] | None:
            found = connection.execute(query).first()
            if found is None:
                return None
            return found.content, undone_after(found.term, first_versions(connection))

        found = self._store.read(load)
        if found is None:
            return None
        content, kept_version = found
        trajectory = decoded_content(content)
        samples = tuple(_marked(sample, kept_version) for sample in trajectory.samples)
        return replace(trajectory, samples=samples)

    def view(self, name: str) -> TrajectoryAnswer | None:
        """Return an upload's state as a client sees it; None if no upload has this id.

        Raises: StoreError.
        """
        uploads, groups = tables.uploads, tables.upload_groups
        query = (
            select(uploads, groups.c.is_closed)
            .join_from(uploads, groups)
            .where(uploads.c.id == name)
        )
        row = self._store.read(lambda connection: connection.execute(query).first())
        if row is None:
            return None
        return TrajectoryAnswer(
            id=row.id,
            group=row.group_id,
            member=row.member,
            bytes=row.num_bytes,
            created_at=row.created_at,
            is_submitted=row.is_closed,
            metadata=row.metadata,
        )

    def drop(self, group: str, *, term: int) -> UploadGroup | None:
        """Delete an upload group that is not closed; a closed group stays unchanged.

        Returns: the group's state before the call; None if the group is unknown. Raises: LeaseLost;
        StoreError.
        """

        def drop(connection: Connection) -> UploadGroup | None:
            found = _groups(connection, [group]).get(group)
            if found is not None and not found.is_closed:
                forget_groups(connection, [group])
            return found

        return self._store.write(term, drop)


def forget_contents(connection: Connection, groups: Sequence[str]) -> None:
    """Delete the contents of uploads whose groups can no longer be delivered to the trainer.

    The ids of the uploads stay known.
    """
    uploads = tables.uploads
    connection.execute(
        update(uploads).where(uploads.c.group_id == bindparam("of_group")).values(content=None),
        [{"of_group": group} for group in groups],
    )


def forget_groups(connection: Connection, groups: Sequence[str] | Select[str]) -> None:
    """Delete groups and their uploads. groups: ids of groups, or a query that selects such ids."""
    uploads, known = tables.uploads, tables.upload_groups
    connection.execute(delete(uploads).where(uploads.c.group_id.in_(groups)))
    connection.execute(delete(known).where(known.c.id.in_(groups)))


class _Intake:
    """Checks a request's uploads against the stored state, and collects the rows and the reply."""

    def __init__(
        self,
        connection: Connection,
        uploads: Sequence[Upload],
        policies: Sequence[GroupPolicy],
        limits: UploadLimits,
    ) -> None:
        """Read the stored state, and check the size of the request and the policies of its groups.

        Raises: UploadsFull; GroupDiffers.
        """
        self._limits = limits
        self._named = tuple(
            dict.fromkeys([*(each.id for each in policies), *(each.group for each in uploads)])
        )
        """Ids of the request's groups; the groups with a policy come first."""
        self._groups = _groups(connection, self._named)
        self._known = dict(self._groups)
        """The groups as they were stored before this request, by id."""
        known, ids = tables.uploads.c, [upload.id for upload in uploads]
        found = connection.execute(select(known.id, known.digest).where(known.id.in_(ids)))
        self._digests = {name: digest for name, digest in found}
        """Digests of stored and newly accepted uploads, by id."""
        _check_room(connection, [u for u in uploads if u.id not in self._digests], limits)
        submissions = tables.submissions.c
        others = [name for name in self._named if name not in self._groups]
        taken = connection.scalars(select(submissions.id).where(submissions.id.in_(others)))
        self._taken_ids = frozenset(taken)
        """Ids of the request's groups that belong to submissions of other kinds."""
        self._rows: list[dict[str, Any]] = []
        self._accepted: list[str] = []
        self._duplicates: list[str] = []
        self._rejected: list[RejectedTrajectory] = []
        for policy in policies:
            self._agree(policy)

    def take(self, upload: Upload) -> None:
        refusal = self._refusal(upload)
        if upload.id in self._digests and refusal is None:
            self._duplicates.append(upload.id)
        elif refusal is not None:
            code, detail = refusal
            self._rejected.append(RejectedTrajectory(id=upload.id, code=code, detail=detail))
        else:
            group = self._groups.get(upload.group) or _new_group(upload.group)
            self._rows.append(
                {
                    "id": upload.id,
                    "group_id": upload.group,
                    "member": group.num_uploaded,
                    "digest": upload.digest,
                    "num_bytes": len(upload.content),
                    "created_at": time.time(),
                    "metadata": dict(upload.metadata),
                    "content": upload.content,
                }
            )
            num_uploaded = group.num_uploaded + 1
            self._groups[upload.group] = replace(
                group,
                num_uploaded=num_uploaded,
                is_closed=num_uploaded == group.num_members,
            )
            self._digests[upload.id] = upload.digest
            self._accepted.append(upload.id)

    def close(self, name: str) -> None:
        """Close a group, unless it is too small to be trained."""
        group = self._groups.get(name)
        if group is not None and group.num_uploaded >= self._limits.min_members:
            self._groups[name] = replace(group, num_members=group.num_uploaded, is_closed=True)

    def store(self, connection: Connection, term: int) -> None:
        table = tables.upload_groups
        for name, group in self._groups.items():
            if name not in self._known and group.num_uploaded:
                connection.execute(insert(table).values(**asdict(group)))
            elif name in self._known and group != self._known[name]:
                connection.execute(update(table).where(table.c.id == name).values(**asdict(group)))
        if self._rows:
            connection.execute(
                insert(tables.uploads), [{**row, "term": term} for row in self._rows]
            )

    def reply(self) -> UploadReply:
        return UploadReply(
            accepted=tuple(self._accepted),
            duplicates=tuple(self._duplicates),
            rejected=tuple(self._rejected),
            groups=tuple(self._groups[name] for name in self._named if name in self._groups),
        )

    def _agree(self, policy: GroupPolicy) -> None:
        """Set a group's number of members to the number in a client's policy, if any.

        Raises: GroupDiffers if the group already has another number of members, or too many
        uploads.
        """
        wanted = policy.num_members
        group = self._groups.get(policy.id) or _new_group(policy.id)
        if wanted is None or policy.id in self._taken_ids or group.num_members == wanted:
            return
        if group.num_members is not None or group.num_uploaded > wanted:
            had = (
                f"{group.num_members} members"
                if group.num_members is not None
                else f"{group.num_uploaded} trajectories already"
            )
            raise GroupDiffers(
                f"group {own_id(policy.id)} has {had}, got {wanted} members; leave the number out, "
                "or upload to a group of another id"
            )
        self._groups[policy.id] = replace(
            group, num_members=wanted, is_closed=group.num_uploaded == wanted
        )

    def _refusal(self, upload: Upload) -> tuple[UploadRefusal, str] | None:
        """Return the code and text of an upload's refusal; None if it is valid or a repeat."""
        limits, known = self._limits, self._digests.get(upload.id)
        if known is not None:
            if known == upload.digest:
                return None
            return UploadRefusal.ID_CONFLICT, (
                "this id already has another content; give this trajectory another id"
            )
        if upload.group in self._taken_ids:
            return UploadRefusal.GROUP_CONFLICT, (
                f"{own_id(upload.group)} is the id of a submitted task; give the group another id"
            )
        if upload.newest_version > limits.newest_version:
            return UploadRefusal.UNKNOWN_VERSION, (
                f"sampled by version {upload.newest_version}, which was not published, expected at "
                f"most {limits.newest_version}"
            )
        if upload.oldest_version < limits.oldest_version:
            return UploadRefusal.STALE_POLICY, (
                f"sampled by version {upload.oldest_version}, expected at least "
                f"{limits.oldest_version}; sample again"
            )
        group = self._groups.get(upload.group)
        if group is not None and group.is_closed:
            return UploadRefusal.GROUP_CLOSED, (
                f"group {own_id(upload.group)} is complete with {group.num_members} members; "
                "upload to another"
            )
        if group is not None and group.num_uploaded >= limits.max_members:
            return UploadRefusal.GROUP_FULL, (
                f"group {own_id(upload.group)} has {group.num_uploaded} members, expected at most "
                f"{limits.max_members} (service.max_samples_per_task); close it"
            )
        return None


def _marked(sample: Sample, kept: int | None) -> Sample:
    """Mark the versions in a sample that are newer than `kept` as undone by a recovery.

    kept: newest version that the recovery kept; None if there was no recovery since the upload.
    """
    if kept is None or not (sample.versions > kept).any():
        return sample
    versions = np.where(sample.versions > kept, sample.versions + np.int32(UNDONE), sample.versions)
    return replace(sample, versions=versions)


def _check_room(connection: Connection, new: Sequence[Upload], limits: UploadLimits) -> None:
    uploads, bindings = tables.uploads.c, tables.bindings.c
    # An upload that has been admitted does not count as waiting: otherwise a run with rare
    # checkpoints could refuse the data that it needs to reach the next checkpoint.
    is_admitted = exists().where(bindings.submission_id == uploads.group_id)
    waiting = connection.scalar(
        select(func.coalesce(func.sum(uploads.num_bytes), 0)).where(
            uploads.content.is_not(None), ~is_admitted
        )
    )
    num_new = sum(len(upload.content) for upload in new)
    # If nothing waits, only the limit on a request's body applies.
    if waiting and waiting + num_new > limits.max_waiting_bytes:
        raise UploadsFull(
            f"{waiting} bytes of trajectories wait to be admitted and {num_new} more are "
            f"offered, expected at most {limits.max_waiting_bytes} together "
            "(service.max_waiting_mib)"
        )


def _groups(connection: Connection, names: Iterable[str]) -> dict[str, UploadGroup]:
    table = tables.upload_groups
    rows = connection.execute(select(table).where(table.c.id.in_(list(names)))).mappings()
    return {row["id"]: UploadGroup(**row) for row in rows}


def _new_group(name: str) -> UploadGroup:
    return UploadGroup(id=name, num_uploaded=0, num_members=None, is_closed=False)
