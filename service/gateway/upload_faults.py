"""The faults of an uploaded trajectory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum


class Fault(StrEnum):
    """The kinds of faults in an uploaded trajectory; stable, for programs."""

    WRONG_TYPE = "wrong-type"
    """A packed column has another type or shape, or a wrong number of bytes."""
    LENGTHS_DIFFER = "lengths-differ"
    TOKEN_OUT_OF_VOCABULARY = "token-out-of-vocabulary"
    INVALID_MASK = "invalid-mask"
    INVALID_TURNS = "invalid-turns"
    DUPLICATE_TURN = "duplicate-turn"
    """The same sampled turn is in two samples."""
    NOTHING_TRAINED = "nothing-trained"
    CONTEXT_LENGTH_EXCEEDED = "context-length-exceeded"
    INVALID_LOGPROB = "invalid-logprob"
    INVALID_VERSIONS = "invalid-versions"
    INVALID_REWARD = "invalid-reward"
    REWARD_MISSING = "reward-missing"
    REWARDS_DIFFER = "rewards-differ"
    INVALID_EXPERTS = "invalid-experts"
    UNKNOWN_OUTCOME = "unknown-outcome"
    INVALID_METADATA = "invalid-metadata"


class Violation(Exception):
    """The first fault of a trajectory."""

    def __init__(self, fault: Fault, place: Sequence[int | str], message: str) -> None:
        """Report a fault. place: its position in the trajectory's body."""
        super().__init__(message)
        self.fault, self.place, self.message = fault, tuple(place), message


Fail = Callable[[Fault, str, str], Violation]
