"""The API's side of a run: what it says while nobody answers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from service.api.problems import RunUnavailable
from service.run.remote_handles import SupervisorClient


class StartingActor:
    """As Ray gives a handle of one that is being made: calls of it wait."""

    @property
    def readiness(self) -> StartingActor:
        return self

    submission = readiness

    def remote(self, *arguments: Any) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("question", ["readiness", "submission"])
async def test_a_supervisor_that_is_being_started_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    monkeypatch.setattr("ray.get_actor", lambda name, namespace: StartingActor())
    monkeypatch.setattr("service.run.remote_handles.CONTACT_DEADLINE_S", 0.2)
    client = SupervisorClient("rayloom-test")
    began = time.monotonic()
    with pytest.raises(RunUnavailable, match="the run is starting"):
        await (client.readiness() if question == "readiness" else client.submission("a"))
    assert time.monotonic() - began < 5


async def test_a_supervisor_that_is_not_there_is_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(name: str, namespace: str) -> None:
        raise ValueError(f"no actor {name}")

    monkeypatch.setattr("ray.get_actor", nobody)
    with pytest.raises(RunUnavailable, match="the run rayloom-test is not there"):
        await SupervisorClient("rayloom-test").readiness()
