"""A run's status, whether it can serve, and when it has failed. Pure.

Called by the supervisor and its loop. The command line asks for a RunStatus twice a second
and hands it to a display; lists that only grow (records, evaluations, notices) come as what is new
since the asker's cursor, as far as the newest ones reach that are kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from typing import Generic, TypeVar

from actors.algorithm import AlgorithmSettings
from actors.deadline import ActorLost
from actors.environment.settings import RolloutSettings
from actors.merge.report import StepReport
from actors.trainer.settings import TrainerSettings
from actors.trajectory_queue.groups import FailedGroups
from actors.trajectory_queue.ledger import (
    EvictionReason,
    LedgerCounts,
    TokenCause,
    TokenCounts,
)
from actors.types import LeftOutReason, Outcome
from actors.weights.board import BoardStatus
from actors.weights.logprob_check import LogprobCheck
from service import units
from service.api.schemas import ReadyAnswer
from service.inference.settings import InferenceSettings
from service.report.document import Phase
from service.telemetry.records import EvaluationRecord, StepRecord

Item = TypeVar("Item")

FAULTS_COUNT_S = 24 * 3600.0

REMEDIES = {
    Outcome.TRUNCATED_TOKENS: "raise rollouts.max_tokens_per_turn, or ask for shorter answers",
    Outcome.TRUNCATED_CONTEXT: "raise model.max_context_tokens, or shorten the prompts",
    Outcome.WALL_TIMEOUT: "look at what it waits for, or raise rollouts.turn_deadline_s",
    Outcome.STALE: "lower algorithm.max_lag",
    Outcome.AGENT_ERROR: "look at the model's chat template and rollouts.template_options",
    Outcome.ENVIRONMENT_ERROR: "mend the environment, or the tasks that it is given",
    Outcome.REWARD_ERROR: "mend what scores the answers",
    Outcome.INFRASTRUCTURE_ERROR: "look at the logs of the engines and environment actors",
    Outcome.EMPTY: "look at the model: it ends its answers before the first token",
    Outcome.TOKEN_MISALIGNED: "look at the engines: their log-probabilities cannot be used",
}
# By the cause why sampled tokens are not trained; REMEDIES has the outcomes that are not here.
TOKEN_REMEDIES: Mapping[TokenCause, str] = {
    EvictionReason.TRUNCATED_TOKENS: "raise rollouts.max_tokens_per_turn, or have cut-off answers "
    "trained: set rollouts.outcomes.truncated_tokens to {disposition: score} or {disposition: "
    "train_clamped}",
    EvictionReason.TRUNCATED_CONTEXT: "raise model.max_context_tokens, shorten the prompts, or set "
    "rollouts.outcomes.truncated_context to {disposition: score} or {disposition: train_clamped}",
    EvictionReason.ZERO_VARIANCE: "all answers to a task get the same reward: take harder tasks "
    "where they are right and easier ones where they are wrong, raise algorithm.group_size, or "
    "grade in finer steps",
    EvictionReason.GROUP_TOO_SMALL: "too few members of a group were usable: raise "
    "algorithm.group_size, and look at the outcomes of the others with `rayloom inspect`",
    EvictionReason.NEGATIVE_RETURN: "shift the rewards to 0 and above, or set algorithm.scale to "
    "none",
    EvictionReason.NONFINITE_STEP: "lower trainer.learning_rate",
    EvictionReason.CANCELLED: "their groups were cancelled or closed early "
    "(algorithm.min_usable_samples), or a part of the run ended: look at the notices before",
    LeftOutReason.AUXILIARY: "the agent marks these turns as not part of its task; see whether it "
    "has to",
    LeftOutReason.UNSEEN: "look at why the agents end their requests before the answers come",
    LeftOutReason.TITLE: "turn off titles in the agent, or set sessions.titles to train",
}
# Steps over which the share of trained tokens is watched, and the share below which there is a
# notice.
SHARE_STEPS = 5
LOW_SHARE = 0.5
# Steps without a difference in reward after which there is a notice.
CONSTANT_STEPS = 3
OTHER_REMEDY = "look at the rules of rollouts.outcomes and at algorithm.min_group_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How much of the growing lists the asker has seen, from the supervisor's start on."""

    steps: int = 0
    evaluations: int = 0
    notices: int = 0
    stages: int = 0


class Tail(Generic[Item]):
    """The newest items of a list that only grows."""

    def __init__(self, *, limit: int) -> None:
        self._items: deque[Item] = deque(maxlen=limit)
        self.length = 0
        """Of the whole list."""

    def append(self, item: Item) -> None:
        self._items.append(item)
        self.length += 1

    @property
    def last(self) -> Item | None:
        return self._items[-1] if self._items else None

    def since(self, position: int) -> tuple[Item, ...]:
        """The items from this position of the list on, as far as they are kept."""
        num_left_out = len(self._items) - (self.length - position)
        return tuple(islice(self._items, max(num_left_out, 0), None))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Where a run stands."""

    name: str
    phase: Phase

    started_at: float
    """Seconds since 1970."""

    steps: int
    """Planned ones."""

    step: int = 0
    """The last finished one."""

    policy_version: int = 0

    phase_detail: str = ""
    """A few words, such as "starting 2 engines"."""

    records: tuple[StepRecord, ...] = ()
    """New ones, in order; of two records of one step the later counts, after a recovery."""

    evaluations: tuple[EvaluationRecord, ...] = ()
    """New ones, in order."""

    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    queue_items: int = 0
    queue_bytes: int = 0

    rollouts_done: int = 0
    """Trajectories that ended in this process."""

    sampled_tokens: int = 0
    """Tokens in them."""

    engines_ready: int = 0

    notices: tuple[str, ...] = ()
    """New ones, in order."""

    stages: tuple[str, ...] = ()
    """Stages of a start that have ended, new ones, in order: a line each."""

    cursor: Cursor = Cursor()
    """What the next question asks from."""

    checkpoint_step: int = 0
    """Of the newest committed checkpoint."""

    metrics_address: str | None = None
    """A URL; None where nothing listens."""

    supervisor: str = ""
    """HOST:PID, as its lease names it."""

    run_dir: str = ""

    is_done: bool = False

    exit_reason: str | None = None
    """One sentence, only once is_done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended, in a sentence, and whether its report was written."""

    reason: str
    has_report: bool
    was_stopped: bool = False
    """Somebody asked for it."""
    peak_memory_bytes: int | None = None
    """The same number as in the summary."""


def readiness(
    *,
    phase: Phase,
    detail: str,
    policy_version: int,
    engines_ready: int,
    engines_expected: int,
    behind_s: float,
    publish_limit_s: float,
    store_away_s: float,
) -> ReadyAnswer:
    """Whether the run can serve, and why not.

    behind_s: since when an engine lacks the current version; allowed for as long as a publish may
    take, and given as a reason only while the run trains, since other phases wait for more.
    store_away_s: for how long the database has not answered; 0: it does.
    """
    reasons = []
    if store_away_s:
        reasons.append(
            f"the run's database has not answered for {store_away_s:.0f} s; look at its server or "
            "its disk"
        )
    if phase is not Phase.TRAINING:
        reasons.append(f"the run is {phase.value}" + (f": {detail}" if detail else ""))
    elif behind_s > publish_limit_s:
        reasons.append(
            f"{engines_ready} of {engines_expected} engines hold the current version, for "
            f"{behind_s:.0f} s now; a publish may take {publish_limit_s:g} s; look at the logs of "
            "the engines"
        )
    return ReadyAnswer(
        ready=not reasons,
        reasons=reasons,
        phase=phase.value,
        policy_version=policy_version,
        engines={"ready": engines_ready, "total": engines_expected},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChange:
    """What has changed since the last check."""

    num_lost: int = 0
    """Engines."""
    text: str = ""
    """A sentence for the user; empty without a change."""


class EngineWatch:
    """Which engines were lost, which came back, and for how long one has been behind.

    An engine counts from the first time that it holds the current version; lacking a version that
    was just published is no loss, and nor is one that ended in order: Serve was asked for fewer.
    Replicas never return under the name of one that died.

    num_expected: at first as many as were asked for; more when more come, fewer when some end in
    order.
    """

    def __init__(self, *, num_expected: int) -> None:
        self.num_expected = num_expected
        self._seen: frozenset[str] = frozenset()
        self._num_missing = 0
        self._behind_since: float | None = None
        self.num_current = 0

    def check(self, status: BoardStatus | None, *, now: float) -> EngineChange:
        """Compare with the last check. status: None while the board does not answer.

        now: monotonic, seconds.
        """
        current = status.holders if status is not None else frozenset()
        self.num_current = len(current)
        change = EngineChange() if status is None else self._compare(status)
        if self.num_current >= self.num_expected:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        return change

    def _compare(self, status: BoardStatus) -> EngineChange:
        current = status.holders
        gone = self._seen - {replica.replica_id for replica in status.replicas}
        num_lost, num_new = len(gone - status.retired), len(current - self._seen)
        self._seen = (self._seen - gone) | current
        num_retired = len(gone & status.retired)
        self.num_expected = max(self.num_expected - num_retired, len(self._seen), 1)
        num_back = min(num_new, self._num_missing + num_lost)
        self._num_missing += num_lost - num_back
        changes = [_counted(num_lost, "was lost", "were lost")] if num_lost else []
        changes += [_counted(num_back, "is back", "are back")] if num_back else []
        if not changes:
            return EngineChange()
        count = f"{len(self._seen)} of {self.num_expected} ready"
        return EngineChange(num_lost=num_lost, text=f"{', '.join(changes)}; {count}")

    def behind_s(self, now: float) -> float:
        """For how long an engine has lacked the current version."""
        return 0.0 if self._behind_since is None else now - self._behind_since


def _counted(count: int, one: str, many: str) -> str:
    return f"an engine {one}" if count == 1 else f"{count} engines {many}"


class WeightsMoved(Exception):
    """The trainer came back with other bits: publish `version` before anything else is asked."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version

    def __str__(self) -> str:
        return (
            "the trainer's weights are not bit for bit those of before; they are published once "
            f"more, as version {self.version}"
        )


class RunFailed(Exception):
    """The run cannot go on; the text says what failed, how often, and the remedy."""


class FaultCount:
    """Faults in a row: they count until the run has made progress, and for a day at most.

    A service without submissions makes no progress, and its faults, weeks apart, are not in a row.
    """

    def __init__(self, *, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._times: list[float] = []

    def is_one_too_many(self) -> bool:
        """Count one more. Returns: whether there are more than `limit`."""
        now = self._clock()
        self._times = [each for each in self._times if now - each < FAULTS_COUNT_S] + [now]
        return len(self._times) > self._limit

    def progressed(self) -> None:
        self._times.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLimits:
    """The parts of the configuration that limit failures."""

    rollouts: RolloutSettings
    algorithm: AlgorithmSettings
    trainer: TrainerSettings
    inference: InferenceSettings


class FailureWatch:
    """Ends a run that gets nowhere. One for a term; asked after each drain and each step. A service
    asks after each step alone: it is no failure of its own when clients' groups cannot be trained.

    A run fails when the last `max_failed_groups` groups in a row could not be trained and this has
    lasted for `failed_groups_grace_s`, so that a server's short absence is no end. Failures while
    no engine is ready do not count: the environment did not cause them. It fails as well when no
    update of `max_skipped_steps` steps in a row was finite, or when the merge actor refused every
    trajectory of as many.
    """

    def __init__(self, limits: FailureLimits) -> None:
        self._limits = limits
        self._streak: int | None = None
        """`num_usable_before` of the failures that are being counted; None: there are none."""
        self._failing_since = 0.0
        self._num_uncounted = 0
        """Groups of them that failed while no engine was ready, and before."""
        self._away_since: float | None = None
        """Since when no engine has been ready."""
        self._num_skipped = 0
        self._num_misaligned = 0
        self._num_constant = 0
        self._num_unequal = 0
        self._last_unequal = ""
        self._tokens: deque[TokenCounts] = deque(maxlen=SHARE_STEPS)
        self._is_share_low = False

    def untrained_tokens(self, step: int, report: StepReport) -> str | None:
        """Return a notice if less than LOW_SHARE of the last steps' sampled tokens was trained.

        Returned once for each stretch of SHARE_STEPS steps and more.
        """
        self._tokens.append(report.tokens)
        if len(self._tokens) < SHARE_STEPS:
            return None
        tokens = reduce(TokenCounts.plus, self._tokens)
        was_low, share = self._is_share_low, tokens.trained_share
        self._is_share_low = share is not None and share < LOW_SHARE
        if was_low or not self._is_share_low:
            return None
        (cause, of_cause), *others = tokens.causes()
        rest = "".join(f", {_percent(part)} {other}" for other, part in others[:2])
        return (
            f"step {step}: {_percent(share)} of the tokens sampled for the last {SHARE_STEPS} "
            f"steps were trained; {_percent(of_cause)} were not because of {cause}{rest}; "
            f"{_token_remedy(cause)}"
        )

    def constant_reward(self, step: int, report: StepReport) -> str | None:
        """Return a notice if no group of the last CONSTANT_STEPS steps had returns that differ.

        Returned once for each such stretch: with equal returns all advantages are 0.
        """
        is_constant = 0 < report.num_groups <= report.num_zero_variance_groups
        self._num_constant = self._num_constant + 1 if is_constant else 0
        if self._num_constant != CONSTANT_STEPS:
            return None
        mean = report.statistics.get("reward_mean")
        value = "" if mean is None else f" (mean reward {mean:g})"
        return (
            f"step {step}: in the last {CONSTANT_STEPS} steps no group had returns that "
            f"differ{value}, so nothing is learnt; look at the answers with `rayloom inspect`, and "
            "at the reward function"
        )

    def note_logprobs(self, step: int, check: LogprobCheck | None) -> str:
        """check: the one after the step's publication; None: no engine has answered.

        Returns: a notice; empty where trainer and engines agree.
        """
        if check is None:
            return ""
        self._num_unequal = self._num_unequal + 1 if check.is_beyond else 0
        self._last_unequal = f"step {step}: {check}" if check.is_beyond else ""
        return self._last_unequal

    def check_logprobs(self) -> None:
        """Between two steps. Raises: RunFailed."""
        limit = self._limits.trainer.logprob_check_failures
        if limit and self._num_unequal >= limit:
            raise RunFailed(
                f"trainer and engines are not the same function after {self._num_unequal} "
                f"publications in a row; {self._last_unequal}; to allow more, raise "
                "trainer.logprob_check_failures"
            )

    def check_merge(self, step: int, report: StepReport, *, notices: Sequence[str]) -> None:
        """notices: what the merge actor says of the step. Raises: RunFailed."""
        num_refused = report.evictions.get(EvictionReason.TOKEN_MISALIGNED, 0)
        is_refused = 0 < report.num_trajectories <= num_refused
        self._num_misaligned = self._num_misaligned + 1 if is_refused else 0
        if self._num_misaligned >= self._limits.trainer.max_skipped_steps:
            raise RunFailed(
                f"every trajectory of the last {self._num_misaligned} steps, up to step {step}, "
                "ended as token_misaligned, and nothing was trained; the last step's first: "
                f"{next(iter(notices), 'without a notice')}; mend what records the turns; to allow "
                "more, raise trainer.max_skipped_steps"
            )

    def check_step(self, step: int, *, was_trained: bool) -> None:
        """was_trained: whether any update of the step was finite. Raises: RunFailed."""
        self._num_skipped = 0 if was_trained else self._num_skipped + 1
        if self._num_skipped >= self._limits.trainer.max_skipped_steps:
            raise RunFailed(
                f"no update of the last {self._num_skipped} steps, up to step {step}, was finite, "
                "and none was applied; their inputs lie in checkpoints/skipped: look at the loss "
                "and the gradient norm before, and begin again with a lower trainer.learning_rate "
                "or, with a critic, algorithm.critic.learning_rate; to allow more, raise "
                "trainer.max_skipped_steps"
            )

    def check_groups(
        self, failed: FailedGroups | None, *, num_engines_ready: int, now: float
    ) -> None:
        """now: seconds of a clock that never goes back.

        Raises: RunFailed; ActorLost when no engine is ready for too long.
        """
        if failed is None:
            self._streak = self._away_since = None
            return
        if failed.num_usable_before != self._streak:
            self._streak, self._failing_since = failed.num_usable_before, now
            self._num_uncounted = 0
        if num_engines_ready == 0:
            self._wait_for_engine(failed, now)
            return
        self._away_since = None
        num_counted = failed.num_groups - self._num_uncounted
        lasted_s = now - self._failing_since
        rollouts = self._limits.rollouts
        is_long = lasted_s >= rollouts.failed_groups_grace_s
        if num_counted >= rollouts.max_failed_groups and is_long:
            raise RunFailed(_failure_text(failed, num_counted, lasted_s, self._limits))

    def _wait_for_engine(self, failed: FailedGroups, now: float) -> None:
        self._away_since = now if self._away_since is None else self._away_since
        if now - self._away_since > self._limits.inference.start_deadline_s:
            raise ActorLost(
                f"no engine has been ready for {now - self._away_since:.0f} s, expected one within "
                f"{self._limits.inference.start_deadline_s:g} s (inference.start_deadline_s)"
            )
        # The count starts again when an engine is back.
        self._failing_since, self._num_uncounted = now, failed.num_groups


def _percent(share: float | None) -> str:
    """Format a share for a notice; displays would escape a space that does not break."""
    return units.percent(share).replace("\u00a0", " ")


def _token_remedy(cause: TokenCause) -> str:
    if (remedy := TOKEN_REMEDIES.get(cause)) is not None:
        return remedy
    outcome = Outcome(cause.value) if cause.value in set(Outcome) else Outcome.COMPLETED
    return REMEDIES.get(outcome, OTHER_REMEDY)


def _failure_text(
    failed: FailedGroups, num_groups: int, lasted_s: float, limits: FailureLimits
) -> str:
    algorithm = limits.algorithm
    ordered = sorted(failed.outcomes.items(), key=lambda item: -item[1])
    counts = ", ".join(f"{count} {outcome.value}" for outcome, count in ordered)
    detail = f": {failed.last_detail}" if failed.last_detail else ""
    return (
        f"the last {num_groups} groups in a row could not be trained (within {lasted_s:.0f} s): "
        f"each had fewer usable rollouts than algorithm.min_group_size ({algorithm.min_group_size} "
        f"of {algorithm.group_size}); of their attempts ended {counts}; the last, on task "
        f"{failed.task_id!r} of {failed.environment!r}, as {failed.last_outcome.value}{detail}; "
        f"{REMEDIES.get(failed.main_outcome, OTHER_REMEDY)}; "
        "to allow more, raise rollouts.max_failed_groups"
    )
