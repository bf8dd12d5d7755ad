"""Adapter for textarena: games for one player, and games for two against a scripted opponent.

- Move: the visible text of a reply, unchanged. Most games require square brackets, and say so.
- Observation: the game's messages since the policy's last move, without the policy's own moves.
- Reward: the reward that textarena gives at the end of the game, as the component `score`.
- Refused move: a malformed turn. Most games end after two refused moves in a row. The reward is
  then at most 0, although textarena rewards partial progress in some games.

The optional package is imported only when it is first used. Its calls may block, so they run in
threads. textarena draws from the global random generators of Python and numpy. Each game has its
own states of the generators, which are restored before each move. So a game depends only on its
seed, and only one game of a process moves at a time. Other threads that draw random numbers during
a move can still change the course of the game.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from actors.environment.protocol import Action, Message, Observation, Role, StepResult
from actors.environment.task_data import NO_DATA
from actors.environment.tool_calls import visible_text
from actors.environment.user_names import find
from actors.limits import STRICT
from actors.options import UserCode
from actors.types import Task
from actors.user_code import in_thread

TEXTARENA = "textarena"
MAX_OPPONENT_MOVES = 200
_moving = threading.Lock()

Opponent = Callable[[str], str]
"""A function that returns the opponent's move, given all text that the opponent has been shown."""


def import_textarena() -> ModuleType:
    """Import the optional package textarena. Raises: ImportError with the remedy."""
    try:
        import textarena
    except ImportError as error:
        raise ImportError(
            "environment textarena: the package textarena is not installed, or one that it needs "
            f"({error}); install it with: pip install 'rayloom[textarena]'"
        ) from error
    return textarena


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArenaOptions:
    """Options of `textarena`: the game and the opponent."""

    __pydantic_config__ = STRICT

    game: str
    """A name of textarena's registry, such as GuessTheNumber-v0."""
    kwargs: Mapping[str, Any] | None = None
    """Further arguments of `textarena.make`."""
    opponent: UserCode | None = None
    """The opponent, a function from a text to a text, as FILE.py:FUNCTION; null: a game for one
    player. Against an opponent the policy is the first player if the task's seed is even, else the
    second."""
    best_return: float | None = None
    """The highest possible return; null: unknown."""


class TextArenaEnvironment:
    """An environment that plays one textarena game."""

    data_schema = NO_DATA

    def __init__(self, options: TextArenaOptions) -> None:
        arena = import_textarena()
        from textarena.envs.registration import ENV_REGISTRY

        game, opponent = options.game, options.opponent
        if game not in ENV_REGISTRY:
            raise ValueError(
                f"game: got {game!r}, expected a name of its registry, such as GuessTheNumber-v0"
            )
        # Games without wrappers give their messages one by one.
        raw = f"{game}-raw"
        make = partial(arena.make, raw if raw in ENV_REGISTRY else game, **(options.kwargs or {}))
        play = None if opponent is None else find(opponent, what="tasks.options.opponent")
        if play is not None and not callable(play):
            raise ValueError(
                f"opponent: got {opponent!r}, of type {type(play).__name__}, expected a "
                "function from a text to a text"
            )
        self._game = _Game(make, play)
        self._best_return = options.best_return

    async def reset(self, task: Task) -> Observation:
        begun = await in_thread(partial(self._game.begin, task.seed))
        return Observation(messages=begun.messages, best_return=self._best_return)

    async def step(self, action: Action) -> StepResult:
        return await in_thread(partial(self._game.play, visible_text(action.text)))

    async def close(self) -> None:
        return None


class _Game:
    """A game in textarena. The methods of this class block the thread."""

    def __init__(self, make: Callable[[], Any], opponent: Opponent | None) -> None:
        self._make = make
        self._opponent = opponent
        self._dice: tuple[Any, Any] = (None, None)
        self._env: Any = None
        self._seat = 0
        self._shown_to_opponent = ""

    def begin(self, seed: int) -> StepResult:
        # Generators of numpy, and some games, take seeds below 2^32.
        seed %= 2**31
        self._dice = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        self._seat = seed % 2 if self._opponent is not None else 0
        self._shown_to_opponent = ""
        with self._own_dice():
            self._env = self._make()
            self._env.reset(num_players=1 if self._opponent is None else 2, seed=seed)
            return self._until_own_turn(is_over=False, is_refused=False)

    def play(self, move: str) -> StepResult:
        with self._own_dice():
            num_before = self._num_refused()
            is_over, _ = self._env.step(move)
            is_refused = self._num_refused() > num_before
            return self._until_own_turn(is_over=is_over, is_refused=is_refused)

    def _until_own_turn(self, *, is_over: bool, is_refused: bool) -> StepResult:
        for _ in range(MAX_OPPONENT_MOVES):
            if is_over:
                return self._ended()
            seat, observed = self._env.get_observation()
            text = _format_observation(observed, seat)
            if seat == self._seat:
                message = Message(role=Role.USER, content=text)
                return StepResult(messages=(message,), is_malformed=is_refused)
            if self._opponent is None:
                break
            self._shown_to_opponent += text + "\n"
            is_over, _ = self._env.step(str(self._opponent(self._shown_to_opponent)))
        raise ValueError(
            f"textarena: {self._env.env_id}: seat {self._seat} gets no further turn; expected a "
            f"game for {'one player' if self._opponent is None else 'two'}, who take turns"
        )

    def _num_refused(self) -> int:
        """Return how many moves in a row were refused; 0 if the game does not count them."""
        return getattr(self._env.state, "error_count", 0)

    def _ended(self) -> StepResult:
        rewards, info = self._env.close()
        if not rewards or self._seat not in rewards:
            raise ValueError(
                f"textarena: {self._env.env_id}: ended without a reward for seat {self._seat}"
            )
        is_refused = bool((info or {}).get(self._seat, {}).get("invalid_move", False))
        reward = float(rewards[self._seat])
        if is_refused:
            reward = min(reward, 0.0)
        return StepResult(
            reward=reward,
            reward_components={"score": reward},
            terminated=True,
            is_malformed=is_refused,
            ended_by_malformed=is_refused,
        )

    @contextmanager
    def _own_dice(self) -> Iterator[None]:
        with _moving:
            others = random.getstate(), np.random.get_state()
            self._set_dice(self._dice)
            try:
                yield
            finally:
                self._dice = random.getstate(), np.random.get_state()
                self._set_dice(others)

    @staticmethod
    def _set_dice(dice: tuple[Any, Any]) -> None:
        random.setstate(dice[0])
        np.random.set_state(dice[1])


def _format_observation(observation: Any, seat: int) -> str:
    """Return an observation as text for the player number `seat`, without this player's moves."""
    # A game with wrappers gives a text.
    if isinstance(observation, str):
        return observation
    texts = []
    for sender, text, kind in observation:
        if sender == seat and kind.name == "PLAYER_ACTION":
            continue
        is_move = kind.name == "PLAYER_ACTION"
        texts.append(f"Player {sender}: {text}" if is_move else str(text).strip("\n"))
    return "\n".join(texts).encode(errors="replace").decode()
