"""The reference policy of one rank: frozen, sharded beside the trained one, and only ever scored.

Collective, as `scoring`. Called by `TrainerRank`, which loads it where the loss or the rewards have
a KL term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from actors.batch import Minibatch
from actors.trainer.model import load_policy, shard_policy
from actors.trainer.scoring import Scores, score_minibatches
from actors.trainer.settings import RankSettings


class Reference:
    """Weights that never change.

    Recorded experts are not replayed in it: they are another policy's choice, and a KL term is
    measured to the reference as it would play.
    """

    def __init__(
        self,
        settings: RankSettings,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        param_dtype: torch.dtype,
    ) -> None:
        """Load the model and shard it. Raises: OSError (transformers); as `load_policy`."""
        self._device = device
        self._temperature = settings.temperature
        self._policy = load_policy(
            settings.algorithm.reference or settings.model,
            logprob_chunk=settings.logprob_chunk,
            gradient_checkpointing=False,
        ).requires_grad_(False)
        self._sharded = shard_policy(
            self._policy,
            mesh,
            param_dtype=param_dtype,
            reshard_after_forward=settings.shard_between_micro_batches,
        )

    def score(self, minibatches: Sequence[Minibatch]) -> Scores:
        """Log-probabilities of the rows' targets."""
        return score_minibatches(
            self._policy,
            self._sharded,
            [_without_experts(minibatch) for minibatch in minibatches],
            device=self._device,
            temperature=self._temperature,
        )


def _without_experts(minibatch: Minibatch) -> Minibatch:
    rows = tuple(replace(row, experts=None) for row in minibatch.micro_batches)
    return replace(minibatch, micro_batches=rows)
