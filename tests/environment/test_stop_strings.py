"""Tests of stop strings: all sampled tokens are trained, shown text ends before a stop string."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from worlds.builders.episode_builders import (
    ASSIGNMENT,
    DONE,
    GO_ON,
    SETTINGS,
    FakeEnvironment,
    FakePolicy,
    play,
    renderer,
    reply,
    tokenizer,
)

from actors.environment.protocol import Message, Observation, Role, ToolSchema
from actors.environment.rendering import ChatRenderer
from actors.environment.settings import KeptTokens, StructuredOutputs
from actors.environment.text_patterns import before_stop
from actors.environment.tokenizer import RAW, with_template
from actors.environment.turn_loop import play_episode
from actors.outcomes import Disposition, OutcomeRule
from actors.trainer.tiny.tokenizer import build_tokenizer
from actors.types import FinishReason, Outcome, VersionSpan
from service.config.file import ConfigError, parse_config
from service.config.tree import Config

STOPPING = replace(SETTINGS, stop=("\nQ:", "correct"))
TOOLS = (ToolSchema(name="look_up", description="Look up.", parameters={"type": "object"}),)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        # The stop string is inside a token, spans several, is at the beginning, or is absent.
        ("higher correctly", "higher "),
        ("7\nQ: lower", "7"),
        ("correct", ""),
        ("7\nQ", "7\nQ"),
        ("7 correct\nQ:", "7 "),
        # An end-of-sequence token after the stop string changes nothing.
        ("7\nQ:<|im_end|>", "7"),
    ],
)
async def test_the_environment_gets_the_text_before_the_stop_string_and_all_is_trained(
    text: str, shown: str
) -> None:
    environment, policy = FakeEnvironment(DONE), FakePolicy(reply(text))
    trajectory = await play(environment, policy, settings=STOPPING)
    assert [action.text for action in environment.actions] == [shown]
    assert policy.requests[0].stop == STOPPING.stop
    assert trajectory.outcome is Outcome.COMPLETED
    [sample] = trajectory.samples
    ids = tokenizer().encode(text, add_special_tokens=False)
    assert sample.token_ids[sample.prompt_length :].tolist() == ids
    assert sample.mask[sample.prompt_length :].tolist() == [1] * len(ids)
    assert (sample.logprobs[sample.prompt_length :] == -0.5).all()


async def test_a_turn_that_a_stop_string_ended_is_closed_by_the_template() -> None:
    policy = FakePolicy(reply("7\nQ:"), reply())
    trajectory = await play(FakeEnvironment(GO_ON, DONE), policy, settings=STOPPING)
    # ChatML's end of the reply and the line break after it are inserted.
    assert trajectory.num_inserted_tokens > 0 and len(trajectory.samples) == 1
    first, second = (request.prompt_token_ids.tolist() for request in policy.requests)
    sampled = tokenizer().encode("7\nQ:", add_special_tokens=False)
    assert second[: len(first) + len(sampled)] == [*first, *sampled]
    assert "7\nQ:<|im_end|>" in tokenizer().decode(second)


async def test_a_raw_conversation_is_continued_after_the_stop_string() -> None:
    raw = ChatRenderer(with_template(build_tokenizer(), RAW))
    words = build_tokenizer()

    def said(text: str) -> Any:
        ids = np.array(words.encode(text), np.int32)
        logprobs = np.full(ids.shape, -0.5, np.float32)
        spans = (VersionSpan(version=3, start=0, end=len(ids)),)
        return reply(token_ids=ids, logprobs=logprobs, version_spans=spans)

    environment = FakeEnvironment(GO_ON, DONE)
    policy = FakePolicy(said(" 7\nQ:"), said(" 5"))
    trajectory = await play(environment, policy, settings=STOPPING, chat=raw)
    assert [action.text for action in environment.actions] == [" 7", " 5"]
    [sample] = trajectory.samples
    assert words.decode(sample.token_ids.tolist()) == "hi 7\nQ:lower 5"
    assert trajectory.num_inserted_tokens == 0


async def test_calls_before_a_stop_string_are_made() -> None:
    call = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'

    async def begin() -> Observation:
        return Observation(messages=(Message(role=Role.USER, content="hi"),), tools=TOOLS)

    environment = FakeEnvironment(GO_ON, DONE, on_reset=begin)
    policy = FakePolicy(reply(f"{call}correct"), reply())
    await play(environment, policy, settings=STOPPING)
    assert environment.actions[0].text == call
    assert [call.name for call in environment.actions[0].calls] == ["look_up"]


async def test_a_cut_off_turn_is_scored_without_the_text_after_a_stop_string() -> None:
    rule = OutcomeRule(disposition=Disposition.SCORE)
    settings = replace(STOPPING, outcomes={Outcome.TRUNCATED_TOKENS: rule})
    environment = FakeEnvironment(DONE)
    cut_off = reply("7 correctly", finish_reason=FinishReason.LENGTH)
    trajectory = await play(environment, FakePolicy(cut_off), settings=settings)
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS
    assert [action.text for action in environment.actions] == ["7 "]


def test_text_ends_before_the_first_of_several_stop_strings() -> None:
    assert before_stop("a b c", ("c", "b")) == ("a ", "b")
    assert before_stop("a\n\nb", ("\n\n", "\n")) == ("a", "\n\n")
    assert before_stop("abc", ()) == ("abc", "")


async def test_the_choice_of_tokens_of_an_evaluation_reaches_the_engine() -> None:
    kept = KeptTokens(top_p=0.9, structured_outputs=StructuredOutputs(choice=("a", "b")))
    policy = FakePolicy(reply())
    for given in (kept, None):
        await play_episode(
            ASSIGNMENT,
            make_environment=lambda: FakeEnvironment(DONE),
            policy=policy,
            renderer=renderer(),
            settings=SETTINGS,
            max_context_tokens=400,
            kept=given,
        )
    assert [request.kept for request in policy.requests] == [kept, None]


def config_with(**sections: Any) -> Config:
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}, **sections}
    return parse_config(tree, source="test")


def test_an_engine_reads_text_only_if_a_setting_needs_it() -> None:
    assert not config_with().engine_reads_text
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert config_with(rollouts={"stop": ["\n"]}).engine_reads_text
    assert config_with(evaluation=choice).engine_reads_text
    assert config_with(evaluation={"sets": {"a": choice}}).engine_reads_text
    parts = {"a": {"tasks": {"environment": "guessing"}, "rollouts": {"stop": ["\n"]}}}
    mixture = parse_config({"model": {"tiny": {}}, "mixture": parts}, source="test")
    assert mixture.engine_reads_text and mixture.members["a"].rollouts.stop == ("\n",)


def test_an_evaluation_has_its_own_choice_of_tokens() -> None:
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
    schema = {"structured_outputs": {"json": {"type": "object"}}}
    config = config_with(evaluation={**settings, "sets": {"a": schema}})
    assert config.evaluation.sampling.kept == KeptTokens(top_p=0.9, top_k=20, min_p=0.05)
    kept = config.evaluation.sets["a"].sampling.kept
    assert kept.structured_outputs is not None
    assert kept.structured_outputs.given == {"json": {"type": "object"}}


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "structured_outputs"])
def test_settings_that_restrict_the_sampling_of_training_are_refused(name: str) -> None:
    said = rf"rollouts\.{name}: training samples among all tokens, because the trainer's"
    with pytest.raises(ConfigError, match=said):
        config_with(rollouts={name: 0.9})
    part = {"tasks": {"environment": "guessing"}, "rollouts": {name: 0.9}}
    with pytest.raises(ConfigError, match=said):
        parse_config({"model": {"tiny": {}}, "mixture": {"a": part}}, source="test")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"evaluation": {"top_p": 0.9}}, r"evaluation.top_p is 0.9 with temperature 0"),
        ({"evaluation": {"top_k": 5}}, r"evaluation.top_k is 5 with temperature 0"),
        ({"evaluation": {"sets": {"a": {"min_p": 0.1}}}}, r"sets.a.min_p is 0.1 with temper"),
        ({"evaluation": {"top_p": 0, "temperature": 1}}, r"evaluation.top_p: got 0"),
        ({"evaluation": {"top_k": -1, "temperature": 1}}, r"evaluation.top_k: got -1"),
        ({"evaluation": {"min_p": 1.5, "temperature": 1}}, r"evaluation.min_p: got 1.5"),
        ({"evaluation": {"structured_outputs": {}}}, r"structured_outputs has nothing"),
        (
            {"evaluation": {"structured_outputs": {"regex": "a", "choice": ["a"]}}},
            r"structured_outputs has regex, choice; expected one",
        ),
        ({"evaluation": {"structured_outputs": {"choice": []}}}, r"structured_outputs.choice"),
        ({"evaluation": {"structured_outputs": {"regx": "a"}}}, r"did you mean 'regex'"),
        ({"evaluation": {"structured_outputs": {"regex": "("}}}, r"regex '\(' is not a regular"),
        (
            {"evaluation": {"structured_outputs": {"json": {"type": "thing"}}}},
            r"structured_outputs.json is not a JSON schema",
        ),
        ({"rollouts": {"stop": [""]}}, r"rollouts.stop.0: got ''"),
        ({"rollouts": {"stop": "\n"}}, r"rollouts.stop: got"),
    ],
)
def test_settings_without_a_meaning_are_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_with(**sections)
