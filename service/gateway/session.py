"""One session in memory: what it holds, how a turn of it is shown, and why a request is refused.

All of it is of values; `service.gateway.sessions` alone changes a session.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import numpy as np

from actors.policy import UnusableReply
from actors.types import original_numbers
from service.api.problems import shown
from service.gateway.calls import ChatCall, Finish
from service.gateway.chat import ChatReply, RefusalCode, Refused, unavailable
from service.gateway.replies import stop_reason
from service.gateway.tree import SessionTree
from service.gateway.turns import SessionTurn
from service.intake.session import SessionTotals, StoredSession

log = logging.getLogger("rayloom.gateway")


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
    tree: SessionTree
    last_request_at: float
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


def under_way(session: Session, call: ChatCall, digest: str) -> Sampling | None:
    """What is being sampled for this very request; None: nothing."""
    if (same := session.sampling.get(call.request_id)) is not None:
        return same
    for sampling in session.sampling.values():
        key = call.request.idempotency_key
        if key and sampling.idempotency_key == key:
            if sampling.digest != digest:
                raise Refused(
                    RefusalCode.CONFLICT,
                    "this Idempotency-Key names another request, which is being answered; take a "
                    "key of its own for each request",
                )
            return sampling
        if call.request.is_retry and sampling.digest == digest:
            return sampling
    return None


def check_turns(session: Session, finish: Finish) -> None:
    """Raises: Refused for rewards of turns that the session does not have."""
    unknown = [number for number in finish.turn_rewards if not 0 <= number < session.tree.num_turns]
    if unknown:
        raise Refused(
            RefusalCode.INVALID_REQUEST,
            f"turn_rewards names turns {sorted(unknown)[:8]}, expected numbers of turns that the "
            f"session has, which are below {session.tree.num_turns}",
            param="turn_rewards",
        )


def totals_of(session: Session) -> SessionTotals:
    """What its turns come to, as it stands."""
    tree, counts = session.tree, session.tree.counts()
    return SessionTotals(
        num_turns=tree.num_turns,
        num_sampled_tokens=sum(turn.num_sampled for turn in tree.turns),
        num_ambiguous=counts.num_ambiguous,
        num_left_out=counts.num_auxiliary + counts.num_unseen,
        num_malformed=counts.num_malformed,
    )


def as_reply(session: Session, turn: SessionTurn) -> ChatReply:
    """A turn as its client is shown it."""
    shows = session.stored.spec.shows_tokens
    return ChatReply(
        turn_id=f"{session.stored.id}.{turn.number}",
        message=turn.reply,
        stop_reason=stop_reason(turn.reply, turn.finish_reason),
        num_prompt_tokens=session.tree.num_prompt_tokens(turn.number),
        num_sampled_tokens=turn.num_sampled,
        policy_version=_newest_version(turn),
        created_at=turn.created_at,
        sampled_token_ids=turn.sampled_token_ids if shows else None,
        logprobs=turn.logprobs if shows else None,
    )


def _newest_version(turn: SessionTurn) -> int:
    versions = [span.version for span in turn.version_spans]
    return int(original_numbers(np.array(versions, np.int32)).max(initial=0))


def unsampled(error: Exception) -> Refused:
    """Nothing came of asking the engine."""
    if isinstance(error, UnusableReply):
        log.warning("a reply of the engine cannot be used: %s", error)
        return unavailable(f"the engine's reply cannot be used ({error}); send the request again")
    if isinstance(error, ValueError):
        return Refused(RefusalCode.INVALID_REQUEST, str(error), param="messages")
    return unavailable(f"no engine answered in time ({error}); send the request again")


def stopping() -> Refused:
    """The next gateway is to be asked."""
    return unavailable("the gateway is being stopped; send the request again")


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


def unknown(name: str) -> Refused:
    """There is no such session, or the key is none of its own: the two look the same."""
    return Refused(
        RefusalCode.UNKNOWN_SESSION,
        f"this run knows no session {name!r} of this key; take the key that its creation was "
        "answered with, or create it with POST /api/v1/sessions",
    )
