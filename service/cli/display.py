"""The display of a run, which is a live picture on a terminal and plain lines everywhere else.

The command line opens a display, passes it each RunStatus, and closes it. If the terminal or pipe
is gone, a display shows nothing more and raises no error. It uses the terminal's own colours, so
that they follow its theme; no information is shown by colour only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

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
from service.cli.progress import ProgressState, StoryLine
from service.report.document import Phase
from service.run.health import RunStatus
from service.telemetry.records import StageSeconds
from service.visible import visible_text

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

PHASE_STYLES = {
    Phase.PAUSED: "bold yellow",
    Phase.RECOVERING: "bold yellow",
    Phase.STOPPING: "bold yellow",
    Phase.FINISHED: "bold green",
    Phase.FAILED: "bold red",
    Phase.TAKEN_OVER: "bold red",
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
            for line in lines:
                text = f"warning: {line.text}" if line.is_notice else line.text
                self._console.out(text, highlight=False)
                self._console.file.flush()

    def leave(self) -> None:
        """Release the terminal until the next status."""
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
        self._lines: deque[StoryLine] = deque(maxlen=MAX_LINES)
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
            for line in lines:
                if line.is_notice:
                    text = f"! {line.text}"
                    self._console.print(text, style="yellow", markup=False, highlight=False)
                else:
                    self._lines.append(line)
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
    state: ProgressState, *, lines: Sequence[StoryLine], width: int, num_lines: int
) -> RenderableType:
    """Return the display for a terminal of `width` columns, with the last `num_lines` lines."""
    status = state.status
    if status is None:
        return Text("")
    parts: list[RenderableType] = [_header(state, status), _bar(status)]
    if state.last is not None or status.phase is not Phase.STARTING:
        parts += [Text(""), _facts(state, status, width=width - 2)]
    shown = list(lines)[-num_lines:] if num_lines > 0 else []
    if shown:
        parts.append(Text(""))
    for line in shown:
        mark, style = ("! ", "yellow") if line.is_notice else ("", DIM)
        parts.append(Text(f"{mark}{line.text}", style=style, no_wrap=True, overflow="ellipsis"))
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
    left.append(f"  {status.phase.value}", style=PHASE_STYLES.get(status.phase, "bold blue"))
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
            (_rate(rates.rollouts if rates else None), "a second"),
            (_rate(rates.tokens if rates else None), "tokens a second"),
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
    """Return the trained share of the sampled tokens, and the shares left out, by cause."""
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
