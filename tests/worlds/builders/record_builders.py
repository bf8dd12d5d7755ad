"""Step and evaluation records for tests, with plausible values unless a test replaces them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from actors.merge.report import MergeReport
from actors.statistics import BY_NAME, only_known
from actors.trajectory_queue.ledger import EvictionReason, LedgerCounts, TokenCounts
from actors.types import LeftOutReason, Outcome
from actors.user_code import LostCalls
from service.run.health import RunStatus
from service.telemetry.records import EvaluationRecord, StageSeconds, StepRecord
from service.telemetry.summary import History, RunSummary, summarize_run
from service.telemetry.totals import totals_of

START = 1_795_000_000.0
"""Start time of the runs with these records, in seconds since 1970."""


def history_of(
    *,
    steps: tuple[StepRecord, ...] = (),
    evaluations: tuple[EvaluationRecord, ...] = (),
    num_terms: int = 1,
) -> History:
    return History(
        steps=steps, evaluations=evaluations, totals=totals_of(steps), num_terms=num_terms
    )


# Statistics of a plausible step whose values tests compare.
PLAUSIBLE = {
    "reward_mean": 0.5,
    "scaled_reward_mean": 0.5,
    "loss": 0.01,
    "grad_norm": 0.4,
    "entropy_mean": 1.2,
    "mismatch_k3_mean": 2e-12,
    "mismatch_max": 3e-6,
    "logprob_check_max": 1e-6,
    "logprob_check_ratio": 0.01,
    "policy_age_max": 0.0,
    "policy_age_mean": 0.0,
}


def known_statistics(step: int) -> dict[str, float]:
    """Return a value of every statistic; all except those of PLAUSIBLE change from step to step."""
    moving = {name: number / 64 + step / 4 for number, name in enumerate(BY_NAME)}
    return {**moving, **PLAUSIBLE}


def step_record(step: int, **changes: Any) -> StepRecord:
    """Return the record of a step.

    changes: values of fields, also of the merge report's fields, and of statistics by name (None:
    leave the statistic out).
    """
    record = StepRecord(
        step=step,
        trainer_version=step - 1,
        policy_version=step,
        wall_time=1_795_000_000.0 + 2.0 * step,
        num_groups=4,
        num_zero_variance_groups=0,
        num_trajectories=16,
        outcomes={Outcome.COMPLETED: 14, Outcome.MAX_TURNS: 2},
        evictions={},
        num_malformed_rewarded=0,
        merge=MergeReport(
            samples_before=40,
            samples_after=16,
            branches={},
            num_saved_tokens=0,
            num_masked_tokens=0,
        ),
        num_turns=40,
        num_malformed_turns=1,
        num_inserted_tokens=0,
        num_sampled_tokens=400,
        num_trained_tokens=360,
        num_packed_tokens=900,
        num_micro_batches=1,
        num_padding_rows=0,
        num_overruled_records=0,
        tokens=TokenCounts(
            trained=360, untrained={EvictionReason.ZERO_VARIANCE: 40, LeftOutReason.UNSEEN: 5}
        ),
        learning_rate=1e-3,
        is_skipped=False,
        stages=StageSeconds(collect=0.8, merge=0.05, train=0.5, publish=0.15),
        statistics=known_statistics(step),
    )
    of_merge = {field.name for field in fields(MergeReport)} & changes.keys()
    statistics = {name: changes.pop(name) for name in BY_NAME if name in changes}
    merge = replace(record.merge, **{name: changes.pop(name) for name in of_merge})
    known = only_known({**record.statistics, **statistics})
    return replace(record, **{"merge": merge, "statistics": known, **changes})


def unmeasured_step(step: int) -> StepRecord:
    """Return the record of a step without trajectories, in which no optional value was measured."""
    return step_record(
        step,
        num_trajectories=0,
        outcomes={},
        num_malformed_turns=0,
        num_turns=0,
        num_sampled_tokens=0,
        num_trained_tokens=0,
        tokens=TokenCounts(),
        samples_before=0,
        samples_after=0,
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
        outcomes={Outcome.COMPLETED: 64},
    )


def lost_calls(function: str, *, count: int = 1, **changes: Any) -> LostCalls:
    """Return the lost calls of a function that hung on one task."""
    calls = LostCalls(
        function=function, end="killed", count=count, why="no answer within 20 s", tasks=("row-1",)
    )
    return replace(calls, **changes)


def learning_run(num_steps: int) -> History:
    """Return a run whose reward rises linearly from 0.3 to 0.9; it is evaluated every ten steps."""
    rise = 0.6 / max(num_steps - 1, 1)
    return history_of(
        steps=tuple(
            step_record(step, scaled_reward_mean=0.3 + rise * (step - 1))
            for step in range(1, num_steps + 1)
        ),
        evaluations=tuple(evaluation_record(step) for step in range(0, num_steps + 1, 10)),
    )


def summary_of(run: History, **changes: Any) -> RunSummary:
    total = sum(record.num_trajectories for record in run.steps)
    given: dict[str, Any] = {
        "ledger": LedgerCounts(admitted=total, trained=total),
        "wall_s": 252.0,
        "versions": {"vllm": "0.32.0", "ray": "2.60.0", "torch": "2.13.0"},
    }
    return summarize_run(run, **{**given, **changes})


def status_of(step: int, **changes: object) -> RunStatus:
    """Return the status of a training run at `step` of 120."""
    status = RunStatus(
        name="guessing",
        phase="training",
        started_at=START,
        steps=120,
        step=step,
        policy_version=step,
        records=(step_record(step),) if step else (),
        ledger=LedgerCounts(
            admitted=20, trained=12, evicted={EvictionReason.MASKED: 2}, in_flight=6
        ),
        queue_items=6,
        queue_bytes=3 * 1024 * 1024,
        rollouts_done=16 * step,
        sampled_tokens=400 * step,
        engines_ready=1,
        metrics_address="http://127.0.0.1:9090/metrics",
        run_dir="runs/demo",
    )
    return replace(status, **changes)  # type: ignore[arg-type]
