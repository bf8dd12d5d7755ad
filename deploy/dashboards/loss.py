"""The dashboard's section on the statistics of the loss: what a collapse shows in first."""

from __future__ import annotations

from deploy.dashboards.model import Panel, Query, Section
from deploy.dashboards.promql import of_run


def statistic(name: str, legend: str) -> Query:
    """name: one of `service.telemetry.statistic_names`."""
    return Query(expr=of_run("rayloom_step_statistic", f'name="{name}"'), legend=legend)


LOSS_SECTION = Section(
    title="Statistics of the loss",
    panels=(
        Panel(
            title="Log-probability, by sign of the advantage",
            description=(
                "Mean over the trained tokens. When the positive ones fall too, the policy "
                "unlearns what it is rewarded for."
            ),
            unit="suffix: nats",
            queries=(
                statistic("policy_logprob_positive_mean", "positive"),
                statistic("policy_logprob_negative_mean", "negative"),
            ),
        ),
        Panel(
            title="KL to the reference",
            description="Mean over the trained tokens. Empty where the loss has no KL term.",
            unit="suffix: nats",
            queries=(statistic("kl_mean", "KL"),),
        ),
        Panel(
            title="Ratio",
            description="Of the current policy to the sampling or the old one, of trained tokens.",
            unit="none",
            queries=(statistic("ratio_max", "largest"), statistic("ratio_mean", "mean")),
        ),
        Panel(
            title="Effective share of the tokens",
            description=(
                "1 when all ratios are equal. Near 0 a few tokens make the whole gradient."
            ),
            unit="percentunit",
            queries=(statistic("effective_sample_fraction", "share"),),
        ),
        Panel(
            title="Clipped and masked tokens",
            description="Shares of the trained tokens: clipped below, clipped above, masked.",
            unit="percentunit",
            queries=(
                statistic("clip_fraction_low", "clipped low"),
                statistic("clip_fraction_high", "clipped high"),
                statistic("masked_fraction", "masked"),
            ),
        ),
        Panel(
            title="Spread of the returns",
            description="Over the newest step's trajectories; without any there is no signal.",
            unit="none",
            queries=(
                statistic("reward_max", "largest"),
                statistic("reward_min", "smallest"),
                statistic("reward_std", "deviation"),
            ),
        ),
    ),
)
