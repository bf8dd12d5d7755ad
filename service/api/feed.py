"""The routes of the feed, which is served as pages and as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from service.access.keys import Caller
from service.api.callers import caller_of
from service.api.ports import PREFIX, RunPort
from service.api.problems import Problem, RunUnavailable
from service.api.rollouts import Limit
from service.api.schemas import EntryAnswer, FeedAnswer, Natural
from service.api.waiting import Prefer, look_until, patiently
from service.intake.listing import FeedPage

STREAM_S = 300.0
HEARTBEAT_EVERY_S = 10.0
EVENTS_PER_READ = 500
HEARTBEAT = b": waiting\n\n"
EVENT_SCHEMA = {
    "type": "object",
    "description": "one event of the stream",
    "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
}
_GONE: dict[int | str, dict[str, Any]] = {
    410: {"description": "entries after the cursor are no longer kept, or it is above the newest"}
}

After = Annotated[Natural | None, Query(description="`next` of the previous page")]


def add_feed(app: FastAPI, run: RunPort, *, stream_s: float = STREAM_S) -> None:
    """Add the routes that serve the feed. stream_s: seconds after which a stream ends."""

    @app.get(f"{PREFIX}/feed", tags=["feed"], responses=_GONE)
    async def feed(
        request: Request,
        response: Response,
        after: After = None,
        limit: Limit = 100,
        prefer: Prefer = None,
    ) -> FeedAnswer:
        """Return the events of tasks, rollouts and sessions, in the order in which they were
        stored. With `Prefer: wait=N`, wait until there is an event. A client's key receives only
        its tenant's events, which are numbered separately for each tenant.
        """
        start, caller = after or 0, caller_of(request)
        page = await patiently(
            lambda: _page(run, start, limit, caller.sees),
            lambda found: bool(found.entries),
            prefer=prefer,
            response=response,
        )
        return FeedAnswer.of(page, after=start, caller=caller)

    @app.get(
        f"{PREFIX}/events",
        tags=["feed"],
        response_class=StreamingResponse,
        responses={
            200: {
                "description": "events: `id` is an entry's number, `event` its kind, `data` the "
                "entry as in the feed; comments in between keep the connection open",
                "content": {"text/event-stream": {"schema": EVENT_SCHEMA}},
            },
            **_GONE,
        },
    )
    async def events(
        request: Request,
        after: After = None,
        last_event_id: Annotated[
            Natural | None,
            Header(alias="Last-Event-ID", description="instead of `after`"),
        ] = None,
    ) -> StreamingResponse:
        """Stream the feed as server-sent events. A stream ends after some minutes; clients then
        reconnect with the last event's id, as browsers do automatically.
        """
        start = last_event_id if last_event_id is not None else after or 0
        caller = caller_of(request)
        first = await _page(run, start, EVENTS_PER_READ, caller.sees)
        return StreamingResponse(
            _events(run, first, start, stream_s, caller),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )


async def _page(run: RunPort, after: int, limit: int, sees: str | None) -> FeedPage:
    page = await run.feed(after=after, limit=limit, sees=sees)
    # 0 means from the oldest entry that is kept.
    if 0 < after < page.oldest - 1:
        raise Problem(
            410,
            "feed-cut",
            f"the feed begins at entry {page.oldest}, got after={after}: the entries between are "
            "no longer kept; get the state of your tasks, and continue with "
            f"after={page.oldest - 1}, or raise service.keep_feed_entries",
        )
    if after > page.newest:
        raise Problem(
            410,
            "feed-ahead",
            f"the feed ends at entry {page.newest}, got after={after}: the number is from another "
            "run, or the run was restored from a backup; get the state of your tasks, and continue "
            f"with after={page.newest}",
        )
    return page


async def _events(
    run: RunPort, page: FeedPage, after: int, stream_s: float, caller: Caller
) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + stream_s
    yield b"retry: 1000\n\n"
    while True:
        for entry in page.entries:
            after = entry.number
            data = EntryAnswer.of(entry, caller).model_dump_json(exclude_none=True)
            yield f"id: {entry.number}\nevent: {entry.kind}\ndata: {data}\n\n".encode()
        left_s = ends_at - loop.time()
        if left_s <= 0:
            return
        if not page.entries:
            yield HEARTBEAT
        try:
            page = await look_until(
                lambda start=after: _page(  # type: ignore[misc]
                    run, start, EVENTS_PER_READ, caller.sees
                ),
                lambda found: bool(found.entries),
                wait_s=min(left_s, HEARTBEAT_EVERY_S),
            )
        except (RunUnavailable, Problem):
            # The client reconnects, and gets the error's status.
            return
