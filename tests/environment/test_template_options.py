"""Tests of options of the chat template, from the configuration to the ids sent to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds.models.chatml import TEMPLATE, chatml_tokenizer
from worlds.parts.environment_fakes import GuessFour

from actors.environment.actor import EnvironmentActor
from actors.environment.chat_template import template_variables
from actors.environment.evaluation import plays_of
from actors.environment.policy import GenerateReply, GenerateRequest
from actors.environment.settings import EnvironmentActorSettings, EnvironmentSettings
from actors.trainer.tiny.tokenizer import build_tokenizer
from actors.types import Task
from service.config.file import ConfigError, dump_config, parse_config
from service.config.tasks import check_prompt, first_observation
from service.config.tree import Config

# Like Qwen3's template: a reply without thinking follows an empty thought.
THINKING = TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}",
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the directory of a tokenizer whose template reads the option enable_thinking."""
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = THINKING
    directory = tmp_path_factory.mktemp("thinker")
    tokenizer.save_pretrained(str(directory))
    return str(directory)


def config_with(model: str, options: dict[str, Any]) -> Config:
    tree = {
        "model": {"path": model},
        "tasks": {"environment": "guessing"},
        "rollouts": {"template_options": options},
    }
    return parse_config(tree, source="test")


class Watched(GuessFour):
    """A policy that records the prompts of its requests."""

    def __init__(self) -> None:
        super().__init__(build_tokenizer().encode("4"), delay_s=0.0)
        self.prompts: list[list[int]] = []

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.prompts.append(request.prompt_token_ids.tolist())
        return await super().generate(request)


async def prompts_under(model: str, options: dict[str, Any]) -> list[list[int]]:
    """Play one episode with template options and return its prompts."""
    policy = Watched()
    actor = EnvironmentActor(
        EnvironmentActorSettings(
            rollouts=config_with(model, options).rollouts,
            environments={"guessing": EnvironmentSettings(environment="guessing", options={})},
            chat_template=None,
            groups_per_step=1,
            max_context_tokens=256,
        ),
        actor_id="e0",
        tokenizer_path=model,
        make_policy=lambda: policy,
        queue=None,
    )
    task = Task(task_id="t", environment="guessing", seed=5)
    await actor.evaluate(plays_of([task], 1))
    assert len(policy.prompts) > 1
    return policy.prompts


async def test_an_option_reaches_every_prompt_of_an_episode(thinker: str) -> None:
    thought = chatml_tokenizer().encode("<think></think>", add_special_tokens=False)
    plain = await prompts_under(thinker, {})
    without = await prompts_under(thinker, {"enable_thinking": False})
    assert without[0] == plain[0] + thought
    assert not any(prompt[-len(thought) :] == thought for prompt in plain)
    assert all(prompt[-len(thought) :] == thought for prompt in without)
    # The next prompt extends the first one and is not rendered again.
    assert np.array_equal(without[1][: len(without[0])], without[0])


def check(config: Config, model: str) -> None:
    check_prompt(config, model, first_observation(config))


def test_options_that_the_template_reads_are_accepted_and_stored(thinker: str) -> None:
    config = config_with(thinker, {"enable_thinking": False})
    check(config, thinker)
    assert "enable_thinking: false" in dump_config(config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_thinkin": False}, "does not read 'enable_thinkin'.*did you mean 'enable_thi"),
        ({"verbose": True}, "does not read 'verbose'.*expected one of enable_thinking"),
        ({"tokenize": True}, "tokenize is the renderer's own"),
        ({"messages": True}, "messages is the renderer's own"),
        ({"chat_template": "x"}, "chat_template is the renderer's own"),
    ],
)
def test_options_without_effect_are_refused(
    thinker: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check(config_with(thinker, options), thinker)


@pytest.mark.parametrize("value", [[1], {"a": 1}])
def test_values_that_are_lists_or_maps_are_refused(value: object) -> None:
    words = r"template_options\.depth: got a (list|dict), expected true, false, a number"
    with pytest.raises(ConfigError, match=words):
        config_with("/models/x", {"depth": value})


def test_variables_of_a_template_are_unknown_if_it_cannot_be_parsed() -> None:
    assert template_variables("{% if a %}{{ b }}{% endif %}{% set c = 1 %}{{ c }}") == {"a", "b"}
    assert template_variables("{% generation %}{{ a }}{% endgeneration %}") is None
    assert template_variables({"default": "{{ a }}"}) is None


def broken_environment(directory: Path, reset: str) -> None:
    (directory / f"{directory.name}.py").write_text(
        "import asyncio\n\n\nclass Broken:\n    async def reset(self, task):\n"
        f"        {reset}\n\n    async def step(self, action): ...\n\n"
        "    async def close(self): ...\n"
    )


@pytest.mark.parametrize(
    ("reset", "words"),
    [
        ("raise OSError('no server')", r"OSError: no server \(.*/game\w*\.py:6 in reset\)"),
        ("return {'text': 'hello'}", "reset of .* returned a dict, expected a rayloom.Observation"),
    ],
)
def test_an_environment_whose_reset_fails_is_refused_with_the_place(
    thinker: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    reset: str,
    words: str,
) -> None:
    # The module has the name of the directory, which is new each time.
    directory = tmp_path_factory.mktemp("game")
    broken_environment(directory, reset)
    monkeypatch.syspath_prepend(directory)
    tree = {"model": {"path": thinker}, "tasks": {"environment": f"{directory.name}:Broken"}}
    with pytest.raises(ConfigError, match=words):
        first_observation(parse_config(tree, source="test"))
