"""Tests of packing weights into flat buffers and of viewing them as tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.weights.buffers import (
    ALIGNMENT_BYTES,
    buffer_checksum,
    layer_groups,
    pack_group,
    unpack_group,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def filled(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6))
def test_unpacking_restores_the_packed_tensors(
    layout: list[tuple[tuple[int, ...], torch.dtype]],
) -> None:
    named = [
        (f"w{index}", filled(shape, dtype, seed=index))
        for index, (shape, dtype) in enumerate(layout)
    ]
    group = pack_group(named)
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in group.manifest.offsets)
    assert group.buffer.nbytes == group.manifest.num_bytes
    unpacked = unpack_group(group.manifest, torch.from_numpy(group.buffer))
    assert [name for name, _ in unpacked] == [name for name, _ in named]
    for (_, got), (_, expected) in zip(unpacked, named, strict=True):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert torch.equal(got.float(), expected.float())


def test_the_checksum_is_the_same_for_equal_tensors_and_changes_with_each_bit() -> None:
    named = [("a", torch.ones(3)), ("b", torch.ones(5, dtype=torch.bfloat16))]
    first, second = pack_group(named), pack_group(named)
    assert first.checksum == second.checksum
    for place in (0, -1):
        changed = first.buffer.copy()
        changed[place] ^= 1
        assert buffer_checksum(changed) != first.checksum


def test_unpacked_tensors_are_views_of_the_buffer() -> None:
    group = pack_group([("a", torch.zeros(4))])
    buffer = torch.from_numpy(group.buffer)
    [(_, view)] = unpack_group(group.manifest, buffer)
    assert view.data_ptr() == buffer.data_ptr()


def test_tensors_that_are_not_contiguous_or_need_gradients_are_packed_by_value() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    group = pack_group([("a", tensor)])
    [(_, view)] = unpack_group(group.manifest, torch.from_numpy(group.buffer))
    assert torch.equal(view, tensor.detach())


def test_a_buffer_of_another_group_is_refused() -> None:
    group = pack_group([("a", torch.zeros(4))])
    with pytest.raises(ValueError, match="buffer of 15 bytes, expected 16"):
        unpack_group(group.manifest, torch.from_numpy(np.zeros(15, dtype=np.uint8)))


def test_a_repeated_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['a'\]"):
        pack_group([("a", torch.zeros(1)), ("a", torch.zeros(1))])


def test_groups_are_the_tensors_before_the_layers_each_layer_and_the_rest() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.experts.7.w1.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.experts.8.w1.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert layer_groups(names) == [
        ["model.embed_tokens.weight"],
        ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"],
        ["model.layers.1.mlp.experts.7.w1.weight", "model.layers.1.mlp.experts.8.w1.weight"],
        ["model.norm.weight", "lm_head.weight"],
    ]
    assert layer_groups(["a", "b"]) == [["a", "b"]]
    assert layer_groups([]) == []
