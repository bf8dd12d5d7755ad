"""The statistics of a step under flat names, from what trainer and merge actor report; pure.

Invariant: each name is one of `statistic_names`, and each value is finite; what is not known is
absent, never 0. Called by `step_record`.
"""

from __future__ import annotations

import math
from dataclasses import asdict

from actors.merge.report import Spread, StepReport
from actors.trainer.statistics import CriticStats, LogprobStats, LossStats, StepStats, TokenSpread


def step_statistics(stats: StepStats, report: StepReport) -> dict[str, float]:
    """Name what is known of a step; what its `StepRecord` has a field for is mostly not repeated.

    Returns: by name, in the units of `StepStats` and `StepReport`; a step that trained nothing has
        the spread of its rewards alone.
    """
    found = {
        **_of_ratios(stats),
        **_of_loss(stats.tokens),
        **_of_critic(stats.critic),
        **_named("trajectory_advantage", report.advantages),
        **_of_rewards(report.returns),
    }
    return {
        name: value for name, value in found.items() if value is not None and math.isfinite(value)
    }


def _of_ratios(stats: StepStats) -> dict[str, float | None]:
    # The trainer writes 0 where nothing was trained.
    if not stats.trained_tokens:
        return {}
    return {
        "ratio_mean": stats.ratio_mean,
        "ratio_max": stats.ratio_max,
        "effective_sample_fraction": stats.effective_sample_fraction,
        "mismatch_k1_mean": stats.mismatch.k1_mean if stats.mismatch else None,
    }


def _of_loss(tokens: LossStats | None) -> dict[str, float | None]:
    if tokens is None:
        return {}
    return {
        **_named("policy_logprob", tokens.policy_logprobs),
        **_named("old_logprob", tokens.old_logprobs),
        **_named("reference_logprob", tokens.reference_logprobs),
        "surrogate_mean": tokens.surrogate_mean,
        "unclipped_surrogate_mean": tokens.unclipped_surrogate_mean,
        **_named("kl", tokens.kl),
        "clip_fraction_low": tokens.clip_fraction_low,
        "clip_fraction_high": tokens.clip_fraction_high,
        "masked_fraction": tokens.masked_fraction,
        "masked_token_fraction": tokens.masked_token_fraction,
        "masked_sequence_fraction": tokens.masked_sequence_fraction,
        "masked_outlier_fraction": tokens.masked_outlier_fraction,
        "importance_weight_mean": tokens.importance_weight_mean,
        "importance_weight_max": tokens.importance_weight_max,
        **_named("advantage", tokens.advantage),
    }


def _of_critic(critic: CriticStats | None) -> dict[str, float | None]:
    # As the ratios: 0 is written where nothing was trained.
    if critic is None or not critic.num_tokens:
        return {}
    return {
        "critic_loss": critic.loss,
        "critic_grad_norm": critic.grad_norm,
        "critic_explained_variance": critic.explained_variance,
        "critic_value_mean": critic.value_mean,
        "critic_target_mean": critic.target_mean,
        "critic_clip_fraction": critic.clip_fraction,
    }


def _of_rewards(returns: Spread | None) -> dict[str, float | None]:
    """Without the mean, which is the record's own `reward_mean`."""
    if returns is None:
        return {}
    return {"reward_std": returns.std, "reward_min": returns.min, "reward_max": returns.max}


def _named(
    prefix: str, numbers: LogprobStats | TokenSpread | Spread | None
) -> dict[str, float | None]:
    """Example: ("kl", TokenSpread(mean=1, min=0, max=2)) -> kl_mean 1, kl_min 0, kl_max 2."""
    if numbers is None:
        return {}
    return {f"{prefix}_{name}": value for name, value in asdict(numbers).items()}
