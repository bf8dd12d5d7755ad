"""Decide whether a stored run may resume, from which checkpoint, and which checkpoints to keep.

`rayloom train --resume` checks this before anything starts, and the supervisor at each start or
recovery. While the run trains, the checkpoints that need not be kept are removed.

A commit is a checkpoint that the run's database records. A term is the period from one start or
recovery of the run to the next. Each term has its own lease on the run, and its number is in the
names of its checkpoints' directories.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.deadline import poll
from actors.trainer.checkpoint import CheckpointError, read_manifest
from service.config.file import ConfigError
from service.launch.run_dir import RunDir
from service.store.database import PATIENCE_S
from service.store.errors import LeaseHeld, LeaseLost, StoreError
from service.store.leases import TOLERANCE_S
from service.store.lineage import Checkpoint, is_named, mean_returns
from service.store.read_only import ReadOnlyStore
from service.store.retention import milestones
from service.store.run_store import RunStore

# A supervisor continues for a moment after its command is killed by SIGKILL.
LEASE_LIMIT_S = 10.0
# Number of skipped updates' inputs to keep: ten steps (trainer.max_skipped_steps' default) of two
# ranks.
KEPT_SKIPPED = 20
_STEP_AND_TERM = re.compile(r"step-(\d+)-t(\d+)")


def check_lease_free(run_dir: RunDir) -> None:
    """Check that no process owns the run; wait up to LEASE_LIMIT_S for an owner to end.

    Raises: ConfigError if the owner of the run's lease is still alive.
    """
    with run_dir.looked_into(may_be_older=True) as store:
        poll(lambda: store.live_owner() is None or None, limit_s=LEASE_LIMIT_S)
        owner = store.live_owner()
    if owner is not None:
        raise ConfigError(
            f"--resume {run_dir.path}: the run is held by {owner}, its supervisor; the last "
            f"sign of life came {owner.silent_s:.0f} s ago; expected a run "
            "that no process holds; end it with Ctrl-C or SIGTERM where it was started, wait "
            f"{TOLERANCE_S:g} s if its machine is dead, or take the run from it with "
            "--take-over"
        )


def find_faults(checkpoints: Path, commits: Sequence[Checkpoint]) -> dict[str, str]:
    """Check the committed checkpoints, newest first, until one can be read.

    Returns: the error message of each checkpoint that cannot be read, by the name of its directory;
    older checkpoints than the first readable one are not checked.
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


def newest_complete(checkpoints: Path) -> Path | None:
    """Return the directory of the newest complete checkpoint; None if no checkpoint is complete.

    The function does not read the database. So the checkpoint may be of a step that a recovery has
    undone.
    """
    numbered: list[tuple[int, int, Path]] = []
    for directory in checkpoints.glob("step-*-t*"):
        if found := _STEP_AND_TERM.fullmatch(directory.name):
            numbered.append((int(found[2]), int(found[1]), directory))
    for *_, directory in sorted(numbered, reverse=True):
        try:
            read_manifest(directory)
        except CheckpointError:
            continue
        return directory
    return None


def newest_usable(checkpoints: Path, commits: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the newest committed checkpoint that can be read; None if the run has no commits.

    Args: commits: the run's committed checkpoints, newest first.
    Raises: StoreError if there are commits, but none can be read.
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


def named_checkpoint(run_dir: RunDir, name: str) -> Checkpoint:
    """Return the committed checkpoint that the user names by its directory or its step's number.

    Raises: ConfigError if the run has no such checkpoint, or if the checkpoint cannot be read.
    """
    try:
        with run_dir.looked_into() as store:
            commits = store.checkpoints()
    except StoreError as error:
        raise ConfigError(f"--checkpoint {name}: {error}") from error
    found = next((commit for commit in commits if is_named(commit, name)), None)
    if found is None:
        there = ", ".join(commit.directory for commit in commits)
        raise ConfigError(
            f"--checkpoint {name}: the run in {run_dir.path} cannot return to this checkpoint; "
            f"expected the name or the step of one of its checkpoints: {there or 'it has none'}"
        )
    if fault := find_faults(run_dir.checkpoints, [found]).get(found.directory):
        raise ConfigError(f"--checkpoint {name}: {fault}")
    return found


def check_not_taken_over(run_dir: RunDir, *, lost: str) -> None:
    """Check that no new process has taken over the run of a supervisor that Ray reports as dead.

    Ray's report may be wrong, so the check passes if `lost` is alive and owns the run.
    Args: lost: HOST:PID of the reported supervisor; empty if its name is not known.
    Raises: LeaseLost if a living process other than `lost` owns the run; StoreError.
    """
    with run_dir.looked_into(patience_s=PATIENCE_S, may_be_older=True) as store:
        owner = store.live_owner()
    if owner is not None and owner.name != lost:
        raise LeaseLost(f"{owner} has taken the run over")


def kept_commits(
    checkpoints: Path,
    store: RunStore,
    *,
    term: int,
    keep: int,
    keep_best: int = 0,
    collapsed_since: int | None = None,
) -> list[Checkpoint]:
    """Return the committed checkpoints to keep, newest first; the caller may remove the others.

    Keep the newest `keep` checkpoints, the `keep_best` checkpoints with the highest mean return
    (`mean_returns`), and the checkpoints that `milestones` chooses. If two checkpoints have equal
    mean returns, the newer one counts as better.
    Args: term: number of the caller's lease on the run. collapsed_since: the first step of a
        suspected collapse of the reward; None if no collapse is suspected.
    Returns: an empty list if no checkpoint was committed under this lease yet, or if the
        directories of all checkpoints to keep are missing. The caller must then remove nothing.
    Raises: LeaseLost if a newer lease owns the run.
    """
    store.check_lease(term)
    kept = chosen_commits(store, keep=keep, keep_best=keep_best, collapsed_since=collapsed_since)
    is_ours = bool(kept) and kept[0].term == term
    is_there = any((checkpoints / commit.directory).is_dir() for commit in kept)
    return kept if is_ours and is_there else []


def chosen_commits(
    store: ReadOnlyStore, *, keep: int, keep_best: int, collapsed_since: int | None = None
) -> list[Checkpoint]:
    """Return the committed checkpoints to keep, newest first, by the rules of `kept_commits`.

    Unlike `kept_commits`, this function does not check the lease or the checkpoints' directories.
    """
    commits = store.checkpoints()
    if not commits:
        return []
    returns = mean_returns(store, [commit.step for commit in commits]) if keep_best else {}
    ranked = [commit for commit in commits if commit.step in returns]
    ranked.sort(key=lambda commit: (returns[commit.step], commit.id), reverse=True)
    best = {commit.id for commit in ranked[:keep_best]}
    old = milestones([commit.step for commit in commits], collapsed_since=collapsed_since)
    return [
        commit
        for number, commit in enumerate(commits)
        if number < keep or commit.id in best or commit.step in old
    ]


def prune_directories(
    checkpoints: Path, kept: Sequence[Checkpoint], *, uploading: str = ""
) -> None:
    """Remove the directories of checkpoints that are not in `kept`, also incomplete directories.

    Directories that are newer than `kept[0]` stay: a checkpoint may not be committed yet, or
    another supervisor may have written it. Old files with the inputs of skipped updates are removed
    too; the newest KEPT_SKIPPED stay.
    Args: kept: one or more checkpoints, newest first. uploading: name of a directory that stays
    because it is being uploaded; empty if there is none.
    """
    names, newest = {uploading, *(commit.directory for commit in kept)}, kept[0]
    for directory in checkpoints.glob("step-*-t*"):
        found = _STEP_AND_TERM.fullmatch(directory.name)
        step, term = map(int, found.groups()) if found else (0, 0)
        is_ahead = term > newest.term or (term == newest.term and step > newest.step)
        if directory.name not in names and not is_ahead:
            shutil.rmtree(directory, ignore_errors=True)
    inputs = sorted((checkpoints / "skipped").glob("*.npz"), key=_modified_at)
    for path in inputs[:-KEPT_SKIPPED]:
        path.unlink(missing_ok=True)


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def fallback_notice(faults: Mapping[str, str], newest: Checkpoint, used: Checkpoint) -> str:
    """Return a warning for the user that the run resumes from an older checkpoint than the newest.

    Args: faults: the result of `find_faults`. newest: the newest checkpoint, which cannot be used.
    used: the checkpoint from which the run resumes.
    """
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
    """Return the last step of a run that has nothing left to do; None if something is left.

    Nothing is left if all steps are in a checkpoint and summary.json is written.
    Args: steps: number of planned steps.
    Raises: StoreError if there are checkpoints but none can be used.
    """
    with run_dir.looked_into(may_be_older=True) as store:
        newest = newest_usable(run_dir.checkpoints, store.checkpoints())
    if newest is None or newest.step < steps:
        return None
    # A run that died between its last checkpoint and its report must still write its report.
    return newest.step if _reported_steps(run_dir) == newest.step else None


def move_finished(run_dir: RunDir) -> None:
    """Convert the database of a finished run to the current format, if it has an older format.

    Raises: ConfigError if another process owns the run; StoreError.
    """
    with run_dir.looked_into(may_be_older=True) as looked:
        if not looked.is_older():
            return
    store = RunStore(run_dir.database_url, patience_s=run_dir.patience_s, may_be_older=True)
    try:
        store.move_forward()
    except LeaseHeld as error:
        raise ConfigError(
            f"--resume {run_dir.path}: {error}; it is in an older format and can be moved forward "
            "once no process holds it: end that process first"
        ) from error
    finally:
        store.close()


def _reported_steps(run_dir: RunDir) -> int | None:
    try:
        summary = json.loads(run_dir.summary_file.read_text())
    except (OSError, ValueError):
        return None
    steps = summary.get("steps") if isinstance(summary, dict) else None
    return steps if isinstance(steps, int) else None
