"""HTTP routes that create and end sessions, and through which agents sample turns.

An agent may use any of several chat APIs (dialects), such as OpenAI's or Anthropic's. A turn is
answered with one JSON body or, on request, as a stream of the dialect's events.

A stream begins when the turn is sampled, but at most one second after the request. Until the turn
is sampled, the stream has only heartbeats. An error before the stream begins gets its own HTTP
status, and a later error becomes an event.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from service.access.keys import WHOLE_PATTERN, Caller, digest_of, session_of_key
from service.api.bodies import THREAD_BYTES, repeated_key
from service.api.callers import Callers, caller_of
from service.api.ports import PREFIX, RunPort
from service.api.problems import Problem, repeated_text, shown
from service.api.rollouts import (
    FULL,
    IdempotencyKey,
    Limit,
    check_samples,
    key_digest,
    refuse_if_needed,
)
from service.api.schemas import KnownId
from service.api.settings import HttpSettings
from service.api.waiting import Prefer, patiently
from service.gateway.bodies import (
    CloseAnswer,
    FinishBody,
    NewSession,
    RewardBody,
    SessionAnswer,
    SessionListAnswer,
    SessionsAnswer,
    SessionsBody,
)
from service.gateway.chat import ChatCall, ChatReply, RefusalCode, Refused
from service.gateway.description import described
from service.gateway.dialects import DIALECTS, dialect_at
from service.gateway.dialects.dialect import (
    AnswerStyle,
    Dialect,
    error_headers,
    model_answer,
    models_answer,
)
from service.gateway.key_check import (
    SESSION_HEADER,
    SessionKeyCheck,
    as_problem,
    holder_of,
    sent_key,
)
from service.intake.listing import SessionFilter
from service.intake.session import SessionStatus, StoredSession, session_id

if TYPE_CHECKING:
    # Its module needs a tokenizer, which a replica of the API does not load.
    from service.gateway.sessions import Sessions

# A stream begins with its first heartbeat; until then an error has its own HTTP status.
FIRST_HEARTBEAT_S = 1.0
HEARTBEAT_EVERY_S = 5.0
MODEL = "policy"
ANY_METHOD = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_UNKNOWN: dict[int | str, dict[str, Any]] = {
    404: {"description": "the run has no such session, or no longer keeps it"}
}
_ENDING: dict[int | str, dict[str, Any]] = {
    **_UNKNOWN,
    403: {"description": "the key is the agent's, which cannot give a reward"},
    409: {"description": "it has another end, or another reward, already"},
}
SessionName = Annotated[
    str,
    Path(pattern=WHOLE_PATTERN, description="the session's id; an admin may name any TENANT~ID"),
]
Answer = TypeVar("Answer")
# An escape in JSON; the group is half of a surrogate pair without the other half.
_ESCAPE = re.compile(
    rb"\\(?:ud[89ab][\da-f]{2}\\ud[c-f][\da-f]{2}|(ud[89a-f][\da-f]{2})|.)",
    re.IGNORECASE | re.DOTALL,
)


def add_sessions(app: FastAPI, run: RunPort, port: Sessions, settings: HttpSettings) -> None:
    """Add the routes of sessions, and the check of their keys before a body is read.

    Args:
        port: The gateway's sessions. If the gateway is in another process, pass
            `GatewayClient.sessions`, which calls the gateway remotely.
    """
    app.state.check_session_key = SessionKeyCheck(
        lambda session_id, digest: port.check_key(session_id, digest), app.state.callers
    )
    _add_creation(app, run, port, settings)
    _add_lifecycle(app, run, port, app.state.callers)
    for dialect in DIALECTS:
        _add_agents_route(
            app,
            dialect.path,
            partial(_chat, dialect, port, settings),
            summary=f"Sample a turn: {dialect.name}",
            description=described(dialect),
        )
        if dialect.count_path:
            _add_agents_route(
                app,
                dialect.count_path,
                partial(_count, dialect, port, settings),
                summary=f"Count the tokens of a prompt: {dialect.name}",
                description=described(dialect, counts=True),
            )
    _add_models(app)
    # Add these last, because routes are tried in order.
    _add_unknown(app)


def _add_creation(app: FastAPI, run: RunPort, port: Sessions, settings: HttpSettings) -> None:
    @app.post(
        f"{PREFIX}/sessions",
        tags=["sessions"],
        status_code=201,
        responses={
            200: {"model": SessionsAnswer, "description": "these sessions exist already"},
            409: {"description": "the id is taken, with another content or by another key"},
            429: {"description": FULL},
        },
    )
    async def create(
        body: SessionsBody,
        request: Request,
        response: Response,
        idempotency_key: IdempotencyKey = None,
    ) -> SessionsAnswer:
        """Accept a task for external agents; it is stored before the answer. If the same body is
        sent again, the answer has the same sessions and keys, with status 200."""
        caller = caller_of(request)
        # Without a secret, anybody who knows a session's name could compute its keys.
        maker = replace(caller, secret=caller.secret or settings.session_secret)
        group_size = settings.algorithm.group_size
        # Check this first, because `body.request` makes keys for all sessions of the body.
        check_samples(body.id, body.num_sessions or group_size, body.min_usable_sessions, settings)
        try:
            wanted = body.request(
                caller=maker,
                group_size=group_size,
                rollouts=settings.rollouts,
                sessions=settings.sessions,
            )
        except ValueError as error:
            raise Problem(422, "invalid-request", str(error)) from error
        reply = await run.submit(
            [wanted],
            key=key_digest(idempotency_key, tenant=caller.tenant),
            limits=caller.limits,
        )
        refuse_if_needed(reply)
        is_new = wanted.id in reply.new_ids
        if not is_new:
            response.status_code = 200
        response.headers["Location"] = f"{PREFIX}/rollouts/{body.id}"
        response.headers["Cache-Control"] = "no-store"
        members: Iterable[int] = range(wanted.num_samples)
        if body.session is not None:
            claimed = await answer_or_problem(port.claim(wanted.id, body.session, caller.sees))
            members = [] if claimed is None else [claimed]
        address = (settings.service.public_url or str(request.base_url)).rstrip("/")
        return SessionsAnswer(
            id=body.id,
            is_new=is_new,
            sessions=[
                NewSession.of(
                    session_id(wanted.id, member), client_key=maker.secret, address=address
                )
                for member in members
            ],
        )

    @app.post(
        f"{PREFIX}/sessions/{{group}}/close",
        tags=["sessions"],
        responses={404: {"description": "there is no such group"}},
    )
    async def close(request: Request, group: KnownId) -> CloseAnswer:
        """Close a group: no agent can join it any more, and its unclaimed sessions end."""
        caller = caller_of(request)
        given_up = await answer_or_problem(port.close_group(caller.whole(group), caller.sees))
        if given_up is None:
            raise Problem(
                404,
                "unknown-group",
                f"this run has no group {group!r} of sessions: it was never created, or it is over "
                "and no longer among the newest service.keep_ended_tasks",
            )
        return CloseAnswer(given_up=given_up)


def _add_lifecycle(app: FastAPI, run: RunPort, port: Sessions, callers: Callers) -> None:
    @app.get(f"{PREFIX}/sessions", tags=["sessions"])
    async def sessions(
        request: Request,
        group: KnownId | None = None,
        status: SessionStatus | None = None,
        cursor: Annotated[
            str | None,
            Query(pattern=r"^\d{1,9}\.\d{1,9}$", description="`next` of the previous page"),
        ] = None,
        limit: Limit = 100,
    ) -> SessionListAnswer:
        """List sessions in the order of acceptance, without the totals of their turns. A page may
        have fewer sessions than `limit`, or none, although more sessions follow: `next` is then
        not null."""
        caller = caller_of(request)
        whole = None if group is None else caller.whole(group)
        wanted = SessionFilter(group=whole, status=status, tenant=caller.sees)
        position, _, member = (cursor or "").partition(".")
        after = (int(position), int(member)) if cursor else None
        return SessionListAnswer.of(await run.sessions(wanted, after=after, limit=limit), caller)

    @app.get(f"{PREFIX}/sessions/{{name}}", tags=["sessions"], responses=_UNKNOWN)
    async def show(
        request: Request, response: Response, name: SessionName, prefer: Prefer = None
    ) -> SessionAnswer:
        """Return the state of a session. With `Prefer: wait=N`, first wait at most N seconds until
        the session's status changes, such as from open to finished."""
        caller = caller_of(request)
        whole = caller.whole(name)
        before = await answer_or_problem(port.view(whole, caller.sees))
        if before is not None and before.end is None:
            before = await patiently(
                lambda: answer_or_problem(port.view(whole, caller.sees)),
                lambda found: found is None or found.status is not before.status,
                prefer=prefer,
                response=response,
            )
        return _shown(name, before, caller)

    @app.delete(f"{PREFIX}/sessions/{{name}}", tags=["sessions"], responses=_UNKNOWN)
    async def discard(request: Request, name: SessionName) -> SessionAnswer:
        """End a session without training its turns. A session that has ended stays as it is."""
        caller = caller_of(request)
        ended = await answer_or_problem(port.discard(caller.whole(name), caller.sees))
        return _shown(name, ended, caller)

    @app.post(f"{PREFIX}/sessions/{{name}}/finish", tags=["sessions"], responses=_ENDING)
    async def finish(body: FinishBody, request: Request, name: SessionName) -> SessionAnswer:
        """End a session. The request needs the session's reward key, a key of its tenant or an
        admin key."""
        key = sent_key(request.headers)
        client = await _client(key)
        caller = client or holder_of(key)
        work = port.finish(caller.whole(name), digest_of(key), body.finish(), client)
        return SessionAnswer.of(await answer_or_problem(work), caller)

    @app.put(f"{PREFIX}/sessions/{{name}}/reward", tags=["sessions"], responses=_ENDING)
    async def reward(body: RewardBody, request: Request, name: SessionName) -> SessionAnswer:
        """Give a finished session its pending reward. The request needs the session's reward key, a
        key of its tenant or an admin key."""
        key = sent_key(request.headers)
        client = await _client(key)
        caller = client or holder_of(key)
        work = port.give_reward(caller.whole(name), digest_of(key), body.finish(), client)
        return SessionAnswer.of(await answer_or_problem(work), caller)

    async def _client(key: str) -> Caller | None:
        """Return the caller for a key of a tenant or an admin; None for any other key."""
        caller = None if not key or session_of_key(key) else await callers.find(key)
        if caller is None or not caller.secret:
            return None
        callers.count(caller)
        # No raw key leaves the replica that it was sent to.
        return replace(caller, secret="")


async def answer_or_problem(work: Awaitable[Answer]) -> Answer:
    """Await a call of the gateway; if it raises Refused, raise a Problem with the same content."""
    try:
        return await work
    except Refused as refused:
        raise as_problem(refused) from refused


def _shown(name: str, view: StoredSession | None, caller: Caller) -> SessionAnswer:
    """Return the answer that shows a session's state. Raises: Problem (404) if `view` is None."""
    if view is None:
        raise Problem(
            404,
            "unknown-session",
            f"this run has no session {name!r}: it was never created, or its group is over and "
            "no longer among the newest service.keep_ended_tasks",
        )
    return SessionAnswer.of(view, caller)


def _add_agents_route(
    app: FastAPI,
    path: str,
    answer: Callable[[Request, str], Awaitable[Response]],
    *,
    summary: str,
    description: dict[str, Any],
) -> None:
    """Add a route for agents twice: at `/sessions/NAME` followed by `path`, and at `path` alone."""

    async def bound(request: Request, name: str) -> Response:
        return await answer(request, name)

    async def free(request: Request) -> Response:
        return await answer(request, _session_of(request.headers))

    for each, route in ((f"/sessions/{{name}}{path}", bound), (path, free)):
        app.post(
            each,
            tags=["agents"],
            summary=summary,
            response_class=Response,
            openapi_extra=description,
        )(route)


_UNKNOWN_MODEL: dict[str, Any] = {
    "404": {
        "description": "no model has this name; an error in the client's dialect",
        "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
    }
}


def _add_models(app: FastAPI) -> None:
    async def models() -> dict[str, Any]:
        """List the one model that a session has; agents may use any name for it."""
        return models_answer(MODEL, created_at=0)

    async def bound(name: str) -> dict[str, Any]:
        """Return the answer of `/v1/models`, which is the same for every session."""
        return await models()

    async def one(request: Request, model: str) -> Response:
        """Return the one model; 404, in the client's dialect, if the path names another model."""
        if model == MODEL:
            return JSONResponse(model_answer(MODEL, created_at=0))
        return _error(
            dialect_at(request.url.path, request.headers),
            Refused(
                RefusalCode.NOT_FOUND,
                f"got the model {shown(model)!r}, expected {MODEL!r}, which answers under any name",
                param="model",
            ),
        )

    async def bound_model(request: Request, name: str, model: str) -> Response:
        """Return the answer of `/v1/models/NAME`, which is the same for every session."""
        return await one(request, model)

    # Require no key, because the answer is the same for every session.
    for path, route in (
        ("/sessions/{name}/v1/models", bound),
        ("/v1/models", models),
        ("/sessions/{name}/v1/models/{model:path}", bound_model),
        ("/v1/models/{model:path}", one),
    ):
        extra: dict[str, Any] = {"security": []}
        if "{model" in path:
            extra["responses"] = _UNKNOWN_MODEL
        app.get(path, tags=["agents"], openapi_extra=extra)(route)


def _add_unknown(app: FastAPI) -> None:
    """Answer unknown paths below an agent's address with 404, in the client's dialect."""

    async def unknown(request: Request) -> Response:
        known = ", ".join(
            [f"POST {path}" for each in DIALECTS for path in (each.path, each.count_path) if path]
        )
        asked = f"{request.method} {shown(request.url.path)}"
        text = f"there is no route {asked}; expected {known}, GET /v1/models or /v1/models/{MODEL}"
        return _error(
            dialect_at(request.url.path, request.headers), Refused(RefusalCode.NOT_FOUND, text)
        )

    for path in ("/sessions/{name}/v1/{rest:path}", "/v1/{rest:path}"):
        app.api_route(path, methods=list(ANY_METHOD), include_in_schema=False)(unknown)


async def _chat(
    dialect: Dialect, port: Sessions, settings: HttpSettings, request: Request, name: str
) -> Response:
    try:
        call, style = await _read_call(dialect, settings, request, name)
    except Refused as refused:
        return _error(dialect, refused)
    work = asyncio.create_task(port.chat(call))
    gone = asyncio.create_task(_until_gone(request))
    try:
        limit_s = FIRST_HEARTBEAT_S if style.streams else None
        await asyncio.wait({work, gone}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            reply = work.result()
            headers = {"x-policy-version": str(reply.policy_version)}
            if not style.streams:
                return JSONResponse(dialect.answer(reply, style), headers=headers)
        elif gone.done():
            # The client is gone. Cancelling `_RemoteSessions.chat` makes it call `abandon`, so that
            # the turn is stored as unseen.
            work.cancel()
            return Response(status_code=499)
    except Refused as refused:
        return _error(dialect, refused)
    except asyncio.CancelledError:
        work.cancel()
        raise
    finally:
        gone.cancel()
    return _Stream(dialect, style, work, lambda: port.abandon(call.session_id, call.request_id))


async def _count(
    dialect: Dialect, port: Sessions, settings: HttpSettings, request: Request, name: str
) -> Response:
    assert dialect.counted is not None
    try:
        # A count may leave out the model, which a turn must name.
        call, _ = await _read_call(dialect, settings, request, name, defaults={"model": MODEL})
        return JSONResponse(dialect.counted(await port.num_prompt_tokens(call)))
    except Refused as refused:
        return _error(dialect, refused)


async def _read_call(
    dialect: Dialect,
    settings: HttpSettings,
    request: Request,
    name: str,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[ChatCall, AnswerStyle]:
    """Read a request for a turn, and the form in which the client wants the answer."""
    key = sent_key(request.headers)
    # Do not use `body()`, which keeps the body as long as the request: a turn may take minutes.
    body = await _parsed(b"".join([part async for part in request.stream()]))
    if defaults and isinstance(body, dict):
        body = {**defaults, **body}
    ignores = settings.sessions.unsupported == "ignore"
    wanted, style = await asyncio.to_thread(dialect.read, body, request.headers, ignores=ignores)
    call = ChatCall(
        session_id=holder_of(key).whole(name),
        key_digest=digest_of(key),
        request_id=uuid.uuid4().hex,
        request=wanted,
        deadline_s=settings.sessions.hold_s,
    )
    return call, style


class _Stream(StreamingResponse):
    """A stream that sends heartbeats until the turn is sampled, and then the turn's events."""

    def __init__(
        self,
        dialect: Dialect,
        style: AnswerStyle,
        work: asyncio.Task[ChatReply],
        abandon: Callable[[], Awaitable[None]],
    ) -> None:
        """Make the stream. abandon: called if the client disconnects before the last event."""
        super().__init__(
            self._events(),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._dialect, self._style = dialect, style
        self._work, self._abandon = work, abandon
        self._is_whole = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Do this outside of the generator, which does not start if the client leaves at once.
            if not self._work.done():
                self._work.cancel()
            elif not self._is_whole:
                await self._abandon()

    async def _events(self) -> AsyncIterator[bytes]:
        while not self._work.done():
            yield self._dialect.heartbeat
            await asyncio.wait({self._work}, timeout=HEARTBEAT_EVERY_S)
        try:
            reply = self._work.result()
        except Refused as refused:
            yield self._dialect.error_event(refused)
        else:
            for event in self._dialect.events(reply, self._style):
                yield event
        self._is_whole = True


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _parsed(body: bytes) -> object:
    try:
        if len(body) > THREAD_BYTES:
            return await asyncio.to_thread(_decoded, body)
        return _decoded(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(
            RefusalCode.INVALID_REQUEST,
            f"the body is not valid JSON ({error}); send one JSON object in UTF-8",
        ) from None


def _decoded(body: bytes) -> object:
    try:
        found: object = msgspec.json.decode(body)
    except msgspec.DecodeError:
        for escape in _ESCAPE.finditer(body):
            if escape[1]:
                raise Refused(
                    RefusalCode.INVALID_REQUEST,
                    f"the body: got half of a surrogate pair, \\{escape[1].decode()} at byte "
                    f"{escape.start()}, expected text that UTF-8 can encode; send both halves, or "
                    "replace it",
                ) from None
        raise
    if (key := repeated_key(body)) is not None:
        raise Refused(RefusalCode.INVALID_REQUEST, f"the body: {repeated_text(key)}")
    return found


def _error(dialect: Dialect, refused: Refused) -> JSONResponse:
    return JSONResponse(
        dialect.error(refused), status_code=refused.code.status, headers=error_headers(refused)
    )


def _session_of(headers: Mapping[str, str]) -> str:
    return headers.get(SESSION_HEADER) or session_of_key(sent_key(headers))
