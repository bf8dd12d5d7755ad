"""What a micro-batch says about itself: named sums, maxima and minima, float64.

Sums add, maxima and minima compare: micro-batches and ranks combine in any order, and every token
weighs the same. An empty vector is neutral: sums 0, maxima -inf, minima +inf. Called by
`TrainerRank`; `actors/trainer/statistics.py` reads them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.trainer.loss.divergence import kl_k1, kl_k3
from actors.trainer.loss.micro_batch import MicroBatchLoss, MicroBatchTerms

# Of each policy: all its tokens, those with a positive and those with a negative advantage.
POLICIES = ("policy", "old", "reference")
PARTS = ("all", "positive", "negative")
_LOGPROBS = tuple(f"{policy}_{part}" for policy in POLICIES for part in PARTS)

SUM_NAMES = (
    "loss",
    "num_trained",
    "num_tokens",
    "num_nonfinite",
    "ratio",
    "ratio_squared",
    "num_clipped_low",
    "num_clipped_high",
    "num_masked",
    "num_masked_token",
    "num_masked_sequence",
    "num_masked_outlier",
    "importance_weight",
    "surrogate",
    "unclipped_surrogate",
    "kl",
    "num_kl",
    "entropy",
    "advantage",
    "policy_age",
    "mismatch_k1",
    "mismatch_k3",
    "num_mismatch",
    *(f"logprob_{name}" for name in _LOGPROBS),
    *(f"num_{name}" for name in _LOGPROBS),
)
MAX_NAMES = (
    "ratio",
    "importance_weight",
    "kl",
    "advantage",
    "policy_age",
    "mismatch_abs",
    *(f"logprob_{name}" for name in _LOGPROBS),
)
MIN_NAMES = ("kl", "advantage")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticVectors:
    """sums [len(SUM_NAMES)], maxima [len(MAX_NAMES)], minima [len(MIN_NAMES)], float64."""

    sums: Tensor
    maxima: Tensor
    minima: Tensor

    @classmethod
    def empty(cls, device: torch.device | None = None) -> StatisticVectors:
        """Make the neutral one."""
        kind = {"dtype": torch.float64, "device": device}
        return cls(
            sums=torch.zeros(len(SUM_NAMES), **kind),
            maxima=torch.full((len(MAX_NAMES),), -torch.inf, **kind),
            minima=torch.full((len(MIN_NAMES),), torch.inf, **kind),
        )

    def joined(self) -> Tensor:
        """One vector, to be gathered; `combine_rows` reads it."""
        return torch.cat([self.sums, self.maxima, self.minima])

    def plus(self, other: StatisticVectors) -> StatisticVectors:
        return StatisticVectors(
            sums=self.sums + other.sums,
            maxima=torch.maximum(self.maxima, other.maxima),
            minima=torch.minimum(self.minima, other.minima),
        )


def combine_rows(rows: Tensor) -> StatisticVectors:
    """Combine what `joined` made on each rank. Args: rows: [ranks, S] float64."""
    first, second = len(SUM_NAMES), len(SUM_NAMES) + len(MAX_NAMES)
    return StatisticVectors(
        sums=rows[:, :first].sum(0),
        maxima=rows[:, first:second].amax(0),
        minima=rows[:, second : second + len(MIN_NAMES)].amin(0),
    )


@torch.no_grad()
def micro_batch_statistics(
    terms: MicroBatchTerms, result: MicroBatchLoss, *, num_tokens: int, with_mismatch: bool
) -> StatisticVectors:
    """Sum one micro-batch's statistics.

    The mismatch compares the trainer with the engine on tokens sampled by the version that the
    trainer holds: delta = trainer - engine. It is meaningful while the weights are still those,
    so only the step's first update asks for it.

    Args: num_tokens: of the packed row.
    """
    age = (terms.trainer_version - terms.sampled_versions).double()
    is_same_version = age == 0 if with_mismatch else torch.zeros_like(age, dtype=torch.bool)
    delta = terms.current_logprobs.double() - terms.behaviour_logprobs.double()
    delta = torch.where(is_same_version, delta, 0.0)
    advantages = terms.advantages.double()
    values = {
        "ratio": result.ratio,
        "importance_weight": result.importance_weights,
        "advantage": advantages,
        "policy_age": age,
        "mismatch_abs": delta.abs(),
    }
    sums = {
        "loss": result.loss,
        "num_trained": torch.ones_like(age),
        "num_tokens": torch.tensor(num_tokens, device=age.device),
        "num_nonfinite": ~torch.isfinite(result.loss),
        "ratio_squared": result.ratio.square(),
        "num_clipped_low": result.clipped_low,
        "num_clipped_high": result.clipped_high,
        "num_masked": result.is_masked,
        "surrogate": -result.token_losses,
        "unclipped_surrogate": result.ratio * advantages,
        "entropy": terms.entropies,
        "mismatch_k1": kl_k1(delta),
        "mismatch_k3": kl_k3(delta),
        "num_mismatch": is_same_version,
        **_masked(result),
    }
    maxima: dict[str, Tensor] = dict(values)
    if result.kl is not None:
        values["kl"] = maxima["kl"] = result.kl
        sums["num_kl"] = torch.ones_like(age)
    for name, chosen, logprobs in _logprob_parts(terms):
        sums[f"logprob_{name}"] = torch.where(chosen, logprobs, 0.0)
        sums[f"num_{name}"] = chosen
        maxima[f"logprob_{name}"] = torch.where(chosen, logprobs, -torch.inf)
    return _vectors({**values, **sums}, maxima, values, device=age.device)


def _masked(result: MicroBatchLoss) -> dict[str, Tensor]:
    rules = {
        "num_masked_token": result.mask.token,
        "num_masked_sequence": result.mask.sequence,
        "num_masked_outlier": result.mask.outlier,
    }
    return {name: rule for name, rule in rules.items() if rule is not None}


def _logprob_parts(terms: MicroBatchTerms) -> Iterable[tuple[str, Tensor, Tensor]]:
    by_policy = (terms.current_logprobs, terms.old_logprobs, terms.reference_logprobs)
    chosen = (
        torch.ones_like(terms.advantages, dtype=torch.bool),
        terms.advantages > 0,
        terms.advantages < 0,
    )
    for policy, logprobs in zip(POLICIES, by_policy, strict=True):
        if logprobs is not None:
            for part, tokens in zip(PARTS, chosen, strict=True):
                yield f"{policy}_{part}", tokens, logprobs.double()


def _vectors(
    sums: dict[str, Tensor],
    maxima: dict[str, Tensor],
    minima: dict[str, Tensor],
    *,
    device: torch.device,
) -> StatisticVectors:
    """Reduce by name; what is not there, or of no token, stays neutral."""
    neutral = StatisticVectors.empty(device)
    return StatisticVectors(
        sums=_reduced(SUM_NAMES, sums, torch.sum, neutral.sums),
        maxima=_reduced(MAX_NAMES, maxima, torch.amax, neutral.maxima),
        minima=_reduced(MIN_NAMES, minima, torch.amin, neutral.minima),
    )


def _reduced(
    names: Sequence[str],
    values: dict[str, Tensor],
    reduce: Callable[[Tensor], Tensor],
    neutral: Tensor,
) -> Tensor:
    found = [
        reduce(values[name].detach().double())
        if name in values and values[name].numel()
        else neutral[place]
        for place, name in enumerate(names)
    ]
    return torch.stack(found)
