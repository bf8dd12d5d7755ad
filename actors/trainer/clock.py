"""Seconds of one training step by phase. Called by `TrainerRank`."""

from __future__ import annotations

import time

from actors.trainer.statistics import PhaseSeconds


class PhaseClock:
    """Each call charges the time since the last one to a phase."""

    def __init__(self) -> None:
        self.started = self.last = time.perf_counter()
        self.seconds = dict.fromkeys(("prepare", "forward", "backward", "optimizer", "critic"), 0.0)

    def charge(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now

    def read(self) -> PhaseSeconds:
        return PhaseSeconds(
            total_s=time.perf_counter() - self.started,
            **{f"{phase}_s": seconds for phase, seconds in self.seconds.items()},
        )
