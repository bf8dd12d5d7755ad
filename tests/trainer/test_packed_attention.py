"""Tests that packed rows have the logits and gradients of separate samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, Qwen3Config

from actors.trainer.attention.forest import bucket_lengths, build_layout, plan_for
from actors.trainer.attention.interface import (
    PACKED_ATTENTION,
    packed_attention,
    register_packed_attention,
)
from actors.trainer.model_check import check_output_head

LENGTHS = [5, 17, 1, 40, 9, 3]
COMMON = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def make_config(kind: str):
    if kind == "llama":
        return LlamaConfig(**COMMON)
    window = dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)
    return Qwen3Config(
        **COMMON,
        head_dim=8,
        tie_word_embeddings=kind == "tied",
        **(window if kind == "window" else {}),
    )


def run_packed(model, rows, *, row_order):
    layout = build_layout([len(rows[index]) for index in row_order], device="cpu")
    logits = model(
        input_ids=torch.cat([rows[index] for index in row_order])[None],
        position_ids=torch.cat([torch.arange(len(rows[index])) for index in row_order])[None],
        use_cache=False,
        packed_layout=layout,
    ).logits[0]
    parts = logits.split([len(rows[index]) for index in row_order])
    return [parts[row_order.index(index)] for index in range(len(rows))]


@pytest.mark.parametrize("kind", ["tied", "untied", "window", "llama"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_packed_row_has_the_logits_and_gradients_of_separate_samples(kind, checkpointed):
    torch.manual_seed(0)
    config = make_config(kind)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    rows = [torch.randint(64, (length,)) for length in LENGTHS]
    weights = [torch.randn(length, 64) for length in LENGTHS]

    def compute_gradients(parts):
        model.zero_grad()
        sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    alone = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    expected = compute_gradients(alone)
    model.set_attn_implementation(register_packed_attention())
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    for order in ([0, 1, 2, 3, 4, 5], [3, 0, 5, 2, 1, 4]):
        packed = run_packed(model, rows, row_order=order)
        for ours, theirs in zip(packed, alone, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        for ours, theirs in zip(compute_gradients(packed), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_padding_never_doubles_a_row_and_every_token_has_one_slot(lengths):
    layout = build_layout(lengths, device="cpu")
    plan = plan_for(layout, window=None)
    assert layout.num_tokens == sum(lengths)
    assert plan.gather.shape[0] < 2 * sum(lengths)
    assert sum(shape.numel() for shape in plan.buckets) == plan.gather.shape[0]
    assert torch.equal(plan.gather[plan.scatter], torch.arange(sum(lengths)))
    assert len(plan.buckets) <= 9 and not plan.blocks


def test_buckets_hold_samples_of_similar_length():
    assert bucket_lengths([3, 10, 6, 2]) == [[1, 2], [0, 3]]
    assert bucket_lengths([4]) == [[0]]


def test_an_empty_row_or_sample_is_refused():
    for lengths in ([], [3, 0]):
        with pytest.raises(AssertionError):
            build_layout(lengths, device="cpu")


def test_a_forward_without_its_layout_is_refused():
    query = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match="pass packed_layout="):
        packed_attention(torch.nn.Identity(), query, query, query)
    with pytest.raises(ValueError, match="layout of 4 tokens"):
        packed_attention(
            torch.nn.Identity(), query, query, query, packed_layout=build_layout([4], device="cpu")
        )


def test_an_attention_with_extra_inputs_is_refused():
    query = torch.zeros(1, 2, 5, 8)
    layout = build_layout([5], device="cpu")
    with pytest.raises(NotImplementedError, match="softcap"):
        packed_attention(
            torch.nn.Identity(), query, query, query, packed_layout=layout, softcap=50.0
        )


def test_a_model_that_caps_its_logits_is_refused():
    config = GraniteConfig(**COMMON, logits_scaling=8.0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=register_packed_attention()
    )
    assert model.config._attn_implementation == PACKED_ATTENTION
    with pytest.raises(NotImplementedError, match="changes its logits"):
        check_output_head(model)
