"""Sessions: rollouts that an agent outside plays over HTTP; what a client asks for, and their end.

A session is member `member` of a submission (`service.intake.submission`), whose task has the
environment `SESSION`. Its turns are `service.intake.turns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from actors.types import LeftOutReason, Outcome
from service.access.names import tenant_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """The settings of every session of a submission."""

    max_turns: int
    max_tokens_per_turn: int
    ttl_s: float
    """Seconds from the admission of its group to the end of a session that nobody finishes."""
    idle_s: float
    """Seconds without a request that end it."""
    reward_deadline_s: float
    """Seconds from its finish, within which a reward that is to come has to be given."""
    shows_tokens: bool = False
    """Answers carry the sampled ids and their log-probabilities."""
    join_s: float | None = None
    """Sessions are claimed one by one as agents come, within so many seconds from the admission;
    those that nobody claims are given up. None: all of them are the client's from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeys:
    """SHA-256 of a session's keys, hexadecimal: the keys themselves are kept nowhere."""

    agent: str
    reward: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """The sessions that a submission requests."""

    spec: SessionSpec
    keys: tuple[SessionKeys, ...]
    """Of each member, in order; derived from the client's key."""
    asked: Mapping[str, int | float | bool] = field(default_factory=dict)
    """What of `spec` the client named; the rest are the run's defaults, which may be others when
    the run is resumed."""


class SessionStatus(StrEnum):
    """The state of a session."""

    QUEUED = "queued"
    """Its group waits for a place in the window; requests are held."""
    OPEN = "open"
    FINISHED = "finished"
    DISCARDED = "discarded"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTotals:
    """The totals of what was sampled in a session."""

    num_turns: int
    num_sampled_tokens: int
    num_ambiguous: int
    """Number of conversations that were rendered again, because two of their turns have equal
    texts.
    """
    num_left_out: int
    """Turns that are not trained."""
    num_malformed: int
    left_out: Mapping[int, LeftOutReason] = field(default_factory=dict)
    """Those turns, by number; empty in what older versions stored."""
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Parameters that agents sent and that were ignored: in how many turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """The end of a session."""

    status: SessionStatus
    """finished, discarded or expired."""
    outcome: Outcome
    reward: float | None
    """Of the whole session, beside those by turn; None: it is to come, or there is none."""
    components: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """By the number of the turn."""
    judged: int | None = None
    """The number of the turn that the client named as the judged one; None: it named none."""
    detail: str = ""
    ended_at: float
    """Seconds since 1970."""
    reward_until: float | None = None
    """Until when a reward that is to come is waited for; None: it has come, or none will."""
    digest: str = ""
    """Of the request that ended it: the same one again changes nothing."""
    totals: SessionTotals | None = None
    """Kept longer than the turns; None: it was ended without a look at them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A request that was refused for a limit, or for a context that is full.

    It decides how the session ended if nothing of the conversation came after it.
    """

    outcome: Outcome
    num_turns: int | None = None
    """Turns that were stored or under way then: later ones came after it. None: not known."""
    follows: int | None = None
    """The newest turn that it continued, or whose reply was in it; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session as the store knows it, without its turns."""

    id: str
    submission_id: str
    member: int
    spec: SessionSpec
    keys: SessionKeys
    key_name: str = ""
    """Of the client's key that its own are derived from; empty: the first admin key, or none."""
    created_at: float
    """Seconds since 1970."""
    opened_at: float | None = None
    """When its group was first admitted; None: it waits."""
    claimed_by: str = ""
    """What the client that has claimed it calls it; empty: nobody has, or need not."""
    claimed_at: float | None = None
    cut: Cut | None = None
    """The newest request that was refused for a limit, or for a context that is full."""
    end: SessionEnd | None = None
    """None: it is not over."""

    @property
    def tenant(self) -> str:
        """The tenant that owns it; empty: the run's own."""
        return tenant_of(self.id)

    @property
    def is_taken(self) -> bool:
        """Whether an agent may come."""
        return self.spec.join_s is None or bool(self.claimed_by)

    @property
    def begun_at(self) -> float | None:
        """Since when its time runs: it is admitted, and an agent may come."""
        if self.opened_at is None or not self.is_taken:
            return None
        return max(self.opened_at, self.claimed_at or self.opened_at)


def session_id(submission_id: str, member: int) -> str:
    """Return a session's id. Example: session_id("prompt-9", 3) -> "prompt-9-3"."""
    return f"{submission_id}-{member}"


def status_of(opened_at: float | None, end: SessionEnd | None) -> SessionStatus:
    """Return the state of a session; the arguments are as those of `StoredSession`."""
    if end is not None:
        return end.status
    return SessionStatus.QUEUED if opened_at is None else SessionStatus.OPEN
