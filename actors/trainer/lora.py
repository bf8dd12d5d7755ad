"""Low-rank adapters (LoRA) in the linear layers of the policy, and their tensors.

A layer computes W x + s B A x, with its weight W frozen, A [rank, in], B [out, rank] and
s = alpha / rank.   Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
A starts random and B at 0, so the first policy is the base model.

    attach_adapters(causal_lm, LoraSettings(rank=8), seed=0)      # before the model is sharded
    with adapters_off(causal_lm):                                 # the base model: the reference
        causal_lm(...)

After `attach_adapters`, only adapters are trainable. A model is refused if its forward pass skips
any layer with an adapter, except an expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from actors.trainer.attention.forest import build_layout
from actors.trainer.model_check import hidden_states
from actors.trainer.process_group import gather_texts
from actors.trainer.settings import LoraSettings

# Layers that choose experts. A small change of such a layer routes tokens to other experts, and
# engines do not support adapters in it.
_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)$")
# The experts of a mixture. An expert is not called if no token of a short row is routed to it.
_EXPERT = re.compile(r"\.experts\.")
_PREFIX = "base_model.model."


class LoraLinear(nn.Linear):
    """A linear layer with a frozen weight and an adapter.

    The parameters `weight` and `bias` have the same names as in a layer without an adapter.
    is_adapted: whether the forward pass adds the adapter.
    """

    def __init__(
        self, base: nn.Linear, *, rank: int, scale: float, generator: torch.Generator
    ) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = Parameter(torch.empty(rank, base.in_features))
        self.lora_B = Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5), generator=generator)
        self.scale = scale
        self.is_adapted = True

    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight, self.bias)
        if not self.is_adapted:
            return output
        return output + self.scale * F.linear(F.linear(input, self.lora_A), self.lora_B)


def attach_adapters(causal_lm: PreTrainedModel, settings: LoraSettings, *, seed: int) -> None:
    """Freeze a model and add adapters to its linear layers; equal seeds give equal adapters.

    Raises: NotImplementedError if a target is not the name of a linear layer, or if the model does
        not call a layer that would have an adapter.
    """
    causal_lm.requires_grad_(False)
    body = causal_lm.base_model
    chosen = _chosen(body, settings.targets)
    generator = torch.Generator().manual_seed(seed)
    for name, layer in chosen.items():
        adapted = LoraLinear(
            layer,
            rank=settings.rank,
            scale=settings.alpha / settings.rank,
            generator=generator,
        )
        parent, _, attribute = name.rpartition(".")
        setattr(body.get_submodule(parent), attribute, adapted)
    _check_called(body)


def target_names(config: PretrainedConfig, settings: LoraSettings) -> list[str]:
    """Return the last part of each adapted layer's name, such as q_proj, from the configuration.

    Raises: NotImplementedError if a target is not the name of a linear layer, or if an engine
    cannot load a layer's adapter (`checkpoint_names`).
    """
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(config)
    layers = _chosen(causal_lm.base_model, settings.targets)
    if not settings.publish_merged:
        for name, layer in layers.items():
            _checkpoint_name(causal_lm, f"{causal_lm.base_model_prefix}.{name}", layer)
    return sorted({name.rpartition(".")[2] for name in layers})


def num_adapter_parameters(config: PretrainedConfig, settings: LoraSettings) -> int:
    """Return the number of parameters of all adapters, from the configuration.

    Raises: NotImplementedError if a target is not the name of a linear layer.
    """
    with torch.device("meta"):
        body = AutoModelForCausalLM.from_config(config).base_model
    layers = _chosen(body, settings.targets).values()
    return sum(settings.rank * (layer.in_features + layer.out_features) for layer in layers)


def _chosen(body: nn.Module, targets: tuple[str, ...] | None) -> dict[str, nn.Linear]:
    """Return the linear layers to adapt, by name."""
    found = {
        name: module
        for name, module in body.named_modules()
        if type(module) is nn.Linear and not _ROUTER.search(name)
    }
    kinds = sorted({name.rpartition(".")[2] for name in found})
    if unknown := sorted(set(targets or ()) - set(kinds)):
        raise NotImplementedError(
            f"trainer.lora: got the target {unknown[0]}, expected some of {', '.join(kinds)}, the "
            "linear layers of this model"
        )
    if not found:
        raise NotImplementedError(
            "trainer.lora: the model has no linear layers (torch.nn.Linear) to adapt; train "
            "without trainer.lora"
        )
    return {
        name: layer
        for name, layer in found.items()
        if targets is None or name.rpartition(".")[2] in targets
    }


def _check_called(body: nn.Module) -> None:
    """Raise NotImplementedError if the model's forward pass skips an adapted layer."""
    called: set[str] = set()
    layers = dict(adapted_layers(body))
    hooks = [
        layer.register_forward_hook(lambda *_, name=name: called.add(name))  # type: ignore[misc]
        for name, layer in layers.items()
    ]
    numbers = np.arange(4, dtype=np.int32)
    row = torch.tensor(numbers, dtype=torch.int64)
    layout = build_layout(np.array([4], np.int32), np.full(1, -1, np.int32), device=row.device)
    try:
        with torch.no_grad():
            hidden_states(body, row, row, layout)
    finally:
        for hook in hooks:
            hook.remove()
    missed = [name for name in layers if name not in called and not _EXPERT.search(name)]
    if missed:
        raise NotImplementedError(
            f"trainer.lora: the model does not call its layer {missed[0]}, so an adapter there "
            "would have no effect; leave its name out of trainer.lora.targets"
        )


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Yield the layers with adapters, each with its name in the model."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Leave the adapters out of forward passes within the block, so that the base model runs."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.is_adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_adapted = True


def freeze_in(causal_lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """Store the frozen parameters in the type of the computation, which saves memory.

    The results do not change, because a forward pass rounds the parameters to that type anyway.
    """
    for parameter in causal_lm.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter of this name is the matrix A or B of an adapter."""
    return name.endswith((".lora_A", ".lora_B"))


def merged_weight(weight: Tensor, half_a: Tensor, half_b: Tensor, *, scale: float) -> Tensor:
    """Return W + s B A in float32.

    Args: weight: [out, in], of any type. half_a: [rank, in] float32. half_b: [out, rank] float32.
    """
    return weight.float() + scale * (half_b.float() @ half_a.float())


def peft_names(module: str) -> tuple[str, str]:
    """Return the names that PEFT gives the halves A and B of a module's adapter."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def checkpoint_names(causal_lm: PreTrainedModel) -> dict[str, str]:
    """Map the name of each adapted layer in transformers' model to its name in the model's files.

    Raises: NotImplementedError if a layer's weight is a part of a larger tensor in the files,
        because an engine cannot load an adapter of such a layer.
    """
    return {
        name: _checkpoint_name(causal_lm, name, layer) for name, layer in adapted_layers(causal_lm)
    }


def _checkpoint_name(causal_lm: PreTrainedModel, name: str, layer: nn.Linear) -> str:
    shape = (layer.out_features, layer.in_features)
    weight = {f"{name}.weight": torch.empty(shape, device="meta")}
    stored = list(revert_weight_conversion(causal_lm, weight).items())
    if [tuple(tensor.shape) for _, tensor in stored] != [shape]:
        raise NotImplementedError(
            f"trainer.lora: the weight of {name} has another shape in the model's files, so "
            "engines cannot load its adapter; leave the layer out of trainer.lora.targets, or set "
            "trainer.lora.publish_merged: true"
        )
    return stored[0][0].removesuffix(".weight")


def base_digest(causal_lm: PreTrainedModel, *, is_collective: bool = True) -> str:
    """Return a digest of the frozen parameters, by which a checkpoint recognises its base model.

    The model must not be sharded yet.
    is_collective: True if all ranks call this function; each rank then reads only a part of the
    parameters. False if only this process calls it; the process then reads all parameters.
    """
    frozen = [item for item in causal_lm.named_parameters() if not is_of_adapter(item[0])]
    if is_collective:
        part = "\n".join(_digests(frozen[dist.get_rank() :: dist.get_world_size()]))
        lines = "\n".join(gather_texts(part)).split("\n")
    else:
        lines = list(_digests(frozen))
    return sha256("\n".join(sorted(filter(None, lines))).encode()).hexdigest()


def _digests(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    for name, parameter in parameters:
        data = parameter.detach().contiguous().view(-1).view(torch.uint8).numpy()
        yield f"{name} {tuple(parameter.shape)} {sha256(data).hexdigest()}"
