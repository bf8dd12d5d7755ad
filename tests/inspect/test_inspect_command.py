"""Tests of the command `rayloom inspect`: lists, a single trajectory, and refusals."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.builders.chat_examples import example_step, tokenizer
from worlds.builders.journal_builders import group_of, step_of, written
from worlds.builders.store_builders import commit
from worlds.faults.planted_faults import sound_step
from worlds.runs.audited_runs import rows_of, stored

from actors.journal.files import JournalFile, file_name
from actors.trajectory_queue.ledger import EvictionReason, LedgerEventKind
from actors.types import Outcome
from rayloom import Result
from service.cli.inspect import InspectRequest, run_inspect
from service.config.file import ConfigError
from service.inspect.reader import newest_run, surviving_files
from service.launch.run_dir import RunDir
from service.store.lineage import Span
from service.store.run_store import RunStore

EVICTED = LedgerEventKind.EVICTED
ROOT = Path(__file__).parents[2]


def inspected(capsys: pytest.CaptureFixture[str], target: Path | str, **options: object) -> str:
    assert run_inspect(InspectRequest(target=str(target), **options)) == 0  # type: ignore[arg-type]
    return capsys.readouterr().out


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Write a run of two steps with its model; a game of the second step was cut off."""
    cut = group_of(1, [1, 0, 0], outcomes={2: Outcome.TRUNCATED_TOKENS})
    place = written(tmp_path / "run", step_of([group_of(0, [1, 0])]), step_of([cut], number=2))
    tokenizer().save_pretrained(place / "model")
    (place / "model" / "config.json").write_text("{}")
    (place / "config.yaml").write_text("model: {tiny: {}}\ntasks: {environment: guessing}\n")
    return place


def test_the_result_of_a_run_has_a_row_for_each_trajectory(run_dir: Path) -> None:
    rows = Result(run_dir=run_dir, summary={}).trajectories()
    assert [(row["step"], row["id"], row["episode_return"]) for row in rows] == [
        (2, "g000001.0-0.a0", 1.0),
        (2, "g000001.0-1.a0", 0.0),
        (2, "g000001.0-2.a0", 0.0),
        (1, "g000000.0-0.a0", 1.0),
        (1, "g000000.0-1.a0", 0.0),
    ]


def test_a_run_is_listed_newest_step_first(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = inspected(capsys, run_dir).splitlines()
    assert [line.split()[:3] for line in lines[1:6]] == [
        ["2", "g000001.0-0.a0", "completed"],
        ["2", "g000001.0-1.a0", "completed"],
        ["2", "g000001.0-2.a0", "truncated_tokens"],
        ["1", "g000000.0-0.a0", "completed"],
        ["1", "g000000.0-1.a0", "completed"],
    ]
    assert lines[3].split()[3:] == ["0", "2", "0/12", "evicted:", "masked"]
    assert lines[4].split()[3:] == ["1", "0.7071", "2", "12/12", "trained"]
    assert lines[-1] == "5 trajectories, steps 1 to 2; tokens: trained/sampled"


@pytest.mark.parametrize(
    ("filters", "num_rows", "closing"),
    [
        ({"step": 1}, 2, "2 trajectories"),
        ({"outcome": "truncated_tokens"}, 1, "1 trajectories"),
        ({"limit": 3}, 3, "3 of 5 trajectories"),
        ({"limit": 0}, 5, "5 trajectories"),
        ({"outcome": "cancelled"}, 0, "0 trajectories"),
    ],
)
def test_filters_choose_the_listed_trajectories(
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    filters: dict[str, object],
    num_rows: int,
    closing: str,
) -> None:
    *rows, blank, last = inspected(capsys, run_dir, **filters).splitlines()[1:]
    assert len(rows) == num_rows and blank == "" and last.startswith(closing)


def test_a_trajectory_is_found_by_its_id_and_by_its_rollouts(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("g000000.0-1.a0", "g000000.0-1"):
        shown = inspected(capsys, name, run=run_dir)
        assert shown.startswith("g000000.0-1.a0, step 1") and "advantage        -0.7071" in shown


def test_a_single_journal_file_is_listed_shown_and_audited(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_dir / "journal" / file_name(1, term=1)
    assert "2 trajectories, step 1" in inspected(capsys, file)
    assert "g000000.0-0.a0, step 1" in inspected(capsys, "g000000.0-0.a0", run=file)
    assert inspected(capsys, file, audit=True).splitlines()[-1] == "clean"


def test_without_a_model_ids_are_shown_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = written(tmp_path, example_step())
    shown = inspected(capsys, "g000003.0-0.a0", run=place)
    assert "⟨374⟩" in shown and "there is no config.yaml" in shown


def test_a_page_is_written(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = run_dir.parent / "page.html"
    assert inspected(capsys, "g000000.0-1.a0", run=run_dir, html=page).startswith(str(page))
    assert page.read_text().startswith("<!doctype html>")


def refused(target: Path | str, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        run_inspect(InspectRequest(target=str(target), **options))  # type: ignore[arg-type]
    return str(caught.value)


def test_an_unknown_id_is_refused_with_similar_ids(run_dir: Path) -> None:
    text = refused("g000001.0-7.a0", run=run_dir)
    assert "no trajectory g000001.0-7.a0" in text and "did you mean g000001.0-" in text


def test_a_path_without_a_journal_is_refused(tmp_path: Path) -> None:
    assert "has no journal" in refused(tmp_path)
    assert "has no journal" in refused(tmp_path, audit=True)
    assert "does not exist" in refused(tmp_path / "nowhere", audit=True)


def test_a_damaged_file_is_named(run_dir: Path) -> None:
    file = run_dir / "journal" / file_name(2, term=1)
    file.write_bytes(file.read_bytes()[:-40])
    for text in (
        refused(run_dir),
        refused("g000001.0-0", run=run_dir),
        refused(run_dir, audit=True),
    ):
        assert str(file) in text and "cannot be read" in text and "remove it" in text


def test_an_outcome_that_does_not_exist_is_refused(run_dir: Path) -> None:
    assert "expected one of completed, " in refused(run_dir, outcome="won")


def test_a_page_of_a_whole_run_or_in_an_impossible_place_is_refused(run_dir: Path) -> None:
    assert "expected an id" in refused(run_dir, html=Path("page.html"))
    nowhere = run_dir / "no" / "page.html"
    assert "cannot be written" in refused("g000000.0-1.a0", run=run_dir, html=nowhere)


def test_without_a_run_the_newest_run_with_a_journal_is_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^inspect: g1 is not a path .*no run with a journal"):
        newest_run("g1", tmp_path / "runs")
    for name in ("older", "newer"):
        written(tmp_path / "runs" / name, step_of([]))
    assert newest_run("g1", tmp_path / "runs").name == "newer"


def files(*pairs: tuple[int, int]) -> list[JournalFile]:
    return [JournalFile(path=Path(file_name(s, term=e)), step=s, term=e) for s, e in pairs]


def test_the_lineage_chooses_among_the_files_of_a_step() -> None:
    everything = files((1, 1), (2, 1), (3, 1), (3, 2), (4, 1))
    spans = [
        Span(term=1, last_step=2, last_event_seq=9),
        Span(term=2, last_step=None, last_event_seq=None),
    ]
    kept = surviving_files(everything, spans)
    assert [(file.step, file.term) for file in kept] == [(1, 1), (2, 1), (3, 2)]
    kept = surviving_files(everything, None)
    assert [(file.step, file.term) for file in kept] == [(1, 1), (2, 1), (3, 2), (4, 1)]


def test_the_audit_of_a_run_reads_its_database_and_imports_nothing_heavy(tmp_path: Path) -> None:
    step = sound_step()
    written(tmp_path, step)
    stored(tmp_path, rows_of(step))
    code = (
        "import sys; from service.cli.main import main\n"
        f"sys.argv = ['rayloom', 'inspect', {str(tmp_path)!r}, '--audit']\n"
        "try: main()\n"
        "finally: assert not {'torch', 'ray', 'transformers', 'matplotlib'} & sys.modules.keys()"
    )
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "  ok     journal and ledger agree on the trained rollouts" in done.stdout


def test_a_refused_update_is_not_shown_as_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = step_of([group_of(0, [1, 0])])
    written(tmp_path, step)
    rows = [
        replace(row, kind=EVICTED, reason=EvictionReason.NONFINITE_STEP)
        if row.kind == "trained"
        else row
        for row in rows_of(step)
    ]
    stored(tmp_path, rows)
    row = inspected(capsys, tmp_path).splitlines()[1].split()
    assert row[-3:] == ["0/12", "evicted:", "nonfinite_step"]
    shown = " ".join(inspected(capsys, "g000000.0-0.a0", run=tmp_path).split())
    assert "evicted: nonfinite_step: the step's update was not finite, and was refused" in shown
    assert "12 sampled, 0 trained, 12 handed out" in shown


@pytest.mark.parametrize("arguments", [("no/such/run", "--audit"), ("g1.0-0.a0", "--run", "/proc")])
def test_an_unreadable_target_ends_with_code_2_and_one_sentence(arguments: tuple[str, ...]) -> None:
    line = [sys.executable, "-m", "service.cli.main", "inspect", *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("rayloom: ")


def test_the_surviving_file_of_a_repeated_step_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = RunStore(RunDir(path=tmp_path).database_url)
    store.acquire_lease(owner="first")
    commit(store, term=1, step=1)
    store.acquire_lease(owner="second")
    store.close()
    groups = [group_of(number, [1, 0]) for number in range(4)]
    written(
        tmp_path,
        step_of(groups[:1]),
        step_of(groups[1:2], number=2),
        step_of(groups[2:3], number=3),
        step_of(groups[3:], number=2, term=2),
    )
    lines = inspected(capsys, tmp_path).splitlines()
    assert [line.split()[:2] for line in lines[1:-2]] == [
        ["2", "g000003.0-0.a0"],
        ["2", "g000003.0-1.a0"],
        ["1", "g000000.0-0.a0"],
        ["1", "g000000.0-1.a0"],
    ]
    assert lines[-1].endswith("; 2 files of steps played again")
