"""A run that another process takes: the loser learns it, frees what it holds, and stays down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from worlds.runs.run_driver import START_S, STEP_S, running, small_config
from worlds.servers.postgresql_server import PASSWORD, PostgresqlServer

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

STEPS = {"steps": 4000, "evaluate_every": 1000, "checkpoint_every": 1}
# Engines and their cluster are ended in order, on a busy machine.
LET_GO_S = 90.0


# One of them is enough for each commit: they differ in the lease's row, which tests/store covers.
@pytest.mark.parametrize("storage", [pytest.param("sqlite", marks=pytest.mark.proof), "postgresql"])
def test_who_loses_the_run_says_who_has_it_and_lets_everything_go(
    tmp_path: Path,
    small_model: str,
    storage: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_config(
        tmp_path, small_model, run=STEPS, trainer={"num_ranks": 1}, algorithm={"max_lag": 0}
    )
    where: list[str] = []
    if storage == "postgresql":
        server: PostgresqlServer = request.getfixturevalue("postgresql_server")
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        where = ["--database-url", server.url]
    with running(config, tmp_path / "run", where) as loser:
        loser.wait_for_step(2, limit_s=START_S)
        with running(config, tmp_path / "run", ["--resume"]) as refused:
            assert refused.wait(limit_s=STEP_S) == 2
            assert "the run is held by" in refused.output.read_text()
        with running(config, tmp_path / "run", ["--resume", "--take-over"]) as winner:
            winner.wait_for_log("term 2 continues", limit_s=START_S)
            assert loser.wait(limit_s=LET_GO_S) == 1
            assert loser.wait_until_gone(limit_s=LET_GO_S) == []
            told = loser.output.read_text()
            assert re.search(r"taken over by \S+:\d+ \(term 2, since 20.* UTC\)", told), told
            assert "failed" not in told and "resume with --resume" not in told
            winner.advance(2, limit_s=START_S)
            assert winner.history().num_terms == 2
            winner.interrupt()
            assert winner.wait(limit_s=STEP_S) == 130
    left = sorted(path.name for path in (tmp_path / "run").glob("rayloom.db*"))
    assert left == (["rayloom.db"] if storage == "sqlite" else [])
    assert PASSWORD not in loser.log() + told
