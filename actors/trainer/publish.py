"""Gather full weights from the shards and pack them by group for the weight board.

Invariant: names and tensors are those of the model's checkpoint, each once (a tied head travels as
its embedding): where transformers holds a layer's experts as one tensor, or calls a module by
another name, the engine is given what it would read from a file. Gathering is collective: every
rank iterates to the end, also the ranks that keep nothing. Called by `TrainerRank`.
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
    """Gather the full tensors layer by layer, so that a layer or two are in memory.

    Args: dtype: of the parameters that the engines are given: the type that the trainer computes
        in, so that both round the weights alike.
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
    """Return whole layers of a model with the names, and in the pieces, of its checkpoint."""
    return list(revert_weight_conversion(causal_lm, tensors).items())


def persistent_buffers(causal_lm: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds: a router's bias, an activation's constants.

    An engine that loads a layer again would leave them unset. They keep their type: the trainer
    does not round them either.
    """
    saved = causal_lm.state_dict()
    return {name: buffer for name, buffer in causal_lm.named_buffers() if name in saved}


def _full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def pack_weights(
    causal_lm: PreTrainedModel, *, dtype: torch.dtype, is_kept: bool
) -> Iterator[WeightGroup]:
    """Gather on every rank and pack, layer by layer, on the ranks that keep the result.

    Yields: one packed group a layer where `is_kept`; nothing elsewhere, once all are gathered.
    """
    for named in gather_groups(causal_lm, dtype=dtype):
        if is_kept:
            yield pack_group(named)
