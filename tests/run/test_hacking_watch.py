"""Tests of the audit of a running training: findings are reported once, kept and resumed."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import RayActorError
from worlds.builders.record_builders import step_record
from worlds.builders.store_builders import commit
from worlds.faults.planted_hacks import planted_hacks
from worlds.parts.hacking_world import Course, ScriptedRun, Size

from actors.journal.files import JournalStep, file_name, write_file
from service.cli.inspect import InspectRequest, run_inspect
from service.config.file import ConfigError
from service.hacking import read
from service.hacking.read import FILE, Line, append, read_kept
from service.hacking.shadow import Verdicts
from service.launch.run_dir import RunDir
from service.run.hacking_watch import Ask, HackingWatch
from service.store.run_store import RunStore
from service.telemetry.records import Finding

NUM_STEPS = 20
ONSET = 15


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[JournalStep]:
    """Return the steps of a guessing game whose grader passes malformed answers from step 15 on."""
    hacks = planted_hacks(tmp_path_factory.mktemp("hacks"))
    (planted,) = (each for each in hacks if each.name == "malformed that scores")
    size = Size(num_steps=NUM_STEPS, groups_per_step=4, group_size=4)
    course = replace(Course.of(1, num_steps=NUM_STEPS, has_hack=True), onset=ONSET, ramp=2)
    return list(ScriptedRun(planted, course, seed=1, size=size).steps())


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    place = RunDir(path=tmp_path / "run")
    place.path.mkdir()
    store = RunStore(place.database_url)
    store.acquire_lease(owner="test")
    store.close()
    return place


def watch_steps(
    run_dir: RunDir, steps: Sequence[JournalStep], *, ask: Ask | None = None, term: int = 1
) -> tuple[list[str], tuple[Finding, ...]]:
    """Watch the steps; return the notices, and the findings at the end."""
    told: list[str] = []
    watch = HackingWatch(run_dir, ask=ask)
    watch.begin_term(term, told.append)
    for step in steps:
        write_file(run_dir.journal, replace(step, term=term))
        watch.stored(term, step.step)
    watch.close(limit_s=60)
    return told, watch.findings


def step_in(path: str) -> int:
    return int(Path(path).name.split("-")[1])


def begin_next_term(run_dir: RunDir, *, from_step: int) -> int:
    """Begin the next term, which continues from a checkpoint of the first, and return it."""
    store = RunStore(run_dir.database_url)
    store.add_step(step_record(from_step), term=1, new_events=())
    commit(store, term=1, step=from_step, directory="there")
    term = store.acquire_lease(owner="test").term
    store.close()
    return term


def test_a_finding_is_reported_once_and_kept(run_dir: RunDir, steps: list[JournalStep]) -> None:
    told, found = watch_steps(run_dir, steps)
    (text,) = (each for each in told if "malformed or empty" in each)
    (finding,) = (each for each in found if each.kind == "malformed_paid")
    assert finding.onset >= ONSET and finding.step < NUM_STEPS
    assert text.startswith(f"audit: {finding.text}; for example {', '.join(finding.examples)}; ")
    assert text.endswith("correct the reward if they exploit it (docs/hacking.md)")
    assert len((run_dir.path / FILE).read_text().splitlines()) == len(found)


def test_a_resumed_run_does_not_report_a_finding_again(
    run_dir: RunDir, steps: list[JournalStep]
) -> None:
    _, found = watch_steps(run_dir, steps[:-2])
    assert found
    term = begin_next_term(run_dir, from_step=NUM_STEPS - 2)
    told, again = watch_steps(run_dir, steps[-2:], term=term)
    assert told == [] and again == found


def test_a_run_that_goes_back_before_a_finding_reports_it_again(
    run_dir: RunDir, steps: list[JournalStep]
) -> None:
    first, found = watch_steps(run_dir, steps)
    back_to = found[0].onset - 1
    term = begin_next_term(run_dir, from_step=back_to)
    told, again = watch_steps(run_dir, steps[back_to:], term=term)
    assert told == first and again == found


def test_damaged_and_missing_files_do_not_end_the_watch(
    run_dir: RunDir, steps: list[JournalStep]
) -> None:
    told: list[str] = []
    watch = HackingWatch(run_dir)
    watch.begin_term(1, told.append)
    for step in steps:
        path = write_file(run_dir.journal, step)
        if step.step in (3, 5):
            path.write_bytes(b"rubbish")
        if step.step == 4:
            path.unlink()
        watch.stored(1, step.step)
    watch.close(limit_s=60)
    failed = [each for each in told if "was not audited" in each]
    assert len(failed) == 1 and failed[0].endswith("training continues")
    assert [each.kind for each in watch.findings if each.kind == "malformed_paid"]


def test_findings_are_reported_even_if_they_cannot_be_stored(
    run_dir: RunDir, steps: list[JournalStep]
) -> None:
    (run_dir.path / FILE).mkdir()
    told, found = watch_steps(run_dir, steps)
    assert found and any("malformed or empty" in each for each in told)


def test_a_failing_shadow_is_reported_once_and_its_verdicts_are_kept(
    run_dir: RunDir, steps: list[JournalStep]
) -> None:
    told: list[str] = []
    is_over = threading.Event()

    def ask(path: str) -> Verdicts:
        step = step_in(path)
        # As in a run, the next step is stored when no other one waits.
        watch.stored(1, step + 1) if step < NUM_STEPS else is_over.set()
        if step == 2:
            raise RayActorError
        ids = [entry.trajectory.trajectory_id for entry in steps[step - 1].entries]
        unknown = {ids[0]: "no such thing"} if step in (3, 4) else {}
        return dict.fromkeys(ids, step < ONSET) | unknown

    watch = HackingWatch(run_dir, ask=ask)
    watch.begin_term(1, told.append)
    for step in steps:
        write_file(run_dir.journal, step)
    watch.stored(1, 1)
    assert is_over.wait(60)
    watch.close(limit_s=60)
    assert sum("audit.shadow failed" in each for each in told) == 1
    assert sum("no such thing" in each for each in told) == 1
    assert "unverified" in {each.kind for each in watch.findings}
    lines = [json.loads(line) for line in (run_dir.path / FILE).read_text().splitlines()]
    assert [line["step"] for line in lines if "verdicts" in line] == [1, *range(3, NUM_STEPS + 1)]


def test_a_shadow_that_hangs_delays_neither_the_watch_nor_the_end(
    run_dir: RunDir, steps: list[JournalStep]
) -> None:
    asked: list[int] = []
    is_asked, is_released = threading.Event(), threading.Event()

    def ask(path: str) -> Verdicts:
        asked.append(step_in(path))
        is_asked.set()
        is_released.wait(60)
        return {}

    watch = HackingWatch(run_dir, ask=ask)
    watch.begin_term(1, lambda _: None)
    for step in steps:
        write_file(run_dir.journal, step)
        watch.stored(1, step.step)
        if step.step == 1:
            assert is_asked.wait(60)
    watch.close(limit_s=0)
    is_released.set()
    watch.close(limit_s=60)
    # The steps that waited meanwhile are audited without the shadow.
    assert asked == [1]
    assert "malformed_paid" in {each.kind for each in watch.findings}


def test_the_kept_file_is_bounded_and_keeps_all_findings(
    run_dir: RunDir, steps: list[JournalStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = watch_steps(run_dir, steps)
    monkeypatch.setattr(read, "MAX_BYTES", 10_000)
    for step in range(1, 200):
        verdicts = {f"g{step:06d}.0-{member}.a0": True for member in range(16)}
        append(run_dir.path, Line(step=1000 + step, term=1, verdicts=verdicts))
    assert (run_dir.path / FILE).stat().st_size <= 10_000
    left = read_kept(run_dir.path, surviving=[(1000 + step, 1) for step in range(-999, 200)])
    assert [line.finding for line in left if line.finding is not None] == list(found)
    verdicts = {(line.step, line.term) for line in left if line.verdicts}
    assert max(verdicts) == (1199, 1) and 10 < len(verdicts) < 100


def test_inspecting_the_journal_gives_the_same_findings(
    run_dir: RunDir, steps: list[JournalStep], capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = watch_steps(run_dir, steps)
    request = InspectRequest(target=str(run_dir.path), hacking=True, limit=3)
    assert run_inspect(request) == 1
    text = capsys.readouterr().out
    assert all(each.text in text for each in found)
    assert f"rayloom inspect {run_dir.path} {found[0].examples[0]}" in text
    assert f"3 of {NUM_STEPS} lines" in text
    place = run_dir.journal / file_name(1, term=1)
    assert run_inspect(InspectRequest(target=str(place), hacking=True)) == 0
    assert "no pattern was found in 1 steps; at least 13 are needed" in capsys.readouterr().out


def test_contradictory_options_of_inspect_are_refused(run_dir: RunDir) -> None:
    for words, options in {
        "expected one of them": {"audit": True, "hacking": True},
        "add --hacking": {"shadow": "my.py:verify"},
        "--hacking checks a whole journal, got --step 3": {"hacking": True, "step": 3},
    }.items():
        with pytest.raises(ConfigError, match=words):
            run_inspect(InspectRequest(target=str(run_dir.path), **options))  # type: ignore[arg-type]
