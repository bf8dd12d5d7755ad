"""Hands the sessions of a group to the clients that come, one to each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from service.gateway.changes import SessionChanges
from service.gateway.chat import RefusalCode, Refused
from service.gateway.ends import Ends
from service.gateway.loaded import LoadedSessions
from service.gateway.session import Session


class Groups:
    """One for a gateway; belongs to one event loop."""

    def __init__(
        self,
        loaded: LoadedSessions,
        *,
        changes: SessionChanges,
        ends: Ends,
        now: Callable[[], float],
    ) -> None:
        """now: seconds since 1970."""
        self._loaded = loaded
        self._changes = changes
        self._ends = ends
        self._now = now
        self._claiming = asyncio.Lock()

    async def claim(self, submission_id: str, name: str, sees: str | None) -> int | None:
        """Give a group's next free session to a client that comes, the same one again to the same.

        Args: name: what the client calls it. sees: as `LoadedSessions.shown`.
        Returns: the member's number; None: no such group.
        Raises: Refused, where none is free.
        """
        async with self._claiming:
            group = await self._loaded.of_submission(submission_id, sees)
            if not group:
                return None
            for session in group:
                if session.stored.claimed_by == name:
                    return session.stored.member
            none_free = Refused(
                RefusalCode.CONFLICT,
                f"group {submission_id} has no free session of {len(group)}: all are claimed, or "
                "it is closed or cancelled; begin another group",
            )
            free = _free(group)
            if not free:
                raise none_free
            session, now = free[0], self._now()
            try:
                await self._changes.claim(session, name, at=now)
            except Refused as refused:
                # Its group is over, as the store alone knows so far.
                is_over = refused.code is RefusalCode.SESSION_CLOSED
                raise (none_free if is_over else refused) from refused.__cause__
            session.last_request_at = now
            return session.stored.member

    async def close(self, submission_id: str, sees: str | None) -> int | None:
        """Give up a group's sessions that nobody has claimed. Returns: how many; None: no group.

        sees: as `claim`. Raises: Refused.
        """
        async with self._claiming:
            group = await self._loaded.of_submission(submission_id, sees)
            free = _free(group)
            for session in free:
                await self._ends.discard(session, "its group was closed")
            return len(free) if group else None


def _free(group: list[Session]) -> list[Session]:
    return [each for each in group if each.is_open and not each.stored.is_taken]
