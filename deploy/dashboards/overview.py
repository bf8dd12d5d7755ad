"""Rayloom's dashboard: is it learning, where does the time go, what becomes of the rollouts.

Each query names the run by its instance and nothing else, so that a scrape job may have any name.
`tests/deploy/test_dashboard.py` holds the rules;
`tests/scenarios/test_metrics_scenarios.py` runs every query.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.statistics import BY_NAME, Unit
from deploy.dashboards.grafana import Dashboard, Look, Panel, Section, mean, of_run, quantile, rate

# As Grafana calls them.
UNITS = {
    Unit.NUMBER: "none",
    Unit.NATS: "suffix: nats",
    Unit.SHARE: "percentunit",
    Unit.VERSIONS: "suffix: versions",
}

LEFT = 'kind!="admitted"'
BEFORE, AFTER = 'side="before"', 'side="after"'


def statistic_panel(
    *,
    title: str,
    description: str,
    statistics: Mapping[str, str],
    queries: Mapping[str, str] | None = None,
    is_logarithmic: bool = False,
) -> Panel:
    """Show statistics of one unit, by legend the name. queries: what else the panel shows."""
    shown = {legend: BY_NAME[name] for legend, name in statistics.items()}
    (unit,) = {each.unit for each in shown.values()}
    series = {
        legend: of_run(each.metric)
        if each.metric
        else of_run("rayloom_step_statistic", f'name="{each.name}"')
        for legend, each in shown.items()
    }
    return Panel(
        title=title,
        description=description,
        unit=UNITS[unit],
        queries={**series, **(queries or {})},
        is_logarithmic=is_logarithmic,
    )


def _number(
    title: str, description: str, queries: Mapping[str, str], *, unit: str = "none"
) -> Panel:
    """One large number."""
    return Panel(
        title=title,
        description=description,
        unit=unit,
        queries=queries,
        look=Look.NUMBER,
        width=6,
    )


OVERVIEW_SECTION = Section(
    title="Overview",
    panels=(
        _number(
            "Step",
            "The newest training step; it goes back when the run does.",
            {"step": of_run("rayloom_train_newest_step")},
        ),
        _number(
            "Policy version",
            "The version that the newest step made, and that every engine took.",
            {"version": of_run("rayloom_policy_version")},
        ),
        _number(
            "Steps per hour",
            "Training steps stored, at the pace of the last minutes.",
            {"steps": f"{rate('rayloom_train_steps_total')} * 3600"},
            unit="suffix: /h",
        ),
        _number(
            "Engines ready",
            "Engines that hold the current version; briefly 0 while they load one.",
            {"engines": of_run("rayloom_engines_ready")},
        ),
        statistic_panel(
            title="Reward, of the best possible",
            description=(
                "Mean return over the best possible one: of the newest step's trajectories, and "
                "of the held-out tasks at temperature 0. Empty where an environment does not "
                "know the best return."
            ),
            statistics={"training": "scaled_reward_mean"},
            queries={"held out": of_run("rayloom_evaluation_scaled_reward_mean_ratio")},
        ),
        statistic_panel(
            title="Return",
            description=(
                "Mean return of the newest step's trajectories: shaped, before the rule of an "
                "outcome caps or lowers it."
            ),
            statistics={"return": "reward_mean"},
        ),
        Panel(
            title="Tokens per second",
            description="Tokens of the trained steps: sampled by the engines, and in the loss.",
            unit="suffix: tokens/s",
            queries={
                "sampled": rate("rayloom_sampled_tokens_total"),
                "trained": rate("rayloom_trained_tokens_total"),
            },
        ),
    ),
)

PIPELINE_SECTION = Section(
    title="Pipeline",
    panels=(
        Panel(
            title="Time of a step, by stage",
            description=(
                "Mean seconds that the loop stood at each stage. Much collecting means that the "
                "engines or the environments are what it waits for."
            ),
            unit="s",
            width=12,
            is_stacked=True,
            queries={"{{stage}}": mean("rayloom_stage_seconds")},
        ),
        Panel(
            title="Rollouts in the ledger",
            description="Every admitted rollout is trained, evicted or in flight.",
            unit="short",
            width=12,
            queries={
                "trained": of_run("rayloom_ledger_trained_rollouts"),
                "evicted": f"sum({of_run('rayloom_ledger_evicted_rollouts')})",
                "in flight": of_run("rayloom_ledger_in_flight_rollouts"),
            },
        ),
        Panel(
            title="Rollouts that leave, per second",
            description="Ledger rows stored: rollouts trained, and rollouts evicted untrained.",
            unit="suffix: /s",
            queries={"{{kind}}": f"sum by (kind) ({rate('rayloom_ledger_events_total', LEFT)})"},
        ),
        Panel(
            title="Evictions, by reason",
            description="Rollouts that left untrained. masked and zero_variance are no faults.",
            unit="short",
            queries={"{{reason}}": of_run("rayloom_ledger_evicted_rollouts")},
        ),
        Panel(
            title="Policy age",
            description="Versions between the sampling of a step's oldest token and its training.",
            unit="suffix: versions",
            queries={
                "p95": quantile(0.95, "rayloom_policy_age_versions"),
                "mean": mean("rayloom_policy_age_versions"),
            },
        ),
        Panel(
            title="Trajectories waiting",
            description="Finished trajectories in the queue that no step has taken.",
            unit="short",
            width=12,
            queries={"waiting": of_run("rayloom_queue_items")},
        ),
        Panel(
            title="Bytes waiting",
            description="Payloads that the queue refers to; queue.max_mib bounds them.",
            unit="bytes",
            width=12,
            queries={"waiting": of_run("rayloom_queue_bytes")},
        ),
    ),
)

ROLLOUT_SECTION = Section(
    title="Rollouts",
    panels=(
        Panel(
            title="Trajectories that end, by outcome",
            description="Per second, retried attempts included.",
            unit="suffix: /s",
            is_stacked=True,
            queries={"{{outcome}}": f"sum by (outcome) ({rate('rayloom_rollouts_total')})"},
        ),
        Panel(
            title="Returns",
            description="How the returns of graded trajectories are spread, and how that moves.",
            unit="none",
            look=Look.HEATMAP,
            queries={"{{le}}": f"sum by (le) ({rate('rayloom_trajectory_return_bucket')})"},
        ),
        Panel(
            title="Time of a trajectory",
            description="Wall time from reset to the outcome.",
            unit="s",
            queries={
                "p50": quantile(0.5, "rayloom_trajectory_seconds"),
                "p95": quantile(0.95, "rayloom_trajectory_seconds"),
            },
        ),
        Panel(
            title="Turns per sample",
            description="How well turns merge: 1 where none does, the turns of a game at best.",
            unit="none",
            queries={
                "turns": f"{rate('rayloom_merge_samples_total', BEFORE)} / ignoring (side) "
                f"{rate('rayloom_merge_samples_total', AFTER)}"
            },
        ),
        Panel(
            title="Turns that did not merge, by kind",
            description="Per second: what changed in the history that a turn should have extended.",
            unit="suffix: /s",
            queries={"{{kind}}": rate("rayloom_merge_mismatches_total")},
        ),
        Panel(
            title="What looks odd",
            description=(
                "Per second: malformed turns, malformed trajectories that were rewarded all the "
                "same, tokens that we inserted, groups without any variance."
            ),
            unit="suffix: /s",
            queries={
                "malformed turns": rate("rayloom_malformed_turns_total"),
                "malformed, yet rewarded": rate("rayloom_malformed_rewarded_total"),
                "inserted tokens": rate("rayloom_inserted_tokens_total"),
                "zero-variance groups": rate("rayloom_zero_variance_groups_total"),
            },
        ),
    ),
)

LEARNING_SECTION = Section(
    title="Learning health",
    panels=(
        statistic_panel(
            title="Loss",
            description="Policy loss of the newest step; absent when its updates were skipped.",
            statistics={"loss": "loss"},
        ),
        statistic_panel(
            title="Entropy",
            description="Mean entropy of the policy per token. Near 0 it explores nothing.",
            statistics={"entropy": "entropy_mean"},
        ),
        statistic_panel(
            title="Gradient norm",
            description="Before clipping.",
            statistics={"norm": "grad_norm"},
        ),
        statistic_panel(
            title="Mismatch of trainer and engine",
            description="Mean k3 on tokens of the trainer's own version: how far the two differ.",
            is_logarithmic=True,
            statistics={"k3": "mismatch_k3_mean"},
        ),
        statistic_panel(
            title="Largest difference of a log-probability",
            description=(
                "Between trainer and engine: on those tokens, and on the fixed prompt after the "
                "last publish, where a jump means that an engine holds other weights."
            ),
            is_logarithmic=True,
            statistics={"sampled tokens": "mismatch_max", "fixed prompt": "parity_max"},
        ),
        Panel(
            title="Skipped steps",
            description="Steps of which an update was skipped, its loss or gradient not finite.",
            unit="none",
            queries={"skipped": of_run("rayloom_train_skipped_steps_total")},
        ),
    ),
)

LOSS_SECTION = Section(
    title="Statistics of the loss",
    panels=(
        statistic_panel(
            title="Log-probability, by sign of the advantage",
            description=(
                "Mean over the trained tokens. When the positive ones fall too, the policy "
                "unlearns what it is rewarded for."
            ),
            statistics={
                "positive": "policy_logprob_positive_mean",
                "negative": "policy_logprob_negative_mean",
            },
        ),
        statistic_panel(
            title="KL to the reference",
            description="Mean over the trained tokens. Empty where the loss has no KL term.",
            statistics={"KL": "kl_mean"},
        ),
        statistic_panel(
            title="Ratio",
            description="Of the current policy to the sampling or the old one, of trained tokens.",
            statistics={"largest": "ratio_max", "mean": "ratio_mean"},
        ),
        statistic_panel(
            title="Effective share of the tokens",
            description=(
                "1 when all ratios are equal. Near 0 a few tokens make the whole gradient."
            ),
            statistics={"share": "effective_sample_size"},
        ),
        statistic_panel(
            title="Clipped and masked tokens",
            description="Shares of the trained tokens: clipped below, clipped above, masked.",
            statistics={
                "clipped low": "clip_fraction_low",
                "clipped high": "clip_fraction_high",
                "masked": "masked_fraction",
            },
        ),
        statistic_panel(
            title="Spread of the returns",
            description="Over the newest step's trajectories; without any there is no signal.",
            statistics={
                "largest": "reward_max",
                "smallest": "reward_min",
                "deviation": "reward_std",
            },
        ),
    ),
)

PART_SECTION = Section(
    title="Parts",
    panels=(
        Panel(
            title="Engines",
            description="Engines that hold the current version.",
            unit="none",
            width=12,
            queries={"ready": of_run("rayloom_engines_ready")},
        ),
        Panel(
            title="Replacements",
            description=(
                "Parts that died and were replaced since the process started; epoch: all of them, "
                "from the newest checkpoint."
            ),
            unit="none",
            width=12,
            queries={"{{part}}": of_run("rayloom_replacements_total")},
        ),
    ),
)

SERVICE_SECTION = Section(
    title="Service",
    panels=(
        Panel(
            title="Tasks that wait",
            description=(
                "Tasks that were accepted over HTTP and wait for admission; at the limit further "
                "ones are refused with 429. Empty for a run with tasks of its own."
            ),
            unit="none",
            width=12,
            queries={
                "waiting": of_run("rayloom_service_waiting_tasks"),
                "limit": of_run("rayloom_service_waiting_tasks_limit"),
            },
        ),
    ),
)

OVERVIEW = Dashboard(
    uid="rayloom-overview",
    title="Rayloom",
    description="One run: progress, pipeline, rollouts, health of learning, loss, parts, service.",
    sections=(
        OVERVIEW_SECTION,
        PIPELINE_SECTION,
        ROLLOUT_SECTION,
        LEARNING_SECTION,
        LOSS_SECTION,
        PART_SECTION,
        SERVICE_SECTION,
    ),
)
