"""The vocabulary that every room shares: turns, trajectories, rollouts, groups.

Plain frozen values; no Ray, no torch. Token ids are the source of truth: a trajectory holds what
was sent to the engine and what came back, never text. Words and rules follow docs/semantics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.expert_records import ExpertIndices
from actors.lineage import Lineage

TokenIds = NDArray[np.int32]
LogProbs = NDArray[np.float32]


class FinishReason(StrEnum):
    """Why the engine stopped a turn."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Outcome(StrEnum):
    """How a trajectory ended. Each one has exactly one."""

    COMPLETED = "completed"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_CONTEXT = "truncated_context"
    MAX_TURNS = "max_turns"
    MALFORMED_TOOL_CALL = "malformed_tool_call"
    WALL_TIMEOUT = "wall_timeout"
    STALE = "stale"
    CANCELLED = "cancelled"
    AGENT_ERROR = "agent_error"
    ENVIRONMENT_ERROR = "environment_error"
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    REWARD_ERROR = "reward_error"
    EMPTY = "empty"
    TOKEN_MISALIGNED = "token_misaligned"


PLAYED_OUT = frozenset({Outcome.COMPLETED, Outcome.MAX_TURNS, Outcome.MALFORMED_TOOL_CALL})
TRUNCATIONS = frozenset({Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_CONTEXT})


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Sampled tokens [start, end) of one turn that one policy version sampled."""

    version: int
    start: int
    end: int


_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_EXPERT_TYPES = (np.dtype(np.uint8), np.dtype(np.int16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call.

    prompt_token_ids: [P] int32, exactly the ids sent to the engine.
    sampled_token_ids: [A] int32, exactly the ids that came back, stop token included.
    logprobs: [A] float32, nats, of the behaviour policy (processed: temperature applied).
    version_spans: contiguous, covering [0, A).
    reward: of this turn, with its named components (their sum is not required to be the reward).
    token_rewards: [A] float32, what each sampled token earned, their sum is the reward; None: not
    recorded. expert_indices: [R, L, K] uint8 or int16, the K experts that each of L routed layers
    chose in the forward passes that processed the first R <= A sampled tokens (an engine does not
    process the last one); None: not recorded.
    Raises: ValueError for a column of another type or of more dimensions, or one that is not in one
    piece of memory: what merges and stores turns joins their bytes. Whether their lengths and
    numbers fit together is asked later (`actors.merge.misalignment`), so that a turn that does not
    can be shown.
    """

    prompt_token_ids: TokenIds
    sampled_token_ids: TokenIds
    logprobs: LogProbs
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    reward: float = 0.0
    reward_components: Mapping[str, float] = field(default_factory=dict)
    is_malformed: bool = False
    token_rewards: NDArray[np.float32] | None = None
    expert_indices: ExpertIndices | None = None

    def __post_init__(self) -> None:
        _check_column("prompt_token_ids", self.prompt_token_ids, _INT32)
        _check_column("sampled_token_ids", self.sampled_token_ids, _INT32)
        _check_column("logprobs", self.logprobs, _FLOAT32)
        if self.token_rewards is not None:
            _check_column("token_rewards", self.token_rewards, _FLOAT32)
        experts = self.expert_indices
        if experts is not None and (experts.dtype not in _EXPERT_TYPES or experts.ndim != 3):
            raise ValueError(
                f"turn: expert_indices of type {experts.dtype} and shape {experts.shape}, expected "
                "[tokens, layers, experts] of uint8 or int16; convert them where they are recorded"
            )

    @property
    def num_sampled(self) -> int:
        return int(self.sampled_token_ids.shape[0])


def _check_column(name: str, column: NDArray[Any], wanted: np.dtype[Any]) -> None:
    if column.dtype == wanted and column.ndim == 1 and column.flags.c_contiguous:
        return
    lies = "" if column.flags.c_contiguous else ", not in one piece of memory"
    raise ValueError(
        f"turn: {name} of type {column.dtype} and shape {column.shape}{lies}, expected one row of "
        f"{wanted}; convert it where it is recorded, with np.ascontiguousarray(values, {wanted})"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to play: what an environment's `reset` receives.

    task_id: stable and unique in its source. seed: every random choice of the environment derives
    from it, so that the members of a group play the same game. data: JSON-like, by environment.
    """

    task_id: str
    environment: str
    seed: int
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAssignment:
    """A rollout handed to an environment actor: which attempt of which member of which group."""

    rollout_id: str
    group_id: str
    group_number: int
    attempt: int
    task: Task

    @property
    def trajectory_id(self) -> str:
        return f"{self.rollout_id}.a{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds that one trajectory spent; wall is from reset to the outcome."""

    generate_s: float = 0.0
    environment_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt of one rollout: its turns, rewards and outcome.

    best_return: the return of best possible play, where the environment knows it.
    render_breaks: reasons why the history could not be appended to, with their counts.
    detail: one sentence on an outcome that is not `completed`; never a payload.
    lineage: which turns continue which; None: not known, to be found by comparison.
    """

    rollout_id: str
    group_id: str
    group_number: int
    attempt: int
    task_id: str
    environment: str
    turns: tuple[Turn, ...]
    outcome: Outcome
    best_return: float | None = None
    num_inserted_tokens: int = 0
    render_breaks: Mapping[str, int] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)
    detail: str = ""
    lineage: Lineage | None = None

    @property
    def trajectory_id(self) -> str:
        return f"{self.rollout_id}.a{self.attempt}"

    @property
    def episode_return(self) -> float:
        """The sum of the turn rewards; merging turns does not change it."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def num_sampled(self) -> int:
        return sum(turn.num_sampled for turn in self.turns)

    @property
    def is_truncated(self) -> bool:
        return self.outcome in TRUNCATIONS

    @property
    def is_graded(self) -> bool:
        """Whether its return may stand in a baseline as it is.

        What was played to an end of its own is graded; what was cut off or broke off only where
        its last turn was scored; a score that could not be had is none.
        """
        if self.outcome in PLAYED_OUT:
            return True
        if self.outcome is Outcome.REWARD_ERROR:
            return False
        return bool(self.turns) and bool(
            self.turns[-1].reward_components or self.turns[-1].reward != 0.0
        )

    @property
    def num_malformed_turns(self) -> int:
        return sum(turn.is_malformed for turn in self.turns)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version that sampled a token; None when nothing was sampled."""
        seen = [span.version for turn in self.turns for span in turn.version_spans]
        return (min(seen), max(seen)) if seen else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary:
    """What travels through the queue actor beside the reference: metadata, never tokens."""

    rollout_id: str
    group_id: str
    group_number: int
    attempt: int
    task_id: str
    environment: str
    outcome: Outcome
    episode_return: float
    best_return: float | None
    num_turns: int
    num_sampled: int
    num_malformed_turns: int
    oldest_version: int | None
    newest_version: int | None
    num_bytes: int
    timings: Timings
    num_inserted_tokens: int = 0
    render_breaks: Mapping[str, int] = field(default_factory=dict)
    detail: str = ""
    is_graded: bool = True

    @property
    def scaled_return(self) -> float | None:
        """Return over the best possible one; None where the environment does not know it."""
        return None if not self.best_return else self.episode_return / self.best_return


def summarize(trajectory: Trajectory, *, num_bytes: int) -> TrajectorySummary:
    """Describe a trajectory for the queue. num_bytes: size of its payload, bytes."""
    versions = trajectory.versions
    return TrajectorySummary(
        rollout_id=trajectory.rollout_id,
        group_id=trajectory.group_id,
        group_number=trajectory.group_number,
        attempt=trajectory.attempt,
        task_id=trajectory.task_id,
        environment=trajectory.environment,
        outcome=trajectory.outcome,
        episode_return=trajectory.episode_return,
        best_return=trajectory.best_return,
        num_turns=len(trajectory.turns),
        num_sampled=trajectory.num_sampled,
        num_malformed_turns=trajectory.num_malformed_turns,
        oldest_version=versions[0] if versions else None,
        newest_version=versions[1] if versions else None,
        num_bytes=num_bytes,
        timings=trajectory.timings,
        num_inserted_tokens=trajectory.num_inserted_tokens,
        render_breaks=trajectory.render_breaks,
        detail=trajectory.detail,
        is_graded=trajectory.is_graded,
    )
