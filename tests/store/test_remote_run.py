"""Tests of checkpoints at a remote address: copies, retention, refusals and restoring a run."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest
from worlds.builders.record_builders import step_record
from worlds.builders.store_builders import commit
from worlds.runs.run_driver import write_checkpoint
from worlds.runs.stored_run import BEFORE, unpack_run

from actors.deadline import poll
from actors.metrics import Metrics
from service.config.file import ConfigError, load_config, parse_config
from service.config.sections import RunSettings
from service.launch.remote_run import (
    NotThisRun,
    check_address,
    fetch_missing,
    fetch_run,
    upload_next,
)
from service.launch.resume import newest_usable
from service.launch.run_dir import RunDir, check_resumable
from service.remote_files import MARKER, RemoteDirectory, RemoteError
from service.run.checkpoint_uploads import CheckpointUploads
from service.store.lineage import read_history
from service.store.place import StoreOptions
from service.store.run_store import RunStore

OWN = "step-000002-t1"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("RAYLOOM_DATABASE_URL", raising=False)
    return f"file://{tmp_path}/remote"


def train(run_dir: RunDir, *steps: int, rewards: tuple[float, ...] = ()) -> None:
    """Begin a term that commits a checkpoint of each step."""
    with closing(RunStore(run_dir.database_url, may_be_older=True)) as store:
        term = store.acquire_lease(owner="b", directory=str(run_dir.path)).term
        for number, step in enumerate(steps):
            if rewards:
                record = step_record(
                    step, reward_mean=rewards[number], scaled_reward_mean=rewards[number]
                )
                store.add_step(record, term=term, new_events=())
            directory = write_checkpoint(run_dir, step, term).name
            commit(store, term=term, step=step, directory=directory)


def upload_all(run_dir: RunDir, url: str, *, keep: int = 2, keep_best: int = 0) -> list[int]:
    """Return the steps of the checkpoints that were copied, in order."""
    steps = []
    while done := upload_next(run_dir, url, keep=keep, keep_best=keep_best):
        steps.append(done.commit.step)
    return steps


def test_a_run_is_restored_from_its_address_to_an_empty_directory(tmp_path: Path, url: str) -> None:
    run_dir = unpack_run(tmp_path, BEFORE)
    run_dir.secret_file.write_text("secret")
    assert upload_all(run_dir, url) == [2] and upload_all(run_dir, url) == []
    config = load_config(run_dir.config_file)
    place = tmp_path / "elsewhere"
    place.mkdir()
    fetch_run(url, RunDir(path=place), StoreOptions(), tell=pytest.fail)
    fetched = RunDir(path=place)
    check_resumable(fetched, config)
    for file in (run_dir.checkpoints / OWN).iterdir():
        assert (fetched.checkpoints / OWN / file.name).read_bytes() == file.read_bytes()
    assert fetched.secret_file.read_text() == "secret" and fetched.tiny_model.is_dir()
    with closing(RunStore(fetched.database_url)) as store:
        assert [record.step for record in read_history(store).steps] == [1, 2]
    # The restored run continues and copies its checkpoints to the same address.
    train(fetched, 3)
    assert upload_all(fetched, url) == [3]
    # From now on, the old directory may not copy checkpoints.
    train(run_dir, 3)
    with pytest.raises(NotThisRun, match="another process has continued this run elsewhere"):
        upload_next(run_dir, url, keep=2, keep_best=0)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_newest_checkpoint_is_copied_first_and_kept_and_best_ones_stay(
    tmp_path: Path, url: str
) -> None:
    run_dir, remote = unpack_run(tmp_path, BEFORE), RemoteDirectory(url)
    train(run_dir, 3, 4, 5, rewards=(0.9, 0.1, 0.2))
    seen: list[str] = []
    done = upload_next(run_dir, url, keep=1, keep_best=1, begin=seen.append)
    assert done is not None and done.commit.step == 5 and seen == ["step-000005-t2"]
    assert upload_all(run_dir, url, keep=1, keep_best=1) == [3]
    assert remote.children() == ["step-000003-t2", "step-000005-t2"]
    train(run_dir, 6, 7, rewards=(0.3, 0.4))
    # An upload was interrupted, and its checkpoint is no longer kept.
    leftover = tmp_path / "remote" / "step-000006-t3"
    leftover.mkdir()
    (leftover / "part").write_text("part")
    newest = run_dir.checkpoints / "step-000007-t3"
    aside = newest.rename(run_dir.path / "aside")
    assert upload_all(run_dir, url, keep=1, keep_best=1) == []
    # No copy is removed until the newest checkpoint is copied.
    assert "step-000005-t2" in remote.children()
    aside.rename(newest)
    assert upload_all(run_dir, url, keep=1, keep_best=1) == [7]
    assert remote.children() == ["step-000003-t2", "step-000007-t3"]


def test_a_damaged_copy_is_skipped_with_a_notice(tmp_path: Path, url: str) -> None:
    run_dir = unpack_run(tmp_path, BEFORE)
    train(run_dir, 3)
    assert upload_all(run_dir, url) == [3, 2]
    [newest] = (tmp_path / "remote").glob("step-000003-*/checkpoints/*/manifest.json")
    newest.write_bytes(newest.read_bytes()[:-1] + b" ")
    said: list[str] = []
    place = RunDir(path=tmp_path / "elsewhere")
    fetch_run(url, place, StoreOptions(), tell=said.append)
    assert len(said) == 1 and "something has changed the object" in said[0]
    with place.looked_into() as store:
        used = newest_usable(place.checkpoints, store.checkpoints())
    assert used is not None and used.step == 2
    # The user may name a copy.
    fetch_run(f"{url}/{OWN}", RunDir(path=tmp_path / "third"), StoreOptions(), tell=pytest.fail)


def test_an_address_of_another_run_and_one_without_a_copy_are_refused(
    tmp_path: Path, url: str
) -> None:
    config = parse_config(
        {
            "model": {"tiny": {}},
            "tasks": {"environment": "guessing"},
            "run": {"checkpoint_url": url},
        },
        source="test",
    )
    check_address(config)
    foreign = tmp_path / "remote" / "step-000001-t1"
    foreign.mkdir(parents=True)
    with pytest.raises(
        ConfigError, match="has step-000001-t1, which this run has not written, but"
    ):
        check_address(config)
    foreign.rmdir()
    empty = RunDir(path=tmp_path / "empty")
    with pytest.raises(ConfigError, match="has no complete copy of a checkpoint, expected"):
        fetch_missing(config, empty, tell=lambda text: None)
    assert not empty.path.exists()
    run_dir = unpack_run(tmp_path, BEFORE)
    upload_all(run_dir, url)
    check_address(config, run_dir)
    with pytest.raises(ConfigError, match="expected one address for each run: choose another"):
        check_address(config)
    # A copy without its marker does not count.
    (tmp_path / "remote" / OWN / MARKER).unlink()
    with pytest.raises(ConfigError, match="has no complete copy of a checkpoint, expected"):
        fetch_missing(config, empty, tell=lambda text: None)
    assert upload_all(run_dir, url) == [2]
    said: list[str] = []
    fetch_missing(config, empty, tell=said.append)
    assert "has no run; reading its copy" in said[0] and f"newest {OWN}" in said[1]
    # A directory that has a run is not changed.
    fetch_missing(config, empty, tell=pytest.fail)


def test_a_run_continues_its_interrupted_first_upload(tmp_path: Path, url: str) -> None:
    run_dir = unpack_run(tmp_path, BEFORE)
    config = parse_config(
        {
            "model": {"tiny": {}},
            "tasks": {"environment": "guessing"},
            "run": {"checkpoint_url": url},
        },
        source="test",
    )
    # A file in place of a directory interrupts the upload after some files.
    blocking = tmp_path / "remote" / OWN / "checkpoints"
    blocking.parent.mkdir(parents=True)
    blocking.write_text("")
    with pytest.raises(RemoteError, match="cannot be written"):
        upload_next(run_dir, url, keep=2, keep_best=0)
    blocking.unlink()
    unfinished = RemoteDirectory(url).child(OWN).read_unfinished()
    assert RemoteDirectory(url).child(OWN).read() is None
    assert unfinished is not None
    # Neither another run nor a new one may use the address.
    with pytest.raises(ConfigError, match=f"has {OWN}, which this run has not written, but"):
        check_address(config)
    (tmp_path / "other").mkdir()
    with closing(RunStore(RunDir(path=tmp_path / "other").database_url)) as store:
        store.acquire_lease(owner="b", directory=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=f"has {OWN}, which this run has not written, but"):
        check_address(config, RunDir(path=tmp_path / "other"))
    check_address(config, run_dir)
    assert upload_all(run_dir, url) == [2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("s3://a b", "run.checkpoint_url"),
        ("/path", "run.checkpoint_url"),
        ("s3://key:secret@bucket/x", "run.checkpoint_url"),
        ("no-such-scheme://x", "expected a protocol that fsspec knows, such as s3, gs, file"),
        ("file://tmp/x", "whose path is relative; expected an absolute one: file:///tmp/x$"),
        ("file://localhost/tmp/x", "expected an absolute one: file:///tmp/x$"),
        ("file://~/x", f"expected an absolute one: file://{Path.home()}/x$"),
        ("file://~no-such-user/x", "expected an absolute one: file:///DIRECTORY$"),
        ("file://./x", f"expected an absolute one: file://{Path.cwd()}/x$"),
        ("s3:///bucket/x", "names no bucket; expected .*, such as s3://bucket/x$"),
        ("ftp://127.0.0.1:1/x", "cannot be opened .* install what ftp needs, correct the address"),
        ("github://x/y", "cannot be opened .* a protocol that needs no more than an address"),
        ("memory://run", "got memory://run, which is lost when the process ends; expected"),
    ],
)
def test_an_unusable_address_is_refused(value: str, message: str) -> None:
    tree = {
        "model": {"tiny": {}},
        "tasks": {"environment": "guessing"},
        "run": {"checkpoint_url": value},
    }
    with pytest.raises(ConfigError, match=message):
        check_address(parse_config(tree, source="test"))


@pytest.mark.proof
@pytest.mark.slow
def test_a_failed_upload_is_reported_and_repeated(tmp_path: Path, url: str) -> None:
    run_dir, metrics = unpack_run(tmp_path, BEFORE), Metrics()
    # A file with the name of the directory makes uploads fail until the first notice.
    blocking = tmp_path / "remote"
    blocking.write_text("")
    notices: list[str] = []

    def notice(text: str) -> None:
        blocking.unlink()
        notices.append(text)

    uploads = CheckpointUploads(run_dir, RunSettings(checkpoint_url=url), metrics=metrics)
    uploads.begin_term(notice)
    copy = RemoteDirectory(url).child(OWN)
    assert poll(lambda: copy.read() if notices else None, limit_s=60) is not None
    uploads.close(writes_rest=True)
    assert len(notices) == 1 and notices[0].endswith("; trying again")
    values = {
        sample.name: sample.value
        for families in metrics.read()
        for family in families
        for sample in family.samples
    }
    assert values["rayloom_checkpoint_upload_failures_total"] == 1
    assert values["rayloom_checkpoint_uploaded_step"] == 2
    assert values["rayloom_checkpoint_upload_seconds_count"] == 1
    assert values["rayloom_checkpoint_upload_seconds_sum"] > 0
    marker = copy.read()
    assert marker is not None
    assert values["rayloom_checkpoint_upload_bytes_total"] == marker.num_bytes
    assert "rayloom_checkpoint_upload_waiting_timestamp_seconds" not in values


@pytest.mark.proof
@pytest.mark.slow
def test_the_waiting_time_of_uploads_begins_with_the_first_uncopied_checkpoint(
    tmp_path: Path, url: str
) -> None:
    run_dir, metrics = unpack_run(tmp_path, BEFORE), Metrics()
    blocking = tmp_path / "remote"
    blocking.write_text("")
    notices: list[str] = []
    uploads = CheckpointUploads(run_dir, RunSettings(checkpoint_url=url), metrics=metrics)
    before = time.time()
    uploads.begin_term(notices.append)
    assert poll(lambda: notices or None, limit_s=60)
    first = waiting_since(metrics)
    assert first is not None and before <= first <= time.time()
    uploads.wake()
    assert waiting_since(metrics) == first
    blocking.unlink()
    assert poll(lambda: True if waiting_since(metrics) is None else None, limit_s=60)
    uploads.close(writes_rest=True)
    assert waiting_since(metrics) is None


def waiting_since(metrics: Metrics) -> float | None:
    name = "rayloom_checkpoint_upload_waiting_timestamp_seconds"
    samples = (
        sample for families in metrics.read() for family in families for sample in family.samples
    )
    return next((sample.value for sample in samples if sample.name == name), None)


def test_a_run_stops_copying_if_its_address_has_copies_of_another_run(
    tmp_path: Path, url: str
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = (unpack_run(tmp_path / name, BEFORE) for name in ("one", "two"))
    for run_dir in (one, two):
        train(run_dir, 3)
    upload_all(one, url)
    notices: list[str] = []
    uploads = CheckpointUploads(two, RunSettings(checkpoint_url=url), metrics=Metrics())
    uploads.begin_term(notices.append)
    uploads.close(writes_rest=True)
    assert len(notices) == 1 and notices[0].endswith("this run copies no more")
