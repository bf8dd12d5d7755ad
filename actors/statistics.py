"""The table of statistics: each number that describes a training step has one entry in it.

An entry names the values, such as `kl`, and the way in which they are reduced to one number, such
as the mean. The step's record, the metrics, the report, the dashboard and docs/metrics.md are made
from the table. A statistic that is not known at a step is absent from the step's record, never 0.
To add a statistic, add an entry here, and compute its values: for the loss, in one line of
`actors/trainer/loss/micro_batch.py`. The module imports only the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

Reduction = Literal[
    "mean", "std", "min", "max", "share", "effective_size", "update_sum", "update", "step"
]
"""The way in which the values of a step become one number.

share: the mean of true and false. effective_size: (sum r)^2 / (M sum r^2) of M values r, which is 1
when all are equal. update_sum: summed over an update, then the mean over the step's updates.
update: one value an update, then the mean over the updates that moved the weights. step: one value
a step.
"""
# These reductions are the last word of a statistic's name; the others are not in the name.
_SUFFIXES = ("mean", "std", "min", "max")
Source = Literal["policy_loss", "critic", "merge", "publish", "trainer"]
"""The part that produces the values, and the set over which they are reduced.

policy_loss: the loss, over the trained tokens of a step's finite updates. critic: the critic's
update. merge: the merge actor, over the step's trajectories or its batch. publish: the check after
a publish. trainer: the ranks, over the time of a step's updates.
"""
Unit = Literal["number", "nats", "share", "versions", "seconds"]
"""The unit of a value. A number has no unit: it is a ratio, a loss or a return in the environment's
scale.
"""


_METRIC_ENDS = {
    "number": "",
    "nats": "_nats",
    "share": "_ratio",
    "versions": "_versions",
    "seconds": "_seconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    name: str
    """The statistic's name, in records, reports and dashboards."""
    values: str
    """The name of the statistic's values in the part that produces them."""
    source: Source
    reduction: Reduction
    unit: Unit
    group: str
    """The caption under which the report and the documents list the statistic."""
    help: str
    """A sentence that describes the values; the same for all reductions of the values."""
    given_metric: str = ""
    """The name of the statistic's Prometheus gauge; empty if it is made from `name`."""

    @property
    def metric(self) -> str:
        """The name of the statistic's Prometheus gauge."""
        return self.given_metric or f"rayloom_step_{self.name}{_METRIC_ENDS[self.unit]}"


def _of(
    values: str,
    *reductions: Reduction,
    source: Source,
    group: str,
    help: str,
    unit: Unit = "number",
    metric: str = "",
    name: str = "",
) -> tuple[Statistic, ...]:
    """Return a statistic for each reduction: `_of("kl", "mean", "max", ...)` -> kl_mean, kl_max"""
    return tuple(
        Statistic(
            name=name or (f"{values}_{reduction}" if reduction in _SUFFIXES else values),
            values=values,
            source=source,
            reduction=reduction,
            unit=unit,
            group=group,
            help=help,
            given_metric=metric,
        )
        for reduction in reductions
    )


_loss = partial(_of, source="policy_loss")
_merge = partial(_of, source="merge")
_objective = partial(_loss, group="Objective and KL")
_ratios = partial(_loss, group="Ratios, clips, masks")
_shares = partial(_ratios, unit="share")
_mismatch = partial(_loss, group="Trainer and engine", unit="nats")
_critic = partial(_of, source="critic", group="Critic")
_rewards = partial(_merge, group="Rewards and advantages")


def _check(values: str, *, unit: Unit, help: str) -> tuple[Statistic, ...]:
    return _of(
        values,
        "step",
        source="publish",
        group="Trainer and engine",
        unit=unit,
        metric=f"rayloom_{values}{_METRIC_ENDS[unit]}",
        help=help,
    )


_POLICIES = (
    (
        "policy",
        "Log-probabilities, policy",
        "Log-probability of trained tokens under the policy at each update",
    ),
    (
        "old",
        "Log-probabilities, old policy",
        "Log-probability of trained tokens under the trainer at the step's start; only with "
        "`algorithm.loss.denominator: old`",
    ),
    (
        "reference",
        "Log-probabilities, reference",
        "Log-probability of trained tokens under the reference model; only with a KL term",
    ),
)
_SIGNS = (
    ("", "."),
    ("_positive", "; only tokens with an advantage above 0."),
    ("_negative", "; only tokens with an advantage below 0."),
)

STATISTICS: tuple[Statistic, ...] = (
    *(
        statistic
        for policy, group, help in _POLICIES
        for part, of in _SIGNS
        for statistic in _loss(
            f"{policy}_logprob{part}", "mean", "max", group=group, unit="nats", help=help + of
        )
    ),
    *_objective(
        "loss",
        "update_sum",
        metric="rayloom_loss",
        help="Policy loss: the weighted sum over an update's tokens, averaged over the updates.",
    ),
    *_objective(
        "surrogate",
        "mean",
        help="The term of a token that the objective increases, with importance weight and mask.",
    ),
    *_objective("unclipped_surrogate", "mean", help="Ratio times advantage of a token."),
    *_objective(
        "kl",
        "mean",
        "min",
        "max",
        unit="nats",
        help="Estimate of a token's KL divergence from the reference, as it is in the loss; only "
        "with a KL term.",
    ),
    *_objective(
        "entropy",
        "mean",
        unit="nats",
        metric="rayloom_entropy_nats",
        help="Mean entropy of the policy's next-token distribution, over trained tokens.",
    ),
    *_objective(
        "grad_norm",
        "update",
        metric="rayloom_gradient_norm",
        help="Gradient norm over all parameters before clipping, averaged over the updates.",
    ),
    *_ratios(
        "ratio",
        "mean",
        "max",
        help="Probability of a token under the policy, divided by that at its sampling (or at "
        "the step's start); before clip and mask.",
    ),
    *_shares(
        "ratio",
        "effective_size",
        name="effective_sample_size",
        help="(Σ r)² / (M Σ r²) of the ratios r of M trained tokens; 1 when all are equal.",
    ),
    *_shares(
        "clip_fraction_low",
        "share",
        help="Trained tokens whose gradient was removed, or whose weight was bounded, because of "
        "a low ratio.",
    ),
    *_shares(
        "clip_fraction_high",
        "share",
        help="Trained tokens whose gradient was removed, or whose weight was bounded, because of a "
        "high ratio.",
    ),
    *_shares(
        "masked_fraction",
        "share",
        help="Trained tokens that any rule removed from the loss because trainer and engine "
        "differ too much.",
    ),
    *_shares(
        "masked_token_fraction",
        "share",
        help="Trained tokens that the token band removed from the loss.",
    ),
    *_shares(
        "masked_sequence_fraction",
        "share",
        help="Trained tokens that the sequence band removed from the loss.",
    ),
    *_shares(
        "masked_outlier_fraction",
        "share",
        help="Trained tokens that were removed from the loss because of an outlier in their "
        "trajectory.",
    ),
    *_ratios(
        "importance_weight",
        "mean",
        "max",
        help="Factor of a token's loss that corrects the difference between trainer and engine; "
        "1 without a correction.",
    ),
    *_mismatch(
        "mismatch_k1",
        "mean",
        help="Log-probability of the engine minus that of the trainer, for tokens that the "
        "trainer's version sampled.",
    ),
    *_mismatch(
        "mismatch_k3",
        "mean",
        metric="rayloom_mismatch_k3_nats",
        help="Mean k3 between trainer and engine, for tokens that the trainer's version sampled.",
    ),
    *_mismatch(
        "mismatch",
        "max",
        metric="rayloom_mismatch_max_nats",
        help="Largest difference between the log-probabilities of trainer and engine, for tokens "
        "that the trainer's version sampled.",
    ),
    *_check(
        "logprob_check_max",
        unit="nats",
        help="Largest difference between the log-probabilities of trainer and engines on the "
        "text of the check after a publish.",
    ),
    *_check(
        "logprob_check_mean",
        unit="nats",
        help="Mean difference between the log-probabilities of trainer and engines on the text of "
        "the check after a publish; if there are several series, the largest mean.",
    ),
    *_check(
        "logprob_check_ratio",
        unit="number",
        help="Difference between the log-probabilities of trainer and engines on the text of the "
        "check after a publish, divided by the largest difference that rounding can cause; above "
        "1, trainer and engines compute different functions.",
    ),
    *_check(
        "logprob_check_tokens",
        unit="number",
        help="Tokens of the text of the check after a publish; in the first step of a term also "
        "the continuations of the check at the start.",
    ),
    *_check(
        "logprob_check_seconds",
        unit="seconds",
        help="Time in which trainer and engines scored the text of the check after a publish; "
        "absent in a step without a check.",
    ),
    *_of(
        "mfu",
        "step",
        source="trainer",
        group="Speed",
        unit="share",
        metric="rayloom_train_mfu_ratio",
        help="Model FLOPs utilisation of the updates: 6 FLOPs for each parameter and token, "
        "divided by the GPUs' bfloat16 peak; absent if the peak is not known.",
    ),
    *_merge(
        "policy_age",
        "mean",
        "max",
        group="Policy age",
        unit="versions",
        help="Number of versions between the sampling of a token and its training.",
    ),
    *_critic(
        "critic_loss",
        "step",
        help="Loss of the critic's values; only with `algorithm.baseline: critic`.",
    ),
    *_critic("critic_grad_norm", "step", help="Gradient norm of the critic, before clipping."),
    *_critic("critic_learning_rate", "step", help="Learning rate of the critic's update."),
    *_critic(
        "critic_explained_variance",
        "step",
        help="Share of the targets' variance that the values explain, before the update: 1 if "
        "they predict every return, 0 if they are as good as the mean, negative if they are "
        "worse; absent if the targets did not vary.",
    ),
    *_critic(
        "critic_value_mean",
        "step",
        help="Mean of the critic's values of the trained tokens' states.",
    ),
    *_critic("critic_target_mean", "step", help="Mean target of the critic's values."),
    *_critic(
        "critic_clip_fraction",
        "step",
        unit="share",
        help="Trained tokens whose value the value clip bounded.",
    ),
    *_rewards(
        "reward",
        "mean",
        metric="rayloom_reward_mean",
        help="Mean return of the graded trajectories, after shaping and before an outcome's rule "
        "bounds it.",
    ),
    *_rewards(
        "reward",
        "std",
        "min",
        "max",
        help="Standard deviation, minimum and maximum of the returns of `reward_mean`.",
    ),
    *_rewards(
        "scaled_reward",
        "mean",
        unit="share",
        metric="rayloom_scaled_reward_mean_ratio",
        help="Mean return from the environment, divided by the best possible return, if the "
        "environment declares one.",
    ),
    *_loss(
        "advantage",
        "mean",
        "min",
        "max",
        group="Rewards and advantages",
        help="Advantage of a trained token.",
    ),
    *_rewards(
        "trajectory_advantage",
        "mean",
        "std",
        "min",
        "max",
        help="Advantage of a trajectory in the loss, averaged over its tokens.",
    ),
)

BY_NAME: Mapping[str, Statistic] = {statistic.name: statistic for statistic in STATISTICS}
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(statistic.group for statistic in STATISTICS))


def only_known(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """Return the finite values of a step in the order of the table, without None.

    Raises: KeyError for a name that is not in the table.
    """
    strange = numbers.keys() - BY_NAME.keys()
    if strange:
        raise KeyError(f"statistics: {sorted(strange)} are not in the table; add an entry for each")
    return {
        name: value
        for name in BY_NAME
        if (value := numbers.get(name)) is not None and math.isfinite(value)
    }
