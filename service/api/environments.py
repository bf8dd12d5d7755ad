"""The routes of environments, and the check of submitted tasks against their schemas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import Field

from actors.environment.task_data import ANY_DATA, DataCheck
from actors.types import SESSION, UPLOADED
from service.access.keys import own_id
from service.api.ports import PREFIX
from service.api.problems import MAX_ERRORS, Problem, shown
from service.api.schemas import StrictBody
from service.api.settings import HttpSettings
from service.intake.submission import RolloutRequest

# Tasks with more bytes are checked in a thread: the check would delay every other request.
THREAD_BYTES = 1 << 16


class EnvironmentAnswer(StrictBody):
    """An environment whose tasks this run accepts."""

    id: str
    submit_to: str = Field(description="the route to which its tasks are submitted")
    data_schema: dict[str, Any] = Field(
        description="JSON schema (draft 2020-12) for a task's `data`"
    )


class EnvironmentsAnswer(StrictBody):
    environments: list[EnvironmentAnswer]


def check_listed(environment: str | None, settings: HttpSettings) -> None:
    """Check that the run has the environment whose tasks a request wants to list.

    environment: the name in the request; None if the request lists all tasks.
    Raises: Problem if the run has no environment of this name.
    """
    known = (*settings.environments, SESSION, UPLOADED)
    if environment is not None and environment not in known:
        raise Problem(
            422,
            "unknown-environment",
            f"query.environment: got {shown(environment)!r}, expected one of {', '.join(known)}; "
            "correct it, or leave it out to list all tasks",
        )


def add_environments(app: FastAPI, settings: HttpSettings) -> None:
    """Add the routes that list the environments of the run and their schemas."""
    known = {
        **{name: _answer(name, settings) for name in settings.environments},
        SESSION: EnvironmentAnswer(
            id=SESSION, submit_to=f"{PREFIX}/sessions", data_schema=dict(ANY_DATA)
        ),
    }

    @app.get(f"{PREFIX}/environments", tags=["environments"])
    async def environments() -> EnvironmentsAnswer:
        """List the environments that this run plays."""
        return EnvironmentsAnswer(environments=list(known.values()))

    @app.get(
        f"{PREFIX}/environments/{{environment_id}}",
        tags=["environments"],
        responses={404: {"description": "this run does not play it"}},
    )
    async def environment(environment_id: str) -> EnvironmentAnswer:
        """Return one environment, with the schema of its tasks' data."""
        if environment_id not in known:
            raise Problem(
                404,
                "unknown-environment",
                f"this run does not play {shown(environment_id)!r}, expected one of "
                f"{', '.join(known)}; the run's configuration names them (tasks.environment)",
            )
        return known[environment_id]


def _answer(name: str, settings: HttpSettings) -> EnvironmentAnswer:
    schema = settings.data_schemas.get(name, ANY_DATA)
    return EnvironmentAnswer(id=name, submit_to=f"{PREFIX}/rollouts", data_schema=dict(schema))


class TaskChecks:
    """Checks the data of submitted tasks against the schemas of their environments."""

    def __init__(self, settings: HttpSettings) -> None:
        self._checks = {name: DataCheck(each) for name, each in settings.data_schemas.items()}

    async def check(self, environment: str, requests: Sequence[RolloutRequest]) -> None:
        """Check the data of tasks. Raises: Problem if the environment does not accept them."""
        check = self._checks.get(environment)
        if check is None:
            return
        if sum(item.num_bytes for item in requests) > THREAD_BYTES:
            problems = await asyncio.to_thread(_problems, check, requests)
        else:
            problems = _problems(check, requests)
        if problems:
            index, first = next(iter(problems.items()))
            raise Problem(
                422,
                "task-data",
                f"task {own_id(requests[index].id)!r}: {shown(first)}; see the schema at GET "
                f"{PREFIX}/environments/{environment}; no task of this request was accepted",
                errors=[
                    {"loc": ["body", "tasks", index, "data"], "message": shown(text)}
                    for index, text in problems.items()
                ],
            )


def _problems(check: DataCheck, requests: Sequence[RolloutRequest]) -> dict[int, str]:
    found: dict[int, str] = {}
    for index, item in enumerate(requests):
        if problem := check.problem(item.task.data):
            found[index] = problem
        if len(found) == MAX_ERRORS:
            break
    return found
