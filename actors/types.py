"""The types that all packages share: turns, samples, trajectories, rollouts.

The types are plain frozen values, without Ray and torch. Token ids are the source of truth: a
trajectory holds the ids that the engine received and returned, never text. Terms and rules follow
docs/semantics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.expert_records import ExpertIndices, ExpertRecords

TokenIds = NDArray[np.int32]
LogProbs = NDArray[np.float32]
# The version of a token that is not trained, in a sample's versions.
NO_VERSION = -1
# Added to the number of a version that a recovery has undone. Other weights get that number later,
# and the tokens of the undone version must not be attributed to them.
UNDONE = 1 << 30
# The environment of the tasks that external agents play over HTTP.
SESSION = "session"
# The environment of groups of trajectories that were sampled elsewhere and uploaded whole.
UPLOADED = "uploaded"


class Dtype(StrEnum):
    """Type of forward and backward computations; master weights and reductions are float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class FinishReason(StrEnum):
    """The reason why the engine stopped a turn."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Outcome(StrEnum):
    """The end of a trajectory. Each trajectory has exactly one."""

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


class LeftOutReason(StrEnum):
    """The reason why a sampled turn of a session is not trained."""

    AUXILIARY = "auxiliary"
    """The client marked the turn as not part of the task."""
    UNSEEN = "unseen"
    """No client ever received the turn."""
    TITLE = "title"
    """The turn names the conversation, and `sessions.titles` is `leave_out`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """The range [start, end) of a turn's sampled tokens that one policy version sampled."""

    version: int
    start: int
    end: int


class BranchReason(StrEnum):
    """The reason why a prompt does not extend a sample."""

    RETOKENISED = "retokenised"
    TEMPLATE = "template"
    HISTORY_REWRITTEN = "history_rewritten"
    TOOLS_CHANGED = "tools_changed"


_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_EXPERT_TYPES = (np.dtype(np.uint8), np.dtype(np.int16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A recorded model call with its whole prompt; the sample builder merges turns into samples.

    Raises: ValueError if an array has a wrong type or a wrong number of dimensions.
    `actors.misalignment` checks whether lengths and numbers fit together.
    """

    prompt_token_ids: TokenIds
    """[P] int32, exactly the ids sent to the engine."""
    sampled_token_ids: TokenIds
    """[A] int32, exactly the ids that the engine returned, including the stop token."""
    logprobs: LogProbs
    """[A] float32, nats, of the behaviour policy, after applying the temperature."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    """The policy versions of the sampled tokens, in contiguous spans that cover [0, A)."""
    reward: float = 0.0
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward; their sum is not required to be the reward."""
    is_malformed: bool = False
    token_rewards: NDArray[np.float32] | None = None
    """[A] float32, the reward of each sampled token; the sum over the tokens is the turn's reward.
    None if rewards by token were not recorded.
    """
    expert_indices: ExpertIndices | None = None
    """[R, L, K] uint8 or int16, the K experts that each of L routed layers chose in the forward
    passes that processed the first R <= A sampled tokens. None if they were not recorded."""
    state_key: str | None = None
    """The environment's key of the state before the turn; None if the environment gave no key."""

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
    if column.dtype != wanted or column.ndim != 1:
        raise ValueError(
            f"turn: {name} of type {column.dtype} and shape {column.shape}, expected one row of "
            f"{wanted}; convert it where it is recorded, with np.asarray(values, {wanted})"
        )


class TurnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a turn in its sample, with the turn's reward and finish reason.

    The turn's prompt is the part of the sample's ids before `start`. The class is a Struct because
    a Struct is created six times faster than a frozen dataclass, and every turn has a span.
    """

    index: int
    """Index of the turn in its trajectory, in the order of play, from 0."""
    start: int
    end: int
    """The end of the turn's sampled tokens, which are the sample's tokens [start, end)."""
    finish_reason: FinishReason
    reward: float = 0.0
    reward_components: Mapping[str, float] = msgspec.field(default_factory=dict)
    is_malformed: bool = False
    state_key: str | None = None
    """Key of the state that the turn met (`Turn.state_key`)."""

    @property
    def num_sampled(self) -> int:
        return self.end - self.start

    @property
    def tokens(self) -> slice:
        """The slice that selects the turn's sampled tokens from an array of the sample.

        Example: `sample.logprobs[turn.tokens]`
        """
        return slice(self.start, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence of training data, made of turns that each extend the previous turn.

    The sample's arrays are read-only.
    Example: prompts [10,20,30] and [10,20,30,40,50,60,70], actions [40,50] and [80,90] give the ids
    [10,20,30,40,50,60,70,80,90] with the mask [0,0,0,1,1,0,0,1,1]. An observation may follow the
    last turn. A critic uses it to estimate the value of a truncated trajectory's last state.
    """

    trajectory_id: str
    turns: tuple[TurnSpan, ...]
    """The turns of the sample, at least one, in the order of play."""
    token_ids: TokenIds
    """[T] int32, prompt, sampled tokens and observations."""
    logprobs: LogProbs
    """[T] float32, nats, of the behaviour policy; 0 for tokens with mask 0."""
    versions: NDArray[np.int32]
    """[T] int32, the policy version that sampled each trained token, with UNDONE added if a
    recovery has undone it; NO_VERSION for other tokens.
    """
    token_rewards: NDArray[np.float32] | None = None
    """[T] float32, 0 for tokens that were not sampled. None if no turn of the trajectory recorded
    rewards by token. If only some turns did, each other turn has its whole reward at its last
    token.
    """
    experts: ExpertRecords | None = None
    """Recorded routing, each record at the position of the token whose forward pass it describes,
    also for tokens with mask 0. None if no routing was recorded.
    """
    parent: int | None = None
    """Index of the earlier sample that shares the longest prefix with this sample's first prompt.
    None if no earlier sample shares a token."""
    num_shared: int = 0
    """Number of tokens that the sample shares with its parent, from the start to the branch."""
    branch_reason: BranchReason | None = None
    """The reason why the sample's first turn extended no sample; None for the first sample."""

    @property
    def mask(self) -> NDArray[np.uint8]:
        """[T] uint8, 1 for sampled tokens with a finite log-probability, which can be trained."""
        return (self.versions != NO_VERSION).view(np.uint8)

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the first turn's prompt."""
        return self.turns[0].start

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.versions != NO_VERSION))

    def without_experts(self) -> Sample:
        """Return the sample without expert records, for a model that uses its own router."""
        return self if self.experts is None else replace(self, experts=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task to play: the argument of an environment's `reset`.

    task_id: stable and unique in its source. seed: the seed of all random choices of the
    environment, so that the members of a group play the same game. data: JSON-like values whose
    keys depend on the environment.

    Example: Task(task_id="row-7", environment="my:Doubling", seed=7, data={"start": 3})
    """

    task_id: str
    environment: str
    seed: int
    data: Mapping[str, Any] = field(default_factory=dict)

    def own_copy(self) -> Task:
        """Return a task whose data an environment may change.

        The original is shared by the members of a group.
        """
        return replace(self, data={name: deepcopy(value) for name, value in self.data.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAssignment:
    """An attempt of a rollout that is handed out to an environment actor."""

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
    """The times of one trajectory in seconds; wall_s is from reset to the outcome."""

    reset_s: float = 0.0
    generate_s: float = 0.0
    """Time in requests to the policy, summed over the turns."""
    step_s: float = 0.0
    """Time in the environment's steps, summed over the turns."""
    wall_s: float = 0.0

    def by_phase(self) -> dict[str, float]:
        """Return the seconds of each phase that the trajectory reached."""
        phases = {"reset": self.reset_s, "generate": self.generate_s, "step": self.step_s}
        return {phase: seconds for phase, seconds in phases.items() if seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An ended attempt of a rollout: the fields that a trajectory and its summary share."""

    rollout_id: str
    group_id: str
    group_number: int
    attempt: int
    task_id: str
    environment: str
    outcome: Outcome
    best_return: float | None = None
    """The return of the best possible play, if the environment knows it."""
    num_inserted_tokens: int = 0
    render_breaks: Mapping[str, int] = field(default_factory=dict)
    """The number of times that the history had to be rendered again, by reason."""
    timings: Timings = field(default_factory=Timings)
    left_out_tokens: Mapping[LeftOutReason, int] = field(default_factory=dict)
    """Number of sampled tokens in a session's turns that are in no sample, by reason."""
    detail: str = ""
    """One sentence on an outcome other than completed; never a payload."""
    answer: str | None = None
    """The policy's final answer in a short form that is equal for equal answers. None if the
    environment does not report it.
    """

    @property
    def trajectory_id(self) -> str:
        return f"{self.rollout_id}.a{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(Attempt):
    """One attempt of one rollout: its samples, rewards and outcome."""

    samples: tuple[Sample, ...] = ()
    """The samples in the order in which they began; every turn is in exactly one sample. Empty if
    the trajectory has no turns.
    """
    was_rewarded: bool | None = None
    """Whether the trajectory got a number as its reward, even 0. None if this is not known;
    `is_graded` then depends on the rewards.
    """
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the environment logged, by name; they are not rewarded."""
    extra_columns: Mapping[str, str] = field(default_factory=dict)
    """Texts that the environment logged, by name."""
    left_out: Mapping[int, LeftOutReason] = field(default_factory=dict)
    """The reason why a session's turn is in no sample, by the turn's number in the session."""

    @classmethod
    def of(cls, assignment: RolloutAssignment, outcome: Outcome, *, detail: str) -> Trajectory:
        """Return the trajectory of an assignment that was not played."""
        return cls(
            rollout_id=assignment.rollout_id,
            group_id=assignment.group_id,
            group_number=assignment.group_number,
            attempt=assignment.attempt,
            task_id=assignment.task.task_id,
            environment=assignment.task.environment,
            outcome=outcome,
            detail=detail,
        )

    @property
    def turns(self) -> tuple[TurnSpan, ...]:
        """Return the turns of all samples, in the order of play."""
        if len(self.samples) == 1:
            return self.samples[0].turns
        of_samples = (turn for sample in self.samples for turn in sample.turns)
        return tuple(sorted(of_samples, key=attrgetter("index")))

    @property
    def episode_return(self) -> float:
        """The sum of the turns' rewards, which does not change if turns are merged."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def num_sampled(self) -> int:
        return sum(turn.num_sampled for sample in self.samples for turn in sample.turns)

    @property
    def num_trained(self) -> int:
        """Number of sampled tokens with a finite log-probability, even if the trajectory is masked
        later.
        """
        return sum(sample.num_trained for sample in self.samples)

    @property
    def is_truncated(self) -> bool:
        return self.outcome in TRUNCATIONS

    @property
    def is_graded(self) -> bool:
        """Whether the return says how good the trajectory was.

        A return of 0 may also mean that nothing was rewarded. The first rule that fits decides:

        - Played to its end: graded.
        - Reward could not be computed, or no turn was played: not graded.
        - `was_rewarded` is True or False: that value.
        - Otherwise: graded if the last turn has a reward component, or a reward other than 0.
        """
        if self.outcome in PLAYED_OUT:
            return True
        turns = self.turns
        if self.outcome is Outcome.REWARD_ERROR or not turns:
            return False
        if self.was_rewarded is not None:
            return self.was_rewarded
        return bool(turns[-1].reward_components or turns[-1].reward != 0.0)

    @property
    def num_malformed_turns(self) -> int:
        return sum(turn.is_malformed for sample in self.samples for turn in sample.turns)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version of the trained tokens; None without trained tokens.

        An undone version counts with its original number (`original_numbers`).
        """
        seen = [sample.versions[sample.versions != NO_VERSION] for sample in self.samples]
        known = [original_numbers(versions) for versions in seen if versions.size]
        if not known:
            return None
        return min(int(each.min()) for each in known), max(int(each.max()) for each in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledText:
    """A trajectory as text, with its special tokens. The middle of a long text is left out."""

    prompt: str
    """The prompt of the trajectory's first turn."""
    answer: str
    """The text after `prompt` in the first sample: its turns and the observations between them.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary(Attempt):
    """The metadata of a trajectory in the queue actor, which never holds tokens."""

    episode_return: float
    num_turns: int
    num_sampled: int
    oldest_version: int | None
    newest_version: int | None
    num_bytes: int
    is_graded: bool = True
    text: SampledText | None = None
    """The trajectory as text, only for the first trajectories of an evaluation; otherwise None."""

    @property
    def scaled_return(self) -> float | None:
        """The return divided by the best possible return; None if that is not known."""
        return None if not self.best_return else self.episode_return / self.best_return


def original_numbers(versions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the numbers that policy versions had when they were published.

    If a run goes back to a checkpoint, the later versions are undone, and their numbers are used
    again for other weights. Samples therefore contain an undone version's number plus UNDONE.
    Example: original_numbers([4, UNDONE + 7]) -> [4, 7]
    """
    if int(versions.max(initial=0)) < UNDONE:
        return versions
    return np.where(versions >= UNDONE, versions - np.int32(UNDONE), versions)


def summarize(trajectory: Trajectory, *, num_bytes: int) -> TrajectorySummary:
    """Return the metadata of a trajectory for the queue. num_bytes: size of its payload."""
    versions = trajectory.versions
    return TrajectorySummary(
        **{each.name: getattr(trajectory, each.name) for each in fields(Attempt)},
        episode_return=trajectory.episode_return,
        num_turns=len(trajectory.turns),
        num_sampled=trajectory.num_sampled,
        oldest_version=versions[0] if versions else None,
        newest_version=versions[1] if versions else None,
        num_bytes=num_bytes,
        is_graded=trajectory.is_graded,
    )
