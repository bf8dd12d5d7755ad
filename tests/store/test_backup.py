"""Tests of backups: made of a held run and restored to a database of either kind."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from worlds.builders.store_builders import commit
from worlds.runs.stored_run import BEFORE, unpack_run
from worlds.servers.postgresql_server import PASSWORD, PostgresqlServer

from service.cli.artifacts import export_checkpoint, move
from service.config.file import ConfigError, load_config
from service.launch.backup import back_up, restore
from service.launch.run_dir import RunDir, check_resumable
from service.store.leases import own_name
from service.store.lineage import read_history
from service.store.place import StoreOptions
from service.store.run_store import RunStore


@pytest.fixture(params=["sqlite", "postgresql"])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StoreOptions:
    monkeypatch.delenv("RAYLOOM_DATABASE_URL", raising=False)
    if request.param == "sqlite":
        return StoreOptions()
    server: PostgresqlServer = request.getfixturevalue("postgresql_server")
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    return StoreOptions(database_url=server.url)


def test_a_run_is_restored_from_a_backup_made_while_a_process_held_it(
    tmp_path: Path, options: StoreOptions
) -> None:
    run_dir = unpack_run(tmp_path, BEFORE)
    run_dir.secret_file.write_text("secret")
    if options != StoreOptions():
        move(run_dir.path, options)
    with closing(RunStore(run_dir.database_url, may_be_older=True)) as store:
        term = store.acquire_lease(owner=own_name(), directory=str(run_dir.path)).term
        # This checkpoint is committed, but its directory is missing.
        commit(store, term=term, step=3, directory="step-000003-t9")
        said = back_up(run_dir, tmp_path / "backup")
        assert "1 checkpoints, newest step-000002-t1" in said
        commit(store, term=term, step=4, directory="step-000004-t9")
    shutil.rmtree(run_dir.path)
    restored = RunDir(path=tmp_path / "restored")
    assert "newest step-000002-t1" in restore(RunDir(path=tmp_path / "backup"), restored, options)
    assert restored.database_url.startswith("sqlite" if options == StoreOptions() else "postgresql")
    check_resumable(restored, load_config(restored.config_file))
    with closing(RunStore(restored.database_url)) as store:
        assert [each.step for each in store.checkpoints()] == [3, 2]
        assert [record.step for record in read_history(store).steps] == [1, 2]
        lease = store.acquire_lease(owner="b", unless_held=True, passed_over={"step-000003-t9"})
        assert lease.term == term + 1 and lease.parent is not None and lease.parent.step == 2
    assert restored.secret_file.read_text() == "secret" and restored.tiny_model.is_dir()
    assert len(list(restored.journal.iterdir())) == 2
    assert "step 2" in export_checkpoint(restored.path, tmp_path / "model")
    left = [each.name for each in tmp_path.iterdir() if each.name.endswith(".part")]
    assert left == []


def test_a_backup_without_a_readable_checkpoint_and_an_existing_directory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYLOOM_DATABASE_URL", raising=False)
    run_dir = unpack_run(tmp_path, BEFORE)
    with pytest.raises(ConfigError, match=r"backup: .* exists, expected a new directory"):
        back_up(run_dir, tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"backup: .* exists, expected a new directory"):
        back_up(run_dir, tmp_path / "dangling")
    with pytest.raises(ConfigError, match="which has no run"):
        back_up(RunDir(path=tmp_path), tmp_path / "backup")
    back_up(run_dir, tmp_path / "backup")
    [part] = (tmp_path / "backup").glob("checkpoints/*/*.distcp")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(ConfigError, match="has no checkpoint that can be read"):
        restore(RunDir(path=tmp_path / "backup"), RunDir(path=tmp_path / "new"), StoreOptions())
    with pytest.raises(ConfigError, match="expected a directory that `rayloom backup` wrote"):
        restore(RunDir(path=tmp_path / "no"), RunDir(path=tmp_path / "new"), StoreOptions())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["backup", "dangling", BEFORE]


def test_a_users_directory_with_the_name_of_an_unfinished_backup_is_kept(tmp_path: Path) -> None:
    run_dir = unpack_run(tmp_path, BEFORE)
    mine = tmp_path / "backup.part" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ConfigError, match=r"backup\.part contains mine\.txt"):
        back_up(run_dir, tmp_path / "backup")
    with pytest.raises(ConfigError, match=r"mine\.txt.part cannot be read or written \(Not a dir"):
        back_up(run_dir, mine / "mine.txt")
    assert mine.read_text() == "mine"
    # An interrupted backup leaves a file of this name.
    mine.rename(mine.with_name("rayloom.db.part"))
    assert "1 checkpoints" in back_up(run_dir, tmp_path / "backup")
    assert not mine.parent.exists()
