"""The arguments and answers of the gateway's calls: frozen values."""

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
    """Id of the HTTP request, which stays the same if the request is sent to another gateway."""
    request: ChatRequest
    deadline_s: float
    """Seconds from now until the answer is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of a session, as its client states it."""

    reward: float | None = None
    """Reward of the whole session; None if it is pending or could not be obtained."""
    is_reward_pending: bool = False
    """Whether the reward is given later."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards by the number of the turn, in addition to the session's reward."""
    turn: int | None = None
    """Number of the turn that gets the reward; if None, `SessionTree.judged` chooses it."""
    outcome: Outcome | None = None
    """The outcome that the client states; None: the gateway decides."""
    detail: str = ""

    @property
    def digest(self) -> str:
        """Return a digest that is equal for equal requests."""
        content = asdict(self)
        if self.turn is None:
            # Older versions had no `turn`: a request may be repeated to a newer version.
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
    """Seconds since 1970, as are the next two fields."""
    opened_at: float | None
    ended_at: float | None
    totals: SessionTotals
    reward: float | None
    is_reward_pending: bool
    outcome: Outcome | None
    """The session's outcome, or None if it has not ended."""
    detail: str
