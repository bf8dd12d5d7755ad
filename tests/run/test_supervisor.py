"""Tests of the supervisor: its leases, its terms, and how it reports the end of a run."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from worlds.builders.queue_builders import end, fill, finalise_all, make_settings, take_all
from worlds.builders.record_builders import step_record
from worlds.builders.store_builders import commit
from worlds.runs.run_driver import small_config, write_checkpoint

from actors.deadline import ActorLost, within
from actors.trajectory_queue.messages import QueueSnapshot
from actors.trajectory_queue.state import QueueState
from service.cli.train import EXIT_FAILED, _report_loss
from service.config.file import load_config
from service.launch.run_dir import RunDir
from service.run.health import Cursor
from service.run.start import engine_settings, start_endpoint
from service.run.supervisor import Supervisor
from service.store.errors import LeaseLost, StoreError
from service.store.leases import RENEW_EVERY_S, Lease, own_name
from service.store.run_store import RunStore


@pytest.fixture
def place(tmp_path: Path) -> RunDir:
    """Return a run directory without a configuration."""
    (tmp_path / "run").mkdir()
    return RunDir(path=tmp_path / "run")


@pytest.fixture
def endpoint(place: RunDir, cluster: None) -> Iterator[Any]:
    config = load_config(small_config(place.path.parent))
    endpoint = start_endpoint(config, run_id="rayloom-test", place={})
    yield endpoint
    ray.kill(endpoint)


@pytest.fixture
def supervisor(place: RunDir, tiny_models: dict[bool, str], endpoint: Any) -> Iterator[Supervisor]:
    """Return a supervisor that has not started anything yet."""
    log = logging.getLogger("rayloom")
    config = load_config(small_config(place.path.parent))
    engines = engine_settings(config, model=tiny_models[True])
    yield Supervisor(config, place, engines=engines, run_id="rayloom-test", endpoint=endpoint)
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = True


def test_the_trainer_scores_at_the_temperature_of_the_sampling(tmp_path: Path) -> None:
    config = load_config(small_config(tmp_path), ["rollouts.temperature=0.7"])
    temperatures = config.step_settings().temperatures
    assert temperatures == dict.fromkeys(["guessing", "session", "uploaded"], 0.7)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_engines_reset_cached_prefixes_at_a_publish_if_there_is_no_lag(
    max_lag: int, tmp_path: Path, tiny_models: dict[bool, str]
) -> None:
    config = load_config(small_config(tmp_path), [f"algorithm.max_lag={max_lag}"])
    settings = engine_settings(config, model=tiny_models[True])
    assert settings.resets_prefix_cache == (max_lag == 0)


async def test_a_report_that_cannot_be_written_does_not_hide_how_the_run_ended(
    supervisor: Supervisor,
) -> None:
    # The report cannot be written, because there is no configuration to read.
    assert await supervisor._end("failed", "is the disk full?") is False
    status = await supervisor.status(Cursor())
    assert status.exit_reason == "is the disk full?"
    assert "no report was written to" in status.notices[-1]


async def test_a_run_without_a_usable_checkpoint_ends_with_that_reason(
    supervisor: Supervisor, place: RunDir
) -> None:
    store = RunStore(place.database_url)
    commit(store, term=store.acquire_lease(owner="a").term, step=3, directory="step-000003-t1")
    store.close()
    with pytest.raises(StoreError, match="none of the run's 1 checkpoints can be used"):
        await supervisor.run()
    assert "step-000003-t1" in str((await supervisor.status(Cursor())).exit_reason)


async def test_a_supervisor_goes_back_to_the_named_checkpoint_only_once(
    supervisor: Supervisor, place: RunDir
) -> None:
    store = RunStore(place.database_url)
    term = store.acquire_lease(owner="a").term
    for step in (3, 6):
        commit(store, term=term, step=step, directory=write_checkpoint(place, step).name)
    store.release(term)
    supervisor._returns_to = "step-000003-t1"
    lease = await supervisor._take_lease()
    assert lease.parent is not None and lease.parent.step == 3
    back, unchecked = (await supervisor.status(Cursor())).notices[-2:]
    assert back == "going back to step-000003-t1, as --checkpoint requests"
    assert "step-000003-t1 was written by an older version and has no digests" in unchecked
    await supervisor._recorder.begin_term(lease)
    commit(store, term=lease.term, step=5, directory=write_checkpoint(place, 5, lease.term).name)
    # The next term continues from the last commit of this one, without further notices.
    lease = await supervisor._take_lease()
    assert lease.parent is not None and lease.parent.step == 5
    notices = (await supervisor.status(Cursor())).notices
    assert notices.count(back) == notices.count(unchecked) == 1
    store.close()


async def test_a_supervisor_renews_its_lease_until_its_end(
    supervisor: Supervisor, place: RunDir
) -> None:
    lease = await supervisor._take_lease()
    await supervisor._recorder.begin_term(lease)
    store = RunStore(place.database_url)
    owner = store.live_owner()
    assert owner is not None and owner.name.endswith(f":{os.getpid()}")
    commit(store, term=lease.term, step=1, directory="step-000001-t1")
    with pytest.raises(StoreError):
        await supervisor.run()
    assert store.live_owner() is None
    store.close()


@pytest.mark.proof
@pytest.mark.slow
async def test_a_supervisor_detects_a_lost_lease_without_writing(
    supervisor: Supervisor, place: RunDir
) -> None:
    await supervisor._recorder.begin_term(await supervisor._take_lease())
    store = RunStore(place.database_url)
    store.acquire_lease(owner="elsewhere:7")
    with pytest.raises(LeaseLost, match=r"taken over by elsewhere:7 \(term 2, since "):
        await within(3 * RENEW_EVERY_S, supervisor._renew_forever())
    # It does not begin another term, even if the run is free again.
    store.release(2)
    with pytest.raises(LeaseLost, match="taken over by elsewhere:7"):
        await supervisor.run()
    status = await supervisor.status(Cursor())
    assert status.phase == "without its lease"
    assert "taken over by elsewhere:7" in str(status.exit_reason)
    [reason] = (await supervisor.readiness()).reasons
    assert "taken over by elsewhere:7" in reason
    assert not place.summary_file.exists() and store.newest_term() == 2
    store.close()


async def test_a_supervisor_can_wait_for_a_live_owner_and_then_take_the_run(
    supervisor: Supervisor, place: RunDir
) -> None:
    supervisor._when_held = "wait"
    store = RunStore(place.database_url)
    term = store.acquire_lease(owner=own_name()).term
    waiting = asyncio.create_task(supervisor._wait_for_lease())
    while not (await supervisor.status(Cursor())).phase_detail.startswith("waiting: the run is"):
        await asyncio.sleep(0.05)
        assert not waiting.done()
    assert store.newest_term() == term and not place.config_file.exists()
    store.release(term)
    lease = await within(3 * RENEW_EVERY_S, waiting)
    assert lease is not None and lease.term == term + 1
    assert place.config_file.exists()
    store.close()


async def test_a_run_stopped_during_its_start_reports_the_ledger_of_its_checkpoint(
    supervisor: Supervisor, place: RunDir
) -> None:
    queue = QueueState(make_settings(step=1, lag=0))
    fill(queue)
    for assignment in take_all(queue):
        end(queue, assignment)
    taken = queue.take_step()
    assert taken is not None
    finalise_all(queue, *taken)
    store = RunStore(place.database_url)
    term = store.acquire_lease(owner="a").term
    store.add_step(step_record(1), term=term, new_events=())
    directory = write_checkpoint(place, 1)
    store.commit_checkpoint(
        term=term,
        step=1,
        policy_version=1,
        directory=directory.name,
        queue_snapshot=queue.snapshot(),
        new_events=(),
        last_event_seq=-1,
    )
    store.close()
    await supervisor._recorder.begin_term(await supervisor._take_lease())
    place.config_file.write_text("{}")
    assert await supervisor._end("finished", "stopped after step 1 of 4")
    summary = json.loads(place.summary_file.read_text())
    assert summary["steps"] == 1
    assert (summary["ledger"]["admitted"], summary["ledger"]["trained"]) == (2, 2)


class Faulty(Supervisor):
    """A supervisor whose terms each commit the next of `commits`, if any, and then lose a part."""

    commits: list[int]

    async def _run_one_term(self) -> str:
        lease = await self._take_lease()
        await self._recorder.begin_term(lease)
        if self.commits and (step := self.commits.pop(0)):
            directory = write_checkpoint(self._run_dir, step, lease.term)
            snapshot = lease.queue_snapshot or QueueSnapshot()
            await self._recorder.checkpoint(
                step=step, version=step, directory=directory.name, snapshot=snapshot
            )
        raise ActorLost(f"term {lease.term} lost a part")


class Leisurely(Supervisor):
    """A supervisor that returns from the database a while after it has taken a lease."""

    async def _take_lease(self) -> Lease:
        lease = await super()._take_lease()
        await asyncio.sleep(0.2)
        return lease


async def test_a_supervisors_own_next_lease_does_not_count_as_a_loss(
    place: RunDir,
    tiny_models: dict[bool, str],
    endpoint: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.run.supervisor.RENEW_EVERY_S", 0.01)
    config = load_config(small_config(place.path.parent))
    engines = engine_settings(config, model=tiny_models[True])
    supervisor = Leisurely(config, place, engines=engines, run_id="rayloom-test", endpoint=endpoint)
    renewing = asyncio.create_task(supervisor._renew_forever())
    for term in (1, 2):
        lease = await supervisor._wait_for_lease()
        assert lease is not None and lease.term == term
        await asyncio.sleep(0.1)
        assert not renewing.done(), renewing.exception()
    renewing.cancel()


@pytest.mark.parametrize(
    ("commits", "terms"),
    # 0: no commit. To commit the same step again, after a damaged checkpoint, is not progress.
    [([], 2), ([1, 2, 3, 4], 5), ([1, 0, 2], 2), ([2, 2, 2], 2)],
)
async def test_a_later_checkpoint_resets_the_count_of_recoveries(
    place: RunDir, tiny_models: dict[bool, str], endpoint: Any, commits: list[int], terms: int
) -> None:
    config = load_config(small_config(place.path.parent), ["run.max_recoveries=1"])
    engines = engine_settings(config, model=tiny_models[True])
    supervisor = Faulty(config, place, engines=engines, run_id="rayloom-test", endpoint=endpoint)
    supervisor.commits = list(commits)
    with pytest.raises(ActorLost, match=f"term {terms} lost a part"):
        await supervisor._run_terms()


def test_the_message_about_a_lost_lease_does_not_suggest_resume(
    place: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _report_loss(LeaseLost("term 3 has taken over"), place) == EXIT_FAILED
    told = capsys.readouterr().err
    assert "another process holds the run now" in told and "--resume" not in told
