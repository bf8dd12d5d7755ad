"""Tests of the fused output head against the plain one: values, gradients and peak memory."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from actors.algorithm import LossSettings
from actors.trainer.logprobs import token_logprobs
from benchmarks.live_memory import LiveMemory
from benchmarks.loss_memory import backward_of_loss

TOKENS, HIDDEN, VOCABULARY = 23, 6, 41


def plain_logprobs(
    hidden: Tensor, head: torch.nn.Linear, targets: Tensor, *, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute full logits with torch's own softmax and automatic differentiation."""
    logprobs = torch.log_softmax(head(hidden) / temperatures[:, None], -1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def make_inputs(
    dtype: torch.dtype = torch.float32, *, has_bias: bool = False
) -> tuple[Tensor, torch.nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=has_bias, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
        if has_bias:
            head.bias.copy_(torch.linspace(0.0, 3.0, VOCABULARY))
    return hidden.to(dtype).requires_grad_(), head, targets


@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 100])
@pytest.mark.parametrize("temperatures", [None, torch.linspace(0.6, 1.4, TOKENS)])
@pytest.mark.parametrize("has_entropy_gradient", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_equal_full_logits(
    chunk_tokens: int, temperatures: Tensor | None, has_entropy_gradient: bool, has_bias: bool
) -> None:
    hidden, head, targets = make_inputs(has_bias=has_bias)
    slopes = torch.linspace(-1.0, 2.0, TOKENS)
    fused = token_logprobs(
        hidden,
        head,
        targets,
        temperatures=temperatures,
        chunk_tokens=chunk_tokens,
        has_entropy_gradient=has_entropy_gradient,
    )
    ones = torch.ones(TOKENS)
    plain = plain_logprobs(
        hidden, head, targets, temperatures=ones if temperatures is None else temperatures
    )
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert fused[1].requires_grad is has_entropy_gradient
    gradients = []
    for logprobs, entropies in (fused, plain):
        loss = (slopes * logprobs).sum()
        if has_entropy_gradient:
            loss = loss + (slopes.flip(0) * entropies).sum()
        gradients.append(torch.autograd.grad(loss, (hidden, *head.parameters())))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_of_bfloat16_chunks_are_summed_in_float32() -> None:
    hidden, head, targets = make_inputs(torch.bfloat16)
    results = []
    for chunk_tokens in (1, TOKENS):
        logprobs, _ = token_logprobs(
            hidden,
            head,
            targets,
            chunk_tokens=chunk_tokens,
            has_entropy_gradient=False,
        )
        assert logprobs.dtype == torch.float32
        results.append(torch.autograd.grad(logprobs.sum(), (hidden, head.weight)))
    for one_by_one, at_once in zip(*results, strict=True):
        assert one_by_one.dtype == torch.bfloat16
        scale = float(at_once.abs().max())
        torch.testing.assert_close(one_by_one, at_once, rtol=0, atol=0.02 * scale)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_frozen_head_has_no_gradient_and_needs_no_memory_for_it(has_bias: bool) -> None:
    gradients, peaks = [], []
    for is_frozen in (False, True):
        hidden, head, targets = make_inputs(has_bias=has_bias)
        head.requires_grad_(not is_frozen)
        logprobs, _ = token_logprobs(hidden, head, targets, chunk_tokens=5)
        counted = LiveMemory()
        with counted:
            logprobs.sum().backward()
        assert all((each.grad is None) is is_frozen for each in head.parameters())
        gradients.append(hidden.grad)
        peaks.append(counted.peak_bytes)
    assert gradients[0] is not None and gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])
    assert peaks[1] <= peaks[0] - 4 * VOCABULARY * HIDDEN


def test_without_tokens_there_are_no_scores_and_the_gradient_is_zero() -> None:
    hidden, head, targets = make_inputs()
    logprobs, entropies = token_logprobs(
        hidden[:0],
        head,
        targets[:0],
        chunk_tokens=4,
        has_entropy_gradient=False,
    )
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert head.weight.grad is not None and not head.weight.grad.any()


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.01])
def test_peak_memory_depends_on_the_chunk_and_not_on_the_trained_tokens(
    entropy_coefficient: float,
) -> None:
    vocabulary, chunk_tokens = 3000, 64
    peaks = {}
    for num_tokens in (512, 2048):
        head = torch.nn.Linear(8, vocabulary, bias=False)
        hidden = torch.randn(num_tokens, 8, requires_grad=True)
        targets = torch.randint(vocabulary, (num_tokens,))
        gc.collect()
        counted = LiveMemory()
        with counted:
            backward_of_loss(
                hidden,
                head,
                targets,
                settings=LossSettings(entropy_coefficient=entropy_coefficient),
                chunk_tokens=chunk_tokens,
            )
        peaks[num_tokens] = counted.peak_bytes
    one_chunk = 4 * chunk_tokens * vocabulary
    # Two chunks, the gradient of the head, and columns of one number per token.
    assert 2 * one_chunk <= peaks[2048] < 2.6 * one_chunk
    assert peaks[2048] - peaks[512] < 0.25 * one_chunk
    assert peaks[2048] < 0.1 * 4 * 2048 * vocabulary


def test_live_memory_counts_each_storage_until_it_is_freed() -> None:
    kept = torch.zeros(10)
    with LiveMemory() as counted:
        first = kept + 1
        view = first[2:5].view(3, 1)
        kept.add_(1)
        assert counted.live_bytes == 40
        second = first * view[0]
        assert counted.live_bytes == counted.peak_bytes == 80
        del first, view
        assert counted.live_bytes == 40
        del second
        torch.ones(3)
    assert (counted.live_bytes, counted.peak_bytes) == (0, 80)


@pytest.mark.parametrize("chunk_tokens", [0, -1])
def test_a_chunk_without_tokens_is_refused(chunk_tokens: int) -> None:
    with pytest.raises(AssertionError):
        token_logprobs(
            torch.zeros(2, 4),
            torch.nn.Linear(4, 8),
            torch.zeros(2, dtype=torch.int64),
            chunk_tokens=chunk_tokens,
            has_entropy_gradient=False,
        )
