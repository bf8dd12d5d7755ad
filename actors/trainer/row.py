"""A packed row as tensors on the rank's device, with its attention layout.

Pure; called by `TrainerRank` for training rows and for the text of the parity check.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.batch import Float32s, Int32s, MicroBatch
from actors.trainer.attention.forest_layout import PackedLayout, build_layout
from actors.trainer.loss.micro_batch import MicroBatchTerms
from actors.trainer.routing_replay import ReplayedExperts, replayed_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """token_ids, position_ids: [T] int64. loss_positions, targets: [M] int64.

    behaviour_logprobs (nats), advantages, loss_weights: [M] float32. sampled_versions,
    trajectory_index: [M] int64. experts: recorded routing, None when there is none.
    """

    token_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout
    loss_positions: Tensor
    targets: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    sampled_versions: Tensor
    loss_weights: Tensor
    trajectory_index: Tensor
    experts: ReplayedExperts | None

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    def terms(
        self,
        current_logprobs: Tensor,
        entropies: Tensor,
        *,
        trainer_version: int,
        old_logprobs: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
    ) -> MicroBatchTerms:
        """What the loss asks about the row's trained tokens. Args: [M] float32 each."""
        return MicroBatchTerms(
            current_logprobs=current_logprobs,
            behaviour_logprobs=self.behaviour_logprobs,
            entropies=entropies,
            advantages=self.advantages,
            loss_weights=self.loss_weights,
            trajectory_index=self.trajectory_index,
            sampled_versions=self.sampled_versions,
            trainer_version=trainer_version,
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
        )


def row_tensors(row: MicroBatch, *, device: torch.device) -> RowTensors:
    """Copy a micro-batch to the device. A row without tokens becomes one untrained token."""
    if not row.num_tokens:
        row = scoring_row(np.zeros(1, dtype=np.int32))

    def ints(values: NDArray[np.int32]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def floats(values: NDArray[np.float32]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return RowTensors(
        token_ids=ints(row.token_ids),
        position_ids=ints(row.position_ids),
        layout=build_layout(row.segment_lengths, row.segment_parents, device=device),
        loss_positions=ints(row.loss_positions),
        targets=ints(row.targets),
        behaviour_logprobs=floats(row.behaviour_logprobs),
        advantages=floats(row.advantages),
        sampled_versions=ints(row.sampled_versions),
        loss_weights=floats(row.loss_weights),
        trajectory_index=ints(row.trajectory_index),
        experts=None if row.experts is None else replayed_experts(row.experts, device=device),
    )


def scoring_row(token_ids: Int32s) -> MicroBatch:
    """Make a row of one sample, every token but the first scored behind its predecessors.

    Args: token_ids: [T] int32, T at least 1. Returns: a row with M = T - 1.
    """
    num_tokens = int(token_ids.shape[0])
    num_scored = num_tokens - 1
    zeros: Float32s = np.zeros(num_scored, dtype=np.float32)
    return MicroBatch(
        token_ids=token_ids,
        position_ids=np.arange(num_tokens, dtype=np.int32),
        segment_lengths=np.array([num_tokens], dtype=np.int32),
        segment_parents=np.full(1, -1, dtype=np.int32),
        loss_positions=np.arange(num_scored, dtype=np.int32),
        targets=token_ids[1:],
        behaviour_logprobs=zeros,
        advantages=zeros,
        sampled_versions=np.zeros(num_scored, dtype=np.int32),
        loss_weights=zeros,
        trajectory_index=np.zeros(num_scored, dtype=np.int32),
    )
