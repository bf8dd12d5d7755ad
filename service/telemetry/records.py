"""What the loop writes down: one record a training step, one an evaluation.

Records are stored as they are, and the line that the log and the displays show, the metrics, the
report and summary.json are all made from them, so that no two of these can disagree.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

from actors.merge.report import StepReport
from actors.statistics import BY_NAME, only_known
from actors.trainer.statistics import StepStats
from actors.types import Outcome, TrajectorySummary
from service import units

MAX_OUTCOMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Wall seconds that the loop stood at each stage of a step; they add up to the step's time."""

    collect: float = 0.0
    """The wait for closed groups."""
    merge: float = 0.0
    score: float = 0.0
    """By a reference or a critic, before the rewards are shaped; 0 where no algorithm asks."""
    train: float = 0.0
    publish: float = 0.0
    """Gathering the weights and the wait for the engines. With a lag the loop goes on, and waits
    only for engines that still hold the version before."""
    checkpoint: float = 0.0
    evaluate: float = 0.0

    def by_name(self) -> dict[str, float]:
        return asdict(self)

    @property
    def total(self) -> float:
        return sum(self.by_name().values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(StepReport):
    """One training step: the merge actor's report, completed by what came after it.

    step: 1, 2, … statistics: of all parts, by name; what is not known is absent.
    """

    policy_version: int
    """What the engines hold after the step."""
    wall_time: float
    """Unix seconds."""
    learning_rate: float
    is_skipped: bool
    """An update was refused as not finite."""
    stages: StageSeconds = field(default_factory=StageSeconds)

    def value(self, name: str) -> float | None:
        """A statistic; None where the step does not know it."""
        assert name in BY_NAME, f"{name} is not in the table of statistics"
        return self.statistics.get(name)

    @property
    def best_known_reward(self) -> float | None:
        """The scaled reward where the environment knows the best return, else the plain one."""
        scaled = self.value("scaled_reward_mean")
        return self.value("reward_mean") if scaled is None else scaled

    @property
    def policy_age_max(self) -> int:
        """Versions; 0 where nothing was trained."""
        return int(self.value("policy_age_max") or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """Held-out tasks at temperature 0, played by `policy_version`; counted apart."""

    step: int
    policy_version: int
    num_tasks: int
    reward_mean: float | None
    scaled_reward_mean: float | None
    outcomes: Mapping[Outcome, int]

    @property
    def best_known_reward(self) -> float | None:
        """The scaled reward where the environment knows the best return, else the plain one."""
        return self.reward_mean if self.scaled_reward_mean is None else self.scaled_reward_mean


def step_record(
    step: int,
    report: StepReport,
    stats: StepStats,
    *,
    version: int,
    logprob_check_max: float | None,
    stages: StageSeconds,
) -> StepRecord:
    """Complete the merge actor's report with the trainer's statistics and the publish.

    version: that the weights were published as.
    """
    known = {**report.statistics, **stats.statistics, "logprob_check_max": logprob_check_max}
    counted = {each.name: getattr(report, each.name) for each in fields(StepReport)}
    return StepRecord(
        **{**counted, "step": step, "statistics": only_known(known)},
        policy_version=version,
        wall_time=time.time(),
        learning_rate=stats.learning_rate,
        is_skipped=stats.is_skipped,
        stages=stages,
    )


def evaluation_record(
    step: int, summaries: Sequence[TrajectorySummary], *, version: int
) -> EvaluationRecord:
    """Sum up an evaluation; trajectories that an error ended count by outcome, not in the mean."""
    graded = [summary for summary in summaries if summary.num_sampled > 0]
    scaled = [s.scaled_return for s in graded if s.scaled_return is not None]
    return EvaluationRecord(
        step=step,
        policy_version=version,
        num_tasks=len(summaries),
        reward_mean=_mean([summary.episode_return for summary in graded]),
        scaled_reward_mean=_mean(scaled),
        outcomes=Counter(summary.outcome for summary in summaries),
    )


def step_line(record: StepRecord, steps: int) -> str:
    """One step as a person reads it; what was not measured is left out. steps: planned ones.

    Example: step  12/120  v12   reward 0.41 (best 1)  age 0  loss +0.0120  k3  2e-9   3.1k tok/s
    1.4 s (collect 0.8, merge 0.0, train 0.4, publish 0.1)  256 rollouts: 250 completed, 6 max_turns
    """
    width = len(str(steps))
    parts = [
        f"step {record.step:>{width}}/{steps}",
        f"v{record.policy_version:<{width}}",
        _reward(record, record.value("scaled_reward_mean")),
        f"age {record.policy_age_max}",
    ]
    if (loss := record.value("loss")) is not None:
        parts.append(f"loss {units.fixed(loss, decimals=4, sign='+')}")
    if (k3 := record.value("mismatch_k3_mean")) is not None:
        parts.append(f"k3 {units.significant(k3, digits=1):>5}")
    seconds = record.stages.total
    if seconds > 0:
        stages = {name: value for name, value in record.stages.by_name().items() if value > 0}
        listed = ", ".join(f"{name} {value:.1f}" for name, value in stages.items())
        parts.append(f"{units.short_count(round(record.num_sampled_tokens / seconds)):>5} tok/s")
        parts.append(f"{units.duration(seconds):>5} ({listed})")
    parts.append(_rollouts(record.num_trajectories, record.outcomes))
    if record.is_skipped:
        parts.append("update skipped: not finite")
    return "  ".join(parts)


def evaluation_line(record: EvaluationRecord) -> str:
    """Example: evaluation  v20  reward 0.55 (best 1)  64 held-out tasks"""
    tasks = units.plural(record.num_tasks, "held-out task")
    reward = _reward(record, record.scaled_reward_mean)
    return f"evaluation  v{record.policy_version}  {reward}  {tasks}"


def _reward(record: StepRecord | EvaluationRecord, scaled: float | None) -> str:
    scale = "" if scaled is None else " (best 1)"
    return f"reward {units.reward(record.best_known_reward)}{scale}"


def _rollouts(count: int, outcomes: Mapping[Outcome, int]) -> str:
    ordered = sorted((item for item in outcomes.items() if item[1]), key=lambda item: -item[1])
    named = [f"{number} {name}" for name, number in ordered[:MAX_OUTCOMES]]
    if rest := sum(number for _, number in ordered[MAX_OUTCOMES:]):
        named.append(f"{rest} other" if rest == 1 else f"{rest} others")
    head = f"{count} rollout" if count == 1 else f"{count} rollouts"
    return f"{head}: {', '.join(named)}" if named else head


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
