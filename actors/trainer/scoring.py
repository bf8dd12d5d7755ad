"""Log-probabilities of a step's trained tokens without gradient, by the old policy or a reference.

Collective: all ranks score minibatches with the same numbers of rows, in the same order. Called by
`TrainerRank` before and at the start of a step, only if the loss or the rewards need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actors.batch import MicroBatch, Minibatch
from actors.trainer.lora import adapters_off
from actors.trainer.model import PolicyModel, RowTensors, row_tensors
from actors.trainer.sharded_model import ShardedModel

Scores = list[list[Tensor]]
"""By minibatch, then by micro-batch: [M] float32, nats, on the device."""


@torch.no_grad()
def score_row(policy: PolicyModel, row: RowTensors) -> Tensor:
    """Return the log-probabilities of one row's targets, [M] float32, nats, without gradient.

    Recorded experts are replayed.
    """
    logprobs: Tensor = policy(row)[0]
    return logprobs


def score_minibatches(
    policy: ShardedModel[PolicyModel],
    minibatches: Sequence[Minibatch],
    *,
    check: Callable[[], None],
) -> Scores:
    """Score every row of a step, then free the gathered weights.

    check: called before each row; an error that it raises ends the scoring.
    """

    def score(row: MicroBatch) -> Tensor:
        check()
        tensors = row_tensors(row, device=policy.device)
        return score_row(policy.model, tensors)

    try:
        return [[score(row) for row in minibatch] for minibatch in minibatches]
    finally:
        policy.free_weights()


class Reference:
    """The frozen policy of KL terms, used only for scoring.

    Recorded experts are not replayed in the reference, because another policy chose them. A KL term
    is measured against the reference with its own routing.
    """

    def __init__(self, policy: ShardedModel[PolicyModel]) -> None:
        """Create a reference. policy: the model, whose adapters are off while it scores."""
        self._policy = policy

    def score(self, minibatches: Sequence[Minibatch], *, check: Callable[[], None]) -> Scores:
        """Return log-probabilities of the rows' targets. check: called before each row."""
        without = [
            tuple(replace(row, experts=None) for row in minibatch) for minibatch in minibatches
        ]
        with adapters_off(self._policy.model):
            return score_minibatches(self._policy, without, check=check)
