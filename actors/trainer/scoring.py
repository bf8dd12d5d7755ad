"""Log-probabilities of a step's trained tokens without gradient: of the old policy, or a reference.

Collective: all ranks score minibatches of equally many rows, in the same order. Called by
`TrainerRank` before and at the start of a step, and only where loss or rewards ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actors.batch import MicroBatch, Minibatch
from actors.trainer.model import PolicyModel, RowTensors, load_policy, row_tensors
from actors.trainer.settings import RankSettings
from actors.trainer.sharded_model import ShardedModel, Sharding

# By minibatch, then by micro-batch: [M] float32, nats, on the device.
Scores = list[list[Tensor]]


@torch.no_grad()
def score_row(policy: PolicyModel, row: RowTensors) -> Tensor:
    """Score one row's targets without gradient, recorded experts replayed: [M] float32, nats."""
    logprobs: Tensor = policy(row)[0]
    return logprobs


def score_minibatches(
    policy: ShardedModel[PolicyModel],
    minibatches: Sequence[Minibatch],
    *,
    check: Callable[[], None],
) -> Scores:
    """Score every row of a step, then free the gathered weights.

    check: called before each row; what it raises ends the scoring.
    """

    def score(row: MicroBatch) -> Tensor:
        check()
        tensors = row_tensors(row, device=policy.device)
        return score_row(policy.model, tensors)

    try:
        return [[score(row) for row in minibatch.micro_batches] for minibatch in minibatches]
    finally:
        policy.free_weights()


class Reference:
    """The frozen policy of KL terms, sharded beside the trained one and only ever scored.

    Recorded experts are not replayed in it: they are another policy's choice, and a KL term is
    measured to the reference as it would play.
    """

    def __init__(self, settings: RankSettings, sharding: Sharding) -> None:
        """Load the model and shard it. Raises: as `load_policy`."""
        policy = load_policy(
            settings.algorithm.reference or settings.model,
            logprob_chunk=settings.logprob_chunk,
            gradient_checkpointing=False,
            max_context_tokens=settings.max_context_tokens,
        ).requires_grad_(False)
        self._policy = ShardedModel(policy, policy.causal_lm, sharding)

    def score(self, minibatches: Sequence[Minibatch], *, check: Callable[[], None]) -> Scores:
        """Log-probabilities of the rows' targets. check: as `score_minibatches`."""
        return score_minibatches(
            self._policy,
            [_without_experts(minibatch) for minibatch in minibatches],
            check=check,
        )


def _without_experts(minibatch: Minibatch) -> Minibatch:
    rows = tuple(replace(row, experts=None) for row in minibatch.micro_batches)
    return replace(minibatch, micro_batches=rows)
