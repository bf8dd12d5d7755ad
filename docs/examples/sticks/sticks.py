"""A game against an opponent, for docs/environment-tutorial.md."""

from __future__ import annotations

import random

from rayloom import Action, Message, Observation, Role, StepResult, Task

RULES = "Sticks lie in a pile. Take 1, 2 or 3; who takes the last one wins."
# A short game that is shown to a pretrained model first, so that it answers with only a number.
GAME = (
    Message(role=Role.USER, content="8 left."),
    Message(role=Role.ASSISTANT, content="2"),
    Message(role=Role.USER, content="3 left."),
    Message(role=Role.ASSISTANT, content="3"),
)


class Sticks:
    """Take one to three sticks in turn with a random opponent; the last stick wins."""

    def __init__(self, *, fewest: int = 5, most: int = 9, shows_game: bool = False) -> None:
        if not 1 <= fewest <= most:
            raise ValueError(
                f"sticks: got fewest={fewest}, most={most}; expected 1 <= fewest <= most"
            )
        self._fewest, self._most, self._shows_game = fewest, most, shows_game
        self._left = 0
        self._dice = random.Random()

    async def reset(self, task: Task) -> Observation:
        # The members of a group share the seed, and so the same pile and the same opponent.
        self._dice = random.Random(task.seed)
        self._left = self._dice.randint(self._fewest, self._most)
        rules = Message(role=Role.SYSTEM, content=RULES)
        shown = GAME if self._shows_game else ()
        return Observation(messages=(rules, *shown, self._pile()), best_return=1.0)

    async def step(self, action: Action) -> StepResult:
        said = action.text.strip()
        taken = int(said) if said in ("1", "2", "3") else 0
        if not 1 <= taken <= self._left:
            return StepResult(terminated=True, is_malformed=True, ended_by_malformed=True)
        self._left -= taken
        if self._left == 0:
            return StepResult(reward=1.0, reward_components={"won": 1.0}, terminated=True)
        self._left -= self._dice.randint(1, min(3, self._left))
        if self._left == 0:
            return StepResult(reward_components={"won": 0.0}, terminated=True)
        return StepResult(messages=(self._pile(),))

    async def close(self) -> None: ...

    def _pile(self) -> Message:
        return Message(role=Role.USER, content=f"{self._left} left.")
