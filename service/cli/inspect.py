"""`rayloom inspect`: show the journal of a run, its trajectories, or one trajectory's tokens.

Options that have no effect on the requested output are refused.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from actors.journal.files import JournalStep
from actors.types import Outcome
from service.cli.outlet import OutletConsole, outlet, say
from service.config.file import ConfigError, why_missing
from service.hacking.patterns import find_all
from service.hacking.read import Verify, describe_audit, read_features
from service.inspect.audit import audit, describe
from service.inspect.listing import Filters, list_trajectories
from service.inspect.reader import (
    OpenJournal,
    config_beside,
    file_of_step,
    find_entry,
    is_refused,
    newest_run,
    open_journal,
    tokenizer_of,
)
from service.inspect.view import (
    MEANINGS,
    Segment,
    Token,
    TokenClass,
    TrajectoryView,
    build_view,
    number,
    trajectory_document,
)
from service.page.packed import page_with
from service.telemetry.summary import write_aside
from service.units import visible_text

EXIT_OFFENDERS = 1
DEFAULT_LIMIT = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest:
    """Arguments of `rayloom inspect`."""

    target: str
    """A run directory, a journal file, or a trajectory's id."""
    run: Path | None = None
    """The run in which to find the trajectory `target`; None for the newest run under runs/."""
    html: Path | None = None
    """File for an HTML page; None shows the trajectory in the terminal."""
    audit: bool = False
    hacking: bool = False
    """Whether to search for reward hacking."""
    shadow: str | None = None
    """Name of a verifier to use instead of the run's own."""
    step: int | None = None
    outcome: str | None = None
    limit: int | None = None
    """Maximum number of lines; 0 for all; None if the option was not given."""

    @property
    def num_lines(self) -> int:
        return DEFAULT_LIMIT if self.limit is None else self.limit

    def given(self, *names: str) -> str:
        """Return the options among `names` that were given, written as on the command line."""
        values = {name: getattr(self, name) for name in names}
        shown = (f"--{name} {value}" for name, value in values.items() if value is not None)
        return " and ".join(shown)


def run_inspect(request: InspectRequest) -> int:
    """Show what the request asks for, and return the exit code.

    Raises: ConfigError if an option has no effect, or the journal cannot be read.
    """
    target = request.target
    if not target.strip():
        raise ConfigError(
            "inspect: got an empty text; expected a run directory, a journal file, or a "
            "trajectory's id; name one"
        )
    # os.path, since Path.exists raises for a path that cannot be accessed.
    _check_audits(request)
    is_audit = request.audit or request.hacking
    if not is_audit and not os.path.exists(target):
        _check_options_of_one(request)
        return _show_one(request, open_journal(request.run or newest_run(target)))
    _check_options_of_journal(request)
    journal = open_journal(Path(target))
    if request.audit:
        result = audit(journal)
        say("\n".join(describe(result, limit=request.num_lines)))
        return 0 if result.is_clean else EXIT_OFFENDERS
    if request.hacking:
        return _show_hacking(request, journal)
    if request.step is not None:
        file_of_step(journal, request.step, command="inspect")
    filters = Filters(step=request.step, outcome=_outcome(request.outcome), limit=request.num_lines)
    say(list_trajectories(journal, filters))
    return 0


def _show_hacking(request: InspectRequest, journal: OpenJournal) -> int:
    verify = None if request.shadow is None else _shadow_of(journal, request.shadow)
    steps = list(read_features(journal, verify=verify))
    findings = find_all(steps)
    say("\n".join(describe_audit(journal, steps, findings, limit=request.num_lines)))
    return EXIT_OFFENDERS if findings else 0


def _shadow_of(journal: OpenJournal, name: str) -> Verify:
    from service.hacking.shadow import ShadowVerifier  # a second of imports

    run_dir = journal.run_dir
    if run_dir is None:
        raise ConfigError(
            f"inspect: --shadow {name} needs the run's tasks and tokenizer, got a journal file; "
            "expected a run directory; name that"
        )
    config = config_beside(run_dir)
    verifier = ShadowVerifier(
        config,
        model=config.model.path or str(run_dir.tiny_model),
        name=name,
        num_samples=config.audit.shadow_samples,
    )

    def verify(step: JournalStep) -> Mapping[str, bool]:
        found = verifier.verdicts(step)
        if problem := next((each for each in found.values() if isinstance(each, str)), None):
            say(f"step {step.step}: {problem}", err=True)
        return {name: each for name, each in found.items() if isinstance(each, bool)}

    return verify


def _show_one(request: InspectRequest, journal: OpenJournal) -> int:
    step, entry = find_entry(journal, request.target)
    text, refused = tokenizer_of(journal), is_refused(journal, entry)
    view = build_view(step, entry, text, is_refused=refused)
    if request.html is None:
        with outlet(sys.__stdout__):
            show(view, OutletConsole())
        return 0
    try:
        write_page(request.html, view)
    except OSError as error:
        raise ConfigError(
            f"--html {request.html}: cannot be written ({error.strerror or error}); expected a "
            "regular file in a directory that exists; choose another"
        ) from error
    say(f"{request.html}: {entry.trajectory.trajectory_id}, step {step.step}")
    return 0


def _check_audits(request: InspectRequest) -> None:
    if request.audit and request.hacking:
        raise ConfigError(
            "inspect: --audit checks invariants and --hacking looks for reward hacking, got both; "
            "expected one of them; leave one out"
        )
    is_one_named = request.run is not None and not os.path.exists(request.target)
    if (request.audit or request.hacking) and is_one_named and os.path.exists(request.run or ""):
        raise ConfigError(
            f"inspect: {'--audit' if request.audit else '--hacking'} checks a whole journal, got "
            f"the id {request.target} too; expected only a run; leave the id out"
        )
    if request.shadow is not None and not request.hacking:
        raise ConfigError(
            f"inspect: got --shadow {request.shadow} without --hacking, which uses it; expected "
            "both; add --hacking"
        )


def _check_options_of_journal(request: InspectRequest) -> None:
    target = request.target
    if request.html is not None:
        raise ConfigError(
            "inspect: --html shows one trajectory, got a whole journal; expected an id; name one, "
            f"such as `rayloom inspect {target} ID --html {request.html}`"
        )
    if request.run is not None:
        raise ConfigError(
            f"inspect: --run {request.run} names the run of an id, got the run {target}, not an "
            f"id; expected one run; leave --run out, or give an id instead of {target}"
        )
    is_whole = "--audit" if request.audit else "--hacking" if request.hacking else ""
    if is_whole and (given := request.given("step", "outcome")):
        one = ", or audit one step by the path of its journal file" if request.audit else ""
        raise ConfigError(
            f"inspect: {is_whole} checks a whole journal, got {given}; expected neither --step nor "
            f"--outcome; omit these options{one}"
        )


def _check_options_of_one(request: InspectRequest) -> None:
    if "/" in request.target or os.path.islink(request.target):
        raise ConfigError(
            f"inspect: {request.target} {why_missing(request.target)}; expected a run directory, a "
            "journal file, or a trajectory's id; `rayloom inspect RUN_DIR` lists the ids"
        )
    if given := request.given("step", "outcome", "limit"):
        raise ConfigError(
            f"inspect: {given} chooses from a list, got the id {request.target}; expected only the "
            "id; give no such option, or give a run directory instead of the id"
        )
    if request.html is not None and (not request.html.name or os.path.isdir(request.html)):
        raise ConfigError(
            f"--html {request.html}: is a directory; expected a file; name one in it, such as "
            f"{request.html / 'page.html'}"
        )


def _outcome(name: str | None) -> Outcome | None:
    if name is None:
        return None
    try:
        return Outcome(name)
    except ValueError:
        known = ", ".join(outcome.value for outcome in Outcome)
        raise ConfigError(f"--outcome: got {name!r}, expected one of {known}") from None


def write_page(path: Path, view: TrajectoryView) -> None:
    """Write the HTML page of a trajectory to `path`, replacing an existing file atomically.

    Raises: OSError if the page cannot be written.
    """
    write_aside(path, page_with(trajectory_document(view)))


# A trajectory in the terminal: its text in colours, and a table of sampled and faulty tokens.
#
# The colours are the terminal's own, and no information is shown by colour only: the table names
# each class, and each segment counts its tokens by class.
STYLES: dict[TokenClass, str] = {
    "trained": "bold green underline",
    "masked": "yellow",
    "prompt": "",
    "observation": "cyan",
    "inserted": "magenta",
    "template": "bright_black",
}
FAULT = "bold white on red"
BOUNDARY = "bold"
# Few columns, so that a table fits a terminal's usual width.
_COLUMNS = ("token", "text", "id", "is", "turn", "logprob", "version", "advantage", "")


def show(view: TrajectoryView, console: Console) -> None:
    """Print a trajectory's facts, its text, and a table of its sampled and its faulty tokens.

    An example of a faulty token is a prompt token that was trained.
    """
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
            token.kind,
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
