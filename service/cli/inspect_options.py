"""Which options of `rayloom inspect` go together: one that would change nothing is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from service.config.file import ConfigError

DEFAULT_LIMIT = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest:
    """target: a run directory, a journal file, or a trajectory's id. run: where an id is looked
    for, None: the newest run under runs/. html: a page is written there instead of the terminal.
    limit: lines at most, 0: all; None: not said.
    """

    target: str
    run: Path | None = None
    html: Path | None = None
    audit: bool = False
    step: int | None = None
    outcome: str | None = None
    limit: int | None = None

    @property
    def num_lines(self) -> int:
        return DEFAULT_LIMIT if self.limit is None else self.limit


def check_of_journal(request: InspectRequest) -> None:
    """For a list or an audit. Raises: ConfigError."""
    _check_target(request)
    place = request.target
    if request.html is not None:
        raise ConfigError(
            "inspect: --html shows one trajectory, got a whole journal; expected an id; name one, "
            f"such as `rayloom inspect ID --run {place} --html {request.html}`"
        )
    if request.run is not None:
        raise ConfigError(
            f"inspect: --run {request.run} says where an id is looked for, got the journal of "
            f"{place} to look at; expected one of them; leave --run out, or give an id for {place}"
        )
    given = _given({"--step": request.step, "--outcome": request.outcome})
    if request.audit and given:
        raise ConfigError(
            f"inspect: --audit checks a whole journal, got {given}; expected neither --step nor "
            "--outcome; leave it out, or audit one step by the path of its journal file"
        )


def check_of_one(request: InspectRequest) -> None:
    """For one trajectory. Raises: ConfigError."""
    _check_target(request)
    target = request.target
    if "/" in target:
        raise ConfigError(
            f"inspect: {target} is not there; expected a run directory, a journal file, or a "
            "trajectory's id; `rayloom inspect RUN_DIR` lists the ids"
        )
    given = _given({"--step": request.step, "--outcome": request.outcome, "--limit": request.limit})
    if given:
        raise ConfigError(
            f"inspect: {given} chooses from a list, got the id {target}; expected the id alone; "
            "leave it out, or give a run directory in place of the id"
        )
    if request.html is not None and (not request.html.name or os.path.isdir(request.html)):
        raise ConfigError(
            f"--html {request.html}: is a directory; expected a file; name one in it, such as "
            f"{request.html / 'page.html'}"
        )


def _check_target(request: InspectRequest) -> None:
    if not request.target.strip():
        raise ConfigError(
            "inspect: got an empty text; expected a run directory, a journal file, or a "
            "trajectory's id; name one"
        )


def _given(options: Mapping[str, int | str | None]) -> str:
    return " and ".join(f"{name} {value}" for name, value in options.items() if value is not None)
