"""The page at `/`, and the routes of its data: the run's state, its journal, and trajectories.

The page itself contains no data and asks for the key, so anyone who reaches the API may load it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Response
from fastapi.responses import HTMLResponse

from actors.types import Outcome
from service.access.keys import WHOLE_PATTERN
from service.api.ports import PREFIX, RunPort
from service.api.problems import Problem
from service.api.rollouts import Limit
from service.api.schemas import Natural
from service.inspect.listing import Filters, JournalAnswer
from service.page.packed import empty_page
from service.report.document import run_document

_HEADERS = {
    # A page of another origin cannot show this page in a frame, and trick a user into clicks there.
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_JSON_OBJECT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}}},
    404: {"description": "the journal does not have this trajectory, or no longer has it"},
}


def add_page(app: FastAPI, run: RunPort) -> None:
    """Add the page at `/`, and the routes of the data that it shows."""

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(empty_page(), headers=_HEADERS)

    @app.get(f"{PREFIX}/run", tags=["run"])
    async def picture(
        after: Annotated[
            Natural,
            Query(description="the last step that the caller already has"),
        ] = 0,
        term: Annotated[
            Natural,
            Query(
                description="`term` of the earlier answer that had the step `after`; if the run "
                "now has another term, all steps are returned",
            ),
        ] = 0,
    ) -> dict[str, Any]:
        """Return the state of the run, as the page at `/` shows it: summary, steps, evaluations,
        window, queue, ledger, engines, notices and configuration. The names of the fields may
        change in later versions."""
        found = await run.picture(term=term, after=after)
        # Use a thread: the document of hundreds of steps takes tens of milliseconds.
        return await asyncio.to_thread(run_document, found)

    @app.get(f"{PREFIX}/journal", tags=["run"])
    async def journal(
        step: Annotated[Natural | None, Query()] = None,
        task: Annotated[str | None, Query(pattern=WHOLE_PATTERN)] = None,
        outcome: Outcome | None = None,
        cursor: Annotated[
            str | None,
            Query(pattern=r"^\d{1,9}\.\d{1,9}$", description="`next` of the previous page"),
        ] = None,
        limit: Limit = 100,
    ) -> JournalAnswer:
        """List the trajectories of the newest steps, as the trainer received them."""
        behind, _, number = (cursor or "").partition(".")
        wanted = Filters(step=step, task=task, outcome=outcome, limit=limit)
        after = (int(behind), int(number)) if cursor else None
        return await run.journal(wanted, after=after)

    @app.get(
        f"{PREFIX}/rollouts/{{name}}/trajectory",
        tags=["run"],
        response_class=Response,
        responses=_JSON_OBJECT,
    )
    async def trajectory(
        name: Annotated[
            str,
            Path(
                pattern=WHOLE_PATTERN,
                description="a trajectory's id, a rollout's, a session's, or TASK-MEMBER",
            ),
        ],
    ) -> Response:
        """Return a trajectory of the journal, as the page at `/` shows it, with the mask,
        log-probability, advantage and version of each token. The names of the fields may change in
        later versions."""
        found = await run.trajectory(name)
        if found is None:
            raise Problem(
                404,
                "not-in-journal",
                f"the journal has no trajectory {name!r}: no step has taken it, or the step is "
                "older than the newest run.journal_steps; see GET /api/v1/journal",
            )
        return Response(found, media_type="application/json")
