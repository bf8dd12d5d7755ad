"""Tests of attention over a forest: the blocks for CPU and the mask for CUDA, on every path."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.attention.cpu import forest_attention
from actors.trainer.attention.flex import flex_forest_attention, mask_function
from actors.trainer.attention.forest import (
    AttentionPlan,
    PackedLayout,
    build_layout,
    build_plan,
    cut_pieces,
    plan_for,
    trace_segments,
)

CPU = torch.device("cpu")
windows_strategy = st.none() | st.integers(1, 12)


@st.composite
def forests_strategy(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draw lengths and parents of segments in preorder: each parent is on the last one's path."""
    lengths, parents, path = [], [], [-1]
    for segment in range(draw(st.integers(1, 7))):
        lengths.append(draw(st.integers(1, 9)))
        path = path[: draw(st.integers(1, len(path)))]
        parents.append(path[-1])
        path.append(segment)
    return lengths, parents


def walk(lengths: list[int], parents: list[int], *, window: int | None) -> np.ndarray:
    """Return [T, T] bool: which tokens each token sees, found by walking from parent to parent."""
    ends = np.cumsum(lengths)
    sees = np.zeros((ends[-1], ends[-1]), bool)
    for segment, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        above: list[int] = []
        ancestor = parents[segment]
        while ancestor != -1:
            above = [*range(ends[ancestor] - lengths[ancestor], ends[ancestor]), *above]
            ancestor = parents[ancestor]
        own = list(range(end - length, end))
        for number, token in enumerate(own):
            path = above + own[: number + 1]
            sees[token, path if window is None else path[-window:]] = True
    return sees


def seen_in_blocks(plan: AttentionPlan, num_tokens: int) -> np.ndarray:
    """Return [T, T] int: how often the plan for the CPU computes each pair of query and key."""
    counts = torch.zeros(num_tokens, num_tokens, dtype=torch.int64)
    start = 0
    for bucket in plan.buckets:
        for _ in range(bucket[0]):
            piece = plan.gather[start : start + bucket[1]]
            piece = piece[piece < num_tokens]
            counts[piece[:, None], piece] += torch.ones(len(piece), len(piece)).tril().long()
            start += bucket[1]
    for block in plan.blocks:
        queries = torch.arange(num_tokens)[block.queries]
        keys = torch.arange(num_tokens)[block.keys]
        visible = block.visible
        if visible is None:
            visible = torch.ones(len(queries), len(keys), dtype=torch.bool)
        assert visible.any(1).all()
        counts[queries[:, None], keys] += visible
    return counts.numpy()


def dense(heads: Iterable[torch.Tensor], sees: np.ndarray) -> torch.Tensor:
    """Compute attention over all pairs of the row; rows are [T, H, D]."""
    query, key, value = heads
    copies = query.shape[1] // key.shape[1]
    key, value = (rows.repeat_interleave(copies, 1) for rows in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
    weights = torch.softmax(scores.masked_fill(~torch.from_numpy(sees), -torch.inf), -1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def random_heads(num_tokens: int, *, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return a query with four heads, and a key and a value with two."""
    generator = torch.Generator().manual_seed(num_tokens)
    return [
        torch.randn(num_tokens, heads, 8, generator=generator).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


def layout_of(forest: tuple[list[int], list[int]]) -> PackedLayout:
    return build_layout(*forest, device=CPU)


@given(forests_strategy(), windows_strategy)
def test_each_visible_pair_is_in_one_block_and_no_other_pair_is(
    forest: tuple[list[int], list[int]], window: int | None
) -> None:
    layout = layout_of(forest)
    counts = seen_in_blocks(plan_for(layout, window=window), layout.num_tokens)
    np.testing.assert_array_equal(counts, walk(*forest, window=window))


@given(forests_strategy(), windows_strategy)
def test_the_mask_for_cuda_equals_that_of_walking_the_paths(
    forest: tuple[list[int], list[int]], window: int | None
) -> None:
    layout = layout_of(forest)
    sees = mask_function(layout, window=window)
    rows, zero = torch.arange(layout.num_tokens), torch.zeros((), dtype=torch.int64)
    mask = sees(zero, zero, rows[:, None], rows[None, :])
    np.testing.assert_array_equal(mask.numpy(), walk(*forest, window=window))


@given(forests_strategy(), windows_strategy)
def test_result_and_gradients_equal_those_of_dense_attention(
    forest: tuple[list[int], list[int]], window: int | None
) -> None:
    layout = layout_of(forest)
    heads = random_heads(layout.num_tokens)
    weights = torch.randn(layout.num_tokens, 4, 8)

    def run(attended: torch.Tensor) -> list[torch.Tensor]:
        return [attended, *torch.autograd.grad((attended * weights).sum(), heads)]

    plan = plan_for(layout, window=window)
    ours = run(forest_attention(*heads, plan=plan, scaling=None))
    for mine, theirs in zip(ours, run(dense(heads, walk(*forest, window=window))), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 5, 40])
def test_long_segments_that_the_kernel_splits_are_exact(window: int | None) -> None:
    forest = ([700, 90, 300, 40, 600], [-1, 0, 0, 2, -1])
    layout = layout_of(forest)
    heads = random_heads(layout.num_tokens)
    plan = plan_for(layout, window=window)
    attended = forest_attention(*heads, plan=plan, scaling=None)
    expected = dense(heads, walk(*forest, window=window))
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-4)
    weights = torch.randn(attended.shape)
    ours = torch.autograd.grad((attended * weights).sum(), heads)
    theirs = torch.autograd.grad((expected * weights).sum(), heads)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=5e-5, rtol=1e-3)


def test_bfloat16_is_accurate_however_many_blocks_a_path_has() -> None:
    forest = ([16] * 9, [-1, *range(8)])
    layout = layout_of(forest)
    heads = random_heads(layout.num_tokens, dtype=torch.bfloat16)
    attended = forest_attention(*heads, plan=plan_for(layout, window=None), scaling=None)
    exact = dense((each.detach().float() for each in heads), walk(*forest, window=None))
    assert attended.dtype == torch.bfloat16
    torch.testing.assert_close(attended.float(), exact, atol=0.02, rtol=0.02)
    grads = torch.autograd.grad(attended.sum(), heads)
    assert all(grad.dtype == torch.bfloat16 and grad.isfinite().all() for grad in grads)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_uncompiled_form_for_cuda_gives_the_result_of_the_cpu() -> None:
    forest = ([40, 9, 30, 5, 70], [-1, 0, 0, 2, -1])
    layout, on_cuda = layout_of(forest), layout_of(forest)
    heads = [each.detach() for each in random_heads(layout.num_tokens)]
    for window in (None, 11):
        expected = forest_attention(*heads, plan=plan_for(layout, window=window), scaling=0.3)
        attended = flex_forest_attention(
            *(rows.transpose(0, 1)[None] for rows in heads),
            layout=on_cuda,
            window=window,
            scaling=0.3,
            is_compiled=False,
        )
        torch.testing.assert_close(attended[0].transpose(0, 1), expected, atol=1e-5, rtol=1e-4)


@given(forests_strategy())
def test_a_window_as_long_as_the_longest_path_hides_nothing(
    forest: tuple[list[int], list[int]],
) -> None:
    segments = trace_segments(*forest)
    longest = int(segments.token_positions().max()) + 1
    plan = build_plan(segments, window=longest, device=CPU)
    assert all(block.visible is None for block in plan.blocks)
    assert len(plan.blocks) == len(set(forest[1]) - {-1})


def test_pieces_are_no_longer_than_the_limit() -> None:
    pieces = cut_pieces(trace_segments([5, 2], [-1, 0]), longest=2)
    assert pieces.lengths.tolist() == [2, 2, 1, 2]
    assert pieces.starts.tolist() == [0, 2, 4, 5]
    assert pieces.subtree_ends.tolist() == [7, 7, 7, 7]
    assert pieces.positions.tolist() == [0, 2, 4, 5]


def test_the_example_of_the_segments_docstring() -> None:
    segments = trace_segments([2, 1, 2], [-1, 0, 0])
    assert segments.starts.tolist() == [0, 2, 3] and segments.ends.tolist() == [2, 3, 5]
    assert segments.subtree_ends.tolist() == [5, 3, 5]
    assert segments.positions.tolist() == [0, 2, 2]


@pytest.mark.parametrize("parents", [[0, -1, -1], [-1, -1, 0], [-1, 2, -1]])
def test_segments_out_of_preorder_are_refused(parents: list[int]) -> None:
    with pytest.raises(AssertionError, match="not in preorder"):
        trace_segments([1, 1, 1], parents)


def test_a_missing_parent_is_refused() -> None:
    with pytest.raises(AssertionError):
        trace_segments([1, 2], [-1])
