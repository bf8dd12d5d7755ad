"""Gather full weights from the shards and pack them by group for the weight board.

Invariant: names and tensors are those of the model's checkpoint, each once (a tied head is sent
only as the embedding). If transformers holds a layer's experts as one tensor, or names a module
differently, the engine still receives what it would read from a file. Gathering is collective:
every rank iterates to the end, also ranks that keep nothing. Called by `TrainerRank`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from actors.trainer.process_group import MOVED
from actors.weights.board import WeightGroup
from actors.weights.buffers import layer_groups, pack_group

NamedTensors = list[tuple[str, Tensor]]


@torch.no_grad()
def gather_groups(causal_lm: PreTrainedModel, *, dtype: torch.dtype) -> Iterator[NamedTensors]:
    """Gather the full tensors layer by layer, so that at most two layers are in memory.

    Args: dtype: type of the sent parameters: the one that the trainer computes in, so that trainer
        and engine round the weights in the same way.
    """
    parameters = dict(causal_lm.named_parameters())
    buffers = persistent_buffers(causal_lm)
    for names in layer_groups([*parameters, *buffers]):
        gathered = {
            name: buffers[name] if name in buffers else _full(parameters[name]).to(dtype)
            for name in names
        }
        MOVED.add(sum(tensor.nbytes for tensor in gathered.values()))
        yield _as_in_checkpoint(causal_lm, gathered)


def _as_in_checkpoint(causal_lm: PreTrainedModel, tensors: dict[str, Tensor]) -> NamedTensors:
    """Return the tensors of whole layers with the names and shapes of the model's checkpoint."""
    return list(revert_weight_conversion(causal_lm, tensors).items())


def persistent_buffers(causal_lm: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, such as a router's bias.

    They must be sent, because an engine that loads a layer again would leave them unset. They keep
    their type, because the trainer does not round them either.
    """
    saved = causal_lm.state_dict()
    return {name: buffer for name, buffer in causal_lm.named_buffers() if name in saved}


def _full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def pack_weights(
    causal_lm: PreTrainedModel, *, dtype: torch.dtype, is_kept: bool
) -> Iterator[WeightGroup]:
    """Gather the weights layer by layer on every rank, and pack them on ranks that keep them.

    Yields: a packed group for each layer if is_kept; otherwise nothing, but all are gathered.
    """
    for named in gather_groups(causal_lm, dtype=dtype):
        if is_kept:
            yield pack_group(named)
