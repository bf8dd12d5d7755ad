"""The stored submissions of clients.

A submission is a task that a client sent. The store saves a submission before the client gets an
answer, and saves its group of rollouts before these rollouts start.

A term begins at a start, a recovery or a return to a checkpoint. A write fails with LeaseLost if
another supervisor has begun a newer term. Reads leave out rows that a later term undid.

When a submission is over, the store deletes the task, the bindings to groups, the results and the
turns of the sessions. The id, the digest, the final state and the rows of the sessions stay until
enough newer submissions are over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from sqlalchemy import Connection, Text, bindparam, delete, func, insert, select, update

from service.access.keys import KeyLimits
from service.intake.listing import FeedEntry, FeedKind, TaskFilter
from service.intake.session import session_id
from service.intake.submission import (
    Offer,
    PackedRequest,
    RolloutRequest,
    Status,
    StoredSubmissions,
    Submission,
    SubmissionView,
)
from service.store import tables
from service.store.feed import add_entries, prune_feed, tell_accepted, tell_all
from service.store.leases import Lease
from service.store.lineage import events_of, surviving_spans
from service.store.run_store import RunStore
from service.store.sessions import end_sessions_of
from service.store.uploads import forget_contents, forget_groups

_NO_KEYS: Mapping[str, tuple[str, str]] = MappingProxyType({})
_AS_STORED = tables.AsJson(RolloutRequest)
_POSITION = tables.submissions.c.position
# Statements that are built once, because building takes as long as storing a few tasks.
_NEWEST = select(func.max(_POSITION))
_INSERT = insert(tables.submissions).values(request=bindparam("text", type_=Text))
_BEHIND = select(_POSITION).where(_POSITION > bindparam("newest")).order_by(_POSITION)


def packed(request: RolloutRequest) -> PackedRequest:
    return PackedRequest(
        id=request.id,
        environment=request.task.environment,
        digest=request.digest,
        num_samples=request.num_samples,
        num_bytes=request.num_bytes,
        key_name=request.key_name,
        batch=request.batch,
        text=_AS_STORED.text_of(request),
        sessions=request.sessions,
    )


def offer_of(requests: Sequence[RolloutRequest], *, key: str, limits: KeyLimits) -> Offer:
    """Pack a submit request as an `Offer`; the arguments are those of `SubmissionQueue.submit`."""
    return Offer(tasks=tuple(map(packed, requests)), key=key, limits=limits)


class SubmissionStore:
    """Reads and writes the tables `submissions`, `bindings` and `results` of a run's database.

    This class also inserts and deletes rows of `sessions`, and adds entries about acceptances and
    cancellations to `feed`.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def add(
        self,
        requests: Sequence[PackedRequest],
        *,
        term: int,
        request_keys: Mapping[str, tuple[str, str]] = _NO_KEYS,
    ) -> list[Submission]:
        """Store these requests as accepted, in one transaction; return a submission for each.

        Args:
            request_keys: Maps the id of each task that was sent with an Idempotency-Key to two
                digests: one of the key, one of all tasks in the HTTP request.

        Raises: LeaseLost.
        """
        accepted_at = time.time()
        rows = [
            {
                "id": item.id,
                "text": item.text,
                "digest": item.digest,
                "num_samples": item.num_samples,
                "num_bytes": item.num_bytes,
                "accepted_at": accepted_at,
                "environment": item.environment,
                "tenant": item.tenant,
                "key_name": item.key_name,
                "batch": item.batch,
                "is_cancelled": False,
                "request_key": request_key,
                "request_digest": request_digest,
            }
            for item in requests
            for request_key, request_digest in [request_keys.get(item.id, (None, None))]
        ]
        num_of = Counter(item.tenant for item in requests)
        session_rows = [
            {
                "id": session_id(item.id, member),
                "submission_id": item.id,
                "member": member,
                "spec": item.sessions.spec,
                "agent_key": keys.agent,
                "reward_key": keys.reward,
                "tenant": item.tenant,
                "key_name": item.key_name,
                "created_at": accepted_at,
            }
            for item in requests
            if item.sessions is not None
            for member, keys in enumerate(item.sessions.keys)
        ]

        def accept(connection: Connection) -> Sequence[int]:
            # The transaction excludes other writers, and positions only grow.
            newest = connection.scalar(_NEWEST) or 0
            connection.execute(_INSERT, rows)
            positions = connection.scalars(_BEHIND, {"newest": newest}).all()
            if session_rows:
                connection.execute(insert(tables.sessions), session_rows)
            tell_accepted(connection, behind=newest, num_of=num_of)
            return positions

        return [
            Submission(
                id=request.id,
                position=number,
                digest=request.digest,
                num_samples=request.num_samples,
                num_bytes=request.num_bytes,
                accepted_at=accepted_at,
                environment=request.environment,
                key_name=request.key_name,
                batch=request.batch,
            )
            for request, number in zip(requests, self._store.write(term, accept), strict=True)
        ]

    def bind(self, groups: Mapping[str, str], *, term: int) -> list[RolloutRequest]:
        """Assign submissions to new groups of rollouts, and return the submissions' requests.

        Args:
            groups: Maps the id of each new group to the id of the submission that it will play.

        Returns: one request for each group, in the order of `groups`.
        Raises: LeaseLost.
        """
        rows = [
            {"term": term, "group_id": group_id, "submission_id": submission_id}
            for group_id, submission_id in groups.items()
        ]
        accepted = tables.submissions.c
        requests = select(accepted.request).where(accepted.id.in_(groups.values()))

        def bind(connection: Connection) -> list[RolloutRequest]:
            connection.execute(insert(tables.bindings), rows)
            by_id = {request.id: request for request in connection.scalars(requests)}
            return [by_id[submission_id] for submission_id in groups.values()]

        return self._store.write(term, bind)

    def cancel(self, submission_id: str, *, term: int) -> None:
        """Mark a submission as cancelled, and delete its task and its sessions' turns.

        The submission is never played again. Raises: LeaseLost.
        """
        table = tables.submissions
        statement = (
            update(table).where(table.c.id == submission_id).values(is_cancelled=True, request=None)
        )

        entry = FeedEntry(at=time.time(), kind=FeedKind.CANCELLED, task=submission_id)

        def cancel(connection: Connection) -> None:
            connection.execute(statement)
            _forget_turns(connection, [submission_id])
            add_entries(connection, [entry])
            end_sessions_of(connection, [submission_id], why="its group was cancelled")

        self._store.write(term, cancel)

    def archive(
        self,
        views: Sequence[SubmissionView],
        rollout_ids: Sequence[str],
        *,
        term: int,
        keep: int,
        keep_entries: int,
    ) -> None:
        """Store the final states of submissions, and delete the rest of their data.

        Also delete all ended submissions but the newest `keep` ones, and all entries of the feed
        but the newest `keep_entries` ones.

        Args: views: the final states. rollout_ids: the rollouts of these submissions.
        Raises: LeaseLost.
        """
        table, bindings, results = tables.submissions, tables.bindings, tables.results
        ended = [{"ended_id": view.id, "view": view} for view in views]

        def archive(connection: Connection) -> None:
            connection.execute(
                update(table)
                .where(table.c.id == bindparam("ended_id"))
                .values(ended=bindparam("view", type_=table.c.ended.type), request=None),
                ended,
            )
            connection.execute(
                delete(bindings).where(bindings.c.submission_id == bindparam("ended_id")),
                [{"ended_id": view.id} for view in views],
            )
            if rollout_ids:
                connection.execute(
                    delete(results).where(results.c.rollout_id == bindparam("rollout")),
                    [{"rollout": rollout_id} for rollout_id in rollout_ids],
                )
            _forget_turns(connection, [view.id for view in views])
            end_sessions_of(connection, [view.id for view in views], why="its group is over")
            over = select(table.c.position).where(table.c.ended.is_not(None))
            first_left_out = connection.scalar(
                over.order_by(table.c.position.desc()).offset(keep).limit(1)
            )
            if first_left_out is not None:
                is_left_out = table.c.ended.is_not(None) & (table.c.position <= first_left_out)
                sessions = tables.sessions
                left_out = select(table.c.id).where(is_left_out)
                forget_groups(connection, left_out)
                connection.execute(delete(sessions).where(sessions.c.submission_id.in_(left_out)))
                connection.execute(delete(table).where(is_left_out))
            prune_feed(connection, keep=keep_entries)

        self._store.write(term, archive)

    def digests(
        self, submission_ids: Sequence[str], request_keys: Sequence[str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return the digests by which a repeated submission or HTTP request is recognized.

        Args: submission_ids: submissions to look up. request_keys: digests of Idempotency-Keys.
        Returns: two dicts: digests of ended submissions by id, and digests of HTTP requests by the
        digest of their key. Submissions and requests that are no longer stored are left out.
        Raises: StoreError.
        """
        accepted = tables.submissions.c
        over = select(accepted.id, accepted.digest).where(
            accepted.id.in_(submission_ids), accepted.ended.is_not(None)
        )
        keyed = select(accepted.request_key, accepted.request_digest).where(
            accepted.request_key.in_(request_keys)
        )

        def read(connection: Connection) -> tuple[dict[str, str], dict[str, str]]:
            known = dict(connection.execute(over).all()) if submission_ids else {}
            return known, dict(connection.execute(keyed).all()) if request_keys else {}

        return self._store.read(read)

    def ended(self, submission_ids: Collection[str]) -> dict[str, SubmissionView]:
        """Return the final states of these submissions, by id.

        Submissions that are not over, or no longer kept, are left out. Raises: StoreError.
        """
        accepted = tables.submissions.c
        over = select(accepted.id, accepted.ended).where(
            accepted.id.in_(submission_ids), accepted.ended.is_not(None)
        )
        return self._store.read(lambda connection: dict(connection.execute(over).all()))

    def page(
        self, wanted: TaskFilter, *, after: int, limit: int
    ) -> list[tuple[int, str, SubmissionView | None]]:
        """Return the first `limit` submissions that match `wanted`, in the order of acceptance.

        The result may have submissions with another status than the wanted one: the store knows
        only whether a submission is over, and the caller must check the rest.
        Args: after: only submissions with a position greater than this are returned.
        Returns: for each submission its position, its id, and its final state; the state is None if
        the submission is not over.
        Raises: StoreError.
        """
        accepted = tables.submissions.c
        query = select(accepted.position, accepted.id, accepted.ended).where(
            accepted.position > after
        )
        if wanted.tenant is not None:
            query = query.where(accepted.tenant == wanted.tenant)
        if wanted.environment is not None:
            query = query.where(accepted.environment == wanted.environment)
        if wanted.batch is not None:
            query = query.where(accepted.batch == wanted.batch)
        if wanted.status in (Status.QUEUED, Status.RUNNING, Status.FINISHED):
            query = query.where(accepted.ended.is_(None))
        query = query.order_by(accepted.position).limit(limit)
        rows = self._store.read(lambda connection: connection.execute(query).all())
        return [(position, name, ended) for position, name, ended in rows]

    def begin_term(self, lease: Lease) -> None:
        """Add an entry to the clients' feed if the run returned to an older checkpoint.

        Nothing is added if the run starts without a checkpoint or from its newest checkpoint.
        lease: its `parent` is the checkpoint from which the run continues.
        Raises: LeaseLost, StoreError.
        """
        parent, commits = lease.parent, tables.checkpoints.c
        if parent is None:
            return
        newer = select(commits.id).where(commits.id > parent.id).limit(1)
        number = select(commits.feed_number).where(commits.id == parent.id)

        def add(connection: Connection) -> None:
            if connection.scalar(newer) is None:
                return
            void_after = connection.scalar(number)
            entry = FeedEntry(
                at=time.time(), kind=FeedKind.WENT_BACK, step=parent.step, void_after=void_after
            )
            tell_all(connection, entry)

        self._store.write(lease.term, add)

    def read(self) -> StoredSubmissions:
        """Return the submissions that are not over, with their bindings, results and events.

        Bindings, results and events that a return to an older checkpoint undid are left out
        (`service.store.lineage`).
        """
        accepted, bindings, results = (
            tables.submissions.c,
            tables.bindings.c,
            tables.results.c,
        )
        columns = (
            accepted.id,
            accepted.position,
            accepted.digest,
            accepted.num_samples,
            accepted.num_bytes,
            accepted.accepted_at,
            accepted.environment,
            accepted.key_name,
            accepted.batch,
            accepted.is_cancelled,
        )
        live = select(*columns).where(accepted.ended.is_(None)).order_by(accepted.position)

        def read(connection: Connection) -> StoredSubmissions:
            spans = surviving_spans(connection)
            terms = [span.term for span in spans]
            rows = connection.execute(live).mappings()
            bound = connection.execute(
                select(bindings.group_id, bindings.submission_id)
                .where(bindings.term.in_(terms))
                .order_by(bindings.term)
            )
            ended = connection.scalars(
                select(results.result)
                .where(results.term.in_(terms))
                .order_by(results.term, results.attempt)
            )
            return StoredSubmissions(
                submissions=tuple(Submission(**row) for row in rows),
                bindings=dict(bound.all()),
                results=tuple(ended),
                events=events_of(connection, spans),
            )

        return self._store.read(read)


def _forget_turns(connection: Connection, submission_ids: Sequence[str]) -> None:
    """Delete the turns of these submissions' sessions, and the contents of their uploads.

    The caller must delete the submissions' requests in the same transaction, to stop later turns.
    """
    sessions = tables.sessions.c
    of_them = select(sessions.id).where(sessions.submission_id == bindparam("of_submission"))
    rows = [{"of_submission": submission_id} for submission_id in submission_ids]
    turns = tables.session_turns
    connection.execute(delete(turns).where(turns.c.session_id.in_(of_them)), rows)
    forget_contents(connection, submission_ids)
