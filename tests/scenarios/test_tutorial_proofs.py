"""Tests of the SmolLM2 tutorials, docs/tools.md and docs/environment-tutorial.md, with three seeds.

Each run takes minutes, so that these are proofs. They print the tables that the pages show.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
from worlds.runs.run_driver import ROOT

from actors.types import Outcome
from service.launch.run_dir import RunDir
from service.store.lineage import read_history

pytestmark = [pytest.mark.proof, pytest.mark.tutorials, pytest.mark.timeout(3 * 3600)]
SEEDS = (0, 1, 2)
AVERAGED_STEPS = 5
# The outcomes of episodes that were not cut off.
ENDED = (Outcome.COMPLETED, Outcome.MALFORMED_TOOL_CALL)
# In Sticks, with 5 to 9 in a pile and an opponent who plays blindly, random legal moves win 0.51.
# The best moves that ignore the pile (3, 1, 1, …) win 0.41, because some of them are not legal.
BLIND_PLAY = 0.52
WITHOUT_TOOL = [
    "--set=tasks.environment=single_turn",
    "--set=tasks.options={reward: my.py:score}",
    "--set=tasks.columns={prompt: without_tool}",
]


def rayloom(*arguments: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", *arguments],
        cwd=cwd, text=True, timeout=3000, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The means of a number in the first steps and in the last steps."""

    first: float
    last: float

    def __str__(self) -> str:
        return f"{self.first:.2f} -> {self.last:.2f}"


def curves(run: Path, component: str) -> tuple[Curve, Curve]:
    """Return the mean return of a run, and a component of it, over all episodes.

    The statistics leave out episodes that were cut off; here these count as 0.
    """
    with RunDir(path=run).looked_into() as store:
        steps = read_history(store).steps
    ended = [
        sum(step.outcomes.get(each, 0) for each in ENDED) / step.num_trajectories for step in steps
    ]
    return (
        _curve(
            [
                (step.value("reward_mean") or 0.0) * share
                for step, share in zip(steps, ended, strict=True)
            ]
        ),
        _curve(
            [
                step.reward_components.get(component, 0.0) * share
                for step, share in zip(steps, ended, strict=True)
            ]
        ),
    )


def _curve(numbers: Sequence[float]) -> Curve:
    first, last = numbers[:AVERAGED_STEPS], numbers[-AVERAGED_STEPS:]
    return Curve(first=fmean(first), last=fmean(last))


def train(place: Path, config: str, *options: str, name: str) -> tuple[Path, float]:
    """Train in a directory; return the run's directory, and the minutes until the report."""
    run, started = place / name, time.monotonic()
    rayloom("train", config, *options, "--run-dir", str(run), cwd=place)
    return run, (time.monotonic() - started) / 60


def copy_of_example(name: str, tmp_path: Path) -> Path:
    """Copy the files of a tutorial, and convert the model beside them."""
    place = tmp_path / name
    shutil.copytree(ROOT / "docs" / "examples" / name, place)
    rayloom("model", "smollm2", "smollm2", cwd=place)
    return place


def test_smollm2_calls_the_tool_and_needs_it(tmp_path: Path) -> None:
    place = copy_of_example("stock", tmp_path)
    print("seed  tool     called        return        minutes")
    reached: dict[tuple[int, str], tuple[Curve, Curve]] = {}
    for seed in SEEDS:
        for tool, options in (("with", []), ("without", WITHOUT_TOOL)):
            run, minutes = train(
                place, "stock.yaml", f"--set=run.seed={seed}", *options, name=f"{tool}-{seed}"
            )
            returns, called = reached[seed, tool] = curves(run, "called")
            print(f"{seed:<5} {tool:<8} {called}  {returns}  {minutes:.1f}", flush=True)
    for seed in SEEDS:
        (returns, called), (without, _) = reached[seed, "with"], reached[seed, "without"]
        assert called.last >= 0.8, seed
        assert returns.last >= without.last + 0.2, seed


def test_smollm2_plays_sticks_better_than_blindly(tmp_path: Path) -> None:
    place = copy_of_example("sticks", tmp_path)
    print("seed  won           minutes")
    won: list[Curve] = []
    for seed in SEEDS:
        run, minutes = train(place, "smollm2.yaml", f"--set=run.seed={seed}", name=str(seed))
        returns, _ = curves(run, "won")
        won.append(returns)
        print(f"{seed:<5} {returns}  {minutes:.1f}", flush=True)
    assert all(each.last > BLIND_PLAY for each in won), won
