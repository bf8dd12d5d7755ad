"""The sessions' part of the configuration. Plain values: the configuration imports it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from actors.limits import STRICT, Positive, Seconds


class Titles(StrEnum):
    """How the calls with which an agent names its conversation are handled."""

    TRAIN = "train"
    """They are trained as every turn is."""
    LEAVE_OUT = "leave_out"
    """What is certainly a title is not trained (docs/semantics.md)."""


class Unsupported(StrEnum):
    """How a parameter that a session cannot obey is handled."""

    REFUSE = "refuse"
    IGNORE = "ignore"


class SystemMessages(StrEnum):
    """How system texts that the chat template refuses or does not show are handled."""

    MERGE = "merge"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Sessions: rollouts that agents outside play over HTTP. What one may cost is bounded by
    rollouts.max_turns, rollouts.max_tokens_per_turn and rollouts.episode_deadline_s."""

    __pydantic_config__ = STRICT

    max_open: Positive = 1024
    """Sessions that are open at once; more wait, although their group is admitted."""
    idle_s: Seconds = 600
    """A session without a request for as long is ended, as a rollout that ran out of time."""
    hold_s: Seconds = 300
    """How long a request is held while its session waits for admission, weights are loaded, or an
    engine or the database is away; then it is answered with status 503."""
    reward_deadline_s: Seconds = 3600
    """How long after its finish a session may wait for a reward that is to come."""
    unsupported: Unsupported = Unsupported.REFUSE
    """How to handle a parameter that a session cannot obey, if the answer has the same form without
    it (a forced tool_choice, a JSON schema, logit_bias). refuse: answer 400 with its name; ignore:
    sample without it, and count it in the session's view."""
    max_body_mib: Positive = 48
    """MiB of one request's body; of uploaded trajectories too."""
    titles: Titles = Titles.TRAIN
    """Whether titles of conversations are trained, which the session's reward does not judge. Use
    `leave_out` for agents that ask for titles without marking the call as auxiliary."""
    system_messages: SystemMessages = SystemMessages.MERGE
    """How to handle system and developer messages that the chat template refuses or does not show
    in their place. merge: put all of their texts into one message at the front, in a new sample if
    the conversation has already begun; refuse: answer with status 400."""
