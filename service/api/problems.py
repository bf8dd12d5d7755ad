"""Errors as RFC 9457 problem details: what is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from service.api.port import RunUnavailable

MEDIA_TYPE = "application/problem+json"
# How long a client should wait for a run that is starting or going back to a checkpoint.
UNAVAILABLE_RETRY_S = 5


class Problem(Exception):
    """Raised by a route. code: stable, for programs; detail: for people, with the remedy."""

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
        "instance": instance,
        "code": problem.code,
    }
    if problem.errors:
        body["errors"] = list(problem.errors)
    return JSONResponse(
        body, status_code=problem.status, headers=problem.headers, media_type=MEDIA_TYPE
    )


def unavailable(detail: str) -> Problem:
    return Problem(503, "not-available", detail, headers={"Retry-After": str(UNAVAILABLE_RETRY_S)})


def install(app: FastAPI) -> None:
    """Answer every error of this app as a problem."""

    @app.exception_handler(Problem)
    async def _problem(request: Request, error: Problem) -> JSONResponse:
        return problem_response(error, instance=request.url.path)

    @app.exception_handler(RunUnavailable)
    async def _unavailable(request: Request, error: RunUnavailable) -> JSONResponse:
        return problem_response(unavailable(str(error)), instance=request.url.path)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return problem_response(_of_validation(error), instance=request.url.path)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
        problem = Problem(error.status_code, code, str(error.detail), headers=error.headers)
        return problem_response(problem, instance=request.url.path)


def _of_validation(error: RequestValidationError) -> Problem:
    found = error.errors()
    if any(item["type"] == "json_invalid" for item in found):
        place = found[0]["loc"][-1]
        return Problem(
            400,
            "malformed-body",
            f"the body is not JSON: {found[0]['ctx']['error']} at character {place}; send one JSON "
            "object with Content-Type: application/json",
        )
    errors = [{"loc": list(item["loc"]), "message": item["msg"]} for item in found]
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"])
    return Problem(422, "invalid-request", f"{where}: {first['message']}; see /docs", errors=errors)
