"""What a display remembers of the statuses it was given; pure, and the same for every display.

Statuses carry only what is new, so this gathers them: rewards for the sparkline, rates over the
last seconds, and the lines that tell the story. Time is passed in.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from service import units
from service.cli.display.step_line import evaluation_line, step_line
from service.run.health import Phase, RunStatus
from service.telemetry.records import EvaluationRecord, StageSeconds, StepRecord
from service.visible import visible_lines

RATE_WINDOW_S = 15.0
RECENT_STEPS = 20
SHOWN_STEPS = 5

# A return to training from these is not news.
_INTERLUDES = frozenset({Phase.EVALUATING, Phase.CHECKPOINTING})
_ENDINGS = frozenset({Phase.RECOVERING, Phase.STOPPING, Phase.FINISHED, Phase.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the story. is_notice: something to be seen, not to scroll away unseen."""

    text: str
    is_notice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A second, over the last RATE_WINDOW_S; None until two looks are apart."""

    rollouts: float | None
    tokens: float | None


class ProgressState:
    """Give it every status, in order. Invariant: rewards[i] is of step i + 1 of this lineage."""

    def __init__(self) -> None:
        self.status: RunStatus | None = None
        self.now = 0.0
        self.recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self.first_evaluation: EvaluationRecord | None = None
        self.last_evaluation: EvaluationRecord | None = None
        self._rewards: dict[int, float | None] = {}
        self._is_scaled = False
        self._looks: deque[tuple[float, int, int]] = deque()

    def absorb(self, status: RunStatus, *, now: float) -> list[Line]:
        """Take in a status at `now` (unix seconds); returns the new lines of the story."""
        previous, self.status, self.now = self.status, status, now
        lines: list[Line] = []
        for record in status.records:
            self._add_step(record)
            lines.append(Line(text=step_line(record, status.steps)))
        for evaluation in status.evaluations:
            self.first_evaluation = self.first_evaluation or evaluation
            self.last_evaluation = evaluation
            lines.append(Line(text=evaluation_line(evaluation)))
        lines += [Line(text=visible_lines(text), is_notice=True) for text in status.notices]
        news = _phase_news(previous, status)
        if news is not None:
            # An ending comes after its last steps, a beginning before its first.
            news_line = Line(text=visible_lines(news))
            lines.insert(len(lines) if status.phase in _ENDINGS else 0, news_line)
        self._look(status, now)
        return lines

    @property
    def rewards(self) -> Sequence[float | None]:
        return tuple(self._rewards.values())

    @property
    def is_reward_scaled(self) -> bool:
        return self._is_scaled

    @property
    def last(self) -> StepRecord | None:
        return self.recent[-1] if self.recent else None

    @property
    def elapsed_s(self) -> float:
        return 0.0 if self.status is None else max(0.0, self.now - self.status.started_at)

    @property
    def remaining_s(self) -> float | None:
        """The steps that are left at the median pace of the last ones; None before the first."""
        if self.status is None or not self.recent or self.status.is_done:
            return None
        pace = statistics.median(record.stages.total for record in self.recent)
        return pace * max(0, self.status.steps - self.status.step)

    @property
    def rates(self) -> Rates:
        if len(self._looks) < 2:
            return Rates(rollouts=None, tokens=None)
        (start, rollouts, tokens), (end, later_rollouts, later_tokens) = (
            self._looks[0],
            self._looks[-1],
        )
        span = end - start
        if span <= 0:
            return Rates(rollouts=None, tokens=None)
        return Rates(
            rollouts=(later_rollouts - rollouts) / span, tokens=(later_tokens - tokens) / span
        )

    @property
    def stages(self) -> StageSeconds | None:
        """Mean seconds of the last SHOWN_STEPS steps, by stage."""
        shown = list(self.recent)[-SHOWN_STEPS:]
        if not shown:
            return None
        names = shown[0].stages.by_name()
        return StageSeconds(
            **{
                name: statistics.fmean(getattr(record.stages, name) for record in shown)
                for name in names
            }
        )

    def _add_step(self, record: StepRecord) -> None:
        if self.recent and record.step <= self.recent[-1].step:
            # The run went back to a checkpoint: what this lineage did not keep is forgotten.
            kept = [known for known in self.recent if known.step < record.step]
            self.recent = deque(kept, maxlen=RECENT_STEPS)
            self._rewards = {
                step: value for step, value in self._rewards.items() if step < record.step
            }
        self.recent.append(record)
        value = record.best_known_reward
        self._rewards[record.step] = value if units.is_known(value) else None
        self._is_scaled = self._is_scaled or record.value("scaled_reward_mean") is not None

    def _look(self, status: RunStatus, now: float) -> None:
        if self._looks and status.rollouts_done < self._looks[-1][1]:
            self._looks.clear()
        self._looks.append((now, status.rollouts_done, status.sampled_tokens))
        while len(self._looks) > 2 and self._looks[0][0] < now - RATE_WINDOW_S:
            self._looks.popleft()


def _phase_news(previous: RunStatus | None, status: RunStatus) -> str | None:
    detail = status.exit_reason or status.phase_detail
    if previous is not None:
        before = previous.exit_reason or previous.phase_detail
        is_same = (previous.phase, before) == (status.phase, detail)
        is_return = status.phase is Phase.TRAINING and previous.phase in _INTERLUDES
        if is_same or is_return:
            return None
    return f"{status.phase.value}: {detail}" if detail else status.phase.value
