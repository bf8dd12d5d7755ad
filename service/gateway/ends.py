"""Ends sessions: finished with a reward or waiting for one, discarded, or out of time.

A session ends once; the same request again waits for the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

from actors.types import FinishReason, LeftOutReason, Outcome
from service.gateway.background import Background
from service.gateway.calls import Finish
from service.gateway.changes import SessionChanges
from service.gateway.chat import RefusalCode, Refused
from service.gateway.session import Ending, Session, broken_off, ended_otherwise
from service.intake.session import SessionEnd, SessionStatus

_WHY_LEFT_OUT = {
    LeftOutReason.AUXILIARY: "the agent marked the call as auxiliary",
    LeftOutReason.UNSEEN: "its client was gone before the answer",
    LeftOutReason.TITLE: "it is a title, and sessions.titles is leave_out",
}


class Ends:
    """One for a gateway; belongs to one event loop."""

    def __init__(
        self, changes: SessionChanges, *, background: Background, now: Callable[[], float]
    ) -> None:
        """now: seconds since 1970."""
        self._changes = changes
        self._background = background
        self._now = now

    async def finish(self, session: Session, finish: Finish) -> None:
        """The same request again changes nothing. Raises: Refused."""
        end = session.stored.end
        if end is not None:
            if end.digest == finish.digest:
                return
            raise ended_otherwise(session)
        _check_turns(session, turn_rewards=finish.turn_rewards, judged=finish.turn)
        until = self._now() + session.stored.spec.reward_deadline_s
        await self._end(
            session,
            SessionEnd(
                status=SessionStatus.FINISHED,
                outcome=finish.outcome or Outcome.COMPLETED,
                reward=finish.reward,
                components=finish.components,
                turn_rewards=finish.turn_rewards,
                judged=finish.turn,
                detail=finish.detail,
                ended_at=self._now(),
                reward_until=until if finish.is_reward_pending else None,
                digest=finish.digest,
            ),
            is_stated=finish.outcome is not None,
        )

    async def give_reward(self, session: Session, given: Finish) -> None:
        """Give the reward that a finished session waits for. As `finish`. Raises: Refused."""
        end = session.stored.end
        if end is None:
            raise Refused(
                RefusalCode.CONFLICT,
                f"session {session.stored.id} is not finished; finish it, with the reward or with "
                "reward_pending",
            )
        if end.reward_until is None:
            rewards = end.reward, dict(end.components)
            if (
                rewards == (given.reward, dict(given.components))
                and given.turn_rewards.items() <= end.turn_rewards.items()
            ):
                return
            raise ended_otherwise(session)
        _check_turns(session, turn_rewards=given.turn_rewards, judged=None)
        rewarded = replace(
            end,
            reward=given.reward,
            components=given.components,
            turn_rewards={**end.turn_rewards, **given.turn_rewards},
            reward_until=None,
        )
        await self._once(session, given.digest, self._changes.end(session, rewarded))

    async def discard(self, session: Session, why: str) -> None:
        """End a session that is not to be trained; nothing where it has ended, or ends meanwhile.

        Raises: Refused.
        """
        while session.stored.end is None:
            if (ending := session.ending) is not None:
                await asyncio.wait({ending.task})
                # Of a task that is done already nothing was awaited.
                await asyncio.sleep(0)
                continue
            try:
                await self._end(session, broken_off(SessionStatus.DISCARDED, why, at=self._now()))
            except Refused:
                if session.stored.end is None:
                    raise

    def learn(self, session: Session, end: SessionEnd) -> None:
        """Of an end that another has stored, as of a group that was cancelled."""
        if session.is_open:
            self._changes.close(session, end)
            _give_up(session)

    def end_overdue(self, sessions: Iterable[Session]) -> None:
        """Begin to end those whose time is up."""
        now = self._now()
        for session in sessions:
            if session.ending is None and (end := _overdue(session, now)) is not None:
                self._background.begin(self._end_overdue(session, end))

    async def _end_overdue(self, session: Session, end: SessionEnd) -> None:
        if session.stored.end is None:
            await self._end(session, end)
        else:
            await self._once(session, "", self._changes.end(session, end))

    async def _end(self, session: Session, end: SessionEnd, *, is_stated: bool = False) -> None:
        """is_stated: whether the client says how it ended. Raises: Refused."""
        await self._once(
            session, end.digest, self._give_up_and_end(session, end, is_stated=is_stated)
        )

    async def _give_up_and_end(self, session: Session, end: SessionEnd, *, is_stated: bool) -> None:
        """End it when its turns are stored; those not yet sampled are given up. Raises: Refused."""
        _give_up(session)
        tasks = [sampling.task for sampling in session.sampling.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        if end.status is SessionStatus.FINISHED:
            # Again: turns that were being stored are there now.
            _check_turns(session, turn_rewards=end.turn_rewards, judged=end.judged)
            if not is_stated:
                end = replace(end, outcome=_seen_outcome(session, end.judged))
        await self._changes.end(session, end)

    async def _once(self, session: Session, digest: str, work: Coroutine[Any, Any, None]) -> None:
        """Begin the work that ends a session, or wait for what was begun. Raises: Refused."""
        ending = session.ending
        if ending is not None:
            work.close()
            if ending.digest != digest:
                raise ended_otherwise(session)
        else:
            ending = session.ending = Ending(digest=digest, task=self._background.begin(work))
            ending.task.add_done_callback(lambda _: setattr(session, "ending", None))
        # It goes on when this caller is gone: the end may be stored already.
        await asyncio.shield(ending.task)


def _overdue(session: Session, now: float) -> SessionEnd | None:
    """The end of a session whose time is up; None: it has some left."""
    stored = session.stored
    if stored.end is not None:
        until = stored.end.reward_until
        if until is None or now < until:
            return None
        return replace(stored.end, reward_until=None, detail="no reward came in time")
    if stored.opened_at is None or not session.is_open:
        return None
    join_s, begun_at = stored.spec.join_s, stored.begun_at
    if begun_at is None:
        if join_s is None or now < stored.opened_at + join_s:
            return None
        why = f"no agent claimed it within {join_s:g} s"
        return broken_off(SessionStatus.DISCARDED, why, at=now)
    if now >= begun_at + stored.spec.ttl_s:
        why = f"it was not finished within {stored.spec.ttl_s:g} s"
    elif not session.sampling and now >= session.last_request_at + stored.spec.idle_s:
        why = f"nothing was asked of it for {stored.spec.idle_s:g} s"
    else:
        return None
    return broken_off(SessionStatus.EXPIRED, why, at=now)


def _seen_outcome(session: Session, judged: int | None) -> Outcome:
    """Return how a session ended if its client does not state it. judged: the turn it names."""
    tree, cut = session.tree, session.stored.cut
    last = tree.last_of_main(judged)
    if last is None:
        return Outcome.EMPTY
    if cut is not None and tree.is_ended_by(cut, judged):
        return cut.outcome
    if last.finish_reason is FinishReason.LENGTH:
        return Outcome.TRUNCATED_TOKENS
    return Outcome.COMPLETED


def _check_turns(
    session: Session, *, turn_rewards: Mapping[int, float], judged: int | None
) -> None:
    """Raises: Refused for turns that the session does not have, or that are not trained."""
    num_turns, left_out = session.tree.num_turns, session.tree.left_out()
    for param, named in (
        ("turn_rewards", sorted(turn_rewards)),
        ("turn", [] if judged is None else [judged]),
    ):
        if unknown := [number for number in named if not 0 <= number < num_turns]:
            raise Refused(
                RefusalCode.INVALID_REQUEST,
                f"{param} names turns {unknown[:8]}, expected numbers of turns that the session "
                f"has, which are below {num_turns}",
                param=param,
            )
        for number in named:
            if (reason := left_out.get(number)) is not None:
                raise Refused(
                    RefusalCode.INVALID_REQUEST,
                    f"{param} names turn {number}, which is not trained ({reason}: "
                    f"{_WHY_LEFT_OUT[reason]}), expected turns that are; reward another",
                    param=param,
                )


def _give_up(session: Session) -> None:
    """Sample nothing more; what has been sampled is stored."""
    for sampling in session.sampling.values():
        if not sampling.is_committing:
            sampling.task.cancel()
