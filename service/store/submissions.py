"""What clients submit, stored: accepted before it is answered, bound before it is played.

Every write carries the term of the lease. Reading back keeps what lies along the surviving lineage.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from sqlalchemy import insert, select, update

from service.intake.submission import RolloutRequest, StoredSubmissions, Submission
from service.store import tables
from service.store.lineage import events_of, surviving_spans
from service.store.run_store import RunStore


class SubmissionStore:
    """Tables `submissions`, `bindings` and `results` of a run's database."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def add(self, requests: Sequence[RolloutRequest], *, term: int) -> list[Submission]:
        """Accept all in one transaction; they are durable when this returns. Raises: LeaseLost."""
        table, accepted_at = tables.submissions, time.time()
        statement = insert(table).returning(table.c.position, sort_by_parameter_order=True)
        rows = [{"id": item.id, "request": item, "accepted_at": accepted_at} for item in requests]
        with self._store.fenced(term) as connection:
            positions = connection.scalars(statement, rows).all()
        return [
            Submission(request=request, position=position, accepted_at=accepted_at)
            for request, position in zip(requests, positions, strict=True)
        ]

    def bind(self, groups: Mapping[str, str], *, term: int) -> None:
        """groups: group id to submission id. Raises: LeaseLost."""
        rows = [
            {"term": term, "group_id": group_id, "submission_id": submission_id}
            for group_id, submission_id in groups.items()
        ]
        with self._store.fenced(term) as connection:
            connection.execute(insert(tables.bindings), rows)

    def cancel(self, submission_id: str, *, term: int) -> None:
        """Raises: LeaseLost."""
        table = tables.submissions
        with self._store.fenced(term) as connection:
            connection.execute(
                update(table).where(table.c.id == submission_id).values(is_cancelled=True)
            )

    def read(self) -> StoredSubmissions:
        """What survives: every submission, and of the rest what the newest term goes on from."""
        accepted, bindings, results = (
            tables.submissions.c,
            tables.bindings.c,
            tables.results.c,
        )
        columns = (accepted.request, accepted.position, accepted.accepted_at, accepted.is_cancelled)
        with self._store.reading() as connection:
            spans = surviving_spans(connection)
            terms = [span.term for span in spans]
            rows = connection.execute(select(*columns).order_by(accepted.position)).mappings()
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
