"""Tests of playing an episode: exact tokens, rewards, limits, and turns that are always kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from worlds.builders.episode_builders import (
    ASSIGNMENT,
    DONE,
    GO_ON,
    HELLO,
    SETTINGS,
    FakeEnvironment,
    FakePolicy,
    hang,
    play,
    renderer,
    reply,
    returning,
    tokenizer,
)
from worlds.builders.trajectory_builders import whole_turns

from actors.environment.builtin.calculator import (
    CALCULATOR,
    CalculatorEnvironment,
    CalculatorOptions,
)
from actors.environment.builtin.guessing import GuessingEnvironment, GuessingOptions
from actors.environment.policy import GenerateReply, GenerateRequest, ParsedCall, ParsedReply
from actors.environment.protocol import Message, Observation, Role, StepResult, ToolCall
from actors.environment.rendering import ChatRenderer, Extension
from actors.environment.turn_loop import MAX_ANSWER_CHARS, play_episode, short_answer
from actors.outcomes import Disposition, OutcomeRule
from actors.types import NO_VERSION, FinishReason, Outcome, summarize


async def test_a_finished_game_is_completed_with_its_rewards_and_exact_ids() -> None:
    environment = FakeEnvironment(GO_ON, DONE)
    policy = FakePolicy()
    trajectory = await play(environment, policy)
    assert trajectory.outcome is Outcome.COMPLETED
    assert (trajectory.trajectory_id, trajectory.group_number) == ("r1.a1", 4)
    assert (trajectory.episode_return, trajectory.best_return) == (1.25, 2.0)
    assert trajectory.turns[1].reward_components == {"hit": 1.0}
    first, second = whole_turns(trajectory)
    assert [request.prompt_token_ids.tolist() for request in policy.requests] == [
        first.prompt_token_ids.tolist(),
        second.prompt_token_ids.tolist(),
    ]
    whole = np.concatenate((first.prompt_token_ids, first.sampled_token_ids))
    np.testing.assert_array_equal(second.prompt_token_ids[: len(whole)], whole)
    assert trajectory.num_inserted_tokens == 1  # the newline of the template
    phases = trajectory.timings.by_phase()
    assert phases.keys() == {"reset", "generate", "step"}
    assert 0 < sum(phases.values()) <= trajectory.timings.wall_s
    assert [action.text for action in environment.actions] == ["4", "4"]


async def test_an_environment_can_read_the_id_of_its_rollout() -> None:
    environment = FakeEnvironment(DONE)
    await play(environment)
    assert environment.rollout_id == ASSIGNMENT.rollout_id


async def test_every_later_turn_is_sent_with_the_cache_salt_of_the_first_reply() -> None:
    policy = FakePolicy(
        reply(cache_salt="v3", replica="a"), reply(cache_salt="v4", replica="b"), reply()
    )
    await play(FakeEnvironment(GO_ON, GO_ON, DONE), policy)
    assert [request.cache_salt for request in policy.requests] == [None, "v3", "v3"]
    # If the replica of the turn before is lost, another one answers this turn and the later ones.
    assert [request.replica for request in policy.requests] == ["", "a", "b"]


async def test_a_turn_has_the_experts_that_the_engine_recorded() -> None:
    sound = reply()
    records = np.zeros((len(sound.token_ids) - 1, 2, 2), np.uint8)
    policy = FakePolicy(reply(expert_indices=records), sound)
    (sample,) = (await play(FakeEnvironment(GO_ON, DONE), policy)).samples
    # Only the first turn has records.
    assert sample.experts is not None
    first = sample.turns[0]
    assert sample.experts.positions.tolist() == list(range(first.start, first.end - 1))
    np.testing.assert_array_equal(sample.experts.indices, records)


async def test_the_last_answer_of_an_episode_is_kept_in_its_summary() -> None:
    answers = (StepResult(messages=GO_ON.messages, answer=answer) for answer in ("a", "b", None))
    trajectory = await play(FakeEnvironment(*answers, DONE))
    assert trajectory.answer == "b" == summarize(trajectory, num_bytes=0).answer
    assert (await play(FakeEnvironment(DONE))).answer is None
    with pytest.raises(TypeError, match="answer: got an int, expected text or None"):
        StepResult(answer=7)  # type: ignore[arg-type]


async def test_each_turn_has_the_state_key_that_came_with_its_observation() -> None:
    long = "board " * 100
    at_reset = returning(replace(HELLO, state_key="start"))
    went_on = replace(GO_ON, state_key=long)
    answers = (went_on, GO_ON, replace(DONE, state_key="end"))
    found = await play(FakeEnvironment(*answers, on_reset=at_reset))
    first, second, third = (turn.state_key for turn in whole_turns(found))
    assert (first, third) == ("start", None)
    # A long key is shortened to its beginning and a digest, so that equal keys stay equal.
    assert second is not None and second.startswith("board ")
    assert len(second) == MAX_ANSWER_CHARS and second == short_answer(long)


@pytest.mark.parametrize("key", [b"s", 3, ("a",)])
def test_a_state_key_that_is_not_text_is_refused_with_a_remedy(key: Any) -> None:
    for make in (lambda: replace(HELLO, state_key=key), lambda: StepResult(state_key=key)):
        with pytest.raises(TypeError, match=r"state_key: got an? \w+, expected text.*json\.dumps"):
            make()


async def test_a_game_without_an_end_stops_at_max_turns_and_keeps_its_rewards() -> None:
    trajectory = await play(FakeEnvironment(GO_ON))
    assert trajectory.outcome is Outcome.MAX_TURNS
    assert (len(trajectory.turns), trajectory.episode_return) == (4, 1.0)


async def test_a_truncation_by_the_environment_ends_the_episode_as_max_turns() -> None:
    trajectory = await play(FakeEnvironment(StepResult(reward=0.5, truncated=True)))
    assert trajectory.outcome is Outcome.MAX_TURNS
    assert trajectory.episode_return == 0.5


async def test_a_cut_off_turn_is_kept_and_never_shown_to_the_environment() -> None:
    environment = FakeEnvironment(DONE)
    cut = reply("4 4 4", finish_reason=FinishReason.LENGTH)
    trajectory = await play(environment, FakePolicy(cut))
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS
    assert trajectory.is_truncated and trajectory.num_sampled == len(cut.token_ids)
    assert environment.actions == [] and trajectory.episode_return == 0.0


@pytest.mark.parametrize("result", [DONE, StepResult(reward=0.0, terminated=True)])
async def test_a_cut_off_turn_is_scored_as_a_whole_answer_if_its_rule_says_so(
    result: StepResult,
) -> None:
    rule = OutcomeRule(disposition=Disposition.SCORE)
    settings = replace(SETTINGS, outcomes={Outcome.TRUNCATED_TOKENS: rule})
    environment = FakeEnvironment(result)
    cut = reply("4 4 4", finish_reason=FinishReason.LENGTH)
    trajectory = await play(environment, FakePolicy(cut), settings=settings)
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS and trajectory.is_graded
    assert [action.text for action in environment.actions] == ["4 4 4"]
    assert trajectory.episode_return == result.reward


def length_of_the_first_prompt() -> int:
    return renderer().first_prompt(HELLO.messages, ()).shape[0]


async def test_a_prompt_that_fills_the_context_ends_the_episode_as_truncated() -> None:
    policy = FakePolicy()
    full = length_of_the_first_prompt()
    trajectory = await play(FakeEnvironment(DONE), policy, max_context_tokens=full)
    assert trajectory.outcome is Outcome.TRUNCATED_CONTEXT
    assert trajectory.turns == () and policy.requests == []


async def test_the_turns_before_a_prompt_that_exceeds_the_context_are_kept() -> None:
    long = StepResult(messages=(Message(role=Role.USER, content="lower " * 400),))
    trajectory = await play(FakeEnvironment(long))
    assert trajectory.outcome is Outcome.TRUNCATED_CONTEXT
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("keeps", "num_missing", "num_kept"),
    [
        (True, 0, 10),  # the whole prompt fits, and leaves no room for a reply
        (True, 6, 4),
        (True, 10, 0),  # the last reply filled the context
        (False, 0, 0),
    ],
)
async def test_a_sample_keeps_the_part_of_the_last_observation_that_fits_the_context(
    keeps: bool, num_missing: int, num_kept: int
) -> None:
    whole = await play(FakeEnvironment(GO_ON, DONE))
    first, second = whole_turns(whole)
    prompt = second.prompt_token_ids
    end = first.prompt_token_ids.shape[0] + first.num_sampled
    # The template's newline, <|im_start|>user and lower, and the next reply's header.
    assert prompt.shape[0] - end == 10
    trajectory = await play(
        FakeEnvironment(GO_ON),
        max_context_tokens=prompt.shape[0] - num_missing,
        keeps_last_observation=keeps,
    )
    assert trajectory.outcome is Outcome.TRUNCATED_CONTEXT
    (sample,) = trajectory.samples
    assert (sample.turns[-1].end, sample.num_tokens) == (end, end + num_kept)
    np.testing.assert_array_equal(sample.token_ids, prompt[: end + num_kept])
    assert sample.num_trained == trajectory.num_trained == first.num_sampled
    assert not sample.mask[end:].any() and not sample.logprobs[end:].any()
    assert (sample.versions[end:] == NO_VERSION).all()


async def test_the_last_observation_is_kept_only_if_the_context_is_full() -> None:
    for environment in (FakeEnvironment(GO_ON), FakeEnvironment(DONE)):
        trajectory = await play(environment, keeps_last_observation=True)
        (sample,) = trajectory.samples
        assert trajectory.outcome in (Outcome.MAX_TURNS, Outcome.COMPLETED)
        assert sample.num_tokens == sample.turns[-1].end
    full = length_of_the_first_prompt()
    unplayed = await play(
        FakeEnvironment(DONE), max_context_tokens=full, keeps_last_observation=True
    )
    assert unplayed.samples == ()


async def test_the_free_context_bounds_a_turn_that_then_ends_as_truncated_context() -> None:
    policy = FakePolicy(reply("4 4", finish_reason=FinishReason.LENGTH))
    tight = length_of_the_first_prompt() + 4
    trajectory = await play(FakeEnvironment(DONE), policy, max_context_tokens=tight)
    assert policy.requests[0].max_tokens == 4
    assert trajectory.outcome is Outcome.TRUNCATED_CONTEXT
    assert len(trajectory.turns) == 1


async def test_an_episode_ended_by_malformed_calls_has_their_outcome() -> None:
    end = StepResult(reward=-0.1, terminated=True, is_malformed=True, ended_by_malformed=True)
    trajectory = await play(FakeEnvironment(end))
    assert trajectory.outcome is Outcome.MALFORMED_TOOL_CALL
    assert trajectory.num_malformed_turns == 1 and trajectory.episode_return == -0.1


async def test_a_malformed_turn_that_does_not_end_the_episode_is_only_flagged() -> None:
    bad = StepResult(messages=GO_ON.messages, is_malformed=True)
    trajectory = await play(FakeEnvironment(bad, DONE))
    assert trajectory.outcome is Outcome.COMPLETED
    assert [turn.is_malformed for turn in trajectory.turns] == [True, False]


async def test_the_episode_deadline_ends_an_episode_of_many_short_turns() -> None:
    trajectory = await play(
        FakeEnvironment(GO_ON),
        FakePolicy(delay_s=0.01),
        settings=replace(SETTINGS, max_turns=10_000, episode_deadline_s=0.3),
        max_context_tokens=10**6,
    )
    assert trajectory.outcome is Outcome.WALL_TIMEOUT


@pytest.mark.parametrize(
    ("where", "outcome", "num_turns"),
    [
        ("reset", Outcome.CANCELLED, 0),
        ("policy", Outcome.CANCELLED, 0),
        ("step", Outcome.CANCELLED, 1),
        ("close", Outcome.COMPLETED, 1),
    ],
)
async def test_a_cancelled_episode_still_returns_a_trajectory(
    where: str, outcome: Outcome, num_turns: int
) -> None:
    reached = asyncio.Event()

    async def arrive_and_hang() -> StepResult:
        reached.set()
        return await hang()

    class HangingPolicy(FakePolicy):
        async def generate(self, request: GenerateRequest) -> GenerateReply:
            if where == "policy":
                await arrive_and_hang()
            return await super().generate(request)

    environment = FakeEnvironment(
        arrive_and_hang if where == "step" else DONE,
        on_reset=arrive_and_hang if where == "reset" else None,
        on_close=arrive_and_hang if where == "close" else None,
    )
    task = asyncio.create_task(play(environment, HangingPolicy()))
    await reached.wait()
    task.cancel()
    trajectory = await task
    assert (trajectory.outcome, len(trajectory.turns)) == (outcome, num_turns)


async def test_the_calculator_is_played_through_its_tool() -> None:
    start = await CalculatorEnvironment(CalculatorOptions()).reset(ASSIGNMENT.task)
    expression = start.messages[0].content.removeprefix("What is ").removesuffix("?")
    answer = str(sum(map(int, expression.split("+"))))
    call = '{"name": "calculator", "arguments": {"expression": "' + expression + '"}}'
    policy = FakePolicy(
        reply("<tool_call>{<|im_end|>"),
        reply(f"<tool_call>{call}</tool_call><|im_end|>"),
        reply(answer),
    )
    trajectory = await play(CalculatorEnvironment(CalculatorOptions()), policy)
    assert trajectory.outcome is Outcome.COMPLETED
    assert [turn.reward for turn in trajectory.turns] == [-0.1, 0.0, 1.0]
    last = tokenizer().decode(whole_turns(trajectory)[-1].prompt_token_ids.tolist())
    assert f"<tool_response>\n{answer}\n</tool_response>" in last
    assert "error: <tool_call> without </tool_call>." in last


async def test_an_action_has_the_calls_that_the_engine_parsed() -> None:
    class Mistral(FakePolicy):
        """A policy whose calls have a form that only its engine parses."""

        async def generate(self, request: GenerateRequest) -> GenerateReply:
            assert request.tools == (CALCULATOR,)
            call = ParsedCall(name="calculator", arguments='{"expression": "1+1"}', id="LcIhmR123")
            parsed = ParsedReply(content="", calls=(call,))
            return replace(await super().generate(request), parsed=parsed)

    environment = FakeEnvironment(
        DONE, on_reset=returning(Observation(messages=HELLO.messages, tools=(CALCULATOR,)))
    )
    policy = Mistral(reply("[TOOL_CALLS]calculator<|im_end|>"))
    assert (await play(environment, policy)).outcome is Outcome.COMPLETED
    [action] = environment.actions
    assert action.text == "[TOOL_CALLS]calculator"
    assert action.calls == (
        ToolCall(name="calculator", arguments={"expression": "1+1"}, id="LcIhmR123"),
    )


async def test_the_history_has_the_parsed_reply_or_the_text_of_one_with_a_malformed_call() -> None:
    class Remembering(ChatRenderer):
        def extend(self, *args: Any, history: Sequence[Message], **fields: Any) -> Extension:
            replies.append(history[-1])
            return super().extend(*args, history=history, **fields)

    class Thinking(FakePolicy):
        async def generate(self, request: GenerateRequest) -> GenerateReply:
            answer = await super().generate(request)
            assert answer.parsed is not None
            parsed = replace(answer.parsed, content="", reasoning="a sum")
            return replace(answer, parsed=parsed)

    replies: list[Message] = []
    sound = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
    broken = f"{sound}<tool_call>{{"
    policy = Thinking(*(reply(f"{text}<|im_end|>") for text in (sound, broken, "2")))
    await play(CalculatorEnvironment(CalculatorOptions()), policy, chat=Remembering(tokenizer()))
    call = ToolCall(name="calculator", arguments={"expression": "1+1"}, id="call-0")
    assert replies == [
        Message(role=Role.ASSISTANT, content="", reasoning="a sum", tool_calls=(call,)),
        Message(role=Role.ASSISTANT, content=broken),
    ]


async def test_a_reply_is_not_parsed_without_tools() -> None:
    policy = FakePolicy()
    await play(FakeEnvironment(DONE), policy)
    assert [request.tools for request in policy.requests] == [None]


async def test_a_reply_that_was_not_parsed_is_an_infrastructure_error() -> None:
    class Careless(FakePolicy):
        async def generate(self, request: GenerateRequest) -> GenerateReply:
            return replace(await super().generate(request), parsed=None)

    trajectory = await play(CalculatorEnvironment(CalculatorOptions()), Careless())
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_ERROR
    assert "the reply is not parsed" in trajectory.detail and not trajectory.turns


async def test_concurrent_episodes_do_not_disturb_each_other() -> None:
    replies: Sequence[GenerateReply] = [reply(f"{n}<|im_end|>") for n in range(1, 8)]
    plays = [
        play_episode(
            ASSIGNMENT,
            make_environment=partial(GuessingEnvironment, GuessingOptions(max_guesses=1)),
            policy=FakePolicy(replies[i % 7], delay_s=0.001 * (i % 5)),
            renderer=renderer(),
            settings=SETTINGS,
            max_context_tokens=400,
        )
        for i in range(210)
    ]
    trajectories = await asyncio.gather(*plays)
    assert {t.outcome for t in trajectories} == {Outcome.COMPLETED}
    assert sum(t.episode_return for t in trajectories) == 30.0
