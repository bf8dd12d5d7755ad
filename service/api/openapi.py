"""The OpenAPI document of the API, which is FastAPI's document with every possible status.

`docs/openapi.json` is this document (`python -m deploy.openapi_document`). This module adds the
parts that all routes have in common: the guards' refusals, internal errors and keys. Each route
declares its own statuses; `service.gateway.description` declares those of the dialects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import Field

from service.api.callers import is_for_clients
from service.api.guards import OPEN_PATHS, has_own_keys
from service.api.ports import PREFIX
from service.api.problems import MEDIA_TYPE
from service.api.schemas import StrictBody

VERSION = "1"
_PROBLEM = {"$ref": "#/components/schemas/ProblemBody"}
_OF_EVERY = {
    408: "the body was not complete in time",
    413: "the body is too large",
    415: "the body's Content-Type or Content-Encoding is not accepted",
    431: "the headers are too many, or too large",
    421: "the request is for a host name that the API does not accept",
    500: "an internal error; see the service's log",
    503: "the run does not answer, or accepts nothing now; Retry-After says when to try again",
}
_KEYED = {
    401: "no valid key",
    429: "too many requests with this key; Retry-After says when to try again",
}
_OF_ADMINS = {403: "this needs a key with scope admin"}
_READ = {422: "a value is invalid; `errors` says where"}
_WITH_BODY = {400: "the body is not JSON, or is refused"}
# Schemas that FastAPI adds to its own document; they are removed.
_REPLACED = ("HTTPValidationError", "ValidationError")


class ProblemBody(StrictBody):
    """An error, as RFC 9457 defines it."""

    type: str
    title: str
    status: int
    detail: str = Field(description="what was got, what was expected, and what to do")
    instance: str
    code: str = Field(description="for programs; stable")
    errors: list[dict[str, Any]] | None = Field(
        None, description="positions, each with its `loc` and mostly a `message`"
    )


def install(app: FastAPI) -> None:
    """Serve the document at /openapi.json; it includes routes that are added later."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(
        title=app.title, version=VERSION, description=app.description, routes=app.routes
    )
    schemas = found["components"]["schemas"]
    for name in _REPLACED:
        schemas.pop(name, None)
    schemas["ProblemBody"] = ProblemBody.model_json_schema()
    found["components"]["securitySchemes"] = {
        "key": {
            "type": "http",
            "scheme": "bearer",
            "description": "the API's key (RAYLOOM_API_KEY), or a named one; for a session's own "
            "routes, the session's. On loopback the API may require none",
        }
    }
    for path, operation in _operations(found):
        _complete(path, operation)
    # Sorted, so that equal documents are equal texts.
    whole: dict[str, Any] = json.loads(json.dumps(found, sort_keys=True))
    return whole


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add the common security and answers to each operation, unless its route declares them."""
    is_open = path in OPEN_PATHS
    operation.setdefault("security", [] if is_open else [{"key": []}])
    for parameter in operation.get("parameters", ()):
        _leave_null_out(parameter["schema"])
    answers = operation["responses"]
    if answers.get("422", {}).get("description") == "Validation Error":
        del answers["422"]
    common = dict(_OF_EVERY)
    if operation["security"]:
        common |= _KEYED
        if path.startswith(PREFIX) and not (is_for_clients(path) or has_own_keys(path)):
            common |= _OF_ADMINS
    if "requestBody" in operation:
        common |= _READ | _WITH_BODY
    if operation.get("parameters"):
        common |= _READ
    for status, description in common.items():
        answers.setdefault(str(status), {"description": description})
    for status, answer in answers.items():
        if int(status) >= 400:
            answer.setdefault("content", {}).setdefault(MEDIA_TYPE, {"schema": _PROBLEM})
    operation["responses"] = dict(sorted(answers.items()))


def _leave_null_out(schema: dict[str, Any]) -> None:
    """Remove null from the schema of an optional parameter, which can only be left out."""
    kinds = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(kinds) == 1:
        del schema["anyOf"]
        schema |= kinds[0]
