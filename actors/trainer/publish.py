"""Gather full weights from the shards, and pack each layer's tensors for the engines.

Invariant: the engine receives each tensor of the model's checkpoint once, under its name in the
files. A tied head is sent only as the embedding. The invariant also holds if transformers renames a
module, or stores a layer's experts as one tensor. Adapters are merged into the weights, or only the
adapters are sent, under PEFT's names. Gathering is collective: every rank iterates to the end, even
if it keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from actors.trainer.lora import (
    LoraLinear,
    adapted_layers,
    checkpoint_names,
    is_of_adapter,
    merged_weight,
    peft_names,
)
from actors.trainer.process_group import MOVED
from actors.weights.board import WeightGroup
from actors.weights.buffers import layer_groups, pack_group

NamedTensors = list[tuple[str, Tensor]]


@torch.no_grad()
def gather_groups(causal_lm: PreTrainedModel, *, dtype: torch.dtype) -> Iterator[NamedTensors]:
    """Gather the full tensors layer by layer, so that at most two layers are in memory.

    Adapters are merged into the weights.

    Args: dtype: type of the sent parameters. It is the type in which the trainer computes, so that
        trainer and engine round the weights in the same way.
    """
    parameters = {
        name: parameter
        for name, parameter in causal_lm.named_parameters()
        if not is_of_adapter(name)
    }
    adapted = {f"{name}.weight": layer for name, layer in adapted_layers(causal_lm)}
    buffers = persistent_buffers(causal_lm)

    def gather(name: str) -> Tensor:
        if name in buffers:
            return buffers[name]
        layer = adapted.get(name)
        return (_full(parameters[name]) if layer is None else _merged(layer)).to(dtype)

    for names in layer_groups([*parameters, *buffers]):
        gathered = {name: gather(name) for name in names}
        MOVED.add(sum(tensor.nbytes for tensor in gathered.values()))
        yield _as_in_checkpoint(causal_lm, gathered)


@torch.no_grad()
def gather_adapters(causal_lm: PreTrainedModel, *, dtype: torch.dtype) -> Iterator[NamedTensors]:
    """Gather the adapters layer by layer, under the names that PEFT uses in its files.

    B is sent as alpha / rank * B, so that the engine needs no scale.
    """
    layers, names = dict(adapted_layers(causal_lm)), checkpoint_names(causal_lm)
    for group in layer_groups(list(layers)):
        gathered: NamedTensors = []
        for name in group:
            half_a, half_b = _full(layers[name].lora_A), _full(layers[name].lora_B)
            halves = half_a.to(dtype), (layers[name].scale * half_b).to(dtype)
            gathered += zip(peft_names(names[name]), halves, strict=True)
        MOVED.add(sum(tensor.nbytes for _, tensor in gathered))
        yield gathered


def _merged(layer: LoraLinear) -> Tensor:
    halves = _full(layer.lora_A), _full(layer.lora_B)
    return merged_weight(_full(layer.weight), *halves, scale=layer.scale)


def _as_in_checkpoint(causal_lm: PreTrainedModel, tensors: dict[str, Tensor]) -> NamedTensors:
    """Give the tensors of whole layers the names and shapes of the model's checkpoint."""
    return list(revert_weight_conversion(causal_lm, tensors).items())


def persistent_buffers(causal_lm: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, such as a router's bias.

    Engines must receive these buffers with the weights; otherwise the buffers are unset after an
    engine loads a layer. Buffers keep their type, because the trainer does not round them either.
    """
    saved = causal_lm.state_dict()
    return {name: buffer for name, buffer in causal_lm.named_buffers() if name in saved}


def _full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def pack_weights(
    causal_lm: PreTrainedModel,
    *,
    dtype: torch.dtype,
    is_kept: bool,
    only_adapters: bool = False,
) -> Iterator[WeightGroup]:
    """Gather the weights layer by layer, and yield each layer's tensors as a packed group.

    Every rank must exhaust the iterator.

    Args: is_kept: whether this rank yields the groups; if not, it only takes part in gathering.
    only_adapters: whether to gather the adapters instead of the weights.
    """
    gather = gather_adapters if only_adapters else gather_groups
    for named in gather(causal_lm, dtype=dtype):
        if is_kept:
            yield pack_group(named)
