"""The partial results of a micro-batch from which the statistics of the loss are made; float64.

They form a row (`actors.trainer.statistics`); the rows of micro-batches and ranks are combined.
Called by `TrainerRank`. Letters: [M] trained tokens of the micro-batch, [S] positions in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.trainer.loss.divergence import kl_k1, kl_k3
from actors.trainer.loss.micro_batch import MicroBatchLoss, MicroBatchTerms
from actors.trainer.statistics import ADDED, COMPARED, Part


@torch.no_grad()
def micro_batch_statistics(
    terms: MicroBatchTerms, result: MicroBatchLoss, *, num_tokens: int, with_mismatch: bool
) -> Tensor:
    """Reduce one micro-batch's values to a row.

    The mismatch compares the trainer with the engine on tokens sampled by the version that the
    trainer holds: delta = trainer - engine. It is meaningful only before the weights change, so
    with_mismatch is true only in the step's first update.

    Args: num_tokens: tokens of the packed row.    Returns: [S] float64.
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
    """Return the neutral row, which changes nothing if it is combined with another row."""
    added = torch.zeros(len(ADDED), dtype=torch.float64, device=device)
    return torch.cat([added, added.new_full((len(COMPARED),), -torch.inf)])


def combine_rows(rows: Tensor) -> Tensor:
    """Combine the rows of micro-batches or ranks, [N, S] -> [S], float64."""
    split = len(ADDED)
    return torch.cat([rows[:, :split].sum(0), rows[:, split:].amax(0)])


def _reduced(
    values: Tensor | tuple[Tensor | None, Tensor] | None, part: Part, neutral: Tensor
) -> Tensor:
    """Reduce values to a partial result; to its neutral number if there are no values."""
    found, where = values if isinstance(values, tuple) else (values, None)
    if found is None or found.numel() == 0:
        return neutral
    wide = found.double()
    if part is Part.COUNT:
        return (torch.ones_like(wide) if where is None else where.double()).sum()
    if part is Part.NEGATED_MIN:
        wide = -wide
    if where is not None:
        wide = torch.where(where, wide, neutral)
    match part:
        case Part.SUM:
            return wide.sum()
        case Part.SQUARES:
            return wide.square().sum()
        case _:
            return wide.amax()
