"""The loss of one micro-batch, and the values for its statistics.

loss = sum_t w_t (m_t c_t L_t + b k_t - e H_t): w is the token's weight, computed from the
aggregation; m the rejection mask; c the importance weight; L the objective's loss; k the KL term
with coefficient b; H the entropy with coefficient e. The loss is not divided by anything. So the
sum of the micro-batches' losses is the update's loss, for any merging, packing and distribution to
ranks. A masked token keeps its weight w.

Each micro-batch gives a vector of partial results for the statistics (`actors.trainer.statistics`).
Letters: [M] trained tokens of one micro-batch, [S] positions in a vector of partial results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import assert_never

import torch
from torch import Tensor

from actors.algorithm import LossSettings
from actors.trainer.loss import corrections
from actors.trainer.loss.corrections import (
    bounded_ratio,
    sequence_log_ratio,
    token_log_ratio,
)
from actors.trainer.loss.divergence import corrected_reference_kl, kl_k1, kl_k3, reference_kl
from actors.trainer.loss.objectives import scale_negative, token_losses
from actors.trainer.statistics import ADDED, COMPARED, Part


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
    """int64, a number below M, which is the same for all tokens of a trajectory."""
    sampled_versions: Tensor
    """int64, the policy version that sampled each token."""
    trainer_version: int
    """The policy version that the trainer held at the step's start."""
    old_logprobs: Tensor | None = None
    """float32, nats, log-probabilities under the policy at the step's start; None if the settings
    need no such log-probabilities.
    """
    reference_logprobs: Tensor | None = None
    """float32, nats, log-probabilities under the reference model; None if the settings need no such
    log-probabilities.
    """

    def __post_init__(self) -> None:
        values = [getattr(self, field.name) for field in fields(self)]
        tensors = [value for value in values if isinstance(value, Tensor)]
        assert all(tensor.shape == self.current_logprobs.shape for tensor in tensors)
        # In half precision, sums over a trajectory's tokens stop growing (bfloat16 at 256).
        assert all(tensor.dtype not in (torch.float16, torch.bfloat16) for tensor in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """A micro-batch's share of the update's loss (`loss`), and values for statistics.

    The statistics are computed from the other fields, which have one value for each token, [M].
    """

    loss: Tensor
    """Scalar float32, with gradient; no other field has a gradient."""
    ratio: Tensor
    """float64, the ratio of each token, also of masked tokens; at most e^20."""
    token_losses: Tensor
    """The objective's losses times the importance weights; 0 for masked tokens."""
    importance_weights: Tensor
    """The importance weight of each token; 1 without a correction."""
    is_masked: Tensor
    """bool, whether a rule of rejection takes the token out of the loss."""
    rejected: Mapping[str, Tensor]
    """bool, the tokens that each rule takes out of the loss, by the rule's name: token, sequence or
    outlier. A rule that is off is absent."""
    clipped_low: Tensor
    """bool, whether the objective clips the token at a low ratio; False for masked tokens."""
    clipped_high: Tensor
    """bool, whether the objective clips the token at a high ratio; False for masked tokens."""
    kl: Tensor | None
    """float64, nats, the estimate of the KL at each token; None without a KL term."""


def micro_batch_loss(terms: MicroBatchTerms, settings: LossSettings) -> MicroBatchLoss:
    """Compute this micro-batch's share of the update's loss.

    Args: terms: must have the log-probabilities that the settings need.
    Example: current ln .6, behaviour ln .4, advantage 1, weight .25, defaults: ratio 1.5, clipped
        at 1.28, loss -.32
    """
    denominator = terms.old_logprobs if settings.needs_old else terms.behaviour_logprobs
    assert denominator is not None
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


def _log_ratio(terms: MicroBatchTerms, denominator: Tensor, settings: LossSettings) -> Tensor:
    match settings.ratio:
        case "token":
            return token_log_ratio(terms.current_logprobs, denominator)
        case "sequence":
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
        case "none":
            return torch.ones_like(drift)
        case "truncate_token":
            return corrections.truncated_token_weight(drift, cap=cap)
        case "truncate_sequence":
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


@torch.no_grad()
def micro_batch_statistics(
    terms: MicroBatchTerms, result: MicroBatchLoss, *, num_tokens: int, with_mismatch: bool
) -> Tensor:
    """Reduce one micro-batch's values to a row of partial results, [S] float64.

    The mismatch is delta = trainer - engine, the difference of their log-probabilities. It includes
    only tokens that were sampled by the version that the trainer holds. with_mismatch is true only
    in the step's first update, because later updates have other weights.

    Args: num_tokens: tokens of the packed row.
    """
    advantages = terms.advantages.double()
    positive, negative = advantages > 0, advantages < 0
    nothing = torch.zeros_like(positive)
    is_same_version = terms.sampled_versions == terms.trainer_version if with_mismatch else nothing
    delta = terms.current_logprobs.double() - terms.behaviour_logprobs.double()
    # By the name in the table: the values of all tokens, or values with a mask of the tokens that
    # have a value. None: the loss does not need these values.
    values: dict[str, Tensor | tuple[Tensor | None, Tensor] | None] = {
        "policy_logprob": terms.current_logprobs,
        "policy_logprob_positive": (terms.current_logprobs, positive),
        "policy_logprob_negative": (terms.current_logprobs, negative),
        "old_logprob": terms.old_logprobs,
        "old_logprob_positive": (terms.old_logprobs, positive),
        "old_logprob_negative": (terms.old_logprobs, negative),
        "reference_logprob": terms.reference_logprobs,
        "reference_logprob_positive": (terms.reference_logprobs, positive),
        "reference_logprob_negative": (terms.reference_logprobs, negative),
        "loss": result.loss,
        "surrogate": -result.token_losses,
        "unclipped_surrogate": result.ratio * advantages,
        "kl": result.kl,
        "entropy": terms.entropies,
        "ratio": result.ratio,
        "clip_fraction_low": result.clipped_low,
        "clip_fraction_high": result.clipped_high,
        "masked_fraction": result.is_masked,
        "masked_token_fraction": result.rejected.get("token", nothing),
        "masked_sequence_fraction": result.rejected.get("sequence", nothing),
        "masked_outlier_fraction": result.rejected.get("outlier", nothing),
        "importance_weight": result.importance_weights,
        "mismatch_k1": (kl_k1(delta), is_same_version),
        "mismatch_k3": (kl_k3(delta), is_same_version),
        "mismatch": (delta.abs(), is_same_version),
        "advantage": advantages,
        "num_trained": torch.ones_like(advantages),
        "num_packed": advantages.new_tensor(num_tokens),
        "num_nonfinite": ~torch.isfinite(result.loss),
    }
    neutral = no_statistics(advantages.device)
    row = [
        _reduced(values[name], part, neutral[place])
        for place, (name, part) in enumerate((*ADDED, *COMPARED))
    ]
    return torch.stack(row)


def no_statistics(device: torch.device | None = None) -> Tensor:
    """Return neutral partial results, [S]: combined with others they change nothing."""
    added = torch.zeros(len(ADDED), dtype=torch.float64, device=device)
    return torch.cat([added, added.new_full((len(COMPARED),), -torch.inf)])


def combine_rows(rows: Tensor) -> Tensor:
    """Combine the partial statistics of N micro-batches or ranks, [N, S] -> [S], float64.

    The columns of ADDED are summed; those of COMPARED take the largest value.
    """
    split = len(ADDED)
    return torch.cat([rows[:, :split].sum(0), rows[:, split:].amax(0)])


def _reduced(
    values: Tensor | tuple[Tensor | None, Tensor] | None, part: Part, neutral: Tensor
) -> Tensor:
    """Reduce values to one partial result, which is `neutral` if there are no values."""
    found, where = values if isinstance(values, tuple) else (values, None)
    if found is None or found.numel() == 0:
        return neutral
    wide = found.double()
    if part == "count":
        return (torch.ones_like(wide) if where is None else where.double()).sum()
    if part == "negated_min":
        wide = -wide
    if where is not None:
        wide = torch.where(where, wide, neutral)
    match part:
        case "sum":
            return wide.sum()
        case "squares":
            return wide.square().sum()
        case _:
            return wide.amax()
