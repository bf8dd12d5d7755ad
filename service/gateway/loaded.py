"""Finds sessions by name and key, and loads from the store those that are not in memory.

Only sessions that somebody plays stay in memory: the store has the rest.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

from service.access.keys import Caller, KeyBook, digest_of, may_see
from service.gateway.admission import unknown_session
from service.gateway.background import Background
from service.gateway.chat import RefusalCode, Refused, unavailable
from service.gateway.session import Session, closed, stopping
from service.gateway.tree import SessionTree
from service.intake.session import SessionEnd
from service.store.errors import StoreError
from service.store.sessions import SessionStore

# The digest of the key that was not sent.
NO_KEY = digest_of("")


class LoadedSessions:
    """One for a gateway; belongs to one event loop."""

    def __init__(
        self,
        store: SessionStore,
        *,
        keys: KeyBook,
        background: Background,
        leaves_titles_out: bool,
        now: Callable[[], float],
    ) -> None:
        """leaves_titles_out: as `SessionTree`. now: seconds since 1970."""
        self._store = store
        self._keys = keys
        self._background = background
        self._leaves_titles_out = leaves_titles_out
        self._now = now
        self._tasks: dict[str, asyncio.Task[Session | None]] = {}
        """By name: sessions that are in memory, or on the way there."""
        self._is_closed = False

    async def find(self, name: str) -> Session | None:
        """None: there is no such session. Raises: Refused."""
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = self._background.begin(self._load(name))
        try:
            session = await asyncio.shield(task)
        except StoreError as error:
            self.forget(name)
            raise unavailable(str(error)) from error
        if session is None or session.over.is_set():
            self.forget(name)
        return session

    async def shown(self, name: str, sees: str | None) -> Session | None:
        """None: there is no such session, or it is not shown.

        sees: the tenant whose sessions are shown; None: every tenant's. Raises: Refused.
        """
        session = await self.find(name)
        if session is None or not may_see(sees, session.stored.tenant):
            return None
        return session

    async def of_submission(self, submission_id: str, sees: str | None) -> list[Session]:
        """Those that are shown. Raises: Refused."""
        try:
            stored = await asyncio.to_thread(self._store.of_submission, submission_id)
        except StoreError as error:
            raise unavailable(str(error)) from error
        found = [await self.find(each.id) for each in stored if may_see(sees, each.tenant)]
        return [session for session in found if session is not None]

    async def of_agent(self, name: str, key_digest: str) -> Session:
        """One that is open. Raises: Refused."""
        session = await self._of_key(name, key_digest, wanted="agent")
        if not session.is_open:
            raise closed(session)
        return session

    async def of_reward(self, name: str, key_digest: str, client: Caller | None) -> Session:
        """client: who asks by a key of its own, not by the session's; its tenant has to be the
        session's. Raises: Refused."""
        if client is None:
            return await self._of_key(name, key_digest, wanted="reward")
        if self._is_closed:
            raise stopping()
        session = await self.shown(name, client.sees)
        if session is None:
            raise unknown_session(name)
        return session

    async def check_key(self, name: str, key_digest: str) -> None:
        """Raises: Refused if the key is neither of the session's two keys."""
        try:
            await self._of_key(name, key_digest, wanted="agent")
        except Refused as refused:
            # It is the session's other key: the route says what that key may not do.
            if refused.code is not RefusalCode.FORBIDDEN:
                raise

    def all(self) -> list[Session]:
        """Those in memory."""
        tasks = list(self._tasks.values())
        done = [t for t in tasks if t.done() and not t.cancelled() and t.exception() is None]
        return [session for task in done if (session := task.result()) is not None]

    def forget(self, name: str) -> None:
        """What is asked of it from here on is read from the store."""
        self._tasks.pop(name, None)

    def close(self) -> None:
        """Refuse what is asked by key: it is for the next gateway."""
        self._is_closed = True

    async def _of_key(self, name: str, key_digest: str, *, wanted: str) -> Session:
        """The session, of which this is the wanted key.

        One that is not known is refused as one that has other keys: who has none of them learns
        nothing of it. Raises: Refused.
        """
        if key_digest == NO_KEY:
            raise Refused(
                RefusalCode.INVALID_KEY,
                f"this needs the {wanted}'s key of session {name}, got none",
            )
        if self._is_closed:
            raise stopping()
        session = await self.find(name)
        if session is None:
            raise unknown_session(name)
        keys = session.stored.keys
        own, other = (keys.agent, keys.reward) if wanted == "agent" else (keys.reward, keys.agent)
        is_own = hmac.compare_digest(own, key_digest)
        if not is_own and not hmac.compare_digest(other, key_digest):
            raise unknown_session(name)
        if self._keys.is_revoked(session.stored.key_name):
            raise Refused(
                RefusalCode.INVALID_KEY,
                f"the client's key that created session {name} was revoked, and the session's keys "
                "with it; another key of its tenant can end it",
            )
        if not is_own:
            raise Refused(
                RefusalCode.FORBIDDEN,
                f"this needs the {wanted}'s key of session {name}, got the session's other one",
            )
        return session

    async def ended_in_store(self) -> list[tuple[Session, SessionEnd]]:
        """Those that are open here, and have ended there. Raises: StoreError."""
        open_here = {each.stored.id: each for each in self.all() if each.is_open}
        ends = await asyncio.to_thread(self._store.ends, list(open_here))
        return [(open_here[name], end) for name, end in ends.items()]

    async def _load(self, name: str) -> Session | None:
        found = await asyncio.to_thread(self._store.load, name)
        if found is None:
            return None
        stored, turns, _ = found
        session = Session(
            stored=stored,
            tree=SessionTree(name, leaves_titles_out=self._leaves_titles_out),
            last_request_at=self._now(),
        )
        for turn in turns:
            session.tree.add(turn)
        end = stored.end
        if end is not None and end.reward_until is None:
            session.over.set()
        return session
