"""Tests that stored runs of earlier versions can be read and migrated without a loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect, select
from worlds.runs.stored_run import BEFORE, unpack_run

from actors.journal.files import list_files, read_step
from actors.trainer.checkpoint import read_manifest
from actors.types import Outcome
from service import VERSION
from service.access.keys import REWARD, digest_of, session_key
from service.gateway.tree import SessionTree
from service.inspect.reader import config_beside
from service.intake.session import SessionStatus
from service.launch.resume import find_faults, finished_step
from service.launch.run_dir import RunDir
from service.store import tables
from service.store.lineage import read_events, read_history
from service.store.read_only import ReadOnlyStore
from service.store.run_store import RunStore
from service.store.sessions import SessionStore
from service.store.submissions import SubmissionStore
from service.store.tables import RunKind
from service.store.uploads import UploadStore


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return unpack_run(tmp_path)


def test_a_stored_run_is_read_without_changing_it(run_dir: RunDir) -> None:
    before = run_dir.database_file.read_bytes()
    with run_dir.looked_into() as store:
        store.check()
        assert [record.step for record in read_history(store).steps] == [1, 2]
        assert len(read_events(store)) == 16
        assert store.kind() is RunKind.SERVE and store.live_owner() is None
    assert config_beside(run_dir).run.steps == 400
    assert finished_step(run_dir, steps=2) is None
    steps = []
    for found in list_files(run_dir.journal):
        with found.path.open("rb") as file:
            steps.append(read_step(file))
    assert [len(step.entries) for step in steps] == [4, 4]
    assert run_dir.database_file.read_bytes() == before


def test_a_stored_run_is_migrated_with_its_checkpoint_sessions_and_uploads(
    run_dir: RunDir,
) -> None:
    with closing(RunStore(run_dir.database_url, may_be_older=True)) as store:
        assert find_faults(run_dir.checkpoints, store.checkpoints()) == {}
        lease = store.acquire_lease(owner="a", kind=RunKind.SERVE, unless_held=True)
        assert lease.term == 2 and lease.parent is not None and lease.queue_snapshot is not None
        manifest = read_manifest(run_dir.checkpoints / lease.parent.directory)
        assert (manifest.step, manifest.version, manifest.term) == (2, 2, 1)

        sessions = SessionStore(store)
        for name, status in (("waiting-0", "finished"), ("waiting-1", "open")):
            found = sessions.load(name)
            assert found is not None
            stored, turns = found
            assert stored.status is SessionStatus(status)
            assert len(turns) == 3
            asked = [(each.stop_string, each.ignored, each.template_options) for each in turns]
            assert asked == [("", (), {})] * 3
            # These turns began with instructions, which new instructions replace as before.
            assert all(each.is_instructed for each in turns)
            # Keys that were derived from the session's name stay valid.
            assert stored.keys.reward == digest_of(session_key("", name, REWARD))
            tree = SessionTree(name)
            for turn in turns:
                tree.add(turn)
            assert sum(len(turn.sampled_token_ids) for turn in turns) > 0
        ended = sessions.load("waiting-0")
        assert ended is not None and ended[0].end is not None
        assert (ended[0].end.outcome, ended[0].end.reward) == (Outcome.COMPLETED, 0.0)

        upload = UploadStore(store).load("uploads", 0)
        assert upload is not None and upload.samples
        known = SubmissionStore(store).read()
        assert "waiting" in {each.id for each in known.submissions}
        assert {result.reward for result in known.results} == {0.0, 1.0}


def test_a_run_of_the_previous_version_is_migrated_with_its_checkpoint(tmp_path: Path) -> None:
    before = unpack_run(tmp_path / "before", BEFORE)
    with before.looked_into(any_format=True) as store:
        assert store.format_number() == 11
    with closing(RunStore(before.database_url, may_be_older=True)) as store:
        assert find_faults(before.checkpoints, store.checkpoints()) == {}
        lease = store.acquire_lease(owner="a", kind=RunKind.TRAIN, unless_held=True)
        assert lease.term == 2 and lease.parent is not None and lease.parent.step == 2
        assert [record.step for record in read_history(store).steps] == [1, 2]
        rows = store.read(lambda connection: connection.execute(select(tables.versions)).all())
        assert [tuple(row) for row in rows] == [(2, VERSION)]


def test_a_migrated_database_has_the_tables_of_a_new_one(run_dir: RunDir, tmp_path: Path) -> None:
    def shape(connection: Connection) -> dict[str, dict[str, tuple[str, bool]]]:
        looked = inspect(connection)
        return {
            name: {
                column["name"]: (str(column["type"]), column["nullable"])
                for column in looked.get_columns(name)
            }
            for name in looked.get_table_names()
        }

    def found(open_store: Callable[[], ReadOnlyStore]) -> dict[str, dict[str, tuple[str, bool]]]:
        with closing(open_store()) as store:
            return store.read(shape)

    with closing(RunStore(run_dir.database_url, may_be_older=True)) as store:
        store.move_forward()
    moved = found(lambda: ReadOnlyStore(run_dir.database_file))
    assert moved == found(lambda: RunStore(f"sqlite:///{tmp_path / 'new.db'}"))
    assert set(tables.metadata.tables) <= moved.keys()
