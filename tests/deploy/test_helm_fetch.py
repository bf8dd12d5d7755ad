"""Tests that offline pods can read what the chart's init container fetched from a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds.servers.helm_chart import pod_templates, rendered
from worlds.servers.model_hub import model_hub

# Each test starts processes that import the library of data sets, which takes seconds.
pytestmark = [pytest.mark.proof, pytest.mark.chart]

OLD, NEW = "1" * 40, "2" * 40
REPOSITORIES = {
    "datasets/acme/rows": {
        commit: {
            "train.jsonl": json.dumps({"prompt": f"of {commit}"}).encode() + b"\n",
            "test.jsonl": b'{"prompt": "held out"}\n',
        }
        for commit in (OLD, NEW)
    },
    "models/acme/model": {
        commit: {"config.json": json.dumps({"commit": commit}).encode()} for commit in (OLD, NEW)
    },
}
CONFIG = {
    "model": {"tiny": None, "path": "acme/model"},
    "tasks": {"environment": "single_turn", "dataset": "acme/rows", "evaluation_split": "test"},
}
READ = """
import sys
from huggingface_hub import snapshot_download
from actors.environment.data_sets import read_data_set
from pathlib import Path
print(Path(snapshot_download("acme/model")).name)
for split in ("train", "test"):
    tasks = read_data_set("acme/rows", environment="single_turn", columns={}, split=split)
    print(tasks[0].data["prompt"])
"""


@pytest.fixture
def hub() -> Iterator[str]:
    with model_hub(REPOSITORIES) as address:
        yield address


def run(command: list[str], variables: dict[str, str]) -> list[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        command,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def fetch(hub: str, home: Path, revisions: dict[str, str]) -> None:
    """Run the container's program, as the chart renders it."""
    cache = {"enabled": True, "revisions": revisions}
    head = pod_templates(rendered({"config": CONFIG, "modelCache": cache}))["head"]
    [container] = head["spec"]["initContainers"]
    assert container["command"][-2:] == ["python", "-c"]
    printed = run(
        [sys.executable, "-c", *container["args"]], {"HF_HOME": str(home), "HF_ENDPOINT": hub}
    )
    assert [line.split()[0] for line in printed] == ["acme/model", "acme/rows", "acme/rows"]


def read(home: Path) -> list[str]:
    """Read as an offline pod does, with Rayloom's reader, and return the printed lines."""
    return run([sys.executable, "-c", READ], {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"})


def test_pods_that_are_offline_read_what_was_fetched(hub: str, tmp_path: Path) -> None:
    fetch(hub, tmp_path, {})
    assert read(tmp_path) == [NEW, f"of {NEW}", "held out"]


@pytest.mark.parametrize("first", [{}, {"acme/rows": NEW}])
def test_pods_read_the_pinned_commit_also_if_another_was_fetched_before(
    first: dict[str, Any], hub: str, tmp_path: Path
) -> None:
    fetch(hub, tmp_path, first)
    fetch(hub, tmp_path, {"acme/rows": OLD, "acme/model": OLD})
    assert read(tmp_path) == [OLD, f"of {OLD}", "held out"]
    # Return to the first commit, although both are in the cache.
    fetch(hub, tmp_path, {"acme/rows": NEW, "acme/model": NEW})
    assert read(tmp_path) == [NEW, f"of {NEW}", "held out"]
