"""Tests that runs of earlier versions are migrated through all formats, resumed and trained."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from worlds.agents.guessing_agent import SessionClient, play
from worlds.runs.run_checks import check_lineage
from worlds.runs.run_driver import START_S, STEP_S, running
from worlds.runs.stored_run import BEFORE, unpack_run

from service import VERSION
from service.access.keys import REWARD, session_key
from service.store import tables
from service.store.migrations import FIRST_FORMAT, STEPS

pytestmark = [pytest.mark.proof, pytest.mark.training, pytest.mark.timeout(900)]


def test_run_of_format_9_is_resumed_and_continues_to_train(tmp_path: Path) -> None:
    run_dir = unpack_run(tmp_path)
    before, copy = (
        tmp_path / "before.db",
        run_dir.database_file.with_name("rayloom.db.format-9.bak"),
    )
    shutil.copy(run_dir.database_file, before)
    assert (FIRST_FORMAT, list(STEPS)) == (9, list(range(9, tables.FORMAT)))
    with running(None, run_dir.path, ["--resume"], command="serve") as run:
        address = run.api_address(limit_s=START_S)
        with httpx.Client(base_url=address, timeout=START_S) as client:
            sessions = SessionClient(client)
            for name in ("new", "newer"):
                made = sessions.create(name, limit_s=START_S, num_sessions=2)
                # The run has a secret now, from which the keys are made.
                assert made[0]["reward_key"] != session_key("", made[0]["id"], REWARD)
                for index, session in enumerate(made):
                    play(session["env"], number=100)
                    sessions.finish(session, reward=float(index), limit_s=START_S)
            run.wait_for_step(3, limit_s=2 * STEP_S)
            # The open session's ten minutes are over; its finished sibling is unchanged.
            deadline = time.monotonic() + START_S
            while client.get("/api/v1/sessions/waiting-1").json()["status"] == "open":
                assert time.monotonic() < deadline, run.log()
                time.sleep(0.5)
            views = [client.get(f"/api/v1/sessions/waiting-{index}").json() for index in range(2)]
            assert [view["status"] for view in views] == ["finished", "expired"]
            assert (views[0]["reward"], views[1]["turns"]) == (0.0, 3)
        run.interrupt()
        assert run.wait(limit_s=START_S) == 130, run.log()
    columns = {"stop_string", "ignored", "template_options", "is_instructed"}
    assert stored(copy) == stored(before)
    assert stored(before)[0] == FIRST_FORMAT and not columns & stored(before)[1]
    assert stored(run_dir.database_file)[0] == tables.FORMAT
    assert columns <= stored(run_dir.database_file)[1]
    check_lineage(run.events())
    assert [record.step for record in run.history().steps][:3] == [1, 2, 3]


def test_run_of_the_previous_version_is_resumed_and_continues_to_train(tmp_path: Path) -> None:
    run_dir = unpack_run(tmp_path, BEFORE)
    with running(None, run_dir.path, ["--resume", "--set", "run.steps=4"]) as run:
        assert run.wait(limit_s=2 * START_S) == 0, run.log()
    check_lineage(run.events())
    assert [record.step for record in run.history().steps] == [1, 2, 3, 4]
    copy = run_dir.database_file.with_name("rayloom.db.format-11.bak")
    assert (stored(copy)[0], stored(run_dir.database_file)[0]) == (11, tables.FORMAT)
    with closing(sqlite3.connect(f"file:{run_dir.database_file}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT term, version FROM versions").fetchall()
    assert rows == [(2, VERSION)]


def stored(file: Path) -> tuple[int, set[str], int]:
    """Return a database's format, the columns of its session turns, and their number."""
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        (number,) = connection.execute("SELECT number FROM format").fetchone()
        rows = connection.execute("PRAGMA table_info(session_turns)").fetchall()
        (turns,) = connection.execute("SELECT count(*) FROM session_turns").fetchone()
    return number, {name for _, name, *_ in rows}, turns
