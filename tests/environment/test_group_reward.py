"""Functions over a whole group: how they are called, what they add, and what their failure is."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import group_rewards
from worlds.trajectory_builders import linear_turns, make_trajectory

from actors.environment.group_scoring import score_together
from actors.environment.registry import BadEnvironmentOptions, resolve
from actors.environment.settings import RolloutSettings, playing
from actors.types import Outcome, Task, Trajectory

DATA = {"prompt": "2 + 2", "answer": "4"}


def task(**data: Any) -> Task:
    return Task(task_id="t", environment="single_turn", seed=0, data={**DATA, **data})


def named(*names: str) -> list[str]:
    return [f"worlds.group_rewards:{name}" for name in names]


async def scored(
    texts: list[str], *, about: Task | None = None, limit_s: float = 20.0, **options: Any
) -> list[Trajectory]:
    """Trajectories that their environment gave a reward of 0.25 before."""
    played = [
        make_trajectory(linear_turns(2, reward=0.25, seed=n), rollout_id=f"g000003.0-{n}")
        for n in range(len(texts))
    ]
    left = iter(texts)
    return await score_together(
        played,
        about or task(),
        make_environment=resolve("single_turn", options),  # type: ignore[arg-type]
        decode=lambda ids: next(left),
        limit_s=limit_s,
    )


async def test_a_function_is_called_once_for_the_answers_in_the_order_of_the_group() -> None:
    # What the function was called with is looked at here.
    playing.set(RolloutSettings(inline=True))
    group_rewards.calls.clear()
    found = await scored(["a", "b", "c"], group_reward=named("places"))
    (call,) = group_rewards.calls
    assert call["completions"] == ["a", "b", "c"]
    assert (call["prompts"], call["answer"]) == (["2 + 2"] * 3, ["4"] * 3)
    assert [each.episode_return for each in found] == [0.25, 1.25, 2.25]
    assert {each.metrics["answers"] for each in found} == {3.0}
    assert [each.extra_columns["place"] for each in found] == ["place 0", "place 1", "place 2"]
    assert all(each.outcome is Outcome.COMPLETED for each in found)


async def test_a_chats_answers_are_messages_as_trl_has_them() -> None:
    # What the function was called with is looked at here.
    playing.set(RolloutSettings(inline=True))
    group_rewards.calls.clear()
    about = task(prompt=[{"role": "user", "content": "2 + 2"}])
    await scored(["a", "b"], about=about, group_reward=named("places"))
    assert group_rewards.calls[0]["completions"][1] == [{"role": "assistant", "content": "b"}]


async def test_several_functions_add_up_by_their_weights_beside_those_of_one_answer() -> None:
    weights = {"worlds.group_rewards:places": 2.0, "worlds.group_rewards:longest": 1.0}
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
    ],
)
async def test_a_failure_is_a_reward_error_of_each_member(name: str, words: str) -> None:
    found = await scored(["a", "b"], group_reward=named(name))
    assert {each.outcome for each in found} == {Outcome.REWARD_ERROR}
    assert all(words in each.detail for each in found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group_reward": named("of_one")}, "of_one scores one answer"),
        ({"group_reward": named("with_tools")}, "with_tools needs environment"),
        ({"reward": named("too_few"), "group_reward": named("too_few")}, "name of two functions"),
        ({}, "got no function"),
    ],
)
def test_what_cannot_score_a_group_is_refused_before_the_start(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadEnvironmentOptions, match=words):
        resolve("single_turn", options)


async def test_a_column_that_a_group_function_needs_is_missed_before_the_start() -> None:
    environment = resolve("single_turn", {"group_reward": named("longest")})()
    await environment.reset(task())
    with pytest.raises(ValueError, match="longest needs answers"):
        await environment.reset(
            Task(task_id="t", environment="single_turn", seed=0, data={"prompt": "?"})
        )
