"""A guessing game as MCP tools in a server of OpenEnv; Rayloom needs only its address.

    $ pip install openenv fastmcp
    $ python docs/examples/openenv_tools.py --port 8100

docs/worlds.md has the command that trains with it.
"""

import argparse
import random
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

HIGH, GUESSES = 8, 4


class Guessing(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("guessing")

        @server.tool
        def guess(number: int) -> str:
            """Guess the number."""
            self._num_guesses += 1
            self._is_found = number == self._number
            if self._is_found:
                return "correct"
            return "higher" if number < self._number else "lower"

        super().__init__(server)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_: Any
    ) -> Observation:
        self._number = random.Random(seed).randint(1, HIGH)
        self._num_guesses, self._is_found = 0, False
        self._state = State(episode_id=episode_id)
        text = f"Guess my number from 1 to {HIGH}. You have {GUESSES} guesses."
        return Observation(metadata={"text": text})

    async def step_async(
        self, action: Action, timeout_s: float | None = None, **more: Any
    ) -> Observation:
        seen = await super().step_async(action, timeout_s=timeout_s, **more)
        if isinstance(action, CallToolAction):
            seen.reward = float(self._is_found)
            seen.done = self._is_found or self._num_guesses == GUESSES
        return seen

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("this game is played by calls of its tools")

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8100)
    app = create_fastapi_app(
        Guessing, CallToolAction, CallToolObservation, max_concurrent_envs=1024
    )
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
