"""How much of the GPUs' arithmetic a training step used: model FLOPs utilisation, MFU.

mfu = 6 N T / (seconds · ranks · peak)   Source: PaLM (Chowdhery et al. 2022, appendix B), without
its term for attention scores, so that the true share is somewhat higher. N: parameters that a token
is multiplied with; T: tokens of packed rows, each epoch counted. What is computed twice, as by
gradient checkpointing, counts once. Called by `TrainerRank`; a device of unknown peak has no MFU.
"""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedModel

from actors.expert_records import MixtureShape

# Dense bfloat16 with float32 sums, FLOP/s, from NVIDIA's data sheets; by the start of the name that
# CUDA gives the device, longer ones first.
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
"""Of a token: a product and a sum forward, and twice as many backward."""
_EXPERT = re.compile(r"\.experts\.")


def peak_of(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a device, as `torch.cuda.get_device_name` calls it; None: not known."""
    if dtype is not torch.bfloat16:
        return None
    found = (peak for name, peak in _BFLOAT16_PEAKS.items() if device_name.startswith(name))
    return next(found, None)


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype)


def num_multiplied(model: PreTrainedModel, mixture: MixtureShape | None) -> float | None:
    """Parameters that a token is multiplied with: all but the input embedding, which is looked up,
    and but the experts that it is not routed to.

    Tied to the head, the embedding is multiplied with there.
    Returns: None for experts of a mixture that is not known.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding
    num_expert, num_other = 0, 0
    for name, parameter in model.named_parameters():
        if _EXPERT.search(name):
            num_expert += parameter.numel()
        elif parameter is not embedding or is_tied:
            num_other += parameter.numel()
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
    """Return the statistic by its name; empty if model or peak is unknown, or nothing was trained.

    Args: num_parameters: as `num_multiplied`. peak: FLOP/s of each rank's device. Example: 1e9
    parameters, 1e5 tokens in 2 s on one device of 1e15 FLOP/s -> 0.3
    """
    if num_parameters is None or peak is None or not num_tokens:
        return {}
    used = _FLOPS_PER_PARAMETER * num_parameters * num_tokens
    return {"mfu": used / (seconds * num_ranks * peak)}
