"""Log-probabilities and entropies of chosen tokens, in float32, with bounded memory.

The output head is applied only at the loss positions and in chunks, of which only the hidden
states are kept for the backward pass, so that the logits of one chunk are alive at a time. A head
that is a plain projection goes through `projected_logprobs`, any other through the functions of
logits here. Called by `PolicyModel.forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actors.trainer.projected_logprobs import projected_logprobs

OutputHead = Callable[[Tensor], Tensor]


class LogitScorer(Protocol):
    """`token_logprobs`, or `token_logprobs_and_entropies` where the loss has an entropy bonus."""

    def __call__(
        self, logits: Tensor, targets: Tensor, *, temperature: float
    ) -> tuple[Tensor, Tensor]: ...


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Score the targets under softmax(logits / temperature).

    log p = z_target - logsumexp(z), H = logsumexp(z) - sum(softmax(z) z), z = logits/temperature.

    Args: logits: [M, V], any float type. targets: [M] int64.
    Returns: log-probabilities [M] float32, nats, with gradient; entropies [M] float32, nats,
        without.
    Example: logits [[0, 0]], target 0 -> ([-0.6931], [0.6931])
    """
    logprobs, scaled, normalizer = _normalised(logits, targets, temperature=temperature)
    with torch.no_grad():
        entropies = _entropies(scaled, normalizer)
    return logprobs, entropies


def token_logprobs_and_entropies(
    logits: Tensor, targets: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Score the targets as `token_logprobs` does, with gradient through the entropies too.

    It keeps a second [M, V] for the backward pass.
    """
    logprobs, scaled, normalizer = _normalised(logits, targets, temperature=temperature)
    return logprobs, _entropies(scaled, normalizer)


def _normalised(
    logits: Tensor, targets: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    normalizer = torch.logsumexp(scaled, dim=-1)
    return scaled.gather(-1, targets[:, None])[:, 0] - normalizer, scaled, normalizer


def _entropies(scaled: Tensor, normalizer: Tensor) -> Tensor:
    probabilities = torch.exp(scaled - normalizer[:, None])
    # exp(-inf) * -inf would be NaN; a token of probability 0 adds no entropy.
    finite = torch.where(probabilities > 0, scaled, 0.0)
    return normalizer - (probabilities * finite).sum(-1)


def chunked_token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    *,
    output_head: OutputHead,
    temperature: float,
    chunk_tokens: int,
    score: LogitScorer = token_logprobs,
) -> tuple[Tensor, Tensor]:
    """Apply the head and score the targets, `chunk_tokens` positions at a time.

    Args: hidden: [M, D] at the loss positions. targets: [M] int64. chunk_tokens: at least 1.
    Returns: as `score` does.
    """
    if _is_projection(output_head) and score in (token_logprobs, token_logprobs_and_entropies):
        return projected_logprobs(
            hidden,
            output_head.weight,
            targets,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            has_entropy_gradient=score is token_logprobs_and_entropies,
        )

    def score_chunk(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return score(output_head(states), wanted, temperature=temperature)

    if hidden.shape[0] <= chunk_tokens:
        return score_chunk(hidden, targets)
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for states, wanted in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        chunk = checkpoint(
            score_chunk, states, wanted, use_reentrant=False, preserve_rng_state=False
        )
        logprobs.append(chunk[0])
        entropies.append(chunk[1])
    return torch.cat(logprobs), torch.cat(entropies)


def _is_projection(output_head: OutputHead) -> TypeGuard[nn.Linear]:
    return isinstance(output_head, nn.Linear) and output_head.bias is None
