"""A run's progress as lines and numbers: a line for each event, and a display's state.

The run's log, the plain display and the live display's last lines all show the lines of `step_line`
and `evaluation_line`. A status contains only new items, so `ProgressState` accumulates them. The
module reads no clock; callers pass the time.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from actors.trajectory_queue.ledger import TokenCounts
from service.report.document import Phase
from service.run.health import RunStatus
from service.telemetry.records import (
    EvaluationRecord,
    StageSeconds,
    StepRecord,
    evaluation_line,
    step_line,
)
from service.visible import visible_lines

RATE_WINDOW_S = 15.0
RECENT_STEPS = 20
SHOWN_STEPS = 5
MAX_REWARDS = 1024

# No line is shown when a run returns from these phases to training.
_INTERLUDES = frozenset({Phase.EVALUATING, Phase.CHECKPOINTING})
_ENDINGS = frozenset(
    {Phase.RECOVERING, Phase.STOPPING, Phase.FINISHED, Phase.FAILED, Phase.TAKEN_OVER}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryLine:
    """One line that describes one event."""

    text: str
    is_notice: bool = False
    """Whether it is a fault or a warning, which the live display keeps on the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates per second over the last RATE_WINDOW_S seconds."""

    rollouts: float
    tokens: float


class ProgressState:
    """The state of a display; it must receive every status, in order.

    It keeps the reward of every 2^k-th step that the run has not undone. k is the smallest number
    for which at most MAX_REWARDS rewards are kept.
    """

    def __init__(self) -> None:
        self.status: RunStatus | None = None
        self.now = 0.0
        self._phase_since = 0.0
        self.recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self.first_evaluation: EvaluationRecord | None = None
        self.last_evaluation: EvaluationRecord | None = None
        self.is_reward_scaled = False
        self._rewards: dict[int, float | None] = {}
        self._stride = 1
        # Time, rollouts and tokens of the statuses within RATE_WINDOW_S.
        self._totals: deque[tuple[float, int, int]] = deque()

    def absorb(self, status: RunStatus, *, now: float) -> list[StoryLine]:
        """Add a status at `now` (seconds since 1970), and return the new lines."""
        previous, self.status, self.now = self.status, status, now
        lines: list[StoryLine] = []
        for record in status.records:
            self._add_step(record)
            lines.append(
                StoryLine(text=step_line(record, status.steps, left_s=self._left_s(record)))
            )
        for evaluation in status.evaluations:
            if evaluation.is_charted:
                self.first_evaluation = self.first_evaluation or evaluation
                self.last_evaluation = evaluation
            lines.append(StoryLine(text=evaluation_line(evaluation)))
        lines += [StoryLine(text=visible_lines(text), is_notice=True) for text in status.notices]
        if news := _phase_news(previous, status):
            # An ending's line follows the last steps; any other line precedes its phase's steps.
            index = len(lines) if status.phase in _ENDINGS else 0
            texts = [*self._ended_stage(previous, now), news]
            lines[index:index] = [StoryLine(text=visible_lines(text)) for text in texts]
            self._phase_since = now
        lines[:0] = [StoryLine(text=visible_lines(text)) for text in status.stages]
        self._add_totals(status, now)
        return lines

    def _ended_stage(self, previous: RunStatus | None, now: float) -> list[str]:
        """Return a line with the duration of the start's last stage, if a stage has just ended."""
        if previous is None or previous.phase is not Phase.STARTING:
            return []
        return [f"{previous.phase_detail or 'supervisor'}: {now - self._phase_since:.1f} s"]

    @property
    def rewards(self) -> Sequence[float | None]:
        return tuple(self._rewards.values())

    @property
    def last(self) -> StepRecord | None:
        return self.recent[-1] if self.recent else None

    @property
    def elapsed_s(self) -> float:
        return 0.0 if self.status is None else max(0.0, self.now - self.status.started_at)

    @property
    def remaining_s(self) -> float | None:
        """Seconds for the remaining steps at the last steps' median pace; None before step 1."""
        if self.status is None or not self.recent or self.status.is_done:
            return None
        return self._pace_s * max(0, self.status.steps - self.status.step)

    @property
    def rates(self) -> Rates | None:
        """The current rates; None until there are two statuses."""
        if not self._totals or (span := self._totals[-1][0] - self._totals[0][0]) <= 0:
            return None
        (_, rollouts, tokens), (_, later_rollouts, later_tokens) = self._totals[0], self._totals[-1]
        return Rates(
            rollouts=(later_rollouts - rollouts) / span, tokens=(later_tokens - tokens) / span
        )

    @property
    def stages(self) -> StageSeconds | None:
        """Mean seconds of each stage over the last SHOWN_STEPS steps."""
        shown = [record.stages.by_name() for record in list(self.recent)[-SHOWN_STEPS:]]
        if not shown:
            return None
        return StageSeconds(
            **{name: statistics.fmean(stages[name] for stages in shown) for name in shown[0]}
        )

    @property
    def tokens(self) -> TokenCounts:
        """Counts of the tokens that were sampled for the last SHOWN_STEPS steps, by their use."""
        shown = [record.tokens for record in list(self.recent)[-SHOWN_STEPS:]]
        return reduce(TokenCounts.plus, shown, TokenCounts())

    @property
    def _pace_s(self) -> float:
        return statistics.median(record.stages.total for record in self.recent)

    def _left_s(self, record: StepRecord) -> float | None:
        """Return the expected seconds for the steps after this one; None after the last step."""
        assert self.status is not None
        num_left = self.status.steps - record.step
        return self._pace_s * num_left if num_left > 0 else None

    def _add_step(self, record: StepRecord) -> None:
        if self.recent and record.step <= self.recent[-1].step:
            # The run returned to a checkpoint: forget the steps that this lineage has undone.
            kept = [known for known in self.recent if known.step < record.step]
            self.recent = deque(kept, maxlen=RECENT_STEPS)
            self._rewards = {
                step: value for step, value in self._rewards.items() if step < record.step
            }
        self.recent.append(record)
        if record.step % self._stride == 0:
            self._rewards[record.step] = record.best_known_reward
        if len(self._rewards) > MAX_REWARDS:
            self._stride *= 2
            self._rewards = {
                step: value for step, value in self._rewards.items() if step % self._stride == 0
            }
        self.is_reward_scaled |= record.value("scaled_reward_mean") is not None

    def _add_totals(self, status: RunStatus, now: float) -> None:
        if self._totals and status.rollouts_done < self._totals[-1][1]:
            self._totals.clear()
        self._totals.append((now, status.rollouts_done, status.sampled_tokens))
        while len(self._totals) > 2 and self._totals[0][0] < now - RATE_WINDOW_S:
            self._totals.popleft()


def _phase_news(previous: RunStatus | None, status: RunStatus) -> str | None:
    detail = status.exit_reason or status.phase_detail
    if previous is not None:
        before = previous.exit_reason or previous.phase_detail
        is_same = (previous.phase, before) == (status.phase, detail)
        is_return = status.phase is Phase.TRAINING and previous.phase in _INTERLUDES
        if is_same or is_return:
            return None
    return f"{status.phase.value}: {detail}" if detail else status.phase.value
