"""Model FLOPs utilisation (MFU): the share of the GPUs' peak arithmetic that a step used.

    mfu = 6 N T / (seconds · ranks · peak)

N: number of parameters that a token is multiplied with; T: tokens of packed rows, counted in each
epoch. A computation that gradient checkpointing repeats counts once. Source: PaLM (Chowdhery et al.
2022, appendix B), without its term for attention scores, so that the true share is somewhat higher.
There is no MFU if the device's peak is not known.
"""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedModel

from actors.expert_records import MixtureShape

# Peak FLOP/s for dense bfloat16 with float32 sums, from NVIDIA's data sheets, by the start of the
# name that CUDA gives the device; longer names come first.
_BFLOAT16_PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L40S": 362e12,
}
_FLOPS_PER_PARAMETER = 6
"""FLOPs for one token and parameter: a product and a sum forward, and twice as many backward."""
_SHARE_OF_FROZEN = 2 / 3
"""Share of _FLOPS_PER_PARAMETER for a frozen parameter, whose own gradient is not computed."""
_EXPERT = re.compile(r"\.experts\.")


def peak_of(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of a device by its name in torch.cuda; None if it is not known."""
    if dtype is not torch.bfloat16:
        return None
    found = (peak for name, peak in _BFLOAT16_PEAKS.items() if device_name.startswith(name))
    return next(found, None)


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype)


def num_multiplied(model: PreTrainedModel, mixture: MixtureShape | None) -> float | None:
    """Return N of the MFU: the number of parameters that each token is multiplied with.

    A token only selects a row of the input embedding, so the embedding is not counted, unless the
    embedding is tied to the head. Only the experts to which a token is routed are counted. A frozen
    parameter counts as two thirds, because its own gradient is not computed.

    Returns: the number; None if the model has experts and the shape of its routing is not known.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding
    num_expert, num_other = 0.0, 0.0
    for name, parameter in model.named_parameters():
        share = 1.0 if parameter.requires_grad else _SHARE_OF_FROZEN
        if _EXPERT.search(name):
            num_expert += share * parameter.numel()
        elif parameter is not embedding or is_tied:
            num_other += share * parameter.numel()
    if not num_expert:
        return num_other
    if mixture is None:
        return None
    return num_other + num_expert * mixture.num_chosen / mixture.num_experts


def mfu(
    *,
    num_parameters: float | None,
    num_tokens: int,
    seconds: float,
    num_ranks: int,
    peak: float | None,
) -> dict[str, float]:
    """Return the share of the devices' peak FLOP/s that a step used, as the statistic `mfu`.

    Args: num_parameters: from `num_multiplied`. peak: FLOP/s of each rank's device.
    Returns: {} if num_parameters or peak is None, or if nothing was trained.
    Example: 1e9 parameters, 1e5 tokens in 2 s on one device of 1e15 FLOP/s -> 0.3
    """
    if num_parameters is None or peak is None or not num_tokens:
        return {}
    used = _FLOPS_PER_PARAMETER * num_parameters * num_tokens
    return {"mfu": used / (seconds * num_ranks * peak)}
