"""Tests of the command line: what it refuses before anything starts, and its small commands."""

from __future__ import annotations

import itertools
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from worlds.checks.command_lines import Answer, as_a_user, rayloom
from worlds.runs.run_driver import SMALL, small_config

# For each name, the sections that replace those of SMALL, and words of the refusal.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown-key": ({"run": {"stepz": 1}}, "unknown key"),
    "group-of-one": ({"algorithm": {"group_size": 1}}, "expected at least 2"),
    "no-model": ({"model": {"tiny": None, "path": "/no/such/model"}}, "does not exist"),
    "no-host": ({"metrics": {"host": "no.such.host.invalid"}}, "metrics.host"),
    "no-room": ({"model": {"max_context_tokens": 12}}, "32 or more"),
    # This entry is last, because its check imports torch to count the GPUs.
    "no-gpus": ({"inference": {"gpus_per_replica": 64.0}}, "64 GPUs"),
}


def refuses(answer: Answer, words: str) -> bool:
    """Check that an answer is a sentence and has the exit code of a refusal."""
    return answer.code == 2 and words in answer.err and "Traceback" not in answer.err


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Answer, Path]]:
    """Return the answer of `rayloom train` to each entry of WRONG, and its run directory."""
    places = {name: tmp_path_factory.mktemp(name) / "run" for name in WRONG}
    lines = [
        (
            "train",
            str(small_config(places[name].parent, **sections)),
            "--run-dir",
            str(places[name]),
        )
        for name, (sections, _) in WRONG.items()
    ]
    answers = zip(WRONG, rayloom(*lines), strict=True)
    return {name: (answer, places[name]) for name, answer in answers}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_is_refused_before_the_heavy_imports(
    wrong: dict[str, tuple[Answer, Path]], name: str
) -> None:
    answer, place = wrong[name]
    assert refuses(answer, WRONG[name][1]), answer.err
    assert answer.out.startswith("rayloom: reading ")
    assert answer.heavy == (["torch"] if name == "no-gpus" else [])
    assert not place.exists()


@pytest.mark.chaos
def test_a_prompt_that_is_too_long_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        model={"max_context_tokens": 32, "tiny": {"warmup_steps": 0}},
        tasks={"environment": "calculator", "options": {}},
    )
    answer = as_a_user("train", str(config), "--run-dir", str(tmp_path / "run"))
    assert answer.returncode == 2
    assert "first prompt has" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (tmp_path / "run").exists()


def test_a_missing_or_wrong_path_is_refused_before_the_heavy_imports(
    tmp_path: Path,
) -> None:
    config = str(small_config(tmp_path))
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    expected = {
        ("train",): "got no CONFIG",
        ("train", "--reward", "my.py:score"): "expected --dataset too",
        ("train", "--dataset", "a.jsonl"): "expected --reward too",
        ("train", "--dataset", "", "--reward", "my.py:score"): "expected --dataset too",
        ("train", "--resume", str(tmp_path / "no")): "got no config.yaml in it",
        ("train", "nofile.yaml"): "nofile.yaml does not exist",
        ("train", config, "--run-dir", ""): "expected",
        ("train", config, "--run-dir", "/proc/foo"): "expected",
        ("train", config, "--run-dir", "/dev/null/run"): "expected",
        ("train", config, "--resume", str(tmp_path / "link")): "there is no run",
        ("serve", config, "--take-over"): "--take-over: got no --resume",
        ("train", config, "--checkpoint", "2"): "--checkpoint 2: got no --resume",
        ("train", config, "--run-dir", "a", "--resume", "b"): "--run-dir a: got --resume b too",
        ("train", config, "--state-dir", "a", "--resume", "b"): "--state-dir: got --resume too",
        ("train", config, "--database-url", "postgresql://u:pw@h/d"): "got a password",
        ("export", str(tmp_path), str(tmp_path / "out")): "which is not a run or checkpoint",
        ("evaluate", config, "--model", "a", "--checkpoint", "b"): "--model a: got --checkpoint b",
        ("evaluate", "runs/none"): "runs/none does not exist, expected a run's directory or a YAML",
        ("evaluate", "~/none.yaml"): f"evaluate: {Path.home()}/none.yaml does not exist",
        ("evaluate", str(tmp_path / "empty")): "got no config.yaml in it",
        ("evaluate", config, "--on", "hard", "--samples", "4"): "--on hard: there is no such set",
    }
    for line, answer in zip(expected, rayloom(*expected), strict=True):
        assert refuses(answer, expected[line]), (line, answer.err)
        # An evaluation shows its progress on standard error and its result on standard output.
        num_lines = 2 if line[0] == "evaluate" else 1
        assert len(answer.err.splitlines()) == num_lines and answer.heavy == [], line
    assert not (tmp_path / "out").exists() and not (tmp_path / "nowhere").exists()


def test_serve_refuses_a_wrong_configuration_before_the_heavy_imports(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {tiny: {}}\ntasks: {environment: guessing}\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rayloom.db").touch()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        expected = {
            ("--set", "service.port=0", "--set", "service.host=0.0.0.0"): "no key is set",
            ("--set", f"service.port={taken}"): "service.port",
            ("--set", "service.port=0", "--set", f"metrics.port={taken}"): "metrics.port",
            ("--set", "service.port=0", "--run-dir", str(tmp_path / "run")): "holds a run",
        }
        lines = [["serve", str(tmp_path / "config.yaml"), *rest] for rest in expected]
        for rest, answer in zip(expected, rayloom(*lines), strict=True):
            assert refuses(answer, expected[rest]), (rest, answer.err)
            assert answer.heavy == [], rest


@pytest.mark.chaos
def test_an_impossible_evaluation_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = str(small_config(tmp_path))
    expected = {
        ("--checkpoint", "step-000009-t1"): "which is not a run or checkpoint",
        ("--tasks", "9"): "--tasks 9: expected at most 4",
        ("--samples", "2"): "evaluation.samples is 2 with temperature 0",
        ("--out", str(tmp_path / "no" / "file")): "no file can be written in",
        ("--out", "/dev/full"): "it is not a regular file; expected a regular file",
        ("--set", "tasks.evaluation_tasks=0"): "no task is held out",
        ("--set", "tasks.environment=session", "--set", "tasks.evaluation_tasks=0"): "is session",
    }
    lines = [["evaluate", config, *rest] for rest in expected]
    for rest, answer in zip(expected, rayloom(*lines), strict=True):
        assert refuses(answer, expected[rest]), (rest, answer.err)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.yaml"]


@pytest.mark.chaos
def test_commands_find_the_stored_functions_of_a_run_that_was_moved(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    (run / "functions").mkdir(parents=True)
    (run / "functions" / "given_1.py").write_text("def score(completion): return 1.0\n")
    (run / "functions" / "rows.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    # The run's directory was moved after its start.
    rows = "runs/gone/functions/rows.jsonl"
    tasks = {"dataset": rows, "environment": "single_turn", "evaluation_tasks": 1}
    tree = {**SMALL, "tasks": {**tasks, "options": {"reward": "given_1:score"}}}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    [evaluated] = rayloom(["evaluate", str(run), "--checkpoint", "step-000009-t1"])
    # The command finds the function, and fails only because there is no checkpoint.
    assert refuses(evaluated, "which is not a run or checkpoint"), evaluated.err


def test_check_prints_the_effective_configuration(tmp_path: Path) -> None:
    answer = as_a_user("check", str(small_config(tmp_path)), "--set", "run.steps=9")
    assert answer.returncode == 0
    assert "steps: 9" in answer.stdout and "clip_high: 0.28" in answer.stdout
    # All other lines are comments, so the output can be read as a configuration.
    assert yaml.safe_load(answer.stdout)["run"]["steps"] == 9
    assert "# The chat template of the tiny model\n" in answer.stdout
    assert re.search(r"^# system message in mid-conversation +shown$", answer.stdout, re.MULTILINE)
    assert re.search(r"^# parser of calls +hermes$", answer.stdout, re.MULTILINE)
    groups, size = SMALL["algorithm"]["groups_per_step"], SMALL["algorithm"]["group_size"]
    found = f"no error was found; 9 steps, each of {groups} groups of {size} rollouts"
    assert answer.stderr.splitlines()[-1].startswith(f"rayloom: {found}")


@pytest.mark.proof
@pytest.mark.slow
def test_check_accepts_a_run_that_external_agents_play(tmp_path: Path) -> None:
    options = ("--set", "tasks.environment=session", "--set", "tasks.evaluation_tasks=0")
    warmup = ("--set", "trainer.warmup_updates=100000")
    answer = as_a_user("check", str(small_config(tmp_path)), *options, *warmup)
    assert answer.returncode == 0, answer.stderr
    assert yaml.safe_load(answer.stdout)["tasks"]["environment"] == "session"
    assert "warning: trainer.warmup_updates is 100000, and the run has" in answer.stderr


def test_paragraphs_of_the_help_fill_their_lines() -> None:
    lines = as_a_user("submit", "--help").stdout.splitlines()
    [first] = [at for at, line in enumerate(lines) if "If the command is interrupted" in line]
    last = lines.index(next(line for line in lines[first:] if not line.strip()), first)
    for line, following in itertools.pairwise(lines[first:last]):
        next_word = following.split()[0]
        assert len(f"{line.rstrip()} {next_word}") > 79, line


@pytest.mark.proof
@pytest.mark.slow
def test_task_files_are_written_in_both_forms_and_an_unknown_family_is_refused(
    tmp_path: Path,
) -> None:
    files = [tmp_path / "tasks.jsonl", tmp_path / "tasks.parquet"]
    command = ("tasks", "reasoning-gym")
    *written, refused, no_value, no_place = rayloom(
        *((*command, "chain_sum", str(file), "--count", "5") for file in files),
        (*command, "chain_summ", str(tmp_path / "other.jsonl")),
        (*command, "chain_sum", str(tmp_path / "other.jsonl"), "--option", "x=["),
        ("tasks", "generate", "guessing", "/proc/tasks.jsonl"),
    )
    for file, answer in zip(files, written, strict=True):
        assert answer.code == 0, answer.err
        assert file.stat().st_size > 0
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len(rows) == 5 and {row["environment"] for row in rows} == {"reasoning_gym"}
    assert refuses(refused, "chain_sum")
    assert refuses(no_value, "--option x: got '[', expected a YAML value")
    assert refuses(no_place, "tasks generate: ")


def test_a_tiny_model_is_not_built_over_other_files_or_in_an_unwritable_place(
    tmp_path: Path,
) -> None:
    directory, other = tmp_path / "tiny", tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    command = ("model", "tiny", "--warmup-steps", "0")
    built, *refused = rayloom(
        (*command, str(directory)),
        (*command, str(other)),
        (*command, "/proc/x"),
        (*command, str(tmp_path / "seeded"), "--seed", "99999999999999999999999"),
    )
    assert built.code == 0 and "0.85 M parameters" in built.out
    assert (directory / "model.safetensors").stat().st_mode & 0o044
    for answer, words in zip(
        refused, ("is not a tiny model", "cannot be written", "--seed"), strict=True
    ):
        assert refuses(answer, words), answer.err
    assert (other / "notes.txt").read_text() == "mine"


@pytest.mark.proof
@pytest.mark.slow
def test_an_option_with_one_value_is_refused_if_given_twice() -> None:
    given = ("--dataset", "a.jsonl", "--dataset=b.jsonl")
    twice, functions = rayloom(
        ("check", *given, "--reward", "my.py:score"),
        # The option for functions may be repeated.
        ("check", *given[:2], "--reward", "my.py:score", "--reward", "my.py:brief"),
    )
    assert refuses(twice, "--dataset was given 2 times, expected it once; remove all but one")
    assert refuses(functions, "my.py:score: there is no such file")


@pytest.mark.proof
@pytest.mark.slow
def test_a_usage_error_is_shown_whatever_size_the_terminal_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for size in ("0", "-5", "²"):
        for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
            monkeypatch.setenv(name, size)
        [answer] = rayloom(("check", "--nope"))
        assert refuses(answer, "No such option: --nope"), answer.err


def test_an_empty_path_and_a_directory_in_a_file_are_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "g.yaml").touch()
    expected = {
        ("model", "tiny", ""): "DIRECTORY: got an empty text, expected a path; name one",
        ("model", "smollm2", " "): "DIRECTORY: got an empty text, expected a path; name one",
        ("check", ""): "CONFIG: got an empty text, expected a path; name one",
        ("keys", "list", "--run", ""): "--run: got an empty text, expected a path; name one",
        ("model", "tiny", str(tmp_path / "g.yaml" / "x")): "expected a directory that can be made",
    }
    for line, answer in zip(expected, rayloom(*expected), strict=True):
        assert refuses(answer, expected[line]), (line, answer.err)


def test_an_option_s_value_that_does_not_fit_is_shown_with_what_is_expected() -> None:
    limit = "expected an integer of at least 0; correct it"
    step = ("explain", "run", "--step", "1")
    expected = {
        ("inspect", "run", "--limit", "x"): f"--limit: got 'x', {limit}",
        ("inspect", "run", "--limit", "-1"): f"--limit: got '-1', {limit}",
        (*step, "--top", "0"): "--top: got '0', expected an integer of at least 1; correct it",
        (*step, "--by", "shar"): "--by: got 'shar', expected one of own, norm, share; did you mean",
        ("check", "--parameters", "x"): "--parameters: got 'x', expected a finite number; correct",
        ("stop", "--grace", "nan"): "--grace: got 'nan', expected a number from 0 to 2678400;",
        ("stop", "runs/none"): "stop: runs/none does not exist, expected a run's directory, or the",
        ("submit", "a", "--url", "x:8000"): "--url: got 'x:8000', expected an address such as http",
        ("submit", "a", "--tasks-per-request", "1,000"): "expected an integer from 1 to 10000;",
        ("evaluate", "a", "--temperature", "nan"): "'nan', expected a finite number of at least 0;",
        ("keys", "create", "a", "b", "--scope", "x"): "expected one of client, admin; name one of",
    }
    for line, answer in zip(expected, rayloom(*expected), strict=True):
        assert refuses(answer, expected[line]), (line, answer.err)
        assert len(answer.err.splitlines()) == 1, answer.err
