"""A detector of patterns of reward hacking in the steps of a run; each pattern is reported once.

The findings at a step depend only on that step and the earlier ones, so that the recorder of a run
and a reader of its journal find the same. Pure; called by both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from service.hacking.features import StepFeatures
from service.hacking.patterns import find
from service.hacking.window import EARLIER_STEPS, RECENT_STEPS, Window
from service.telemetry.findings import Finding, Kind

KEPT_STEPS = EARLIER_STEPS + RECENT_STEPS
# Steps without a pattern after which it is reported again.
FORGOTTEN_AFTER = 20


class Detector:
    """Steps come in order."""

    def __init__(self) -> None:
        self._steps: dict[str, deque[StepFeatures]] = {}
        """By environment."""
        self._last_seen: dict[tuple[str, Kind], int] = {}

    def see(self, features: Sequence[StepFeatures]) -> list[Finding]:
        """Take in a step, which has a part for each environment. Returns: what is new."""
        new = []
        for part in features:
            steps = self._steps.setdefault(part.environment, deque(maxlen=KEPT_STEPS))
            steps.append(part)
            for finding in find(Window(steps)):
                key = part.environment, finding.kind
                last = self._last_seen.get(key)
                self._last_seen[key] = part.step
                if last is None or part.step - last > FORGOTTEN_AFTER:
                    new.append(finding)
        return new


def find_all(steps: Sequence[Sequence[StepFeatures]]) -> list[Finding]:
    """Everything that a run's steps show, in the order in which it was found."""
    detector = Detector()
    return [finding for features in steps for finding in detector.see(features)]
