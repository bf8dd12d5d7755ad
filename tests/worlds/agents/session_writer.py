"""A process that stores turns until it is killed.

    $ python -m worlds.agents.session_writer URL TERM

It plays the sessions a-0, a-1, … of the store at URL. It prints `SESSION NUMBER` for each turn that
is durable.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import count

from service.gateway.commits import GroupCommit
from service.store.run_store import RunStore
from service.store.sessions import SessionStore
from worlds.builders.session_builders import turn_added

NUM_SESSIONS = 6


async def play_all(url: str, term: int) -> None:
    sessions = SessionStore(RunStore(url))
    commits = GroupCommit(sessions, term=term, hold_s=30.0)

    async def play(session: str) -> None:
        found = sessions.load(session)
        assert found is not None
        for number in count(len(found[1])):
            await commits.commit(turn_added(session, number))
            print(session, number, flush=True)

    async with asyncio.TaskGroup() as playing:
        for member in range(NUM_SESSIONS):
            playing.create_task(play(f"a-{member}"))


if __name__ == "__main__":
    asyncio.run(play_all(sys.argv[1], int(sys.argv[2])))
