"""Adapter for gymnasium: environments that can be played in text.

The policy is shown an observation of `spaces.Text` unchanged. For any other space, the policy is
shown the environment's `ansi` rendering, in which a coloured text F is written as [F]. Without such
a rendering, the policy is shown the values of the observation. Their space must be Discrete,
MultiDiscrete, MultiBinary, Tuple or Dict. The policy writes the name of a Discrete action, or a
text of a Text space. Other action spaces are refused.

The reward is the environment's own (component `score`). A reply that is not an action costs
`malformed_penalty` (component `malformed`) and changes nothing. More than `max_malformed` such
replies in a row end the game. A game that gymnasium's time limit ends is truncated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Annotated, Any

from actors.environment.builtin.reasoning_gym_env import extract_answer
from actors.environment.protocol import Action, Message, Observation, Role, StepResult
from actors.environment.tool_turns import MalformedTurns, TurnOptions
from actors.limits import STRICT
from actors.options import JsonObject, UserCode, holding
from actors.types import Task
from actors.user_code import in_thread

GYMNASIUM = "gymnasium"
PROMPT = "{observation}\nActions: {actions}. Answer with one of them."
TEXT_PROMPT = "{observation}"
NO_ACTION = "Answer with one of: {actions}."
NO_TEXT = "The game does not accept this answer."
# The names of actions in gymnasium's documentation.
ACTION_NAMES: Mapping[str, Sequence[str]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
MAX_ACTIONS = 100
_COLOURED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def import_gymnasium() -> ModuleType:
    """Import the optional package gymnasium. Raises: ImportError with the remedy."""
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(
            "environment gymnasium: the package gymnasium is not installed; install it with: "
            "pip install 'rayloom[gymnasium]'"
        ) from error
    return gymnasium


@dataclass(frozen=True, slots=True, kw_only=True)
class GymnasiumOptions(TurnOptions):
    """Options of `gymnasium`: the environment, and how the policy sees it."""

    __pydantic_config__ = STRICT

    id: UserCode
    """A registered environment, such as FrozenLake-v1, or module:Name-v0."""
    kwargs: Mapping[str, Any] | None = None
    """Further arguments of `gymnasium.make`."""
    actions: tuple[str, ...] | None = None
    """Names of a Discrete space's actions, in order; null: the names in gymnasium's documentation
    if Rayloom has them, otherwise numbers."""
    prompt: Annotated[str, holding("{observation}")] | None = None
    """Text of the first message, with {observation} and {actions}; null: a general text."""
    step_prompt: Annotated[str, holding("{observation}")] = "{observation}"
    """Text of later messages."""
    best_return: float | None = None
    """The highest possible return; null: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GymnasiumData:
    """The data of a task for the environment `gymnasium`."""

    __pydantic_config__ = STRICT

    kwargs: JsonObject = field(default_factory=dict)
    """Arguments of gymnasium.make for this task, besides the option kwargs."""
    options: JsonObject = field(default_factory=dict)
    """Options of the environment's reset."""


class GymnasiumEnvironment:
    """An environment that plays one gymnasium game as text."""

    data_schema = GymnasiumData

    def __init__(self, options: GymnasiumOptions) -> None:
        gym = import_gymnasium()
        try:
            spec = gym.spec(options.id)
        except (gym.error.Error, ImportError) as error:
            raise ValueError(
                f"id: got {options.id!r}, expected a registered environment, such as "
                f"FrozenLake-v1, or module:Name-v0 ({error})"
            ) from error
        self._options = options
        self._game = _Game(spec, options.kwargs or {}, options.actions)
        self._malformed = MalformedTurns(
            at_most=options.max_malformed, penalty=options.malformed_penalty
        )

    async def reset(self, task: Task) -> Observation:
        self._malformed.begin_anew()
        shown = await in_thread(partial(self._game.begin, task.seed, task.data))
        names = ", ".join(self._game.names)
        prompt = self._options.prompt or (PROMPT if names else TEXT_PROMPT)
        content = prompt.replace("{actions}", names).replace("{observation}", shown)
        first = Message(role=Role.USER, content=content)
        return Observation(messages=(first,), best_return=self._options.best_return)

    async def step(self, action: Action) -> StepResult:
        answer = extract_answer(action.text)
        play = partial(self._game.play, answer, self._options.step_prompt)
        if (result := await in_thread(play)) is None:
            names = ", ".join(self._game.names)
            content = NO_ACTION.format(actions=names) if names else NO_TEXT
            return self._malformed.malformed_result((Message(role=Role.USER, content=content),))
        self._malformed.begin_anew()
        return result

    async def close(self) -> None:
        await in_thread(self._game.close)


class _Game:
    """A game in gymnasium. The methods of this class block the thread."""

    def __init__(self, spec: Any, kwargs: Mapping[str, Any], names: Sequence[str] | None) -> None:
        self._spec = spec
        self._kwargs = dict(kwargs)
        self._given_names = names
        self._env: Any = None
        self._renders = False
        self.names: Sequence[str] = ()
        """Names of the actions; empty if an action is any text."""

    def begin(self, seed: int, data: Mapping[str, Any]) -> str:
        """Begin an episode; return the first observation.

        Raises: ValueError if a space cannot be played in text, or if the names of the actions do
        not fit the action space.
        """
        gym = import_gymnasium()
        self.close()
        kwargs = {**self._kwargs, **data.get("kwargs", {})}
        self._env = gym.make(self._spec, disable_env_checker=True, **kwargs)
        spaces = gym.spaces
        if "ansi" in (self._env.metadata.get("render_modes") or ()):
            is_text = isinstance(self._env.observation_space, spaces.Text)
            if not is_text and "render_mode" not in kwargs:
                self._env.close()
                kwargs["render_mode"] = "ansi"
                self._env = gym.make(self._spec, disable_env_checker=True, **kwargs)
        self._renders = self._env.render_mode == "ansi"
        self.names = self._names(spaces)
        if not self._renders:
            self._check_observations(spaces, self._env.observation_space)
        # Most generators take seeds below 2^32.
        observation, _ = self._env.reset(seed=seed % 2**31, options=data.get("options"))
        return self._shown(observation)

    def play(self, answer: str, prompt: str) -> StepResult | None:
        """Make a move; return None if the answer is not an action.

        prompt: a template for the next message; the observation replaces {observation}.
        """
        action = self._action(answer)
        if action is None:
            return None
        observation, reward, is_terminated, is_truncated, _ = self._env.step(action)
        content = prompt.replace("{observation}", self._shown(observation))
        is_over = is_terminated or is_truncated
        return StepResult(
            messages=() if is_over else (Message(role=Role.USER, content=content),),
            reward=float(reward),
            reward_components={"score": float(reward)},
            terminated=bool(is_terminated),
            truncated=bool(is_truncated and not is_terminated),
        )

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _names(self, spaces: Any) -> Sequence[str]:
        space = self._env.action_space
        if isinstance(space, spaces.Text):
            return ()
        if not isinstance(space, spaces.Discrete) or space.n > MAX_ACTIONS:
            raise ValueError(
                f"gymnasium: {self._spec.id}: got actions of {space}, expected a Discrete space of "
                f"at most {MAX_ACTIONS}, or a Text space"
            )
        first = int(space.start)
        numbers = [str(number) for number in range(first, first + int(space.n))]
        names = self._given_names or ACTION_NAMES.get(self._spec.name, numbers)
        folded = {_folded(name) for name in names}
        if len(names) != space.n or len(folded) != space.n or "" in folded:
            raise ValueError(
                f"gymnasium: {self._spec.id}: got {len(names)} names of actions, {len(folded)} of "
                f"them different, expected {space.n}; correct tasks.options.actions"
            )
        return names

    def _check_observations(self, spaces: Any, space: Any) -> None:
        parts: Any = space.spaces if isinstance(space, spaces.Tuple | spaces.Dict) else ()
        for part in parts.values() if isinstance(space, spaces.Dict) else parts:
            self._check_observations(spaces, part)
        shown = (
            spaces.Text, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary,
            spaces.Tuple, spaces.Dict,
        )  # fmt: skip
        if not isinstance(space, shown):
            raise ValueError(
                f"gymnasium: {self._spec.id}: got observations of {space} and no rendering as "
                "ansi; expected a rendering as ansi, or observations of text or discrete values"
            )

    def _action(self, answer: str) -> Any:
        space = self._env.action_space
        if not self.names:
            return answer if space.contains(answer) else None
        places = {_folded(name): number for number, name in enumerate(self.names)}
        place = places.get(_folded(answer))
        return None if place is None else int(space.start) + place

    def _shown(self, observation: Any) -> str:
        text = self._env.render() if self._renders else _format_observation(observation)
        text = text if isinstance(text, str) else str(text)
        bracketed = _ESCAPE.sub("", _COLOURED.sub(r"[\1]", text))
        return bracketed.strip("\n").encode(errors="replace").decode()


def _folded(name: str) -> str:
    return name.strip().rstrip(".!").strip().casefold()


def _format_observation(observation: Any) -> str:
    """Return an observation as text, with numbers of numpy as plain numbers: np.int64(1) as 1."""
    if isinstance(observation, str):
        return observation
    return str(_plain(observation))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.tolist() if hasattr(value, "tolist") else value
