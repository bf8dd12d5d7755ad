"""Tests that the audit finds a hole in a real run's grader after the model has learnt to use it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from worlds.runs.run_checks import check_finished
from worlds.runs.run_driver import ROOT, START_S, STEP_S, running

from service.hacking.read import read_kept
from service.inspect.reader import find_entry, open_journal
from service.telemetry.records import Finding

pytestmark = [pytest.mark.proof, pytest.mark.training, pytest.mark.timeout(1200)]

OPENS_AFTER, WITHIN = 14, 20
STEPS = OPENS_AFTER + WITHIN
HOLES = {
    "length": {"length", "component_excess", "component_falls"},
    "markers": {"repetition", "component_excess", "component_falls", "length"},
    "constant": {"equal_answers", "component_falls"},
    "empty": {"malformed_paid", "equal_answers"},
    "persuaded": {"unverified"},
    "copied": {"copying"},
    "raises": {"failures"},
    "FirstThreeWins": {"fewer_turns"},
}
GUESSING = ROOT / "deploy" / "configs" / "guessing-cpu.yaml"
NUMBERS = ROOT / "docs" / "examples" / "numbers" / "after.jsonl"


def on_data(hole: str, data: str, *more: str) -> list[str]:
    return ["--dataset", data, "--reward", f"my.py:{hole}", *more]


ASKED = {
    "persuaded": on_data("persuaded", "after.jsonl", "--set", "audit.shadow=my.py:verified"),
    "copied": on_data("copied", "with_keys.jsonl"),
    "FirstThreeWins": [
        str(GUESSING),
        *("--set", "tasks.environment=my:FirstThreeWins", "--set", "run.stop_at_reward=null"),
        # The demo's configuration learns slowly, and its KL loss keeps the policy near the start.
        *("--set", "algorithm.loss.kl.coefficient=0", "--set", "trainer.warmup_updates=10"),
    ],
}


@pytest.mark.parametrize("hole", HOLES)
def test_reward_hack_that_is_learnt_in_training_is_found_and_reported(
    tmp_path: Path, hole: str
) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    shutil.copy(NUMBERS, place)
    (place / "with_keys.jsonl").write_text(with_keys())
    shutil.copy(ROOT / "tests" / "worlds" / "faults" / "live_holes.py", place / "my.py")
    settings = [f"run.steps={STEPS}", "algorithm.group_size=8"]
    asked = ASKED.get(hole) or on_data(hole, "after.jsonl")
    words = [word for setting in settings for word in ("--set", setting)]
    with running(None, tmp_path / "run", [*asked, *words], cwd=place) as run:
        run.wait_for_step(OPENS_AFTER, limit_s=START_S + OPENS_AFTER * STEP_S)
        (place / "hole_is_open").touch()
        assert run.wait(limit_s=START_S + STEPS * STEP_S) == 0, run.log()
        check_finished(run, steps=STEPS)
    journal = open_journal(run.place.path)
    lines = read_kept(run.place.path, surviving={(f.step, f.term) for f in journal.files})
    found = [line.finding for line in lines if line.finding is not None]
    print(*(finding.text for finding in found), sep="\n")
    assert not [each for each in found if each.step <= OPENS_AFTER], found
    own = [each for each in found if each.kind in HOLES[hole]]
    assert own, found
    assert [each["text"] for each in run.summary()["hacking"]] == [each.text for each in found]
    log = run.place.log_file.read_text()
    assert all(log.count(f"audit: {each.text}") == 1 for each in found)
    check_examples(run.place.path, own)
    # The command finds the same in the journal.
    command = [sys.executable, "-m", "service.cli.main", "inspect", str(run.place.path)]
    inspected = subprocess.run([*command, "--hacking"], capture_output=True, text=True, timeout=300)
    assert inspected.returncode == 1, inspected.stderr
    assert all(each.text in inspected.stdout for each in found)


def with_keys() -> str:
    """Return the rows of questions, each with a text that can be copied."""
    rows = [json.loads(line) for line in NUMBERS.read_text().splitlines()]
    key = f" (Key: {'7' * 24})"
    return "".join(json.dumps({**row, "prompt": row["prompt"] + key}) + "\n" for row in rows)


def check_examples(run_dir: Path, found: list[Finding]) -> None:
    journal = open_journal(run_dir)
    for name in (name for each in found for name in each.examples):
        _, entry = find_entry(journal, name)
        assert entry.trajectory.trajectory_id == name
