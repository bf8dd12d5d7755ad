"""What the loop writes down: one record a training step, one an evaluation.

Records are stored as they are, and the log line, the metrics, the report and summary.json are all
made from them, so that no two of these can disagree.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pydantic import TypeAdapter

from actors.merge.report import StepReport
from actors.statistics import BY_NAME, only_known
from actors.trainer.statistics import StepStats
from actors.types import Outcome, TrajectorySummary


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

    def to_json(self) -> dict[str, Any]:
        return to_json(_STEP, self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> StepRecord:
        return _STEP.validate_python(tree)


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

    def to_json(self) -> dict[str, Any]:
        return to_json(_EVALUATION, self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> EvaluationRecord:
        return _EVALUATION.validate_python(tree)


_STEP = TypeAdapter(StepRecord)
_EVALUATION = TypeAdapter(EvaluationRecord)


def to_json(adapter: TypeAdapter[Any], value: object) -> dict[str, Any]:
    """A tree of JSON values; a number that is not finite is null."""
    tree: dict[str, Any] = json.loads(adapter.dump_json(value))
    return tree


def step_record(
    step: int,
    report: StepReport,
    stats: StepStats,
    *,
    logprob_check_max: float | None,
    stages: StageSeconds,
) -> StepRecord:
    """Complete the merge actor's report with the trainer's statistics and the publish."""
    known = {**report.statistics, **stats.statistics, "logprob_check_max": logprob_check_max}
    counted = {each.name: getattr(report, each.name) for each in fields(StepReport)}
    return StepRecord(
        **{**counted, "step": step, "statistics": only_known(known)},
        policy_version=step,
        wall_time=time.time(),
        learning_rate=stats.learning_rate,
        is_skipped=stats.is_skipped,
        stages=stages,
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
        outcomes=Counter(summary.outcome for summary in summaries),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
