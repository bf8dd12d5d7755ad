"""The live display's picture: from a ProgressState to what `rich` draws; nothing moves here.

Colours are the terminal's own, so that its theme decides; nothing is said by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from actors.limits import MIB
from service import units
from service.cli.display.progress_state import Line, ProgressState
from service.run.health import Phase, RunStatus
from service.telemetry.records import StageSeconds
from service.visible import visible_text

SPARKS = "▁▂▃▄▅▆▇█"
DIM = "dim"
SEPARATOR = " · "
LABEL_WIDTH = 11
STAGE_BAR_WIDTH = 20
WIDE = 100
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
    Phase.RECOVERING: "bold yellow",
    Phase.STOPPING: "bold yellow",
    Phase.FINISHED: "bold green",
    Phase.FAILED: "bold red",
}


def picture(
    state: ProgressState, *, lines: Sequence[Line], width: int, num_lines: int
) -> RenderableType:
    """The whole display for a terminal `width` columns wide, with so many of the last lines."""
    status = state.status
    if status is None:
        return Text("")
    inner = width - 2
    parts: list[RenderableType] = [_header(state, status), _bar(status)]
    if state.last is not None or status.phase is not Phase.STARTING:
        parts += [Text(""), _facts(state, status, width=inner)]
    shown = list(lines)[-num_lines:] if num_lines > 0 else []
    if shown:
        parts.append(Text(""))
        parts += [_story(line) for line in shown]
    parts += [Text(""), _footer(status)]
    return Padding(Group(*parts), (0, 1))


def sparkline(
    values: Sequence[float | None], *, width: int, low: float | None, high: float | None
) -> str:
    """Block characters, one a bucket of neighbours; a space where nothing is known.

    low, high: the ends of the scale; None takes them from the values.
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
    label = Text(f"step {status.step}/{status.steps}  {100 * share:.0f} %")
    return _row(bar, label, left_ratio=1)


def _row(
    left: RenderableType, right: RenderableType, *, left_ratio: int | None = 1
) -> RenderableType:
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(ratio=left_ratio, no_wrap=True, overflow="ellipsis", vertical="middle")
    table.add_column(justify="right", no_wrap=True)
    table.add_row(left, right)
    return table


def _facts(state: ProgressState, status: RunStatus, *, width: int) -> RenderableType:
    table = Table.grid(expand=True, padding=(0, 1, 0, 0))
    table.add_column(width=LABEL_WIDTH, style=DIM, no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_row("reward", _reward(state, width=width - LABEL_WIDTH - 1))
    table.add_row("evaluation", _evaluation(state))
    table.add_row("policy", _policy(state, status))
    table.add_row("rollouts", _rollouts(state, status))
    table.add_row("queue", _queue(status))
    table.add_row("ledger", _ledger(status))
    bar_width = STAGE_BAR_WIDTH if width >= WIDE else STAGE_BAR_WIDTH // 2
    table.add_row("step time", _stages(state.stages, bar_width=bar_width))
    return table


def _reward(state: ProgressState, *, width: int) -> Text:
    if state.last is None:
        return Text(units.UNKNOWN, style=DIM)
    text = Text(units.reward(state.last.best_known_reward), style="bold")
    scale = "  best 1" if state.is_reward_scaled else ""
    low, high = (0.0, 1.0) if state.is_reward_scaled else (None, None)
    room = width - len(text) - len(scale) - 2
    text.append(
        "  " + sparkline(state.rewards, width=room, low=low, high=high), style="not bold blue"
    )
    text.append(scale, style="not bold dim")
    return text


def _evaluation(state: ProgressState) -> Text:
    first, last = state.first_evaluation, state.last_evaluation
    if first is None or last is None:
        return Text(units.UNKNOWN, style=DIM)
    text = Text(units.reward(last.best_known_reward))
    text.append(f" at version {last.policy_version}", style=DIM)
    if first is not last:
        text.append(f", from {units.reward(first.best_known_reward)}", style=DIM)
    return text


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
    return _named(facts)


def _rollouts(state: ProgressState, status: RunStatus) -> Text:
    rates = state.rates
    return _amounts(
        [
            (units.short_count(status.rollouts_done), "done"),
            (_rate(rates.rollouts), "a second"),
            (_rate(rates.tokens), "tokens a second"),
        ]
    )


def _queue(status: RunStatus) -> Text:
    engines = "engine ready" if status.engines_ready == 1 else "engines ready"
    return _amounts(
        [
            (units.short_count(status.queue_items), "waiting"),
            (f"{status.queue_bytes / MIB:.1f}", "MiB"),
            (str(status.engines_ready), engines),
        ]
    )


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
    text.append("  ")
    named = {name: seconds for name, seconds in shown.items() if seconds >= SHOWN_STAGE_S}
    for index, (name, seconds) in enumerate(named.items()):
        text.append(" " if index else "").append(name, style=STAGE_STYLES[name])
        text.append(f" {seconds:.1f}", style=DIM)
    return text


def _story(line: Line) -> Text:
    style = "yellow" if line.is_notice else DIM
    mark = "! " if line.is_notice else ""
    return Text(f"{mark}{line.text}", style=style, no_wrap=True, overflow="ellipsis")


def _footer(status: RunStatus) -> Text:
    facts = [status.run_dir] if status.run_dir else []
    if status.metrics_address:
        facts.append(status.metrics_address)
    if not status.is_done:
        facts.append("Ctrl-C stops in order")
    return Text(SEPARATOR.join(facts), style=DIM, no_wrap=True, overflow="ellipsis")


def _named(facts: Sequence[tuple[str, str]]) -> Text:
    text = Text()
    for index, (name, value) in enumerate(facts):
        text.append(SEPARATOR if index else "", style=DIM)
        text.append(f"{name} ", style=DIM).append(value)
    return text


def _amounts(facts: Sequence[tuple[str, str]]) -> Text:
    text = Text()
    for index, (value, noun) in enumerate(facts):
        text.append(SEPARATOR if index else "", style=DIM)
        text.append(value).append(f" {noun}", style=DIM)
    return text


def _rate(value: float | None) -> str:
    return units.UNKNOWN if value is None else units.short_count(round(value))
