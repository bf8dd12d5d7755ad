"""What a run came to: the content of summary.json, derived from its records; pure but for the file.

The report and the closing lines are made from the same RunSummary, so that no two can disagree.
A mean over nothing is None, never 0. Called by the supervisor when a run ends.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter

from actors.merge.report import MergeReport
from actors.trajectory_queue.ledger import LedgerCounts
from actors.types import Outcome
from service.telemetry.records import EvaluationRecord, StageSeconds, StepRecord

AVERAGED_STEPS = 5
Key = TypeVar("Key")


class HistoryLike(Protocol):
    """A run along its surviving lineage; `service.store.lineage.History` is one."""

    @property
    def steps(self) -> Sequence[StepRecord]: ...
    @property
    def evaluations(self) -> Sequence[EvaluationRecord]: ...
    @property
    def num_terms(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchTotals:
    """Trainer against engine, nats. mean_k3: over steps, weighted by their trained tokens."""

    mean_k3: float | None
    max_abs_delta: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAndLast:
    """Of the first and of the last five steps; None where nothing was measured."""

    first: float | None
    last: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """The first and the last evaluation of a run; None where there was none."""

    first: EvaluationRecord | None
    last: EvaluationRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Every number of summary.json, under its name there; a mean is None where nothing was
    measured.
    """

    name: str
    exit_reason: str | None
    steps: int
    planned_steps: int | None
    reward_first: float | None
    """Mean over the first five steps; reward_last: over the last five."""
    reward_last: float | None
    is_reward_scaled: bool
    """Rewards are shares of the best possible return."""
    evaluation: Evaluations
    policy_version: int
    max_policy_age: int
    policy_age_bound: int | None
    """None where the caller did not say."""
    trajectories: int
    sampled_tokens: int
    """In the trajectories of the trained steps."""
    trained_tokens: int
    packed_tokens: int
    inserted_tokens: int
    merge: MergeReport
    ledger: LedgerCounts
    """Over the whole lineage."""
    mismatch: MismatchTotals
    logprob_check_max: float | None
    malformed_share: FirstAndLast
    malformed_rewarded: int
    outcomes: Mapping[Outcome, int]
    zero_variance_groups: int
    negative_return_groups: int
    skipped_steps: int
    terms: int
    stage_seconds: StageSeconds
    """Wall seconds summed over steps."""
    wall_s: float
    """Of all terms."""
    versions: Mapping[str, str]

    @property
    def num_resumes(self) -> int:
        """Terms after the first."""
        return max(0, self.terms - 1)

    def to_json(self) -> dict[str, Any]:
        """A tree of JSON values; a number that is not finite is null."""
        tree: dict[str, Any] = json.loads(_SUMMARY.dump_json(self))
        tree["merge"]["ratio"] = self.merge.ratio
        tree["ledger"]["is_balanced"] = self.ledger.is_balanced
        return tree


_SUMMARY = TypeAdapter(RunSummary)


def summarize_run(
    history: HistoryLike,
    *,
    ledger: LedgerCounts,
    wall_s: float,
    versions: Mapping[str, str],
    name: str = "run",
    planned_steps: int | None = None,
    policy_age_bound: int | None = None,
    exit_reason: str | None = None,
) -> RunSummary:
    """Sum up a run of any length, none included.

    wall_s: seconds of all terms. versions: of vllm, ray, torch and what else matters.
    """
    steps, evaluations = history.steps, history.evaluations
    return RunSummary(
        name=name,
        exit_reason=exit_reason,
        steps=steps[-1].step if steps else 0,
        planned_steps=planned_steps,
        reward_first=_mean_reward(steps[:AVERAGED_STEPS]),
        reward_last=_mean_reward(steps[-AVERAGED_STEPS:]),
        is_reward_scaled=any(record.value("scaled_reward_mean") is not None for record in steps),
        evaluation=Evaluations(
            first=evaluations[0] if evaluations else None,
            last=evaluations[-1] if evaluations else None,
        ),
        policy_version=steps[-1].policy_version if steps else 0,
        max_policy_age=max((record.policy_age_max for record in steps), default=0),
        policy_age_bound=policy_age_bound,
        trajectories=sum(record.num_trajectories for record in steps),
        sampled_tokens=sum(record.num_sampled_tokens for record in steps),
        trained_tokens=sum(record.num_trained_tokens for record in steps),
        packed_tokens=sum(record.num_packed_tokens for record in steps),
        inserted_tokens=sum(record.num_inserted_tokens for record in steps),
        merge=_merge_totals([record.merge for record in steps]),
        ledger=ledger,
        mismatch=_mismatch_totals(steps),
        logprob_check_max=_largest(record.value("logprob_check_max") for record in steps),
        malformed_share=FirstAndLast(
            first=_malformed_share(steps[:AVERAGED_STEPS]),
            last=_malformed_share(steps[-AVERAGED_STEPS:]),
        ),
        malformed_rewarded=sum(record.num_malformed_rewarded for record in steps),
        outcomes=_counts(record.outcomes for record in steps),
        zero_variance_groups=sum(record.num_zero_variance_groups for record in steps),
        negative_return_groups=sum(record.num_negative_return_groups for record in steps),
        skipped_steps=sum(record.is_skipped for record in steps),
        terms=history.num_terms,
        stage_seconds=_stage_totals([record.stages for record in steps]),
        wall_s=wall_s,
        versions=dict(versions),
    )


def write_summary(path: Path, summary: RunSummary) -> None:
    """Write summary.json aside and rename it: a reader finds the old file or the whole new one."""
    write_aside(path, json.dumps(summary.to_json(), indent=2, allow_nan=False) + "\n")


def write_aside(path: Path, text: str) -> None:
    """Write a file durably under another name, then rename it over `path`.

    Raises: OSError, with nothing left behind.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def _mean_reward(steps: Sequence[StepRecord]) -> float | None:
    known = [value for record in steps if (value := record.best_known_reward) is not None]
    return sum(known) / len(known) if known else None


def _malformed_share(steps: Sequence[StepRecord]) -> float | None:
    turns = sum(record.num_turns for record in steps)
    return sum(record.num_malformed_turns for record in steps) / turns if turns else None


def _merge_totals(reports: Sequence[MergeReport]) -> MergeReport:
    return MergeReport(
        samples_before=sum(report.samples_before for report in reports),
        samples_after=sum(report.samples_after for report in reports),
        branches=_counts(report.branches for report in reports),
        num_saved_tokens=sum(report.num_saved_tokens for report in reports),
        num_masked_tokens=sum(report.num_masked_tokens for report in reports),
    )


def _mismatch_totals(steps: Sequence[StepRecord]) -> MismatchTotals:
    weight = total = 0.0
    for record in steps:
        if (k3 := record.value("mismatch_k3_mean")) is not None:
            weight += record.num_trained_tokens
            total += record.num_trained_tokens * k3
    return MismatchTotals(
        mean_k3=total / weight if weight else None,
        max_abs_delta=_largest(record.value("mismatch_max") for record in steps),
    )


def _stage_totals(stages: Sequence[StageSeconds]) -> StageSeconds:
    names = [stage.name for stage in fields(StageSeconds)]
    return StageSeconds(**{name: sum(getattr(each, name) for each in stages) for name in names})


def _counts(parts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    """Summed by key, the most frequent first; zeros left out."""
    totals: Counter[Key] = Counter()
    for part in parts:
        totals.update(part)
    return {key: count for key, count in totals.most_common() if count}


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
