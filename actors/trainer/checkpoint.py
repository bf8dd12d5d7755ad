"""Sharded checkpoints: written aside, renamed, and valid only with their manifest.

A checkpoint is the directory `step-000012-e2`: weights and optimiser as
`torch.distributed.checkpoint` shards them, and `manifest.json`, written last, without which it does
not count (`manifest.py`). Saving and loading are collective. Called by `TrainerRank`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from actors.trainer.manifest import (
    MANIFEST,
    TEMPORARY,
    CheckpointError,
    Progress,
    claim,
    hold,
    read_manifest,
    write_manifest,
)
from actors.trainer.process_group import gather_texts

_CRITIC = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A sharded model and its optimiser."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def save(
    root: Path,
    progress: Progress,
    *,
    policy: Trained,
    critic: Trained | None = None,
) -> Path:
    """Write a checkpoint beside its place and rename it into it; older ones are left alone.

    An older checkpoint of the same name (a step done again under the same lease) is replaced.

    Returns: its directory, on every rank.
    Raises: CheckpointError, on every rank, when a newer epoch has claimed the directory or a rank
        cannot write its shard.
    """
    final = root / progress.directory_name
    aside = root / f"{TEMPORARY}{progress.directory_name}"
    is_writer = dist.get_rank() == 0
    _together(lambda: _prepare(root, aside, epoch=progress.epoch), does_run=is_writer)
    try:
        dcp.save(_state(policy, critic), checkpoint_id=aside)
    except (CheckpointException, OSError) as error:
        if is_writer:
            # On a full disk it would stand in the way of everything else.
            shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {final}: a rank could not write its shard ({_first_line(error)}); is the "
            "disk full, and does every rank see the same directory?"
        ) from error
    dist.barrier()
    _together(lambda: _finish(root, aside, progress), does_run=is_writer)
    return final


def load(path: Path, *, policy: Trained, critic: Trained | None = None) -> Progress:
    """Read a checkpoint into models and optimisers, whatever number of ranks wrote it.

    A critic in it that nobody asks for is left there.
    Raises: CheckpointError when it is incomplete, broken, of another model, or has no critic for
        the one that is given. The weights may then be half read: load another one before going on.
    """
    progress = read_manifest(path)
    if critic is not None and progress.critic_updates is None:
        raise CheckpointError(
            f"checkpoint {path}: got none of a critic, expected one; the run that wrote it had no "
            "critic: start a new run, with this one's export as its model"
        )
    state = _state(policy, critic)
    try:
        dcp.load(state, checkpoint_id=path)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {path}: its shards cannot be read ({_first_line(error)}), expected "
            f"weights of {progress.model}; use an older one"
        ) from error
    _set_state(policy, state)
    if critic is not None:
        _set_state(critic, state[_CRITIC])
    return progress


def _together(work: Callable[[], None], *, does_run: bool) -> None:
    """Run work on one rank while the others wait for its end; its failure is everyone's."""
    failure = ""
    if does_run:
        try:
            work()
        except (OSError, CheckpointError) as error:
            failure = str(error)
    failures = [text for text in gather_texts(failure) if text]
    if failures:
        raise CheckpointError(failures[0])


def _prepare(root: Path, aside: Path, *, epoch: int) -> None:
    claim(root, epoch)
    aside.mkdir()


def _finish(root: Path, aside: Path, progress: Progress) -> None:
    hold(root, progress.epoch)
    final = root / progress.directory_name
    write_manifest(aside, progress)
    if final.exists():
        _remove(final)
    aside.rename(final)
    _sync_directory(root)


def _state(policy: Trained, critic: Trained | None) -> dict[str, Any]:
    state = _state_of(policy)
    return state if critic is None else {**state, _CRITIC: _state_of(critic)}


def _state_of(trained: Trained) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(trained.model),
        "optimizer": get_optimizer_state_dict(trained.model, trained.optimizer),
    }


def _set_state(trained: Trained, state: dict[str, Any]) -> None:
    set_model_state_dict(trained.model, state["model"])
    set_optimizer_state_dict(trained.model, trained.optimizer, optim_state_dict=state["optimizer"])


def _sync_directory(root: Path) -> None:
    """Make the rename itself survive a power cut."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Delete a checkpoint, its manifest first, so that a half-deleted one does not count."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
