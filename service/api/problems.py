"""Errors as problem details of RFC 9457, which say what is wrong and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from actors.options import closest

MEDIA_TYPE = "application/problem+json"
# Seconds after which a client should repeat a request to a run that starts or returns to a
# checkpoint.
UNAVAILABLE_RETRY_S = 5
# Most characters of a client's text that an answer repeats.
MAX_ECHO_CHARACTERS = 200
MAX_ERRORS = 20
# Number of similar paths that the answer to an unknown path names.
NEAR_PATHS = 3
_UNKNOWN_FIELD = ("extra_forbidden", "unexpected_keyword_argument")


def shown(text: str) -> str:
    """Return a text that a client sent, cut to MAX_ECHO_CHARACTERS for use in a message."""
    return text if len(text) <= MAX_ECHO_CHARACTERS else f"{text[:MAX_ECHO_CHARACTERS]}…"


def repeated_text(key: str) -> str:
    """Return the error message for a JSON object that has a key twice."""
    key = shown(key.encode("utf-8", "backslashreplace").decode())
    return f"got the key {key!r} twice in one object, expected each key once; leave one out"


class RunUnavailable(Exception):
    """Raised if the run does not answer, or cannot write now; the message states the reason."""


class Problem(Exception):
    """An error of a route. Programs read the stable `code`; `detail` has a remedy for people."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[Mapping[str, Any]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail
        self.errors, self.headers = tuple(errors), dict(headers or {})


def problem_response(problem: Problem, *, instance: str) -> JSONResponse:
    body = {
        "type": f"urn:rayloom:problem:{problem.code}",
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
        "instance": shown(instance),
        "code": problem.code,
    }
    if problem.errors:
        body["errors"] = list(problem.errors[:MAX_ERRORS])
    return JSONResponse(
        body, status_code=problem.status, headers=problem.headers, media_type=MEDIA_TYPE
    )


def unavailable(detail: str) -> Problem:
    return Problem(503, "not-available", detail, headers={"Retry-After": str(UNAVAILABLE_RETRY_S)})


def internal_error() -> Problem:
    """Return the answer to an internal error. The error's own message is only logged."""
    return Problem(
        500,
        "internal-error",
        "the service had an internal error, and may or may not have carried out the request; check "
        "the state, or send it again, since the same content is accepted once; see the log of the "
        "API's replica",
    )


def install(app: FastAPI) -> None:
    """Make an app answer every error as problem details."""

    @app.exception_handler(Problem)
    async def _problem(request: Request, error: Problem) -> JSONResponse:
        return problem_response(error, instance=request.url.path)

    @app.exception_handler(RunUnavailable)
    async def _unavailable(request: Request, error: RunUnavailable) -> JSONResponse:
        return problem_response(unavailable(str(error)), instance=request.url.path)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return problem_response(_of_validation(error, request), instance=request.url.path)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        return problem_response(_of_http(error, request), instance=request.url.path)


def _of_http(error: HTTPException, request: Request) -> Problem:
    status, path, headers = error.status_code, shown(request.url.path), error.headers
    if status == HTTPStatus.BAD_REQUEST:
        return malformed(shown(str(error.__cause__ or error.detail)))
    if status == HTTPStatus.NOT_FOUND:
        routes = [route for route in request.app.routes if isinstance(route, APIRoute)]
        near = difflib.get_close_matches(path, {each.path for each in routes}, n=NEAR_PATHS)
        there = [f"{'/'.join(sorted(r.methods))} {r.path}" for r in routes if r.path in near]
        hint = f"did you mean {', '.join(there)}? " if there else ""
        detail = f"there is no route {path}; {hint}/docs lists all routes"
        return Problem(404, "not-found", detail)
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(_methods_at(request))
        detail = f"got {shown(request.method)} for {path}, expected {allowed}; see /docs"
        return Problem(405, "method-not-allowed", detail, headers={"Allow": allowed})
    code = HTTPStatus(status).phrase.lower().replace(" ", "-")
    return Problem(status, code, str(error.detail), headers=headers)


def _methods_at(request: Request) -> list[str]:
    """Return the methods of all routes at a path; Starlette names only the first route's."""
    found = {
        method
        for route in request.app.routes
        if isinstance(route, Route | APIRoute) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    return sorted(found)


def malformed(what: str) -> Problem:
    """Return the answer to a body that is not JSON. what: the parser's message."""
    return Problem(
        400,
        "malformed-body",
        f"the body is not valid JSON: {what}; send one JSON object in UTF-8 with "
        "Content-Type: application/json",
    )


def _of_validation(error: RequestValidationError, request: Request) -> Problem:
    found = error.errors()
    if any(item["type"] == "json_invalid" for item in found):
        position = found[0]["loc"][-1]
        return malformed(f"{found[0]['ctx']['error']} at character {position}")
    field = getattr(request.scope.get("route"), "body_field", None)
    body = None if field is None else field.field_info.annotation
    # A misspelt field is often the reason why another one is missing.
    first = next((item for item in found if item["type"] in _UNKNOWN_FIELD), found[0])
    errors = [
        {"loc": [_shown_part(part) for part in item["loc"]], "message": _message_of(item, body)}
        for item in found[:MAX_ERRORS]
    ]
    where = ".".join(str(_shown_part(part)) for part in first["loc"])
    detail = f"{where}: {_problem_of(first, body)}; see /docs"
    return Problem(422, "invalid-request", detail, errors=errors)


def _problem_of(item: Mapping[str, Any], body: Any) -> str:
    """Return what pydantic refused and expected: got 'eight', expected a valid integer."""
    message, value = _message_of(item, body), item.get("input")
    wanted = re.fullmatch(r"\w+ should (be )?(.+)", message)
    if wanted is None:
        return message
    got = shown(repr(value))
    if isinstance(value, dict | list):
        got = "an object" if isinstance(value, dict) else "a list"
    return f"got {got}, expected {'' if wanted[1] else 'it to '}{wanted[2]}"


def _message_of(item: Mapping[str, Any], body: Any) -> str:
    """Return a pydantic error's message, with "an object" in place of "a valid dictionary".

    body: type of the request's body, in which an unknown field's right name is looked up; or None.
    """
    if item["type"] in _UNKNOWN_FIELD:
        is_known = body is not None and item["loc"][0] == "body"
        hint = closest(body, item["loc"][1:], "body") if is_known else "check its name"
        return f"there is no such field; {hint}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return shown(re.sub(r"a valid dictionary( or .+)?$", "an object", message))


def _shown_part(part: int | str) -> int | str:
    return shown(part) if isinstance(part, str) else part
