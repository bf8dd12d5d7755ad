"""Tests of which journal files belong to a run, and of missing and surplus files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.builders.journal_builders import group_of, step_of, written
from worlds.builders.store_builders import commit, write_under_way
from worlds.runs.audited_runs import audited, rows_of, stored

from actors.journal.files import JournalStep, file_name
from service.cli.inspect import InspectRequest, run_inspect
from service.config.file import ConfigError
from service.inspect.audit import Check, audit, describe
from service.inspect.reader import open_journal
from service.launch.run_dir import RunDir
from service.store.run_store import RunStore


def steps(*numbers: int, term: int = 1) -> list[JournalStep]:
    return [step_of([group_of(n, [1, 0])], number=n, term=term) for n in numbers]


def refusals(run_dir: Path) -> set[str]:
    """Return the errors of a list, of an audit and of an unknown id, which are all refused."""
    found = set()
    for request in (
        InspectRequest(target=str(run_dir)),
        InspectRequest(target=str(run_dir), audit=True),
        InspectRequest(target="g999999.0-0.a0", run=run_dir),
    ):
        with pytest.raises(ConfigError) as caught:
            run_inspect(request)
        found.add(str(caught.value))
    return found


@pytest.mark.parametrize("name", ["step-000002-term-0001.journal", "copy.journal"])
def test_a_file_is_recognised_by_its_content(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, *steps(2)) / "journal" / file_name(2, term=1)
    journal = open_journal(file.rename(file.with_name(name)))
    assert [file.step for file in journal.files] == [2] and audit(journal).is_clean


def test_the_journal_of_another_format_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "step-000001-term-0001.npz").touch()
    for text in refusals(tmp_path):
        assert "has no journal" in text and "another version of Rayloom wrote it" in text


def resumed(run_dir: Path) -> None:
    """Create a database whose second term resumed after step 2."""
    run_dir.mkdir(exist_ok=True)
    store = RunStore(RunDir(path=run_dir).database_url)
    store.acquire_lease(owner="first")
    commit(store, term=1, step=2)
    store.acquire_lease(owner="second")
    store.close()


def test_files_of_a_term_that_the_database_does_not_have_are_ignored(tmp_path: Path) -> None:
    resumed(tmp_path)
    written(tmp_path, *steps(1, 2), *steps(3, term=2), *steps(3, term=3))
    journal = open_journal(tmp_path)
    assert [(file.step, file.term) for file in journal.files] == [(1, 1), (2, 1), (3, 2)]
    assert journal.num_superseded == 1


def test_a_journal_without_a_surviving_file_is_refused(tmp_path: Path) -> None:
    resumed(tmp_path)
    written(tmp_path, *steps(3, 4))
    for text in refusals(tmp_path):
        assert "none of the 2 files" in text and "belongs to the run's lineage" in text


def test_an_empty_database_is_refused_and_stays_empty(tmp_path: Path) -> None:
    written(tmp_path, *steps(1))
    database = RunDir(path=tmp_path).database_file
    database.touch()
    for text in refusals(tmp_path):
        assert f"the database {database} is empty" in text
    assert database.stat().st_size == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "rayloom.db"]


@pytest.mark.parametrize("left", ["run.log", "checkpoints", "summary.json", "rayloom.db-wal"])
def test_a_run_without_its_database_is_refused(tmp_path: Path, left: str) -> None:
    written(tmp_path, *steps(1))
    (tmp_path / left).touch()
    for text in refusals(tmp_path):
        assert "rayloom.db is missing" in text and left in text
    assert not RunDir(path=tmp_path).database_file.exists()


def test_a_journal_that_was_copied_without_its_run_is_accepted(tmp_path: Path) -> None:
    result = audited(tmp_path, *steps(1))
    assert result.is_clean and Check.BEGUN in result.unchecked


def test_a_database_without_a_run_is_refused(tmp_path: Path) -> None:
    RunStore(RunDir(path=tmp_path).database_url).close()
    written(tmp_path, *steps(1))
    for text in refusals(tmp_path):
        assert "has no run, but" in text


def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    written(tmp_path, *steps(1))
    RunDir(path=tmp_path).database_file.write_bytes(b"no database" * 1000)
    for text in refusals(tmp_path):
        assert "cannot be read (file is not a database)" in text


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_the_audit_changes_no_file_of_the_run(tmp_path: Path) -> None:
    (step,) = steps(1)
    stored(tmp_path, rows_of(step))
    before = contents(tmp_path)
    assert audited(tmp_path, step).is_clean
    assert contents(tmp_path) == before


def test_a_live_run_is_read_completely_without_waiting_for_its_writer(tmp_path: Path) -> None:
    (first,) = steps(1)
    stored(tmp_path, rows_of(first))
    store = RunStore(RunDir(path=tmp_path).database_url)
    store.acquire_lease(owner="writer")
    # The rows are in the write-ahead log, and a second writer would wait here.
    with write_under_way(store):
        written(tmp_path, *steps(1, term=2))
        journal = open_journal(tmp_path)
    store.close()
    assert [(file.step, file.term) for file in journal.files] == [(1, 2)]


def test_a_killed_run_is_read_completely_and_not_changed(tmp_path: Path) -> None:
    (step,) = steps(1)
    killed, copy = tmp_path / "killed", tmp_path / "copy"
    stored(killed, rows_of(step))
    store = RunStore(RunDir(path=killed).database_url)
    lease = store.acquire_lease(owner="another")
    written(copy, *steps(1, term=lease.term))
    # As after a kill, the last writes are only in the write-ahead log.
    for name in ("rayloom.db", "rayloom.db-wal"):
        shutil.copy(killed / name, copy / name)
    store.close()
    before = contents(copy)
    journal = open_journal(copy)
    assert [(file.step, file.term) for file in journal.files] == [(1, lease.term)]
    after = contents(copy)
    assert before["rayloom.db-wal"] and {name: after[name] for name in before} == before


def with_config(run_dir: Path, *, steps: int, journal_steps: int) -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(
        "model: {tiny: {}}\ntasks: {environment: guessing}\n"
        f"run: {{steps: {steps}, journal_steps: {journal_steps}}}\n"
    )


@pytest.mark.parametrize(
    ("present", "keep_steps", "missing"),
    [
        ((1, 2, 3), 200, (4, 5)),
        ((2, 3, 4, 5), 200, (1,)),
        ((1, 2, 4, 5), 200, (3,)),
        ((4, 5), 2, ()),
        ((4,), 2, (5,)),
        ((5,), 2, (4,)),
        # The run wrote one step more than it recorded.
        ((4, 5, 6), 3, ()),
        # The configuration no longer keeps any file.
        ((2, 3), 0, ()),
    ],
)
def test_recorded_steps_that_should_have_a_file_are_noted(
    tmp_path: Path, present: Sequence[int], keep_steps: int, missing: tuple[int, ...]
) -> None:
    with_config(tmp_path, steps=9, journal_steps=keep_steps)
    stored(tmp_path, [], steps=(1, 2, 3, 4, 5))
    result = audited(tmp_path, *(step_of([], number=number) for number in present))
    assert result.missing_steps == missing and result.is_clean
    noted = [line for line in describe(result, limit=0) if "without a journal file" in line]
    assert len(noted) == bool(missing)


def test_without_a_configuration_only_gaps_are_noted(tmp_path: Path) -> None:
    stored(tmp_path, [], steps=(1, 2, 3, 4))
    result = audited(tmp_path, step_of([], number=2))
    assert result.missing_steps == () and result.is_clean


def test_up_to_two_unrecorded_steps_are_noted_and_further_ones_fail_the_audit(
    tmp_path: Path,
) -> None:
    stored(tmp_path, [], steps=(1,))
    result = audited(tmp_path, *(step_of([], number=number) for number in (1, 2, 3)))
    assert result.unrecorded_steps == (2, 3) and result.offences == ()
    assert "  note   2 steps not recorded by the run, so not counted: 2, 3" in describe(
        result, limit=0
    )
    (offence,) = audited(tmp_path, step_of([], number=4)).offences
    assert (offence.check, offence.subject) == (Check.BEGUN, "step 4")


def test_a_step_after_the_last_planned_one_fails_the_audit(tmp_path: Path) -> None:
    with_config(tmp_path, steps=1, journal_steps=9)
    stored(tmp_path, [], steps=(1,))
    (offence,) = audited(tmp_path, step_of([]), step_of([], number=2)).offences
    assert (offence.check, offence.subject) == (Check.BEGUN, "step 2")
    # This run had recorded more steps before its run.steps was lowered.
    more = tmp_path / "more"
    with_config(more, steps=1, journal_steps=9)
    stored(more, [], steps=(1, 2))
    assert audited(more, step_of([]), step_of([], number=2)).is_clean


def test_an_unreadable_configuration_skips_only_the_check_of_planned_steps(tmp_path: Path) -> None:
    stored(tmp_path, [], steps=(1,))
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe model")
    assert audited(tmp_path, step_of([])).is_clean
    written(tmp_path, *steps(1))
    assert run_inspect(InspectRequest(target="g000001.0-0.a0", run=tmp_path)) == 0


def test_control_characters_of_a_journal_are_escaped_in_every_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (step,) = steps(1)
    trajectory = replace(step.entries[0].trajectory, rollout_id="g1.0-0\x1b[2J\n", group_id="g\x07")
    wild = replace(step.entries[0], trajectory=trajectory, baseline_return=7.0, problem="\x1b[1m")
    written(tmp_path, replace(step, entries=(wild, *step.entries[1:])))
    for request in (
        InspectRequest(target=str(tmp_path)),
        InspectRequest(target=str(tmp_path), audit=True),
        InspectRequest(target="g1.0-0\x1b[2J\n", run=tmp_path),
    ):
        run_inspect(request)
        printed = capsys.readouterr().out
        assert "\x1b" not in printed and "\x07" not in printed
        assert "g1.0-0\\x1b[2J⏎.a0" in printed
