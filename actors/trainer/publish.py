"""Full weights out of the shards, packed group by group for the weight board.

Invariant: the names are Hugging Face's parameter names, each once (a tied head travels as its
embedding), in the order of the model. Gathering is collective: every rank iterates to the end,
also the ranks that keep nothing. Called by `TrainerRank` and `TrainerRankActor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from actors.weights.buffers import WeightGroup, layer_groups, pack_group

NamedTensors = list[tuple[str, Tensor]]


def weight_names(causal_lm: PreTrainedModel) -> list[str]:
    """Name the weights to publish, a tied head left out."""
    return [name for name, _ in causal_lm.named_parameters()]


@torch.no_grad()
def gather_groups(
    causal_lm: PreTrainedModel, groups: Sequence[Sequence[str]], *, dtype: torch.dtype
) -> Iterator[NamedTensors]:
    """Gather the full tensors of one group after the other, so that one group is in memory.

    Args: groups: a partition of `weight_names`. dtype: what the engines are given: the type that
        the trainer computes in, so that both round the weights alike.
    """
    parameters = dict(causal_lm.named_parameters())
    for names in groups:
        yield [(name, _full(parameters[name]).to(dtype)) for name in names]


def _full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def pack_weights(
    causal_lm: PreTrainedModel, *, dtype: torch.dtype, is_kept: bool
) -> Iterator[WeightGroup]:
    """Gather on every rank and pack, layer by layer, on the ranks that keep the result.

    Yields: one packed group a layer where `is_kept`; nothing elsewhere, once all are gathered.
    """
    groups = layer_groups(weight_names(causal_lm))
    for named in gather_groups(causal_lm, groups, dtype=dtype):
        if is_kept:
            yield pack_group(named)
