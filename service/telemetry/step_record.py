"""From what the parts report to the one record of a step or an evaluation; pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from actors.merge.report import StepReport
from actors.trainer.statistics import StepStats
from actors.types import TrajectorySummary
from service.run.ports import PublishedVersion
from service.telemetry.records import EvaluationRecord, StageSeconds, StepRecord
from service.telemetry.step_statistics import step_statistics


def step_record(
    step: int,
    report: StepReport,
    stats: StepStats,
    published: PublishedVersion,
    stages: StageSeconds,
) -> StepRecord:
    """What a step was: the merge actor's counts, the trainer's statistics, the publish."""
    was_updated = stats.num_updates > stats.num_empty_updates + stats.num_skipped_updates
    was_trained = stats.trained_tokens > 0
    mismatch = stats.mismatch
    return StepRecord(
        step=step,
        policy_version=published.version,
        wall_time=time.time(),
        reward_mean=report.returns.mean if report.returns else None,
        scaled_reward_mean=report.scaled_return_mean,
        num_trajectories=report.num_trajectories,
        outcomes={outcome.value: count for outcome, count in report.outcomes.items()},
        malformed_turns=report.num_malformed_turns,
        turns=report.num_turns,
        sampled_tokens=report.num_sampled_tokens,
        trained_tokens=report.num_trained_tokens,
        packed_tokens=report.num_packed_tokens,
        samples_before=report.merge.samples_before,
        samples_after=report.merge.samples_after,
        mismatches={kind.value: count for kind, count in report.merge.branches.items()},
        inserted_tokens=report.num_inserted_tokens,
        zero_variance_groups=report.num_zero_variance_groups,
        malformed_rewarded=report.num_malformed_rewarded,
        policy_age_max=report.policy_age_max or 0,
        policy_age_mean=report.policy_age_mean or 0.0,
        loss=stats.loss if was_updated else None,
        grad_norm=stats.grad_norm if was_updated else None,
        learning_rate=stats.learning_rate,
        entropy=stats.entropy_mean if was_trained else None,
        clip_fraction=stats.clip_fraction if was_trained else None,
        ratio_max=stats.ratio_max if was_trained else None,
        effective_sample_size=stats.effective_sample_fraction if was_trained else None,
        mismatch_k3=mismatch.k3_mean if mismatch else None,
        mismatch_max=mismatch.max_abs_delta if mismatch else None,
        parity_max=published.parity_max,
        is_skipped=stats.is_skipped,
        stages=stages,
        statistics=step_statistics(stats, report),
    )


def evaluation_record(step: int, summaries: Sequence[TrajectorySummary]) -> EvaluationRecord:
    """Sum up an evaluation; trajectories that an error ended count by outcome, not in the mean."""
    graded = [summary for summary in summaries if summary.num_sampled > 0]
    scaled = [s.scaled_return for s in graded if s.scaled_return is not None]
    return EvaluationRecord(
        step=step,
        policy_version=step,
        num_tasks=len(summaries),
        reward_mean=_mean([summary.episode_return for summary in graded]),
        scaled_reward_mean=_mean(scaled),
        outcomes=dict(Counter(summary.outcome.value for summary in summaries)),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
