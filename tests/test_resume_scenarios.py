"""A run that was moved and whose newest checkpoint is damaged: it goes on from the one before."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_driver import running, small_config
from test_run_scenarios import START_S, STEP_S, check_finished

from service.commands.export import export_checkpoint

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(900)]


def test_a_moved_run_with_a_damaged_checkpoint_goes_on_from_the_one_before(tmp_path: Path) -> None:
    config = small_config(tmp_path, trainer={"num_ranks": 1})
    with running(config, tmp_path / "before") as run:
        assert run.wait(limit_s=START_S + 4 * STEP_S) == 0, run.log()
    moved = (tmp_path / "before").rename(tmp_path / "after")
    shard = next((moved / "checkpoints" / "step-000004-e1").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:500])
    (tmp_path / "link").symlink_to(moved)

    config = small_config(tmp_path, trainer={"num_ranks": 1}, run={"steps": 5})
    with running(config, tmp_path / "link", ["--resume"]) as run:
        assert run.wait(limit_s=START_S + 4 * STEP_S) == 0, run.log()
        check_finished(run, steps=5)
        assert "going back to step-000002-e1, steps 3 to 4 are trained again" in run.log()
        history = run.history()
    assert history.num_epochs == 3
    names = sorted(path.name for path in (moved / "checkpoints").glob("step-*"))
    assert names == ["step-000004-e3", "step-000005-e3"]
    assert "step 5" in export_checkpoint(moved, tmp_path / "exported")
