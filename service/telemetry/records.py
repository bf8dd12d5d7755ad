"""The records of training steps, of evaluations, and of the findings of the reward-hacking audit.

Records are stored and never changed. The line in the log, the displays, the metrics, the report and
summary.json are all made from the records, so that they always agree. A finding describes what the
audit observed, without a judgement.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

from actors.merge.report import StepReport
from actors.statistics import BY_NAME, only_known
from actors.trainer.statistics import StepStats
from actors.trajectory_queue.ledger import TokenCounts
from actors.types import Outcome, SampledText
from actors.weights.logprob_check import LogprobCheck
from service import units

MAX_OUTCOMES = 4
# Number of texts that an evaluation keeps.
MAX_SAMPLES = 8
LINE_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Wall seconds that the loop spent in each stage of a step; their sum is the step's time."""

    collect: float = 0.0
    """Seconds of waiting until the step's groups of rollouts were complete."""
    merge: float = 0.0
    score: float = 0.0
    """Seconds of scoring by a reference model or critic, before shaping rewards; 0 if there is
    neither."""
    train: float = 0.0
    publish: float = 0.0
    """Seconds of gathering the weights and waiting for the engines.

    If rollouts may lag, the loop waits only for engines that still hold the previous version.
    """
    checkpoint: float = 0.0
    evaluate: float = 0.0

    def by_name(self) -> dict[str, float]:
        return asdict(self)

    @property
    def total(self) -> float:
        return sum(self.by_name().values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(StepReport):
    """The numbers of one training step, as they are stored and shown.

    The record extends the merge actor's report by the numbers of the trainer and of the publication
    of the new weights. `step` counts from 1. `statistics` has the statistics of all parts of the
    run, by name; a statistic that is not known is absent.
    """

    policy_version: int
    """Policy version that the engines have after the step."""
    wall_time: float
    """Time at which the record was made; Unix seconds."""
    learning_rate: float
    is_skipped: bool
    """Whether an update was not applied because its loss or gradient was not finite."""
    stages: StageSeconds = field(default_factory=StageSeconds)

    def value(self, name: str) -> float | None:
        """Return the statistic of this name; None if the record lacks it."""
        assert name in BY_NAME, f"{name} is not in the table of statistics"
        return self.statistics.get(name)

    @property
    def best_known_reward(self) -> float | None:
        """The mean reward, divided by the best possible reward.

        If the best possible reward is not known, the mean reward itself.
        """
        scaled = self.value("scaled_reward_mean")
        return self.value("reward_mean") if scaled is None else scaled

    @property
    def policy_age_max(self) -> int:
        """Largest policy age of a trained token, in versions; 0 if no token was trained."""
        return int(self.value("policy_age_max") or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSample:
    """One trajectory of an evaluation as text, to be read by people."""

    task_id: str
    outcome: Outcome
    episode_return: float
    text: SampledText


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The results of one evaluation on held-out tasks.

    The evaluation was begun either by the run's schedule or by an operator's request.
    """

    step: int
    """Last finished step when the evaluation began."""
    policy_version: int
    """Newest policy version when the evaluation began."""
    num_tasks: int
    reward_mean: float | None
    """Mean over all scored samples of all tasks: avg@n if each task has n scored samples."""
    scaled_reward_mean: float | None
    outcomes: Mapping[Outcome, int]
    name: str = ""
    """Name of the task set (evaluation.sets); empty if it is the run's own set."""
    standard_error: float | None = None
    """Standard error of the best-known reward over tasks; None with fewer than two tasks."""
    majority_mean: float | None = None
    """Majority@n: mean over tasks of the best-known return of the most frequent answer.

    None if no sample gave an answer.
    """
    num_failed: int = 0
    """Number of rollouts that ended with an error; means and `pass_at` leave them out."""
    is_scheduled: bool = True
    """True if the schedule began the evaluation, False if an operator did."""
    temperature: float = 0.0
    num_samples: int = 1
    """Samples of each task."""
    pass_reward: float = 1.0
    """Smallest best-known return with which a sample passes."""
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """Mean of `pass_at_k` by k, over the tasks with at least k scored samples."""
    last_policy_version: int | None = None
    """Newest policy version that sampled a token, which may be above `policy_version` if training
    continued meanwhile; None means `policy_version`.
    """
    wall_time: float = 0.0
    """Unix seconds; 0 if not recorded."""
    samples: tuple[EvaluationSample, ...] = ()
    """A few of the trajectories as text."""

    @property
    def is_charted(self) -> bool:
        """Whether charts and metrics show this record.

        They show scheduled evaluations of the run's own tasks.
        """
        return self.is_scheduled and not self.name

    @property
    def best_known_reward(self) -> float | None:
        """The mean reward, divided by the best possible reward.

        If the best possible reward is not known, the mean reward itself.
        """
        return self.reward_mean if self.scaled_reward_mean is None else self.scaled_reward_mean


def step_record(
    step: int,
    report: StepReport,
    stats: StepStats,
    *,
    version: int,
    stages: StageSeconds,
) -> StepRecord:
    """Return the record of a step that is trained; `finished_record` adds the engines' numbers.

    Args: report: the merge actor's report. stats: the trainer's statistics. version: policy version
    under which the step's weights were published.
    """
    known = {**report.statistics, **stats.statistics}
    counted = {each.name: getattr(report, each.name) for each in fields(StepReport)}
    return StepRecord(
        **{**counted, "step": step, "statistics": only_known(known)},
        policy_version=version,
        wall_time=time.time(),
        learning_rate=stats.learning_rate,
        is_skipped=stats.is_skipped,
        stages=stages,
    )


def finished_record(record: StepRecord, check: LogprobCheck | None) -> StepRecord:
    """Add the numbers of the step's log-probability check, and the current time, to its record.

    check: None if no engine answered. Returns: the new record.
    """
    checked = {} if check is None else check.statistics
    known = only_known({**record.statistics, **checked})
    return replace(record, statistics=known, wall_time=time.time())


def step_line(record: StepRecord, steps: int, *, left_s: float | None = None) -> str:
    """Return the line that the log shows for one step, with at most LINE_WIDTH characters.

    Unknown numbers are left out. Args: steps: number of planned steps. left_s: seconds until the
    last step; None if unknown.
    Example: step  12/120  reward 0.41  loss 0.012  3.1k tok/s  1.4 s (collect 0.8)
    256 rollouts, 6 max_turns  trained 94 %  4 min left
    """
    width = len(str(steps))
    # Parts with the lowest number are left out first if the line is too long.
    parts = [
        (9, f"step {record.step:>{width}}/{steps}"),
        (9, f"reward {units.reward(record.best_known_reward)}"),
    ]
    if record.policy_age_max:
        parts.append((4, f"age {record.policy_age_max}"))
    if record.policy_version != record.step:
        parts.insert(1, (5, f"v{record.policy_version}"))
    if (loss := record.value("loss")) is not None:
        parts.append((2, f"loss {units.significant(loss, digits=3)}"))
    if (k3 := record.value("mismatch_k3_mean")) is not None:
        parts.append((1, f"k3 {units.significant(k3, digits=1)}"))
    if (seconds := record.stages.total) > 0:
        rate = units.short_count(round(record.num_sampled_tokens / seconds))
        slowest, its_s = max(record.stages.by_name().items(), key=lambda item: item[1])
        parts += [
            (3, f"{rate} tok/s"),
            (6, f"{units.duration(seconds)} ({slowest} {its_s:.1f})"),
        ]
    parts.append((7, _rollouts(record.num_trajectories, record.outcomes)))
    if record.tokens.sampled:
        parts.append((5, _trained(record.tokens)))
    if record.is_skipped:
        parts.append((9, "update skipped: not finite"))
    if left_s is not None:
        # An estimate of minutes or hours is not precise to seconds.
        whole_s = left_s if left_s < 60 else 60 * round(left_s / 60)
        parts.append((8, f"{units.duration(whole_s).removesuffix(' 00 s')} left"))
    return _fitting(parts)


def _fitting(parts: Sequence[tuple[int, str]]) -> str:
    """Join texts to a line of at most LINE_WIDTH, without the least important texts.

    parts: importance and text, in the order of the line. The most important texts always stay.
    """
    kept = list(parts)
    while len(line := "  ".join(text for _, text in kept)) > LINE_WIDTH:
        least = min(kept, key=lambda part: part[0])
        if least[0] == max(kept)[0]:
            break
        kept.remove(least)
    return line


def evaluation_line(record: EvaluationRecord) -> str:
    """Return the line that the log shows for an evaluation.

    Example: evaluation  v20  reward 0.55 (best 1)  64 held-out tasks

    The line is longer if an operator requested the evaluation or if tasks have several samples:
    evaluation  v20  reward 0.55 (best 1)  64 held-out tasks, 8 samples each at temperature 0.6
    pass@1 0.41  pass@8 0.80  majority@8 0.62  3 failed
    """
    tasks = units.plural(record.num_tasks, "held-out task")
    reward = _reward(record, record.scaled_reward_mean)
    name = f" {record.name}" if record.name else ""
    line = f"evaluation{name}  v{record.policy_version}  {reward}  {tasks}"
    failed = f"  {record.num_failed} failed" if record.num_failed else ""
    if record.is_scheduled and record.num_samples == 1:
        return line + failed
    samples = units.plural(record.num_samples, "sample")
    passed = "".join(f"  pass@{k} {value:.2f}" for k, value in sorted(record.pass_at.items()))
    if record.majority_mean is not None and record.num_samples > 1:
        passed += f"  majority@{record.num_samples} {record.majority_mean:.2f}"
    return f"{line}, {samples} each at temperature {record.temperature:g}{passed}{failed}"


def _reward(record: StepRecord | EvaluationRecord, scaled: float | None) -> str:
    scale = "" if scaled is None else " (best 1)"
    return f"reward {units.reward(record.best_known_reward)}{scale}"


def _trained(tokens: TokenCounts) -> str:
    """Return the share of trained tokens as text; below one half, with the main cause."""
    text = f"trained {units.percent(tokens.trained_share)}"
    if 2 * tokens.trained >= tokens.sampled:
        return text
    cause, share = tokens.causes()[0]
    return f"{text} ({cause} {units.percent(share)})"


def _rollouts(count: int, outcomes: Mapping[Outcome, int]) -> str:
    """Return text such as "256 rollouts, 6 max_turns". The outcome `completed` is left out."""
    others = {name: number for name, number in outcomes.items() if name != Outcome.COMPLETED}
    ordered = sorted((item for item in others.items() if item[1]), key=lambda item: -item[1])
    named = [f"{number} {name}" for name, number in ordered[:MAX_OUTCOMES]]
    if rest := sum(number for _, number in ordered[MAX_OUTCOMES:]):
        named.append(f"{rest} other" if rest == 1 else f"{rest} others")
    return ", ".join([units.plural(count, "rollout"), *named])


Kind = Literal[
    "equal_answers",
    "malformed_paid",
    "length",
    "repetition",
    "copying",
    "fewer_turns",
    "component_falls",
    "component_excess",
    "failures",
    "unverified",
]
"""A pattern of reward hacking for which the audit searches (docs/hacking.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A finding of the reward-hacking audit: a pattern that is new and increases the reward.

    A pattern is new if earlier steps of the run did not have it, or had it less often.
    """

    kind: Kind
    environment: str
    onset: int
    """Estimated first step with the pattern."""
    step: int
    """Step at which the pattern was found."""
    before: float
    """Share of trajectories with the pattern in earlier steps.

    For `component_falls`, the mean of the reward component in earlier steps.
    """
    now: float
    """The same share or mean as `before`, but in the newest steps."""
    reward_before: float
    """Mean return in earlier steps, divided by the best possible return if it is known."""
    reward_now: float
    examples: tuple[str, ...]
    """Ids of trajectories, for `rayloom inspect`."""
    text: str
    """A sentence that describes the finding."""
