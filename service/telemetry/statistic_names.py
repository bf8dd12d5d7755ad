"""The names of a step's statistics: a closed set, in groups.

The stored record, `rayloom_step_statistic`, the report's tables and docs/metrics.md all have these
names, and tests hold them to it. What a `StepRecord` has a field for (loss, gradient norm, entropy,
mean reward, k3) is not repeated here, but for the largest ratio and the effective sample size.
"""

from __future__ import annotations

from collections.abc import Mapping

# Of one policy; positive, negative: the tokens with an advantage of that sign.
_LOGPROBS = (
    "logprob_mean",
    "logprob_max",
    "logprob_positive_mean",
    "logprob_positive_max",
    "logprob_negative_mean",
    "logprob_negative_max",
)

# Every name that there is, in the groups and the order in which people read them.
STATISTICS: Mapping[str, tuple[str, ...]] = {
    "Log-probabilities, policy": tuple(f"policy_{name}" for name in _LOGPROBS),
    "Log-probabilities, old policy": tuple(f"old_{name}" for name in _LOGPROBS),
    "Log-probabilities, reference": tuple(f"reference_{name}" for name in _LOGPROBS),
    "Objective and KL": (
        "surrogate_mean",
        "unclipped_surrogate_mean",
        "kl_mean",
        "kl_min",
        "kl_max",
    ),
    "Ratios, clips, masks": (
        "ratio_mean",
        "ratio_max",
        "effective_sample_fraction",
        "clip_fraction_low",
        "clip_fraction_high",
        "masked_fraction",
        "masked_token_fraction",
        "masked_sequence_fraction",
        "masked_outlier_fraction",
        "importance_weight_mean",
        "importance_weight_max",
        "mismatch_k1_mean",
    ),
    "Critic": (
        "critic_loss",
        "critic_grad_norm",
        "critic_explained_variance",
        "critic_value_mean",
        "critic_target_mean",
        "critic_clip_fraction",
    ),
    "Rewards and advantages": (
        "reward_std",
        "reward_min",
        "reward_max",
        "advantage_mean",
        "advantage_min",
        "advantage_max",
        "trajectory_advantage_mean",
        "trajectory_advantage_std",
        "trajectory_advantage_min",
        "trajectory_advantage_max",
    ),
}

STATISTIC_NAMES: tuple[str, ...] = tuple(name for group in STATISTICS.values() for name in group)
