"""Tests of the options of `rayloom inspect`: those without an effect or a target are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from worlds.builders.journal_builders import group_of, step_of, written
from worlds.checks.command_lines import rayloom
from worlds.runs.run_driver import ROOT

from service.cli.inspect import InspectRequest, run_inspect
from service.config.file import ConfigError, load_config

ONE = "g000000.0-0.a0"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return written(tmp_path / "run", step_of([group_of(0, [1, 0])]))


def refused(target: Path | str, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        run_inspect(InspectRequest(target=str(target), **options))  # type: ignore[arg-type]
    return str(caught.value)


def test_options_without_an_effect_are_refused(run_dir: Path) -> None:
    of_an_audit: dict[str, dict[str, object]] = {
        "got --step 99;": {"step": 99},
        "got --step 1 and --outcome won;": {"step": 1, "outcome": "won"},
        "--run /nonexistent names the run of an id": {"run": Path("/nonexistent")},
    }
    for words, options in of_an_audit.items():
        assert words in refused(run_dir, audit=True, **options)
    of_an_id: dict[str, dict[str, object]] = {
        "--step 1": {"step": 1},
        "--outcome won": {"outcome": "won"},
        "--limit 3": {"limit": 3},
    }
    for words, options in of_an_id.items():
        text = refused(ONE, run=run_dir, **options)
        assert f"{words} chooses from a list, got the id {ONE}" in text
    assert "leave --run out" in refused(run_dir, run=Path("/nonexistent"))
    assert "--html shows one trajectory" in refused(run_dir, html=Path("page.html"))


def test_the_run_is_the_first_argument_and_the_older_form_shows_the_same(run_dir: Path) -> None:
    run, nowhere = str(run_dir), str(run_dir / "nowhere")
    first, older, audit, twice, unknown, stop = rayloom(
        ("inspect", run, ONE),
        ("inspect", ONE, "--run", run),
        ("inspect", run, ONE, "--audit"),
        ("inspect", run, ONE, "--run", run),
        ("inspect", nowhere, ONE),
        ("stop", run),
    )
    assert first.code == older.code == 0 and ONE in first.out and first.out == older.out
    assert audit.code == 2 and f"checks a whole journal, got the id {ONE}" in audit.err
    assert twice.code == 2 and "leave --run out" in twice.err
    assert unknown.code == 2 and f"{nowhere} does not exist" in unknown.err
    assert stop.code == 2 and "has no config.yaml, expected a run's directory" in stop.err


def test_a_missing_path_is_reported_as_a_path(run_dir: Path) -> None:
    nowhere = run_dir / "nowhere"
    assert f"{nowhere} does not exist" in refused(nowhere)
    assert f"{nowhere} does not exist" in refused(nowhere, audit=True)
    assert f"{nowhere} does not exist" in refused(ONE, run=nowhere)
    assert "does not exist" in refused("n/" + "o" * 5000)


def test_an_empty_argument_is_refused() -> None:
    assert "got an empty text" in refused("")
    assert "got an empty text" in refused("", audit=True)


def test_a_directory_in_place_of_an_html_file_is_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "here").mkdir()
    monkeypatch.chdir(run_dir)
    before = sorted(run_dir.parent.rglob("*"))
    for place in ("/", ".", "..", "here"):
        text = refused(ONE, run=run_dir, html=Path(place))
        assert f"--html {place}: is a directory; expected a file" in text
    assert sorted(run_dir.parent.rglob("*")) == before


def test_an_html_file_that_cannot_be_moved_leaves_nothing_behind(run_dir: Path) -> None:
    from service.telemetry.summary import write_aside

    with pytest.raises(OSError):
        write_aside(run_dir / "journal", "text")
    assert [path.name for path in run_dir.iterdir()] == ["journal"]


def test_an_html_file_replaces_the_target_of_a_link_and_only_regular_files(
    run_dir: Path, tmp_path: Path
) -> None:
    target, link, pipe = tmp_path / "target.html", tmp_path / "link.html", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target.name)
    os.mkfifo(pipe)
    request = InspectRequest(target=ONE, run=run_dir, html=link)
    assert run_inspect(request) == 0
    assert link.is_symlink() and target.read_text().startswith("<!doctype html>")
    for place in (pipe, Path("/dev/null")):
        text = refused(ONE, run=run_dir, html=place)
        assert f"--html {place}: cannot be written (it is not a regular file)" in text
    assert pipe.is_fifo() and Path("/dev/null").is_char_device()


def called(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "service.cli.main", "inspect", *map(str, arguments)]
    return subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ | environ
    )


def test_an_empty_option_is_refused_with_code_2_and_one_sentence(run_dir: Path) -> None:
    lines = (["inspect", ONE, "--run", ""], ["inspect", ONE, "--html", "", "--run", str(run_dir)])
    for line, answer in zip(lines, rayloom(*lines), strict=True):
        assert answer.code == 2 and answer.out == ""
        assert answer.err.startswith(f"rayloom: {line[2]}: got an empty text, expected a ")
        assert len(answer.err.splitlines()) == 1


@pytest.mark.proof
@pytest.mark.slow
def test_no_text_is_lost_on_a_terminal_without_unicode(run_dir: Path) -> None:
    # Without a tokenizer, the ids are shown in brackets that Latin-1 does not have.
    whole = called(ONE, "--run", run_dir, PYTHONIOENCODING="utf-8")
    poor = called(ONE, "--run", run_dir, PYTHONIOENCODING="latin-1")
    assert whole.returncode == poor.returncode == 0 and poor.stderr == ""
    escaped = whole.stdout.encode("latin-1", "backslashreplace").decode("latin-1")
    assert poor.stdout == escaped and "\\u27e8" in poor.stdout


def test_a_refusal_is_shown_on_a_terminal_without_unicode(tmp_path: Path) -> None:
    done = called(tmp_path / "宿…", PYTHONIOENCODING="latin-1")
    assert done.returncode == 2 and "\\u5bbf\\u2026 does not exist" in done.stderr


def test_a_step_that_is_not_in_the_journal_is_refused_with_the_steps_it_has(run_dir: Path) -> None:
    text = refused(run_dir, step=9999)
    assert f"--step 9999 is not in the journal of {run_dir}, which has steps 1 to 1" in text
    assert run_inspect(InspectRequest(target=str(run_dir), step=1)) == 0


def test_a_link_to_nowhere_and_a_journal_s_directory_are_named_as_such(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir.parent)
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("pool")
    Path("pool").symlink_to("loop")
    nowhere = "is a link to nowhere, which does not exist; expected"
    loop = "is a link to pool, which leads only to other links in a loop; expected"
    for place in (Path("dangling"), run_dir.parent / "dangling"):
        assert f"{place} {nowhere}" in refused(place) and nowhere in refused(ONE, run=place)
    assert loop in refused("loop") and loop in refused("loop", audit=True)
    assert refused("run/journal").endswith("or one journal file; name run")
    for name, words in (("dangling", nowhere), ("loop", loop)):
        with pytest.raises(ConfigError) as caught:
            load_config(Path(name), [])
        assert str(caught.value).startswith(f"configuration {name} {words.partition(';')[0]};")
