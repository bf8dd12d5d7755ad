"""Tests of reward functions that score all answers of a group together."""

from __future__ import annotations

import pickle
import sys
from types import FrameType
from typing import Any

import pytest
from worlds.builders.trajectory_builders import linear_turns, make_trajectory
from worlds.parts import group_rewards

from actors.environment import workers
from actors.environment.group_scoring import score_together
from actors.environment.protocol import StepResult
from actors.environment.registry import BadEnvironmentOptions, resolve
from actors.environment.settings import RolloutSettings, rollout_settings
from actors.environment.trainer_arguments import copy_of_each
from actors.types import Outcome, Task, Trajectory

DATA = {"prompt": "2 + 2", "answer": "4"}


def task(**data: Any) -> Task:
    return Task(task_id="t", environment="single_turn", seed=0, data={**DATA, **data})


def named(*names: str) -> list[str]:
    return [f"worlds.parts.group_rewards:{name}" for name in names]


async def scored(
    texts: list[str],
    *,
    about: Task | None = None,
    limit_s: float = 20.0,
    stop: tuple[str, ...] = (),
    make_environment: Any = None,
    **options: Any,
) -> list[Trajectory]:
    """Score texts as a group of trajectories whose environment gave each a reward of 0.25."""
    played = [
        make_trajectory(linear_turns(2, reward=0.25, seed=n), rollout_id=f"g000003.0-{n}")
        for n in range(len(texts))
    ]
    left = iter(texts)
    return await score_together(
        played,
        about or task(),
        make_environment=make_environment or resolve("single_turn", options),
        decode=lambda ids: next(left),
        limit_s=limit_s,
        stop=stop,
    )


async def test_a_function_is_called_once_with_the_answers_in_group_order() -> None:
    # The function runs in this process, so that its arguments can be read here.
    rollout_settings.set(RolloutSettings(inline=True))
    group_rewards.calls.clear()
    found = await scored(["a", "b", "c"], group_reward=named("places"))
    (call,) = group_rewards.calls
    assert call["completions"] == ["a", "b", "c"]
    assert (call["prompts"], call["answer"]) == (["2 + 2"] * 3, ["4"] * 3)
    assert [each.episode_return for each in found] == [0.25, 1.25, 2.25]
    assert {each.metrics["answers"] for each in found} == {3.0}
    assert [each.extra_columns["place"] for each in found] == ["place 0", "place 1", "place 2"]
    assert all(each.outcome is Outcome.COMPLETED for each in found)


async def test_the_answers_to_a_chat_are_messages_as_in_trl() -> None:
    # The function runs in this process, so that its arguments can be read here.
    rollout_settings.set(RolloutSettings(inline=True))
    group_rewards.calls.clear()
    about = task(prompt=[{"role": "user", "content": "2 + 2"}])
    await scored(["a", "b"], about=about, group_reward=named("places"))
    assert group_rewards.calls[0]["completions"][1] == [{"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("inline", [True, False])
async def test_a_function_may_change_an_answers_columns_and_prompt(inline: bool) -> None:
    rollout_settings.set(RolloutSettings(inline=inline))
    data = {"prompt": [{"role": "user", "content": "Name red"}], "words": ["blue", "red"]}
    found = await scored(["red", "red", "red"], about=task(**data), group_reward=named("consumes"))
    assert [each.episode_return for each in found] == [1.25] * 3
    assert data == {"prompt": [{"role": "user", "content": "Name red"}], "words": ["blue", "red"]}


def test_each_answer_has_its_own_copy_of_a_column_without_a_call_for_each_value() -> None:
    cases = [{"numbers": list(range(1000))}, {"input": {"lines": ["a"]}}]
    num_calls = 0

    def count(frame: FrameType, event: str, value: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        copied = copy_of_each({"cases": [cases] * 4, "prompt": "2 + 2"})
    finally:
        sys.setprofile(before)
    assert num_calls < 100
    copied["cases"][0][0]["numbers"].clear()
    copied["cases"][1][1]["input"]["lines"].append("b")
    assert copied["cases"][2:] == [cases] * 2
    assert cases == [{"numbers": list(range(1000))}, {"input": {"lines": ["a"]}}]


async def test_columns_are_sent_to_a_worker_once_and_only_if_the_function_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[dict[str, Any]] = []
    original = workers.Pool.call

    async def note(pool: workers.Pool, name: str, given: Any, **options: Any) -> Any:
        sent.append(given["arguments"])
        return await original(pool, name, given, **options)

    monkeypatch.setattr(workers.Pool, "call", note)
    rollout_settings.set(RolloutSettings())
    chat = [{"role": "user", "content": "Name red"}]
    about = task(prompt=chat, words=[f"word {number}" for number in range(1000)], tests=["x"])
    await scored(["a"] * 8, about=about, group_reward=named("consumes"))
    [arguments] = sent
    assert arguments.keys() == {"completions", "prompts", "words", "wordss", "columns"}
    assert len(pickle.dumps(arguments["words"])) < 2 * len(pickle.dumps(about.data["words"]))


async def test_rewards_of_group_functions_are_weighted_and_added_to_other_rewards() -> None:
    weights = {"worlds.parts.group_rewards:places": 2.0, "worlds.parts.group_rewards:longest": 1.0}
    found = await scored(["a", "bb"], reward=named("of_one")[0], group_reward=weights)
    assert [each.episode_return for each in found] == [0.25 + 0.5, 0.25 + 2.0 + 1.5]
    parts = dict(found[1].turns[-1].reward_components)
    assert {"places": 1.0, "longest": 1.5, "longest.long": 1.0}.items() <= parts.items()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fails", "fails raised KeyError"),
        ("too_few", "gave a list of 1 for a list of 2 answers, expected a list of one number each"),
        ("silent", "none of the group functions gave a number"),
        ("wrong_column", "column word has 1 values for 2 answers"),
        ("masked", "masked gave a MaskedConstant, expected a number"),
        ("masked_part", "masked_part gave a MaskedArray as lines, expected a number"),
        ("unordered", "gave a set for a list of 2 answers"),
    ],
)
async def test_a_failing_function_is_a_reward_error_of_each_rollout(name: str, words: str) -> None:
    found = await scored(["a", "b"], group_reward=named(name))
    assert {each.outcome for each in found} == {Outcome.REWARD_ERROR}
    assert all(words in each.detail for each in found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group_reward": named("of_one")}, "of_one scores one answer"),
        (
            {"group_reward": named("with_prompt")},
            "group_reward: .* the argument is prompts; rename",
        ),
        ({"group_reward": named("with_tools")}, "with_tools needs environment, which only"),
        ({"group_reward": named("by_place")}, "group_reward: .* takes first only by position"),
        ({"group_reward": named("hidden")}, "hides its arguments"),
        ({"reward": named("too_few"), "group_reward": named("too_few")}, "name of two functions"),
        ({}, "got no function"),
    ],
)
def test_functions_that_cannot_score_a_group_are_refused_before_the_start(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadEnvironmentOptions, match=words):
        resolve("single_turn", options)


async def test_a_missing_column_of_a_group_function_is_refused_at_the_reset() -> None:
    environment = resolve("single_turn", {"group_reward": named("longest")})()
    await environment.reset(task())
    with pytest.raises(ValueError, match="longest needs answers"):
        await environment.reset(
            Task(task_id="t", environment="single_turn", seed=0, data={"prompt": "?"})
        )


async def test_only_an_answer_without_any_score_is_a_reward_error() -> None:
    found = await scored(["a", "bb", "cc"], group_reward=named("only_long"))
    assert [each.outcome for each in found[1:]] == [Outcome.COMPLETED] * 2
    assert found[0].outcome is Outcome.REWARD_ERROR and "for this answer" in found[0].detail
    # With another function that scores the answer, only the group's part is missing.
    found = await scored(["a", "bb"], reward=named("of_one")[0], group_reward=named("only_long"))
    assert [each.episode_return for each in found] == [0.25, 1.25]


async def test_a_call_that_exceeds_its_limit_is_not_repeated() -> None:
    rollout_settings.set(RolloutSettings(reward_limit_s=0.2))
    name = named("hangs")[0]
    found = await scored(["a", "b"], group_reward=name)
    assert all("did not answer within 0.2 s" in each.detail for each in found)
    (lost,) = [each for each in workers.report()[0] if each.function == name]
    assert lost.count == 1


async def test_an_answer_is_the_text_before_a_stop_string() -> None:
    found = await scored(["a END", "b"], stop=("END",), group_reward=named("only_long"))
    assert found[0].episode_return == 1.25


async def test_a_function_in_this_process_changes_only_its_own_arguments() -> None:
    rollout_settings.set(RolloutSettings(inline=True))
    about = task(words=["a"])
    found = await scored(["a", "b"], about=about, group_reward=named("changes"))
    assert [each.outcome for each in found] == [Outcome.COMPLETED] * 2
    assert about.data["words"] == ["a"]


async def test_a_column_named_self_does_not_collide_with_the_argument_self() -> None:
    found = await scored(["a"], about=task(self="x"), group_reward=named("scorer"))
    assert found[0].episode_return == 1.25


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "score_group gave NoneType for 2 answers"),
        ([StepResult()], "score_group gave 1 results for 2 answers"),
        ([1.0, 2.0], "score_group gave a float for an answer, expected a rayloom.StepResult"),
        ([StepResult(), StepResult(reward=float("nan"))], "reward: got nan"),
    ],
)
async def test_wrong_results_of_score_group_are_reward_errors(given: Any, words: str) -> None:
    class Scores:
        async def score_group(self, task: Task, completions: Any) -> Any:
            return given

        async def close(self) -> None: ...

    found = await scored(["a", "b"], make_environment=Scores)
    assert {each.outcome for each in found} == {Outcome.REWARD_ERROR}
    assert all(words in each.detail for each in found)
