"""The routes of operators: pauses, checkpoints, evaluations, policies, the run's stop, named keys.

Each call that changes something is recorded with its answer (`CallAnswer`), even if the run refuses
the call. A request that no route accepted, such as one with an invalid body, is not recorded. Only
an admin may create, list and revoke named keys; a key is shown only once.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable
from typing import Annotated, Any, TypeVar

from fastapi import Body, FastAPI, Path, Request, Response
from pydantic import Field, model_validator

from actors.environment.settings import KeptTokens, Sampling, StructuredOutputs
from service.access.keys import (
    MAX_KEYS,
    NAME_PATTERN,
    KeyLimits,
    NamedKey,
    Scope,
    check_key,
    digest_of,
    new_key,
)
from service.api.control import (
    CheckpointAnswer,
    ControlAnswer,
    ControlRefused,
    OperationAnswer,
    PoliciesAnswer,
)
from service.api.ports import PREFIX, RunPort
from service.api.problems import Problem, RunUnavailable
from service.api.rollouts import Limit
from service.api.schemas import ID_PATTERN, WHOLE, StopAnswer, StopBody, StrictBody
from service.config.disagreements import kept_tokens_problems
from service.store.controls import CallAnswer
from service.store.tables import Pausable

log = logging.getLogger("rayloom.api")


STATUSES = {"unknown": 404, "gone": 410, "conflict": 409, "invalid": 422}
_NOT_NOW: dict[int | str, dict[str, Any]] = {
    409: {"description": "not now: the run is in another state"}
}
_UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"description": "the run does not have it"}}
_GONE: dict[int | str, dict[str, Any]] = {410: {"description": "its files are gone"}}
MAX_TEMPERATURE, MAX_SAMPLES, MAX_TASK_IDS = 5.0, 1024, 1000
MAX_TOP_K = 1_000_000
# Most characters of a body, and of an answer, that are recorded.
MAX_NOTED_CHARACTERS = 1000
Answer = TypeVar("Answer", bound=StrictBody)
Found = TypeVar("Found")


# -- bodies ---------------------------------------------------------------------------------------


class PauseBody(StrictBody):
    reason: str = Field(
        "",
        max_length=500,
        pattern=r"^[^\x00-\x1f\x7f]*$",
        description="shown to everybody who looks at the paused part",
    )


class CheckpointsAnswer(StrictBody):
    checkpoints: list[CheckpointAnswer] = Field(description="newest first")


class EvaluationBody(StrictBody):
    """A request to play held-out tasks now, during training."""

    temperature: float = Field(0.0, ge=0, le=MAX_TEMPERATURE, strict=True, allow_inf_nan=False)
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        strict=True,
        allow_inf_nan=False,
        description="sample among the likeliest tokens whose probabilities add up to this number",
    )
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K, strict=True), WHOLE] = Field(
        0, description="number of the likeliest tokens to sample among; 0: all"
    )
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        strict=True,
        allow_inf_nan=False,
        description="lowest probability of a sampled token, as a share of the likeliest token's",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="constraint on the form of each reply; null: none"
    )
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES, strict=True), WHOLE] = Field(
        1, description="samples of each task: n of pass@k and avg@n"
    )
    num_tasks: Annotated[int, Field(ge=1, strict=True), WHOLE] | None = Field(
        None,
        description="play only this number of held-out tasks, from the first on; null: all, or "
        "those in `tasks`",
    )
    tasks: list[str] = Field(
        default_factory=list,
        min_length=1,
        max_length=MAX_TASK_IDS,
        description="ids of the held-out tasks to play; leave it out to play all",
    )
    pass_reward: float = Field(
        1.0,
        strict=True,
        allow_inf_nan=False,
        description="smallest return of a sample that passes, as a share of the best possible "
        "return if the environment knows it",
    )
    ks: list[Annotated[int, Field(ge=1, strict=True), WHOLE]] | None = Field(
        None, max_length=32, description="values of k for pass@k; null: 1 and num_samples"
    )

    @model_validator(mode="after")
    def _fits(self) -> EvaluationBody:
        if self.tasks and self.num_tasks is not None:
            raise ValueError("got tasks and num_tasks, expected one of them; leave one out")
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError("tasks: an id occurs more than once; raise num_samples instead")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"num_samples is {self.num_samples} at temperature 0, at which all samples of a "
                "task are equal; expected a temperature above 0, or one sample"
            )
        for problem in kept_tokens_problems("", self._kept, temperature=self.temperature):
            raise ValueError(problem)
        if (most := max(self.ks or [1])) > self.num_samples:
            raise ValueError(
                f"ks has {most}, expected at most num_samples, which is {self.num_samples}; raise "
                f"num_samples, or remove {most} from ks"
            )
        return self

    @property
    def _kept(self) -> KeptTokens:
        return KeptTokens(
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            structured_outputs=self.structured_outputs,
        )

    def sampling(self) -> Sampling:
        ks = [1, self.num_samples] if self.ks is None else self.ks
        return Sampling(
            num_samples=self.num_samples,
            temperature=self.temperature,
            kept=self._kept,
            pass_reward=self.pass_reward,
            ks=tuple(sorted(set(ks))),
        )


class CallsAnswer(StrictBody):
    calls: list[CallAnswer] = Field(description="newest first")


# -- routes ---------------------------------------------------------------------------------------


def add_control(app: FastAPI, run: RunPort) -> None:
    """Add the routes with which operators control the run."""
    _add_pauses(app, run)
    _add_checkpoints(app, run)
    _add_evaluations(app, run)
    _add_policies(app, run)
    _add_stop(app, run)


def _add_pauses(app: FastAPI, run: RunPort) -> None:
    @app.get(f"{PREFIX}/control")
    async def control() -> ControlAnswer:
        """Return which parts of the run are paused, and what is in progress."""
        return await _asked(run.control.view())

    @app.post(f"{PREFIX}/control/{{part}}/pause", responses=_NOT_NOW)
    async def pause(
        part: Pausable,
        request: Request,
        body: Annotated[PauseBody, Body(default_factory=PauseBody)],
    ) -> ControlAnswer:
        """Pause admission, generation or training. The pause lasts until the part is resumed, even
        across a restart of the run. The request may be repeated. docs/control.md lists the work
        that continues meanwhile."""
        return await _noted(run, request, _asked(run.control.pause(part, body.reason)))

    @app.post(f"{PREFIX}/control/{{part}}/resume", responses=_NOT_NOW)
    async def resume(part: Pausable, request: Request) -> ControlAnswer:
        """Resume a paused part of the run. The request may be repeated."""
        return await _noted(run, request, _asked(run.control.resume(part)))


def _add_checkpoints(app: FastAPI, run: RunPort) -> None:
    @app.get(f"{PREFIX}/checkpoints")
    async def checkpoints() -> CheckpointsAnswer:
        """List the checkpoints that are kept, and whether the run can return to each."""
        found = await _asked(run.control.checkpoints())
        return CheckpointsAnswer(checkpoints=list(found))

    @app.post(f"{PREFIX}/checkpoints", status_code=202, responses=_NOT_NOW)
    async def save(request: Request, response: Response) -> OperationAnswer:
        """Commit a checkpoint after the current step."""
        return await _begun(run, request, response, run.control.checkpoint())

    @app.post(
        f"{PREFIX}/checkpoints/{{checkpoint}}/return",
        status_code=202,
        responses={**_UNKNOWN, **_NOT_NOW, **_GONE},
    )
    async def go_back(
        request: Request, response: Response, checkpoint: str = Path(pattern=ID_PATTERN)
    ) -> OperationAnswer:
        """Stop the current training and continue from a checkpoint. Later steps are undone, and
        their rollouts are played again.
        """
        return await _begun(run, request, response, run.control.go_back(checkpoint))


def _add_evaluations(app: FastAPI, run: RunPort) -> None:
    @app.post(f"{PREFIX}/evaluations", status_code=202, responses=_NOT_NOW)
    async def evaluate(
        body: Annotated[EvaluationBody, Body(default_factory=EvaluationBody)],
        request: Request,
        response: Response,
    ) -> OperationAnswer:
        """Play held-out tasks now, during training."""
        evaluating = run.control.evaluate(
            body.sampling(), num_tasks=body.num_tasks, task_ids=body.tasks
        )
        return await _begun(run, request, response, evaluating)

    @app.get(f"{PREFIX}/operations/{{operation}}", responses=_UNKNOWN)
    async def operation(operation: str = Path(pattern=ID_PATTERN)) -> OperationAnswer:
        """Return the state of an operation that began with an answer of status 202."""
        return await _asked(run.control.operation(operation))


def _add_policies(app: FastAPI, run: RunPort) -> None:
    @app.get(f"{PREFIX}/policies")
    async def policies() -> PoliciesAnswer:
        """Return the policy version of the trainer, each engine and each checkpoint."""
        return await _asked(run.control.policies())

    @app.get(f"{PREFIX}/control/calls")
    async def calls(limit: Limit = 100) -> CallsAnswer:
        """List the operators' requests to the run, and the answers."""
        found = await _asked(run.control.calls(limit))
        return CallsAnswer(calls=list(found))


def _add_stop(app: FastAPI, run: RunPort) -> None:
    @app.post(f"{PREFIX}/stop", status_code=202)
    async def stop(
        body: Annotated[StopBody, Body(default_factory=StopBody)], request: Request
    ) -> StopAnswer:
        """End the run after the current step, with a checkpoint. The request may be repeated. The
        run keeps the accepted tasks that are not trained, and continues them when it is resumed.
        """

        async def work() -> StopAnswer:
            await run.stop(body.grace_seconds)
            return StopAnswer(phase=(await run.readiness()).phase)

        return await _noted(run, request, work(), status=202)


async def _begun(
    run: RunPort, request: Request, response: Response, work: Awaitable[OperationAnswer]
) -> OperationAnswer:
    answer = await _noted(run, request, _asked(work), status=202)
    response.headers["Location"] = f"{PREFIX}/operations/{answer.id}"
    return answer


async def _asked(work: Awaitable[Found]) -> Found:
    """Return the run's answer to a request. If the run refuses the request, raise a Problem."""
    try:
        return await work
    except ControlRefused as refused:
        raise Problem(
            STATUSES[refused.code],
            refused.code,
            refused.message,
            headers={"x-should-retry": "false"},
        ) from refused


async def _noted(
    run: RunPort, request: Request, work: Awaitable[Answer], *, status: int = 200
) -> Answer:
    """Carry out an operator's request (`work`), and record it with its answer or its Problem."""
    try:
        answer = await work
    except Problem as problem:
        await _note(run, request, problem.status, problem.detail)
        raise
    await _note(run, request, status, json.dumps(answer.model_dump(mode="json")))
    return answer


async def _note(run: RunPort, request: Request, status: int, answer: str) -> None:
    call = CallAnswer(
        at=time.time(),
        caller=caller_of(request),
        call=f"{request.method} {request.url.path}",
        body=(await request.body()).decode(errors="replace")[:MAX_NOTED_CHARACTERS],
        status=status,
        answer=answer[:MAX_NOTED_CHARACTERS],
    )
    try:
        await run.control.note_call(call)
    except RunUnavailable as error:
        # The call was carried out: an answer of 503 would be wrong.
        log.warning("an admin call could not be stored (%s): %s", error, call)


def caller_of(request: Request) -> str:
    """Return the name of a request's API key, which the guards stored in the request's state."""
    return str(getattr(request.state, "key_name", ""))


class KeyBody(StrictBody):
    """A request to create an API key."""

    name: str = Field(pattern=NAME_PATTERN, description="unique in the run")
    scope: Scope = Scope.CLIENT
    tenant: str = Field(
        "",
        description="owner of the key's tasks and sessions; a client's key sees only those of its "
        "tenant; an admin's key sees those of every tenant, and needs no tenant",
    )
    limits: KeyLimits = Field(
        default_factory=KeyLimits, description="null: service.key_limits of the run"
    )

    @model_validator(mode="after")
    def _can_be(self) -> KeyBody:
        check_key(self.name, self.scope, self.tenant)
        return self


class KeyAnswer(StrictBody):
    """The description of an API key, without the key itself."""

    name: str
    scope: Scope
    tenant: str
    limits: KeyLimits
    created_at: float = Field(description="seconds since 1970")
    revoked_at: float | None = Field(description="seconds since 1970; null: the key is valid")


class NewKeyAnswer(StrictBody):
    """A new API key, shown only in this answer: the run stores only its SHA-256."""

    key: str
    about: KeyAnswer


class KeysAnswer(StrictBody):
    """The run's API keys, including revoked keys, in the order of their creation."""

    keys: list[KeyAnswer]


def add_keys(app: FastAPI, run: RunPort) -> None:
    """Add the routes that create, list and revoke API keys; the guards let only admins use them."""

    @app.post(
        f"{PREFIX}/keys",
        tags=["keys"],
        status_code=201,
        responses={409: {"description": "the name is, or was, taken; or there are too many keys"}},
    )
    async def create(body: KeyBody, response: Response) -> NewKeyAnswer:
        """Create an API key. It is valid at once."""
        raw = new_key()
        key = NamedKey(
            name=body.name,
            digest=digest_of(raw),
            scope=body.scope,
            tenant=body.tenant,
            limits=body.limits,
            created_at=time.time(),
        )
        if not await run.add_key(key):
            raise Problem(
                409,
                "key-exists",
                f"the name {body.name!r} is or was taken, or the run has its maximum of "
                f"{MAX_KEYS:,} keys; choose another name, or use an existing key",
                headers={"x-should-retry": "false"},
            )
        response.headers["Cache-Control"] = "no-store"
        return NewKeyAnswer(key=raw, about=KeyAnswer.model_validate(key))

    @app.get(f"{PREFIX}/keys", tags=["keys"])
    async def keys() -> KeysAnswer:
        """List the run's named keys."""
        return KeysAnswer(keys=[KeyAnswer.model_validate(key) for key in await run.keys()])

    @app.delete(
        f"{PREFIX}/keys/{{name}}",
        tags=["keys"],
        responses={404: {"description": "the run has no key of this name"}},
    )
    async def revoke(name: str = Path(pattern=NAME_PATTERN)) -> KeyAnswer:
        """Revoke a key permanently, and also the keys of all sessions that were created with it.
        The request may be repeated. Every replica refuses these keys after at most three
        seconds."""
        key = await run.revoke_key(name)
        if key is None:
            raise Problem(
                404,
                "unknown-key",
                f"the run has no key with the name {name!r}; see GET {PREFIX}/keys",
            )
        return KeyAnswer.model_validate(key)
