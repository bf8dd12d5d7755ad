"""What a run can go on from: the newest committed checkpoint that can be read, or an older one.

Looked at before anything starts, and again by the supervisor at each epoch's begin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.trainer.manifest import CheckpointError, read_manifest
from service.launch.run_dir import RunDir
from service.store.lineage import Checkpoint
from service.store.run_store import RunStore, StoreError


def find_faults(checkpoints: Path, commits: Sequence[Checkpoint]) -> dict[str, str]:
    """What is wrong with the commits, newest first, down to the first that can be read.

    Returns: a sentence for each that cannot be used, by its directory's name.
    """
    faults: dict[str, str] = {}
    for commit in commits:
        try:
            read_manifest(checkpoints / commit.directory)
        except CheckpointError as error:
            faults[commit.directory] = str(error)
        else:
            break
    return faults


def newest_usable(checkpoints: Path, commits: Sequence[Checkpoint]) -> Checkpoint | None:
    """The newest commit whose manifest can be read; None where nothing was ever committed.

    Raises: StoreError when there are commits, but none can be read.
    """
    faults = find_faults(checkpoints, commits)
    if len(faults) < len(commits):
        return commits[len(faults)]
    if not commits:
        return None
    raise StoreError(
        f"none of the run's {len(commits)} committed checkpoints in {checkpoints} can be used "
        f"(the newest: {faults[commits[0].directory]}); restore one of them from a copy, or start "
        "a new run"
    )


def fallback_notice(faults: Mapping[str, str], newest: Checkpoint, used: Checkpoint) -> str:
    """A warning that an older checkpoint is gone on from than the newest."""
    again = f"steps {used.step + 1} to {newest.step} are trained again"
    if newest.step == used.step + 1:
        again = f"step {newest.step} is trained again"
    elif newest.step <= used.step:
        again = "no step is lost"
    return (
        f"the newest checkpoint cannot be used: {faults[newest.directory]}; going back to "
        f"{used.directory}, {again}"
    )


def finished_step(run_dir: RunDir, *, steps: int) -> int | None:
    """The run's last step where all `steps` are done and reported; else None.

    Raises: StoreError when no checkpoint is left to go on from.
    """
    store = RunStore(run_dir.database_url)
    try:
        newest = newest_usable(run_dir.checkpoints, store.checkpoints())
    finally:
        store.close()
    if newest is None or newest.step < steps:
        return None
    # A run that died between its last checkpoint and its report has its report to write.
    return newest.step if _reported_steps(run_dir) == newest.step else None


def _reported_steps(run_dir: RunDir) -> int | None:
    try:
        summary = json.loads(run_dir.summary_file.read_text())
    except (OSError, ValueError):
        return None
    steps = summary.get("steps") if isinstance(summary, dict) else None
    return steps if isinstance(steps, int) else None
