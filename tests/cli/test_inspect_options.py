"""`rayloom inspect`: options that would change nothing, or lead nowhere, are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from worlds.journal_builders import group_of, step_of, written
from worlds.run_driver import ROOT

from service.cli.inspect import InspectRequest, run_inspect
from service.config.file import ConfigError

ONE = "g000000.0-0.a0"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return written(tmp_path / "run", step_of([group_of(0, [1, 0])]))


def refused(target: Path | str, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        run_inspect(InspectRequest(target=str(target), **options))  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"step": 99}, "--step 99"),
        ({"outcome": "won"}, "--outcome won"),
        ({"step": 1, "outcome": "completed"}, "--step 1 and --outcome completed"),
    ],
)
def test_an_audit_of_a_part_is_refused(
    run_dir: Path, options: dict[str, object], given: str
) -> None:
    text = refused(run_dir, audit=True, **options)
    assert f"got {given};" in text and "leave it out" in text


@pytest.mark.parametrize(
    ("options", "given"),
    [({"step": 1}, "--step 1"), ({"outcome": "won"}, "--outcome won"), ({"limit": 3}, "--limit 3")],
)
def test_what_chooses_from_a_list_is_refused_beside_an_id(
    run_dir: Path, options: dict[str, object], given: str
) -> None:
    text = refused(ONE, run=run_dir, **options)
    assert f"{given} chooses from a list, got the id {ONE}" in text


@pytest.mark.parametrize("audit", [False, True])
def test_a_second_run_beside_a_journal_is_refused(run_dir: Path, audit: bool) -> None:
    text = refused(run_dir, run=Path("/nonexistent"), audit=audit)
    assert "--run /nonexistent says where an id is looked for" in text and "leave --run out" in text


def test_a_path_that_is_not_there_is_called_one(run_dir: Path) -> None:
    nowhere = run_dir / "nowhere"
    assert f"{nowhere} is not there" in refused(nowhere)
    assert f"{nowhere} is not there" in refused(nowhere, audit=True)
    assert f"{nowhere} is not there" in refused(ONE, run=nowhere)
    assert "is not there" in refused("n/" + "o" * 5000)


@pytest.mark.parametrize("audit", [False, True])
def test_an_empty_text_names_nothing_to_look_at(audit: bool) -> None:
    assert "got an empty text" in refused("", audit=audit)


@pytest.mark.parametrize("place", ["/", ".", "..", "here"])
def test_a_directory_in_place_of_a_page_is_refused(
    run_dir: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "here").mkdir()
    monkeypatch.chdir(run_dir)
    before = sorted(run_dir.parent.rglob("*"))
    text = refused(ONE, run=run_dir, html=Path(place))
    assert f"--html {place}: is a directory; expected a file" in text
    assert sorted(run_dir.parent.rglob("*")) == before


def test_a_page_that_cannot_take_its_place_leaves_nothing_behind(run_dir: Path) -> None:
    from service.telemetry.summary import write_aside

    with pytest.raises(OSError):
        write_aside(run_dir / "journal", "text")
    assert [path.name for path in run_dir.iterdir()] == ["journal"]


def called(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "service.cli.main", "inspect", *map(str, arguments)]
    return subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ | environ
    )


@pytest.mark.parametrize("option", ["--html", "--run"])
def test_an_empty_option_ends_with_2_and_one_sentence(run_dir: Path, option: str) -> None:
    done = called(ONE, option, "", *(() if option == "--run" else ("--run", run_dir)))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"rayloom: {option}: got an empty text, expected a ")
    assert len(done.stderr.splitlines()) == 1


def test_nothing_is_lost_where_the_terminal_has_no_unicode(run_dir: Path) -> None:
    # Without a tokenizer the ids stand in brackets that Latin-1 lacks.
    whole = called(ONE, "--run", run_dir, PYTHONIOENCODING="utf-8")
    poor = called(ONE, "--run", run_dir, PYTHONIOENCODING="latin-1")
    assert whole.returncode == poor.returncode == 0 and poor.stderr == ""
    escaped = whole.stdout.encode("latin-1", "backslashreplace").decode("latin-1")
    assert poor.stdout == escaped and "\\u27e8" in poor.stdout


def test_a_refusal_is_heard_where_the_terminal_has_no_unicode(tmp_path: Path) -> None:
    done = called(tmp_path / "宿…", PYTHONIOENCODING="latin-1")
    assert done.returncode == 2 and "\\u5bbf\\u2026 is not there" in done.stderr
