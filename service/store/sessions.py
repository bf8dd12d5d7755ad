"""The stored sessions of external agents: their keys, their sampled turns, and their ends.

Invariants:
- Only the flag `is_unseen` of a stored turn can change.
- A session gets no turn after its end, or after its submission was cancelled or ended.
- A session's row is inserted and deleted with its submission (`service.store.submissions`).
- Only the gateway changes a session's row. The exception is `end_sessions_of`, which ends a session
  when its submission ends or is cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, insert, select, tuple_, update
from sqlalchemy.exc import IntegrityError

from actors.policy_age import marked, undone_after
from actors.types import Outcome
from service.intake.listing import (
    FeedEntry,
    FeedKind,
    Page,
    SessionFilter,
    SessionPage,
    SessionPlace,
)
from service.intake.session import (
    Change,
    LimitReached,
    LimitRefusal,
    SessionClaimed,
    SessionEnd,
    SessionEnded,
    SessionKeys,
    SessionOpened,
    SessionStatus,
    SessionTurn,
    StoredSession,
    TurnAdded,
    TurnMarked,
)
from service.store import tables
from service.store.feed import add_entries
from service.store.lineage import first_versions
from service.store.run_store import RunStore

# Maximum number of ids in one statement, because databases limit the number of its values.
MAX_IDS = 10_000
_TURN_FIELDS = tuple(field.name for field in fields(SessionTurn))


class SessionStore:
    """Reads and writes the tables `sessions` and `session_turns` of a run's database."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def load(self, session_id: str) -> tuple[StoredSession, tuple[SessionTurn, ...]] | None:
        """Return a session and its turns in order; None if the session's id is unknown.

        The turns' arrays are read-only. Policy versions that a recovery has undone are marked in
        the turns' version_spans (`actors.policy_age`). Raises: StoreError.
        """
        turns = tables.session_turns.c
        turns_query = (
            select(turns.term, *(turns[name] for name in _TURN_FIELDS))
            .where(turns.session_id == session_id)
            .order_by(turns.number)
        )

        def load(
            connection: Connection,
        ) -> tuple[StoredSession, tuple[SessionTurn, ...]] | None:
            found = _sessions(connection, _session_query([session_id]))
            if not found:
                return None
            rows = connection.execute(turns_query).all()
            return found[0], _turns(rows, first_versions(connection))

        return self._store.read(load)

    def find(self, session_ids: Sequence[str]) -> dict[str, StoredSession]:
        """Return the sessions with these ids, by id; unknown ids are left out.

        Raises: StoreError.
        """
        query = _session_query(session_ids)
        found = self._store.read(lambda connection: _sessions(connection, query))
        return {session.id: session for session in found}

    def ends(self, session_ids: Sequence[str]) -> dict[str, SessionEnd]:
        """Return how these sessions ended, by id; sessions that have not ended are left out.

        Raises: StoreError.
        """
        sessions = tables.sessions.c
        query = select(sessions.id, sessions.end).where(sessions.end.is_not(None))

        def read(connection: Connection) -> dict[str, SessionEnd]:
            found: dict[str, SessionEnd] = {}
            for first in range(0, len(session_ids), MAX_IDS):
                some = session_ids[first : first + MAX_IDS]
                rows = connection.execute(query.where(sessions.id.in_(some)))
                found.update({row.id: row.end for row in rows})
            return found

        return self._store.read(read)

    def of_submission(self, submission_id: str) -> tuple[StoredSession, ...]:
        """Return a submission's sessions in the order of members. Raises: StoreError."""
        sessions = tables.sessions.c
        query = (
            select(tables.sessions)
            .where(sessions.submission_id == submission_id)
            .order_by(sessions.member)
        )
        return tuple(self._store.read(lambda connection: _sessions(connection, query)))

    def page(self, wanted: SessionFilter, *, after: SessionPlace | None, limit: int) -> SessionPage:
        """Return the first `limit` sessions after a position that match `wanted`.

        Raises: StoreError.
        """
        sessions, position = tables.sessions.c, tables.submissions.c.position
        query = select(tables.sessions, position).join_from(tables.sessions, tables.submissions)
        if wanted.tenant is not None:
            query = query.where(sessions.tenant == wanted.tenant)
        if wanted.group is not None:
            query = query.where(sessions.submission_id == wanted.group)
        if wanted.status in (SessionStatus.QUEUED, SessionStatus.OPEN):
            is_open = sessions.opened_at.is_not(None)
            query = query.where(
                sessions.end.is_(None), is_open if wanted.status is SessionStatus.OPEN else ~is_open
            )
        elif wanted.status is not None:
            query = query.where(sessions.end.is_not(None))
        if after is not None:
            query = query.where(tuple_(position, sessions.member) > tuple_(*after))
        query = query.order_by(position, sessions.member).limit(limit)

        def read(connection: Connection) -> SessionPage:
            rows = connection.execute(query).all()
            found = [_session(row) for row in rows]
            return Page(
                items=tuple(each for each in found if wanted.status in (None, each.status)),
                next=(rows[-1].position, rows[-1].member) if len(rows) == limit else None,
            )

        return self._store.read(read)

    def apply(self, changes: Sequence[Change], *, term: int) -> frozenset[int]:
        """Store changes in order, in one transaction; a change that is stored already is skipped.

        Returns: the indices of the changes that came too late and were not stored. These are:
        - a turn, an end, or a claim (an agent takes the session), if the session is unknown
        - a turn or a claim, if the session has ended, or its submission is cancelled or over
        - a turn, if a different turn is stored under the same number
        - an end, if a different end is stored and no reward is pending
        Raises: LeaseLost; StoreError.
        """
        return self._store.write(term, lambda connection: _apply(connection, changes, term))


def end_sessions_of(connection: Connection, submission_ids: Sequence[str], *, why: str) -> None:
    """End the open sessions of submissions that were cancelled or are over.

    Each session ends as discarded and gets an entry in the feed. why: the reason that is stored
    with the end.
    """
    sessions, now = tables.sessions.c, time.time()
    found = connection.execute(
        select(sessions.id, sessions.submission_id, sessions.member)
        .where(sessions.submission_id.in_(submission_ids), sessions.end.is_(None))
        .order_by(sessions.submission_id, sessions.member)
    ).all()
    end = SessionEnd(
        status=SessionStatus.DISCARDED,
        outcome=Outcome.CANCELLED,
        reward=None,
        detail=why,
        ended_at=now,
    )
    _execute(
        connection,
        update(tables.sessions)
        .where(sessions.id == bindparam("of_session"))
        .values(end=bindparam("ended", type_=sessions.end.type)),
        ({"of_session": row.id, "ended": end} for row in found),
    )
    add_entries(
        connection,
        [
            FeedEntry(
                at=now,
                kind=FeedKind.SESSION_ENDED,
                task=row.submission_id,
                member=row.member,
                outcome=end.outcome,
                session_status=end.status,
            )
            for row in found
        ],
    )


class _Rows:
    """Applies changes to sessions in memory, and collects the rows to write.

    An object serves one transaction: `take` every change, then write the collected rows.
    """

    def __init__(
        self,
        connection: Connection,
        changes: Sequence[Change],
        marks: dict[tuple[str, int], tuple[str, float]],
    ) -> None:
        """Read the stored state of each session to which one of `changes` belongs.

        marks: what `_marks` returns, or an empty dict to assume that no turn in `changes` is stored
        already. If this assumption is wrong, inserting the rows fails.
        """
        sessions, submissions = tables.sessions.c, tables.submissions.c
        found = connection.execute(
            select(
                sessions.id,
                sessions.end,
                sessions.submission_id,
                sessions.member,
                sessions.opened_at.is_not(None).label("was_opened"),
                submissions.request.is_not(None).label("is_submission_live"),
            )
            .join_from(tables.sessions, tables.submissions)
            .where(sessions.id.in_({change.session_id for change in changes}))
        ).all()
        self._of_live_submissions = frozenset(row.id for row in found if row.is_submission_live)
        """Sessions whose submission is neither cancelled nor over."""
        self._known = {row.id: (row.submission_id, row.member) for row in found}
        """The submission and the member of each known session, by the session's id."""
        self._was_opened = frozenset(row.id for row in found if row.was_opened)
        self._ends = {row.id: row.end for row in found if row.end is not None}
        """Ends of sessions, both stored and new ones."""
        self._marks = marks
        self._now = time.time()
        self.turns: dict[tuple[str, int], SessionTurn] = {}
        """New turns by session and number."""
        self.unseen: dict[tuple[str, int], bool] = {}
        """New values of `is_unseen` for stored turns."""
        self.opened: dict[str, float] = {}
        self.claims: dict[str, SessionClaimed] = {}
        self.limit_refusals: dict[str, LimitRefusal] = {}
        self.new_ends: dict[str, SessionEnd] = {}
        self.entries: list[FeedEntry] = []

    def take(self, change: Change) -> bool:
        """Apply a change to the state; return False if the change is too late to be stored."""
        session = change.session_id
        match change:
            case TurnAdded(turn=turn):
                return self._add(session, turn)
            case TurnMarked(number=number, is_unseen=is_unseen):
                self._mark(session, number, is_unseen=is_unseen)
            case SessionOpened(opened_at=opened_at):
                self._open(session, opened_at)
            case SessionClaimed():
                if not self._takes_turns(session):
                    return False
                self.claims.setdefault(session, change)
            case LimitReached(refusal=refusal):
                self.limit_refusals[session] = refusal
            case SessionEnded(end=end):
                return self._end(session, end)
        return True

    def _takes_turns(self, session: str) -> bool:
        """Return whether turns and claims of the session may still be stored."""
        return session in self._of_live_submissions and session not in self._ends

    def _add(self, session: str, turn: SessionTurn) -> bool:
        key, mark = (session, turn.number), (turn.request_id, turn.created_at)
        if key in self._marks:
            return self._marks[key] == mark
        if not self._takes_turns(session):
            return False
        self.turns[key], self._marks[key] = turn, mark
        return True

    def _mark(self, session: str, number: int, *, is_unseen: bool) -> None:
        key = session, number
        if key in self.turns:
            self.turns[key] = replace(self.turns[key], is_unseen=is_unseen)
        else:
            self.unseen[key] = is_unseen

    def _open(self, session: str, opened_at: float) -> None:
        if session in self._known and session not in self._was_opened | self.opened.keys():
            self._add_entry(FeedKind.SESSION_OPENED, session)
            self.opened[session] = opened_at

    def _add_entry(self, kind: FeedKind, session: str, end: SessionEnd | None = None) -> None:
        task, member = self._known[session]
        self.entries.append(
            FeedEntry(
                at=self._now,
                kind=kind,
                task=task,
                member=member,
                outcome=end.outcome if end else None,
                reward=end.reward if end else None,
                session_status=end.status if end else None,
            )
        )

    def _end(self, session: str, end: SessionEnd) -> bool:
        before = self._ends.get(session)
        if before is not None and before.reward_until is None:
            return before == end
        if session not in self._known:
            return False
        kind = FeedKind.SESSION_ENDED if before is None else FeedKind.SESSION_REWARDED
        self._add_entry(kind, session, end)
        self._ends[session] = self.new_ends[session] = end
        return True


def _turns(rows: Iterable[Row[Any]], first: Mapping[int, int]) -> tuple[SessionTurn, ...]:
    """Make turns from rows, and mark the policy versions that the run has undone since.

    rows: a turn's term, then the columns `_TURN_FIELDS`. first: the first policy version of each
    term.
    """
    turns: list[SessionTurn] = []
    for row in rows:
        term, values = row[0], row[1:]
        turn = SessionTurn(**dict(zip(_TURN_FIELDS, values, strict=True)))
        # A later term that starts from an earlier checkpoint undoes versions.
        spans = marked(turn.version_spans, undone_after(term, first))
        turns.append(turn if spans == turn.version_spans else replace(turn, version_spans=spans))
    return tuple(turns)


def _apply(connection: Connection, changes: Sequence[Change], term: int) -> frozenset[int]:
    try:
        # A change is rarely stored already, so searching for it first would cost more than a retry.
        with connection.begin_nested():
            return _store(connection, changes, term, marks={})
    except IntegrityError:
        return _store(connection, changes, term, marks=_marks(connection, changes))


def _store(
    connection: Connection,
    changes: Sequence[Change],
    term: int,
    *,
    marks: dict[tuple[str, int], tuple[str, float]],
) -> frozenset[int]:
    rows = _Rows(connection, changes, marks)
    too_late = frozenset(place for place, change in enumerate(changes) if not rows.take(change))
    _store_turns(connection, rows, term)
    _store_sessions(connection, rows)
    add_entries(connection, rows.entries)
    return too_late


# Parameters of conditions. A column's name is already the parameter for its new value.
_OF_SESSION = bindparam("of_session", type_=tables.sessions.c.id.type)
_OF_TURN = bindparam("of_turn", type_=tables.session_turns.c.number.type)


def _store_turns(connection: Connection, rows: _Rows, term: int) -> None:
    turns = tables.session_turns
    _execute(
        connection,
        insert(turns),
        (
            # Without asdict, which would copy every array.
            {"session_id": session, "term": term}
            | {name: getattr(turn, name) for name in _TURN_FIELDS}
            for (session, _), turn in rows.turns.items()
        ),
    )
    _execute(
        connection,
        update(turns)
        .where(turns.c.session_id == _OF_SESSION, turns.c.number == _OF_TURN)
        .values(is_unseen=bindparam("unseen")),
        (
            {"of_session": session, "of_turn": number, "unseen": is_unseen}
            for (session, number), is_unseen in rows.unseen.items()
        ),
    )


def _store_sessions(connection: Connection, rows: _Rows) -> None:
    sessions = tables.sessions.c
    of_session = update(tables.sessions).where(sessions.id == _OF_SESSION)
    _execute(
        connection,
        of_session.where(sessions.opened_at.is_(None)).values(opened_at=bindparam("opened")),
        ({"of_session": session, "opened": at} for session, at in rows.opened.items()),
    )
    _execute(
        connection,
        of_session.where(sessions.claimed_by == "").values(
            claimed_by=bindparam("name"), claimed_at=bindparam("at")
        ),
        (
            {"of_session": session, "name": claim.name, "at": claim.claimed_at}
            for session, claim in rows.claims.items()
        ),
    )
    _execute(
        connection,
        of_session.values(cut=bindparam("refused", type_=sessions.cut.type)),
        ({"of_session": name, "refused": each} for name, each in rows.limit_refusals.items()),
    )
    _execute(
        connection,
        of_session.values(end=bindparam("ended", type_=sessions.end.type)),
        ({"of_session": session, "ended": end} for session, end in rows.new_ends.items()),
    )


def _marks(
    connection: Connection, changes: Sequence[Change]
) -> dict[tuple[str, int], tuple[str, float]]:
    """Find the stored turns that have the session and number of a turn in `changes`.

    Returns: (session id, turn number) -> (request id, time) of the stored turn. A turn in `changes`
    with another request id or time came too late.
    """
    turns = tables.session_turns.c
    added = [
        (change.session_id, change.turn.number)
        for change in changes
        if isinstance(change, TurnAdded)
    ]
    there = connection.execute(
        select(turns.session_id, turns.number, turns.request_id, turns.created_at).where(
            tuple_(turns.session_id, turns.number).in_(added)
        )
    )
    return {(session, number): (request, at) for session, number, request, at in there}


def _execute(connection: Connection, statement: Any, rows: Iterable[Mapping[str, Any]]) -> None:
    if found := list(rows):
        connection.execute(statement, found)


def _session_query(session_ids: Sequence[str]) -> Select[Any]:
    return select(tables.sessions).where(tables.sessions.c.id.in_(session_ids))


def _sessions(connection: Connection, query: Select[Any]) -> list[StoredSession]:
    return [_session(row) for row in connection.execute(query)]


def _session(row: Any) -> StoredSession:
    return StoredSession(
        id=row.id,
        submission_id=row.submission_id,
        member=row.member,
        spec=row.spec,
        keys=SessionKeys(agent=row.agent_key, reward=row.reward_key),
        key_name=row.key_name,
        created_at=row.created_at,
        opened_at=row.opened_at,
        claimed_by=row.claimed_by,
        claimed_at=row.claimed_at,
        limit_refusal=row.cut,
        end=row.end,
    )
