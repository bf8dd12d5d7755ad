"""The routes that submit, show, list and cancel tasks and their rollouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import Field, ValidationError

from actors.types import SESSION
from service.access.keys import WHOLE_PATTERN, digest_of, own_id
from service.api import problems
from service.api.callers import caller_of
from service.api.environments import TaskChecks, check_listed
from service.api.ports import PREFIX, RunPort
from service.api.problems import Problem, shown
from service.api.schemas import (
    Digits,
    Natural,
    RolloutAnswer,
    RolloutId,
    RolloutsAnswer,
    SubmitAnswer,
    SubmitBody,
)
from service.api.settings import HttpSettings
from service.api.waiting import Prefer, patiently
from service.intake.listing import TaskFilter
from service.intake.submission import (
    RolloutRequest,
    Status,
    SubmissionView,
    SubmitReply,
)

MAX_PAGE = 1000
OVER = frozenset({Status.TRAINED, Status.EVICTED, Status.CANCELLED})

_KEY_PATTERN = r"^[!-~]([ -~]{0,253}[!-~])?$"
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=_KEY_PATTERN,
        description="a name of the request: while a task that was accepted with this key is kept, "
        "a different request with the key is refused. Optional, because the tasks' ids already "
        "make it safe to repeat a request",
        examples=["8e03978e-40d5-43dd-bc93-6894a57f9324"],
    ),
]
Limit = Annotated[
    int,
    Field(ge=1, le=MAX_PAGE),
    Digits,
    Query(description="maximum number of entries in the answer"),
]
RolloutPath = Annotated[
    str,
    Path(pattern=WHOLE_PATTERN, description="the task's id; an admin may name any TENANT~ID"),
]
NumberCursor = Annotated[Natural | None, Query(description="`next` of the previous page")]
FULL = "the backlog is full, or a limit of the key is reached; Retry-After says when to try again"
KEY_TAKEN = "Idempotency-Key: another request was accepted with this key"


class _SubmitRoute(APIRoute):
    """The route that submits tasks; for speed, it parses valid bodies without FastAPI."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        by_fastapi = super().get_route_handler()

        async def handle(request: Request) -> Response:
            # If the request is invalid, FastAPI parses it again and reports the error.
            key = request.headers.get("idempotency-key")
            if request.url.query:
                return await by_fastapi(request)
            try:
                body = SubmitBody.model_validate_json(await request.body())
            except ValidationError:
                return await by_fastapi(request)
            if key is not None and re.fullmatch(_KEY_PATTERN, key) is None:
                return await by_fastapi(request)
            answer: Response = await self.endpoint(body, request, key)
            return answer

        return handle


def add_rollouts(app: FastAPI, run: RunPort, settings: HttpSettings) -> None:
    """Add the routes of tasks and their rollouts."""
    checks = TaskChecks(settings)

    async def submit(
        body: SubmitBody, request: Request, idempotency_key: IdempotencyKey = None
    ) -> Response:
        """Accept a batch of tasks, either all or none. They are stored before the answer."""
        caller = caller_of(request)
        requests = body.requests(num_samples=settings.algorithm.group_size, caller=caller)
        _check(body.environment, requests, settings)
        await checks.check(body.environment, requests)
        reply = await run.submit(
            requests,
            key=key_digest(idempotency_key, tenant=caller.tenant),
            limits=caller.limits,
        )
        refuse_if_needed(reply)
        is_one = len(requests) == 1
        return Response(
            SubmitAnswer.json_of(reply, caller),
            status_code=202,
            headers={"Location": f"{PREFIX}/rollouts/{body.tasks[0].id}"} if is_one else None,
            media_type="application/json",
        )

    app.router.add_api_route(
        f"{PREFIX}/rollouts",
        submit,
        methods=["POST"],
        tags=["rollouts"],
        status_code=202,
        response_model=SubmitAnswer,
        responses={
            409: {"description": "an id is taken, with another content or by another key"},
            429: {"description": FULL},
        },
        route_class_override=_SubmitRoute,
    )

    @app.get(f"{PREFIX}/rollouts", tags=["rollouts"])
    async def rollouts(
        request: Request,
        status: Status | None = None,
        environment: Annotated[str | None, Query(max_length=255)] = None,
        batch: RolloutId | None = None,
        cursor: NumberCursor = None,
        limit: Limit = 100,
    ) -> RolloutsAnswer:
        """List tasks in the order of acceptance. A page may have fewer tasks than `limit`, or none,
        although more tasks follow: `next` is then not null.
        """
        check_listed(environment, settings)
        caller = caller_of(request)
        wanted = TaskFilter(status=status, environment=environment, batch=batch, tenant=caller.sees)
        page = await run.tasks(wanted, after=cursor or 0, limit=limit)
        return RolloutsAnswer.of(page, caller)

    @app.get(
        f"{PREFIX}/rollouts/{{rollout_id}}",
        tags=["rollouts"],
        responses={404: {"description": "the run has no such task, or no longer keeps it"}},
    )
    async def rollout(
        request: Request, response: Response, rollout_id: RolloutPath, prefer: Prefer = None
    ) -> RolloutAnswer:
        """Return the state of a task and of each of its rollouts. With `Prefer: wait=N`, wait until
        the task is over.
        """
        caller = caller_of(request)
        name = caller.whole(rollout_id)
        view = await patiently(
            lambda: run.submission(name, sees=caller.sees),
            lambda found: found is None or found.status in OVER,
            prefer=prefer,
            response=response,
        )
        return RolloutAnswer.of(_found(rollout_id, view), caller)

    @app.post(
        f"{PREFIX}/rollouts/{{rollout_id}}/cancel",
        tags=["rollouts"],
        responses={
            404: {"description": "the run has no such task, or no longer keeps it"},
            409: {"description": "a training step has it, or it has ended"},
        },
    )
    async def cancel(request: Request, rollout_id: RolloutPath) -> RolloutAnswer:
        """Cancel a task, unless a training step has taken it. The request may be repeated."""
        caller = caller_of(request)
        found = await run.cancel(caller.whole(rollout_id), sees=caller.sees)
        view = _found(rollout_id, found)
        if view.status is not Status.CANCELLED:
            raise Problem(409, "already-over", _why_not_cancelled(rollout_id, view))
        return RolloutAnswer.of(view, caller)


def key_digest(idempotency_key: str | None, *, tenant: str) -> str:
    """Return a digest by which a repeated request is recognised; empty if the client sent no key.

    The tenant is part of the digest, so that two tenants may send the same key.
    """
    if not idempotency_key:
        return ""
    # Neither the tenant nor the key contains a newline.
    return digest_of(f"{tenant}\n{idempotency_key}" if tenant else idempotency_key)


def _found(rollout_id: str, view: SubmissionView | None) -> SubmissionView:
    if view is None:
        raise Problem(
            404,
            "unknown-rollout",
            f"this run has no task {rollout_id!r}: it was never accepted, or it is over and no "
            "longer among the newest service.keep_ended_tasks",
        )
    return view


def _why_not_cancelled(rollout_id: str, view: SubmissionView) -> str:
    if view.status in (Status.TRAINED, Status.EVICTED):
        return f"{rollout_id} is {view.status.value} already and cannot be cancelled"
    return (
        f"{rollout_id} has left the queue: a training step has it, or it was evicted just now; it "
        "cannot be cancelled; GET it later to see its result"
    )


def _check(environment: str, requests: Sequence[RolloutRequest], settings: HttpSettings) -> None:
    """Check that the run's configuration allows these tasks."""
    if environment == SESSION:
        raise Problem(
            422,
            "unknown-environment",
            f"environment {SESSION!r} is played by external agents, which need keys and addresses; "
            f"submit its tasks to {PREFIX}/sessions",
        )
    if environment not in settings.environments:
        raise Problem(
            422,
            "unknown-environment",
            f"environment is {shown(environment)!r}, expected one of "
            f"{', '.join(settings.environments)}; the run's configuration names them "
            "(tasks.environment, or the parts of its mixture)",
        )
    most = settings.service.max_tasks_per_request
    if len(requests) > most:
        raise Problem(
            413,
            "too-many-tasks",
            f"got {len(requests)} tasks, expected at most {most} in a request; split the "
            "batch, or raise service.max_tasks_per_request",
        )
    for item in requests:
        check_samples(item.id, item.num_samples, item.min_usable_samples, settings)


def check_samples(
    task_id: str, num_samples: int, min_usable_samples: int | None, settings: HttpSettings
) -> None:
    """Check the size of a group. Raises: Problem if it is too large, or too small to be trained."""
    lowest, most = settings.algorithm.min_group_size, settings.service.max_samples_per_task
    least = min_usable_samples or num_samples
    if not lowest <= least <= num_samples <= most:
        raise Problem(
            422,
            "num-samples",
            f"task {own_id(task_id)!r} asks for {shown(str(num_samples))} rollouts, "
            f"min_usable_samples {shown(str(min_usable_samples))}; expected {lowest} "
            f"(algorithm.min_group_size) <= min_usable_samples <= num_samples <= "
            f"{most} (service.max_samples_per_task)",
        )


def refuse_if_needed(reply: SubmitReply) -> None:
    """Check that a request was accepted. Raises: Problem if it was refused."""
    if reply.is_key_taken:
        raise Problem(
            422,
            "idempotency-key-reused",
            f"{KEY_TAKEN}; no task of this one was accepted; send it with another key",
            errors=[{"loc": ["header", "Idempotency-Key"]}],
        )
    if reply.conflicts:
        taken = [own_id(each) for each in reply.conflicts]
        raise Problem(
            409,
            "id-conflict",
            f"{len(taken)} ids are taken, with another content or by another key: "
            f"{', '.join(taken[:8])}; no task of this request was accepted; give changed tasks new "
            "ids",
            errors=[{"loc": ["body", "tasks", each]} for each in taken],
            headers={"x-should-retry": "false"},
        )
    if reply.is_quota and reply.is_too_large:
        raise Problem(413, "batch-too-large", f"{reply.refusal}; split the batch")
    if reply.is_quota:
        raise Problem(
            429,
            "quota",
            f"{reply.refusal}; send them again in {reply.retry_after_s} s",
            headers={"Retry-After": str(reply.retry_after_s)},
        )
    if reply.is_too_large:
        raise Problem(
            413,
            "batch-too-large",
            f"{reply.refusal}; split the batch, or raise service.max_waiting_tasks",
        )
    if reply.retry_after_s is not None:
        raise Problem(
            429,
            "queue-full",
            f"{reply.refusal}; send them again in {reply.retry_after_s} s, or raise that limit",
            headers={"Retry-After": str(reply.retry_after_s)},
        )
    if reply.refusal:
        raise problems.unavailable(reply.refusal)
