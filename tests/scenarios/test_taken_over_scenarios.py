"""Test of a run that another process takes over: the loser reports it, frees all and ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from worlds.runs.run_driver import START_S, STEP_S, running, small_config
from worlds.servers.postgresql_server import PASSWORD, PostgresqlServer

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

STEPS = {"steps": 4000, "evaluate_every": 1000, "checkpoint_every": 1}
# The loser ends its engines and their cluster in order, on a busy machine.
RELEASED_S = 90.0


# One is enough for each commit: they differ in the row of the lease, which tests/store covers.
@pytest.mark.parametrize("storage", [pytest.param("sqlite", marks=pytest.mark.proof), "postgresql"])
def test_process_that_loses_its_run_names_the_new_owner_and_frees_everything(
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
            assert loser.wait(limit_s=RELEASED_S) == 1
            assert loser.wait_until_gone(limit_s=RELEASED_S) == []
            printed = loser.output.read_text()
            assert re.search(r"taken over by \S+:\d+ \(term 2, since 20.* UTC\)", printed), printed
            assert "failed" not in printed and "resume with --resume" not in printed
            winner.advance(2, limit_s=START_S)
            assert winner.history().num_terms == 2
            winner.interrupt()
            assert winner.wait(limit_s=STEP_S) == 130
    left = sorted(path.name for path in (tmp_path / "run").glob("rayloom.db*"))
    assert left == (["rayloom.db"] if storage == "sqlite" else [])
    assert PASSWORD not in loser.log() + printed
