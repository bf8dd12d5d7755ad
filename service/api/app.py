"""The HTTP API of one run: FastAPI routes over a `RunPort`. Nothing here knows Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from fastapi import FastAPI, Path, Response
from fastapi.responses import JSONResponse

from actors.metrics import ApiMetrics
from service.api import problems
from service.api.counting import CountedRequests
from service.api.guards import Guards
from service.api.problems import Problem, shown
from service.api.schemas import (
    ID_PATTERN,
    ReadyAnswer,
    RolloutAnswer,
    SubmitAnswer,
    SubmitBody,
)
from service.api.settings import HttpSettings
from service.intake.submission import RolloutRequest, Status, SubmissionView, SubmitReply
from service.run.health import Readiness

PREFIX = "/api/v1"


class RunPort(Protocol):
    """What the routes need of a run. Every call may raise RunUnavailable."""

    async def submit(self, requests: Sequence[RolloutRequest]) -> SubmitReply:
        """Accept all or none; durable when this returns."""
        ...

    async def submission(self, submission_id: str) -> SubmissionView | None: ...

    async def cancel(self, submission_id: str) -> SubmissionView | None: ...

    async def readiness(self) -> Readiness: ...


def create_app(
    run: RunPort,
    settings: HttpSettings,
    *,
    metrics: ApiMetrics | None = None,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """metrics: told of every request. lifespan: entered while the application serves."""
    app = FastAPI(
        title="Rayloom", description="Rollouts for a training run, over HTTP.", lifespan=lifespan
    )
    app.add_middleware(
        Guards,
        max_body_bytes=settings.service.max_body_kib << 10,
        max_session_body_bytes=settings.sessions.max_body_mib << 20,
        key_digest=settings.key_digest,
        hosts=settings.hosts,
    )
    # Around the guards: what they refuse counts too.
    app.add_middleware(CountedRequests, metrics=metrics or ApiMetrics())
    problems.install(app)
    _add_health(app, run)
    _add_rollouts(app, run, settings)
    return app


def _add_health(app: FastAPI, run: RunPort) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """This process answers."""
        return {"status": "ok"}

    @app.get("/readyz", response_model=ReadyAnswer)
    async def readyz() -> JSONResponse:
        """200 when rollouts are played and trained on now; else 503, with the reasons."""
        found = await run.readiness()
        body = ReadyAnswer(
            ready=found.is_ready,
            reasons=list(found.reasons),
            phase=found.phase.value,
            policy_version=found.policy_version,
            engines={"ready": found.engines_ready, "total": found.engines_expected},
        )
        return JSONResponse(body.model_dump(), status_code=200 if found.is_ready else 503)


def _add_rollouts(app: FastAPI, run: RunPort, settings: HttpSettings) -> None:
    @app.post(f"{PREFIX}/rollouts", status_code=202)
    async def submit(body: SubmitBody, response: Response) -> SubmitAnswer:
        """Accept a batch of tasks: durable when answered, all or none."""
        requests = body.requests(num_samples=settings.algorithm.group_size)
        _check(body.environment, requests, settings)
        reply = await run.submit(requests)
        refuse_if_needed(reply)
        if len(requests) == 1:
            response.headers["Location"] = f"{PREFIX}/rollouts/{requests[0].id}"
        return SubmitAnswer.of(reply)

    @app.get(f"{PREFIX}/rollouts/{{rollout_id}}")
    async def rollout(rollout_id: str = Path(pattern=ID_PATTERN)) -> RolloutAnswer:
        """How a task stands, and each rollout of it."""
        return RolloutAnswer.of(_found(rollout_id, await run.submission(rollout_id)))

    @app.post(f"{PREFIX}/rollouts/{{rollout_id}}/cancel")
    async def cancel(rollout_id: str = Path(pattern=ID_PATTERN)) -> RolloutAnswer:
        """Take a task back, as long as no training step has taken it; may be repeated."""
        view = _found(rollout_id, await run.cancel(rollout_id))
        if view.status is not Status.CANCELLED:
            raise Problem(409, "already-over", _why_not_cancelled(view))
        return RolloutAnswer.of(view)


def _found(rollout_id: str, view: SubmissionView | None) -> SubmissionView:
    if view is None:
        raise Problem(
            404,
            "unknown-rollout",
            f"this run knows no task {rollout_id!r}: it was never accepted, or it is over and no "
            "longer among the newest service.keep_ended_tasks",
        )
    return view


def _why_not_cancelled(view: SubmissionView) -> str:
    if view.status in (Status.TRAINED, Status.EVICTED):
        return f"{view.id} is {view.status.value} already and cannot be taken back"
    return (
        f"{view.id} has left the queue: a training step has it, or it was evicted just now; it "
        "cannot be taken back; GET it later to see what became of it"
    )


def _check(environment: str, requests: Sequence[RolloutRequest], settings: HttpSettings) -> None:
    """Check a body against the run's configuration. Raises: Problem."""
    if environment not in settings.environments:
        raise Problem(
            422,
            "unknown-environment",
            f"environment is {shown(environment)!r}, expected one of "
            f"{', '.join(settings.environments)}; the run's configuration names them "
            "(tasks.environment)",
        )
    most = settings.service.max_tasks_per_request
    if len(requests) > most:
        raise Problem(
            413,
            "too-many-tasks",
            f"got {len(requests)} tasks, expected at most {most} a request; split the "
            "batch, or raise service.max_tasks_per_request",
        )
    for item in requests:
        check_samples(item, settings)


def check_samples(item: RolloutRequest, settings: HttpSettings) -> None:
    """Raises: Problem for a group that could never be trained, or is too large."""
    lowest, most = settings.algorithm.min_group_size, settings.service.max_samples_per_task
    least = item.min_usable_samples or item.num_samples
    if not lowest <= least <= item.num_samples <= most:
        raise Problem(
            422,
            "num-samples",
            f"task {item.id!r} asks for {item.num_samples} rollouts, "
            f"min_usable_samples {item.min_usable_samples}; expected {lowest} "
            f"(algorithm.min_group_size) <= min_usable_samples <= num_samples <= "
            f"{most} (service.max_samples_per_task)",
        )


def refuse_if_needed(reply: SubmitReply) -> None:
    """Raises: Problem for a request of which nothing was accepted."""
    if reply.conflicts:
        raise Problem(
            409,
            "id-conflict",
            f"{len(reply.conflicts)} ids are known with another content: "
            f"{', '.join(reply.conflicts[:8])}; nothing of this request was accepted; give changed "
            "tasks ids of their own",
            errors=[{"loc": ["body", "tasks", each]} for each in reply.conflicts],
            headers={"x-should-retry": "false"},
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
