"""One step's statistics: summed over micro-batches, combined over ranks, read once at the end.

Invariant: every rank ends with the same numbers, because each combines the same gathered vectors
in the same order. Called by `TrainerRank`; `StepStats` is what leaves the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.trainer.loss import MAX_NAMES, SUM_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Where one rank's step went, seconds: the whole, and its parts."""

    total_s: float
    prepare_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchStats:
    """Trainer against engine, on tokens of the version that the trainer held; nats.

    Invariant: num_tokens >= 1; where nothing was comparable there is no MismatchStats.
    """

    k1_mean: float
    k3_mean: float
    max_abs_delta: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What a training step did, over all ranks.

    Skipped updates count in num_skipped_updates and nowhere else.
    loss: mean over the updates. grad_norm: before clipping, mean over the updates that moved the
    weights. Both 0 when there were none. learning_rate: of the last update.
    trained_tokens: targets seen, each epoch counted; packed_tokens: likewise, of whole rows.
    ratio_*, clip_fraction, entropy_mean (nats), advantage_mean, policy_age_* (versions): over the
    trained tokens; 0 when there were none.
    effective_sample_fraction: (sum r)^2 / (M sum r^2), 1 when all ratios are equal.
    mismatch: None when no token came from the trainer's own version.
    num_empty_updates: nothing to train in them, so the weights were left alone.
    num_skipped_updates: a loss or gradient that was not finite; never applied.
    """

    step: int
    trainer_version: int
    loss: float
    grad_norm: float
    learning_rate: float
    trained_tokens: int
    packed_tokens: int
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    effective_sample_fraction: float
    entropy_mean: float
    advantage_mean: float
    policy_age_mean: float
    policy_age_max: int
    mismatch: MismatchStats | None
    num_updates: int
    num_empty_updates: int
    num_skipped_updates: int
    seconds: PhaseSeconds

    @property
    def is_skipped(self) -> bool:
        """Whether any update of the step was refused as not finite."""
        return self.num_skipped_updates > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSums:
    """One update, over all ranks: its sums and maxima by place, as `loss.py` names them."""

    sums: tuple[float, ...]
    maxima: tuple[float, ...]
    grad_norm: float
    learning_rate: float
    is_skipped: bool

    def sum_of(self, name: str) -> float:
        return self.sums[SUM_NAMES.index(name)]

    def max_of(self, name: str) -> float:
        return self.maxima[MAX_NAMES.index(name)]

    @property
    def is_empty(self) -> bool:
        return self.sum_of("num_trained") == 0


def summarize_step(
    updates: Sequence[UpdateSums], *, step: int, trainer_version: int, seconds: PhaseSeconds
) -> StepStats:
    """Combine a step's updates: tokens weigh equally, whichever update they were in."""
    finite = [update for update in updates if not update.is_skipped]

    def total(name: str) -> float:
        return sum(update.sum_of(name) for update in finite)

    def largest(name: str) -> float:
        return max((update.max_of(name) for update in finite), default=0.0)

    num_trained = total("num_trained")
    per_token = max(num_trained, 1.0)
    applied = [update for update in finite if not update.is_empty]
    num_mismatch = total("num_mismatch")
    ratio_squared = total("ratio_squared")
    return StepStats(
        step=step,
        trainer_version=trainer_version,
        loss=total("loss") / max(len(finite), 1),
        grad_norm=sum(update.grad_norm for update in applied) / max(len(applied), 1),
        learning_rate=updates[-1].learning_rate if updates else 0.0,
        trained_tokens=int(num_trained),
        packed_tokens=int(total("num_tokens")),
        ratio_mean=total("ratio") / per_token,
        ratio_max=largest("ratio"),
        clip_fraction=total("num_clipped") / per_token,
        effective_sample_fraction=(
            total("ratio") ** 2 / (num_trained * ratio_squared) if ratio_squared else 0.0
        ),
        entropy_mean=total("entropy") / per_token,
        advantage_mean=total("advantage") / per_token,
        policy_age_mean=total("policy_age") / per_token,
        policy_age_max=int(largest("policy_age")),
        mismatch=(
            MismatchStats(
                k1_mean=total("mismatch_k1") / num_mismatch,
                k3_mean=total("mismatch_k3") / num_mismatch,
                max_abs_delta=largest("mismatch_abs"),
                num_tokens=int(num_mismatch),
            )
            if num_mismatch
            else None
        ),
        num_updates=len(updates),
        num_empty_updates=len(finite) - len(applied),
        num_skipped_updates=len(updates) - len(finite),
        seconds=seconds,
    )
