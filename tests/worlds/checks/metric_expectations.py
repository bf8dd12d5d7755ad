"""The expected values of metrics, computed from a run's stored rows in plain loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce

from actors.metrics import AGE_BUCKETS, SECONDS_BUCKETS
from actors.statistics import STATISTICS
from actors.trajectory_queue.ledger import LedgerEvent
from service.telemetry.records import StageSeconds, StepRecord
from worlds.servers.prometheus_server import Series, series

# The statistic of the newest step that each gauge shows.
SHOWN = {
    "rayloom_reward_mean": "reward_mean",
    "rayloom_scaled_reward_mean_ratio": "scaled_reward_mean",
    "rayloom_loss": "loss",
    "rayloom_gradient_norm": "grad_norm",
    "rayloom_entropy_nats": "entropy_mean",
    "rayloom_mismatch_k3_nats": "mismatch_k3_mean",
    "rayloom_mismatch_max_nats": "mismatch_max",
    "rayloom_logprob_check_max_nats": "logprob_check_max",
}
# The field whose sum over all steps each counter shows.
ADDED = {
    "rayloom_train_skipped_steps_total": "is_skipped",
    "rayloom_sampled_tokens_total": "num_sampled_tokens",
    "rayloom_trained_tokens_total": "num_trained_tokens",
    "rayloom_inserted_tokens_total": "num_inserted_tokens",
    "rayloom_malformed_turns_total": "num_malformed_turns",
    "rayloom_malformed_rewarded_total": "num_malformed_rewarded",
    "rayloom_zero_variance_groups_total": "num_zero_variance_groups",
    "rayloom_negative_return_groups_total": "num_negative_return_groups",
}


def of_steps(records: Sequence[StepRecord]) -> dict[Series, float]:
    """Return the expected counters and histograms of steps."""
    found: dict[Series, float] = {series("rayloom_train_steps_total"): len(records)}
    for name, field in ADDED.items():
        found[series(name)] = sum(getattr(record, field) for record in records)
    for side in ("before", "after"):
        total = sum(getattr(record.merge, f"samples_{side}") for record in records)
        # A counter with labels appears with the first step.
        if records:
            found[series("rayloom_merge_samples_total", side=side)] = total
    for record in records:
        for reason, count in record.merge.branches.items():
            key = series("rayloom_merge_branches_total", reason=reason)
            found[key] = found.get(key, 0) + count
        for fate, count in {"trained": record.tokens.trained, **record.tokens.untrained}.items():
            key = series("rayloom_played_tokens_total", fate=fate)
            found[key] = found.get(key, 0) + count
    ages = [record.policy_age_max for record in records if record.num_trained_tokens]
    found |= _histogram("rayloom_policy_age_versions", ages, AGE_BUCKETS)
    for stage in records[0].stages.by_name() if records else ():
        seconds = [record.stages.by_name()[stage] for record in records]
        found |= _histogram("rayloom_stage_seconds", seconds, SECONDS_BUCKETS, stage=stage)
    return found


def of_events(events: Sequence[LedgerEvent]) -> dict[Series, float]:
    counts = Counter((event.kind, event.reason or "") for event in events)
    return {
        series("rayloom_ledger_events_total", kind=kind, reason=reason): count
        for (kind, reason), count in counts.items()
    }


def of_newest(record: StepRecord | None) -> dict[Series, float | None]:
    """Return the expected gauges of the newest step; None: the gauge must be absent."""
    statistics = {} if record is None else record.statistics
    found: dict[Series, float | None] = {
        series("rayloom_train_newest_step"): None if record is None else record.step,
        series("rayloom_policy_version"): None if record is None else record.policy_version,
        series("rayloom_train_newest_step_timestamp_seconds"): (
            None if record is None else record.wall_time
        ),
        **{series(metric): statistics.get(name) for metric, name in SHOWN.items()},
    }
    for stage in StageSeconds().by_name():
        seconds = None if record is None else record.stages.by_name()[stage]
        found[series("rayloom_train_newest_step_seconds", stage=stage)] = seconds
    for kind in ("sampled", "trained"):
        count = None if record is None else getattr(record, f"num_{kind}_tokens")
        found[series("rayloom_train_newest_step_tokens", kind=kind)] = count
    for component, mean in ({} if record is None else record.reward_components).items():
        found[series("rayloom_reward_component_mean", component=component)] = mean
    for each in STATISTICS:
        if each.name not in SHOWN.values():
            found[series(each.metric)] = statistics.get(each.name)
    return found


def differences(
    seen: Mapping[Series, float], expected: Mapping[Series, float | None]
) -> dict[Series, tuple[float | None, float | None]]:
    """Return the seen and the expected value of each series for which the two differ."""
    return {
        key: (seen.get(key), value) for key, value in expected.items() if seen.get(key) != value
    }


def _histogram(
    name: str, values: Sequence[float], bounds: Sequence[float], **labels: str
) -> dict[Series, float]:
    # Add the values one by one, so that the sum equals the counter's to the last bit.
    total: float = reduce(lambda whole, value: whole + value, values, 0.0)
    found: dict[Series, float] = {
        series(f"{name}_count", **labels): len(values),
        series(f"{name}_sum", **labels): total,
        series(f"{name}_bucket", **labels, le="+Inf"): len(values),
    }
    for bound in bounds:
        below = sum(value <= bound for value in values)
        found[series(f"{name}_bucket", **labels, le=str(float(bound)))] = below
    return found
