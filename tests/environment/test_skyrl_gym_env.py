"""Tests of the adapter for environments of skyrl-gym, built-in ones and a user's."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from worlds.checks.missing_tools import need_package

from actors.environment.builtin.single_turn import chat_message
from actors.environment.builtin.skyrl_gym_env import SkyRLGymEnvironment, SkyRLGymOptions
from actors.environment.protocol import Action, Role, StepResult
from actors.environment.registry import BadEnvironmentOptions, resolve
from actors.environment.task_data import DataCheck, check_of, data_schema_of
from actors.types import Task

SUM = {"prompt": "What is 3+4?", "reward_spec": {"ground_truth": "7"}}


@pytest.fixture(autouse=True)
def _package() -> None:
    need_package("skyrl_gym", "skyrl-gym")


def _task(**data: Any) -> Task:
    return Task(task_id="t", environment="skyrl_gym", seed=0, data=data)


def counting(env_config: Any, extras: dict[str, Any]) -> Any:
    """Return a user's environment that counts its turns."""
    from skyrl_gym.envs.base_text_env import BaseTextEnv

    class Counting(BaseTextEnv):  # type: ignore[misc]
        def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
            return [{"role": "system", "content": f"From {extras['start']}."}, *prompt], {}

        def step(self, action: str) -> dict[str, Any]:
            self.turns += 1
            role = "assistant" if action == "odd" else "tool"
            seen = json.loads(action) if action.startswith(("[", "0")) else f"{action}!"
            return {
                "observations": [{"role": role, "content": seen}],
                "reward": 0.5,
                "done": self.turns == env_config.limit,
                "metadata": {},
                "postprocessed_action": "cut",
            }

        def get_metrics(self) -> dict[str, Any]:
            return {"turns": self.turns, "name": "x", "lost": float("nan")}

    return Counting()


COUNTING: dict[str, Any] = {
    "id": "tests/environment/test_skyrl_gym_env.py:counting",
    "env_config": {"limit": 2},
}


async def _answered(environment: SkyRLGymEnvironment, text: str) -> StepResult:
    return await environment.step(Action(text=text))


@pytest.mark.parametrize(("text", "reward"), [("#### 7", 1.0), ("7", 0.0), ("#### 8", 0.0)])
async def test_an_answer_is_scored_by_the_environment(text: str, reward: float) -> None:
    environment = SkyRLGymEnvironment(SkyRLGymOptions(id="gsm8k"))
    start = await environment.reset(_task(**SUM))
    assert start.messages[0].content == "What is 3+4?"
    result = await _answered(environment, text)
    assert result.terminated and result.reward == reward
    assert result.reward_components == {"score": reward}
    await environment.close()


async def test_several_turns_are_played() -> None:
    environment = SkyRLGymEnvironment(SkyRLGymOptions(id="gsm8k_multi_turn"))
    await environment.reset(_task(**SUM, max_turns=3))
    first = await _answered(environment, "well")
    assert not first.terminated and "#### ANSWER" in first.messages[0].content
    last = await _answered(environment, "#### 7")
    assert last.terminated and last.reward_components == {"score": 1.0, "steps": 2.0}
    await environment.close()


async def test_a_users_environment_is_found_and_configured() -> None:
    environment = resolve("skyrl_gym", COUNTING)()
    prompt = [{"role": "user", "content": "Go."}]
    start = await environment.reset(_task(prompt=prompt, start=3))
    assert [(each.role, each.content) for each in start.messages] == [
        (Role.SYSTEM, "From 3."),
        (Role.USER, "Go."),
    ]
    first = await environment.step(Action(text="one"))
    assert [(each.role, each.content) for each in first.messages] == [(Role.TOOL, "one!")]
    last = await environment.step(Action(text="two"))
    assert last.terminated and last.messages == ()
    # Metrics that are not numbers are left out.
    assert last.reward_components == {"score": 0.5, "turns": 2.0}
    await environment.close()


async def test_a_message_of_the_assistant_is_refused() -> None:
    environment = SkyRLGymEnvironment(SkyRLGymOptions(**COUNTING))
    await environment.reset(_task(prompt="Go.", start=3))
    with pytest.raises(ValueError, match="got a message of role 'assistant'"):
        await environment.step(Action(text="odd"))
    await environment.close()


async def test_messages_are_read_as_those_of_a_data_set() -> None:
    call = {"id": "c1", "function": {"name": "calc", "arguments": '{"sum": "2+2"}'}}
    prompt = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "calc", "content": "4"},
        {"role": "assistant", "content": "4", "reasoning_content": "calc said 4"},
        {"role": "user", "content": "What is 3+4?"},
    ]
    data = {**SUM, "prompt": prompt}
    environment = SkyRLGymEnvironment(SkyRLGymOptions(id="gsm8k"))
    assert check_of(environment).problem(data) == ""
    shown = (await environment.reset(_task(**data))).messages
    assert shown == tuple(map(chat_message, prompt))
    assert [each.content for each in shown[:3]] == ["Be brief.", "2+2?", ""]
    assert shown[2].call_texts == (("c1", "calc", '{"sum": "2+2"}'),)
    assert shown[3].tool_call_id == "c1" and shown[4].reasoning == "calc said 4"


async def test_an_observation_may_have_text_parts_and_a_number_but_no_image() -> None:
    environment = SkyRLGymEnvironment(SkyRLGymOptions(**COUNTING))
    for given, shown in (
        ('[{"type": "text", "text": "Again."}]', "Again."),
        ("0", "0"),
        ('["a", 1]', "['a', 1]"),
        ('[{"type": "enemy", "hp": 3}]', "[{'type': 'enemy', 'hp': 3}]"),
    ):
        await environment.reset(_task(prompt="Go.", start=3))
        assert (await _answered(environment, given)).messages[0].content == shown
    kinds = ("image_url", "input_audio", "video", "file", "document", "refusal", "thinking")
    for kind in (*kinds, "reasoning", "tool_result", "output_text"):
        await environment.reset(_task(prompt="Go.", start=3))
        wrong = rf"the environment's message 1: content\[0\]: got a dict of type '{kind}', expected"
        with pytest.raises(ValueError, match=wrong):
            await _answered(environment, f'[{{"type": "{kind}"}}]')
    # A list with a text part is a list of parts, whatever its other members are.
    for other in ('{"type": "new_kind"}', '"b"'):
        await environment.reset(_task(prompt="Go.", start=3))
        with pytest.raises(
            ValueError, match=r"message 1: content\[1\]: got .*, expected a text part"
        ):
            await _answered(environment, f'[{{"type": "text", "text": "a"}}, {other}]')
    await environment.close()


async def test_a_user_message_of_the_environment_may_lack_its_content() -> None:
    environment = SkyRLGymEnvironment(SkyRLGymOptions(**COUNTING))
    silent = {"role": "user", "content": None}
    start = await environment.reset(_task(prompt=[silent, {"role": "user"}], start=3))
    assert [each.content for each in start.messages] == ["From 3.", "", ""]
    await environment.close()


async def test_missing_task_data_are_an_error_of_the_reset() -> None:
    with pytest.raises(AssertionError, match="reward_spec"):
        await SkyRLGymEnvironment(SkyRLGymOptions(id="gsm8k")).reset(_task(prompt="What is 3+4?"))


def test_data_are_checked_before_they_are_played() -> None:
    check = DataCheck(data_schema_of(SkyRLGymEnvironment(SkyRLGymOptions(id="gsm8k"))))
    assert check.problem(SUM) == ""
    assert check.problem({}) == "data: prompt missing; give it"


def test_a_message_without_content_is_refused_and_not_shown_as_none() -> None:
    check = check_of(SkyRLGymEnvironment(SkyRLGymOptions(id="gsm8k")))
    asked = {"role": "user", "content": None}
    assert check.problem({**SUM, "prompt": [asked]}).startswith("prompt[0]: the content of a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "nothing"}, r"id: got 'nothing', expected one of aime, .*gsm8k"),
        ({"id": "tests/environment/test_skyrl_gym_env.py:nothing"}, "has no attribute 'nothing'"),
        ({}, "options.id: missing"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadEnvironmentOptions, match=message):
        resolve("skyrl_gym", options)


def test_a_missing_package_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'rayloom\[skyrl-gym\]'"):
        resolve("skyrl_gym", {"id": "gsm8k"})
