"""From the settings to the objective's losses, with what was clipped. Called by `micro_batch`.

A token is *clipped* when the objective took its gradient away, or, in the objectives that bound a
detached weight (cispo, reinforce, dppo_*), when the bound was met: high above it, low below.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.trainer.loss import objectives
from actors.trainer.loss.divergence import Divergence, outside_trust_region
from actors.trainer.loss.settings import LossSettings, Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """losses: [M] float32, with gradient. clipped_low, clipped_high: [M] bool."""

    losses: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def token_losses(
    ratio: Tensor,
    advantages: Tensor,
    *,
    current_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    settings: LossSettings,
) -> TokenLosses:
    """Apply the objective that the settings name.

    Args: [M] float32, all; ratio with gradient. behaviour_logprobs: what DPPO's trust region is
        around.
    """
    match settings.objective:
        case Objective.PPO_CLIP | Objective.DUAL_CLIP:
            return _clipped(ratio, advantages, settings=settings)
        case Objective.CISPO:
            return TokenLosses(
                losses=objectives.cispo(
                    ratio,
                    advantages,
                    current_logprobs,
                    clip_low=settings.clip_low,
                    clip_high=settings.clip_high,
                ),
                clipped_low=ratio < 1.0 - settings.clip_low,
                clipped_high=ratio > 1.0 + settings.clip_high,
            )
        case Objective.REINFORCE:
            return TokenLosses(
                losses=objectives.reinforce(
                    ratio, advantages, current_logprobs, ratio_cap=settings.ratio_cap
                ),
                clipped_low=torch.zeros_like(ratio, dtype=torch.bool),
                clipped_high=ratio > settings.ratio_cap,
            )
        case Objective.SAPO:
            losses = objectives.sapo(
                ratio,
                advantages,
                tau_positive=settings.sapo_tau_positive,
                tau_negative=settings.sapo_tau_negative,
            )
            nothing = torch.zeros_like(ratio, dtype=torch.bool)
            return TokenLosses(losses=losses, clipped_low=nothing, clipped_high=nothing)
        case Objective.DPPO_TV | Objective.DPPO_KL:
            return _inside(ratio, advantages, current_logprobs, behaviour_logprobs, settings)


def _clipped(ratio: Tensor, advantages: Tensor, *, settings: LossSettings) -> TokenLosses:
    low, high = settings.clip_low, settings.clip_high
    clipped_high = (advantages > 0) & (ratio > 1.0 + high)
    if settings.objective is Objective.DUAL_CLIP:
        bound = settings.dual_clip
        losses = objectives.dual_clip(ratio, advantages, clip_low=low, clip_high=high, bound=bound)
        clipped_high |= (advantages < 0) & (ratio > bound)
    else:
        losses = objectives.ppo_clip(ratio, advantages, clip_low=low, clip_high=high)
    return TokenLosses(
        losses=losses,
        clipped_low=(advantages < 0) & (ratio < 1.0 - low),
        clipped_high=clipped_high,
    )


def _inside(
    ratio: Tensor,
    advantages: Tensor,
    current_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    settings: LossSettings,
) -> TokenLosses:
    is_tv = settings.objective is Objective.DPPO_TV
    outside_low, outside_high = outside_trust_region(
        current_logprobs,
        behaviour_logprobs,
        advantages,
        divergence=Divergence.BINARY_TV if is_tv else Divergence.BINARY_KL,
        bound=settings.divergence_bound,
    )
    losses = objectives.dppo(
        ratio,
        advantages,
        current_logprobs,
        keep=~(outside_low | outside_high),
        ratio_cap=settings.ratio_cap,
    )
    return TokenLosses(losses=losses, clipped_low=outside_low, clipped_high=outside_high)
