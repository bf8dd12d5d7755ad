"""Compute the results of an evaluation: avg@n, pass@k and majority@n over its rollouts. Pure.

A rollout that ended with an error (`UNSCORED`) does not count as one of the n samples, so it cannot
lower the results. Such a rollout is counted only in the outcomes. The value of a sample is its
return, divided by the best possible return if that is known.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import comb, sqrt
from statistics import fmean, stdev

from actors.environment.evaluation import EvaluationSet
from actors.environment.settings import Sampling
from actors.outcomes import UNSCORED
from actors.types import TrajectorySummary
from service.telemetry.records import MAX_SAMPLES, EvaluationRecord, EvaluationSample


def evaluation_record(
    step: int,
    summaries: Sequence[TrajectorySummary],
    *,
    version: int,
    sampling: Sampling,
    name: str = "",
    is_scheduled: bool = True,
) -> EvaluationRecord:
    """Compute the results of an evaluation from the summaries of its rollouts.

    pass@k leaves out tasks with fewer than k scored samples.
    Args: step: the last finished step when the evaluation began. version: the newest policy version
    at that time. name: name of the task set; empty for the run's own set.
    """
    scored = [each for each in summaries if is_scored(each)]
    scaled = [each.scaled_return for each in scored if each.scaled_return is not None]
    tasks: dict[str, list[TrajectorySummary]] = {}
    for each in scored:
        tasks.setdefault(each.task_id, []).append(each)
    values = [[value_of(each) for each in task] for task in tasks.values()]
    passed = [(len(task), sum(value >= sampling.pass_reward for value in task)) for task in values]
    pass_at = {k: _mean([pass_at_k(n, c, k=k) for n, c in passed if n >= k]) for k in sampling.ks}
    newest = [each.newest_version for each in summaries if each.newest_version is not None]
    return EvaluationRecord(
        step=step,
        policy_version=version,
        num_tasks=len({summary.task_id for summary in summaries}),
        reward_mean=_mean([each.episode_return for each in scored]),
        scaled_reward_mean=_mean(scaled),
        standard_error=standard_error(values),
        majority_mean=majority_mean(list(tasks.values())),
        outcomes=Counter(summary.outcome for summary in summaries),
        num_failed=len(summaries) - len(scored),
        name=name,
        is_scheduled=is_scheduled,
        temperature=sampling.temperature,
        num_samples=sampling.num_samples,
        pass_reward=sampling.pass_reward,
        pass_at={k: value for k, value in pass_at.items() if value is not None},
        last_policy_version=max(newest, default=None),
        wall_time=time.time(),
        samples=tuple(
            EvaluationSample(
                task_id=each.task_id,
                outcome=each.outcome,
                episode_return=each.episode_return,
                text=each.text,
            )
            for each in summaries
            if each.text is not None
        )[:MAX_SAMPLES],
    )


def sampling_of_parts(sets: Sequence[EvaluationSet]) -> Sampling:
    """Return the sampling settings to store in the record of an evaluation of all held-out tasks.

    The held-out tasks consist of the sets with `is_part`. If all these sets have the same settings,
    return them. Otherwise, return the first set's settings without pass@k.
    """
    first, *others = (each.sampling for each in sets if each.is_part)
    return first if all(each == first for each in others) else replace(first, ks=())


def evaluation_file(step: int, what: str) -> str:
    """Return the name, without suffix, of the file that stores an evaluation's rollouts.

    Args: what: a text that distinguishes the evaluations of a step.
    Example: evaluation_file(20, "term-0001") -> step-000020-term-0001
    """
    return f"step-{step:06d}-{what}"


def is_scored(summary: TrajectorySummary) -> bool:
    """Return whether the rollout has a return that counts in the results.

    A rollout that was truncated counts. A rollout does not count if it has no sampled token or
    ended with an error.
    """
    return summary.num_sampled > 0 and summary.outcome not in UNSCORED


def value_of(summary: TrajectorySummary) -> float:
    """Return the rollout's return as a share of the best possible return.

    If the best possible return is not known, return the plain return.
    """
    scaled = summary.scaled_return
    return summary.episode_return if scaled is None else scaled


def pass_at_k(num_samples: int, num_passed: int, *, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples passes.

    The estimate is 1 - C(n - c, k) / C(n, k). Source: Chen et al., Evaluating Large Language Models
    Trained on Code (arXiv:2107.03374), equation 1.

    Args: num_samples: n, samples of one task. num_passed: c, passed ones among them. k: at most n.
    Example: pass_at_k(4, 1, k=2) -> 0.5, which is 1 - 3 / 6
    """
    assert 0 <= num_passed <= num_samples and 1 <= k <= num_samples
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def standard_error(tasks: Sequence[Sequence[float]]) -> float | None:
    """Return the standard error of an evaluation's mean over tasks; None with fewer than two tasks.

    The result is s / sqrt(T), where s is the standard deviation (divisor T - 1) of the values of
    the T tasks. The value of a task is the mean of its samples.
    Args: tasks: the values of each task's samples.

    Example: standard_error([[1, 0], [1, 1], [0, 0]]) -> 0.289, which is 0.5 / sqrt(3)
    """
    means = [fmean(task) for task in tasks if task]
    return stdev(means) / sqrt(len(means)) if len(means) > 1 else None


def majority_mean(tasks: Sequence[Sequence[TrajectorySummary]]) -> float | None:
    """Return majority@n: the mean over tasks of the value of the task's most frequent answer.

    A sample without an answer does not vote. If no sample of a task votes, the task counts with the
    mean value of all its samples. Return None if no sample of any task has an answer.
    """
    if not any(each.answer is not None for task in tasks for each in task):
        return None
    return _mean([majority([(each.answer, value_of(each)) for each in task]) for task in tasks])


def majority(votes: Sequence[tuple[str | None, float]]) -> float:
    """Return the mean value of those samples of a task that have the most frequent answer.

    If several answers are equally frequent, the samples of all these answers count. A sample
    without an answer (None) has no vote.
    Args: votes: the answer and the value of each sample.
    Example: majority([("7", 1), ("7", 1), ("8", 0)]) -> 1;
        majority([("7", 1), ("8", 0), ("9", 0), (None, 0)]) -> 0.333
    """
    counts = Counter(answer for answer, _ in votes if answer is not None)
    most = max(counts.values(), default=0)
    chosen = [value for answer, value in votes if answer is not None and counts[answer] == most]
    return fmean(chosen or [value for _, value in votes])


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
