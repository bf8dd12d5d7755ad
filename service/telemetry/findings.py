"""Findings of the audit for reward hacking: kind of pattern, first step, numbers, and examples.

A finding describes an observation, without a judgement.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """A kind of pattern. Lists show the value; the text of a finding has the numbers."""

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
    """A pattern that is new in the run and increases the reward."""

    kind: Kind
    environment: str
    onset: int
    """First step with the pattern, as well as it can be determined."""
    step: int
    """Step at which the pattern was found."""
    before: float
    """Share of trajectories with the pattern in earlier steps.

    For `component_falls`, the mean of the component in earlier steps.
    """
    now: float
    """The same share or mean as `before`, in the newest steps."""
    reward_before: float
    """Mean return in earlier steps, divided by the best possible return if it is known."""
    reward_now: float
    examples: tuple[str, ...]
    """Ids of trajectories, for `rayloom inspect`."""
    text: str
    """A sentence that describes the finding."""
