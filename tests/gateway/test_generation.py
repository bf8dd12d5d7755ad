"""Tests of the route that samples token ids after a prompt of token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from worlds.builders.episode_builders import reply
from worlds.parts.upload_world import GENERATE, UploadWorld, in_json, pack, problem

from actors.environment.policy import GenerateRequest, PolicyUnavailable
from actors.types import FinishReason


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[UploadWorld]:
    yield await UploadWorld(tmp_path).begin()


async def test_a_prompt_of_ids_is_answered_with_ids_in_either_format(world: UploadWorld) -> None:
    answer = await world.post({"token_ids": [1, 2, 3], "max_tokens": 7}, url=GENERATE)
    (sent,) = world.policy.requests
    assert sent.prompt_token_ids.tolist() == [1, 2, 3] and sent.tools is None
    assert (sent.max_tokens, sent.temperature, sent.cache_salt) == (7, 1.0, None)
    expected = reply("0<|im_end|>")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "token_ids": expected.token_ids.tolist(),
        "logprobs": expected.logprobs.tolist(),
        "finish_reason": "stop",
        "version_spans": [{"version": 3, "start": 0, "end": len(expected.token_ids)}],
        "experts": None,
        "cache_salt": "v3",
        "replica": "",
    }
    experts = np.arange(8, dtype=np.int16).reshape(2, 2, 2)
    world.policy.answers = lambda _: replace(reply("1<|im_end|>"), expert_indices=experts)
    body = {"token_ids": pack([1, 2, 3], "<i4"), "cache_salt": "v3", "replica": "r"}
    packed = await world.post(body, packed=True, url=GENERATE)
    assert packed.headers["content-type"] == "application/msgpack"
    found = msgspec.msgpack.decode(packed.content)
    ids = np.frombuffer(found["token_ids"]["data"], found["token_ids"]["dtype"])
    assert ids.tolist() == reply("1<|im_end|>").token_ids.tolist()
    assert found["experts"] == pack(experts, "<i2", shape=[2, 2, 2])
    sent = world.policy.requests[-1]
    assert (sent.max_tokens, sent.cache_salt, sent.replica) == (16, "v3", "r")
    assert (await world.post(in_json(body), url=GENERATE)).status_code == 200


async def test_limits_are_checked_before_the_engine_gets_a_request(world: UploadWorld) -> None:
    for body, code, name in (
        ({"token_ids": []}, "context-length-exceeded", "token_ids"),
        ({"token_ids": [1] * 400}, "context-length-exceeded", "token_ids"),
        ({"token_ids": [1] * 399, "max_tokens": 2}, "context-length-exceeded", "max_tokens"),
        ({"token_ids": [516]}, "token-out-of-vocabulary", "token_ids"),
        ({"token_ids": [1], "max_tokens": 0}, "invalid-request", "max_tokens"),
        ({"token_ids": [1], "max_tokens": 17}, "invalid-request", "max_tokens"),
        ({"token_ids": [1], "temperature": 0.5}, "invalid-request", None),
        ({"token_ids": pack([1], "<i8")}, "wrong-type", "token_ids"),
    ):
        found = problem(await world.post(body, packed=True, url=GENERATE), 422, code)
        place = found["errors"][0]["loc"]
        assert place == (["body"] if name is None else ["body", name]), found
    problem(await world.post(b"\xc1", packed=True, url=GENERATE), 400, "malformed-body")
    assert not world.policy.requests
    assert (await world.post({"token_ids": [1] * 399}, url=GENERATE)).status_code == 200
    assert world.policy.requests[0].max_tokens == 1


async def test_without_a_usable_reply_of_an_engine_the_answer_is_503(world: UploadWorld) -> None:
    async def gone() -> None:
        raise PolicyUnavailable("the weights are being loaded")

    def refused() -> None:
        raise ValueError("too long for the engine")

    body = {"token_ids": [1]}
    world.policy.before = gone
    answer = await world.post(body, url=GENERATE)
    assert problem(answer, 503, "not-available") and answer.headers["retry-after"] == "5"
    world.policy.before = None
    for unusable in (
        reply("0", logprobs=np.zeros(0, np.float32)),
        reply("0", finish_reason=FinishReason.ABORT),
    ):
        world.policy.answers = lambda _, answer=unusable: answer
        problem(await world.post(body, url=GENERATE), 503, "not-available")
    assert [request.deadline_s for request in world.policy.requests] == [5, 5, 5]


def test_tenants_never_share_a_cache_salt() -> None:
    plain = GenerateRequest(
        prompt_token_ids=np.array([1], np.int32), max_tokens=1, temperature=1.0, deadline_s=1.0
    )
    tenants, salts = ["", "acme", "acme.b"], ["1:0", "acme/1:0", "/1:0", ""]
    found = {replace(plain, tenant=each).salted(salt) for each in tenants for salt in salts}
    assert len(found) == len(tenants) * len(salts)
