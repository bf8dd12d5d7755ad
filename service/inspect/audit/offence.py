"""What the audit looks for, and what it finds: closed sets and plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Check(StrEnum):
    """An invariant; its value is the sentence that holds if nothing is wrong."""

    LOGPROBS = "every sampled token has a finite log-probability"
    SAMPLED = "every trained token was sampled"
    HANDED_OUT = "each token to be trained has an advantage, and what is not in the loss has none"
    PACKED = "the packed rows train as many tokens as were handed out"
    MALFORMED = "no malformed trajectory has a positive reward"
    AGE = "no trained token is older than the policy-age bound"
    BASELINE = "a baseline holds each member's return, capped or as it is"
    ADVANTAGES = "advantages are what the group's returns give"
    ZERO_SUM = "the advantages of a group add up to 0"
    ADMITTED = "group statistics come of every admitted rollout"
    LEDGER = "journal and ledger agree on what was trained"
    BEGUN = "every step is one that the run has begun"
    ONCE = "no rollout is trained twice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offence:
    """A finding of a check.

    subject: a trajectory, group or step by name. is_explained: the rules allow it, but it is worth
    knowing; such a finding does not fail an audit.
    """

    check: Check
    step: int
    subject: str
    text: str
    is_explained: bool = False
