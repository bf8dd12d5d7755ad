"""The tool tutorial on SmolLM2: docs/tools.md, three seeds with the tool and three without it.

Each run takes minutes, so that this is a proof; it prints the table that the page shows.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import pytest
from worlds.run_driver import ROOT

from service.launch.run_dir import RunDir
from service.store.lineage import read_history

pytestmark = [pytest.mark.proof, pytest.mark.tutorials, pytest.mark.timeout(3 * 3600)]
SEEDS = (0, 1, 2)
AVERAGED_STEPS = 5
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


def curves(run: Path) -> tuple[list[float], list[float]]:
    """Return the mean return of each step, and the share of episodes with a call that worked."""
    with RunDir(path=run).looked_into() as store:
        steps = read_history(store).steps
    return (
        [each.value("reward_mean") or 0.0 for each in steps],
        [each.reward_components["called"] for each in steps],
    )


def test_smollm2_calls_the_tool_and_needs_it(tmp_path: Path) -> None:
    place = tmp_path / "stock"
    shutil.copytree(ROOT / "docs" / "examples" / "stock", place)
    rayloom("model", "smollm2", "smollm2", cwd=place)
    rows, failures = ["seed  tool     called         return         minutes"], []
    for seed in SEEDS:
        reached = {}
        for name, options in (("with", []), ("without", WITHOUT_TOOL)):
            run, started = place / f"{name}-{seed}", time.monotonic()
            rayloom(
                "train", "stock.yaml", f"--set=run.seed={seed}", *options,
                "--run-dir", str(run), cwd=place,
            )  # fmt: skip
            returns, called = curves(run)
            first, last = slice(None, AVERAGED_STEPS), slice(-AVERAGED_STEPS, None)
            reached[name] = fmean(returns[last]), fmean(called[last])
            rows.append(
                f"{seed:<5} {name:<8} {fmean(called[first]):.2f} -> {fmean(called[last]):.2f}   "
                f"{fmean(returns[first]):.2f} -> {fmean(returns[last]):.2f}   "
                f"{(time.monotonic() - started) / 60:.1f}"
            )
        with_tool, without = reached["with"], reached["without"]
        if with_tool[1] < 0.8 or with_tool[0] < without[0] + 0.2:
            failures.append(seed)
    print("\n".join(rows))
    assert not failures, rows
