"""Log-probabilities of a step's trained tokens without gradient: of the old policy, or a reference.

Collective: all ranks score minibatches of equally many rows, in the same order. Called by
`TrainerRank` at the step's start, and only where the loss asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from actors.batch import Minibatch
from actors.trainer.model import PolicyModel
from actors.trainer.row import RowTensors, row_tensors

# By minibatch, then by micro-batch: [M] float32, nats, on the device.
Scores = list[list[Tensor]]


def score_row(policy: PolicyModel, row: RowTensors, *, temperature: float) -> Tensor:
    """Score one row's targets without gradient, recorded experts replayed: [M] float32, nats."""
    with torch.no_grad():
        logprobs, _ = policy(
            row.token_ids,
            row.position_ids,
            row.layout,
            row.loss_positions,
            row.targets,
            temperature=temperature,
            experts=row.experts,
        )
    return logprobs


def score_minibatches(
    policy: PolicyModel,
    sharded: Sequence[FSDPModule],
    minibatches: Sequence[Minibatch],
    *,
    device: torch.device,
    temperature: float,
) -> Scores:
    """Score every row of a step, and free the gathered weights behind it.

    Args: sharded: the policy's sharded modules, as `shard_policy` returned them.
    """
    scores = [
        [
            score_row(policy, row_tensors(row, device=device), temperature=temperature)
            for row in minibatch.micro_batches
        ]
        for minibatch in minibatches
    ]
    free_weights(sharded)
    return scores


def free_weights(sharded: Sequence[FSDPModule]) -> None:
    """Let go of gathered weights after a forward that no backward pass follows.

    They would stay, and the next forward after an update would still read them.
    """
    for module in sharded:
        module.reshard()
