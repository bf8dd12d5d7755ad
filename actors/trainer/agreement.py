"""All ranks check their own rows, and train only when every one of them can; collective.

Without it a rank that refuses its shard would leave the others waiting in a collective. Called by
`TrainerRank` at the start of a step.
"""

from __future__ import annotations

import torch

from actors.batch import RankShard, ValueShard
from actors.expert_records import ModelShape
from actors.trainer.process_group import gather_rows, gather_texts
from actors.trainer.shard_check import PolicyTooOld, ShardRefused, check_shard, shard_outline

_REFUSALS = (ShardRefused, PolicyTooOld)


def agree_on(
    shard: RankShard,
    value_shard: ValueShard | None = None,
    *,
    trainer_version: int,
    shape: ModelShape,
    max_policy_age: int | None,
    device: torch.device,
) -> None:
    """Raise on every rank when any rank refuses its shard, or their outlines differ.

    Args: trainer_version: what this rank holds. shape: of its model. max_policy_age: versions;
        None: not asserted.
    Raises: ShardRefused, PolicyTooOld; the first rank's reason.
    """
    fault: ShardRefused | PolicyTooOld | None = None
    try:
        check_shard(
            shard,
            trainer_version=trainer_version,
            shape=shape,
            max_policy_age=max_policy_age,
        )
    except _REFUSALS as error:
        fault = error
    kind = 0 if fault is None else 1 + _REFUSALS.index(type(fault))
    outline = shard_outline(shard, value_shard)
    row = torch.tensor([kind, outline], dtype=torch.float64, device=device)
    rows = gather_rows(row).tolist()
    if any(kind for kind, _ in rows):
        texts = gather_texts("" if fault is None else str(fault))
        number = next(index for index, (kind, _) in enumerate(rows) if kind)
        raise _REFUSALS[int(rows[number][0]) - 1](f"rank {number}: {texts[number]}")
    if len({outline for _, outline in rows}) > 1:
        raise ShardRefused(
            f"trainer: the {len(rows)} ranks' shards of step {shard.step} differ in version, "
            "or numbers of micro-batches, expected the same on every rank"
        )
