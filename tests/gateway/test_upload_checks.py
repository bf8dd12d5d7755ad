"""Tests that an upload is stored as it was sent, or refused as a whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.builders.trajectory_builders import make_trajectory, random_turns
from worlds.checks.same import assert_same_samples
from worlds.parts.upload_world import (
    FACTS,
    URL,
    UploadWorld,
    as_item,
    in_json,
    item,
    pack,
    problem,
    renamed,
)

from actors.types import UNDONE, Outcome, Trajectory, Turn
from service.api.problems import Problem
from service.gateway.upload_bodies import Fault, TrajectoryBody, Violation, decode_body
from service.gateway.upload_checks import checked_upload
from service.intake.uploads import Upload, decoded_content, stored_content

NAN = float("nan")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[UploadWorld]:
    yield await UploadWorld(tmp_path).begin()


def read(body: dict[str, Any], *, packed: bool) -> Upload:
    encode = msgspec.msgpack.encode if packed else msgspec.json.encode
    raw = encode(body if packed else in_json(body))
    return checked_upload(decode_body(raw, TrajectoryBody, packed=packed), FACTS)


def trajectory_of(upload: Upload) -> Trajectory:
    return decoded_content(upload.content)


@st.composite
def recorded(draw: st.DrawFn) -> Trajectory:
    """Draw a trajectory with branches, masked tokens and several versions.

    Some drawn trajectories also have token rewards or experts.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    turns = [turn for turn in random_turns(rng) if turn.num_sampled]
    with_rewards, with_experts = draw(st.booleans()), draw(st.booleans())
    turns = [_with_records(t, rng, rewards=with_rewards, experts=with_experts) for t in turns]
    if turns:
        turns[-1] = replace(turns[-1], reward_components={"hit": 0.25, "f1": 1.0})
    outcome = draw(st.sampled_from([Outcome.COMPLETED, Outcome.TRUNCATED_TOKENS]))
    return make_trajectory(turns, outcome=outcome, detail="ü")


def _with_records(turn: Turn, rng: np.random.Generator, *, rewards: bool, experts: bool) -> Turn:
    turn = replace(turn, reward_components={})
    if rewards:
        by_token = rng.uniform(-1, 1, turn.num_sampled).astype(np.float32)
        total = float(by_token.sum(dtype=np.float64))
        turn = replace(turn, token_rewards=by_token, reward=total)
    if experts:
        number = int(rng.integers(0, turn.num_sampled + 1))
        indices = [[rng.permutation(6)[:2] for _ in range(2)] for _ in range(number)]
        shaped = np.array(indices, np.uint8).reshape(number, 2, 2)
        turn = replace(turn, expert_indices=shaped)
    return turn


@settings(max_examples=60, deadline=None)
@given(recorded())
def test_the_queue_gets_the_uploaded_trajectory_in_either_format(trajectory: Trajectory) -> None:
    if not trajectory.num_trained:
        return
    uploads = [
        read(as_item(trajectory, "t", packed=columns), packed=packed)
        for columns in (False, True)
        for packed in (False, True)
    ]
    assert len({upload.digest for upload in uploads}) == 1
    assert len({upload.content for upload in uploads}) == 1
    found = trajectory_of(uploads[0])
    assert_same_samples(renamed(found), renamed(trajectory))
    assert stored_content(found) == uploads[0].content
    assert (found.outcome, found.detail) == (trajectory.outcome, "ü")
    assert (uploads[0].oldest_version, uploads[0].newest_version) == trajectory.versions


def test_turns_follow_from_the_mask_and_the_mask_follows_from_turns() -> None:
    by_mask = trajectory_of(read(item(turn_rewards={0: 0.25}), packed=False)).samples[0]
    assert [(t.index, t.start, t.end, t.reward) for t in by_mask.turns] == [
        (0, 2, 4, 0.25),
        (1, 5, 6, 1.0),
    ]
    turns = [{"start": 2, "end": 4}, {"start": 5, "end": 6}]
    by_turns = item(turn_rewards={0: 0.25}, sample={"mask": None, "turns": turns})
    assert_same_samples(trajectory_of(read(by_turns, packed=False)).samples, [by_mask])


def test_the_reward_of_a_turn_is_the_sum_of_its_token_rewards() -> None:
    rewards = [0, 0, 0.25, 0.5, 0, -1.0]
    sums = item(sample={"token_rewards": rewards}, reward=None)
    found = trajectory_of(read(sums, packed=False))
    assert [turn.reward for turn in found.turns] == [0.75, -1.0]
    agreeing = item(sample={"token_rewards": rewards}, reward=-1.0, turn_rewards={0: 0.75})
    assert read(agreeing, packed=True).content == read(sums, packed=False).content


def test_a_turn_in_two_samples_is_refused_unless_one_of_them_masks_it() -> None:
    """Check that other samplings of the same prompt or the same text are separate turns."""
    whole = item()["samples"][0]
    ids, logprobs, mask = whole["token_ids"], whole["logprobs"], whole["mask"]
    branch = {**whole, "token_ids": [*ids[:4], 51, 61]}
    context = {**branch, "mask": [0, 0, 0, 0, *mask[4:]], "logprobs": [0, 0, 0, 0, *logprobs[4:]]}
    half = {
        **branch,
        "mask": [*mask[:3], 0, *mask[4:]],
        "logprobs": [*logprobs[:3], 0, *logprobs[4:]],
    }
    again = {**branch, "logprobs": [*logprobs[:2], -3.0, *logprobs[3:]]}
    turns = [{"start": 2, "end": 4}, {"start": 5, "end": 6}]
    for second in (
        branch,
        whole,
        {**half, "turns": turns},
        {**branch, "mask": None, "turns": turns},
    ):
        with pytest.raises(Violation) as refused:
            read({**item(), "samples": [whole, second]}, packed=False)
        assert refused.value.fault is Fault.DUPLICATE_TURN
        assert refused.value.place == ("samples", 1) and "mask 0" in refused.value.message
    joined = {**whole, "mask": [0, 0, 1, 1, 1, 1], "logprobs": [0, 0, -0.1, -2.3, -0.5, -0.7]}
    in_two = {**joined, "mask": None, "turns": [{"start": 2, "end": 4}, {"start": 4, "end": 6}]}
    for pair in ([joined, in_two], [in_two, joined]):
        with pytest.raises(Violation) as refused:
            read({**item(), "samples": pair}, packed=False)
        assert refused.value.fault is Fault.DUPLICATE_TURN
    # A mask inside a turn splits it, and it is still the same sampling.
    long = {
        **whole,
        "token_ids": [1, 2, 31, 32, 33, 34],
        "mask": [0, 0, 1, 1, 1, 1],
        "logprobs": [0, 0, -0.1, -2.3, -0.5, -0.7],
    }
    for masked in ([3], [2], [5], [2, 5], [2, 3, 4]):
        holes = {
            name: [0 if at in masked else value for at, value in enumerate(long[name])]
            for name in ("mask", "logprobs")
        }
        for pair in ([long, {**long, **holes}], [{**long, **holes}, long]):
            with pytest.raises(Violation) as refused:
                read({**item(), "samples": pair}, packed=False)
            assert refused.value.fault is Fault.DUPLICATE_TURN, masked
    # Two samplings may begin with the same tokens: one ends after two, the other is longer.
    short = {
        **long,
        "token_ids": [1, 2, 31, 32, 40, 41],
        "mask": [0, 0, 1, 1, 0, 1],
        "logprobs": [0, 0, -0.1, -2.3, 0, -0.7],
    }
    for pair in ([long, short], [short, long]):
        found = trajectory_of(read({**item(), "samples": pair}, packed=False))
        assert sum(each.num_trained for each in found.samples) == 7
    for second, num_trained in ((context, 1), (again, 3)):
        found = trajectory_of(read({**item(), "samples": [whole, second]}, packed=False))
        assert [each.num_trained for each in found.samples] == [3, num_trained]
        assert found.samples[1].num_shared == 4 or second is again


@pytest.mark.parametrize(
    ("given", "is_graded"),
    [({"reward": 0.0}, True), ({"reward": 1.0}, True), ({"reward": None}, False)],
)
def test_a_cut_off_trajectory_with_a_reward_of_0_is_graded(
    given: dict[str, Any], is_graded: bool
) -> None:
    found = trajectory_of(read(item(outcome="truncated_tokens", **given), packed=False))
    assert found.is_graded is is_graded and found.episode_return == (given["reward"] or 0.0)


@pytest.mark.parametrize(
    "components", [{str(i): 1.0 for i in range(65)}, {"": 1.0}, {"a" * 129: 1.0}]
)
def test_the_reward_components_of_an_upload_are_bounded_as_in_a_session(
    components: dict[str, float],
) -> None:
    for packed in (False, True):
        with pytest.raises(Problem, match=r"components.* of length"):
            read(item(components=components), packed=packed)
    full = {f"{i:0128}": 1.0 for i in range(64)}
    assert trajectory_of(read(item(components=full), packed=False)).samples


SAMPLE = ["trajectories", 0, "samples", 0]


def sampled(**changes: Any) -> dict[str, Any]:
    return item(sample=changes)


def spans(*spans: tuple[int, int, int]) -> dict[str, Any]:
    names = ("version", "start", "end")
    return sampled(versions=[dict(zip(names, span, strict=True)) for span in spans])


def turned(*turns: tuple[int, int]) -> dict[str, Any]:
    return sampled(turns=[{"start": start, "end": end} for start, end in turns])


def routed(positions: list[int], *experts: list[int]) -> dict[str, Any]:
    indices = [[each, each] for each in experts]
    return sampled(experts={"positions": positions, "indices": indices})


def indexed(*indices: int | None) -> dict[str, Any]:
    places = [(2, 4), (5, 6)]
    return sampled(
        turns=[
            {"start": start, "end": end, "index": index}
            for (start, end), index in zip(places, indices, strict=True)
        ]
    )


REFUSED: list[tuple[dict[str, Any], Fault, list[Any]]] = [
    (
        {**item(), "samples": item()["samples"] * 2},
        Fault.DUPLICATE_TURN,
        ["trajectories", 0, "samples", 1],
    ),
    (sampled(token_ids=pack([1] * 6, "<i8")), Fault.WRONG_TYPE, [*SAMPLE, "token_ids"]),
    (sampled(logprobs=pack([0] * 6, "<f8")), Fault.WRONG_TYPE, [*SAMPLE, "logprobs"]),
    (sampled(mask=pack([0] * 6, "<i4")), Fault.WRONG_TYPE, [*SAMPLE, "mask"]),
    (
        sampled(token_ids={"dtype": "<i4", "data": b"12345"}),
        Fault.WRONG_TYPE,
        [*SAMPLE, "token_ids"],
    ),
    (
        sampled(token_ids=pack([1] * 6, "<i4", shape=[2, 3])),
        Fault.WRONG_TYPE,
        [*SAMPLE, "token_ids"],
    ),
    (sampled(token_ids={"dtype": "|O", "data": b""}), Fault.WRONG_TYPE, [*SAMPLE, "token_ids"]),
    (sampled(mask=[0, 0, 1, 1, 0]), Fault.LENGTHS_DIFFER, [*SAMPLE, "mask"]),
    (sampled(logprobs=[0.0]), Fault.LENGTHS_DIFFER, [*SAMPLE, "logprobs"]),
    (sampled(token_rewards=[0.0]), Fault.LENGTHS_DIFFER, [*SAMPLE, "token_rewards"]),
    (routed([0, 1], [0, 1]), Fault.LENGTHS_DIFFER, [*SAMPLE, "experts"]),
    (
        sampled(token_ids=[1, 2, 3, 4, 5, 516]),
        Fault.TOKEN_OUT_OF_VOCABULARY,
        [*SAMPLE, "token_ids"],
    ),
    (
        sampled(token_ids=[1, 2, 3, 4, 5, -1]),
        Fault.TOKEN_OUT_OF_VOCABULARY,
        [*SAMPLE, "token_ids"],
    ),
    (
        sampled(token_ids=[1, 2, 3, 4, 5, 2**64 - 1]),
        Fault.TOKEN_OUT_OF_VOCABULARY,
        [*SAMPLE, "token_ids"],
    ),
    (
        sampled(token_ids=pack([1, 2, 3, 4, 5, -(2**31)], "<i4")),
        Fault.TOKEN_OUT_OF_VOCABULARY,
        [*SAMPLE, "token_ids"],
    ),
    (sampled(token_ids=[1] * 401), Fault.CONTEXT_LENGTH_EXCEEDED, [*SAMPLE, "token_ids"]),
    (sampled(token_ids=[]), Fault.CONTEXT_LENGTH_EXCEEDED, [*SAMPLE, "token_ids"]),
    (sampled(mask=[0, 0, 1, 2, 0, 1]), Fault.INVALID_MASK, [*SAMPLE, "mask"]),
    (sampled(mask=None), Fault.INVALID_MASK, [*SAMPLE, "mask"]),
    (turned((2, 4)), Fault.INVALID_MASK, [*SAMPLE, "mask"]),
    (turned((2, 4), (3, 6)), Fault.INVALID_TURNS, [*SAMPLE, "turns"]),
    (turned((0, 6)), Fault.INVALID_TURNS, [*SAMPLE, "turns"]),
    (turned((2, 2)), Fault.INVALID_TURNS, [*SAMPLE, "turns"]),
    (turned((2, 4), (5, 2**63)), Fault.INVALID_TURNS, [*SAMPLE, "turns"]),
    (sampled(mask=[1] * 6), Fault.INVALID_TURNS, [*SAMPLE, "mask"]),
    (indexed(1, 0), Fault.INVALID_TURNS, ["trajectories", 0, "samples"]),
    (indexed(0, None), Fault.INVALID_TURNS, ["trajectories", 0, "samples"]),
    (sampled(mask=[0] * 6, logprobs=[0.0] * 6), Fault.NOTHING_TRAINED, [*SAMPLE, "mask"]),
    (
        sampled(logprobs=[0, 0, -0.5, 0.002, 0, -1]),
        Fault.INVALID_LOGPROB,
        [*SAMPLE, "logprobs"],
    ),
    (
        sampled(logprobs=[0, 0, -0.5, -1e300, 0, -1]),
        Fault.INVALID_LOGPROB,
        [*SAMPLE, "logprobs"],
    ),
    (
        sampled(logprobs=pack([0, 0, -0.5, NAN, 0, -1], "<f4")),
        Fault.INVALID_LOGPROB,
        [*SAMPLE, "logprobs"],
    ),
    (
        sampled(logprobs=[0, -0.1, -0.5, -1, 0, -1]),
        Fault.INVALID_LOGPROB,
        [*SAMPLE, "logprobs"],
    ),
    (spans((0, 2, 4)), Fault.INVALID_VERSIONS, [*SAMPLE, "versions"]),
    (spans((0, 2, 4), (0, 5, 6)), Fault.INVALID_VERSIONS, [*SAMPLE, "versions"]),
    (spans((0, 2, 2), (0, 2, 6)), Fault.INVALID_VERSIONS, [*SAMPLE, "versions"]),
    (spans((0, 2, 7)), Fault.INVALID_VERSIONS, [*SAMPLE, "versions"]),
    (spans((0, -1, 6)), Fault.INVALID_VERSIONS, [*SAMPLE, "versions"]),
    (spans((-1, 2, 6)), Fault.INVALID_VERSIONS, [*SAMPLE, "versions"]),
    (spans((UNDONE, 2, 6)), Fault.INVALID_VERSIONS, [*SAMPLE, "versions"]),
    (spans(), Fault.INVALID_VERSIONS, [*SAMPLE, "versions"]),
    (item(reward=1e10), Fault.INVALID_REWARD, ["trajectories", 0, "reward"]),
    (
        item(turn_rewards={2: 1.0}),
        Fault.INVALID_REWARD,
        ["trajectories", 0, "turn_rewards", "2"],
    ),
    (
        sampled(token_rewards=[1, 0, 0, 0, 0, 1]),
        Fault.INVALID_REWARD,
        [*SAMPLE, "token_rewards"],
    ),
    (
        sampled(token_rewards=[0, 0, 0, 0, 0, 1e10]),
        Fault.INVALID_REWARD,
        [*SAMPLE, "token_rewards"],
    ),
    (item(reward=None), Fault.REWARD_MISSING, ["trajectories", 0, "reward"]),
    (
        sampled(token_rewards=[0, 0, 0, 0, 0, 0.5]),
        Fault.REWARDS_DIFFER,
        ["trajectories", 0, "samples"],
    ),
    (routed([0], [0, 6]), Fault.INVALID_EXPERTS, [*SAMPLE, "experts"]),
    (routed([0], [1, 1]), Fault.INVALID_EXPERTS, [*SAMPLE, "experts"]),
    (routed([1, 0], [0, 1], [0, 1]), Fault.INVALID_EXPERTS, [*SAMPLE, "experts"]),
    (routed([6], [0, 1]), Fault.INVALID_EXPERTS, [*SAMPLE, "experts"]),
    (routed([0], [0, 2**40]), Fault.WRONG_TYPE, [*SAMPLE, "experts"]),
    (item(outcome="stale"), Fault.UNKNOWN_OUTCOME, ["trajectories", 0, "outcome"]),
    (item(outcome="great"), Fault.UNKNOWN_OUTCOME, ["trajectories", 0, "outcome"]),
]


async def test_each_violation_is_refused_with_its_code_and_place(world: UploadWorld) -> None:
    """Check also that a refused request stores nothing, not even its valid first item."""
    for body, fault, place in REFUSED:
        for packed in (False, True):
            sent = body if packed else in_json(body)
            found = problem(await world.send(sent, packed=packed), 422, fault.value)
            assert found["errors"][0]["loc"] == ["body", *place], (fault, found)
            assert found["errors"][0]["code"] == fault.value
    unseen = set(Fault) - {fault for _, fault, _ in REFUSED}
    assert unseen == {Fault.INVALID_METADATA}
    body, fault, place = REFUSED[0]
    both = problem(await world.send(item("sound"), body, packed=True), 422, fault.value)
    assert both["errors"][0]["loc"] == ["body", "trajectories", 1, *place[2:]]
    problem(await world.client.get(f"{URL}/sound"), 404, "unknown-trajectory")


async def test_uploads_of_another_tokenizer_or_shape_are_refused(world: UploadWorld) -> None:
    other = await world.send(item(), tokenizer_fingerprint="sha256:0")
    assert FACTS.tokenizer_fingerprint in problem(other, 422, "tokenizer-mismatch")["detail"]
    policy = (await world.client.get("/api/v1/policy")).json()
    assert policy["tokenizer_fingerprint"] == FACTS.tokenizer_fingerprint
    assert (policy["vocab_size"], policy["max_context_tokens"]) == (516, 400)
    for body, place in (
        (item(reward=True), ["body", "trajectories", 0, "reward"]),
        (item(extra=1), ["body", "trajectories", 0]),
        (item("a b"), ["body", "trajectories", 0, "id"]),
        (item(samples=[]), ["body", "trajectories", 0, "samples"]),
        (sampled(token_ids=[True] * 6), [*["body", *SAMPLE], "token_ids", 0]),
    ):
        found = problem(await world.send(body), 422, "invalid-request")
        assert found["errors"][0]["loc"] == place, found
    many = [item(f"t-{number}") for number in range(9)]
    problem(await world.send(*many), 413, "too-many-trajectories")
    small = await world.send(item(), groups=[{"id": "g", "members": 1}])
    problem(small, 422, "num-samples")
    twice = await world.send(groups=[{"id": "g", "close": True}, {"id": "g", "close": True}])
    problem(twice, 422, "invalid-request")


async def test_malformed_and_oversized_bodies_are_refused_and_nothing_is_stored(
    world: UploadWorld,
) -> None:
    """Check that wrong lengths, deep nesting and invalid numbers get 400 or 422."""
    head = msgspec.msgpack.encode(
        {"tokenizer_fingerprint": FACTS.tokenizer_fingerprint, "trajectories": 0}
    )[:-1]
    deep = {"a": "b"}
    for _ in range(70):
        deep = {"a": deep}  # type: ignore[dict-item]
    raw: list[tuple[bytes, bool]] = [
        (head + b"\xdd\xff\xff\xff\xff", True),
        (head + b"\xdc\xff\xff", True),
        (head + b"\xdf\xff\xff\xff\xff", True),
        (head + b"\xdb\xff\xff\xff\xff", True),
        (head + b"\x91" * 100_000, True),
        (b"\xc1", True),
        (b"", True),
        (b"", False),
        (b"[" * 100_000, False),
        (b'{"trajectories": ' * 50_000, False),
        (b'{"tokenizer_fingerprint": "\xff"}', False),
        (msgspec.json.encode(item(reward=0.5)).replace(b"0.5", b"NaN"), False),
        (msgspec.json.encode(item(reward=0.5)).replace(b"0.5", b"1e999"), False),
    ]
    for body, packed in raw:
        answer = await world.post(body, packed=packed)
        assert answer.status_code in (400, 422), (body[:80], answer.text)
    for metadata in (deep, {"x": NAN}, {"x": b"bytes"}, {"x": {1: 2, "a": 3}}):
        body = item(metadata=metadata)
        problem(await world.send(body, packed=True), 422, Fault.INVALID_METADATA.value)
    for reward in (NAN, float("inf")):
        problem(await world.send(item(reward=reward), packed=True), 422, "invalid-reward")
    shape = {"dtype": "|u1", "data": b"\0" * 4, "shape": [2**62, 2**62, 0]}
    for wrong in (shape, {**shape, "shape": [-1, 2, 2]}, {**shape, "shape": [2**40, 2, 2]}):
        bomb = sampled(experts={"positions": [0], "indices": wrong})
        assert (await world.send(bomb, packed=True)).status_code == 422
    encoded = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = await world.client.post(URL, content=b"x", headers=encoded)
    problem(answer, 415, "unsupported-media-type")
    answer = await world.client.post("/api/v1/rollouts", content=b"x", headers={
        "content-type": "application/msgpack"
    })  # fmt: skip
    problem(answer, 415, "unsupported-media-type")
    assert world.service.submissions.backlog.waiting == 0
    assert (await world.send(item())).json()["accepted"] == ["t-0"]
