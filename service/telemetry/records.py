"""What the loop writes down: one record a training step, one an evaluation.

Records are stored as they are, and the log line, the metrics, the report and summary.json are all
made from them, so that no two of these can disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Wall seconds that the loop stood at each stage of a step; they add up to the step's time.

    collect: the wait for closed groups. score: by a reference or a critic, before the rewards are
    shaped; 0 where the algorithm asks for none. publish: gathering the weights and the wait for the
    engines; with a lag the loop goes on, and waits only for engines that still hold the version
    before.
    """

    collect: float = 0.0
    merge: float = 0.0
    score: float = 0.0
    train: float = 0.0
    publish: float = 0.0
    checkpoint: float = 0.0
    evaluate: float = 0.0

    def by_name(self) -> dict[str, float]:
        return asdict(self)

    @property
    def total(self) -> float:
        return sum(self.by_name().values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step.

    step: 1, 2, …; policy_version: what the engines hold after it. reward_mean: mean return of the
    step's graded trajectories; scaled_reward_mean: over the best possible return, where known.
    Ages in versions; mismatch_* in nats (semantics 24), None when no token was of the trainer's
    version; parity_max: largest |trainer - engine| on the fixed prompt after the publish.
    statistics: of the loss and the rewards, by name (`statistic_names`); what is not known is
    absent. Empty in a record that an older version stored.
    """

    step: int
    policy_version: int
    wall_time: float
    reward_mean: float | None
    scaled_reward_mean: float | None
    num_trajectories: int
    outcomes: Mapping[str, int]
    malformed_turns: int
    turns: int
    sampled_tokens: int
    trained_tokens: int
    packed_tokens: int
    samples_before: int
    samples_after: int
    mismatches: Mapping[str, int]
    inserted_tokens: int
    zero_variance_groups: int
    malformed_rewarded: int
    policy_age_max: int
    policy_age_mean: float
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    entropy: float | None
    clip_fraction: float | None
    ratio_max: float | None
    effective_sample_size: float | None
    mismatch_k3: float | None
    mismatch_max: float | None
    parity_max: float | None
    is_skipped: bool
    stages: StageSeconds = field(default_factory=StageSeconds)
    statistics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> StepRecord:
        return cls(**{**tree, "stages": StageSeconds(**tree["stages"])})

    @property
    def best_known_reward(self) -> float | None:
        """The scaled reward where the environment knows the best return, else the plain one."""
        return self.reward_mean if self.scaled_reward_mean is None else self.scaled_reward_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """Held-out tasks at temperature 0, played by `policy_version`; counted apart."""

    step: int
    policy_version: int
    num_tasks: int
    reward_mean: float | None
    scaled_reward_mean: float | None
    outcomes: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> EvaluationRecord:
        return cls(**tree)
