"""Adapter for skyrl-gym: subclasses of its `BaseTextEnv`, from the package or by a user.

A task's data have `prompt`, a text or the messages of a chat; everything else is the environment's
`extras`, such as `reward_spec`. The environment's `step` receives the whole text of a turn. The
reward is the component `score`. At the end of the episode, the environment's numeric metrics are
components too.

Deviation: if an environment returns a shortened action (`postprocessed_action`), the history keeps
the sampled text, because its tokens are trained. Calls of the package may block, so that they run
in threads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from types import ModuleType
from typing import Any

from actors.environment.builtin.single_turn import chat_message, check_prompt
from actors.environment.protocol import Action, Message, Observation, StepResult
from actors.environment.task_data import PROMPT_DATA
from actors.environment.user_names import find
from actors.limits import STRICT
from actors.options import UserCode
from actors.types import Task
from actors.user_code import in_thread

SKYRL_GYM = "skyrl_gym"
# The types of a message's parts, such as text, image_url and input_audio.
_PART = re.compile(
    r"text|file|document|refusal|thinking|reasoning|(?:image|audio|video|input)(?:_\w+)?"
    r"|(?:tool|output)_\w+"
)


def import_skyrl_gym() -> ModuleType:
    """Import the optional package skyrl-gym. Raises: ImportError with the remedy."""
    try:
        import skyrl_gym
    except ImportError as error:
        raise ImportError(
            "environment skyrl_gym: the package skyrl-gym is not installed, or one that it needs "
            f"({error}); install it with: pip install 'rayloom[skyrl-gym]'"
        ) from error
    return skyrl_gym


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyRLGymOptions:
    """Options of `skyrl_gym`: the environment and its configuration."""

    __pydantic_config__ = STRICT

    id: UserCode
    """A registered name, such as gsm8k, or your own environment, as FILE.py:CLASS."""
    env_config: Mapping[str, Any] | None = None
    """The argument `env_config` of the environment."""


class SkyRLGymEnvironment:
    """An environment that plays one episode of a skyrl-gym environment."""

    data_schema = PROMPT_DATA

    def __init__(self, options: SkyRLGymOptions) -> None:
        id = options.id
        gym = import_skyrl_gym()
        spec: Any = gym.registry.get(id)
        if ":" in id:
            from skyrl_gym.envs.registration import EnvSpec

            spec = EnvSpec(id=id, entry_point=find(id, what="tasks.options.id"))
        if spec is None:
            raise ValueError(
                f"id: got {id!r}, expected one of {', '.join(sorted(gym.registry))}, "
                "or your own environment as FILE.py:CLASS"
            )
        self._make = partial(_make, spec, dict(options.env_config or {}))
        self._env: Any = None

    def check_data(self, data: Mapping[str, Any]) -> None:
        """Check that the prompt's messages can be read. Raises: ValueError if one cannot."""
        check_prompt(data["prompt"])

    async def reset(self, task: Task) -> Observation:
        await self.close()
        extras = {name: value for name, value in task.data.items() if name != "prompt"}
        self._env = await in_thread(partial(self._make, extras))
        given = task.data["prompt"]
        chat = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        shown, _ = await in_thread(partial(self._env.init, chat))
        return Observation(messages=_messages(shown))

    async def step(self, action: Action) -> StepResult:
        output = await in_thread(partial(self._env.step, action.text))
        is_over, reward = bool(output["done"]), float(output["reward"])
        components = {"score": reward}
        if is_over:
            components |= _numbers(await in_thread(self._env.get_metrics))
        return StepResult(
            messages=_messages([] if is_over else output["observations"]),
            reward=reward,
            reward_components=components,
            terminated=is_over,
        )

    async def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await in_thread(env.close)


def _make(spec: Any, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> Any:
    from omegaconf import OmegaConf

    # The package's environments read the configuration by attributes.
    config = OmegaConf.create(dict(env_config))
    return import_skyrl_gym().make(spec, env_config=config, extras=dict(extras))


def _messages(chat: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    messages = []
    for number, each in enumerate(chat, start=1):
        try:
            messages.append(chat_message({**each, "content": _content(each)}))
        except ValueError as error:
            raise ValueError(f"skyrl_gym: the environment's message {number}: {error}") from error
    return tuple(messages)


def _content(message: Mapping[str, Any]) -> Any:
    """Return a message's content if it is a list of parts; otherwise return it as text."""
    given = message.get("content")
    is_parts = isinstance(given, list | tuple) and (
        any(map(_is_text, given)) or all(map(_is_part, given))
    )
    # A number, or a list of other values such as objects with a `type` of their own, becomes text.
    return given if is_parts else "" if given is None else str(given)


def _is_text(part: object) -> bool:
    if not isinstance(part, Mapping):
        return False
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_part(part: object) -> bool:
    return isinstance(part, Mapping) and bool(_PART.fullmatch(str(part.get("type"))))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, Real) and math.isfinite(value)
    }
