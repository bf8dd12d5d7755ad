"""The policy objectives, which compute a loss for each token from its ratio and advantage.

All objectives raise a token's probability if its advantage is positive and lower it if the
advantage is negative; they differ in how they limit the change. At ratio 1, the derivative of each
loss with respect to the token's log-probability is -A, as in the plain policy gradient.

`token_losses` applies the objective of the settings, and marks the *clipped* tokens. Their weight
is bounded (cispo, reinforce) or their gradient is removed (the other objectives). A token is
clipped high at a high ratio, and clipped low at a low ratio. Letters: [M] trained tokens of one
micro-batch; r ratio, A advantage, p the token's probability. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from actors.algorithm import LossSettings, Objective
from actors.trainer.loss.divergence import binary_kl, binary_tv, outside_trust_region


def ppo_clip(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Compute a loss that limits how far one update moves a token's probability.

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).   Source: Schulman et al. 2017 (PPO),
    equation 7; two separate bounds: Yu et al. 2025 (DAPO), equation 10.

    Args: ratio, advantages: [M] float32.    Returns: [M] float32, a loss for each token.
    Example: ratio [1.5, 1.5, .5, .5], advantages [1, -1, 1, -1], clips .2, .28
        -> [-1.28, 1.5, -.5, .8]
    """
    clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def dual_clip(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, bound: float
) -> Tensor:
    """Compute `ppo_clip`, with a bound on the loss of tokens with A < 0 and a high ratio.

    loss = -max(min(r A, clip(r) A), bound A) if A < 0, otherwise as `ppo_clip`.
    Source: Ye et al. 2020, arXiv 1912.09729, section "Dual-clip PPO".

    Args: ratio, advantages: [M] float32. bound: c of the paper, > 1.    Returns: [M] float32.
    Example: ratio [5, 2, 5], advantages [-1, -1, 1], clips .2, .28, bound 3 -> [3, 2, -1.28]
    """
    losses = ppo_clip(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return torch.where(advantages < 0, torch.minimum(losses, -bound * advantages), losses)


def cispo(
    ratio: Tensor,
    advantages: Tensor,
    current_logprobs: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Compute a loss with a clipped importance weight; every token keeps a gradient.

    loss = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p.   Source: MiniMax-M1, arXiv
    2506.13585, equations 4 and 5 (clip_low 1 is the paper's own choice: no lower bound).

    Args: [M] float32, all.    Returns: [M] float32; its gradient for log p is -clip(r) A.
    Example: ratio 2, advantage 1, log p ln .5, clips 1, .28 -> 1.28 ln 2 = .887228
    """
    weight = torch.clamp(ratio.detach(), 1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * current_logprobs


def reinforce(
    ratio: Tensor, advantages: Tensor, current_logprobs: Tensor, *, ratio_cap: float
) -> Tensor:
    """Compute the policy-gradient loss of each token, weighted by the token's capped ratio.

    loss = -sg[min(r, ratio_cap)] A log p.   Source: Williams 1992 (REINFORCE).
    The ratio corrects for tokens that another policy sampled; the cap is from Ionides 2008 and
    Espeholt et al. 2018 (IMPALA), section 4.1.

    Args: [M] float32, all. ratio_cap: > 0.
    Returns: [M] float32; its gradient for log p is -min(r, ratio_cap) A.
    Example: ratio 3, advantage -1, log p ln .5, cap 2 -> -2 ln 2 = -1.386294
    """
    return -torch.clamp(ratio.detach(), max=ratio_cap) * advantages * current_logprobs


def sapo(ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> Tensor:
    """Compute a loss with a smooth gate that reduces the update as the ratio moves away from 1.

    loss = -(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_positive if A > 0, else tau_negative. The
    gradient for log p is -4 g (1 - g) r A with g the sigmoid; at r = 1 it is -A for every tau.
    Source: Gao et al. 2025 (SAPO), arXiv 2511.20347 (deviation: the aggregation is a separate
    setting; the paper's is the trajectory mean).

    Args: ratio, advantages: [M] float32. tau_*: > 0.    Returns: [M] float32.
    Example: ratio 1, advantages [1, -1], taus 1, 1.05 -> [-2, 1.904762]
    """
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages


def dppo(
    ratio: Tensor, advantages: Tensor, current_logprobs: Tensor, *, keep: Tensor, ratio_cap: float
) -> Tensor:
    """Compute a policy-gradient loss that is 0 for tokens outside a trust region.

    loss = -keep sg[min(r, ratio_cap)] A log p.   Source: Qi et al. 2026 (DPPO), arXiv 2602.04879.
    The paper maximises keep r A. Our loss is the one in the authors' code (sail-sg/Stable-RL, with
    a cap of 20). Loss and paper have the same gradient if r <= ratio_cap.

    Args: keep: [M] bool, False for the tokens that `divergence.outside_trust_region` finds. The
        others: [M] float32.
    Returns: [M] float32.
    Example: ratio 2, advantage 1, log p ln .5, keep [1, 0], cap 20 -> [2 ln 2, 0]
    """
    losses = reinforce(ratio, advantages, current_logprobs, ratio_cap=ratio_cap)
    return torch.where(keep, losses, 0.0)


def scale_negative(advantages: Tensor, *, negative_weight: float) -> Tensor:
    """Multiply negative advantages by a weight.

    A' = A if A > 0, otherwise negative_weight A. With weight 0, only tokens of positive advantage
    are trained, as in the filtered policy gradient.   Source: RAFT, arXiv 2304.06767 (deviation:
    the baseline is computed from the whole group).

    Args: advantages: [M] float32. negative_weight: >= 0.    Returns: [M] float32.
    Example: advantages [2, -2], weight .25 -> [2, -.5]
    """
    return torch.where(advantages < 0, negative_weight * advantages, advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """An objective's losses, and the tokens that it clipped."""

    losses: Tensor
    """[M] float32, the loss of each token, with gradient."""
    clipped_low: Tensor
    """[M] bool, whether the token was clipped at a low ratio."""
    clipped_high: Tensor
    """[M] bool, whether the token was clipped at a high ratio."""


def token_losses(
    ratio: Tensor,
    advantages: Tensor,
    *,
    current_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    settings: LossSettings,
) -> TokenLosses:
    """Apply the objective that the settings name.

    Args: all [M] float32; ratio with gradient. behaviour_logprobs: of the policy that sampled the
        tokens; only DPPO uses them.
    """
    low, high, cap = settings.clip_low, settings.clip_high, settings.ratio_cap
    clipped_low = clipped_high = torch.zeros_like(ratio, dtype=torch.bool)
    match settings.objective:
        case Objective.PPO_CLIP:
            losses = ppo_clip(ratio, advantages, clip_low=low, clip_high=high)
            clipped_low = (advantages < 0) & (ratio < 1.0 - low)
            clipped_high = (advantages > 0) & (ratio > 1.0 + high)
        case Objective.DUAL_CLIP:
            bound = settings.dual_clip
            losses = dual_clip(ratio, advantages, clip_low=low, clip_high=high, bound=bound)
            clipped_low = (advantages < 0) & (ratio < 1.0 - low)
            clipped_high = (advantages > 0) & (ratio > 1.0 + high)
            clipped_high |= (advantages < 0) & (ratio > bound)
        case Objective.CISPO:
            losses = cispo(ratio, advantages, current_logprobs, clip_low=low, clip_high=high)
            clipped_low, clipped_high = ratio < 1.0 - low, ratio > 1.0 + high
        case Objective.REINFORCE:
            losses = reinforce(ratio, advantages, current_logprobs, ratio_cap=cap)
            clipped_high = ratio > cap
        case Objective.SAPO:
            losses = sapo(
                ratio,
                advantages,
                tau_positive=settings.sapo_tau_positive,
                tau_negative=settings.sapo_tau_negative,
            )
        case Objective.DPPO_TV | Objective.DPPO_KL:
            is_tv = settings.objective == Objective.DPPO_TV
            clipped_low, clipped_high = outside_trust_region(
                current_logprobs,
                behaviour_logprobs,
                advantages,
                divergence=binary_tv if is_tv else binary_kl,
                bound=settings.divergence_bound,
            )
            keep = ~(clipped_low | clipped_high)
            losses = dppo(ratio, advantages, current_logprobs, keep=keep, ratio_cap=cap)
        case unknown:
            assert_never(unknown)
    return TokenLosses(losses=losses, clipped_low=clipped_low, clipped_high=clipped_high)
