"""One session in memory, and what is said of it as it stands."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from actors.types import Outcome
from service.api.problems import shown
from service.gateway.calls import SessionView
from service.gateway.chat import RefusalCode, Refused, unavailable
from service.gateway.tree import SessionTree
from service.intake.session import (
    SessionEnd,
    SessionStatus,
    SessionTotals,
    StoredSession,
    status_of,
)
from service.intake.turns import SessionTurn

# Clients choose the names of parameters that nobody knows.
MAX_IGNORED_NAMES = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Sampling:
    """A turn that is being sampled, and who waits for it."""

    request_id: str
    """That began it."""
    digest: str
    idempotency_key: str
    task: asyncio.Task[SessionTurn] = field(init=False)
    is_abandoned: bool = False
    """The client that asked for it last is gone."""
    is_committing: bool = False
    """It has been sampled: its turn counts, whatever happens to the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """An end, or a reward that came late, on its way to the store."""

    digest: str
    """Of the request; empty: nobody asked for it."""
    task: asyncio.Task[None]


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """A session in memory."""

    stored: StoredSession
    """Changed by `SessionChanges` alone, like the turns of the tree."""
    tree: SessionTree
    last_request_at: float
    """Seconds since 1970."""
    ending: Ending | None = None
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """It has ended, and its reward is known or will never be."""
    sampling: dict[str, Sampling] = field(default_factory=dict)
    """By request id."""
    askers: dict[str, str] = field(default_factory=dict)
    """By the request that began a turn: the newest request that it answers, or is to answer."""
    showing: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """By the number of a turn that was unseen: storing that it is seen now."""

    @property
    def is_open(self) -> bool:
        return self.stored.end is None and self.ending is None


def totals_of(session: Session) -> SessionTotals:
    """What its turns come to, as it stands."""
    tree, counts = session.tree, session.tree.counts()
    ignored = Counter(name for turn in tree.turns for name in turn.ignored)
    return SessionTotals(
        num_turns=tree.num_turns,
        num_sampled_tokens=sum(turn.num_sampled for turn in tree.turns),
        num_ambiguous=counts.num_ambiguous,
        num_left_out=len(counts.left_out),
        num_malformed=counts.num_malformed,
        left_out=counts.left_out,
        ignored=dict(ignored.most_common(MAX_IGNORED_NAMES)),
    )


def view_of(session: Session) -> SessionView:
    """A session as a client sees it."""
    stored, end = session.stored, session.stored.end
    # The turns of one that is trained are gone.
    totals = (end and end.totals) or totals_of(session)
    return SessionView(
        id=stored.id,
        submission_id=stored.submission_id,
        member=stored.member,
        status=status_of(stored.opened_at, end),
        created_at=stored.created_at,
        opened_at=stored.opened_at,
        ended_at=end.ended_at if end else None,
        totals=totals,
        reward=end.reward if end else None,
        is_reward_pending=end is not None and end.reward_until is not None,
        outcome=end.outcome if end else None,
        detail=end.detail if end else "",
    )


def broken_off(status: SessionStatus, why: str, *, at: float) -> SessionEnd:
    """The end of a session that nobody finished. at: seconds since 1970."""
    is_expired = status is SessionStatus.EXPIRED
    return SessionEnd(
        status=status,
        outcome=Outcome.WALL_TIMEOUT if is_expired else Outcome.CANCELLED,
        reward=None,
        detail=why,
        ended_at=at,
    )


def closed(session: Session) -> Refused:
    """It has ended, or is about to."""
    end = session.stored.end
    how = f"is {end.status}" if end else "is being ended"
    return Refused(
        RefusalCode.SESSION_CLOSED,
        f"session {session.stored.id} {how} and takes no more requests; create another",
    )


def ended_otherwise(session: Session) -> Refused:
    """Another end, or another reward, is stored or on its way."""
    end = session.stored.end
    how = f"is {end.status} already, with another content" if end else "is being ended by another"
    if end is not None and end.detail:
        how += f" ({shown(end.detail)})"
    return Refused(
        RefusalCode.CONFLICT,
        f"session {session.stored.id} {how}; a session ends once, and gets one reward",
    )


def stopping() -> Refused:
    """The next gateway is to be asked."""
    return unavailable("the gateway is being stopped; send the request again")
