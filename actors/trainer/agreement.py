"""Agree among the ranks to refuse a step's shards, or to abandon the step before its first update.

A shard is one rank's part of a step's batch. A rank refuses a shard that was made for another
version than the trainer holds, has tokens that are too old, or does not fit the other shards. If
one rank refuses, all ranks refuse: otherwise they would wait for this rank in a later collective.
The packing of rows is not checked here.

A step is abandoned so that a run can end within its grace period. The request reaches the ranks at
different times. So between two micro-batches the ranks agree whether any rank has received it.
Until the step's first update the ranks can still write the previous step's checkpoint. torch is
imported late, because the supervisor imports the errors.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from actors.batch import RankShard
from actors.policy_age import newest_kept, policy_ages

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class ShardRefused(ValueError):
    """A shard does not fit this trainer; nothing was trained and the weights are unchanged."""


class PolicyTooOld(ValueError):
    """A token is older than the age bound allows; nothing was trained."""


_REFUSALS = (ShardRefused, PolicyTooOld)


def check_versions(
    shard: RankShard,
    *,
    trainer_version: int,
    max_policy_age: int | None,
    republished: Sequence[int] = (),
) -> None:
    """Check that a shard was made for the trainer's version, and that no token is too old.

    Args: trainer_version: the version that this rank holds. max_policy_age: the largest age of a
    token, in training steps; None: no limit. republished: versions that were published for the same
    step as the version before them. Example: if 5 is in `republished`, a shard that was made for
    version 4 fits a trainer that holds version 5.
    Raises: ShardRefused if the shard was made for another version, or if a token is newer than
    trainer_version; PolicyTooOld if a token is older than max_policy_age.
    """
    made_for = np.array([shard.trainer_version], np.int32)
    if policy_ages(made_for, trainer_version, republished)[0] != 0:
        raise ShardRefused(
            f"trainer: got a batch made for version {shard.trainer_version}, expected version "
            f"{trainer_version}, which the trainer holds; make the batch again"
        )
    rows = [row for minibatch in shard.minibatches for row in minibatch]
    versions = np.concatenate([np.empty(0, np.int32), *(row.sampled_versions for row in rows)])
    if not versions.shape[0]:
        return
    age = int(policy_ages(versions, trainer_version, republished).max())
    newest = newest_kept(versions)
    if newest > trainer_version:
        raise ShardRefused(
            f"trainer: a token was sampled by version {newest}, expected at most "
            f"{trainer_version}, which the trainer holds; engine and trainer disagree"
        )
    if max_policy_age is not None and age > max_policy_age:
        raise PolicyTooOld(
            f"trainer: the oldest token is {age} training steps old, expected at most "
            f"{max_policy_age}; admission let a group in too early"
        )


def agree_on(
    shard: RankShard,
    *,
    trainer_version: int,
    max_policy_age: int | None,
    device: torch.device,
    republished: Sequence[int] = (),
) -> None:
    """Raise on every rank if a rank refuses its shard, or if the shards do not fit together.

    The shards must have the same step and version, and the same numbers of rows.

    Args: trainer_version, max_policy_age, republished: as for `check_versions`.
    Raises: ShardRefused or PolicyTooOld, with the reason of the first rank that refuses.
    """
    import torch

    from actors.trainer.process_group import gather_rows, gather_texts

    fault: ShardRefused | PolicyTooOld | None = None
    try:
        check_versions(
            shard,
            trainer_version=trainer_version,
            max_policy_age=max_policy_age,
            republished=republished,
        )
    except _REFUSALS as error:
        fault = error
    kind = 0 if fault is None else 1 + _REFUSALS.index(type(fault))
    outline = _outline(shard)
    rows = gather_rows(torch.tensor([kind, outline], dtype=torch.float64, device=device)).tolist()
    if any(kind for kind, _ in rows):
        texts = gather_texts("" if fault is None else str(fault))
        number = next(index for index, (kind, _) in enumerate(rows) if kind)
        raise _REFUSALS[int(rows[number][0]) - 1](f"rank {number}: {texts[number]}")
    if len({outline for _, outline in rows}) > 1:
        raise ShardRefused(
            f"trainer: the {len(rows)} ranks' shards of step {shard.step} differ in step, version "
            "or numbers of rows, expected the same on every rank"
        )


def _outline(shard: RankShard) -> int:
    """Hash the parts of a shard that must be equal on all ranks."""
    minibatches = [len(item) for item in shard.minibatches]
    num_values = None if shard.value_rows is None else len(shard.value_rows)
    return zlib.crc32(repr((shard.step, shard.trainer_version, minibatches, num_values)).encode())


class StepAbandoned(Exception):
    """A step was abandoned; the weights are those of the previous step."""


class Abandonment:
    """A request to abandon the step, which reaches all ranks if one rank receives it.

    All ranks must call `check`, a collective on a gloo group that training does not use.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._is_asked = threading.Event()

    def ask(self) -> None:
        """Request that the current and every later step is abandoned; callable from any thread."""
        self._is_asked.set()

    def check(self) -> None:
        """Raise StepAbandoned on every rank if any rank has received the request."""
        import torch
        import torch.distributed as dist

        is_asked = torch.tensor([int(self._is_asked.is_set())])
        if self._group.size() > 1:
            dist.all_reduce(is_asked, op=dist.ReduceOp.MAX, group=self._group)
        if is_asked.item():
            raise StepAbandoned("the current step was abandoned")
