"""Tests of requests for replies: retries within the deadline, errors, and lost replicas."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest

from actors.environment.policy import GenerateReply, PolicyDeadlineExceeded, PolicyUnavailable
from actors.types import FinishReason
from service.inference.client import (
    LONGEST_LINGER_S,
    MAX_LOST,
    SHORTEST_LINGER_S,
    LostReplicas,
    as_answer,
    linger_s,
    until_available,
)


class Refused(ValueError):
    """An error like some of vLLM, which cannot be unpickled from its text."""

    def __init__(self, *, parameter: str) -> None:
        super().__init__(f"{parameter} is too long")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PolicyUnavailable("gone"), PolicyUnavailable),
        (PolicyDeadlineExceeded("late"), PolicyDeadlineExceeded),
        (ValueError("too long"), ValueError),
        (Refused(parameter="prompt"), ValueError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_the_same_after_pickling(error: ValueError, kind: type[Exception]) -> None:
    found = pickle.loads(pickle.dumps(as_answer(error)))
    assert type(found) is kind and str(found) == str(error)


class Engine:
    """An engine that is unavailable for `num_away` attempts, then raises `then` or replies."""

    def __init__(self, num_away: int, then: Exception | None = None) -> None:
        self.num_away = num_away
        self.then = then
        self.num_attempts = 0

    async def answer(self) -> str:
        self.num_attempts += 1
        if self.num_attempts <= self.num_away:
            raise PolicyUnavailable(f"gone {self.num_attempts}")
        if self.then is not None:
            raise self.then
        return "reply"


async def test_a_request_is_repeated_until_an_engine_is_available() -> None:
    engine = Engine(num_away=3)
    assert await until_available(engine.answer, deadline_s=60.0) == "reply"
    assert engine.num_attempts == 4


async def test_unavailable_engines_get_a_few_attempts_until_the_deadline() -> None:
    engine = Engine(num_away=1_000_000)
    with pytest.raises(PolicyUnavailable, match=r"within 0.5 s; last error: gone \d"):
        await until_available(engine.answer, deadline_s=0.5)
    assert 2 <= engine.num_attempts <= 6


async def test_a_deadline_after_a_lost_engine_is_reported_as_unavailable() -> None:
    engine = Engine(num_away=1, then=PolicyDeadlineExceeded("late"))
    with pytest.raises(PolicyUnavailable, match="last error: gone 1"):
        await until_available(engine.answer, deadline_s=60.0)


async def test_a_deadline_without_a_lost_engine_is_reported_as_a_deadline() -> None:
    engine = Engine(num_away=0, then=PolicyDeadlineExceeded("aborted"))
    with pytest.raises(PolicyDeadlineExceeded, match="aborted"):
        await until_available(engine.answer, deadline_s=60.0)

    async def never() -> str:
        await asyncio.Event().wait()
        return "never"

    with pytest.raises(PolicyDeadlineExceeded, match=r"no answer within 0.05 s"):
        await until_available(never, deadline_s=0.05)


async def test_a_request_that_can_never_be_served_is_refused_at_once() -> None:
    engine = Engine(num_away=0, then=ValueError("too long"))
    with pytest.raises(ValueError, match="too long"):
        await until_available(engine.answer, deadline_s=60.0)
    assert engine.num_attempts == 1


async def test_a_cancelled_request_is_not_repeated() -> None:
    engine = Engine(num_away=1_000_000)
    asking = asyncio.create_task(until_available(engine.answer, deadline_s=60.0))
    while engine.num_attempts == 0:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert engine.num_attempts == 1


def reply_of(replica: str) -> GenerateReply:
    return GenerateReply(
        token_ids=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=(),
        cache_salt="1:0",
        replica=replica,
    )


@pytest.mark.parametrize("answer", [PolicyUnavailable("gone"), reply_of("b")], ids=["dead", "away"])
def test_requests_for_a_lost_replica_have_no_address(
    answer: PolicyUnavailable | GenerateReply,
) -> None:
    lost = LostReplicas()
    assert lost.address("a") == "a"
    lost.learn("a", answer)
    assert (lost.address("a"), lost.address("b")) == ("", "b")
    lost.learn("", reply_of("a"))
    assert lost.address("a") == "a"


def test_an_unaddressed_or_late_answer_does_not_mark_a_replica_as_lost() -> None:
    lost = LostReplicas()
    lost.learn("", PolicyUnavailable("gone"))
    lost.learn("a", PolicyDeadlineExceeded("late"))
    assert (lost.address("a"), lost.address("")) == ("a", "")


def test_only_the_newest_lost_replicas_are_remembered() -> None:
    lost = LostReplicas()
    for number in range(MAX_LOST + 1):
        lost.learn(f"r{number}", PolicyUnavailable("gone"))
    assert (lost.address("r0"), lost.address("r1")) == ("r0", "")


def test_the_time_to_gather_requests_is_a_bounded_share_of_a_turn() -> None:
    assert linger_s(0.2) == pytest.approx(0.004)
    assert (linger_s(0.0), linger_s(0.01)) == (SHORTEST_LINGER_S, SHORTEST_LINGER_S)
    assert linger_s(60.0) == LONGEST_LINGER_S
