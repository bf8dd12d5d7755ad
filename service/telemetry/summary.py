"""Compute the content of summary.json from a run's records, and write the file.

The report and the last lines of the log use the same RunSummary, so that they always agree. A mean
of no values is None, never 0. The supervisor calls this module when a run ends.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

from actors.file_targets import regular_target
from actors.merge.report import MergeReport
from actors.trajectory_queue.ledger import LedgerCounts, TokenCounts
from actors.types import Outcome
from service.telemetry.records import EvaluationRecord, Finding, StageSeconds, StepRecord
from service.telemetry.totals import SUMMED, RunTotals

ASKED_EVALUATIONS = 20
AVERAGED_STEPS = 5
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The stored records from which a run's summary and report are made, oldest first.

    Records of steps that a return to a checkpoint has undone are left out.
    """

    steps: tuple[StepRecord, ...]
    """The steps whose records are kept (`service.store.retention`): the first, some of the older,
    and all of the newest steps."""
    evaluations: tuple[EvaluationRecord, ...]
    totals: RunTotals
    """Totals over all steps that were not undone, including those whose records are not kept."""
    num_terms: int
    """Number of the newest term; 0 for a run that never had a lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchTotals:
    """The difference between the log-probabilities of trainer and engines over a run, in nats."""

    mean_k3: float | None
    """Mean of the k3 estimate over steps, weighted by the steps' trained tokens."""
    max_abs_delta: float | None
    """Largest absolute difference of a single token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobChecks:
    """The worst results of the log-probability checks after a run's steps, and their duration.

    A check compares the log-probabilities that trainer and engines give to the tokens of a text.
    Each value except `share` is the largest of all steps, or None if no engine has answered.
    """

    tokens: float | None
    """Number of tokens of the longest text that trainer and engines have scored."""
    mean: float | None
    """Mean difference in nats; `max` is the largest difference of a single token."""
    max: float | None
    ratio: float | None
    """The difference divided by the largest difference that rounding may cause."""
    seconds: float | None
    """Duration of the check after one publication, in seconds."""
    share: float | None
    """Time of all checks after publications, divided by the time of all steps; None without steps.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """The evaluations of a run that summary.json contains.

    `first` and `last` are scheduled evaluations on the run's own task set, not on a named set of
    `evaluation.sets`. They are None if there was none.
    """

    first: EvaluationRecord | None
    last: EvaluationRecord | None
    asked: tuple[EvaluationRecord, ...] = ()
    """The newest evaluations that operators requested, in order."""
    sets: Mapping[str, EvaluationRecord] = field(default_factory=dict)
    """The last scheduled evaluation of each named task set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The content of summary.json; the fields have the names used in the file.

    A mean of no values is None.
    """

    name: str
    exit_reason: str | None
    steps: int
    planned_steps: int | None
    reward_first: float | None
    """Mean reward of the first five steps; `reward_last` is the mean reward of the last five."""
    reward_last: float | None
    is_reward_scaled: bool
    """Whether rewards are shares of the best possible return."""
    evaluation: Evaluations
    policy_version: int
    max_policy_age: int
    policy_age_bound: int | None
    """Largest allowed policy age in versions; None if unknown."""
    trajectories: int
    sampled_tokens: int
    """Number of sampled tokens in the trajectories of the trained steps."""
    trained_tokens: int
    packed_tokens: int
    inserted_tokens: int
    merge: MergeReport
    ledger: LedgerCounts
    """Counts of the rollouts of all steps that were not undone."""
    mismatch: MismatchTotals
    logprob_check_max: float | None
    logprob_check: LogprobChecks
    malformed_share: Mapping[Literal["first", "last"], float | None]
    """Share of malformed turns over the first and over the last five steps; None if unknown."""
    malformed_rewarded: int
    outcomes: Mapping[Outcome, int]
    tokens: TokenCounts
    """Counts of the sampled tokens by use, including attempts that no step used."""
    zero_variance_groups: int
    negative_return_groups: int
    skipped_steps: int
    terms: int
    stage_seconds: StageSeconds
    """Wall seconds by stage, summed over steps."""
    wall_s: float
    """Wall seconds of all terms."""
    versions: Mapping[str, str]
    peak_memory_bytes: int | None = None
    """Peak memory of all processes of the run together since its supervisor's start.

    None if the run has joined a cluster, or if the memory was not measured.
    """
    hacking: tuple[Finding, ...] = ()
    """The findings of the audit for reward hacking (docs/hacking.md)."""

    @property
    def num_resumes(self) -> int:
        """Number of terms after the first."""
        return max(0, self.terms - 1)

    def to_json(self) -> dict[str, Any]:
        """Return the tree to be written as JSON; a number that is not finite becomes null."""
        tree: dict[str, Any] = json.loads(_SUMMARY.dump_json(self))
        tree["merge"]["ratio"] = self.merge.ratio
        tree["ledger"]["is_balanced"] = self.ledger.is_balanced
        tree["tokens"]["trained_share"] = self.tokens.trained_share
        return tree


_SUMMARY = TypeAdapter(RunSummary)


def summarize_run(
    history: History,
    *,
    ledger: LedgerCounts,
    wall_s: float,
    versions: Mapping[str, str],
    name: str = "run",
    planned_steps: int | None = None,
    policy_age_bound: int | None = None,
    exit_reason: str | None = None,
    findings: Sequence[Finding] = (),
    peak_memory_bytes: int | None = None,
) -> RunSummary:
    """Return the summary of a run, which may have no steps yet.

    Args: wall_s: duration of all terms in seconds. versions: versions of vllm, ray, torch and other
    packages. findings: findings of the reward-hacking audit. peak_memory_bytes: see `RunSummary`.
    """
    steps, evaluations, totals = history.steps, history.evaluations, history.totals
    scheduled = [each for each in evaluations if each.is_charted]
    summed = dict.fromkeys(SUMMED, 0) | dict(totals.summed)
    return RunSummary(
        name=name,
        exit_reason=exit_reason,
        steps=steps[-1].step if steps else 0,
        planned_steps=planned_steps,
        reward_first=_mean_reward(steps[:AVERAGED_STEPS]),
        reward_last=_mean_reward(steps[-AVERAGED_STEPS:]),
        is_reward_scaled="scaled_reward_mean" in totals.statistics,
        evaluation=Evaluations(
            first=scheduled[0] if scheduled else None,
            last=scheduled[-1] if scheduled else None,
            asked=tuple(each for each in evaluations if not each.is_scheduled)[-ASKED_EVALUATIONS:],
            sets={each.name: each for each in evaluations if each.is_scheduled and each.name},
        ),
        policy_version=steps[-1].policy_version if steps else 0,
        max_policy_age=totals.max_policy_age,
        policy_age_bound=policy_age_bound,
        trajectories=summed["num_trajectories"],
        sampled_tokens=summed["num_sampled_tokens"],
        trained_tokens=summed["num_trained_tokens"],
        packed_tokens=summed["num_packed_tokens"],
        inserted_tokens=summed["num_inserted_tokens"],
        merge=replace(totals.merge, branches=_ordered(totals.merge.branches)),
        ledger=ledger,
        mismatch=MismatchTotals(
            mean_k3=totals.mean_k3,
            max_abs_delta=totals.greatest("mismatch_max"),
        ),
        logprob_check_max=totals.greatest("logprob_check_max"),
        logprob_check=LogprobChecks(
            **{
                each.name: totals.greatest(f"logprob_check_{each.name}")
                for each in fields(LogprobChecks)
                if each.name != "share"
            },
            share=_checked_share(totals),
        ),
        malformed_share={
            "first": _malformed_share(steps[:AVERAGED_STEPS]),
            "last": _malformed_share(steps[-AVERAGED_STEPS:]),
        },
        malformed_rewarded=summed["num_malformed_rewarded"],
        outcomes=_ordered(totals.outcomes),
        tokens=replace(totals.tokens, untrained=_ordered(totals.tokens.untrained)),
        zero_variance_groups=summed["num_zero_variance_groups"],
        negative_return_groups=summed["num_negative_return_groups"],
        skipped_steps=summed["is_skipped"],
        terms=history.num_terms,
        stage_seconds=StageSeconds(
            **{name: each.sum for name, each in totals.stage_seconds.items()}
        ),
        wall_s=wall_s,
        versions=dict(versions),
        peak_memory_bytes=peak_memory_bytes,
        hacking=tuple(findings),
    )


def _checked_share(totals: RunTotals) -> float | None:
    stage_s = sum(each.sum for each in totals.stage_seconds.values())
    return totals.checked_s / stage_s if stage_s > 0 else None


def write_summary(path: Path, summary: RunSummary) -> None:
    """Write summary.json by `write_aside`, so that a reader never sees a part of the file."""
    write_aside(path, json.dumps(summary.to_json(), indent=2, allow_nan=False) + "\n")


def write_aside(path: Path, text: str) -> None:
    """Replace the file `path` atomically: write and sync a temporary file, then rename it.

    If `path` is a symbolic link, the file to which it points is replaced.
    Raises: OSError, after removing the temporary file; also if `path` is not a regular file.
    """
    path = regular_target(path)
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


def _ordered(counts: Mapping[Key, int]) -> dict[Key, int]:
    return {key: count for key, count in Counter(counts).most_common() if count}
