"""The policy loss and the statistics of one forward, as pure functions of tensors.

Three policies, three names. *behaviour*: the engine that sampled the token. *old*: the trainer at
the step's start. *current*: the trainer now. The default loss compares current with behaviour.
Every statistic leaves as a sum or a maximum, so that micro-batches and ranks combine by adding.
Letters: [M] trained tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def importance_ratio(current_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Weigh each token by how much likelier the current policy makes it.

    ratio = exp(current - behaviour).   Source: Schulman et al. 2017 (PPO), section 3 (deviation:
    the denominator is the sampler's recorded log-probability, not a recomputed one).

    Args: [M] float32, nats, both.    Returns: [M] float32, >= 0.
    """
    return torch.exp(current_logprobs - behaviour_logprobs)


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Bound how far one update moves a token's probability.

    loss = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).   Source: Schulman et al.
    2017 (PPO), equation 7; two separate bounds: Yu et al. 2025 (DAPO), equation 10.

    Args: ratio, advantages: [M] float32.    Returns: [M] float32, one loss a token.
    Example: ratio [1.5, 1.5, .5, .5], advantages [1, -1, 1, -1], clips .2, .28
        -> [-1.28, 1.5, -.5, .8]
    """
    clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def token_mean(token_losses: Tensor, *, denominator: int) -> Tensor:
    """Sum the tokens' losses over one global denominator.

    loss = sum_t loss_t / denominator, the tokens of the update over all ranks and
    micro-batches; the micro-batches' losses then add up to the mean however tokens are packed.

    Returns: scalar float32.
    """
    return token_losses.sum() / denominator


def kl_k1(delta: Tensor) -> Tensor:
    """Estimate KL(q || p) from samples of q, unbiased: k1 = -delta, delta = log p - log q.

    Source: Schulman 2020, "Approximating KL divergence".   Returns: float64, nats.
    """
    return -delta.double()


def kl_k3(delta: Tensor) -> Tensor:
    """Estimate KL(q || p) from samples of q, unbiased and never negative.

    k3 = exp(delta) - 1 - delta, delta = log p - log q.   Source: Schulman 2020, "Approximating KL
    divergence" (deviation: `expm1` in float64, because float32 loses every digit of a small delta).

    Returns: float64, nats.    Example: k3(ln 2) = 1 - ln 2 = .306853
    """
    wide = delta.double()
    return torch.expm1(wide) - wide


# The order of the sums and of the maxima in their vectors; `statistics.py` reads them by name.
SUM_NAMES = (
    "loss",
    "num_trained",
    "num_tokens",
    "num_nonfinite",
    "ratio",
    "ratio_squared",
    "num_clipped",
    "entropy",
    "advantage",
    "policy_age",
    "mismatch_k1",
    "mismatch_k3",
    "num_mismatch",
)
MAX_NAMES = ("ratio", "policy_age", "mismatch_abs")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchTerms:
    """What one forward knows about its tokens; all [M], on one device.

    current_logprobs, behaviour_logprobs, entropies: float32, nats. advantages: float32.
    sampled_versions: int32. trainer_version: what the trainer held at the step's start.
    """

    current_logprobs: Tensor
    behaviour_logprobs: Tensor
    entropies: Tensor
    advantages: Tensor
    sampled_versions: Tensor
    trainer_version: int


def micro_batch_loss(
    terms: MicroBatchTerms, *, clip_low: float, clip_high: float, denominator: int
) -> tuple[Tensor, Tensor]:
    """Return this micro-batch's share of the loss, with gradient, and the ratios [M], without."""
    ratio = importance_ratio(terms.current_logprobs, terms.behaviour_logprobs)
    losses = clipped_policy_loss(ratio, terms.advantages, clip_low=clip_low, clip_high=clip_high)
    return token_mean(losses, denominator=denominator), ratio.detach()


@torch.no_grad()
def statistic_sums(
    terms: MicroBatchTerms,
    *,
    loss: Tensor,
    ratio: Tensor,
    clip_low: float,
    clip_high: float,
    num_tokens: int,
    with_mismatch: bool,
) -> tuple[Tensor, Tensor]:
    """Sum one micro-batch's statistics.

    The mismatch compares the trainer with the engine on tokens sampled by the version that the
    trainer holds: delta = trainer - engine. It is meaningful while the weights are still those,
    so only the step's first update asks for it.

    A token is clipped when the clip took its gradient away: ratio above 1 + clip_high with a
    positive advantage, below 1 - clip_low with a negative one.

    Args: loss: this micro-batch's scalar. num_tokens: of the packed row.
    Returns: sums [len(SUM_NAMES)] and maxima [len(MAX_NAMES)], float64; maxima start at 0.
    """
    zero = ratio.new_zeros((), dtype=torch.float64)
    wide = ratio.double()
    age = (terms.trainer_version - terms.sampled_versions).double()
    pushes_up = (terms.advantages > 0) & (ratio > 1.0 + clip_high)
    pushes_down = (terms.advantages < 0) & (ratio < 1.0 - clip_low)
    is_same_version = age == 0 if with_mismatch else torch.zeros_like(age, dtype=torch.bool)
    delta = terms.current_logprobs.double() - terms.behaviour_logprobs.double()
    delta = torch.where(is_same_version, delta, 0.0)
    sums = (
        loss.detach().double(),
        zero + ratio.shape[0],
        zero + num_tokens,
        (~torch.isfinite(loss)).double(),
        wide.sum(),
        wide.square().sum(),
        (pushes_up | pushes_down).sum().double(),
        terms.entropies.double().sum(),
        terms.advantages.double().sum(),
        age.sum(),
        kl_k1(delta).sum(),
        kl_k3(delta).sum(),
        is_same_version.sum().double(),
    )
    maxima = tuple(torch.cat([zero[None], values]).max() for values in (wide, age, delta.abs()))
    return torch.stack(sums), torch.stack(maxima)
