"""What the API's replicas ask of the gateway, and what it answers: frozen values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256

from actors.types import Outcome
from service.gateway.chat import ChatRequest
from service.intake.session import SessionStatus, SessionTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A request for a turn."""

    session_id: str
    key_digest: str
    """SHA-256 of the key that the client sent."""
    request_id: str
    """Of the HTTP request; the same when it is sent on again to another gateway."""
    request: ChatRequest
    deadline_s: float
    """Seconds from now until there has to be an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a client ends a session."""

    reward: float | None = None
    """Of the whole session; None: it is to come, or could not be had."""
    is_reward_pending: bool = False
    """It is to come."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """By the number of the turn, beside the session's."""
    turn: int | None = None
    """Number of the judged turn, which gets the reward; None: by the gateway's rule."""
    outcome: Outcome | None = None
    """How it ended; None: as the gateway saw it."""
    detail: str = ""

    @property
    def digest(self) -> str:
        """Equal for an equal request."""
        content = asdict(self)
        if self.turn is None:
            # As it was before a turn could be named: a request may be repeated to a newer version.
            del content["turn"]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session as a client sees it."""

    id: str
    submission_id: str
    member: int
    status: SessionStatus
    created_at: float
    """Seconds since 1970, like the other two."""
    opened_at: float | None
    ended_at: float | None
    totals: SessionTotals
    reward: float | None
    is_reward_pending: bool
    outcome: Outcome | None
    """None: it has not ended."""
    detail: str
