"""Findings of the audit for reward hacking: kind of pattern, first step, numbers, and examples.

A finding describes what was observed, not what it means.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """A kind of pattern. Lists show the value; the sentence of a finding has the numbers."""

    EQUAL_ANSWERS = "equal_answers"
    MALFORMED_PAID = "malformed_paid"
    LENGTH = "length"
    REPETITION = "repetition"
    COPYING = "copying"
    FEWER_TURNS = "fewer_turns"
    COMPONENT_FALLS = "component_falls"
    COMPONENT_EXCESS = "component_excess"
    FAILURES = "failures"
    UNVERIFIED = "unverified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A pattern that is new in the run and is rewarded."""

    kind: Kind
    environment: str
    onset: int
    """The first step of the pattern, as far as it can be determined."""
    step: int
    """Step at which the pattern was found."""
    before: float
    """Share of trajectories in the steps before the pattern; for `component_falls` the component's
    mean.
    """
    now: float
    """The same number in the newest steps."""
    reward_before: float
    """Mean return divided by the best possible one, if that is known."""
    reward_now: float
    examples: tuple[str, ...]
    """Ids of trajectories that `rayloom inspect` opens."""
    text: str
    """One sentence."""
