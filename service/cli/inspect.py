"""`rayloom inspect`: the journal of a run, its trajectories, or one of them token by token."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from actors.journal.record import JournalStep, TrajectoryEntry
from actors.types import Outcome
from service.cli.display.outlet import OutletConsole, outlet, say
from service.cli.inspect_options import InspectRequest, check_of_journal, check_of_one
from service.config.file import ConfigError
from service.inspect.audit.audit import audit, describe
from service.inspect.build import build_view
from service.inspect.listing import Filters, list_trajectories
from service.inspect.reader import (
    OpenJournal,
    find_entry,
    is_refused,
    newest_run,
    open_journal,
)
from service.inspect.run_config import config_beside
from service.inspect.terminal import show
from service.inspect.token_text import TokenText, token_text
from service.launch.run_dir import RunDir

EXIT_OFFENDERS = 1


def run_inspect(request: InspectRequest) -> int:
    """Show what was asked for; returns the exit code. Raises: ConfigError."""
    place = Path(request.target)
    # os.path, because a path that cannot be looked at raises from Path.exists.
    is_journal = bool(request.target) and os.path.exists(place)
    if is_journal or request.audit:
        check_of_journal(request)
        journal = open_journal(place)
        if request.audit:
            return _audit(request, journal)
        wanted = _outcome(request.outcome)
        filters = Filters(step=request.step, outcome=wanted, limit=request.num_lines)
        say(list_trajectories(journal, filters))
        return 0
    check_of_one(request)
    journal = open_journal(request.run or newest_run())
    return _show_one(request, journal, *find_entry(journal, request.target))


def _audit(request: InspectRequest, journal: OpenJournal) -> int:
    result = audit(journal)
    say("\n".join(describe(result, limit=request.num_lines)))
    return 0 if result.is_clean else EXIT_OFFENDERS


def _show_one(
    request: InspectRequest,
    journal: OpenJournal,
    step: JournalStep,
    entry: TrajectoryEntry,
) -> int:
    view = build_view(step, entry, text_of(journal))
    view = replace(view, is_refused=is_refused(journal, entry))
    if request.html is None:
        with outlet(sys.__stdout__):
            show(view, OutletConsole())
        return 0
    from service.inspect.page import write_page  # with the report's figures: seconds of imports

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
    try:
        config = config_beside(run_dir)
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
