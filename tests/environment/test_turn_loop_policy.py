"""Tests that an episode keeps its turns and has one outcome whatever policy or template does."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from worlds.builders.episode_builders import (
    DONE,
    GO_ON,
    SETTINGS,
    FakeEnvironment,
    FakePolicy,
    play,
    reply,
)
from worlds.builders.trajectory_builders import whole_turns
from worlds.checks.prefix_merge import merge_turns
from worlds.checks.same import assert_same_samples
from worlds.models.chatml import chatml_tokenizer

from actors.environment.policy import PolicyDeadlineExceeded, PolicyUnavailable
from actors.environment.rendering import ChatRenderer
from actors.types import BranchReason, FinishReason, Outcome, VersionSpan


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (PolicyUnavailable("replica died"), Outcome.INFRASTRUCTURE_ERROR),
        (ValueError("prompt too long"), Outcome.INFRASTRUCTURE_ERROR),
        (KeyError("a bug of the client"), Outcome.INFRASTRUCTURE_ERROR),
        (PolicyDeadlineExceeded("late"), Outcome.WALL_TIMEOUT),
    ],
)
async def test_the_turns_before_a_failure_of_the_policy_are_kept(
    error: Exception, outcome: Outcome
) -> None:
    trajectory = await play(FakeEnvironment(GO_ON), FakePolicy(reply(), error))
    assert trajectory.outcome is outcome
    assert len(trajectory.turns) == 1 and type(error).__name__ in trajectory.detail


async def test_an_aborted_turn_is_an_infrastructure_error() -> None:
    policy = FakePolicy(reply(finish_reason=FinishReason.ABORT))
    trajectory = await play(FakeEnvironment(GO_ON), policy)
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_ERROR
    assert len(trajectory.turns) == 1


async def test_a_policy_that_ignores_its_deadline_is_abandoned() -> None:
    settings = replace(SETTINGS, turn_deadline_s=0.05)
    trajectory = await play(FakeEnvironment(DONE), FakePolicy(delay_s=3600), settings=settings)
    assert trajectory.outcome is Outcome.WALL_TIMEOUT
    assert trajectory.timings.generate_s > 0


async def test_an_empty_reply_ends_the_episode_and_earlier_turns_are_kept() -> None:
    trajectory = await play(FakeEnvironment(GO_ON), FakePolicy(reply(), reply("")))
    assert trajectory.outcome is Outcome.EMPTY
    assert len(trajectory.turns) == 1


def spans(*bounds: tuple[int, int]) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(version=version, start=start, end=end)
        for version, (start, end) in enumerate(bounds)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": np.array([-0.5], dtype=np.float32)},
        {"logprobs": np.zeros(0, dtype=np.float32)},
        {"logprobs": np.array([-0.5, math.nan], dtype=np.float32)},
        {"logprobs": np.array([-math.inf, -0.5], dtype=np.float32)},
        {"token_ids": np.zeros(0, dtype=np.int32)},
        {"token_ids": np.array([-1, 5], dtype=np.int32)},
        {"token_ids": np.zeros((2, 1), dtype=np.int32)},
        {"logprobs": np.array([math.nan, 0.5], dtype=np.float32)},
        {"version_spans": ()},
        {"version_spans": spans((0, 1))},
        {"version_spans": spans((1, 2))},
        {"version_spans": spans((0, 0), (0, 2))},
    ],
)
async def test_a_reply_whose_arrays_do_not_fit_together_is_not_kept(
    changes: dict[str, object],
) -> None:
    assert reply().token_ids.shape == (2,)
    trajectory = await play(FakeEnvironment(GO_ON), FakePolicy(reply(), reply(**changes)))
    assert trajectory.outcome is Outcome.TOKEN_MISALIGNED
    assert len(trajectory.turns) == 1


def renderer_with(template: str) -> ChatRenderer:
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer)


async def test_a_template_that_refuses_the_chat_is_an_agent_error() -> None:
    refuses = renderer_with("{{ raise_exception('never') }}")
    assert (await play(FakeEnvironment(DONE), chat=refuses)).outcome is Outcome.AGENT_ERROR


async def test_a_template_that_reads_earlier_messages_begins_new_samples() -> None:
    counts_turns = renderer_with(
        "{% for m in messages %}{{ loop.index }} {{ m.content }}<|im_end|>{% endfor %}"
    )
    trajectory = await play(FakeEnvironment(GO_ON, GO_ON, DONE), chat=counts_turns)
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.render_breaks == {"template_looks_back": 2}
    reasons = [sample.branch_reason for sample in trajectory.samples]
    assert reasons == [None, BranchReason.TEMPLATE, BranchReason.TEMPLATE]
    compared = merge_turns(whole_turns(trajectory))
    assert [[turn.index for turn in sample.turns] for sample in compared] == [[0], [1], [2]]


async def test_a_rendered_prompt_that_extends_the_last_one_stays_in_its_sample() -> None:
    # Each prompt is rendered again, but still begins with the whole prompt before it.
    numbers_questions = renderer_with(
        "{% for m in messages %}{% if m.role != 'assistant' %}{{ loop.index0 // 4 }}{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    trajectory = await play(FakeEnvironment(GO_ON, GO_ON, DONE), chat=numbers_questions)
    assert trajectory.render_breaks == {"template_looks_back": 2}
    assert len(trajectory.turns) == 3 and len(trajectory.samples) == 1


async def test_with_history_as_rendered_each_changed_history_begins_a_sample() -> None:
    tokenizer = chatml_tokenizer()
    # A reply of two words is shown without the first.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content.split(' ')[-1] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chat = ChatRenderer(tokenizer, history="as_rendered")
    policy = FakePolicy(*(reply(f"{words}<|im_end|>") for words in ("7", "hm 5", "4")))
    trajectory = await play(FakeEnvironment(GO_ON, GO_ON, DONE), policy, chat=chat)
    assert trajectory.render_breaks == {"history_rendered": 1}
    assert [sample.branch_reason for sample in trajectory.samples] == [None, BranchReason.TEMPLATE]
    compared = merge_turns(whole_turns(trajectory))
    assert [[turn.index for turn in sample.turns] for sample in compared] == [[0, 1], [2]]


async def test_an_episode_stores_each_token_once_and_sends_whole_prompts() -> None:
    policy = FakePolicy(reply())
    trajectory = await play(FakeEnvironment(GO_ON, GO_ON, DONE), policy)
    (sample,) = trajectory.samples
    assert_same_samples(
        merge_turns(whole_turns(trajectory), trajectory_id=trajectory.trajectory_id), [sample]
    )
    for turn, request in zip(sample.turns, policy.requests, strict=True):
        np.testing.assert_array_equal(sample.token_ids[: turn.start], request.prompt_token_ids)
