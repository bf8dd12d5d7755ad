"""Step and evaluation records for tests: plausible by default, any field to be replaced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from service.telemetry.records import EvaluationRecord, StageSeconds, StepRecord
from service.telemetry.statistic_names import STATISTIC_NAMES
from service.telemetry.summary import LedgerTotals, RunSummary, summarize_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the store's History offers of a run."""

    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[EvaluationRecord, ...] = ()
    num_terms: int = 1


def known_statistics(step: int) -> dict[str, float]:
    """Every one that there is; no two are equal, and all of them move from step to step."""
    return {name: number / 64 + step / 4 for number, name in enumerate(STATISTIC_NAMES)}


def step_record(step: int, **changes: Any) -> StepRecord:
    record = StepRecord(
        step=step,
        policy_version=step,
        wall_time=1_795_000_000.0 + 2.0 * step,
        reward_mean=0.5,
        scaled_reward_mean=0.5,
        num_trajectories=16,
        outcomes={"completed": 14, "max_turns": 2},
        malformed_turns=1,
        turns=40,
        sampled_tokens=400,
        trained_tokens=360,
        packed_tokens=900,
        samples_before=40,
        samples_after=16,
        mismatches={},
        inserted_tokens=0,
        zero_variance_groups=0,
        malformed_rewarded=0,
        policy_age_max=0,
        policy_age_mean=0.0,
        loss=0.01,
        grad_norm=0.4,
        learning_rate=1e-3,
        entropy=1.2,
        clip_fraction=0.05,
        ratio_max=1.3,
        effective_sample_size=0.98,
        mismatch_k3=2e-12,
        mismatch_max=3e-6,
        parity_max=1e-6,
        is_skipped=False,
        stages=StageSeconds(collect=0.8, merge=0.05, train=0.5, publish=0.15),
        statistics=known_statistics(step),
    )
    return replace(record, **changes)


def unmeasured_step(step: int) -> StepRecord:
    """A step of which nothing that may be None was measured, and nothing ended."""
    return step_record(
        step,
        reward_mean=None,
        scaled_reward_mean=None,
        num_trajectories=0,
        outcomes={},
        malformed_turns=0,
        turns=0,
        sampled_tokens=0,
        trained_tokens=0,
        samples_before=0,
        samples_after=0,
        loss=None,
        grad_norm=None,
        entropy=None,
        clip_fraction=None,
        ratio_max=None,
        effective_sample_size=None,
        mismatch_k3=None,
        mismatch_max=None,
        parity_max=None,
        stages=StageSeconds(),
        statistics={},
    )


def evaluation_record(step: int, *, reward: float | None = 0.6) -> EvaluationRecord:
    return EvaluationRecord(
        step=step,
        policy_version=step,
        num_tasks=64,
        reward_mean=reward,
        scaled_reward_mean=reward,
        outcomes={"completed": 64},
    )


def learning_run(num_steps: int) -> Run:
    """Reward from 0.3 to 0.9 in a straight line, an evaluation every tenth step."""
    rise = 0.6 / max(num_steps - 1, 1)
    return Run(
        steps=tuple(
            step_record(step, scaled_reward_mean=0.3 + rise * (step - 1))
            for step in range(1, num_steps + 1)
        ),
        evaluations=tuple(evaluation_record(step) for step in range(0, num_steps + 1, 10)),
    )


def summary_of(run: Run, **changes: Any) -> RunSummary:
    total = sum(record.num_trajectories for record in run.steps)
    given: dict[str, Any] = {
        "ledger": LedgerTotals(admitted=total, trained=total),
        "wall_s": 252.0,
        "versions": {"vllm": "0.32.0", "ray": "2.60.0", "torch": "2.13.0"},
    }
    return summarize_run(run, **{**given, **changes})
