"""One step's statistics: summed over micro-batches, combined over ranks, read once at the end.

Invariant: every rank ends with the same numbers, because each combines the same gathered vectors
in the same order. Called by `TrainerRank`; `StepStats` is what leaves the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.trainer.loss.statistics import MAX_NAMES, MIN_NAMES, SUM_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Where one rank's step went, seconds: the whole, and its parts."""

    total_s: float
    prepare_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    critic_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStats:
    """One update over all ranks. loss: token mean. explained_variance: 1 - mean squared error over
    the targets' variance, of the values that the advantages were made with; None: the targets did
    not vary. is_skipped: a loss or gradient that was not finite; never applied.
    """

    loss: float
    grad_norm: float
    value_mean: float
    target_mean: float
    explained_variance: float | None
    clip_fraction: float
    num_tokens: int
    is_skipped: bool


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
class TokenSpread:
    """Of a number that each trained token has."""

    mean: float
    min: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobStats:
    """Log-probabilities of trained tokens under one policy, nats.

    mean, max: of all; positive_*, negative_*: of those with an advantage above or below 0, None
    where there are none.
    """

    mean: float
    max: float
    positive_mean: float | None
    positive_max: float | None
    negative_mean: float | None
    negative_max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats:
    """What the loss did to a step's trained tokens; each token weighs the same.

    policy_logprobs: current, at each update. old_logprobs, reference_logprobs, kl (nats): None
    where the loss does not ask for them. surrogate_mean: of minus the objective's loss, importance
    weight and mask included; unclipped_surrogate_mean: of ratio times advantage.
    clip_fraction_low, clip_fraction_high: see `loss.surrogate`. masked_fraction: out of the loss
    by any rule; masked_*_fraction: by each rule, a token may meet several.
    """

    policy_logprobs: LogprobStats
    old_logprobs: LogprobStats | None
    reference_logprobs: LogprobStats | None
    surrogate_mean: float
    unclipped_surrogate_mean: float
    kl: TokenSpread | None
    clip_fraction_low: float
    clip_fraction_high: float
    masked_fraction: float
    masked_token_fraction: float
    masked_sequence_fraction: float
    masked_outlier_fraction: float
    importance_weight_mean: float
    importance_weight_max: float
    advantage: TokenSpread


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
    mismatch: None when no token came from the trainer's own version. tokens: None when nothing
    was trained. critic: its own update; None: there is no critic.
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
    tokens: LossStats | None = None
    critic: CriticStats | None = None

    @property
    def is_skipped(self) -> bool:
        """Whether any update of the step was refused as not finite."""
        return self.num_skipped_updates > 0

    @property
    def is_all_skipped(self) -> bool:
        """Whether every update of the step was."""
        return self.is_skipped and self.num_skipped_updates == self.num_updates


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSums:
    """One update, over all ranks: its sums and extremes by place, as `loss.statistics` names them.

    Extremes of no token are infinite.
    """

    sums: tuple[float, ...]
    maxima: tuple[float, ...]
    minima: tuple[float, ...]
    grad_norm: float
    learning_rate: float

    def sum_of(self, name: str) -> float:
        return self.sums[SUM_NAMES.index(name)]

    def max_of(self, name: str) -> float:
        return self.maxima[MAX_NAMES.index(name)]

    def min_of(self, name: str) -> float:
        return self.minima[MIN_NAMES.index(name)]

    @property
    def is_empty(self) -> bool:
        return self.sum_of("num_trained") == 0

    @property
    def is_skipped(self) -> bool:
        """Whether a loss or the gradient is not finite."""
        return not math.isfinite(self.grad_norm) or self.sum_of("num_nonfinite") > 0


class _Totals:
    """The finite updates of a step as one: tokens weigh equally, whichever update they were in."""

    def __init__(self, updates: Sequence[UpdateSums]) -> None:
        self._updates = updates
        self.num_trained = self.sum_of("num_trained")

    def sum_of(self, name: str) -> float:
        return sum(update.sum_of(name) for update in self._updates)

    def max_of(self, name: str) -> float:
        """0 when no token has the number."""
        largest = max((update.max_of(name) for update in self._updates), default=-math.inf)
        return 0.0 if largest == -math.inf else largest

    def min_of(self, name: str) -> float:
        """0 when no token has the number."""
        least = min((update.min_of(name) for update in self._updates), default=math.inf)
        return 0.0 if least == math.inf else least

    def mean_of(self, name: str) -> float:
        """Over the trained tokens; 0 when there are none."""
        return self.sum_of(name) / max(self.num_trained, 1.0)


def summarize_step(
    updates: Sequence[UpdateSums],
    *,
    step: int,
    trainer_version: int,
    seconds: PhaseSeconds,
    critic: CriticStats | None = None,
) -> StepStats:
    """Combine a step's updates: tokens weigh equally, whichever update they were in."""
    finite = [update for update in updates if not update.is_skipped]
    applied = [update for update in finite if not update.is_empty]
    totals = _Totals(finite)
    ratio_squared = totals.sum_of("ratio_squared")
    return StepStats(
        step=step,
        trainer_version=trainer_version,
        loss=totals.sum_of("loss") / max(len(finite), 1),
        grad_norm=sum(update.grad_norm for update in applied) / max(len(applied), 1),
        learning_rate=updates[-1].learning_rate if updates else 0.0,
        trained_tokens=int(totals.num_trained),
        packed_tokens=int(totals.sum_of("num_tokens")),
        ratio_mean=totals.mean_of("ratio"),
        ratio_max=totals.max_of("ratio"),
        clip_fraction=totals.mean_of("num_clipped_low") + totals.mean_of("num_clipped_high"),
        effective_sample_fraction=(
            totals.sum_of("ratio") ** 2 / (totals.num_trained * ratio_squared)
            if ratio_squared
            else 0.0
        ),
        entropy_mean=totals.mean_of("entropy"),
        advantage_mean=totals.mean_of("advantage"),
        policy_age_mean=totals.mean_of("policy_age"),
        policy_age_max=int(totals.max_of("policy_age")),
        mismatch=_mismatch(totals),
        num_updates=len(updates),
        num_empty_updates=len(finite) - len(applied),
        num_skipped_updates=len(updates) - len(finite),
        seconds=seconds,
        tokens=_loss_stats(totals) if totals.num_trained else None,
        critic=critic,
    )


def _mismatch(totals: _Totals) -> MismatchStats | None:
    num_tokens = totals.sum_of("num_mismatch")
    if not num_tokens:
        return None
    return MismatchStats(
        k1_mean=totals.sum_of("mismatch_k1") / num_tokens,
        k3_mean=totals.sum_of("mismatch_k3") / num_tokens,
        max_abs_delta=totals.max_of("mismatch_abs"),
        num_tokens=int(num_tokens),
    )


def _loss_stats(totals: _Totals) -> LossStats:
    policy_logprobs = _logprob_stats(totals, "policy")
    assert policy_logprobs is not None
    return LossStats(
        policy_logprobs=policy_logprobs,
        old_logprobs=_logprob_stats(totals, "old"),
        reference_logprobs=_logprob_stats(totals, "reference"),
        surrogate_mean=totals.mean_of("surrogate"),
        unclipped_surrogate_mean=totals.mean_of("unclipped_surrogate"),
        kl=_spread(totals, "kl") if totals.sum_of("num_kl") else None,
        clip_fraction_low=totals.mean_of("num_clipped_low"),
        clip_fraction_high=totals.mean_of("num_clipped_high"),
        masked_fraction=totals.mean_of("num_masked"),
        masked_token_fraction=totals.mean_of("num_masked_token"),
        masked_sequence_fraction=totals.mean_of("num_masked_sequence"),
        masked_outlier_fraction=totals.mean_of("num_masked_outlier"),
        importance_weight_mean=totals.mean_of("importance_weight"),
        importance_weight_max=totals.max_of("importance_weight"),
        advantage=_spread(totals, "advantage"),
    )


def _spread(totals: _Totals, name: str) -> TokenSpread:
    return TokenSpread(mean=totals.mean_of(name), min=totals.min_of(name), max=totals.max_of(name))


def _logprob_stats(totals: _Totals, policy: str) -> LogprobStats | None:
    def mean_of(part: str) -> float | None:
        num_tokens = totals.sum_of(f"num_{policy}_{part}")
        return totals.sum_of(f"logprob_{policy}_{part}") / num_tokens if num_tokens else None

    def max_of(part: str) -> float | None:
        has_tokens = totals.sum_of(f"num_{policy}_{part}") > 0
        return totals.max_of(f"logprob_{policy}_{part}") if has_tokens else None

    mean, largest = mean_of("all"), max_of("all")
    if mean is None or largest is None:
        return None
    return LogprobStats(
        mean=mean,
        max=largest,
        positive_mean=mean_of("positive"),
        positive_max=max_of("positive"),
        negative_mean=mean_of("negative"),
        negative_max=max_of("negative"),
    )
