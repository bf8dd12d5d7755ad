"""`rayloom inspect`: the journal of a run, its trajectories, or one of them token by token."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from actors.journal.record import JournalStep, TrajectoryEntry
from actors.trajectory import Outcome
from service.config.file import ConfigError, load_config
from service.display.outlet import OutletConsole, outlet, say
from service.inspection.audit.audit import audit, describe
from service.inspection.build import build_view
from service.inspection.listing import Filters, list_trajectories
from service.inspection.reader import OpenJournal, find_entry, newest_run, open_journal
from service.inspection.terminal import show
from service.inspection.token_text import TokenText, token_text
from service.run_dir import RunDir

EXIT_OFFENDERS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest:
    """target: a run directory, a journal file, or a trajectory's id. run: where an id is looked
    for, None: the newest run under runs/. html: a page is written there instead of the terminal.
    """

    target: str
    run: Path | None = None
    html: Path | None = None
    audit: bool = False
    step: int | None = None
    outcome: str | None = None
    limit: int = 50


def run_inspect(request: InspectRequest) -> int:
    """Show what was asked for; returns the exit code. Raises: ConfigError."""
    place = Path(request.target)
    if request.audit and not place.exists():
        raise ConfigError(
            f"inspect: --audit checks a whole journal, and {place} is not there; expected a run "
            "directory or a journal file"
        )
    if not place.exists():
        journal = open_journal(request.run or newest_run())
        return _show_one(request, journal, *find_entry(journal, request.target))
    journal = open_journal(place)
    if request.html is not None:
        raise ConfigError(
            "inspect: --html shows one trajectory, got a whole journal; expected an id; name one, "
            f"such as `rayloom inspect ID --run {place} --html {request.html}`"
        )
    if request.audit:
        return _audit(request, journal)
    filters = Filters(step=request.step, outcome=_outcome(request.outcome), limit=request.limit)
    say(list_trajectories(journal, filters))
    return 0


def _audit(request: InspectRequest, journal: OpenJournal) -> int:
    result = audit(journal)
    say("\n".join(describe(result, limit=request.limit)))
    return 0 if result.is_clean else EXIT_OFFENDERS


def _show_one(
    request: InspectRequest,
    journal: OpenJournal,
    step: JournalStep,
    entry: TrajectoryEntry,
) -> int:
    view = build_view(step, entry, text_of(journal))
    if request.html is None:
        with outlet(sys.__stdout__):
            show(view, OutletConsole())
        return 0
    from service.inspection.page import write_page  # with the report's figures: seconds of imports

    try:
        write_page(request.html, view)
    except OSError as error:
        raise ConfigError(
            f"--html {request.html}: cannot be written ({error.strerror or error}); expected a "
            "file in a directory that is there; choose another"
        ) from error
    say(f"{request.html}: {entry.trajectory.trajectory_id}, step {step.step}")
    return 0


def text_of(journal: OpenJournal) -> TokenText:
    """The tokenizer of the journal's run: its own tiny model, or the configuration's path."""
    run_dir = journal.run_dir or RunDir(path=journal.place.resolve().parent.parent)
    if not run_dir.config_file.is_file():
        why = f"there is no {run_dir.config_file.name} beside the journal to name the model"
        return token_text(None, template_options={}, why_not=why)
    try:
        config = load_config(run_dir.config_file)
    except ConfigError as error:
        return token_text(None, template_options={}, why_not=str(error))
    tiny = run_dir.tiny_model if (run_dir.tiny_model / "config.json").is_file() else None
    model = config.model.path or (str(tiny) if tiny else None)
    return token_text(
        model,
        template_options=config.rollouts.template_options,
        why_not=f"the run's own model is not in {run_dir.tiny_model}",
    )


def _outcome(name: str | None) -> Outcome | None:
    if name is None:
        return None
    try:
        return Outcome(name)
    except ValueError:
        known = ", ".join(outcome.value for outcome in Outcome)
        raise ConfigError(f"--outcome: got {name!r}, expected one of {known}") from None
