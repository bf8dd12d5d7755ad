"""The status and the readiness of a run, and the rules that decide whether it has failed.

This module has no effects; only `FaultCount` reads the clock. The records, evaluations, notices and
stages of a RunStatus are lists that only grow. A caller's `Cursor` says how many items of each list
it has read; the caller gets only the later items. Only the newest items of a list are kept, so a
slow caller may miss some.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from typing import Generic, TypeVar

from actors.deadline import ActorLost
from actors.merge.report import StepReport
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
from service.config.tree import Config
from service.report.document import Phase
from service.telemetry.records import EvaluationRecord, StepRecord

Item = TypeVar("Item")

FAULTS_COUNT_S = 24 * 3600.0

REMEDIES = {
    Outcome.TRUNCATED_TOKENS: "raise rollouts.max_tokens_per_turn, or ask for shorter answers",
    Outcome.TRUNCATED_CONTEXT: "raise model.max_context_tokens, or shorten the prompts",
    Outcome.WALL_TIMEOUT: "check what the rollouts wait for, or raise rollouts.turn_deadline_s",
    Outcome.STALE: "upload samples of newer policy versions, or raise algorithm.max_lag",
    Outcome.AGENT_ERROR: "check the model's chat template and rollouts.template_options",
    Outcome.ENVIRONMENT_ERROR: "fix the environment, or its tasks",
    Outcome.REWARD_ERROR: "fix the reward function",
    Outcome.INFRASTRUCTURE_ERROR: "see the logs of the engines and environment actors",
    Outcome.EMPTY: "check the model: it ends its answers before the first token",
    Outcome.TOKEN_MISALIGNED: "check the engines: their log-probabilities are unusable",
}
# Remedies by the cause for which sampled tokens are not trained; for other causes use REMEDIES.
TOKEN_REMEDIES: Mapping[TokenCause, str] = {
    EvictionReason.TRUNCATED_TOKENS: "raise rollouts.max_tokens_per_turn, or train cut-off "
    "answers: set rollouts.outcomes.truncated_tokens to {disposition: score} or {disposition: "
    "train_clamped}",
    EvictionReason.TRUNCATED_CONTEXT: "raise model.max_context_tokens, shorten the prompts, or set "
    "rollouts.outcomes.truncated_context to {disposition: score} or {disposition: train_clamped}",
    EvictionReason.ZERO_VARIANCE: "all answers to a task get the same reward: use harder tasks if "
    "the answers are right, easier ones if they are wrong, raise algorithm.group_size, or "
    "grade in finer steps",
    EvictionReason.GROUP_TOO_SMALL: "too few members of a group were usable: raise "
    "algorithm.group_size, and see the outcomes of the others with `rayloom inspect`",
    EvictionReason.NEGATIVE_RETURN: "shift the rewards to 0 and above, or set algorithm.scale to "
    "none",
    EvictionReason.NONFINITE_STEP: "lower trainer.learning_rate",
    EvictionReason.CANCELLED: "their groups were cancelled or closed early "
    "(algorithm.min_usable_samples), or a part of the run ended: see the earlier notices",
    LeftOutReason.AUXILIARY: "the agent marks these turns as outside its task; check the marks",
    LeftOutReason.UNSEEN: "check why the agents end their requests before the answers come",
    LeftOutReason.TITLE: "turn off titles in the agent, or set sessions.titles to train",
}
# Number of steps over which the share of trained tokens is checked, and the share below which there
# is a notice.
SHARE_STEPS = 5
LOW_SHARE = 0.5
# Number of steps without a difference in reward after which a notice is given.
CONSTANT_STEPS = 3
OTHER_REMEDY = "check the rules of rollouts.outcomes, and algorithm.min_group_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The number of items that a caller has read of each list in a RunStatus."""

    steps: int = 0
    evaluations: int = 0
    notices: int = 0
    stages: int = 0


class Tail(Generic[Item]):
    """The newest items of a list that only grows; older items are dropped."""

    def __init__(self, *, limit: int) -> None:
        self._items: deque[Item] = deque(maxlen=limit)
        self.length = 0
        """Length of the whole list, with the dropped items."""

    def append(self, item: Item) -> None:
        self._items.append(item)
        self.length += 1

    @property
    def last(self) -> Item | None:
        return self._items[-1] if self._items else None

    def since(self, position: int) -> tuple[Item, ...]:
        """Return the items from index `position` on, except those that were dropped.

        position: index in the whole list, which counts the dropped items too.
        """
        num_left_out = len(self._items) - (self.length - position)
        return tuple(islice(self._items, max(num_left_out, 0), None))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run for its display; its lists have only items that the caller has not
    read."""

    name: str
    phase: Phase

    started_at: float
    """Seconds since 1970."""

    steps: int
    """Number of planned steps."""

    step: int = 0
    """The last finished step."""

    policy_version: int = 0

    phase_detail: str = ""
    """A few words on the phase, such as "starting 2 engines"."""

    records: tuple[StepRecord, ...] = ()
    """Records of steps that the caller has not read, in order.

    If a recovery repeats a step, the later record of the step counts.
    """

    evaluations: tuple[EvaluationRecord, ...] = ()
    """Evaluations that the caller has not read, in order."""

    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    queue_items: int = 0
    queue_bytes: int = 0

    rollouts_done: int = 0
    """Number of trajectories that ended since this supervisor started."""

    sampled_tokens: int = 0
    """Number of sampled tokens in the trajectories that ended since this supervisor started."""

    engines_ready: int = 0

    notices: tuple[str, ...] = ()
    """Notices that the caller has not read, in order."""

    stages: tuple[str, ...] = ()
    """Ended stages of a start that the caller has not read, one line each, in order."""

    cursor: Cursor = Cursor()
    """The cursor to pass in the next call, which counts these items as read."""

    checkpoint_step: int = 0
    """Step of the newest committed checkpoint."""

    metrics_address: str | None = None
    """URL of the metrics; None if no server listens."""

    supervisor: str = ""
    """HOST:PID of the supervisor, as stored in its lease of the run."""

    run_dir: str = ""

    is_done: bool = False

    exit_reason: str | None = None
    """Reason for the end of the run, one sentence; set only if `is_done`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a run: its reason, and whether its report was written."""

    reason: str
    has_report: bool
    was_stopped: bool = False
    """Whether a stop was requested."""
    peak_memory_bytes: int | None = None
    """Peak memory of the run's processes in bytes, as in the run's summary; None if unknown."""


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
    """Return whether the run is ready to serve, with the reasons if it is not.

    A run is not ready if its database does not answer, if it does not train now, or if some engines
    have been without the current version for longer than a publication may take.
    behind_s: seconds since all expected engines last had the current version. publish_limit_s:
    seconds that a publication may take. store_away_s: seconds since the database last answered; 0
    if it answers.
    """
    reasons = []
    if store_away_s:
        reasons.append(
            f"the run's database has not answered for {store_away_s:.0f} s; check its server or "
            "its disk"
        )
    if phase != "training":
        reasons.append(f"the run is {phase}" + (f": {detail}" if detail else ""))
    elif behind_s > publish_limit_s:
        reasons.append(
            f"{engines_ready} of {engines_expected} engines hold the current version; this has "
            f"lasted {behind_s:.0f} s, and a publication may take {publish_limit_s:g} s; see the "
            "logs of the engines"
        )
    return ReadyAnswer(
        ready=not reasons,
        reasons=reasons,
        phase=phase,
        policy_version=policy_version,
        engines={"ready": engines_ready, "total": engines_expected},
    )


class EngineWatch:
    """Counts the engines that are lost or come back, and measures for how long some are missing.

    Only engines that have had the current version are counted. An engine is lost if the weight
    board, the actor that publishes weights, no longer lists it. An engine that was stopped because
    the user requested fewer engines is not lost. An engine that restarts has a new name. Therefore,
    while lost engines are missing, a new engine counts as one that is back.

    num_expected: starts as the requested number of engines, rises when more engines appear, and
    falls when engines are stopped on request. num_current: number of engines that have the current
    version. num_lost: number of engines that the last check found to be lost.
    """

    def __init__(self, *, num_expected: int) -> None:
        self.num_expected = num_expected
        self._seen: frozenset[str] = frozenset()
        self._num_missing = 0
        self._behind_since: float | None = None
        self.num_current = self.num_lost = 0

    def check(self, status: BoardStatus | None, *, now: float) -> str:
        """Return a sentence that says how many engines were lost or came back since the last check.

        Return an empty text if none was lost and none came back.
        status: the board's status; None while the board does not answer. now: monotonic seconds.
        """
        current = status.holders if status is not None else frozenset()
        self.num_current, self.num_lost = len(current), 0
        change = "" if status is None else self._compare(status)
        if self.num_current >= self.num_expected:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        return change

    def _compare(self, status: BoardStatus) -> str:
        current = status.holders
        gone = self._seen - {replica.replica_id for replica in status.replicas}
        self.num_lost, num_new = len(gone - status.retired), len(current - self._seen)
        self._seen = (self._seen - gone) | current
        num_retired = len(gone & status.retired)
        self.num_expected = max(self.num_expected - num_retired, len(self._seen), 1)
        num_back = min(num_new, self._num_missing + self.num_lost)
        self._num_missing += self.num_lost - num_back
        changes = [_counted(self.num_lost, "was lost", "were lost")] if self.num_lost else []
        changes += [_counted(num_back, "is back", "are back")] if num_back else []
        if not changes:
            return ""
        return f"{', '.join(changes)}; {len(self._seen)} of {self.num_expected} ready"

    def behind_s(self, now: float) -> float:
        """Return how many seconds have passed since all expected engines had the current version.

        Return 0 if all of them had it at the last check.
        """
        return 0.0 if self._behind_since is None else now - self._behind_since


def _counted(count: int, one: str, many: str) -> str:
    return f"an engine {one}" if count == 1 else f"{count} engines {many}"


class WeightsMoved(Exception):
    """Raised if the trainer's ranks were restarted and have other weights than before.

    Before any other call of the trainer, the caller must publish the weights as `version`.
    """

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version

    def __str__(self) -> str:
        return (
            "the trainer's weights differ from the earlier ones; they are published again, "
            f"as version {self.version}"
        )


class RunFailed(Exception):
    """Raised to end the run; the message says what failed, how often, and the remedy."""


class FaultCount:
    """A count of the faults since the run last made progress.

    Faults older than a day do not count. Otherwise a run that waits for submissions for weeks, and
    makes no progress meanwhile, would fail after a few rare faults.
    """

    def __init__(self, *, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._times: list[float] = []

    @property
    def are_too_many(self) -> bool:
        """Whether the last call of `count` counted more than `limit` faults."""
        return len(self._times) > self._limit

    def count(self) -> None:
        """Count another fault."""
        now = self._clock()
        self._times = [each for each in self._times if now - each < FAULTS_COUNT_S] + [now]

    def progressed(self) -> None:
        self._times.clear()


class FailureWatch:
    """The checks that end a run that makes no progress.

    The loop of each term makes these checks while it waits for a step and after each step. A run
    fails in any of these cases:
    - `max_failed_groups` groups in a row could not be trained, and this has lasted for
      `failed_groups_grace_s`. Groups that fail while no engine is ready do not count. The loop
      leaves this check out if clients submit the tasks.
    - No update was finite in `max_skipped_steps` steps in a row.
    - The merge actor refused every trajectory in `max_skipped_steps` steps in a row.
    - Too many log-probability checks in a row exceeded their bound (`check_logprobs`).
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._streak: int | None = None
        """The current series of failed groups, identified by `FailedGroups.num_usable_before`.

        None if no group has failed since the last usable one.
        """
        self._failing_since = 0.0
        self._num_uncounted = 0
        """Number of the series' groups that failed until an engine was ready again; not counted."""
        self._away_since: float | None = None
        """Time since which no engine has been ready; None if an engine is ready."""
        self._num_skipped = 0
        self._num_misaligned = 0
        self._num_constant = 0
        self._num_unequal = 0
        self._last_unequal = ""
        self._tokens: deque[TokenCounts] = deque(maxlen=SHARE_STEPS)
        self._is_share_low = False

    def untrained_tokens(self, step: int, report: StepReport) -> str | None:
        """Return a notice if less than LOW_SHARE of the last steps' sampled tokens was trained.

        The last SHARE_STEPS steps count. The notice is not repeated while the share remains low.
        Returns: None if there is no notice.
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
        """Return a notice if the last CONSTANT_STEPS steps had only groups with a constant return.

        A group has a constant return if all its rollouts have the same return. All its advantages
        are then 0. The notice is returned once for each series of such steps. Returns: None if
        there is no notice.
        """
        is_constant = 0 < report.num_groups <= report.num_zero_variance_groups
        self._num_constant = self._num_constant + 1 if is_constant else 0
        if self._num_constant != CONSTANT_STEPS:
            return None
        mean = report.statistics.get("reward_mean")
        value = "" if mean is None else f" (mean reward {mean:g})"
        return (
            f"step {step}: in the last {CONSTANT_STEPS} steps no group had returns that "
            f"differ{value}, so nothing is learnt; check the answers with `rayloom inspect`, and "
            "the reward function"
        )

    def note_logprobs(self, step: int, check: LogprobCheck | None) -> str:
        """Record the log-probability check after a step; return a notice if the check failed.

        `check_logprobs` uses the record. A check fails if it exceeds its bound. If no engine
        answered, `check` is None, and nothing is recorded.
        Returns: the notice; an empty text if there is none.
        """
        if check is None:
            return ""
        self._num_unequal = self._num_unequal + 1 if check.is_beyond else 0
        self._last_unequal = f"step {step}: {check}" if check.is_beyond else ""
        return self._last_unequal

    def check_logprobs(self) -> None:
        """Raise RunFailed if too many log-probability checks in a row exceeded their bound.

        The loop calls this between two steps.
        """
        limit = self._config.trainer.logprob_check_failures
        if limit and self._num_unequal >= limit:
            raise RunFailed(
                "trainer and engines compute different log-probabilities after "
                f"{self._num_unequal} publications in a row; {self._last_unequal}; to allow "
                "more, raise trainer.logprob_check_failures"
            )

    def check_merge(self, step: int, report: StepReport, *, notices: Sequence[str]) -> None:
        """Raise RunFailed if the merge actor refused all trajectories of too many steps in a row.

        The merge actor refuses misaligned trajectories. notices: the merge actor's notices; the
        error quotes the first.
        """
        num_refused = report.evictions.get(EvictionReason.TOKEN_MISALIGNED, 0)
        is_refused = 0 < report.num_trajectories <= num_refused
        self._num_misaligned = self._num_misaligned + 1 if is_refused else 0
        if self._num_misaligned >= self._config.trainer.max_skipped_steps:
            first = f"; {notices[0]}" if notices else ""
            raise RunFailed(
                f"nothing was trained in the last {self._num_misaligned} steps, up to step {step}, "
                "because the tokens, log-probabilities or routing records of every trajectory do "
                f"not fit the trained model (token_misaligned){first}; check that "
                "engine, tokenizer and trainer load the same model, and what clients upload; or "
                "raise trainer.max_skipped_steps"
            )

    def check_step(self, step: int, *, was_trained: bool) -> None:
        """Raise RunFailed if no update was applied in too many steps in a row.

        was_trained: whether an update of this step was finite, so that it was applied.
        """
        self._num_skipped = 0 if was_trained else self._num_skipped + 1
        if self._num_skipped >= self._config.trainer.max_skipped_steps:
            raise RunFailed(
                f"no update of the last {self._num_skipped} steps, up to step {step}, was finite, "
                "so that none was applied; their inputs are in checkpoints/skipped; look at the "
                "loss and gradient norm of the steps before these, and begin again with a lower "
                "trainer.learning_rate (with a critic also algorithm.critic.learning_rate); to "
                "allow more such steps, raise trainer.max_skipped_steps"
            )

    def check_groups(
        self, failed: FailedGroups | None, *, num_engines_ready: int, now: float
    ) -> None:
        """Raise RunFailed if too many groups in a row have failed.

        failed: the groups that have failed since a group was last usable for training; None if
        there are none. now: monotonic seconds.
        Raises: ActorLost if no engine has been ready for too long.
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
        rollouts = self._config.rollouts
        is_long = lasted_s >= rollouts.failed_groups_grace_s
        if num_counted >= rollouts.max_failed_groups and is_long:
            raise RunFailed(_failure_text(failed, num_counted, lasted_s, self._config))

    def _wait_for_engine(self, failed: FailedGroups, now: float) -> None:
        self._away_since = now if self._away_since is None else self._away_since
        if now - self._away_since > self._config.inference.start_deadline_s:
            raise ActorLost(
                f"no engine has been ready for {now - self._away_since:.0f} s, expected one within "
                f"{self._config.inference.start_deadline_s:g} s (inference.start_deadline_s)"
            )
        # The count starts again when an engine is back.
        self._failing_since, self._num_uncounted = now, failed.num_groups


def _percent(share: float | None) -> str:
    """Return a share as a percentage, with an ordinary space before the sign."""
    return units.percent(share).replace("\u00a0", " ")


def _token_remedy(cause: TokenCause) -> str:
    if (remedy := TOKEN_REMEDIES.get(cause)) is not None:
        return remedy
    outcome = Outcome(cause.value) if cause.value in set(Outcome) else Outcome.COMPLETED
    return REMEDIES.get(outcome, OTHER_REMEDY)


def _failure_text(failed: FailedGroups, num_groups: int, lasted_s: float, config: Config) -> str:
    algorithm = config.algorithm
    ordered = sorted(failed.outcomes.items(), key=lambda item: -item[1])
    counts = ", ".join(f"{count} {outcome.value}" for outcome, count in ordered)
    detail = f": {failed.last_detail}" if failed.last_detail else ""
    return (
        f"the last {num_groups} groups in a row could not be trained (within {lasted_s:.0f} s): "
        f"each had fewer usable rollouts than algorithm.min_group_size ({algorithm.min_group_size} "
        f"of {algorithm.group_size}); their attempts ended as {counts}; the last, on task "
        f"{failed.task_id!r} of {failed.environment!r}, as {failed.last_outcome.value}{detail}; "
        f"{REMEDIES.get(failed.main_outcome, OTHER_REMEDY)}; "
        "to allow more, raise rollouts.max_failed_groups"
    )
