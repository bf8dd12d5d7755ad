"""Tests of resuming and exporting a run: moved, finished, damaged or of another format."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from sqlalchemy import update
from worlds.builders.journal_builders import group_of, step_of, written
from worlds.builders.record_builders import evaluation_record, step_record
from worlds.builders.session_builders import session_request, turn_added
from worlds.builders.store_builders import commit, write_under_way
from worlds.faults.mounts import fill, make_read_only, small_disk
from worlds.runs.run_driver import ROOT, SMALL, small_config, write_checkpoint

from actors.trainer.checkpoint import MANIFEST, claim
from service.cli.artifacts import checkpoint_of, export_checkpoint
from service.cli.inspect import InspectRequest, run_inspect
from service.cli.outlet import Stages
from service.cli.train import EXIT_OK, run_training
from service.config.file import ConfigError, load_config
from service.config.trial import Trial
from service.launch.resume import (
    KEPT_SKIPPED,
    fallback_notice,
    find_faults,
    finished_step,
    kept_commits,
    named_checkpoint,
    newest_usable,
    prune_directories,
)
from service.launch.run_dir import RunDir, check_resumable
from service.launch.signals import StopSignals
from service.store import tables
from service.store.errors import StoreError
from service.store.place import StoreOptions
from service.store.retention import forget
from service.store.run_store import RunStore
from service.store.sessions import SessionStore
from service.store.submissions import SubmissionStore, packed


def make_run(path: Path, *, steps: tuple[int, ...] = (1, 2, 3)) -> RunDir:
    """Create the directory of a run with committed checkpoints."""
    place = RunDir(path=path)
    path.mkdir()
    place.config_file.write_text(yaml.safe_dump(SMALL))
    store = RunStore(place.database_url)
    store.acquire_lease(owner="a")
    for step in steps:
        directory = write_checkpoint(place, step)
        commit(store, term=1, step=step, directory=directory.name)
    store.close()
    return place


def test_the_temperature_cannot_change_while_stored_turns_wait(tmp_path: Path) -> None:
    place = make_run(tmp_path / "run")
    own = load_config(place.config_file)
    temperature = own.rollouts.temperature
    changed = replace(own, rollouts=replace(own.rollouts, temperature=temperature / 2))
    check_resumable(place, changed)
    store = RunStore(place.database_url)
    term = store.acquire_lease(owner="b").term
    SubmissionStore(store).add([packed(session_request("a"))], term=term)
    SessionStore(store).apply([turn_added("a-0"), turn_added("a-0", 1)], term=term)
    store.close()
    check_resumable(place, own)
    expected = (
        rf"--resume .*run: rollouts\.temperature is {temperature / 2:g}, the run has "
        rf"{temperature:g}; expected the same while 2 stored turns"
    )
    with pytest.raises(ConfigError, match=expected):
        check_resumable(place, changed)


GO_ON = """
import sys
from pathlib import Path
from service.run.start import SupervisorWatcher
from service.config.file import load_config
from service.launch.run_dir import RunDir, prepared_run
from service.run.supervisor import Supervisor
from service.run.term import Term
from service.store.place import StoreOptions

config, run_dir = load_config(Path(sys.argv[1])), RunDir(path=Path(sys.argv[2]))
with prepared_run(config, run_dir, is_local=True, store=StoreOptions()) as model:
    print(model)
print(*sorted({"torch", "vllm", "matplotlib"} & sys.modules.keys()))
"""


def names(place: RunDir) -> list[str]:
    return sorted(path.name for path in place.checkpoints.glob("step-*"))


def resume(place: RunDir, config_in: Path | None = None, **sections: dict[str, object]) -> int:
    config = load_config(small_config(config_in or place.path.parent, **sections))
    return run_training(
        config,
        StopSignals(),
        Stages("testing"),
        resume=place.path,
        store=StoreOptions(),
        trial=Trial(),
    )


def prune(checkpoints: Path, store: RunStore, term: int) -> None:
    if kept := kept_commits(checkpoints, store, term=term, keep=2):
        prune_directories(checkpoints, kept)


def test_a_run_has_one_path_whatever_its_spelling(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert RunDir(path=tmp_path / "link") == RunDir(path=tmp_path / "x" / ".." / "run")


def test_pruning_under_another_spelling_keeps_the_newest(tmp_path: Path) -> None:
    place = make_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(place.path)
    store = RunStore(place.database_url)
    term = store.acquire_lease(owner="b").term
    write_checkpoint(place, 4, term)
    commit(store, term=term, step=4, directory="step-000004-t2")
    prune(tmp_path / "link" / "checkpoints", store, term)
    assert names(place) == ["step-000003-t1", "step-000004-t2"]


def test_nothing_is_pruned_before_a_commit_or_if_all_kept_checkpoints_are_missing(
    tmp_path: Path,
) -> None:
    place = make_run(tmp_path / "run")
    store = RunStore(place.database_url)
    term = store.acquire_lease(owner="b").term
    prune(place.checkpoints, store, term)
    assert len(names(place)) == 3
    for step in (4, 5):
        commit(store, term=term, step=step, directory=f"elsewhere-{step}")
    prune(place.checkpoints, store, term)
    assert len(names(place)) == 3


def test_an_interrupted_prune_is_finished_and_newer_directories_are_kept(
    tmp_path: Path,
) -> None:
    place = make_run(tmp_path / "run")
    store = RunStore(place.database_url)
    # Leave the directory as a killed rmtree does: without the manifest, with a shard.
    (place.checkpoints / "step-000001-t1" / MANIFEST).unlink()
    (place.checkpoints / "step-000001-t1" / "rank-0.pt").touch()
    write_checkpoint(place, 9)
    # A term that begins while this one prunes continues from step 3.
    (place.checkpoints / "step-000003-t2").mkdir()
    prune(place.checkpoints, store, 1)
    kept = ["step-000002-t1", "step-000003-t1", "step-000003-t2", "step-000009-t1"]
    assert names(place) == kept


def test_the_inputs_of_refused_updates_are_bounded(tmp_path: Path) -> None:
    place = make_run(tmp_path / "run")
    skipped = place.checkpoints / "skipped"
    skipped.mkdir()
    for number in range(KEPT_SKIPPED + 5):
        path = skipped / f"step-{number:06d}-rank-0.npz"
        path.touch()
        os.utime(path, (number, number))
    prune(place.checkpoints, RunStore(place.database_url), 1)
    kept = sorted(path.name for path in skipped.iterdir())
    assert len(kept) == KEPT_SKIPPED and kept[0] == "step-000005-rank-0.npz"


def test_the_newest_readable_checkpoint_is_used_and_damaged_ones_are_named(
    tmp_path: Path,
) -> None:
    place = make_run(tmp_path / "run", steps=(2, 4, 6, 8))
    (place.checkpoints / "step-000006-t1" / MANIFEST).write_text("{")
    (place.checkpoints / "step-000008-t1" / MANIFEST).unlink()
    (place.checkpoints / "step-000008-t1").rmdir()
    commits = RunStore(place.database_url).checkpoints()
    faults = find_faults(place.checkpoints, commits)
    assert list(faults) == ["step-000008-t1", "step-000006-t1"]
    used = newest_usable(place.checkpoints, commits)
    assert used is not None and used.step == 4
    told = fallback_notice(faults, commits[0], used)
    assert "step-000008-t1 does not exist" in told
    assert "going back to step-000004-t1, steps 5 to 8 are trained again" in told


def test_a_checkpoint_can_be_named_by_its_directory_or_step(tmp_path: Path) -> None:
    place = make_run(tmp_path / "run", steps=(2, 4))
    for name in ("2", "step-000002-t1"):
        assert named_checkpoint(place, name).step == 2
    with pytest.raises(ConfigError, match=r"checkpoint 3: .*: step-000004-t1, step-000002"):
        named_checkpoint(place, "3")
    (place.checkpoints / "step-000002-t1" / MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match=r"--checkpoint 2: .*its manifest.json cannot be read"):
        named_checkpoint(place, "2")
    with pytest.raises(ConfigError, match=r"--checkpoint 2: .*it has none"):
        named_checkpoint(make_run(tmp_path / "new", steps=()), "2")


@pytest.mark.parametrize(
    ("evaluations", "rewards", "best"),
    [
        # Ranked by the evaluation of the step, whatever the training reward.
        ({2: 0.3, 4: 0.9, 6: 0.5, 8: 0.1}, {2: 1.0, 4: 0.0}, [4, 6]),
        # Without an evaluation ranked by the training reward; among equals the newer is better.
        ({}, {2: 0.7, 4: 0.2, 6: 0.7, 8: 0.1}, [2, 6]),
        # Steps with an evaluation are better than those without one.
        ({4: 0.1}, {2: 0.9, 4: 0.2, 6: 0.8, 8: 0.3}, [2, 4]),
        ({2: None, 4: None}, {}, []),
    ],
)
def test_the_best_checkpoints_are_kept_with_the_newest(
    tmp_path: Path,
    evaluations: dict[int, float | None],
    rewards: dict[int, float],
    best: list[int],
) -> None:
    place = make_run(tmp_path / "run", steps=())
    store = RunStore(place.database_url)
    term = store.acquire_lease(owner="b").term
    for step in (2, 4, 6, 8):
        if step in evaluations:
            store.add_evaluation(evaluation_record(step, reward=evaluations[step]), term=term)
        # Evaluations that an operator requested, or of another set, do not count.
        of_others = evaluation_record(step, reward=5.0 - step)
        store.add_evaluation(replace(of_others, is_scheduled=False), term=term)
        store.add_evaluation(replace(of_others, name="hard"), term=term)
        reward = rewards.get(step)
        record = step_record(step, scaled_reward_mean=reward, reward_mean=reward)
        store.add_step(record, term=term, new_events=[])
        commit(store, term=term, step=step, directory=write_checkpoint(place, step, term).name)
    kept = kept_commits(place.checkpoints, store, term=term, keep=1, keep_best=2)
    assert [commit.step for commit in kept] == sorted({8, *best}, reverse=True)
    prune_directories(place.checkpoints, kept)
    forget(
        store,
        term=term,
        kept=kept,
        journal_steps=0,
        max_policy_age=1,
        keep_checkpoints=1,
    )
    assert names(place) == [f"step-{step:06d}-t{term}" for step in sorted({8, *best})]
    assert [each.step for each in store.checkpoints()] == [each.step for each in kept]
    oldest = named_checkpoint(place, str(kept[-1].step))
    assert store.acquire_lease(owner="c", returns_to=oldest.directory).parent == oldest


def test_a_checkpoint_from_before_a_collapse_is_kept_with_the_newest(tmp_path: Path) -> None:
    place = make_run(tmp_path / "run", steps=())
    store = RunStore(place.database_url)
    term = store.acquire_lease(owner="b").term
    for step in range(5, 65, 5):
        commit(store, term=term, step=step, directory=write_checkpoint(place, step, term).name)

    def kept(collapsed_since: int | None) -> list[int]:
        commits = kept_commits(
            place.checkpoints, store, term=term, keep=2, collapsed_since=collapsed_since
        )
        return [each.step for each in commits]

    assert kept(None) == [60, 55, 45, 40]
    assert kept(38) == [60, 55, 25]
    assert kept(3) == [60, 55, 5]


def test_a_run_without_readable_checkpoints_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    place = make_run(tmp_path / "run")
    for manifest in place.checkpoints.glob(f"*/{MANIFEST}"):
        manifest.unlink()
    with pytest.raises(ConfigError, match=r"none of the run's 3 committed .*step-000003-t1"):
        resume(place)
    assert not place.log_file.exists()
    with pytest.raises(ConfigError, match="none of the run's 3 committed checkpoints"):
        export_checkpoint(place.path, tmp_path / "out")


def test_a_finished_run_is_reported_as_done_without_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_run(tmp_path / "run")
    place.summary_file.write_text('{"steps": 3}')
    assert resume(place, run={"steps": 3}) == EXIT_OK
    assert "all 3 steps are done already" in capsys.readouterr().out
    assert finished_step(place, steps=4) is None
    # A run whose last step is not in its report has not finished.
    place.summary_file.write_text('{"steps": 2}')
    assert finished_step(place, steps=3) is None


def test_a_run_on_a_disk_without_space_or_write_access_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", kib=2048):
        place = make_run(tmp_path / "disk" / "run")
        place.summary_file.write_text('{"steps": 3}')
        cut_off = make_run(tmp_path / "disk" / "cut-off")
        copied = make_run(tmp_path / "copied")
        store = RunStore(copied.database_url)
        store.acquire_lease(owner="killed")
        for file in copied.path.glob("rayloom.db*"):
            if not file.name.endswith("-shm"):
                shutil.copy(file, cut_off.path)
        store.close()
        fill(tmp_path / "disk" / "filler")
        with pytest.raises(ConfigError, match=r"\(No space left on device\); .*: free space"):
            resume(place, tmp_path)
        (tmp_path / "disk" / "filler").unlink()
        make_read_only(tmp_path / "disk")
        with pytest.raises(ConfigError, match=r"\(Read-only file system\); .*: free space"):
            resume(place, tmp_path)
        with pytest.raises(ConfigError, match=rf"the directory {cut_off.path} cannot be written"):
            check_resumable(cut_off, load_config(small_config(tmp_path)))
        # A finished run has nothing to write.
        assert resume(place, tmp_path, run={"steps": 3}) == EXIT_OK
        assert "all 3 steps are done already" in capsys.readouterr().out


def test_a_broken_configuration_or_database_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    place = make_run(tmp_path / "run")
    config = load_config(small_config(tmp_path))
    whole = place.database_file.read_bytes()
    check_resumable(place, config)
    for damaged in (whole[:5000], b"\1" * 5000, whole[:4096] + b"\xff" * (len(whole) - 4096)):
        place.database_file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"rayloom\.db (cannot be|is damaged)"):
            check_resumable(place, config)
    place.database_file.write_bytes(b"")
    claim(place.checkpoints, 2)
    with pytest.raises(ConfigError, match=r"is empty, but a run has written .*/step-0"):
        check_resumable(place, config)
    for directory in place.checkpoints.glob("step-*"):
        shutil.rmtree(directory)
    with pytest.raises(ConfigError, match=r"is empty, but a run has written .*/\.term;"):
        check_resumable(place, config)
    place = make_run(tmp_path / "another")
    for text in ("run: [", "", "- 1", "run: {steps: no}"):
        place.config_file.write_text(text)
        with pytest.raises(ConfigError, match="own configuration cannot be used") as refusal:
            check_resumable(place, config)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups_per_step": 3}, "groups_per_step is 3, the run has 4; expected the same"),
        ({"groups_per_step": 8}, "groups_per_step is 8, the run has 4; expected the same"),
        ({"max_lag": 1}, "max_lag is 1, the run has 2; expected at least as many"),
        ({"min_group_size": 3}, "min_group_size is 3, the run has 2; expected at most as many"),
    ],
)
def test_settings_that_stored_groups_depend_on_cannot_change(
    tmp_path: Path, change: dict[str, int], words: str
) -> None:
    place = make_run(tmp_path / "run")
    own = {"groups_per_step": 4, "group_size": 4, "max_lag": 2, "min_group_size": 2}
    place.config_file.write_text(yaml.safe_dump({**SMALL, "algorithm": own}))
    changed = load_config(small_config(tmp_path, algorithm={**own, **change}))
    with pytest.raises(ConfigError, match=words) as refusal:
        check_resumable(place, changed)
    assert "use the run's own configuration" in str(refusal.value)


def test_settings_that_no_stored_data_depend_on_may_change(tmp_path: Path) -> None:
    place = make_run(tmp_path / "run")
    changed = small_config(
        tmp_path,
        run={"steps": 9},
        algorithm={"group_size": 8, "max_lag": 1, "window_groups": 2},
        trainer={"num_ranks": 1, "learning_rate": 1e-4},
        inference={"num_replicas": 2},
    )
    check_resumable(place, load_config(changed))


def test_a_run_of_another_format_is_refused_in_one_sentence(tmp_path: Path) -> None:
    place = make_run(tmp_path / "run")
    place.config_file.write_text("key_of_another_version: 1\n")
    written(place.path, step_of([group_of(0, [1, 0])]))
    store = RunStore(place.database_url)
    with write_under_way(store) as connection:
        connection.execute(update(tables.formats).values(number=1))
    store.close()
    config = load_config(small_config(tmp_path))
    for command in (
        lambda: check_resumable(place, config),
        lambda: run_inspect(InspectRequest(target=str(place.path))),
    ):
        with pytest.raises(ConfigError, match=r"was written in format 1 by Rayloom [\d.]+, this"):
            command()


@pytest.mark.parametrize("number", [1, 8, tables.FORMAT - 1, tables.FORMAT + 1])
def test_export_finds_the_checkpoint_in_a_database_of_any_format(
    tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_run(tmp_path / "run")
    # This checkpoint is complete, but not committed.
    write_checkpoint(place, 4)
    store = RunStore(place.database_url)
    with write_under_way(store) as connection:
        connection.execute(update(tables.formats).values(number=number))
        connection.execute(tables.keys.delete())
    store.close()
    before = place.database_file.read_bytes()
    assert checkpoint_of(place.path, command="export").name == "step-000003-t1"
    assert capsys.readouterr().err == ""
    with sqlite3.connect(place.database_file) as changed:
        changed.execute("ALTER TABLE leases DROP COLUMN is_return")
    assert checkpoint_of(place.path, command="export").name == "step-000004-t1"
    assert "another format" in (said := capsys.readouterr().err) and "step-000004-t1" in said
    with sqlite3.connect(place.database_file) as changed:
        changed.execute(f"UPDATE format SET number={tables.FORMAT}")
    with pytest.raises(ConfigError, match=r"export: .*; or name one of the checkpoints in"):
        checkpoint_of(place.path, command="export")
    assert len(before) == place.database_file.stat().st_size


def test_an_export_from_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="which is not a run or checkpoint"):
            export_checkpoint(place, tmp_path / "out")
    (tmp_path / "rayloom.db").write_bytes(b"\1" * 5000)
    with pytest.raises(ConfigError, match="cannot be read"):
        export_checkpoint(tmp_path, tmp_path / "out")


def test_export_uses_the_newest_complete_checkpoint_if_the_database_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_run(tmp_path / "run")
    place.database_file.write_bytes(b"")
    assert checkpoint_of(place.path, command="export").name == "step-000003-t1"
    assert "is empty; took step-000003-t1, the newest complete" in capsys.readouterr().err
    shutil.rmtree(place.checkpoints)
    with pytest.raises(ConfigError, match="has no committed checkpoint yet"):
        checkpoint_of(place.path, command="export")


def test_newest_usable_is_none_without_commits(tmp_path: Path) -> None:
    place = make_run(tmp_path / "run", steps=())
    commits = RunStore(place.database_url).checkpoints()
    assert newest_usable(place.checkpoints, commits) is None
    with pytest.raises(StoreError, match="cannot be opened"):
        RunStore(f"sqlite:///{tmp_path / 'missing' / 'rayloom.db'}")


@pytest.mark.proof
@pytest.mark.slow
def test_a_run_is_resumed_without_torch_in_the_command_and_the_supervisor(
    tmp_path: Path, model: str
) -> None:
    place = make_run(tmp_path / "run")
    shutil.copytree(model, place.tiny_model)
    done = subprocess.run(
        [sys.executable, "-c", GO_ON, str(small_config(tmp_path)), str(place.path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The run has its own model, although the configuration has other settings for it.
    assert done.stdout.splitlines() == [str(place.tiny_model), ""]
