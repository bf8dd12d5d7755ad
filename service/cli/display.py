"""The display of a run, which is a live picture on a terminal and plain lines everywhere else.

The command line opens a display, passes it each RunStatus, and closes it. If the terminal or pipe
is gone, a display shows nothing more and raises no error. It uses the terminal's own colours, so
that they follow its theme; no information is shown by colour only.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from actors.limits import MIB
from actors.trajectory_queue.ledger import TokenCounts
from service import units
from service.cli.outlet import OutletConsole, outlet
from service.report.document import Phase
from service.run.health import RunStatus
from service.telemetry.records import (
    EvaluationRecord,
    StageSeconds,
    StepRecord,
    evaluation_line,
    step_line,
)
from service.units import visible_lines, visible_text

# A run's progress as lines and numbers: a line for each event, and a display's state. Pure.
#
# The run's log, the plain display and the live display's last lines all show the lines of
# `step_line` and `evaluation_line`. A status contains only new items, so `ProgressState`
# accumulates them; the caller passes the time.
RATE_WINDOW_S = 15.0
RECENT_STEPS = 20
SHOWN_STEPS = 5
MAX_REWARDS = 1024

# No line is shown when a run returns from these phases to training.
_INTERLUDES: frozenset[Phase] = frozenset({"evaluating", "writing a checkpoint"})
# The command itself says how a run ended.
_ENDED: frozenset[Phase] = frozenset({"finished", "failed", "without its lease"})
_ENDINGS: frozenset[Phase] = _ENDED | {"recovering", "stopping"}


class ProgressState:
    """The state of a display; it must receive every status, in order.

    For the curve it keeps at most MAX_REWARDS rewards: in a longer run only the reward of every
    second step, or of every fourth, and so on. If a return to a checkpoint undoes steps, their
    rewards are removed.
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

    def absorb(self, status: RunStatus, *, now: float) -> list[tuple[str, bool]]:
        """Add a status at `now` (seconds since 1970), and return the new lines.

        Returns: pairs of a line and a flag. The flag is true if the line is a notice, which is a
        fault or a warning and stays on the terminal.
        """
        previous, self.status, self.now = self.status, status, now
        lines: list[tuple[str, bool]] = []
        for record in status.records:
            self._add_step(record)
            lines.append((step_line(record, status.steps, left_s=self._left_s(record)), False))
        for evaluation in status.evaluations:
            if evaluation.is_charted:
                self.first_evaluation = self.first_evaluation or evaluation
                self.last_evaluation = evaluation
            lines.append((evaluation_line(evaluation), False))
        lines += [(visible_lines(text), True) for text in status.notices]
        if news := _phase_news(previous, status):
            # The line of an ending follows the steps; the line of another phase precedes them.
            index = len(lines) if status.phase in _ENDINGS else 0
            texts = self._ended_stage(previous, now)
            if status.phase not in _ENDED:
                texts.append(news)
            lines[index:index] = [(visible_lines(text), False) for text in texts]
            self._phase_since = now
        lines[:0] = [(visible_lines(text), False) for text in status.stages]
        self._add_totals(status, now)
        return lines

    def _ended_stage(self, previous: RunStatus | None, now: float) -> list[str]:
        if previous is None or previous.phase != "starting":
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
        """Expected seconds for the remaining steps, at the recent pace; None before step 1."""
        if self.status is None or not self.recent or self.status.is_done:
            return None
        return self._pace_s * max(0, self.status.steps - self.status.step)

    @property
    def rates(self) -> dict[str, float]:
        """Rollouts and tokens per second, over RATE_WINDOW_S; empty before the second status."""
        if not self._totals or (span := self._totals[-1][0] - self._totals[0][0]) <= 0:
            return {}
        (_, rollouts, tokens), (_, later_rollouts, later_tokens) = self._totals[0], self._totals[-1]
        return {
            "rollouts": (later_rollouts - rollouts) / span,
            "tokens": (later_tokens - tokens) / span,
        }

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
        is_return = status.phase == "training" and previous.phase in _INTERLUDES
        if is_same or is_return:
            return None
    return f"{status.phase}: {detail}" if detail else status.phase


MAX_LINES = 8
ROWS_BESIDE_LINES = 15
SPARKS = "▁▂▃▄▅▆▇█"
DIM = "dim"
SEPARATOR = " · "
LABEL_WIDTH = 11
STAGE_BAR_WIDTH = 20
WIDE = 100
MIN_WIDTH = 50
SHOWN_CAUSES = 3
# Variables, one of which is set if the output is not shown on a terminal's screen.
PLAIN = ("NO_COLOR", "CI", "JPY_PARENT_PID")
SHOWN_STAGE_S = 0.05

STAGE_STYLES = {
    "collect": "cyan",
    "merge": "yellow",
    "score": "bright_cyan",
    "train": "blue",
    "publish": "green",
    "checkpoint": "bright_black",
    "evaluate": "magenta",
}

PHASE_STYLES: Mapping[Phase, str] = {
    "paused": "bold yellow",
    "recovering": "bold yellow",
    "stopping": "bold yellow",
    "finished": "bold green",
    "failed": "bold red",
    "without its lease": "bold red",
}

Clock = Callable[[], float]


def open_display(
    *, environ: Mapping[str, str], console: Console | None = None
) -> LineDisplay | LiveDisplay:
    """Open and return a live display if the terminal supports it, otherwise a display of lines.

    A display of lines is used in a pipe, in CI, in a notebook's cell (a terminal that cannot
    redraw), on a terminal that is narrower than the picture, or with NO_COLOR set.
    """
    shown_on = console or OutletConsole()
    is_plain = any(environ.get(name) for name in PLAIN) or not shown_on.is_terminal
    is_plain = is_plain or shown_on.width < MIN_WIDTH
    # An escape is wider than the bar character that it replaces.
    if is_plain or shown_on.is_dumb_terminal or shown_on.options.ascii_only:
        return LineDisplay(shown_on)
    return LiveDisplay(shown_on)


class LineDisplay:
    """Prints a plain, unwrapped line for each step, phase, evaluation and notice.

    Statuses must be passed to `update` in order.
    """

    def __init__(self, console: Console, *, clock: Clock = time.time) -> None:
        self._console = console
        self._clock = clock
        self._state = ProgressState()

    def update(self, status: RunStatus) -> None:
        lines = self._state.absorb(status, now=self._clock())
        with outlet(self._console.file):
            for text, is_notice in lines:
                self._console.out(f"warning: {text}" if is_notice else text, highlight=False)
                self._console.file.flush()

    def leave(self) -> None:
        """Let the caller print to the terminal; the next status opens the display again."""
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was, with the last picture still on it."""
        with outlet(self._console.file):
            self._console.file.flush()


class LiveDisplay:
    """A picture that is redrawn with every status; notices are also printed above it."""

    def __init__(self, console: Console, *, clock: Clock = time.time) -> None:
        self._console = console
        self._clock = clock
        self._state = ProgressState()
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._has_started = False
        with outlet(console.file):
            self._live.start()
            self._has_started = True

    def update(self, status: RunStatus) -> None:
        lines = self._state.absorb(status, now=self._clock())
        with outlet(self._console.file):
            if not self._live.is_started:
                self._live.start()
            for text, is_notice in lines:
                if is_notice:
                    notice = f"! {text}"
                    self._console.print(notice, style="yellow", markup=False, highlight=False)
                else:
                    self._lines.append(text)
            width, height = self._console.size
            num_lines = min(MAX_LINES, height - ROWS_BESIDE_LINES)
            frame = picture(self._state, lines=self._lines, width=width, num_lines=num_lines)
            self._live.update(frame, refresh=True)

    def leave(self) -> None:
        self.close()

    def close(self) -> None:
        if self._has_started:
            with outlet(self._console.file):
                self._live.stop()


def picture(
    state: ProgressState, *, lines: Sequence[str], width: int, num_lines: int
) -> RenderableType:
    """Return the display for a terminal of `width` columns, with the last `num_lines` lines."""
    status = state.status
    if status is None:
        return Text("")
    parts: list[RenderableType] = [_header(state, status), _bar(status)]
    if state.last is not None or status.phase != "starting":
        parts += [Text(""), _facts(state, status, width=width - 2)]
    shown = list(lines)[-num_lines:] if num_lines > 0 else []
    if shown:
        parts.append(Text(""))
    for line in shown:
        parts.append(Text(line, style=DIM, no_wrap=True, overflow="ellipsis"))
    parts += [Text(""), _footer(status)]
    return Padding(Group(*parts), (0, 1))


def sparkline(
    values: Sequence[float | None], *, width: int, low: float | None, high: float | None
) -> str:
    """Return one block character for each bucket of neighbouring values.

    If no value of a bucket is known, its character is a space.

    low, high: ends of the scale; None uses the least and the greatest value.
    Example: sparkline([0, .5, 1], width=3, low=0, high=1) -> '▁▅█'
    """
    count = min(len(values), max(width, 0))
    means = []
    for index in range(count):
        begin = index * len(values) // count
        known = [v for v in values[begin : (index + 1) * len(values) // count] if v is not None]
        means.append(sum(known) / len(known) if known else None)
    present = [mean for mean in means if mean is not None]
    if not present:
        return ""
    bottom = min(present) if low is None else min(low, *present)
    top = max(present) if high is None else max(high, *present)
    span = (top - bottom) or 1.0
    return "".join(
        " " if mean is None else SPARKS[round((mean - bottom) / span * (len(SPARKS) - 1))]
        for mean in means
    )


def _header(state: ProgressState, status: RunStatus) -> RenderableType:
    left = Text(status.name, style="bold")
    left.append(f"  {status.phase}", style=PHASE_STYLES.get(status.phase, "bold blue"))
    if status.phase_detail:
        left.append(f"  {visible_text(status.phase_detail)}", style=DIM)
    time = f"{units.clock(state.elapsed_s)} elapsed"
    if state.remaining_s is not None and state.remaining_s > 0:
        time += f"{SEPARATOR}about {units.clock(state.remaining_s)} left"
    return _row(left, Text(time, style=DIM))


def _bar(status: RunStatus) -> RenderableType:
    share = status.step / status.steps if status.steps else 0.0
    bar = ProgressBar(
        total=max(status.steps, 1),
        completed=status.step,
        style="bright_black",
        complete_style="blue",
        finished_style="green",
    )
    return _row(bar, Text(f"step {status.step}/{status.steps}  {100 * share:.0f} %"))


def _row(left: RenderableType, right: RenderableType) -> RenderableType:
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis", vertical="middle")
    table.add_column(justify="right", no_wrap=True)
    table.add_row(left, right)
    return table


def _facts(state: ProgressState, status: RunStatus, *, width: int) -> RenderableType:
    table = Table.grid(expand=True, padding=(0, 1, 0, 0))
    table.add_column(width=LABEL_WIDTH, style=DIM, no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    bar_width = STAGE_BAR_WIDTH if width >= WIDE else STAGE_BAR_WIDTH // 2
    rates = state.rates
    engines = "engine ready" if status.engines_ready == 1 else "engines ready"
    table.add_row("reward", _reward(state, width=width - LABEL_WIDTH - 1))
    table.add_row("evaluation", _evaluation(state))
    table.add_row("policy", _policy(state, status))
    table.add_row(
        "rollouts",
        _amounts(
            (units.short_count(status.rollouts_done), "done"),
            (_rate(rates.get("rollouts")), "a second"),
            (_rate(rates.get("tokens")), "tokens a second"),
        ),
    )
    table.add_row("tokens", _tokens(state.tokens))
    table.add_row(
        "queue",
        _amounts(
            (units.short_count(status.queue_items), "waiting"),
            (f"{status.queue_bytes / MIB:.1f}", "MiB"),
            (str(status.engines_ready), engines),
        ),
    )
    table.add_row("ledger", _ledger(status))
    table.add_row("step time", _stages(state.stages, bar_width=bar_width))
    return table


def _reward(state: ProgressState, *, width: int) -> Text:
    if state.last is None:
        return Text(units.UNKNOWN, style=DIM)
    reward = units.reward(state.last.best_known_reward)
    scale, low, high = ("  best 1", 0.0, 1.0) if state.is_reward_scaled else ("", None, None)
    room = width - len(reward) - len(scale) - 2
    sparks = sparkline(state.rewards, width=room, low=low, high=high)
    return Text.assemble((reward, "bold"), (f"  {sparks}", "blue"), (scale, DIM))


def _evaluation(state: ProgressState) -> Text:
    first, last = state.first_evaluation, state.last_evaluation
    if first is None or last is None:
        return Text(units.UNKNOWN, style=DIM)
    before = "" if first is last else f", from {units.reward(first.best_known_reward)}"
    reward = units.reward(last.best_known_reward)
    return Text.assemble(reward, (f" at version {last.policy_version}{before}", DIM))


def _policy(state: ProgressState, status: RunStatus) -> Text:
    last = state.last
    facts = [("version", str(status.policy_version))]
    if last is not None:
        age = f"{last.policy_age_max} (mean {last.value('policy_age_mean') or 0.0:.1f})"
        facts += [
            ("age", age),
            ("loss", units.significant(last.value("loss"), digits=2)),
            ("entropy", units.significant(last.value("entropy_mean"), digits=2)),
            ("k3", units.significant(last.value("mismatch_k3_mean"), digits=1)),
        ]
    return _joined(Text.assemble((f"{name} ", DIM), value) for name, value in facts)


def _tokens(tokens: TokenCounts) -> Text:
    """Return the trained share of the sampled tokens, and the untrained shares by cause."""
    if not tokens.sampled:
        return Text(units.UNKNOWN, style=DIM)
    shares = [("trained", tokens.trained_share), *tokens.causes()[:SHOWN_CAUSES]]
    return _amounts(*((units.percent(share), str(what)) for what, share in shares))


def _ledger(status: RunStatus) -> Text:
    ledger = status.ledger
    text = Text()
    for sign, count, name in (
        ("", ledger.admitted, "admitted"),
        (" = ", ledger.trained, "trained"),
        (" + ", ledger.num_evicted, "evicted"),
        (" + ", ledger.in_flight, "in flight"),
    ):
        text.append(sign, style=DIM).append(units.short_count(count))
        text.append(f" {name}", style=DIM)
    if not ledger.is_balanced:
        text.append("  does not balance", style="bold red")
    return text


def _stages(stages: StageSeconds | None, *, bar_width: int) -> Text:
    if stages is None or stages.total <= 0:
        return Text(units.UNKNOWN, style=DIM)
    text = Text(f"{units.duration(stages.total)}  ")
    shown = {name: seconds for name, seconds in stages.by_name().items() if seconds > 0}
    filled, drawn = 0.0, 0
    for name, seconds in shown.items():
        filled += seconds / stages.total * bar_width
        cells = round(filled) - drawn
        drawn += cells
        text.append("█" * cells, style=STAGE_STYLES[name])
    text.append(" ")
    for name, seconds in shown.items():
        if seconds >= SHOWN_STAGE_S:
            text.append(f" {name}", style=STAGE_STYLES[name]).append(f" {seconds:.1f}", style=DIM)
    return text


def _footer(status: RunStatus) -> Text:
    stop = "" if status.is_done else "Ctrl-C stops in order"
    facts = (status.run_dir, status.metrics_address, stop)
    shown = SEPARATOR.join(fact for fact in facts if fact)
    return Text(shown, style=DIM, no_wrap=True, overflow="ellipsis")


def _amounts(*facts: tuple[str, str]) -> Text:
    return _joined(Text.assemble(value, (f" {noun}", DIM)) for value, noun in facts)


def _joined(facts: Iterable[Text]) -> Text:
    return Text(SEPARATOR, style=DIM).join(facts)


def _rate(value: float | None) -> str:
    return units.UNKNOWN if value is None else units.short_count(round(value))
