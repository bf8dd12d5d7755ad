"""Replay recorded routing, so that a mixture-of-experts model uses the experts of the engine.

Rounding can make the trainer's router choose other experts than the engine's router, which gives
the token another probability. Only the choice is replayed. The trainer's router still computes the
weights of the chosen experts, so that the gradient reaches the router. A forward pass takes the
recorded choices as its keyword argument `replayed_experts`. Without them, the model uses its own
routing. No state is shared between models or passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.expert_records import ExpertRecords, MixtureShape

# Routers of transformers that return (logits [T, E], weights [T, K], experts [T, K]) and choose the
# K most probable experts of a softmax; each with whether the chosen weights are made to sum to 1.
_SOFTMAX_ROUTERS: dict[str, Callable[[Any], bool]] = {
    "MixtralTopKRouter": lambda router: True,
    "Qwen2MoeTopKRouter": lambda router: bool(router.norm_topk_prob),
    "Qwen3MoeTopKRouter": lambda router: bool(router.norm_topk_prob),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedExperts:
    """The records of one packed row, on its device."""

    positions: Tensor
    """[R] int64, the positions of the tokens whose forward pass was recorded."""
    indices: Tensor
    """[L, R, K] int16, the experts chosen in each routed layer."""


def replayed_experts(records: ExpertRecords, *, device: torch.device) -> ReplayedExperts:
    """Copy a row's records to the device, layer by layer."""
    by_layer = np.ascontiguousarray(records.indices.swapaxes(0, 1), dtype=np.int16)
    return ReplayedExperts(
        positions=torch.tensor(records.positions, dtype=torch.int64, device=device),
        indices=torch.tensor(by_layer, device=device),
    )


def attach_routing_replay(causal_lm: PreTrainedModel) -> MixtureShape | None:
    """Add the keyword `replayed_experts` to a model's forward, by hooks on its routers.

    Returns: the shape of the mixture; None, with the model unchanged, if no router is of a known
    kind.
    """
    names = set(causal_lm._no_split_modules or ())
    layers = [module for module in causal_lm.modules() if type(module).__name__ in names]
    routed: list[tuple[nn.Module, Any]] = [
        (layer, module)
        for layer in layers
        for module in layer.modules()
        if type(module).__name__ in _SOFTMAX_ROUTERS
    ]
    for number, (layer, router) in enumerate(routed):
        normalises = _SOFTMAX_ROUTERS[type(router).__name__](router)
        replay = _LayerReplay(number, normalises=normalises)
        layer.register_forward_pre_hook(replay.before_layer, with_kwargs=True)
        router.register_forward_hook(replay.after_router)
    if not routed:
        return None
    router = routed[0][1]
    return MixtureShape(
        num_layers=len(routed), num_experts=int(router.num_experts), num_chosen=int(router.top_k)
    )


class _LayerReplay:
    """The hooks of the `number`-th routed layer, with the records of the current forward pass."""

    def __init__(self, number: int, *, normalises: bool) -> None:
        self._number, self._normalises = number, normalises
        self._experts: ReplayedExperts | None = None

    def before_layer(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._experts = kwargs.get("replayed_experts")

    def after_router(
        self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self._experts is None:
            return output
        return replay_choice(
            *output,
            positions=self._experts.positions,
            recorded=self._experts.indices[self._number].long(),
            normalises=self._normalises,
        )


def replay_choice(
    logits: Tensor,
    weights: Tensor,
    chosen: Tensor,
    *,
    positions: Tensor,
    recorded: Tensor,
    normalises: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace a router's choice by recorded experts, weighted by the router's own logits.

    A recorded expert i gets the weight exp(s_i) / sum_j exp(s_j), where s are the logits. The sum
    is over the recorded experts j; without `normalises` it is over all experts. Tokens that are not
    at `positions` keep the router's choice and weights.
    Source: Rollout Routing Replay (R3), Ma et al. 2025, arXiv 2510.11370, the gating weights of
    the replay (deviation: the weights without `normalises`).

    Args: logits: [T, E]. weights, chosen: [T, K], the router's own. positions: [R] int64, each
        once. recorded: [R, K] int64. normalises: whether a token's weights are made to sum to 1.
    Returns: logits, weights, chosen; the weights have a gradient for the logits.
    Example: logits ln [1, 2, 3, 4], recorded [0, 1] -> weights [1/3, 2/3]; without `normalises`
    [.1, .2].
    """
    own = logits.index_select(0, positions).float()
    if normalises:
        replayed = torch.softmax(own.gather(-1, recorded), dim=-1)
    else:
        replayed = torch.softmax(own, dim=-1).gather(-1, recorded)
    return (
        logits,
        weights.index_copy(0, positions, replayed.to(weights.dtype)),
        chosen.index_copy(0, positions, recorded),
    )
