"""Tests of sessions with the real store: each sampled turn is stored, shown and trained once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from worlds.builders.episode_builders import renderer, reply
from worlds.parts.gateway_world import NAME, SPEC, Gateway, Policy, said, user

from actors.environment.policy import (
    GenerateReply,
    GenerateRequest,
    ParsedCall,
    ParsedReply,
    PolicyUnavailable,
)
from actors.environment.protocol import Message, ToolSchema
from actors.environment.rendering import ChatRenderer, TokenIds
from actors.types import FinishReason, Outcome
from service.access.keys import AGENT, REWARD
from service.config.sections import SessionSettings
from service.gateway.chat import ChatReply, RefusalCode, Refused
from service.gateway.sessions import NO_KEY
from service.intake.session import Finish, SessionStatus
from service.store.submissions import SubmissionStore

HI, MORE = user("hi"), user("lower")


def text_of(ids: np.ndarray) -> str:
    return renderer()._tokenizer.decode(ids.tolist(), skip_special_tokens=False)


async def refusal(work: object) -> Refused:
    with pytest.raises(Refused) as caught:
        await work  # type: ignore[misc]
    return caught.value


async def test_a_conversation_is_one_sample_with_the_ids_that_were_sampled(tmp_path: Path) -> None:
    gateway = await Gateway(tmp_path).opened()
    first = await gateway.ask(HI)
    second = await gateway.ask(HI, said("0"), MORE)
    assert (first.message, first.turn_id) == (said("0"), "task-0.0")
    # Tokens are shown only if the creator of the session asked for them.
    assert first.sampled_token_ids is None and first.logprobs is None
    assert (second.message.content, second.stop_reason) == ("1", "stop")
    view = await gateway.finish(0.5, components={"hit": 0.5}, turn_rewards={0: 0.25})
    assert (view.status, view.totals.num_turns, view.totals.num_ambiguous) == (
        SessionStatus.FINISHED,
        2,
        0,
    )
    trajectory = await gateway.trajectory()
    (sample,) = trajectory.samples
    assert (trajectory.outcome, trajectory.episode_return) == (Outcome.COMPLETED, 0.75)
    assert [turn.reward for turn in sample.turns] == [0.25, 0.5]
    sent = [request.prompt_token_ids for request in gateway.policy.requests]
    assert np.array_equal(sent[1], sample.token_ids[: len(sent[1])])
    trained = [text_of(sample.token_ids[turn.tokens]) for turn in sample.turns]
    assert trained == ["0<|im_end|>", "1<|im_end|>"]
    assert sample.num_trained == 4


async def test_recorded_experts_are_those_of_their_tokens(
    tmp_path: Path,
) -> None:
    """Check chains that share turns, one of which is played after a restart of the gateway."""

    def answer(number: int) -> GenerateReply:
        experts = np.full((2, 1, 2), number, dtype=np.uint8)
        return reply(f"{number}<|im_end|>", expert_indices=experts)

    gateway = await Gateway(tmp_path, policy=Policy(answers=answer)).opened()
    await gateway.ask(HI)
    await gateway.ask(HI, said("0"), MORE)
    after = await gateway.restart(NAME)
    await after.ask(HI, said("0"), user("higher"))
    await after.finish(1.0)
    samples = (await after.trajectory()).samples
    assert len(samples) == 2
    found = []
    for sample in samples:
        assert sample.experts is not None
        at = sample.token_ids[sample.experts.positions]
        chosen = sample.experts.indices[:, 0, 0].tolist()
        found.append([(text_of(at[i : i + 1]), chosen[i]) for i in range(len(at))])
    # The turn that both chains share is trained, and has its record, only in the first.
    assert found == [
        [("0", 0), ("<|im_end|>", 0), ("1", 1), ("<|im_end|>", 1)],
        [("2", 2), ("<|im_end|>", 2)],
    ]


async def test_a_request_is_held_until_the_group_is_admitted(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    gateway.create()
    held = asyncio.create_task(gateway.ask(HI))
    early = await refusal(gateway.ask(HI, deadline_s=0.1))
    assert (early.code, early.retry_after_s) == (RefusalCode.NOT_AVAILABLE, 5)
    assert "waits until its group is admitted" in early.message and not held.done()
    assert (await gateway.sessions.view(NAME)).status is SessionStatus.QUEUED
    gateway.admit()
    assert (await held).message.content == "0"
    assert (await gateway.sessions.view(NAME)).status is SessionStatus.OPEN


async def test_each_key_is_accepted_only_for_its_purpose(tmp_path: Path) -> None:
    """Check that a reward with the agent's key is refused and changes nothing."""
    gateway = await Gateway(tmp_path).opened()
    sessions = gateway.sessions
    for key, code in (
        (gateway.key(AGENT), RefusalCode.FORBIDDEN),
        (gateway.key(REWARD, "task-1"), RefusalCode.UNKNOWN_SESSION),
        (gateway.key(REWARD, "gone-0"), RefusalCode.UNKNOWN_SESSION),
    ):
        assert (await refusal(sessions.finish(NAME, key, Finish(reward=9.0)))).code is code
    for name in (NAME, "gone-0"):
        none = await refusal(sessions.finish(name, NO_KEY, Finish()))
        assert none.code is RefusalCode.INVALID_KEY
    unknown = await refusal(sessions.finish("gone-0", gateway.key(REWARD), Finish()))
    assert unknown.code is RefusalCode.UNKNOWN_SESSION
    assert (await sessions.view(NAME)).status is SessionStatus.OPEN
    assert (await sessions.view("gone-0")) is None


async def test_a_session_is_finished_only_once(tmp_path: Path) -> None:
    """Check a turn after the finish, and a second finish with the same or another reward."""
    gateway = await Gateway(tmp_path).opened()
    await gateway.ask(HI)
    first = await gateway.finish(1.0)
    assert await gateway.finish(1.0) == first
    assert (await refusal(gateway.finish(2.0))).code is RefusalCode.CONFLICT
    assert (await refusal(gateway.ask(HI))).code is RefusalCode.SESSION_CLOSED
    assert (await gateway.trajectory()).episode_return == 1.0
    # Now the session is read from the store.
    assert await gateway.finish(1.0) == first
    assert (await refusal(gateway.ask(HI))).code is RefusalCode.SESSION_CLOSED


async def test_a_finish_abandons_the_turn_that_is_being_sampled(tmp_path: Path) -> None:
    """Check that a running turn is not stored and that its client gets an error."""
    gate = asyncio.Event()
    gateway = await Gateway(tmp_path).opened()
    await gateway.ask(HI)
    gateway.policy.before = gate.wait
    late = asyncio.create_task(gateway.ask(HI, said("0"), MORE))
    while len(gateway.policy.requests) < 2:
        await asyncio.sleep(0.01)
    await gateway.finish(1.0)
    assert (await refusal(late)).code is RefusalCode.SESSION_CLOSED
    assert len((await gateway.trajectory()).turns) == 1


async def test_a_reward_may_come_later_and_a_missing_one_is_a_reward_error(tmp_path: Path) -> None:
    gateway = await Gateway(tmp_path).opened()
    gateway.admit("task-1")
    await gateway.ask(HI)
    await gateway.ask(HI, name="task-1")
    view = await gateway.finish(None, is_reward_pending=True)
    assert view.end.reward_until is not None and not gateway.playing[NAME].done()
    given = Finish(reward=0.5, components={"judge": 0.5})
    after = await gateway.sessions.give_reward(NAME, gateway.key(REWARD), given)
    assert (after.end.reward, after.end.reward_until) == (0.5, None)
    again = await gateway.sessions.give_reward(NAME, gateway.key(REWARD), given)
    assert again == after
    for other in (Finish(reward=1.0), replace(given, turn_rewards={0: 2.0})):
        refused = await refusal(gateway.sessions.give_reward(NAME, gateway.key(REWARD), other))
        assert refused.code is RefusalCode.CONFLICT
    assert (await gateway.trajectory()).episode_return == 0.5
    # The reward of the other session never comes.
    await gateway.sessions.finish(
        "task-1", gateway.key(REWARD, "task-1"), Finish(is_reward_pending=True)
    )
    looking = asyncio.create_task(gateway.sessions.watch())
    gateway.clock += SPEC.reward_deadline_s
    missing = await gateway.trajectory("task-1")
    looking.cancel()
    assert (missing.outcome, missing.detail) == (Outcome.REWARD_ERROR, "no reward came in time")
    loaded = gateway.sessions_store.load("task-1")
    assert loaded is not None and loaded[0].end is not None
    assert loaded[0].end.outcome is Outcome.REWARD_ERROR
    late = gateway.sessions.give_reward("task-1", gateway.key(REWARD, "task-1"), given)
    assert "no reward came in time" in (await refusal(late)).message


async def test_an_unfinished_session_expires(tmp_path: Path) -> None:
    gateway = await Gateway(tmp_path).opened()
    gateway.admit("task-1")
    await gateway.ask(HI)
    await gateway.ask(HI, name="task-1")
    looking = asyncio.create_task(gateway.sessions.watch())
    gateway.clock += SPEC.idle_s - 1
    await gateway.ask(HI, name="task-1")
    gateway.clock += 1
    idle = await gateway.trajectory()
    assert (idle.outcome, idle.detail) == (
        Outcome.WALL_TIMEOUT,
        "it had no request for 50 s",
    )
    assert (await refusal(gateway.finish())).code is RefusalCode.CONFLICT
    gateway.clock += SPEC.idle_s
    expired = await gateway.trajectory("task-1")
    looking.cancel()
    assert (expired.outcome, expired.detail) == (
        Outcome.WALL_TIMEOUT,
        "it was not finished within 100 s",
    )


async def test_a_discarded_session_is_not_trained(tmp_path: Path) -> None:
    gateway = await Gateway(tmp_path).opened()
    await gateway.ask(HI)
    view = await gateway.sessions.discard(NAME)
    assert view is not None and view.status is SessionStatus.DISCARDED
    assert await gateway.sessions.discard(NAME) == view
    assert await gateway.sessions.discard("gone-0") is None
    assert (await gateway.trajectory()).outcome is Outcome.CANCELLED


@pytest.mark.parametrize("is_admitted", [True, False])
async def test_cancelling_a_group_ends_its_sessions(tmp_path: Path, is_admitted: bool) -> None:
    sampling = asyncio.Event()
    gateway = Gateway(tmp_path, policy=Policy(before=sampling.wait))
    gateway.create()
    if is_admitted:
        gateway.admit()
    held = asyncio.create_task(gateway.ask(HI))
    await asyncio.sleep(0.05)
    SubmissionStore(gateway.store).cancel("task", term=gateway.term)
    # Before the gateway has read the cancellation, a discard does not change its reason.
    view = await gateway.sessions.discard("task-1")
    assert view is not None and view.status is SessionStatus.DISCARDED
    stored = gateway.sessions_store.of_submission("task")
    assert [each.end.detail for each in stored if each.end] == ["its group was cancelled"] * 2
    looking = asyncio.create_task(gateway.sessions.watch())
    assert (await refusal(held)).code is RefusalCode.SESSION_CLOSED
    looking.cancel()
    for name in (NAME, "task-1"):
        view = await gateway.sessions.view(name)
        assert view is not None and view.status is SessionStatus.DISCARDED, name
    refused = await refusal(gateway.finish())
    assert refused.code is RefusalCode.CONFLICT and "its group was cancelled" in refused.message
    if is_admitted:
        assert (await gateway.trajectory()).outcome is Outcome.CANCELLED


async def test_a_held_request_is_refused_once_its_session_is_discarded(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    gateway.create()
    held = asyncio.create_task(gateway.ask(HI))
    await asyncio.sleep(0.05)
    await gateway.sessions.discard(NAME)
    assert (await refusal(held)).code is RefusalCode.SESSION_CLOSED


async def test_agents_claim_the_sessions_of_a_group_in_order(tmp_path: Path) -> None:
    """Check unclaimed sessions, which leave their group at a deadline or when a call closes it."""
    gateway = Gateway(tmp_path)
    gateway.create(spec=replace(SPEC, join_s=30), members=4)
    for member in range(4):
        gateway.admit(f"task-{member}")
    await asyncio.sleep(0.05)
    sessions = gateway.sessions
    assert [await sessions.claim("task", name) for name in ("b", "a", "b")] == [0, 1, 0]
    assert await sessions.claim("gone", "b") is None
    await gateway.ask(HI)
    assert (await refusal(gateway.ask(HI, name="task-2"))).code is RefusalCode.FORBIDDEN
    after = await gateway.restart(*(f"task-{member}" for member in range(4)))
    await asyncio.sleep(0.05)
    sessions = after.sessions
    assert [await sessions.claim("task", name) for name in ("a", "c")] == [1, 2]
    looking = asyncio.create_task(sessions.watch())
    after.clock += 30
    left = await after.trajectory("task-3")
    looking.cancel()
    assert (left.outcome, left.detail) == (Outcome.CANCELLED, "no agent claimed it within 30 s")
    assert (await refusal(sessions.claim("task", "d"))).code is RefusalCode.CONFLICT
    after.create("other", spec=replace(SPEC, join_s=30))
    assert await sessions.claim("other", "a") == 0
    assert [await sessions.close_group(name) for name in ("other", "other", "gone")] == [1, 0, None]
    assert (await refusal(sessions.claim("other", "b"))).code is RefusalCode.CONFLICT


async def test_a_claim_in_a_cancelled_group_is_refused(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    gateway.create(spec=replace(SPEC, join_s=30), members=2)
    assert await gateway.sessions.claim("task", "a") == 0
    # The gateway has not read the cancellation yet.
    SubmissionStore(gateway.store).cancel("task", term=gateway.term)
    refused = await refusal(gateway.sessions.claim("task", "b"))
    assert refused.code is RefusalCode.CONFLICT and "cancelled" in refused.message


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(tmp_path: Path) -> None:
    """Check that its tokens are not computed, which would delay all sessions by seconds."""
    seen: list[int] = []

    class Counted(ChatRenderer):
        def first_prompt(
            self, messages: Sequence[Message], tools: Sequence[ToolSchema]
        ) -> TokenIds:
            seen.append(len(messages[-1].content))
            return super().first_prompt(messages, tools)

    gateway = await Gateway(
        tmp_path, max_context_tokens=10, chat_renderer=Counted(renderer()._tokenizer)
    ).opened()
    longest = gateway.chat_renderer.longest_token
    assert longest == max(len(text) for text in renderer()._tokenizer.get_vocab())
    fits, too_long = "a" * (40 * longest), "a" * (40 * longest + 1)
    for text, tokenised in ((fits, [len(fits)]), (too_long, [len(fits)])):
        refused = await refusal(gateway.ask(user(text)))
        assert refused.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED, refused
        assert seen == tokenised


async def test_the_outcome_is_the_observed_one_unless_the_client_states_one(tmp_path: Path) -> None:
    """Check an empty session, a cut-off reply, a full context, and outcomes that clients state."""
    cut = reply("4 4 4", finish_reason=FinishReason.LENGTH)

    async def end(
        directory: str,
        *,
        stated: Outcome | None = None,
        reward: float | None = 1.0,
        **fields: object,
    ) -> Outcome:
        (tmp_path / directory).mkdir()
        gateway = await Gateway(tmp_path / directory, **fields).opened()  # type: ignore[arg-type]
        if directory != "nothing":
            try:
                await gateway.ask(HI)
                await gateway.ask(HI, said("0"), user("lower " * 60))
            except Refused as refused:
                assert refused.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED
                assert refused.param == "messages"
        view = await gateway.finish(reward, outcome=stated, components={"a": 1.0})
        trajectory = await gateway.trajectory()
        # The client is shown the outcome of the trajectory, and the store has the same.
        loaded = gateway.sessions_store.load(NAME)
        for stored in (view, loaded and loaded[0]):
            assert stored is not None and stored.end is not None
            assert (stored.end.outcome, stored.end.detail) == (
                trajectory.outcome,
                trajectory.detail,
            )
        return trajectory.outcome

    assert await end("nothing") is Outcome.EMPTY
    assert await end("cut", policy=Policy(lambda number: cut)) is Outcome.TRUNCATED_TOKENS
    assert await end("full", max_context_tokens=80) is Outcome.TRUNCATED_CONTEXT
    stated = Outcome.AGENT_ERROR
    assert await end("stated", max_context_tokens=80, stated=stated) is stated
    assert await end("unrewarded", stated=stated, reward=None) is stated
    assert await end("missing", reward=None) is Outcome.REWARD_ERROR
    completed = Outcome.COMPLETED
    assert await end("claimed", reward=None, stated=completed) is Outcome.REWARD_ERROR


async def test_a_lone_stop_token_is_a_turn(tmp_path: Path) -> None:
    gateway = await Gateway(tmp_path, policy=Policy(lambda number: reply("<|im_end|>"))).opened()
    assert (await gateway.ask(HI)).message.content == ""
    await gateway.finish(0.0)
    assert (await gateway.trajectory()).num_trained == 1


async def test_turns_are_limited(tmp_path: Path) -> None:
    gateway = await Gateway(tmp_path).opened(spec=replace(SPEC, max_turns=1))
    await gateway.ask(HI)
    stopped = await refusal(gateway.ask(HI, said("0"), MORE))
    assert (stopped.code, stopped.code.status) == (RefusalCode.ROLLOUT_STOPPED, 400)
    await gateway.finish(1.0)
    assert (await gateway.trajectory()).outcome is Outcome.MAX_TURNS


async def test_a_retry_gets_the_same_turn_and_an_unmarked_repetition_another(
    tmp_path: Path,
) -> None:
    gateway = await Gateway(tmp_path).opened()
    first = await gateway.ask(HI)
    assert await gateway.ask(HI, is_retry=True) == first
    assert (await gateway.ask(HI)).turn_id == "task-0.1"
    named = await gateway.ask(HI, idempotency_key="one")
    await gateway.ask(HI, said("2"), MORE)
    assert await gateway.ask(HI, idempotency_key="one") == named
    misused = await refusal(gateway.ask(MORE, idempotency_key="one"))
    assert misused.code is RefusalCode.CONFLICT
    # Another request came in between.
    assert (await gateway.ask(HI, is_retry=True)).turn_id == "task-0.4"
    assert len(gateway.policy.requests) == 5


async def test_a_retry_with_an_unknown_key_is_sampled(tmp_path: Path) -> None:
    gate = asyncio.Event()
    gateway = await Gateway(tmp_path, policy=Policy(before=gate.wait)).opened()
    asked = [
        asyncio.create_task(gateway.ask(HI, request_id=key, idempotency_key=key, is_retry=is_retry))
        for key, is_retry in (("one", False), ("two", True))
    ]
    await asyncio.sleep(0.05)
    gate.set()
    replies = [each.turn_id for each in await asyncio.gather(*asked)]
    assert sorted(replies) == ["task-0.0", "task-0.1"]
    third = await gateway.ask(HI, idempotency_key="three", is_retry=True)
    assert third.turn_id == "task-0.2"
    assert await gateway.ask(HI, idempotency_key="three", is_retry=True) == third


async def test_a_retry_of_a_running_request_waits_for_its_turn(tmp_path: Path) -> None:
    """Check also a request that the API sends again under its id after a lost connection."""
    gate = asyncio.Event()
    gateway = await Gateway(tmp_path, policy=Policy(before=gate.wait)).opened()
    asked = [
        asyncio.create_task(gateway.ask(HI, request_id="first")),
        asyncio.create_task(gateway.ask(HI, request_id="second", is_retry=True)),
        asyncio.create_task(gateway.ask(HI, request_id="first")),
    ]
    await asyncio.sleep(0.1)
    gate.set()
    replies = await asyncio.gather(*asked)
    assert [each.turn_id for each in replies] == ["task-0.0"] * 3
    assert len(gateway.policy.requests) == 1


async def test_a_turn_that_no_client_received_is_not_trained(
    tmp_path: Path,
) -> None:
    gate = asyncio.Event()
    gateway = await Gateway(tmp_path).opened()
    gateway.policy.before = gate.wait
    gone = asyncio.create_task(gateway.ask(HI, request_id="gone"))
    while not gateway.policy.requests:
        await asyncio.sleep(0.01)
    await gateway.sessions.abandon(NAME, "gone")
    gate.set()
    await gone
    await gateway.ask(user("again"), request_id="seen")
    view = await gateway.sessions.view(NAME)
    assert view is not None and (view.totals.num_turns, view.totals.num_left_out) == (2, 1)
    after = await gateway.restart(NAME)
    view = await after.sessions.view(NAME)
    assert view is not None and (view.totals.num_turns, view.totals.num_left_out) == (2, 1)
    await after.finish(1.0)
    assert [turn.index for turn in (await after.trajectory()).turns] == [0]


async def test_an_unusable_reply_is_not_stored(tmp_path: Path) -> None:
    sound = reply()
    answers = [
        replace(sound, logprobs=sound.logprobs[:-1]),
        replace(sound, logprobs=np.append(sound.logprobs, np.float32(-1))),
        replace(sound, logprobs=np.full_like(sound.logprobs, np.nan)),
        replace(sound, finish_reason=FinishReason.ABORT),
        sound,
    ]
    gateway = await Gateway(tmp_path, policy=Policy(lambda number: answers[number])).opened()
    for _ in answers[:-1]:
        refused = await refusal(gateway.ask(HI))
        assert (refused.code, refused.retry_after_s) == (RefusalCode.NOT_AVAILABLE, 5)
    assert (await gateway.ask(HI, is_retry=True)).turn_id == "task-0.0"
    await gateway.finish(1.0)
    assert len((await gateway.trajectory()).turns) == 1
    found = gateway.sessions_store.load(NAME)
    assert found is not None and len(found[1]) == 1


async def test_a_request_without_an_engine_is_refused_with_503(tmp_path: Path) -> None:
    async def away() -> None:
        raise PolicyUnavailable("no engine")

    gateway = await Gateway(tmp_path, policy=Policy(before=away)).opened()
    refused = await refusal(gateway.ask(HI))
    assert (refused.code.status, refused.retry_after_s) == (503, 5)


@pytest.mark.parametrize(("group_number", "republished"), [(99, ()), (8, (2,))])
async def test_a_session_that_is_too_old_for_its_group_is_stale(
    tmp_path: Path, group_number: int, republished: tuple[int, ...]
) -> None:
    """Check a late group, and group 8, for which version 3 is too old if no step made version 2."""
    gateway = Gateway(tmp_path)
    gateway.sessions.republished = republished
    gateway.create()
    gateway.admit(group_number=group_number)
    await gateway.ask(HI)
    await gateway.finish(1.0)
    stale = await gateway.trajectory()
    assert stale.outcome is Outcome.STALE
    assert "version 3" in stale.detail


async def test_calls_are_shown_and_malformed_ones_are_counted(tmp_path: Path) -> None:
    """Check an unknown tool, arguments that are not an object, and a call that was cut off."""
    tool = ToolSchema(name="add", description="", parameters={"type": "object", "properties": {}})
    call = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call><|im_end|>'
    answers = [
        reply(call.format("add", '{"x": 1}')),
        reply(call.format("sub", "{}")),
        reply(call.format("add", "[1]")),
        reply('<tool_call>{"name"', finish_reason=FinishReason.LENGTH),
    ]
    gateway = await Gateway(tmp_path, policy=Policy(lambda number: answers[number])).opened()
    replies: list[ChatReply] = [await gateway.ask(user(str(n)), tools=[tool]) for n in range(4)]
    assert [each.stop_reason for each in replies] == ["calls", "stop", "stop", "length"]
    view = await gateway.sessions.view(NAME)
    assert view is not None and view.totals.num_malformed == 2


@pytest.mark.parametrize("arguments", ["null", "[]", '"Oslo"', "{"])
async def test_a_malformed_call_keeps_all_calls_of_its_reply_in_the_text(
    tmp_path: Path, arguments: str
) -> None:
    """Check it because the policy would read the other call's result as the malformed one's."""
    tool = ToolSchema(name="add", description="", parameters={"type": "object", "properties": {}})
    bad, good = (
        f'<tool_call>{{"name": "add", "arguments": {each}}}</tool_call>'
        for each in (arguments, '{"x": 1}')
    )
    read = tuple(
        ParsedCall(name="add", arguments=each, id=str(number))
        for number, each in enumerate((arguments, '{"x": 1}'))
    )

    class Reading(Policy):
        async def generate(self, request: GenerateRequest) -> GenerateReply:
            answer = await super().generate(request)
            return replace(answer, parsed=ParsedReply(content="", calls=read))

    policy = Reading(lambda _: reply(f"{bad}{good}<|im_end|>"))
    gateway = await Gateway(tmp_path, policy=policy).opened()
    answered = await gateway.ask(HI, tools=[tool])
    assert (answered.stop_reason, answered.message.tool_calls) == ("stop", ())
    assert answered.message.content == bad + good
    view = await gateway.sessions.view(NAME)
    assert view is not None and view.totals.num_malformed == 1


async def test_a_repeated_finish_gets_the_result_of_the_running_one(tmp_path: Path) -> None:
    """Check a finish that a client repeats while the database is locked."""
    gateway = await Gateway(tmp_path, settings=SessionSettings(hold_s=5.0)).opened()
    await gateway.ask(HI)
    with gateway.store._database._writing_connection():
        asked = [asyncio.create_task(gateway.finish(1.0)) for _ in range(2)]
        other = asyncio.create_task(gateway.finish(2.0))
        assert (await refusal(other)).code is RefusalCode.CONFLICT
        asked[0].cancel()
        await asyncio.sleep(0.3)
        assert (await refusal(gateway.ask(HI))).code is RefusalCode.SESSION_CLOSED
    view = await asked[1]
    assert (view.end.reward, await gateway.finish(1.0)) == (1.0, view)
    assert (await gateway.trajectory()).episode_return == 1.0


async def test_a_late_notice_of_a_broken_connection_does_not_hide_the_turn_of_a_retry(
    tmp_path: Path,
) -> None:
    """Check notices of a broken connection that come before, during and after the retry."""
    gate = asyncio.Event()
    gateway = await Gateway(tmp_path).opened()

    async def ask_twice(*, abandons_at: str) -> None:
        gate.clear()
        gateway.policy.before = gate.wait
        message, first = user(abandons_at), f"{abandons_at} first"
        num_asked = len(gateway.policy.requests)
        gone = asyncio.create_task(gateway.ask(message, request_id=first))
        while len(gateway.policy.requests) == num_asked:
            await asyncio.sleep(0.01)
        if abandons_at == "before":
            await gateway.sessions.abandon(NAME, first)
        again = asyncio.create_task(gateway.ask(message, request_id="again", is_retry=True))
        await asyncio.sleep(0.05)
        if abandons_at == "while":
            await gateway.sessions.abandon(NAME, first)
        gate.set()
        assert (await again) == (await gone)
        if abandons_at == "after":
            await gateway.sessions.abandon(NAME, first)

    for abandons_at in ("before", "while", "after"):
        await ask_twice(abandons_at=abandons_at)
    view = await gateway.sessions.view(NAME)
    assert view is not None and (view.totals.num_turns, view.totals.num_left_out) == (3, 0)
    # The client of the retry is gone as well.
    await gateway.sessions.abandon(NAME, "again")
    view = await gateway.sessions.view(NAME)
    assert view is not None and (view.totals.num_turns, view.totals.num_left_out) == (3, 1)
    await gateway.restart()
    found = gateway.sessions_store.load(NAME)
    assert found is not None and [turn.is_unseen for turn in found[1]] == [True, False, False]
