"""The loss of one micro-batch, from ratio, objective, correction, mask, KL and entropy.

loss = sum_t w_t (m_t c_t L_t + b k_t - e H_t): w the aggregation's weight of the token, m the
rejection mask, c the importance weight, L the objective's loss, k the KL term with coefficient b,
H the entropy with coefficient e. The loss is not divided by anything, so the sum of the
micro-batches' losses is the update's loss, for any merging, packing and distribution to ranks. A
masked token keeps its weight w.

Called by `TrainerRank`. Letters: [M] trained tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import assert_never

import torch
from torch import Tensor

from actors.algorithm import Correction, LossSettings, Ratio
from actors.trainer.loss import corrections
from actors.trainer.loss.corrections import (
    bounded_ratio,
    sequence_log_ratio,
    token_log_ratio,
)
from actors.trainer.loss.divergence import corrected_reference_kl, reference_kl
from actors.trainer.loss.objectives import scale_negative, token_losses


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchTerms:
    """The trained tokens of one forward pass with their recorded values; all [M], on one device."""

    current_logprobs: Tensor
    """float32, nats, of the current policy, with gradient."""
    behaviour_logprobs: Tensor
    """float32, nats, of the policy that sampled the tokens."""
    entropies: Tensor
    """float32, nats, of the current policy at each trained token."""
    advantages: Tensor
    """float32, the advantage of each token."""
    loss_weights: Tensor
    """float32, each token's share of the update, computed by the merge actor."""
    trajectory_index: Tensor
    """int64, equal for the tokens of a trajectory, each less than M."""
    sampled_versions: Tensor
    """int64, the policy version that sampled each token."""
    trainer_version: int
    """The policy version that the trainer held at the step's start."""
    old_logprobs: Tensor | None = None
    """float32, nats, of the policy at the step's start; None if the settings do not need them."""
    reference_logprobs: Tensor | None = None
    """float32, nats, of the reference model; None if the settings do not need them."""

    def __post_init__(self) -> None:
        values = [getattr(self, field.name) for field in fields(self)]
        tensors = [value for value in values if isinstance(value, Tensor)]
        assert all(tensor.shape == self.current_logprobs.shape for tensor in tensors)
        # In half precision, sums over a trajectory's tokens stop growing (bfloat16 at 256).
        assert all(tensor.dtype not in (torch.float16, torch.bfloat16) for tensor in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """A micro-batch's share of the loss, and values for statistics, which are [M] each."""

    loss: Tensor
    """Scalar float32, with gradient; no other field has a gradient."""
    ratio: Tensor
    """float64, not masked, at most e^20."""
    token_losses: Tensor
    """The objective's losses times the importance weights; 0 for masked tokens."""
    importance_weights: Tensor
    """1 without a correction."""
    is_masked: Tensor
    """bool."""
    rejected: Mapping[str, Tensor]
    """bool, the tokens that each rule takes out of the loss, by the rule's name: token, sequence or
    outlier. A rule that is off is absent."""
    clipped_low: Tensor
    """bool, as `objectives` defines it; False for masked tokens."""
    clipped_high: Tensor
    """bool, as `objectives` defines it; False for masked tokens."""
    kl: Tensor | None
    """float64, nats; None without a KL term."""


def micro_batch_loss(terms: MicroBatchTerms, settings: LossSettings) -> MicroBatchLoss:
    """Compute this micro-batch's share of the update's loss.

    Args: terms: must have the log-probabilities that the settings need.
    Example: current ln .6, behaviour ln .4, advantage 1, weight .25, defaults: ratio 1.5, clipped
        at 1.28, loss -.32
    """
    denominator = _denominator(terms, settings)
    trainer = denominator if settings.needs_old else terms.current_logprobs
    drift = (trainer - terms.behaviour_logprobs).detach()
    rejected = _rejected(drift, terms.trajectory_index, settings)
    is_masked = torch.zeros_like(drift, dtype=torch.bool)
    for tokens in rejected.values():
        is_masked = is_masked | tokens
    log_ratio = _log_ratio(terms, denominator, settings)
    objective = token_losses(
        # Mask before the exponential, so that the ratio of a masked token has no gradient.
        bounded_ratio(torch.where(is_masked, 0.0, log_ratio)),
        scale_negative(terms.advantages, negative_weight=settings.negative_weight),
        current_logprobs=terms.current_logprobs,
        behaviour_logprobs=terms.behaviour_logprobs,
        settings=settings,
    )
    weights = _importance_weights(drift, terms.trajectory_index, settings)
    losses = torch.where(is_masked, 0.0, weights * objective.losses)
    loss = (terms.loss_weights * losses).sum()
    kl = _kl(terms, is_masked, settings)
    if kl is not None:
        loss = loss + settings.kl.coefficient * (terms.loss_weights * kl).sum().to(loss.dtype)
    if settings.needs_entropy_gradient:
        bonus = (terms.loss_weights * terms.entropies).sum()
        loss = loss - settings.entropy_coefficient * bonus
    return MicroBatchLoss(
        loss=loss,
        ratio=bounded_ratio(log_ratio.detach().double()),
        token_losses=losses.detach(),
        importance_weights=weights,
        is_masked=is_masked,
        rejected=rejected,
        clipped_low=objective.clipped_low & ~is_masked,
        clipped_high=objective.clipped_high & ~is_masked,
        kl=None if kl is None else kl.detach(),
    )


def _denominator(terms: MicroBatchTerms, settings: LossSettings) -> Tensor:
    if not settings.needs_old:
        return terms.behaviour_logprobs
    assert terms.old_logprobs is not None
    return terms.old_logprobs


def _log_ratio(terms: MicroBatchTerms, denominator: Tensor, settings: LossSettings) -> Tensor:
    match settings.ratio:
        case Ratio.TOKEN:
            return token_log_ratio(terms.current_logprobs, denominator)
        case Ratio.SEQUENCE:
            return sequence_log_ratio(terms.current_logprobs, denominator, terms.trajectory_index)
        case unknown:
            assert_never(unknown)


def _rejected(drift: Tensor, trajectory_index: Tensor, settings: LossSettings) -> dict[str, Tensor]:
    rejected = {}
    if settings.token_band is not None:
        low, high = settings.token_band
        rejected["token"] = ~corrections.keep_token_band(drift, low=low, high=high)
    if settings.sequence_band is not None:
        low, high = settings.sequence_band
        keep = corrections.keep_sequence_band(drift, trajectory_index, low=low, high=high)
        rejected["sequence"] = ~keep
    if settings.outlier_below is not None:
        below = settings.outlier_below
        keep = corrections.keep_without_outlier(drift, trajectory_index, below=below)
        rejected["outlier"] = ~keep
    return rejected


def _importance_weights(drift: Tensor, trajectory_index: Tensor, settings: LossSettings) -> Tensor:
    cap = settings.correction_cap
    match settings.correction:
        case Correction.NONE:
            return torch.ones_like(drift)
        case Correction.TRUNCATE_TOKEN:
            return corrections.truncated_token_weight(drift, cap=cap)
        case Correction.TRUNCATE_SEQUENCE:
            return corrections.truncated_sequence_weight(drift, trajectory_index, cap=cap)
        case unknown:
            assert_never(unknown)


def _kl(terms: MicroBatchTerms, is_masked: Tensor, settings: LossSettings) -> Tensor | None:
    if not settings.needs_reference:
        return None
    assert terms.reference_logprobs is not None
    current, reference = terms.current_logprobs, terms.reference_logprobs
    estimator = settings.kl.estimator
    if not settings.kl.corrected:
        return reference_kl(current, reference, estimator=estimator)
    # The ratio of a masked token is not trusted, so the token is left out of this term too.
    behaviour = torch.where(is_masked, current.detach(), terms.behaviour_logprobs)
    kl = corrected_reference_kl(current, reference, behaviour, estimator=estimator)
    return torch.where(is_masked, 0.0, kl)
