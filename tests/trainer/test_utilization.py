"""Tests of MFU from parameters, tokens and seconds, and of the parameters that count."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from worlds.models.mixture_world import NUM_CHOSEN, NUM_EXPERTS, make_config

from actors.expert_records import MixtureShape
from actors.trainer.utilization import device_peak, mfu, num_multiplied, peak_of

MIXTURE = MixtureShape(num_layers=1, num_experts=NUM_EXPERTS, num_chosen=NUM_CHOSEN)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_name_for_bfloat16(
    device: str, peak: float | None
) -> None:
    assert peak_of(device, torch.bfloat16) == peak
    assert peak_of(device, torch.float32) is None


def test_a_cpu_has_no_peak() -> None:
    assert device_peak(torch.device("cpu"), torch.bfloat16) is None


def test_mfu_counts_six_operations_per_parameter_and_token() -> None:
    # 6 x 1e9 x 1e5 = 6e14 FLOP in 2 s on two ranks of 1e15 FLOP/s, which could do 4e15.
    used = mfu(num_parameters=1e9, num_tokens=100_000, seconds=2.0, num_ranks=2, peak=1e15)
    assert used == {"mfu": pytest.approx(0.15)}
    for unknown in ({"peak": None}, {"num_parameters": None}, {"num_tokens": 0}):
        known = {"num_parameters": 1e9, "num_tokens": 1, "num_ranks": 1, "peak": 1e15}
        assert mfu(seconds=1.0, **(known | unknown)) == {}


def test_an_embedding_counts_if_it_is_also_the_head(tiny_models: dict[bool, str]) -> None:
    tied, untied = (
        AutoModelForCausalLM.from_pretrained(tiny_models[is_tied]) for is_tied in (True, False)
    )
    for model in (tied, untied):
        assert num_multiplied(model, None) == sum(
            parameter.numel()
            for name, parameter in model.named_parameters()
            if model is tied or "embed_tokens" not in name
        )


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_of_a_mixture_only_the_share_of_chosen_experts_counts(kind: str) -> None:
    model = AutoModelForCausalLM.from_config(make_config(kind))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    rest = sum(size for name, size in sizes.items() if ".experts." not in name)
    rest -= model.get_input_embeddings().weight.numel()
    assert experts > 0
    found = num_multiplied(model, MIXTURE)
    assert found == pytest.approx(rest + experts * NUM_CHOSEN / NUM_EXPERTS)
    assert num_multiplied(model, None) is None
