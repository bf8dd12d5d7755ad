"""Log-probabilities and entropies of chosen tokens, in float32, with bounded memory.

The output head is applied to a chunk of tokens at a time. Only the normalisers of a chunk's logits
are kept, and the backward pass computes the logits again. So at most two chunks [C, V] are in
memory, for any number of trained tokens. Each step over a chunk works in place while the chunk is
in the processor's cache. Letters: [M] trained tokens, [C] tokens of a chunk, [V] vocabulary, [D]
hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_LEAST_LOGIT = -1e30


def token_logprobs(
    hidden: Tensor,
    output_head: nn.Linear,
    targets: Tensor,
    *,
    temperatures: Tensor | None = None,
    chunk_tokens: int,
    has_entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Score the targets under softmax(z), z = output_head(hidden) / temperature of the token.

    log p = z_target - lse, H = lse - sum_j p_j z_j. The gradient for the logits before the division
    by the temperature is (g ([j = target] - p_j) - h p_j (log p_j + H)) / temperature, where g and
    h are the gradients of log p and H.

    Args: hidden: [M, D], of the head's type. targets: [M] int64. temperatures: [M] float32, > 0;
        None if all are 1. chunk_tokens: at least 1. has_entropy_gradient: whether entropies have a
        gradient.
    Returns: log-probabilities [M] and entropies [M], float32, nats.
    Example: logits [[0, 0]], target 0 -> ([-.6931], [.6931])
    """
    assert chunk_tokens >= 1
    scores: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden,
        output_head.weight,
        output_head.bias,
        targets,
        temperatures,
        chunk_tokens,
        has_entropy_gradient,
    )
    return scores


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor | None,
        chunk_tokens: int,
        has_entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        normalizers, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in _parts(hidden.shape[0], chunk_tokens):
            normalizers[part], logprobs[part], entropies[part] = _score(
                _logits(hidden[part], weight, bias, _at(temperatures, part)), targets[part]
            )
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, normalizers, entropies)
        ctx.chunk_tokens = chunk_tokens
        if not has_entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        ctx.has_entropy_gradient = has_entropy_gradient
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, normalizers, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = (
            grad if temperatures is None else grad / temperatures for grad in grads
        )
        grad_hidden = torch.empty_like(hidden)
        # The gradients of all chunks are added here: in bfloat16 later ones would be rounded away.
        # A frozen head, such as that of a model with adapters, needs no gradient.
        grad_weight, grad_bias = (
            torch.zeros(each.shape, dtype=torch.float32, device=each.device) if is_needed else None
            for each, is_needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        for part in _parts(hidden.shape[0], ctx.chunk_tokens):
            slopes = _slopes(
                _logits(hidden[part], weight, bias, _at(temperatures, part)).sub_(
                    normalizers[part, None]
                ),
                targets[part],
                of_logprobs=of_logprobs[part, None],
                of_entropies=of_entropies[part, None] if ctx.has_entropy_gradient else None,
                entropies=entropies[part, None],
            )
            if grad_bias is not None:
                grad_bias.add_(slopes.sum(0))
            slopes = slopes.to(hidden.dtype)
            torch.mm(slopes, weight, out=grad_hidden[part])
            if grad_weight is None:
                pass
            elif slopes.dtype == grad_weight.dtype:
                grad_weight.addmm_(slopes.t(), hidden[part])
            else:
                grad_weight.add_(slopes.t() @ hidden[part])
            del slopes  # free its memory before the next chunk
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            *(None,) * 4,
        )


def _parts(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))


def _at(temperatures: Tensor | None, part: slice) -> Tensor | None:
    return None if temperatures is None else temperatures[part, None]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor | None
) -> Tensor:
    """Return the logits of a chunk, [C, V] float32, in new memory. Args: temperatures: [C, 1]."""
    logits = nn.functional.linear(hidden, weight, bias).float()
    if bias is not None:
        # A bias can exclude a token by -inf; in the entropy, 0 times infinity would be NaN.
        logits.clamp_(min=_LEAST_LOGIT)
    return logits if temperatures is None else logits.div_(temperatures)


def _score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalisers, log-probabilities and entropies, [C] each; overwrites logits [C, V]."""
    peaks = logits.amax(-1, keepdim=True)
    # Subtract the largest logit: with small numbers the entropy loses fewer digits.
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
    """Return the gradient for the logits, in the memory of log_softmax [C, V].

    of_logprobs, of_entropies: the gradients of the loss for the chunk's log-probabilities and
    entropies, [C, 1]. targets: [C]. entropies: [C, 1].
    """
    if of_entropies is None:
        slopes = log_softmax.exp_().mul_(-of_logprobs)
    else:
        probabilities = log_softmax.exp()
        slopes = log_softmax.add_(entropies).mul_(of_entropies).add_(of_logprobs)
        slopes.mul_(probabilities).neg_()
    return slopes.scatter_add_(-1, targets[:, None], of_logprobs)
