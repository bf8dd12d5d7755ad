"""Tests of the adapter that plays environments of gymnasium in text."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, ClassVar

import numpy as np
import pytest
from worlds.checks.missing_tools import need_package

from actors.environment.builtin.gymnasium_env import GymnasiumEnvironment, GymnasiumOptions
from actors.environment.protocol import Action, StepResult
from actors.environment.registry import BadEnvironmentOptions, resolve
from actors.environment.task_data import DataCheck, data_schema_of
from actors.types import Task

STILL = {"is_slippery": False}
# The moves from the start to the goal of the default map of FrozenLake.
WAY = ["down", "down", "right", "right", "down", "right"]


@pytest.fixture(autouse=True)
def _package() -> None:
    need_package("gymnasium", "gymnasium")


def _task(seed: int = 0, **data: Any) -> Task:
    return Task(task_id="t", environment="gymnasium", seed=seed, data=data)


async def _play(environment: GymnasiumEnvironment, *answers: str) -> list[StepResult]:
    return [await environment.step(Action(text=answer)) for answer in answers]


async def test_frozen_lake_is_shown_as_text_and_can_be_won() -> None:
    environment = GymnasiumEnvironment(
        GymnasiumOptions(id="FrozenLake-v1", kwargs=STILL, best_return=1.0)
    )
    start = await environment.reset(_task())
    assert start.best_return == 1.0
    assert start.messages[0].content == (
        "[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up. Answer with one of them."
    )
    results = await _play(environment, *WAY)
    assert results[0].messages[0].content == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [result.reward for result in results] == [0, 0, 0, 0, 0, 1]
    assert results[-1].terminated and results[-1].reward_components == {"score": 1.0}
    assert results[-1].messages == ()
    await environment.close()


@pytest.mark.parametrize(
    "answer", ["down", " Down.\n", "<think>left</think>DOWN", "I go <answer>down</answer> now"]
)
async def test_an_action_is_chosen_by_its_name(answer: str) -> None:
    environment = GymnasiumEnvironment(GymnasiumOptions(id="FrozenLake-v1", kwargs=STILL))
    await environment.reset(_task())
    (result,) = await _play(environment, answer)
    assert result.messages[0].content.startswith("  (Down)")
    await environment.close()


async def test_an_answer_without_an_action_is_malformed_and_several_end_the_episode() -> None:
    environment = GymnasiumEnvironment(
        GymnasiumOptions(id="FrozenLake-v1", kwargs=STILL, max_malformed=2)
    )
    await environment.reset(_task())
    results = await _play(environment, "go down", "", "down", "1", "x", "y")
    assert [result.is_malformed for result in results] == [True, True, False, True, True, True]
    assert results[0].messages[0].content == "Answer with one of: left, down, right, up."
    assert results[0].reward == -0.1
    assert results[2].messages[0].content == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [result.ended_by_malformed for result in results] == [False] * 5 + [True]
    await environment.close()


async def test_action_names_and_prompts_are_options() -> None:
    environment = GymnasiumEnvironment(
        GymnasiumOptions(
            id="FrozenLake-v1",
            kwargs=STILL,
            actions=["1", "2", "3", "4"],
            prompt="{observation}|{actions}",
            step_prompt="now:{observation}",
        )
    )
    start = await environment.reset(_task())
    assert start.messages[0].content == "[S]FFF\nFHFH\nFFFH\nHFFG|1, 2, 3, 4"
    (result,) = await _play(environment, "3")
    assert result.messages[0].content.startswith("now:  (Right)\nS[F]FF")
    await environment.close()


async def test_a_task_may_name_its_own_game() -> None:
    environment = GymnasiumEnvironment(GymnasiumOptions(id="FrozenLake-v1", kwargs=STILL))
    start = await environment.reset(_task(kwargs={"desc": ["SG"]}))
    assert start.messages[0].content.startswith("[S]G\n")
    (result,) = await _play(environment, "right")
    assert result.reward == 1.0 and result.terminated
    await environment.close()


async def test_a_time_limit_truncates() -> None:
    environment = GymnasiumEnvironment(
        GymnasiumOptions(id="FrozenLake-v1", kwargs={**STILL, "max_episode_steps": 2})
    )
    await environment.reset(_task())
    first, second = await _play(environment, "left", "left")
    assert not first.truncated
    assert second.truncated and not second.terminated
    await environment.close()


async def test_the_same_seed_is_the_same_game() -> None:
    async def played(seed: int) -> tuple[str, ...]:
        environment = GymnasiumEnvironment(GymnasiumOptions(id="Blackjack-v1"))
        start = await environment.reset(_task(seed))
        (result,) = await _play(environment, "hit")
        await environment.close()
        return tuple(message.content for message in (*start.messages, *result.messages))

    seeds = [0, 1, 2, 3, 2**31 - 1, 2**31 + 1]
    first, second = [await asyncio.gather(*map(played, seeds)) for _ in range(2)]
    assert first == second and len(set(first)) > 3
    # Numbers are written as Python writes them: 1, not np.int64(1).
    assert "(" in first[0][0] and "np" not in first[0][0]


def _register(name: str, observed: Any, actions: Any) -> str:
    import gymnasium

    class Parrot(gymnasium.Env[Any, Any]):
        metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human"]}
        observation_space, action_space = observed, actions
        render_mode = None

        def reset(self, **given: Any) -> Any:
            super().reset(seed=given["seed"])
            return self._seen("hello", 1), {}

        def step(self, action: Any) -> Any:
            return self._seen(str(action), 2), 1.0, action == "bye", False, {}

        def _seen(self, text: str, number: int) -> Any:
            is_text = isinstance(observed, gymnasium.spaces.Text)
            return text if is_text else {"n": np.int64(number), "v": (np.array([number, 3]),)}

    gymnasium.register(f"{name}-v0", entry_point=Parrot)
    return f"{name}-v0"


async def test_texts_are_observed_and_answered_as_they_are() -> None:
    import gymnasium

    text = gymnasium.spaces.Text(20, charset="abehloy \x1b[0m\udc80")
    id = _register("Parrot", text, gymnasium.spaces.Text(5))
    environment = GymnasiumEnvironment(GymnasiumOptions(id=id))
    start = await environment.reset(_task())
    assert start.messages[0].content == "hello"
    results = await _play(environment, "abc", "too long a text", "bye")
    assert [result.messages[0].content for result in results[:2]] == [
        "abc",
        "The game does not accept this answer.",
    ]
    assert results[-1].terminated
    await environment.close()


async def test_nested_observations_of_numbers_are_shown() -> None:
    from gymnasium import spaces

    seen = spaces.Dict({"n": spaces.Discrete(5), "v": spaces.Tuple([spaces.MultiDiscrete([9, 9])])})
    environment = GymnasiumEnvironment(
        GymnasiumOptions(id=_register("Numbers", seen, spaces.Discrete(2, start=3)))
    )
    start = await environment.reset(_task())
    assert start.messages[0].content.startswith("{'n': 1, 'v': ([1, 3],)}\nActions: 3, 4.")
    await environment.close()


async def test_spaces_that_text_cannot_show_are_refused() -> None:
    from gymnasium import spaces

    seen, box = spaces.Discrete(2), spaces.Box(0, 1)
    for name, observed, actions, message in (
        ("A", box, seen, "got observations of Box"),
        ("B", spaces.Tuple([box]), seen, "got observations of Box"),
        ("C", seen, box, "got actions of Box"),
        ("D", seen, spaces.Discrete(101), "at most 100"),
    ):
        environment = GymnasiumEnvironment(GymnasiumOptions(id=_register(name, observed, actions)))
        with pytest.raises(ValueError, match=message):
            await environment.reset(_task())
        await environment.close()


@pytest.mark.parametrize("actions", [["left"], ["a", "b", "c", "A"], ["a", "b", "c", " ."]])
async def test_names_that_do_not_fit_the_actions_are_refused(actions: list[str]) -> None:
    environment = GymnasiumEnvironment(GymnasiumOptions(id="FrozenLake-v1", actions=actions))
    with pytest.raises(ValueError, match=r"tasks\.options\.actions"):
        await environment.reset(_task())
    await environment.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "Chess-v9"}, "id: got 'Chess-v9', expected a registered environment"),
        ({"id": "no_such_module:Chess-v9"}, "no_such_module"),
        ({}, "options.id: missing"),
        ({"id": "FrozenLake-v1", "prompt": "go"}, "prompt: got 'go'"),
        (
            {"id": "FrozenLake-v1", "malformed_penalty": -1},
            "malformed_penalty: got -1, expected 0",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadEnvironmentOptions, match=message):
        resolve("gymnasium", options)


def test_data_are_checked_before_they_are_played() -> None:
    check = DataCheck(data_schema_of(GymnasiumEnvironment(GymnasiumOptions(id="FrozenLake-v1"))))
    assert check.problem({}) == check.problem({"kwargs": {"map_name": "8x8"}}) == ""
    assert "unknown fields map_name" in check.problem({"map_name": "8x8"})
    assert check.problem({"options": None}) == "data.options: got null, expected object; correct it"


def test_a_missing_package_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install 'rayloom\[gymnasium\]'"):
        resolve("gymnasium", {"id": "FrozenLake-v1"})
