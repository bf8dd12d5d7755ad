"""Show a trajectory in the terminal: its text in colours, and a table of sampled and faulty tokens.

The colours are the terminal's own, and no information is shown by colour only: the table names each
class, and each segment counts its tokens by class.
"""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.inspect.view import MEANINGS, Segment, Token, TokenClass, TrajectoryView, number
from service.visible import visible_text

STYLES: dict[TokenClass, str] = {
    TokenClass.TRAINED: "bold green underline",
    TokenClass.MASKED: "yellow",
    TokenClass.PROMPT: "",
    TokenClass.OBSERVATION: "cyan",
    TokenClass.INSERTED: "magenta",
    TokenClass.TEMPLATE: "bright_black",
}
FAULT = "bold white on red"
BOUNDARY = "bold"
# Few columns, so that a table fits a terminal's usual width.
_COLUMNS = ("token", "text", "id", "is", "turn", "logprob", "version", "advantage", "")


def show(view: TrajectoryView, console: Console) -> None:
    """Print a trajectory's facts, its text, and the table of its sampled and faulty tokens."""
    console.print(_heading(view))
    for sample in view.samples:
        console.print()
        console.print(Text(f"── {sample.title}: {sample.opening}", style=BOUNDARY))
        for segment in sample.segments:
            console.print(_segment(segment))
    shown = [
        (sample.title, [token for token in sample.tokens if _is_of_interest(token)])
        for sample in view.samples
    ]
    for title, tokens in shown:
        if tokens:
            console.print()
            console.print(_table(tokens, title=f"{title}: sampled tokens and faults"))


def _heading(view: TrajectoryView) -> Text:
    trajectory = view.entry.trajectory
    title = f"{trajectory.trajectory_id}, step {view.step.step}, task {trajectory.task_id}"
    text = Text(visible_text(title), style="bold")
    for label, value in view.facts:
        text.append(f"\n  {label:<16} ", style="bright_black").append(value)
    for fault in _summary(view):
        text.append("\n  ").append(f" {fault} ", style=FAULT)
    if view.note:
        text.append(f"\n  token ids without their text: {visible_text(view.note)}", style="yellow")
    text.append("\n  ")
    for kind, count in view.counts.items():
        text.append(f"{MEANINGS[kind]} {count}", style=STYLES[kind]).append("   ")
    return text


def _summary(view: TrajectoryView) -> tuple[str, ...]:
    return tuple(f"tokens in red, {n}: {fault}" for fault, n in view.fault_counts.items())


def _segment(segment: Segment) -> Text:
    counts = Counter(MEANINGS[token.kind] for token in segment.tokens)
    parts = ", ".join(f"{count} {name}" for name, count in counts.items()) or "no tokens"
    note = f"; {segment.note}" if segment.note else ""
    text = Text(f"[{segment.title}: {parts}{note}]\n", style="bright_black")
    for token in segment.tokens:
        if token.starts_branch:
            text.append("⟪differs from here⟫", style=BOUNDARY)
        text.append(token.text, style=FAULT if token.faults else STYLES[token.kind])
        if token.ends_line:
            text.append("\n")
    return text


def _is_of_interest(token: Token) -> bool:
    return token.turn is not None or bool(token.faults)


def _table(tokens: list[Token], *, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), show_edge=False)
    for name in _COLUMNS:
        is_number = name in ("token", "id", "turn", "logprob", "version", "advantage")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != "")
    for token in tokens:
        style = FAULT if token.faults else STYLES[token.kind]
        table.add_row(
            str(token.position),
            Text(token.text, style=style),
            str(token.token_id),
            token.kind.value,
            _whole(token.turn),
            _nats(token),
            _whole(token.version),
            "" if token.advantage is None else number(token.advantage),
            Text("; ".join(token.faults), style="red"),
        )
    return table


def _whole(value: int | None) -> str:
    return "" if value is None else str(value)


def _nats(token: Token) -> str:
    return "" if token.logprob is None else f"{token.logprob:.4f}"
