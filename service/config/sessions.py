"""Settings of sessions. The configuration imports this module, so it imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.limits import STRICT, Positive, Seconds

Titles = Literal["train", "leave_out"]
"""How to treat a turn that only names a conversation (a `title` in docs/semantics.md)."""
Unsupported = Literal["refuse", "ignore"]
SystemMessages = Literal["merge", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Sessions, which are rollouts that external agents play over HTTP. The cost of one session is
    bounded by rollouts.max_turns, rollouts.max_tokens_per_turn and rollouts.episode_deadline_s.
    """

    __pydantic_config__ = STRICT

    max_open: Positive = 1024
    """Maximum number of open sessions; further sessions wait, even if their group is admitted."""
    idle_s: Seconds = 600
    """Seconds without a request after which a session ends like a rollout that ran out of time."""
    hold_s: Seconds = 300
    """Seconds for which a request is held while its session waits for admission, weights are
    loaded, or an engine or the database is unavailable; after that the request is answered with
    status 503.
    """
    reward_deadline_s: Seconds = 3600
    """Seconds for which a finished session may wait for a reward that is sent later."""
    unsupported: Unsupported = "refuse"
    """How to handle a parameter that a session cannot obey, if the answer has the same form without
    the parameter (a forced tool_choice, a JSON schema, logit_bias). refuse: answer 400 with its
    name; ignore: sample without the parameter, and count it in the session's field `ignored`.
    """
    max_body_mib: Positive = 48
    """Largest body of a request in MiB; it also limits uploaded trajectories."""
    titles: Titles = "train"
    """Whether titles of conversations, which the session's reward does not judge, are trained. Use
    `leave_out` for agents that request titles without marking the call as auxiliary.
    """
    system_messages: SystemMessages = "merge"
    """How to handle system and developer messages that the chat template refuses or does not show
    at their position. merge: put all of their texts into one message at the front, in a new sample
    if the conversation has already begun; refuse: answer with status 400.
    """
