"""Distances between two policies: estimators of KL from sampled tokens, and DPPO's trust region.

Pure. The functions `kl_*` are used for the KL term of the loss, and for the statistics of the
mismatch between trainer and engine.
Letters: [M] trained tokens of one micro-batch; delta = log p - log q of the sampled token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor

from actors.algorithm import KlEstimator
from actors.limits import MAX_LOG_RATIO
from actors.trainer.loss.corrections import bounded_ratio


def kl_k1(delta: Tensor) -> Tensor:
    """Estimate KL(q || p) from samples of q without bias: k1 = -delta, delta = log p - log q.

    Source: Schulman 2020, "Approximating KL divergence".   Returns: float64, nats.
    """
    return -delta.double()


def kl_k2(delta: Tensor) -> Tensor:
    """Estimate KL(q || p) from samples of q with bias and low variance: k2 = delta^2 / 2.

    Averaged over samples of q, the gradient of k2 with respect to log q is the gradient of
    KL(q || p).
    Source: Schulman 2020, "Approximating KL divergence".   Returns: float64, nats.
    Example: k2(ln 2) = .240227
    """
    return delta.double().square() / 2.0


def kl_k3(delta: Tensor) -> Tensor:
    """Estimate KL(q || p) from samples of q without bias; the estimate is never negative.

    k3 = exp(delta) - 1 - delta, with delta = log p - log q. Only the value is unbiased: averaged
    over samples of q, the gradient with respect to log q is the gradient of KL(p || q).
    `actors.merge.groups.kl_rewards` has the same formula in NumPy.
    Source: Schulman 2020, "Approximating KL divergence". Deviations: delta is bounded by 20, and
    has no gradient above 20; `expm1` in float64, as float32 loses every digit of a small delta.

    Returns: float64, nats.    Example: k3(ln 2) = 1 - ln 2 = .306853
    """
    wide = delta.double().clamp(max=MAX_LOG_RATIO)
    return torch.expm1(wide) - wide


def reference_kl(
    current_logprobs: Tensor, reference_logprobs: Tensor, *, estimator: KlEstimator
) -> Tensor:
    """Estimate KL(current || reference) at each token; gradient flows to current.

    delta = reference - current.   Source: Shao et al. 2024 (GRPO), arXiv 2402.03300, equation 4,
    for k3 as a term of the loss.

    Args: both [M] float32, nats.    Returns: [M] float64, nats.
    Example: current ln .5, reference ln .25, k1 -> ln 2
    """
    delta = reference_logprobs - current_logprobs
    match estimator:
        case "k1":
            return kl_k1(delta)
        case "k2":
            return kl_k2(delta)
        case "k3":
            return kl_k3(delta)
        case unknown:
            assert_never(unknown)


def corrected_reference_kl(
    current_logprobs: Tensor,
    reference_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    *,
    estimator: KlEstimator,
) -> Tensor:
    """Estimate KL(current || reference) from tokens that another policy sampled.

    The estimate is r k, with the importance ratio r = exp(current - behaviour). For k1 and k3, the
    gradient also flows through r, so that value and gradient are unbiased. For k2, it does not
    flow through r, because only the gradient of k2 is unbiased.
    Source: DeepSeek-V3.2, arXiv 2512.02556, "Unbiased KL Estimate", for r k3. Deviation: r divides
    by the behaviour policy's probability.

    Args: all [M] float32, nats.    Returns: [M] float64, nats.
    Example: current ln .5, reference ln .25, behaviour ln .25, k1 -> 2 ln 2
    """
    ratio = bounded_ratio((current_logprobs - behaviour_logprobs).double())
    if estimator == "k2":
        ratio = ratio.detach()
    return ratio * reference_kl(current_logprobs, reference_logprobs, estimator=estimator)


def binary_tv(current_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Return the total variation over two outcomes: the sampled token, or any other token.

    TV = |p - q|, p current, q behaviour probability of the sampled token.
    Source: Qi et al. 2026 (DPPO), arXiv 2602.04879, "Binary" approximation.

    Returns: [M] float32, 0 to 1.    Example: p .5, q .99 -> .49
    """
    return (torch.exp(current_logprobs) - torch.exp(behaviour_logprobs)).abs()


def binary_kl(current_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Return KL(behaviour || current) over two outcomes: the sampled token, or any other token.

    KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)).   Source: as `binary_tv` (deviation:
    float64, and 1 - p at least 1e-12, where the authors' code adds 1e-8 to both complements).

    Returns: [M] float32, nats.    Example: q .5, p .25 -> .5 ln 2 + .5 ln(2/3) = .143841
    """
    log_p, log_q = current_logprobs.double(), behaviour_logprobs.double()
    q = torch.exp(log_q)
    other_p = (-torch.expm1(log_p)).clamp_min(1e-12)
    other_q = (-torch.expm1(log_q)).clamp_min(1e-12)
    return (q * (log_q - log_p) + other_q * (other_q.log() - other_p.log())).to(
        current_logprobs.dtype
    )


@torch.no_grad()
def outside_trust_region(
    current_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: Callable[[Tensor, Tensor], Tensor],
    bound: float,
) -> tuple[Tensor, Tensor]:
    """Find the tokens that an update would push further out of the trust region.

    With D the divergence between current policy p and behaviour policy q, outside_high is A > 0,
    p > q and D > bound; outside_low is A < 0, p < q and D > bound. A token that moves back to the
    behaviour policy is never stopped.
    Source: Qi et al. 2026 (DPPO), arXiv 2602.04879; as in the paper, the region is around the
    behaviour policy.

    Args: [M] float32. divergence: `binary_tv` or `binary_kl`. bound: delta of the paper; its
    authors use .15 for TV, .05 for KL.
    Returns: outside_low, outside_high: [M] bool each.
    Example: q .2, p .4, TV, bound .15, advantages [1, -1] -> high [True, False], low [False, False]
    """
    is_far = divergence(current_logprobs, behaviour_logprobs) > bound
    is_above = current_logprobs > behaviour_logprobs
    is_below = current_logprobs < behaviour_logprobs
    return is_far & is_below & (advantages < 0), is_far & is_above & (advantages > 0)
