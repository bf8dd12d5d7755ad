"""What merging gives: samples, the rows of training data, and what merging came to.

Invariant of a sample: mask 0 means log-probability 0 and version -1. Made by `prefix`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from actors.expert_records import ExpertRecords
from actors.lineage import Mismatch
from actors.types import LogProbs, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row of training data. Its arrays are read-only, or may be.

    token_ids: [T] int32. mask: [T] uint8, 1 = sampled and fit to be trained. logprobs: [T]
    float32, nats, of the behaviour policy, 0 at mask 0. versions: [T] int32, -1 at mask 0.
    prompt_length: tokens of the first turn's prompt. turns: indices in the trajectory.
    token_rewards: [T] float32, 0 where nothing was sampled; None when no turn of the trajectory
    recorded any. A turn that recorded none beside others that did has its reward on its last token.
    experts: recorded routing, each record at the position of the token whose forward pass it is of,
    also where the mask is 0; None when there is none.
    """

    trajectory_id: str
    turns: tuple[int, ...]
    prompt_length: int
    token_ids: TokenIds
    mask: NDArray[np.uint8]
    logprobs: LogProbs
    versions: NDArray[np.int32]
    token_rewards: NDArray[np.float32] | None = None
    experts: ExpertRecords | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.mask))

    def without_experts(self) -> Sample:
        """The sample for a model that routes by itself."""
        return self if self.experts is None else replace(self, experts=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The samples of one trajectory, in the order in which they began.

    mismatches: one for each turn but the first that extended no sample. num_unmerged_tokens: what
    one row a turn would take. num_masked_tokens: sampled, without a finite log-probability.
    """

    samples: tuple[Sample, ...]
    mismatches: tuple[Mismatch, ...]
    num_turns: int
    num_unmerged_tokens: int
    num_masked_tokens: int

    @property
    def num_merged_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def num_trained_tokens(self) -> int:
        return sum(sample.num_trained for sample in self.samples)
