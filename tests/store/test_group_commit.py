"""Tests of group commits: turns of all sessions are durable before clients see them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from worlds.agents.session_writer import NUM_SESSIONS
from worlds.builders.session_builders import (
    session_end,
    session_request,
    session_turn,
    turn_added,
)
from worlds.builders.store_builders import OpenStore
from worlds.checks.same import assert_same_fields
from worlds.faults.breaking_proxy import breaking_proxy
from worlds.servers.postgresql_server import PASSWORD, PostgresqlServer

from actors.deadline import within
from service.gateway.commits import MAX_CHANGES, PAUSE_S, GroupCommit, StoreAway, TooLate
from service.intake.session import SessionEnded, TurnMarked
from service.store.errors import LeaseLost, StoreError
from service.store.place import schema_name
from service.store.run_store import RunStore
from service.store.sessions import SessionStore
from service.store.submissions import SubmissionStore, packed

REPOSITORY = Path(__file__).parents[2]


def begun(
    store: RunStore, *, hold_s: float = 10.0, num: int = 4
) -> tuple[GroupCommit, SessionStore]:
    """Return a group commit and its session store with the sessions a-0, a-1, …"""
    term = store.acquire_lease(owner="elsewhere:1").term
    SubmissionStore(store).add([packed(session_request("a", num_samples=num))], term=term)
    sessions = SessionStore(store)
    return GroupCommit(sessions, term=term, hold_s=hold_s), sessions


def stored(sessions: SessionStore, session: str = "a-0") -> list[tuple[int, bool]]:
    """Return the number and `is_unseen` of each stored turn of a session."""
    found = sessions.load(session)
    assert found is not None
    return [(turn.number, turn.is_unseen) for turn in found[1]]


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    with closing(sqlite3.connect(directory / "run.db", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


async def test_concurrent_changes_share_a_transaction_and_keep_their_order(
    tmp_path: Path, opened: OpenStore
) -> None:
    commits, sessions = begun(opened(tmp_path), num=100)

    async def play(session: str) -> None:
        for number in range(3):
            if number:
                seen = TurnMarked(session_id=session, number=number - 1, is_unseen=False)
                commits.add(seen)
            await commits.commit(turn_added(session, number))

    await play("a-0")
    assert (commits.num_commits, commits.num_changes) == (3, 5)
    await asyncio.gather(*(play(f"a-{member}") for member in range(1, 100)))
    # Some changes may arrive during a transaction and need another one.
    assert commits.num_commits <= 3 + 6 and commits.num_changes == 500
    for member in range(100):
        found = sessions.load(f"a-{member}")
        assert found is not None
        assert [turn.number for turn in found[1]] == [0, 1, 2]
    # These are more changes than fit into one transaction, but their order is kept.
    for _ in range(MAX_CHANGES):
        commits.add(TurnMarked(session_id="a-0", number=0, is_unseen=False))
    before = commits.num_commits
    await commits.commit(turn_added("a-0", 3))
    assert commits.num_commits == before + 2


async def test_another_writer_can_write_between_the_commits(tmp_path: Path) -> None:
    store = RunStore(f"sqlite:///{tmp_path / 'run.db'}")
    commits, _ = begun(store)
    term = store.newest_term()
    supervisor = RunStore(f"sqlite:///{tmp_path / 'run.db'}")
    is_over = False

    async def play() -> None:
        while not is_over:
            await commits.commit(TurnMarked(session_id="a-0", number=0, is_unseen=False))

    playing = asyncio.create_task(play())
    for _ in range(5):
        before = commits.num_commits
        while commits.num_commits < before + 3:
            await asyncio.sleep(PAUSE_S)
        await within(5.0, asyncio.to_thread(supervisor.renew, term))
    is_over = True
    await playing
    for each in (store, supervisor):
        each.close()


async def test_a_commit_waits_for_an_absent_database_and_then_fails(
    tmp_path: Path, postgresql_server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    with breaking_proxy(postgresql_server.port) as proxy:
        place = postgresql_server.store_url(schema_name(str(tmp_path)))
        store = RunStore(
            place.replace(f":{postgresql_server.port}/", f":{proxy.port}/") + "&sslmode=disable"
        )
        commits, sessions = begun(store, hold_s=0.8)
        proxy.cut()
        held = asyncio.create_task(commits.commit(turn_added("a-0", 0)))
        await asyncio.sleep(0.2)
        assert not held.done()
        proxy.mend()
        await held
        assert stored(sessions) == [(0, False)]
        # The database is absent for longer than a client may wait. The changes keep their order.
        proxy.cut()
        began = time.monotonic()
        answers = await asyncio.gather(
            commits.commit(turn_added("a-0", 1)),
            commits.commit(turn_added("a-1", 0)),
            return_exceptions=True,
        )
        assert 0.7 < time.monotonic() - began < 5.0
        assert all(isinstance(answer, StoreAway) for answer in answers)
        assert "has not answered for 0.8 s" in str(answers[0]) and commits.failure is None
        proxy.mend()
        # The commit is made, but its answer is lost, and the database cannot be queried in time.
        await commits.commit(turn_added("a-2", 0))
        proxy.arm(when="after")
        unconfirmed = asyncio.create_task(commits.commit(turn_added("a-2", 1)))
        while not proxy.num_broken:
            await asyncio.sleep(0.001)
        proxy.cut()
        with pytest.raises(StoreAway):
            await unconfirmed
        assert commits.failure is None
        proxy.mend()
        await commits.close()
        assert stored(sessions, "a-2") == [(0, False), (1, True)]
        # These turns were not shown, so they are marked as unseen; a retry may get them.
        assert stored(sessions) == [(0, False), (1, True)] and stored(sessions, "a-1") == [
            (0, True)
        ]
        store.close()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_turn_with_a_broken_commit_is_stored_once_and_shown(
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
        commits, sessions = begun(store)
        for number in range(2):
            proxy.arm(when=when)
            await commits.commit(turn_added("a-0", number))
        assert proxy.num_broken == 2 and stored(sessions) == [(0, False), (1, False)]
        await commits.close()
        store.close()


async def test_a_turn_of_a_cancelled_request_is_stored_as_unseen(tmp_path: Path) -> None:
    store = RunStore(f"sqlite:///{tmp_path / 'run.db'}")
    commits, sessions = begun(store)
    with locked(tmp_path):
        gone = asyncio.create_task(commits.commit(turn_added("a-0", 0)))
        stays = asyncio.create_task(commits.commit(turn_added("a-1", 0)))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.wait([gone])
        assert gone.cancelled() and not stays.done()
    await stays
    await commits.close()
    assert stored(sessions) == [(0, True)] and stored(sessions, "a-1") == [(0, False)]
    store.close()


async def test_only_a_change_after_the_end_is_refused_as_too_late(
    tmp_path: Path, opened: OpenStore
) -> None:
    commits, sessions = begun(opened(tmp_path))
    ending = SessionEnded(session_id="a-0", end=session_end())
    answers = await asyncio.gather(
        commits.commit(turn_added("a-0", 0)),
        commits.commit(ending),
        commits.commit(turn_added("a-0", 1)),
        commits.commit(turn_added("a-1", 0)),
        return_exceptions=True,
    )
    assert [each for each in answers if each is None] == [None] * 3
    assert isinstance(answers[2], TooLate)
    assert str(answers[2]).startswith("session a-0: TurnAdded came too late, expected a session")
    assert commits.num_changes == 3 and commits.failure is None
    assert stored(sessions) == [(0, False)] and stored(sessions, "a-1") == [(0, False)]


async def test_a_lost_lease_ends_the_group_commit_and_stores_nothing_more(
    tmp_path: Path, opened: OpenStore
) -> None:
    commits, sessions = begun(opened(tmp_path))
    await commits.commit(turn_added("a-0", 0))
    opened(tmp_path).acquire_lease(owner="elsewhere:2")
    # Both current commits and all later ones fail.
    answers = await asyncio.gather(
        commits.commit(turn_added("a-0", 1)),
        commits.commit(turn_added("a-1", 0)),
        return_exceptions=True,
    )
    assert all(isinstance(answer, LeaseLost) for answer in answers)
    assert isinstance(commits.failure, LeaseLost)
    with pytest.raises(LeaseLost, match="taken over by elsewhere:2"):
        await commits.commit(turn_added("a-0", 1))
    with pytest.raises(LeaseLost):
        commits.add(turn_added("a-0", 1))
    await commits.close()
    assert stored(sessions) == [(0, False)] and stored(sessions, "a-1") == []


async def test_a_store_error_ends_the_group_commit_and_stores_nothing_more(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    store = RunStore(f"sqlite:///{file}", patience_s=0.5)
    commits, sessions = begun(store)
    await commits.commit(turn_added("a-0", 0))
    file.rename(tmp_path / "moved.db")
    with pytest.raises(StoreError, match=r"run\.db was removed, moved or replaced"):
        await commits.commit(turn_added("a-0", 1))
    (tmp_path / "moved.db").rename(file)
    with pytest.raises(StoreError, match=r"run\.db was removed, moved or replaced"):
        await commits.commit(turn_added("a-0", 2))
    await commits.close()
    assert stored(sessions) == [(0, False)]
    store.close()


async def test_closing_stores_the_remaining_changes_and_accepts_no_more(
    tmp_path: Path, opened: OpenStore
) -> None:
    commits, sessions = begun(opened(tmp_path))
    commits.add(turn_added("a-0", 0))
    waiting = asyncio.create_task(commits.commit(turn_added("a-0", 1)))
    await asyncio.sleep(0)
    await commits.close()
    await waiting
    assert stored(sessions) == [(0, False), (1, False)] and commits.failure is None
    with pytest.raises(RuntimeError, match="is closed"):
        commits.add(turn_added("a-0", 2))
    await commits.close()


def test_every_confirmed_turn_is_complete_after_a_kill(
    tmp_path: Path, postgresql_server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests'}")
    places = [f"sqlite:///{tmp_path / 'run.db'}"]
    places.append(postgresql_server.store_url(schema_name(str(tmp_path))))
    chance = random.Random(14)
    stores = [RunStore(place) for place in places]
    for store in stores:
        begun(store, num=NUM_SESSIONS)
    confirmed: list[set[tuple[str, int]]] = [set() for _ in places]
    for _ in range(3):
        # Start the writers in parallel, because they mostly wait for the start of Python.
        writers = [start_writer(place) for place in places]
        for writer, lines in zip(writers, confirmed, strict=True):
            lines |= confirmed_until_killed(writer, chance)
        for store, lines in zip(stores, confirmed, strict=True):
            check_whole(SessionStore(store), lines)
    for store in stores:
        store.close()


def start_writer(place: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "worlds.agents.session_writer", place, "1"]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def confirmed_until_killed(
    writer: subprocess.Popen[str], chance: random.Random
) -> set[tuple[str, int]]:
    with writer:
        assert writer.stdout is not None
        first = [writer.stdout.readline() for _ in range(chance.randint(1, 60))]
        time.sleep(chance.uniform(0.0, 0.02))
        os.kill(writer.pid, signal.SIGKILL)
        lines = [*first, *writer.stdout]
    # The kill may have cut off the last line, which then does not count.
    words = [line.split() for line in lines if line.endswith("\n")]
    assert words
    return {(session, int(number)) for session, number in words}


def check_whole(sessions: SessionStore, confirmed: set[tuple[str, int]]) -> None:
    there: set[tuple[str, int]] = set()
    for member in range(NUM_SESSIONS):
        found = sessions.load(f"a-{member}")
        assert found is not None
        for number, turn in enumerate(found[1]):
            assert_same_fields(turn, session_turn(number))
            there.add((f"a-{member}", number))
    assert confirmed <= there
