"""What a run came to: the content of summary.json, derived from its records; pure but for the file.

The report and the closing lines are made from the same RunSummary, so that no two can disagree.
A mean over nothing is None, never 0. Called by the supervisor when an epoch ends.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from actors.trajectory_queue.ledger import LedgerCounts
from service.telemetry.records import EvaluationRecord, StageSeconds, StepRecord

EDGE_STEPS = 5


class HistoryLike(Protocol):
    """A run along its surviving lineage; `service.store.lineage.History` is one."""

    @property
    def steps(self) -> Sequence[StepRecord]: ...
    @property
    def evaluations(self) -> Sequence[EvaluationRecord]: ...
    @property
    def num_terms(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTotals:
    """Rollouts, over the whole lineage. evicted: by reason, only those that occurred."""

    admitted: int = 0
    trained: int = 0
    evicted: Mapping[str, int] = field(default_factory=dict)
    in_flight: int = 0

    @classmethod
    def of(cls, counts: LedgerCounts) -> LedgerTotals:
        return cls(
            admitted=counts.admitted,
            trained=counts.trained,
            evicted={reason.value: count for reason, count in counts.evicted.items()},
            in_flight=counts.in_flight,
        )

    @property
    def num_evicted(self) -> int:
        return sum(self.evicted.values())

    @property
    def is_balanced(self) -> bool:
        return self.admitted == self.trained + self.num_evicted + self.in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeTotals:
    """samples_before: turns that came in; samples_after: samples they became."""

    samples_before: int
    samples_after: int
    mismatches: Mapping[str, int]

    @property
    def ratio(self) -> float | None:
        """Turns a sample, >= 1; None before anything was merged."""
        return self.samples_before / self.samples_after if self.samples_after else None


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
class RunSummary:
    """Every number of summary.json, under its name there.

    is_reward_scaled: rewards are shares of the best possible return. policy_age_bound: None where
    the caller did not say. stages: wall seconds summed over steps. wall_s: of all epochs.
    num_resumes: epochs after the first. sampled_tokens: in the trajectories of the trained steps.
    """

    name: str
    exit_reason: str | None
    steps: int
    planned_steps: int | None
    reward: FirstAndLast
    is_reward_scaled: bool
    evaluation_first: EvaluationRecord | None
    evaluation_last: EvaluationRecord | None
    policy_version: int
    max_policy_age: int
    policy_age_bound: int | None
    num_trajectories: int
    sampled_tokens: int
    trained_tokens: int
    packed_tokens: int
    inserted_tokens: int
    merge: MergeTotals
    ledger: LedgerTotals
    mismatch: MismatchTotals
    parity_max: float | None
    malformed_share: FirstAndLast
    malformed_rewarded: int
    outcomes: Mapping[str, int]
    zero_variance_groups: int
    skipped_steps: int
    num_epochs: int
    stages: StageSeconds
    wall_s: float
    versions: Mapping[str, str]

    @property
    def num_resumes(self) -> int:
        return max(0, self.num_epochs - 1)

    def to_json(self) -> dict[str, Any]:
        """A tree of JSON values; nothing in it is NaN or infinite."""
        ledger, merge = self.ledger, self.merge
        tree = {
            "name": self.name,
            "exit_reason": self.exit_reason,
            "steps": self.steps,
            "planned_steps": self.planned_steps,
            "reward_first": self.reward.first,
            "reward_last": self.reward.last,
            "is_reward_scaled": self.is_reward_scaled,
            "evaluation": {
                "first": _evaluation_json(self.evaluation_first),
                "last": _evaluation_json(self.evaluation_last),
            },
            "policy_version": self.policy_version,
            "max_policy_age": self.max_policy_age,
            "policy_age_bound": self.policy_age_bound,
            "trajectories": self.num_trajectories,
            "sampled_tokens": self.sampled_tokens,
            "trained_tokens": self.trained_tokens,
            "packed_tokens": self.packed_tokens,
            "inserted_tokens": self.inserted_tokens,
            "merge": {**asdict(merge), "ratio": merge.ratio},
            "ledger": {**asdict(ledger), "is_balanced": ledger.is_balanced},
            "mismatch": asdict(self.mismatch),
            "parity_max": self.parity_max,
            "malformed_share": asdict(self.malformed_share),
            "malformed_rewarded": self.malformed_rewarded,
            "outcomes": dict(self.outcomes),
            "zero_variance_groups": self.zero_variance_groups,
            "skipped_steps": self.skipped_steps,
            "epochs": self.num_epochs,
            "stage_seconds": self.stages.by_name(),
            "wall_s": self.wall_s,
            "versions": dict(self.versions),
        }
        return {key: _finite(value) for key, value in tree.items()}


def summarize_run(
    history: HistoryLike,
    *,
    ledger: LedgerTotals,
    wall_s: float,
    versions: Mapping[str, str],
    name: str = "run",
    planned_steps: int | None = None,
    policy_age_bound: int | None = None,
    exit_reason: str | None = None,
) -> RunSummary:
    """Sum up a run of any length, none included.

    wall_s: seconds of all epochs. versions: of vllm, ray, torch and what else matters.
    """
    steps, evaluations = history.steps, history.evaluations
    return RunSummary(
        name=name,
        exit_reason=exit_reason,
        steps=steps[-1].step if steps else 0,
        planned_steps=planned_steps,
        reward=_first_and_last(steps, _mean_reward),
        is_reward_scaled=any(record.scaled_reward_mean is not None for record in steps),
        evaluation_first=evaluations[0] if evaluations else None,
        evaluation_last=evaluations[-1] if evaluations else None,
        policy_version=steps[-1].policy_version if steps else 0,
        max_policy_age=max((record.policy_age_max for record in steps), default=0),
        policy_age_bound=policy_age_bound,
        num_trajectories=sum(record.num_trajectories for record in steps),
        sampled_tokens=sum(record.sampled_tokens for record in steps),
        trained_tokens=sum(record.trained_tokens for record in steps),
        packed_tokens=sum(record.packed_tokens for record in steps),
        inserted_tokens=sum(record.inserted_tokens for record in steps),
        merge=_merge_totals(steps),
        ledger=ledger,
        mismatch=_mismatch_totals(steps),
        parity_max=_largest(record.parity_max for record in steps),
        malformed_share=_first_and_last(steps, _malformed_share),
        malformed_rewarded=sum(record.malformed_rewarded for record in steps),
        outcomes=_counts(record.outcomes for record in steps),
        zero_variance_groups=sum(record.zero_variance_groups for record in steps),
        skipped_steps=sum(record.is_skipped for record in steps),
        num_epochs=history.num_terms,
        stages=_stage_totals(steps),
        wall_s=wall_s,
        versions=dict(versions),
    )


def evaluation_reward(record: EvaluationRecord) -> float | None:
    """The scaled reward where the environment knows the best return, else the plain one."""
    scaled = record.scaled_reward_mean
    return record.reward_mean if scaled is None else scaled


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


def _first_and_last(
    steps: Sequence[StepRecord], measure: Callable[[Sequence[StepRecord]], float | None]
) -> FirstAndLast:
    return FirstAndLast(first=measure(steps[:EDGE_STEPS]), last=measure(steps[-EDGE_STEPS:]))


def _mean_reward(steps: Sequence[StepRecord]) -> float | None:
    known = _known(record.best_known_reward for record in steps)
    return sum(known) / len(known) if known else None


def _malformed_share(steps: Sequence[StepRecord]) -> float | None:
    turns = sum(record.turns for record in steps)
    return sum(record.malformed_turns for record in steps) / turns if turns else None


def _merge_totals(steps: Sequence[StepRecord]) -> MergeTotals:
    return MergeTotals(
        samples_before=sum(record.samples_before for record in steps),
        samples_after=sum(record.samples_after for record in steps),
        mismatches=_counts(record.mismatches for record in steps),
    )


def _mismatch_totals(steps: Sequence[StepRecord]) -> MismatchTotals:
    weight = total = 0.0
    for record in steps:
        if record.mismatch_k3 is not None and math.isfinite(record.mismatch_k3):
            weight += record.trained_tokens
            total += record.trained_tokens * record.mismatch_k3
    return MismatchTotals(
        mean_k3=total / weight if weight else None,
        max_abs_delta=_largest(record.mismatch_max for record in steps),
    )


def _stage_totals(steps: Sequence[StepRecord]) -> StageSeconds:
    return StageSeconds(
        **{
            stage.name: sum(getattr(record.stages, stage.name) for record in steps)
            for stage in fields(StageSeconds)
        }
    )


def _counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Summed by key, the most frequent first; zeros left out."""
    totals: Counter[str] = Counter()
    for part in parts:
        for key, count in part.items():
            totals[key] += count
    return {key: count for key, count in totals.most_common() if count}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _largest(values: Iterable[float | None]) -> float | None:
    return max(_known(values), default=None)


def _evaluation_json(record: EvaluationRecord | None) -> dict[str, Any] | None:
    return None if record is None else record.to_json()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
