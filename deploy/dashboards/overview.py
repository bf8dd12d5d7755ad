"""Rayloom's dashboard: is it learning, where does the time go, what becomes of the rollouts.

Each query names the run by its instance and nothing else, so that a scrape job may have any name.
`tests/deploy/test_dashboard.py` holds the rules;
`tests/scenarios/test_metrics_scenarios.py` runs every query.
"""

from __future__ import annotations

from deploy.dashboards.loss import LOSS_SECTION
from deploy.dashboards.model import Dashboard, Look, Panel, Query, Section
from deploy.dashboards.promql import mean, of_run, one, quantile, rate

LEFT = 'kind!="admitted"'
BEFORE, AFTER = 'side="before"', 'side="after"'

OVERVIEW_SECTION = Section(
    title="Overview",
    panels=(
        Panel(
            title="Step",
            description="The newest training step; it goes back when the run does.",
            unit="none",
            look=Look.NUMBER,
            width=6,
            queries=one(of_run("rayloom_train_newest_step"), "step"),
        ),
        Panel(
            title="Policy version",
            description="The version that the newest step made, and that every engine took.",
            unit="none",
            look=Look.NUMBER,
            width=6,
            queries=one(of_run("rayloom_policy_version"), "version"),
        ),
        Panel(
            title="Steps per hour",
            description="Training steps stored, at the pace of the last minutes.",
            unit="suffix: /h",
            look=Look.NUMBER,
            width=6,
            queries=one(f"{rate('rayloom_train_steps_total')} * 3600", "steps"),
        ),
        Panel(
            title="Engines ready",
            description="Engines that hold the current version; briefly 0 while they load one.",
            unit="none",
            look=Look.NUMBER,
            width=6,
            queries=one(of_run("rayloom_engines_ready"), "engines"),
        ),
        Panel(
            title="Reward, of the best possible",
            description=(
                "Mean return over the best possible one: of the newest step's trajectories, and "
                "of the held-out tasks at temperature 0. Empty where an environment does not "
                "know the best return."
            ),
            unit="percentunit",
            queries=(
                Query(expr=of_run("rayloom_scaled_reward_mean_ratio"), legend="training"),
                Query(
                    expr=of_run("rayloom_evaluation_scaled_reward_mean_ratio"), legend="held out"
                ),
            ),
        ),
        Panel(
            title="Return",
            description="Mean return of the newest step's trajectories, as their environment pays.",
            unit="none",
            queries=one(of_run("rayloom_reward_mean"), "return"),
        ),
        Panel(
            title="Tokens per second",
            description="Tokens of the trained steps: sampled by the engines, and in the loss.",
            unit="suffix: tokens/s",
            queries=(
                Query(expr=rate("rayloom_sampled_tokens_total"), legend="sampled"),
                Query(expr=rate("rayloom_trained_tokens_total"), legend="trained"),
            ),
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
            queries=one(mean("rayloom_stage_seconds"), "{{stage}}"),
        ),
        Panel(
            title="Rollouts in the ledger",
            description="Every admitted rollout is trained, evicted or in flight.",
            unit="short",
            width=12,
            queries=(
                Query(expr=of_run("rayloom_ledger_trained_rollouts"), legend="trained"),
                Query(
                    expr=f"sum({of_run('rayloom_ledger_evicted_rollouts')})",
                    legend="evicted",
                ),
                Query(expr=of_run("rayloom_ledger_in_flight_rollouts"), legend="in flight"),
            ),
        ),
        Panel(
            title="Rollouts that leave, per second",
            description="Ledger rows stored: rollouts trained, and rollouts evicted untrained.",
            unit="suffix: /s",
            queries=one(
                f"sum by (kind) ({rate('rayloom_ledger_events_total', LEFT)})",
                "{{kind}}",
            ),
        ),
        Panel(
            title="Evictions, by reason",
            description="Rollouts that left untrained. masked and zero_variance are no faults.",
            unit="short",
            queries=one(of_run("rayloom_ledger_evicted_rollouts"), "{{reason}}"),
        ),
        Panel(
            title="Policy age",
            description="Versions between the sampling of a step's oldest token and its training.",
            unit="suffix: versions",
            queries=(
                Query(expr=quantile(0.95, "rayloom_policy_age_versions"), legend="p95"),
                Query(expr=mean("rayloom_policy_age_versions"), legend="mean"),
            ),
        ),
        Panel(
            title="Trajectories waiting",
            description="Finished trajectories in the queue that no step has taken.",
            unit="short",
            width=12,
            queries=one(of_run("rayloom_queue_items"), "waiting"),
        ),
        Panel(
            title="Bytes waiting",
            description="Payloads that the queue refers to; queue.max_mib bounds them.",
            unit="bytes",
            width=12,
            queries=one(of_run("rayloom_queue_bytes"), "waiting"),
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
            queries=one(f"sum by (outcome) ({rate('rayloom_rollouts_total')})", "{{outcome}}"),
        ),
        Panel(
            title="Returns",
            description="How the returns of graded trajectories are spread, and how that moves.",
            unit="none",
            look=Look.HEATMAP,
            queries=one(
                f"sum by (le) ({rate('rayloom_trajectory_return_bucket')})",
                "{{le}}",
            ),
        ),
        Panel(
            title="Time of a trajectory",
            description="Wall time from reset to the outcome.",
            unit="s",
            queries=(
                Query(expr=quantile(0.5, "rayloom_trajectory_seconds"), legend="p50"),
                Query(expr=quantile(0.95, "rayloom_trajectory_seconds"), legend="p95"),
            ),
        ),
        Panel(
            title="Turns per sample",
            description="How well turns merge: 1 where none does, the turns of a game at best.",
            unit="none",
            queries=one(
                f"{rate('rayloom_merge_samples_total', BEFORE)} / ignoring (side) "
                f"{rate('rayloom_merge_samples_total', AFTER)}",
                "turns",
            ),
        ),
        Panel(
            title="Turns that did not merge, by kind",
            description="Per second: what changed in the history that a turn should have extended.",
            unit="suffix: /s",
            queries=one(rate("rayloom_merge_mismatches_total"), "{{kind}}"),
        ),
        Panel(
            title="What looks odd",
            description=(
                "Per second: malformed turns, malformed trajectories that were rewarded all the "
                "same, tokens that we inserted, groups without any variance."
            ),
            unit="suffix: /s",
            queries=(
                Query(expr=rate("rayloom_malformed_turns_total"), legend="malformed turns"),
                Query(
                    expr=rate("rayloom_malformed_rewarded_total"), legend="malformed, yet rewarded"
                ),
                Query(expr=rate("rayloom_inserted_tokens_total"), legend="inserted tokens"),
                Query(
                    expr=rate("rayloom_zero_variance_groups_total"), legend="zero-variance groups"
                ),
            ),
        ),
    ),
)

LEARNING_SECTION = Section(
    title="Learning health",
    panels=(
        Panel(
            title="Loss",
            description="Policy loss of the newest step; absent when its updates were skipped.",
            unit="none",
            queries=one(of_run("rayloom_loss"), "loss"),
        ),
        Panel(
            title="Entropy",
            description="Mean entropy of the policy per token. Near 0 it explores nothing.",
            unit="suffix: nats",
            queries=one(of_run("rayloom_entropy_nats"), "entropy"),
        ),
        Panel(
            title="Gradient norm",
            description="Before clipping.",
            unit="none",
            queries=one(of_run("rayloom_gradient_norm"), "norm"),
        ),
        Panel(
            title="Mismatch of trainer and engine",
            description="Mean k3 on tokens of the trainer's own version: how far the two differ.",
            unit="suffix: nats",
            is_logarithmic=True,
            queries=one(of_run("rayloom_mismatch_k3_nats"), "k3"),
        ),
        Panel(
            title="Largest difference of a log-probability",
            description=(
                "Between trainer and engine: on those tokens, and on the fixed prompt after the "
                "last publish, where a jump means that an engine holds other weights."
            ),
            unit="suffix: nats",
            is_logarithmic=True,
            queries=(
                Query(expr=of_run("rayloom_mismatch_max_nats"), legend="sampled tokens"),
                Query(expr=of_run("rayloom_parity_max_nats"), legend="fixed prompt"),
            ),
        ),
        Panel(
            title="Skipped steps",
            description="Steps of which an update was skipped, its loss or gradient not finite.",
            unit="none",
            queries=one(of_run("rayloom_train_skipped_steps_total"), "skipped"),
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
            queries=one(of_run("rayloom_engines_ready"), "ready"),
        ),
        Panel(
            title="Replacements",
            description=(
                "Parts that died and were replaced since the process started; epoch: all of them, "
                "from the newest checkpoint."
            ),
            unit="none",
            width=12,
            queries=one(of_run("rayloom_replacements_total"), "{{part}}"),
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
            queries=(
                Query(expr=of_run("rayloom_service_waiting_tasks"), legend="waiting"),
                Query(expr=of_run("rayloom_service_waiting_tasks_limit"), legend="limit"),
            ),
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
