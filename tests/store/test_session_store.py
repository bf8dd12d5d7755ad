"""Tests of sessions in the store of a run: their turns, their ends and their removal."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sqlalchemy import func, select
from worlds.builders.session_builders import (
    SPEC,
    session_end,
    session_request,
    session_turn,
    turn_added,
)
from worlds.builders.store_builders import OpenStore
from worlds.checks.same import assert_same_fields
from worlds.faults.breaking_proxy import breaking_proxy
from worlds.parts.submission_service import request
from worlds.servers.postgresql_server import PASSWORD, PostgresqlServer

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from actors.environment.rendering import BreakReason
from actors.types import FinishReason, Outcome, VersionSpan
from service.intake.session import (
    LimitReached,
    LimitRefusal,
    SessionClaimed,
    SessionEnded,
    SessionOpened,
    SessionStatus,
    SessionTurn,
    StoredSession,
    TurnAdded,
    TurnMarked,
)
from service.intake.submission import RolloutRequest, Status, SubmissionView
from service.store import tables
from service.store.errors import LeaseLost, StoreError
from service.store.place import schema_name
from service.store.run_store import RunStore
from service.store.sessions import SessionStore
from service.store.submissions import SubmissionStore, packed

# PostgreSQL stores no NUL in texts, and an HTTP header cannot contain one.
_WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
_TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.dictionaries(
    _TEXT,
    st.recursive(
        st.none() | st.booleans() | st.integers() | _FLOATS | _TEXT,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXT, inner, max_size=2),
        max_leaves=4,
    ),
    max_size=2,
)
_CALLS = st.builds(ToolCall, name=_TEXT, arguments=_JSON, id=_TEXT)
_REPLIES = st.builds(
    Message,
    role=st.just(Role.ASSISTANT),
    content=_TEXT,
    tool_calls=st.lists(_CALLS, max_size=2).map(tuple),
    reasoning=st.none() | _TEXT,
)
_MESSAGES = st.builds(
    Message, role=st.just(Role.TOOL), content=_TEXT, name=st.none() | _TEXT, tool_call_id=_TEXT
)
_TOOLS = st.builds(
    ToolSchema,
    name=_TEXT,
    description=_TEXT,
    parameters=_TEXT.map(lambda name: {"properties": {name: {"type": ["string", "null"]}}}),
)
_LENGTHS = st.integers(0, 3)


def _ids() -> st.SearchStrategy[Any]:
    return arrays(np.int32, _LENGTHS)


_TURNS = st.builds(
    SessionTurn,
    number=st.just(0),
    parent=st.none() | st.integers(0, 9),
    tools=st.lists(_TOOLS, max_size=2).map(tuple),
    new_messages=st.lists(_MESSAGES | _REPLIES, max_size=2).map(tuple),
    reply=_REPLIES,
    extends_parent=st.booleans(),
    new_token_ids=_ids(),
    sampled_token_ids=_ids(),
    logprobs=arrays(np.float32, _LENGTHS, elements=st.floats(width=32)),
    version_spans=st.lists(
        st.builds(VersionSpan, version=st.integers(0, 9), start=_LENGTHS, end=_LENGTHS), max_size=2
    ).map(tuple),
    finish_reason=st.sampled_from(FinishReason),
    num_inserted=_LENGTHS,
    break_reason=st.none() | st.sampled_from(BreakReason),
    is_malformed=st.booleans(),
    is_auxiliary=st.booleans(),
    is_instructed=st.booleans(),
    is_unseen=st.booleans(),
    expert_indices=st.none()
    | arrays(st.sampled_from([np.uint8, np.int16]), st.tuples(_LENGTHS, _LENGTHS, _LENGTHS)),
    cache_salt=_WORDS,
    replica=_WORDS,
    request_id=_WORDS,
    request_digest=_WORDS,
    idempotency_key=_WORDS,
    created_at=_FLOATS,
)


def begun(store: RunStore, *names: str) -> tuple[SessionStore, int]:
    """Return a session store with submissions of two sessions each, and the current term."""
    term = store.acquire_lease(owner="elsewhere:1").term
    SubmissionStore(store).add([packed(session_request(name)) for name in names], term=term)
    return SessionStore(store), term


def loaded(sessions: SessionStore, session_id: str) -> StoredSession:
    found = sessions.load(session_id)
    assert found is not None
    return found[0]


def turns_of(sessions: SessionStore, session_id: str) -> list[int]:
    found = sessions.load(session_id)
    assert found is not None
    return [turn.number for turn in found[1]]


def num_rows(store: RunStore) -> tuple[int, int]:
    """Return the numbers of stored sessions and turns."""
    queries = [
        select(func.count()).select_from(table) for table in (tables.sessions, tables.session_turns)
    ]
    first, second = store.read(lambda it: [it.scalar(query) or 0 for query in queries])
    return first, second


def ended(name: str) -> SubmissionView:
    return SubmissionView(
        id=name, position=1, status=Status.TRAINED, num_ahead=0, rollouts=(),
        environment="session", batch="", accepted_at=1.0,
    )  # fmt: skip


def test_every_field_of_a_turn_has_a_column() -> None:
    names = {column.name for column in tables.session_turns.columns}
    assert names == {field.name for field in fields(SessionTurn)} | {"session_id", "term"}


@settings(max_examples=25, suppress_health_check=[*HealthCheck])
@given(drawn=st.lists(_TURNS, min_size=1, max_size=4))
def test_turns_are_read_as_written_and_are_read_only(
    tmp_path: Path, opened: OpenStore, drawn: list[SessionTurn]
) -> None:
    store = opened(tmp_path)
    term = store.acquire_lease(owner="elsewhere:1").term
    name = f"prompt-{term}"
    SubmissionStore(store).add([packed(session_request(name))], term=term)
    sessions = SessionStore(store)
    turns = [replace(turn, number=number) for number, turn in enumerate(drawn)]
    sessions.apply([TurnAdded(session_id=f"{name}-1", turn=turn) for turn in turns], term=term)
    found = sessions.load(f"{name}-1")
    assert found is not None
    for got, expected in zip(found[1], turns, strict=True):
        assert_same_fields(got, expected)
        # Equality of messages ignores the arguments of calls, so compare them here.
        assert got.reply.call_texts == expected.reply.call_texts
        columns = (got.new_token_ids, got.sampled_token_ids, got.logprobs, got.expert_indices)
        assert not any(column.flags.writeable for column in columns if column is not None)
    store.close()


def test_sessions_are_created_with_their_submission_and_found_by_either_id(
    tmp_path: Path, opened: OpenStore
) -> None:
    store = opened(tmp_path)
    sessions, term = begun(store, "a", "b")
    SubmissionStore(store).add([packed(request("plain"))], term=term)
    first, second = sessions.of_submission("b")
    assert (first.id, first.submission_id, first.member) == ("b-0", "b", 0)
    assert first.spec == SPEC
    assert (first.keys.agent, second.keys.reward) == ("key-agent-0", "key-reward-1")
    assert first.created_at > 0 and first.opened_at is None and first.end is None
    assert sessions.find(["b-1", "b-2", "plain-0"]) == {"b-1": second}
    assert sessions.of_submission("plain") == () and sessions.load("b-2") is None
    assert sessions.load("b-0") == (first, ())


def test_a_repeated_submission_of_sessions_needs_the_same_key_and_request() -> None:
    plain, asked = session_request("a"), session_request("a")
    assert asked.sessions is not None
    other_default = replace(asked.sessions, spec=replace(SPEC, ttl_s=1.0))
    named = replace(asked.sessions, asked={"ttl_s": 7200.0})

    def digest(sessions: Any, samples: int | None = 2) -> str:
        return RolloutRequest.of(
            plain.task, asked_samples=samples, default_samples=2, sessions=sessions
        ).digest

    assert digest(other_default) == digest(asked.sessions) == plain.digest
    others = [digest(named), digest(None), session_request("a", key="other").digest]
    assert len({plain.digest, *others}) == 4
    with pytest.raises(ValueError, match="submission a: got keys of 2 sessions, expected 3"):
        digest(asked.sessions, samples=3)


def test_changes_are_stored_in_order_and_late_ones_are_returned(
    tmp_path: Path, opened: OpenStore
) -> None:
    sessions, term = begun(opened(tmp_path), "a", "b")
    pending = session_end(reward=None, reward_until=1_795_000_200.0)
    changes = [
        SessionOpened(session_id="a-0", opened_at=5.0),
        SessionOpened(session_id="a-0", opened_at=6.0),
        turn_added("a-0", 0),
        turn_added("a-0", 1, request_id="another"),
        TurnMarked(session_id="a-0", number=1, is_unseen=True),
        turn_added("nowhere-0"),
    ]
    assert sessions.apply(changes, term=term) == {5}
    found = sessions.load("a-0")
    assert found is not None and found[0].opened_at == 5.0
    assert [(turn.number, turn.is_unseen) for turn in found[1]] == [(0, False), (1, True)]
    # This is a later transaction with a finish between two turns.
    changes = [
        SessionOpened(session_id="a-0", opened_at=7.0),
        TurnMarked(session_id="a-0", number=1, is_unseen=False),
        TurnMarked(session_id="a-0", number=0, is_unseen=True),
        turn_added("a-0", 2),
        SessionEnded(session_id="a-0", end=pending),
        turn_added("a-0", 3),
        SessionClaimed(session_id="a-0", name="late", claimed_at=8.0),
        SessionEnded(session_id="a-1", end=session_end()),
        SessionEnded(session_id="a-1", end=session_end(reward=1.0)),
        SessionEnded(session_id="nowhere-0", end=session_end()),
    ]
    assert sessions.apply(changes, term=term) == {5, 6, 8, 9}
    found = sessions.load("a-0")
    assert found is not None and (found[0].opened_at, found[0].end) == (5.0, pending)
    assert [(turn.number, turn.is_unseen) for turn in found[1]] == [
        (0, True),
        (1, False),
        (2, False),
    ]
    assert loaded(sessions, "a-1").end == session_end()
    # The pending reward is stored once, even if it is sent again.
    given_later = [SessionEnded(session_id="a-0", end=session_end()) for _ in range(2)]
    other = SessionEnded(session_id="a-0", end=session_end(reward=0.0))
    assert sessions.apply([*given_later, other], term=term) == {2}
    assert sessions.apply([*given_later, other], term=term) == {2}
    assert loaded(sessions, "a-0").end == session_end()


def test_a_repeated_turn_is_stored_once_and_its_number_is_not_reused(
    tmp_path: Path, opened: OpenStore
) -> None:
    sessions, term = begun(opened(tmp_path), "a")
    changes = [turn_added("a-0", 0), turn_added("a-0", 1)]
    assert sessions.apply(changes, term=term) == frozenset()
    # Add a new turn, the same two again, and others that have numbers in use.
    again = [
        turn_added("a-0", 2),
        *changes,
        turn_added("a-0", 1, request_id="another"),
        turn_added("a-0", 2, created_at=1.0),
    ]
    assert sessions.apply(again, term=term) == {3, 4}
    found = sessions.load("a-0")
    assert found is not None and len(found[1]) == 3
    for number, turn in enumerate(found[1]):
        assert_same_fields(turn, session_turn(number))


def test_an_older_term_cannot_store_changes_and_a_newer_one_can(
    tmp_path: Path, opened: OpenStore
) -> None:
    sessions, term = begun(opened(tmp_path), "a")
    sessions.apply([turn_added("a-0", 0)], term=term)
    newer = opened(tmp_path)
    newer_term = newer.acquire_lease(owner="elsewhere:2").term
    for change in (turn_added("a-0", 1), turn_added("a-0", 0)):
        with pytest.raises(LeaseLost, match=r"taken over by elsewhere:2 \(term 2"):
            sessions.apply([change], term=term)
    SessionStore(newer).apply([turn_added("a-0", 1)], term=newer_term)
    assert turns_of(sessions, "a-0") == [0, 1]


def test_turns_are_removed_with_their_submission_and_ends_with_its_row(
    tmp_path: Path, opened: OpenStore
) -> None:
    store = opened(tmp_path)
    sessions, term = begun(store, "a", "b", "c", "d")
    submissions = SubmissionStore(store)
    for name in ("a", "b", "c", "d"):
        sessions.apply([turn_added(f"{name}-0")], term=term)
    end = session_end(outcome=Outcome.CANCELLED, status=SessionStatus.DISCARDED)
    submissions.cancel("a", term=term)
    assert num_rows(store) == (8, 3)
    # The gateway may receive the cancellation later than the client.
    late = [turn_added("a-0", 1), SessionEnded(session_id="a-0", end=end)]
    assert sessions.apply(late, term=term) == {0, 1}
    seen = loaded(sessions, "a-0").end
    assert seen is not None and seen.status is SessionStatus.DISCARDED
    assert seen.outcome is Outcome.CANCELLED and turns_of(sessions, "a-0") == []
    submissions.archive([ended("b")], [], term=term, keep=9, keep_entries=99)
    assert sessions.apply([turn_added("b-0", 1)], term=term) == {0}
    assert num_rows(store) == (8, 2) and turns_of(sessions, "c-0") == [0]
    # Of the ended submissions, only the newest is kept.
    submissions.archive([ended("c"), ended("a")], [], term=term, keep=1, keep_entries=99)
    assert sessions.find(["a-0", "b-1", "c-0", "d-0"]).keys() == {"c-0", "d-0"}
    assert num_rows(store) == (4, 1)
    assert sessions.apply([SessionEnded(session_id="b-0", end=end)], term=term) == {0}


def test_a_limit_refusal_is_read_as_written_and_in_its_older_form(tmp_path: Path) -> None:
    store = RunStore(f"sqlite:///{tmp_path / 'run.db'}")
    sessions, term = begun(store, "s")

    def cut_in_store(cut: str) -> LimitRefusal | None:
        with closing(sqlite3.connect(tmp_path / "run.db")) as connection:
            connection.execute("UPDATE sessions SET cut = ? WHERE id = 's-0'", (cut,))
            connection.commit()
        found = sessions.load("s-0")
        assert found is not None
        return found[0].limit_refusal

    for cut in (
        LimitRefusal(outcome=Outcome.TRUNCATED_CONTEXT, num_turns=12, follows=11),
        LimitRefusal(outcome=Outcome.MAX_TURNS, num_turns=0),
    ):
        sessions.apply([LimitReached(session_id="s-0", refusal=cut)], term=term)
        found = sessions.load("s-0")
        assert found is not None and found[0].limit_refusal == cut
    assert cut_in_store("max_turns") == LimitRefusal(outcome=Outcome.MAX_TURNS)
    for damaged in ("max_turns 1", "max_turns 1 x", "full 1 2"):
        with pytest.raises(StoreError, match="is damaged"):
            cut_in_store(damaged)
    store.close()


DAMAGES = {
    r"5 bytes are stored, expected a multiple of 4": "sampled_token_ids = x'0102030405'",
    r"a stored tuple\[.*Message, \.\.\.\] cannot be read": "new_messages = '[{]'",
    r"a stored Message cannot be read": 'reply = \'{"role": "nobody", "content": ""}\'',
    r"a stored FinishReason is not one of stop, ": "finish_reason = 'bored'",
    r"stored experts do not begin with type and shape": "expert_indices = x'07'",
    r"2 experts are stored, expected \[1, 1, 3\]": (
        "expert_indices = x'010100000001000000030000000102'"
    ),
}


def test_a_damaged_session_is_refused_completely(tmp_path: Path) -> None:
    store = RunStore(f"sqlite:///{tmp_path / 'run.db'}")
    sessions, term = begun(store, *(f"s{number}" for number in range(len(DAMAGES))))
    for number, (words, damage) in enumerate(DAMAGES.items()):
        session = f"s{number}-0"
        sessions.apply([turn_added(session)], term=term)
        with closing(sqlite3.connect(tmp_path / "run.db")) as connection:
            where = f"WHERE session_id = '{session}'"
            connection.execute(f"UPDATE session_turns SET {damage} {where}")
            connection.commit()
        with pytest.raises(StoreError, match=rf"run\.db is damaged \({words}"):
            sessions.load(session)
        assert sessions.find([session]).keys() == {session}
    store.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_changes_are_stored_once_if_their_commit_loses_its_connection(
    tmp_path: Path,
    postgresql_server: PostgresqlServer,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    with breaking_proxy(postgresql_server.port) as proxy:
        place = postgresql_server.store_url(schema_name(str(tmp_path)))
        store = RunStore(
            place.replace(f":{postgresql_server.port}/", f":{proxy.port}/") + "&sslmode=disable"
        )
        sessions, term = begun(store, "a")
        for number in range(3):
            proxy.arm(when=when)
            assert sessions.apply([turn_added("a-0", number)], term=term) == frozenset()
        assert proxy.num_broken == 3 and turns_of(sessions, "a-0") == [0, 1, 2]
        store.close()
