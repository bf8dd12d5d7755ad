"""Tests of the comparison with TRL: its summary, by hand, and its tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.end_to_end import WARM_STEPS, Trained, difference, summarise
from benchmarks.end_to_end_inputs import FAMILIES, GUESSES
from benchmarks.peers.end_to_end_tasks import Game, count


def trained(*, step_s: float, reward: float) -> Trained:
    steps = WARM_STEPS + 6
    return Trained(
        times=[130.0 + step_s * step for step in range(steps)],
        rewards=[0.1] * (steps - 5) + [reward] * 5,
        samples=[256] * steps,
        collect_s=[step_s / 2] * steps,
        peak_gib=2.0,
        started=100.0,
    )


def test_a_side_that_is_slower_or_learns_less_misses_its_goal(tmp_path: Path) -> None:
    one = trained(step_s=2.0, reward=0.5)
    # Only the rate over the whole time includes the start.
    assert (one.samples_per_s, one.first_step_s, one.last_reward) == (128.0, 30.0, 0.5)
    assert one.whole_samples_per_s == 2560 / 48
    # Interval by Student's t: variances 0.01 and 0.01, pooled 0.01: 2.776 * sqrt(0.01 * 2 / 3).
    found = difference([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
    assert found == {"mean": 0.2, "half_interval": pytest.approx(0.2267, abs=1e-4)}
    theirs = [trained(step_s=4.0, reward=reward) for reward in (0.50, 0.51, 0.52)]
    fast = [trained(step_s=1.0, reward=reward) for reward in (0.50, 0.51, 0.52)]
    poor = [trained(step_s=2.0, reward=reward) for reward in (0.10, 0.11, 0.12)]
    shown = summarise({"fast": fast, "poor": poor, "trl": theirs}, goals={"fast": 2.5, "poor": 2.5})
    assert shown["sides"]["fast"]["ratio"] == {"median": 4.0, "lower": 4.0, "upper": 4.0}
    assert [each.partition(":")[0] for each in shown["missed"]] == ["poor", "poor"]
    for family in FAMILIES.values():
        family.write(tmp_path / "rows.jsonl")
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        assert len({row["task_id"] for row in rows}) == len(rows) >= 16
    answers = [[{"content": text}] for text in ("1 2 3", "1 3", "1 2 3 4 5 6")]
    assert count(answers, [3, 3, 3]) == [1.0, 1 / 3, 0.5]
    game = Game()
    game.reset(5)
    assert [game.guess(number) for number in (4, 6, 5)] == ["higher", "lower", "correct"]
    assert game.found and FAMILIES["game"].max_turns == GUESSES + 1
