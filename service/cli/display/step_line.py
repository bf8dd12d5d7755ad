"""The story of a run in lines: one a training step, one an evaluation; pure.

The run's log, the plain display and the live display's last lines are all these.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.types import Outcome
from service import units
from service.telemetry.records import EvaluationRecord, StageSeconds, StepRecord

MAX_OUTCOMES = 4


def step_line(record: StepRecord, steps: int) -> str:
    """One step as a person reads it; what was not measured is left out. steps: planned ones.

    Example: step  12/120  v12   reward 0.41 (best 1)  age 0  loss +0.0120  k3  2e-9   3.1k tok/s
    1.4 s (collect 0.8, merge 0.0, train 0.4, publish 0.1)  256 rollouts: 250 completed, 6 max_turns
    """
    parts = [
        f"step {record.step:>{len(str(steps))}}/{steps}",
        f"v{record.policy_version:<{len(str(steps))}}",
        _reward(record),
        f"age {record.policy_age_max}",
    ]
    if (loss := record.value("loss")) is not None:
        parts.append(f"loss {units.fixed(loss, decimals=4, sign='+')}")
    if (k3 := record.value("mismatch_k3_mean")) is not None:
        parts.append(f"k3 {units.significant(k3, digits=1):>5}")
    seconds = record.stages.total
    if seconds > 0:
        parts.append(f"{units.short_count(round(record.num_sampled_tokens / seconds)):>5} tok/s")
        parts.append(f"{units.duration(seconds):>5} ({_stages(record.stages)})")
    parts.append(_rollouts(record.num_trajectories, record.outcomes))
    if record.is_skipped:
        parts.append("update skipped: not finite")
    return "  ".join(parts)


def evaluation_line(record: EvaluationRecord) -> str:
    """Example: evaluation  v20  reward 0.55 (best 1)  64 held-out tasks"""
    best = " (best 1)" if record.scaled_reward_mean is not None else ""
    tasks = units.plural(record.num_tasks, "held-out task")
    reward = units.reward(record.best_known_reward)
    return f"evaluation  v{record.policy_version}  reward {reward}{best}  {tasks}"


def _reward(record: StepRecord) -> str:
    best = " (best 1)" if record.value("scaled_reward_mean") is not None else ""
    return f"reward {units.reward(record.best_known_reward)}{best}"


def _stages(stages: StageSeconds) -> str:
    return ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in stages.by_name().items() if seconds > 0
    )


def _rollouts(count: int, outcomes: Mapping[Outcome, int]) -> str:
    ordered = sorted(
        ((name, number) for name, number in outcomes.items() if number), key=lambda item: -item[1]
    )
    named = [f"{number} {name}" for name, number in ordered[:MAX_OUTCOMES]]
    rest = sum(number for _, number in ordered[MAX_OUTCOMES:])
    if rest:
        named.append(f"{rest} other" if rest == 1 else f"{rest} others")
    head = f"{count} rollout" if count == 1 else f"{count} rollouts"
    return f"{head}: {', '.join(named)}" if named else head
