"""The numbers of steps and evaluations, by name, that the run's page and the trackers draw."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from hashlib import blake2b

from actors.merge.report import EnvironmentReport
from actors.types import Outcome
from service.telemetry.records import EvaluationRecord, StepRecord

# ASCII characters that some trackers refuse in a name.
_NOT_TAKEN = re.compile(r"[^A-Za-z0-9_./\-\u0080-\U0010ffff]")
# Numbers that give the position of a step, which every point has anyway.
_NO_CURVES = frozenset({"step", "wall_time"})


def step_numbers(record: StepRecord) -> dict[str, float | None]:
    """Return the numbers of a step by name; a number that the record lacks is None.

    - Fields and statistics of the record keep their names.
    - Numbers that are computed here have other names, such as clip_fraction or tokens_per_second.
    - Numbers of one kind have a prefix: `stages.NAME`, `outcomes.NAME`, `untrained.CAUSE` (a share
      of the sampled tokens), `rewards.NAME`, `metrics.NAME`, and `environments.NAME/…` if the run
      has several environments.
    """
    counts = {
        each.name: value
        for each in fields(record)
        if isinstance(value := getattr(record, each.name), int | float)
    }
    low, high = record.value("clip_fraction_low"), record.value("clip_fraction_high")
    seconds = record.stages.total
    return {
        **counts,
        **{f"stages.{name}": value for name, value in record.stages.by_name().items()},
        **{f"outcomes.{name}": float(count) for name, count in record.outcomes.items()},
        **{f"untrained.{cause}": share for cause, share in record.tokens.causes()},
        **{f"rewards.{name}": value for name, value in record.reward_components.items()},
        **{f"metrics.{name}": value for name, value in record.logged_metrics.items()},
        **_environment_numbers(record.environments),
        **record.statistics,
        "reward": record.best_known_reward,
        "policy_age_max": record.policy_age_max,
        "policy_age_mean": record.value("policy_age_mean") or 0.0,
        "merge_ratio": record.merge.ratio,
        "clip_fraction": None if low is None or high is None else low + high,
        "malformed_share": _share(record.num_malformed_turns, record.num_turns),
        "tokens_per_second": _share(record.num_sampled_tokens, seconds),
        "tokens_per_trajectory": _share(record.num_sampled_tokens, record.num_trajectories),
        "turns_per_trajectory": _share(record.num_turns, record.num_trajectories),
        "trained_token_share": record.tokens.trained_share,
    }


def _environment_numbers(
    environments: Mapping[str, EnvironmentReport],
) -> dict[str, float | None]:
    return {
        f"environments.{name}/{what}": value
        for name, each in environments.items()
        for what, value in {
            "num_trajectories": float(each.num_trajectories),
            "reward_mean": each.reward_mean,
            "scaled_reward_mean": each.scaled_reward_mean,
            "tokens_per_trajectory": _share(each.num_sampled_tokens, each.num_trajectories),
            "turns_per_trajectory": _share(each.num_turns, each.num_trajectories),
            **_outcome_shares("outcomes", each.outcomes),
        }.items()
    }


def step_curves(record: StepRecord) -> dict[str, float]:
    """Return the known numbers of a step under the names that experiment trackers show.

    Such names are train/loss and stages/merge. Outcomes are shares of the step's trajectories.
    """
    ages = {name: record.value(name) for name in ("policy_age_mean", "policy_age_max")}
    known = {
        name.replace(".", "/", 1) if "." in name else f"train/{name}": float(value)
        for name, value in {**step_numbers(record), **ages}.items()
        if value is not None and name not in _NO_CURVES
    }
    return _cleaned({**known, **_outcome_shares("outcomes", record.outcomes)})


def evaluation_curves(record: EvaluationRecord, *, prefix: str) -> dict[str, float]:
    """Return the known numbers of an evaluation for trackers, each named prefix/NAME."""
    numbers = {
        "num_tasks": record.num_tasks,
        "policy_version": record.policy_version,
        "reward_mean": record.reward_mean,
        "scaled_reward_mean": record.scaled_reward_mean,
        "standard_error": record.standard_error,
        "majority_mean": record.majority_mean,
        **{f"pass_at_{k}": value for k, value in record.pass_at.items()},
    }
    known = {f"{prefix}/{name}": float(v) for name, v in numbers.items() if v is not None}
    return _cleaned({**known, **_outcome_shares(f"{prefix}/outcomes", record.outcomes)})


def _outcome_shares(prefix: str, outcomes: Mapping[Outcome, int]) -> dict[str, float]:
    total = sum(outcomes.values())
    return {f"{prefix}/{each}": outcomes.get(each, 0) / total for each in Outcome if total}


def _cleaned(curves: Mapping[str, float]) -> dict[str, float]:
    """Return the finite values under unique names that every tracker accepts."""
    finite = {name: value for name, value in curves.items() if math.isfinite(value)}
    names = {name: _clean_name(name) for name in finite}
    num_same = Counter(names.values())
    return {
        clean if num_same[clean] == 1 else f"{clean}_{_digest(name)}": finite[name]
        for name, clean in names.items()
    }


def _clean_name(name: str) -> str:
    return "".join(
        each if each.isascii() or unicodedata.category(each)[0] in "LMN" else f"u{ord(each):x}"
        for each in _NOT_TAKEN.sub("_", name)
    )


def _digest(name: str) -> str:
    return blake2b(name.encode(errors="surrogatepass"), digest_size=2).hexdigest()


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
