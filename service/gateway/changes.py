"""What becomes of a session, in memory and in the store together.

All that changes the stored part of a session is here. A change that nobody waits for is stored
behind all that came before it. Used by the parts of `Sessions`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from actors.metrics import GatewayMetrics
from service.gateway.chat import RefusalCode, Refused, unavailable
from service.gateway.commits import GroupCommit, StoreAway, TooLate
from service.gateway.session import Session, broken_off, closed, ended_otherwise, totals_of
from service.intake.session import Cut, SessionEnd, SessionStatus
from service.intake.turns import (
    Change,
    IntentAdded,
    IntentDropped,
    SessionClaimed,
    SessionCut,
    SessionEnded,
    SessionIntent,
    SessionOpened,
    SessionTurn,
    TurnAdded,
    TurnSeen,
    TurnUnseen,
)
from service.store.errors import StoreError


class SessionChanges:
    """One for a gateway."""

    def __init__(
        self, commits: GroupCommit, *, metrics: GatewayMetrics, now: Callable[[], float]
    ) -> None:
        """now: seconds since 1970."""
        self._commits = commits
        self._metrics = metrics
        self._now = now

    def open(self, session: Session) -> None:
        """Its group is admitted. Changes nothing where that is known, or the session has ended."""
        if session.stored.opened_at is None and session.stored.end is None:
            opened_at = self._now()
            session.stored = replace(session.stored, opened_at=opened_at)
            self._commits.add([SessionOpened(session_id=session.stored.id, opened_at=opened_at)])

    async def claim(self, session: Session, name: str, *, at: float) -> None:
        """name: what the client calls it. at: seconds since 1970. Raises: Refused."""
        await self._commit(SessionClaimed(session_id=session.stored.id, name=name, claimed_at=at))
        session.stored = replace(session.stored, claimed_by=name, claimed_at=at)

    def cut(self, session: Session, cut: Cut) -> None:
        """A request of its agent is refused for a limit."""
        before = session.stored.cut
        # A title that is refused says nothing of the conversation that was refused before.
        if cut != before and (before is None or cut.follows is not None):
            session.stored = replace(session.stored, cut=cut)
            self._commits.add([SessionCut(session_id=session.stored.id, cut=cut)])

    def add_intent(self, session: Session, intent: SessionIntent) -> None:
        """The engine is about to be asked."""
        change = IntentAdded(session_id=session.stored.id, intent=intent)
        self._commits.add([change], can_linger=True)

    def drop_intent(self, session: Session, request_id: str) -> None:
        """Nothing was sampled for the request."""
        self._commits.add([IntentDropped(session_id=session.stored.id, request_id=request_id)])

    async def add_turn(self, session: Session, turn: SessionTurn) -> None:
        """Raises: Refused."""
        # Nobody can go on from it, or be answered with it, before it is stored: the request is
        # under way until then.
        session.tree.add(turn)
        began = time.monotonic()
        try:
            await self._commits.commit([TurnAdded(session_id=session.stored.id, turn=turn)])
        except StoreAway as error:
            session.tree.mark_unseen(turn.number, is_unseen=True)
            raise unavailable(str(error)) from error
        except TooLate as error:
            # Its group was cancelled.
            self._drop(session, str(error))
            raise closed(session) from error
        self._metrics.commit_seconds.observe(time.monotonic() - began)

    def show(self, session: Session, number: int) -> Coroutine[Any, Any, None]:
        """A turn that was unseen is seen: in memory at once, stored when this is awaited.

        What becomes of it next is stored behind this. Raises: Refused, when awaited.
        """
        session.tree.mark_unseen(number, is_unseen=False)
        return self._commit(TurnSeen(session_id=session.stored.id, number=number))

    def hide(self, session: Session, number: int) -> None:
        """Nobody was answered with a turn."""
        session.tree.mark_unseen(number, is_unseen=True)
        self._commits.add([TurnUnseen(session_id=session.stored.id, number=number)])

    async def end(self, session: Session, end: SessionEnd) -> None:
        """End it, or give one that has ended the reward that it waits for. Raises: Refused."""
        end = replace(end, totals=totals_of(session))
        while True:
            try:
                await self._commits.commit([SessionEnded(session_id=session.stored.id, end=end)])
                break
            except StoreAway:
                # It will be stored, or nothing any more: the same end again is no other one.
                continue
            except StoreError as error:
                raise unavailable(str(error)) from error
            except TooLate as error:
                self._drop(session, str(error))
                raise ended_otherwise(session) from error
        self.close(session, end)

    def close(self, session: Session, end: SessionEnd) -> None:
        """In memory alone: the end is stored."""
        session.stored = replace(session.stored, end=end)
        # Requests that wait for its admission are refused now.
        session.admitted.set()
        if end.reward_until is None:
            session.over.set()

    def _drop(self, session: Session, why: str) -> None:
        """End a session that the store knows to be over."""
        if session.stored.end is None:
            self.close(session, broken_off(SessionStatus.DISCARDED, why, at=self._now()))

    async def _commit(self, change: Change) -> None:
        """Raises: Refused."""
        try:
            await self._commits.commit([change])
        except (StoreAway, StoreError) as error:
            raise unavailable(str(error)) from error
        except TooLate as error:
            raise Refused(RefusalCode.SESSION_CLOSED, str(error)) from error
