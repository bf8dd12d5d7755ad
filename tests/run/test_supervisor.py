"""How a run ends for its reader: the first error counts, and who lost the lease lets go."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds.run_driver import small_config
from worlds.store_builders import commit

from service.cli.train import EXIT_FAILED, _report_loss
from service.config.file import load_config
from service.launch.run_dir import RunDir
from service.run.status import Phase
from service.run.supervisor import Cursor, Supervisor
from service.store.run_store import LeaseLost, RunStore, StoreError


@pytest.fixture
def place(tmp_path: Path) -> RunDir:
    """A run directory without a configuration."""
    (tmp_path / "run").mkdir()
    return RunDir(path=tmp_path / "run")


@pytest.fixture
def supervisor(place: RunDir, tiny_models: dict[bool, str]) -> Iterator[Supervisor]:
    """One that has started nothing yet."""
    log = logging.getLogger("rayloom")
    config = load_config(small_config(place.path.parent))
    yield Supervisor(config, place, model=tiny_models[True], run_id="rayloom-test")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = True


async def test_a_report_that_cannot_be_written_does_not_hide_how_the_run_ended(
    supervisor: Supervisor,
) -> None:
    # The report reads the configuration, which is not there.
    assert await supervisor._end(Phase.FAILED, "is the disk full?") is False
    status = await supervisor.status(Cursor())
    assert status.exit_reason == "is the disk full?"
    assert "no report was written to" in status.notices[-1]
    supervisor._metrics_server.shutdown()
    supervisor._metrics_server.server_close()


async def test_a_run_without_a_usable_checkpoint_ends_with_that_sentence(
    supervisor: Supervisor, place: RunDir
) -> None:
    store = RunStore(place.database_url)
    commit(store, term=store.acquire_lease(owner="a").term, step=3, directory="step-000003-e1")
    store.close()
    with pytest.raises(StoreError, match="none of the run's 1 checkpoints can be used"):
        await supervisor.run()
    assert "step-000003-e1" in str((await supervisor.status(Cursor())).exit_reason)


async def test_a_supervisor_renews_its_lease_until_its_end(
    supervisor: Supervisor, place: RunDir
) -> None:
    lease = supervisor._take_lease()
    supervisor._recorder.begin_epoch(lease)
    store = RunStore(place.database_url)
    owner = store.live_owner(now=time.time())
    assert owner is not None and owner.name.endswith(f":{os.getpid()}")
    commit(store, term=lease.term, step=1, directory="step-000001-e1")
    with pytest.raises(StoreError):
        await supervisor.run()
    assert store.live_owner(now=time.time()) is None
    store.close()


def test_who_lost_the_run_to_another_process_is_not_told_to_take_it_back(
    place: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _report_loss(LeaseLost("term 3 has taken over"), place) == EXIT_FAILED
    told = capsys.readouterr().err
    assert "another process holds the run now" in told and "--resume" not in told
