"""A guessing game in a server of OpenEnv; Rayloom needs only its address.

    $ pip install openenv
    $ python docs/examples/openenv_guessing.py --port 8100

docs/worlds.md has the command that trains with it.
"""

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

HIGH, GUESSES = 8, 4


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class Guessing(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._number = random.Random(seed).randint(1, HIGH)
        self._state = State(episode_id=episode_id)
        return Hint(text=f"Guess my number from 1 to {HIGH}. You have {GUESSES} guesses.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        is_hit = action.number == self._number
        hint = "higher" if action.number < self._number else "lower"
        is_over = is_hit or self._state.step_count == GUESSES
        return Hint(text=hint, reward=float(is_hit), done=is_over)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8100)
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=1024)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
