"""`rayloom inspect`: show the journal of a run, its trajectories, or one trajectory's tokens.

Options that have no effect on the requested output are refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.journal.files import JournalStep
from actors.types import Outcome
from service.cli.outlet import OutletConsole, outlet, say
from service.config.file import ConfigError
from service.hacking import listing
from service.hacking.read import Verify, audit_hacking
from service.inspect.audit import audit, describe
from service.inspect.build import build_view
from service.inspect.document import trajectory_document
from service.inspect.listing import Filters, list_trajectories
from service.inspect.reader import (
    OpenJournal,
    config_beside,
    find_entry,
    is_refused,
    newest_run,
    open_journal,
    tokenizer_of,
)
from service.inspect.terminal import show
from service.inspect.view import TrajectoryView
from service.page.packed import page_with
from service.telemetry.summary import write_aside

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
    """Search for reward hacking."""
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
        """Return those named options that were given, in the form of the command line."""
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
    filters = Filters(step=request.step, outcome=_outcome(request.outcome), limit=request.num_lines)
    say(list_trajectories(journal, filters))
    return 0


def _show_hacking(request: InspectRequest, journal: OpenJournal) -> int:
    verify = None if request.shadow is None else _shadow_of(journal, request.shadow)
    found = audit_hacking(journal, verify=verify)
    say("\n".join(listing.describe(journal, found, limit=request.num_lines)))
    return EXIT_OFFENDERS if found.findings else 0


def _shadow_of(journal: OpenJournal, name: str) -> Verify:
    """Return a function that verifies the trajectories of a step with the named verifier.

    Raises: ConfigError if the verifier cannot be loaded.
    """
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
        if found.problem:
            say(f"step {step.step}: {found.problem}", err=True)
        return found.by_id

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
            "file in a directory that exists; choose another"
        ) from error
    say(f"{request.html}: {entry.trajectory.trajectory_id}, step {step.step}")
    return 0


def _check_audits(request: InspectRequest) -> None:
    """Check the options of audits. Raises: ConfigError if they do not fit together."""
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
    """Check the options of a list or an audit. Raises: ConfigError if they do not fit together."""
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
            f"--outcome; leave it out{one}"
        )


def _check_options_of_one(request: InspectRequest) -> None:
    """Check the options for one trajectory. Raises: ConfigError if they do not fit together."""
    if "/" in request.target:
        raise ConfigError(
            f"inspect: {request.target} does not exist; expected a run directory, a journal file, "
            "or a trajectory's id; `rayloom inspect RUN_DIR` lists the ids"
        )
    if given := request.given("step", "outcome", "limit"):
        raise ConfigError(
            f"inspect: {given} chooses from a list, got the id {request.target}; expected only the "
            "id; leave it out, or give a run directory instead of the id"
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
    """Write a page to a temporary file and rename the file. Raises: OSError if this fails."""
    write_aside(path, page_with(trajectory_document(view)))
