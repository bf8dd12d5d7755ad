"""Tests of the API's client of a run: its answers without a supervisor, and its submissions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from sqlalchemy import select
from worlds.builders.session_builders import session_request
from worlds.parts.submission_actor import SubmissionActor
from worlds.parts.submission_service import Service, request

from service.access.keys import KeyLimits
from service.api.problems import RunUnavailable
from service.intake.submission import SubmitReply
from service.remote_calls import NAMESPACE
from service.run.remote_handles import run_client
from service.store import tables
from service.store.run_store import RunStore
from service.store.sessions import SessionStore


class StartingActor:
    """A handle like Ray's of an actor that is being created: its calls wait."""

    @property
    def readiness(self) -> StartingActor:
        return self

    submission = readiness

    def remote(self, *arguments: Any) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("question", ["readiness", "submission"])
async def test_the_client_does_not_wait_for_a_supervisor_that_is_being_started(
    monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    monkeypatch.setattr("ray.get_actor", lambda name, namespace: StartingActor())
    monkeypatch.setattr("service.run.remote_handles.CONTACT_DEADLINE_S", 0.2)
    client = run_client("rayloom-test")
    began = time.monotonic()
    with pytest.raises(RunUnavailable, match="the run is starting"):
        await (client.readiness() if question == "readiness" else client.submission("a"))
    assert time.monotonic() - began < 5


async def test_a_missing_supervisor_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(name: str, namespace: str) -> None:
        raise ValueError(f"no actor {name}")

    monkeypatch.setattr("ray.get_actor", nobody)
    with pytest.raises(RunUnavailable, match="the run rayloom-test is not running"):
        await run_client("rayloom-test").readiness()


class Calls:
    """A handle like Ray's of a supervisor; a real queue answers its calls."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.sizes: list[int] = []
        """The number of submissions in each call."""
        self.may_answer = asyncio.Event()

    @property
    def readiness(self) -> Any:
        return SimpleNamespace(remote=lambda: asyncio.sleep(0))

    @property
    def submit(self) -> Any:
        return SimpleNamespace(remote=self._submit)

    async def _submit(self, offers: Sequence[bytes]) -> list[bytes | Exception]:
        self.sizes.append(len(offers))
        await self.may_answer.wait()
        return await self.service.submissions.submit_packed(offers)


@pytest.fixture
async def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls(await Service(tmp_path).begin())
    monkeypatch.setattr("ray.get_actor", lambda name, namespace: calls)
    return calls


async def test_submissions_during_a_call_share_the_next_one_and_have_separate_answers(
    calls: Calls,
) -> None:
    client = run_client("rayloom-test")
    first = asyncio.create_task(client.submit([request("a")]))
    while not calls.sizes:
        await asyncio.sleep(0)
    offered = [
        [request("b")],
        [request("a", seed=2), request("never")],
        [request("c"), request("a")],
        [request(f"many-{number}") for number in range(9)],
        [request("d")],
    ]
    later = asyncio.gather(*map(client.submit, offered))
    await asyncio.sleep(0)
    calls.may_answer.set()
    b, changed, c, many, d = await later
    assert (await first).new_ids == {"a"} and calls.sizes == [1, 5]
    assert [reply.new_ids for reply in (b, changed, c, many, d)] == [
        {"b"},
        set(),
        {"c"},
        set(),
        {"d"},
    ]
    assert changed.conflicts == ("a",) and many.is_too_large
    assert [[each.place for each in reply.places] for reply in (b, c, d)] == [[2], [3, 1], [4]]
    assert calls.service.submissions.backlog.waiting == 4


async def test_an_error_of_the_store_fails_only_submissions_that_need_storing(
    calls: Calls, tmp_path: Path
) -> None:
    client = run_client("rayloom-test")
    calls.may_answer.set()
    await client.submit([request("a")])
    await Service(tmp_path).begin()
    new, again, changed, other = await asyncio.gather(
        *(
            client.submit([task])
            for task in (request("b"), request("a"), request("a", seed=2), request("c"))
        ),
        return_exceptions=True,
    )
    assert isinstance(new, RunUnavailable) and isinstance(other, RunUnavailable)
    assert isinstance(again, SubmitReply) and again.places[0].place == 1
    assert isinstance(changed, SubmitReply) and changed.conflicts == ("a",)


async def test_a_submission_is_sent_with_its_sessions_key_and_limits(calls: Calls) -> None:
    client = run_client("rayloom-test")
    calls.may_answer.set()
    limits = KeyLimits(requests_per_s=2.5, max_open_sessions=3)
    wanted = session_request("s", num_samples=2)
    assert (await client.submit([wanted], key="k", limits=limits)).places[0].num_samples == 2
    assert (await client.submit([request("b")], key="k")).is_key_taken
    assert (await client.submit([session_request("t")], limits=limits)).is_quota
    sessions = SessionStore(calls.service.store).find(["s-0", "s-1"])
    assert wanted.sessions is not None
    assert [each.spec for each in sessions.values()] == [wanted.sessions.spec] * 2
    (task,) = await calls.service.submissions.fill(calls.service.queue.admissible()[:1])
    assert task.task == wanted.task and task.num_samples == 2


async def test_a_cancelled_submission_is_not_sent(calls: Calls) -> None:
    client = run_client("rayloom-test")
    first = asyncio.create_task(client.submit([request("a")]))
    while not calls.sizes:
        await asyncio.sleep(0)
    gone, waits = (asyncio.create_task(client.submit([request(name)])) for name in "bc")
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    calls.may_answer.set()
    assert (await first).new_ids == {"a"} and (await waits).new_ids == {"c"}
    assert calls.sizes == [1, 1] and await calls.service.submissions.view("b") is None


async def test_the_size_of_a_call_is_bounded_in_bytes(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.run.remote_handles.MAX_CALL_BYTES", 1)
    client = run_client("rayloom-test")
    calls.may_answer.set()
    replies = await asyncio.gather(*(client.submit([request(name)]) for name in "abc"))
    assert calls.sizes == [1, 1, 1] and [each.places[0].place for each in replies] == [1, 2, 3]


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
async def test_a_supervisor_that_is_killed_under_load_accepts_nothing_twice(tmp_path: Path) -> None:
    """Clients that retry until they are answered get every task stored once across restarts."""

    def start() -> Any:
        options = SubmissionActor.options(name="rayloom-killed", namespace=NAMESPACE)
        return options.remote(str(tmp_path))

    client, accepted, num_refused = run_client("rayloom-killed"), [0] * 16, 0
    is_over = asyncio.Event()

    async def submit_until_answered(names: list[str]) -> None:
        nonlocal num_refused
        while True:
            try:
                await client.submit([request(name) for name in names])
                return
            except RunUnavailable:
                num_refused += 1
                await asyncio.sleep(0.05)

    async def submit_forever(who: int) -> None:
        while not is_over.is_set():
            await submit_until_answered([f"task-{who}-{accepted[who]}-{each}" for each in range(4)])
            accepted[who] += 1

    async def wait_for(more: int) -> None:
        wanted = sum(accepted) + more
        async with asyncio.timeout(60):
            while sum(accepted) < wanted:
                await asyncio.sleep(0.01)

    async def kill(actor: Any) -> None:
        ray.kill(actor)
        async with asyncio.timeout(60):
            with suppress(ValueError):
                while ray.get_actor("rayloom-killed", namespace=NAMESPACE):
                    await asyncio.sleep(0.05)

    actor = start()
    clients = [asyncio.create_task(submit_forever(who)) for who in range(16)]
    for _ in range(2):
        await wait_for(200)
        await kill(actor)
        actor = start()
    await wait_for(200)
    is_over.set()
    await asyncio.gather(*clients)
    await kill(actor)
    assert num_refused
    promised = {
        f"task-{who}-{number}-{each}"
        for who, most in enumerate(accepted)
        for number in range(most)
        for each in range(4)
    }
    ids = select(tables.submissions.c.id)
    store = RunStore(f"sqlite:///{tmp_path / 'run.db'}")
    found = store.read(lambda connection: connection.scalars(ids).all())
    store.close()
    # Tasks stored without an answer were submitted again, so that all are stored exactly once.
    assert len(found) == len(set(found)) and set(found) == promised
