"""Log-probabilities and entropies straight from hidden states and the output head's weight.

A few tokens at a time, in both directions: of a chunk's logits nothing is kept but their
normalisers, and the backward pass makes them again, so that at most two chunks of [C, V] are alive
whatever the vocabulary and the number of trained tokens. Every step over a chunk is done in place
while the processor's cache still holds it. Called by `chunked_token_logprobs` for a head that is a
plain projection. Letters: [M] trained tokens, [C] tokens of a chunk, [V] vocabulary, [D] hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def projected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    has_entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Score the targets under softmax(hidden weight^T / temperature).

    log p = z_target - lse, H = lse - sum_j p_j z_j; backward, with gradients g of log p and h of H:
    dz_j = g ([j = target] - p_j) - h p_j (log p_j + H), over the temperature.

    Args: hidden: [M, D]. weight: [V, D], of the same type. targets: [M] int64. chunk_tokens: at
        least 1. has_entropy_gradient: whether H sends gradient back.
    Returns: log-probabilities [M] and entropies [M], float32, nats.
    Raises: ValueError for a chunk or a temperature that is not above 0.
    """
    if chunk_tokens < 1 or not temperature > 0:
        raise ValueError(
            f"log-probabilities: got chunk_tokens {chunk_tokens} and temperature {temperature}, "
            "expected at least 1 and more than 0; temperature 0 samples nothing that is trained"
        )
    scores: tuple[Tensor, Tensor] = _ProjectedLogprobs.apply(
        hidden, weight, targets, temperature, chunk_tokens, has_entropy_gradient
    )
    return scores


class _ProjectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        has_entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        normalizers, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in _parts(hidden.shape[0], chunk_tokens):
            normalizers[part], logprobs[part], entropies[part] = _score(
                _logits(hidden[part], weight, temperature), targets[part]
            )
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropies)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        if not has_entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        ctx.has_entropy_gradient = has_entropy_gradient
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, targets, normalizers, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = (grad / ctx.temperature for grad in grads)
        grad_hidden = torch.empty_like(hidden)
        # Chunks add up here: in bfloat16 the later ones would be rounded away.
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part in _parts(hidden.shape[0], ctx.chunk_tokens):
            slopes = _slopes(
                _logits(hidden[part], weight, ctx.temperature).sub_(normalizers[part, None]),
                targets[part],
                of_logprobs=of_logprobs[part, None],
                of_entropies=of_entropies[part, None] if ctx.has_entropy_gradient else None,
                entropies=entropies[part, None],
            ).to(hidden.dtype)
            torch.mm(slopes, weight, out=grad_hidden[part])
            if slopes.dtype == grad_weight.dtype:
                grad_weight.addmm_(slopes.t(), hidden[part])
            else:
                grad_weight.add_(slopes.t() @ hidden[part])
            del slopes  # or it would live on beside the next chunk's
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _parts(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[C, V] float32, a tensor of its own."""
    logits = torch.nn.functional.linear(hidden, weight).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normalisers, log-probabilities, entropies [C] of logits [C, V], which are used up."""
    peaks = logits.amax(-1, keepdim=True)
    # From the largest logit down: small numbers, so that the entropy keeps its digits.
    logits.sub_(peaks)
    exponentials = logits.exp()
    totals = exponentials.sum(-1)
    log_totals = totals.log()
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_totals
    return (
        log_totals + peaks[:, 0],
        logprobs,
        log_totals - exponentials.mul_(logits).sum(-1) / totals,
    )


def _slopes(
    log_softmax: Tensor,
    targets: Tensor,
    *,
    of_logprobs: Tensor,
    of_entropies: Tensor | None,
    entropies: Tensor,
) -> Tensor:
    """The gradient for the logits, in the memory of log_softmax [C, V]; the rest is [C, 1]."""
    if of_entropies is None:
        slopes = log_softmax.exp_().mul_(-of_logprobs)
    else:
        probabilities = log_softmax.exp()
        slopes = log_softmax.add_(entropies).mul_(of_entropies).add_(of_logprobs)
        slopes.mul_(probabilities).neg_()
    return slopes.scatter_add_(-1, targets[:, None], of_logprobs)
