"""Whether a run can serve: the rule behind /readyz. Pure; asked by the supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from service.run.status import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """reasons: what is missing, a sentence each; none when ready.

    engines_ready: engines that hold the current version, of engines_expected.
    """

    reasons: tuple[str, ...]
    phase: Phase
    policy_version: int
    engines_ready: int
    engines_expected: int

    @property
    def is_ready(self) -> bool:
        return not self.reasons


class BehindWatch:
    """How long engines have been without the current version. One for a run."""

    def __init__(self) -> None:
        self._since: float | None = None

    def look(self, *, num_ready: int, num_expected: int, now: float) -> None:
        """now: monotonic, seconds."""
        if num_ready >= num_expected:
            self._since = None
        elif self._since is None:
            self._since = now

    def behind_s(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since


def readiness(
    *,
    phase: Phase,
    detail: str,
    policy_version: int,
    engines_ready: int,
    engines_expected: int,
    behind_s: float,
    publish_limit_s: float,
) -> Readiness:
    """behind_s: since when an engine lacks the current version; borne for as long as a publish
    may take, and told only of a run that trains: any other waits for more than the engines."""
    reasons = []
    if phase is not Phase.TRAINING:
        reasons.append(f"the run is {phase.value}" + (f": {detail}" if detail else ""))
    elif behind_s > publish_limit_s:
        reasons.append(
            f"{engines_ready} of {engines_expected} engines hold the current version, for "
            f"{behind_s:.0f} s now; a publish may take {publish_limit_s:g} s; look at the logs of "
            "the engines"
        )
    return Readiness(
        reasons=tuple(reasons),
        phase=phase,
        policy_version=policy_version,
        engines_ready=engines_ready,
        engines_expected=engines_expected,
    )
